"""Finds `.skeleton` files in a folder and in all folders that it leads to.

Links are followed. Each folder is searched once, however many ways lead to it,
so links may go in circles; a file with two paths is found once. Paths without
links come first.
"""

import collections
from collections.abc import Sequence
import hashlib
import os
import pathlib
import stat
from typing import NamedTuple, NoReturn


class Found(NamedTuple):
  """A search's results.

  Attributes:
    paths: of the files, in the order of their names, no two of one name.
    repeated: (path, reason) of links to nothing, folders that another path
      leads to as well, and other paths of a file.
  """

  paths: list[pathlib.Path]
  repeated: list[tuple[pathlib.Path, str]]


def find(source: pathlib.Path) -> Found:
  """Returns the `.skeleton` files of a folder.

  Args:
    source: the folder.

  Raises:
    FileNotFoundError: there is no such folder, or no such file in it.
    NotADirectoryError: it is a file.
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
  paths, pairs = [], []
  for path in sorted(files, key=lambda path: path.name):
    other = known.setdefault(path.stem, path)
    if other is path:
      paths.append(path)
    elif _are_same(path, other):
      repeated.append((path, f'is the same file as {other}'))
    else:
      pairs.append((other, path))
  if pairs:
    more = f', and so have {len(pairs) - 1:,} more pairs'
    raise ValueError(
        f'{pairs[0][0]} and {pairs[0][1]} have one name'
        f'{more if len(pairs) > 1 else ""}; leave one of them'
    )
  return Found(paths, repeated)


def digest(source: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
  """Returns a name for these files as they are.

  Args:
    source: the folder.
    paths: of files in it.
  """
  # What was converted by other rules has another name.
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


def _walk(
    source: pathlib.Path,
) -> tuple[list[pathlib.Path], list[tuple[pathlib.Path, str]]]:
  """Returns the files of all folders, and what leads to none or none new."""
  files: list[pathlib.Path] = []
  repeated: list[tuple[pathlib.Path, str]] = []
  known: dict[tuple[int, int], pathlib.Path] = {}
  folders = collections.deque([source])
  links: collections.deque[pathlib.Path] = collections.deque()
  while folders or links:
    folder = folders.popleft() if folders else links.popleft()
    try:
      state = folder.stat()
      other = known.setdefault((state.st_dev, state.st_ino), folder)
      if other is not folder:
        repeated.append((folder, f'is the same folder as {other}'))
        continue
      with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
      _refuse(folder, error)
    for entry in entries:
      path = pathlib.Path(entry.path)
      # Some file systems and archivers write names in capitals.
      is_skeleton = path.suffix.lower() == '.skeleton'
      if is_skeleton:
        files.append(path)
      if not entry.is_symlink():
        if entry.is_dir():
          folders.append(path)
        continue
      try:
        if stat.S_ISDIR(path.stat().st_mode):
          links.append(path)
      except PermissionError as error:
        _refuse(path, error)
      except OSError as error:
        if not is_skeleton:  # Else it is read, and skipped.
          repeated.append((path, f'is a link to nothing: {error.strerror}'))
  return files, repeated


def _refuse(folder: pathlib.Path, error: OSError) -> NoReturn:
  raise OSError(
      f'the folder {folder} cannot be read: {error.strerror}; make it readable'
      ' or name a source without it'
  ) from error


def _are_same(path: pathlib.Path, other: pathlib.Path) -> bool:
  try:
    return path.samefile(other)
  except OSError:  # A link to nothing.
    return False
