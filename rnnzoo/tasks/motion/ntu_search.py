"""Finds `.skeleton` files in a folder and in all folders that it leads to.

Links are followed. Each folder is searched once, however many ways lead to it,
so links may go in circles; a file with two paths is found once. Paths without
links come first.
"""

from collections.abc import Sequence
import hashlib
import os
import pathlib
from typing import NoReturn

# (path, reason) of links, files and folders that are not searched.
Reasons = list[tuple[pathlib.Path, str]]


def find(source: pathlib.Path) -> tuple[list[pathlib.Path], Reasons]:
  """Returns the `.skeleton` files of a folder, and paths left out.

  Returns:
    The files in the order of their names, no two of one name; and links to
    nothing, folders that another path leads to as well, and other paths of a
    file.

  Raises:
    FileNotFoundError: there is no such folder, or no such file in it.
    NotADirectoryError: the source is a file.
    OSError: a folder cannot be read.
    ValueError: two files have one name.
  """
  if not os.path.lexists(source):
    raise FileNotFoundError(f'the folder {source} does not exist')
  if not os.path.exists(source):
    raise FileNotFoundError(
        f'the source {source} is a link to {os.readlink(source)}, which does'
        ' not exist'
    )
  if not os.path.isdir(source):
    raise NotADirectoryError(
        f'the source {source} is a file; name the folder that it is in, all of'
        ' whose .skeleton files are converted'
    )
  files, repeated = _walk(source)
  if not files:
    raise FileNotFoundError(f'{source} has no .skeleton file')
  known: dict[str, pathlib.Path] = {}
  pairs = []
  for path in sorted(files, key=lambda path: path.name):
    other = known.setdefault(path.stem, path)
    if other is path:
      continue
    # A link to nothing is no file, and counts as none.
    if path.exists() and other.exists() and path.samefile(other):
      repeated.append((path, f'is the same file as {other}'))
    else:
      pairs.append((other, path))
  if pairs:
    more = f', and so have {len(pairs) - 1:,} more pairs'
    raise ValueError(
        f'{pairs[0][0]} and {pairs[0][1]} have one name'
        f'{more if len(pairs) > 1 else ""}; leave one of them'
    )
  return list(known.values()), repeated


def _walk(source: pathlib.Path) -> tuple[list[pathlib.Path], Reasons]:
  """Returns the files of all folders, and links to nothing or nothing new."""
  files: list[pathlib.Path] = []
  repeated: Reasons = []
  known: dict[tuple[int, int], pathlib.Path] = {}
  # Links to folders are added while folders are searched.
  roots = [source]
  for root in roots:
    for name, folders, others in os.walk(root, onerror=_refuse):
      folder = pathlib.Path(name)
      state = folder.stat()
      other = known.setdefault((state.st_dev, state.st_ino), folder)
      if other is not folder:
        repeated.append((folder, f'is the same folder as {other}'))
        folders.clear()
        continue
      folders.sort()
      roots += [folder / x for x in folders if (folder / x).is_symlink()]
      for path in sorted(folder / x for x in (*folders, *others)):
        # Some file systems and archivers write names in capitals.
        if path.suffix.lower() == '.skeleton':
          files.append(path)
        elif path.is_symlink():
          try:
            path.stat()
          except PermissionError as error:
            _refuse(error)
          except OSError as error:
            repeated.append((path, f'is a link to nothing: {error.strerror}'))
  return files, repeated


def _refuse(error: OSError) -> NoReturn:
  raise OSError(
      f'the folder {error.filename} cannot be read: {error.strerror}; make it'
      ' readable or name a source without it'
  ) from error


def digest(source: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
  """Returns a name for these files as they are."""
  # Arrays converted by other rules have another name.
  result = hashlib.sha256(b'persons')
  for path in paths:
    suffix = ''
    try:
      state = path.stat()
      # Whoever makes it readable wants it converted.
      suffix = '' if os.access(path, os.R_OK) else ' unreadable'
    except OSError:  # A link to nothing, which is skipped.
      state = path.lstat()
    name = printable(str(path.relative_to(source)))
    result.update(
        f'{name} {state.st_size} {state.st_mtime_ns}{suffix}\n'.encode()
    )
  return result.hexdigest()[:16]


def printable(text: str) -> str:
  r"""Returns a text in one line of UTF-8: other characters become '\x..'."""
  text = os.fsencode(text).decode('utf-8', 'backslashreplace')
  return ''.join(
      char if char.isprintable() else char.encode('unicode_escape').decode()
      for char in text
  )
