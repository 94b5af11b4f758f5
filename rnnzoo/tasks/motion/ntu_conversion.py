"""Converts a folder of `.skeleton` files to one array.

    python -m rnnzoo.tasks.motion.ntu_conversion SOURCE DESTINATION

SOURCE is searched with all folders in it and all that it links to, so both
parts of NTU RGB+D 120 may lie side by side. Each folder is searched once,
however many ways lead to it, so links may go in circles; a file with two paths
is found once, and paths without links come first. DESTINATION gets the files
that `ntu_arrays` explains, and two lists: skipped.txt has each file or link
that was not converted, with the reason; left_out.txt has each file whose frames
or persons are not all converted, and how many are left out.

Several processes read the files; this one writes the frames in order. The index
is written last, so a conversion that was killed starts anew.
"""

import argparse
from collections.abc import Generator, Iterator, Sequence
from concurrent import futures
from concurrent.futures import process
import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import tqdm

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_tracks

SKIPPED, LEFT_OUT = 'skipped.txt', 'left_out.txt'

# Files that a process reads before it hands over the frames.
_FILES_AT_ONCE = 16

# (path, reason) of files, links and folders.
_Reasons = list[tuple[pathlib.Path, str]]


class Result(NamedTuple):
  """The outcome of a conversion."""

  num_converted: int  # Number of recordings in the destination.
  num_frames: int  # Number of their frames.
  # (file, reason) of each file or link that is not converted.
  skipped: tuple[tuple[str, str], ...]
  # (file, how many frames and persons) of files converted in part.
  left_out: tuple[tuple[str, str], ...]
  # Number of files that this call read; 0 if an earlier call converted them.
  num_read: int


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    num_processes: int | None = None,
) -> Result:
  """Converts all `.skeleton` files of a folder and the folders it leads to.

  Args:
    source: the folder. Links in it are followed.
    destination: the folder of the result, which is made.
    num_processes: number of processes that read files; None for one a core, 0
      for none beside this one.

  Raises:
    FileNotFoundError: there is no such source, or no `.skeleton` file in it.
    NotADirectoryError: the source or the destination is a file.
    ValueError: two files have one name, no file can be converted, the
      destination holds another conversion or a damaged one, or is in use by
      one.
    OSError: a folder cannot be read, or the disk is full, say.
  """
  given = num_processes
  if given is not None and (type(given) is not int or given < 0):
    raise ValueError(f'num_processes must be an integer from 0; got {given!r}')
  source, destination = map(fields.expand, (source, destination))
  _check_destination(destination)
  paths, repeated = _find(source)
  digest = _digest(source, paths)
  try:
    destination.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise OSError(
        f'the destination {destination} cannot be made: {error.strerror}'
    ) from error
  with _locked(destination):
    num_read = 0
    if not (destination / ntu_arrays.INDEX).is_file():
      num_read = len(paths)
      _write(destination, digest, source, paths, repeated, num_processes)
    try:
      if ntu_arrays.read_index(destination)['source'] == digest:
        recordings = ntu_arrays.read(destination)
        return Result(
            len(recordings.names),
            sum(map(len, recordings.frames)),
            _listed(destination / SKIPPED),
            _listed(destination / LEFT_OUT),
            num_read,
        )
    except (FileNotFoundError, ValueError) as error:
      raise ValueError(
          f'{destination} holds a conversion that is not whole: {error}. Remove'
          f' {destination / ntu_arrays.INDEX} and start the conversion again'
      ) from error
  raise ValueError(
      f'{destination} holds what other files were converted to, or the same'
      ' before they or this program changed; name another folder'
  )


def _check_destination(destination: pathlib.Path) -> None:
  """Raises NotADirectoryError where something else is in a folder's place."""
  for path in (destination, *destination.parents):
    if os.path.lexists(path):
      if not os.path.isdir(path):
        kind = 'a file' if os.path.exists(path) else 'a link to nothing'
        raise NotADirectoryError(
            f'the destination {destination} cannot be made, because {path} is'
            f' {kind}; name a folder, or one that can be made'
        )
      return


def _find(source: pathlib.Path) -> tuple[list[pathlib.Path], _Reasons]:
  """Returns `.skeleton` files by name, and links to nothing or nothing new."""
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
    more = f', and so have {len(pairs) - 1:,} more pairs' if pairs[1:] else ''
    one, other = pairs[0]
    raise ValueError(
        f'{one} and {other} have one name{more}; leave one of them'
    )
  return list(known.values()), repeated


def _walk(source: pathlib.Path) -> tuple[list[pathlib.Path], _Reasons]:
  """Returns the files of all folders, and links, as `_find` does."""
  files: list[pathlib.Path] = []
  repeated: _Reasons = []
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


def _digest(source: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
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
    name = _printable(path.relative_to(source))
    line = f'{name} {state.st_size} {state.st_mtime_ns}{suffix}\n'
    result.update(line.encode())
  return result.hexdigest()[:16]


def _printable(text: str | os.PathLike[str]) -> str:
  r"""Returns a text in one line of UTF-8: other characters become '\x..'."""
  text = os.fsencode(text).decode('utf-8', 'backslashreplace')
  return ''.join(
      char if char.isprintable() else char.encode('unicode_escape').decode()
      for char in text
  )


@contextlib.contextmanager
def _locked(destination: pathlib.Path) -> Iterator[None]:
  """Keeps other conversions out of a folder, until the end of this one."""
  descriptor = os.open(destination, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    os.close(descriptor)
    raise ValueError(
        f'{destination} is in use by another conversion; wait for its end, or'
        ' name another folder'
    ) from error
  except OSError as error:  # Some network file systems have no locks.
    print(
        f'WARNING: {destination} cannot be locked ({error.strerror}); no other'
        ' conversion may use it now.',
        file=sys.stderr,
    )
  try:
    yield
  finally:
    os.close(descriptor)


def _read_all(
    paths: Sequence[pathlib.Path], num_processes: int | None
) -> Generator[tuple[np.ndarray | None, str], None, None]:
  """Returns the result of `_read` for each file, in order."""
  if num_processes == 0:
    yield from map(_read, paths)
    return
  with futures.ProcessPoolExecutor(
      min(num_processes or os.cpu_count() or 1, len(paths)),
      # A fork would copy the threads' locks as well.
      mp_context=multiprocessing.get_context('spawn'),
      initializer=_end_with_parent,
  ) as pool:
    try:
      yield from pool.map(_read, paths, chunksize=_FILES_AT_ONCE)
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise


def _end_with_parent() -> None:
  """Ends this process when the one that started it is killed."""

  def wait():
    parent = multiprocessing.parent_process()
    if parent is not None:
      parent.join()
      os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _read(path: pathlib.Path) -> tuple[np.ndarray | None, str]:
  """Returns frames and a text of what is left out; or None and the reason."""
  try:
    ntu_files.parse_name(path.name)
    return ntu_tracks.read(path)
  except (ValueError, OSError) as error:
    return None, str(error)


def _write(
    destination: pathlib.Path,
    digest: str,
    source: pathlib.Path,
    paths: Sequence[pathlib.Path],
    repeated: _Reasons,
    num_processes: int | None,
) -> None:
  """Writes the frames of all files, both lists and the index."""
  names: list[str] = []
  lengths: list[int] = []
  lists: dict[str, _Reasons] = {SKIPPED: [], LEFT_OUT: []}
  partial = destination / (ntu_arrays.FRAMES + '.part')
  bar = tqdm.tqdm(
      paths,
      unit='file',
      dynamic_ncols=True,
      disable=not sys.stderr.isatty(),
  )
  results = _read_all(paths, num_processes)
  with partial.open('wb') as file, bar, contextlib.closing(results):
    _write_header(file, 0)
    for path, (frames, text) in zip(bar, results, strict=True):
      if text:
        lists[SKIPPED if frames is None else LEFT_OUT].append((path, text))
      if frames is not None:
        names.append(path.stem)
        lengths.append(len(frames))
        file.write(frames.tobytes())
    file.seek(0)
    _write_header(file, sum(lengths))
    file.flush()
    os.fsync(file.fileno())
  lists[SKIPPED] += repeated
  for name, entries in lists.items():
    lines = (
        f'{_printable(path.relative_to(source))}\t'
        f'{_printable(" ".join(text.split()))}\n'
        for path, text in entries
    )
    (destination / name).write_text(''.join(lines), encoding='utf-8')
  if not names:
    partial.unlink()
    raise ValueError(
        f'none of {len(paths)} files could be converted; see'
        f' {destination / SKIPPED}'
    )
  os.replace(partial, destination / ntu_arrays.FRAMES)
  content = {'source': digest, 'names': names, 'lengths': lengths}
  partial = destination / (ntu_arrays.INDEX + '.part')
  partial.write_text(json.dumps(content), encoding='utf-8')
  os.replace(partial, destination / ntu_arrays.INDEX)


def _write_header(file: BinaryIO, num_frames: int) -> None:
  """Writes the header of an .npy file, of one size for any number of frames."""
  frame = np.empty((0, *ntu_tracks.FRAME), np.float32)
  header = np.lib.format.header_data_from_array_1_0(frame)
  header['shape'] = (num_frames, *ntu_tracks.FRAME)
  np.lib.format.write_array_header_1_0(file, header)


def _listed(path: pathlib.Path) -> tuple[tuple[str, str], ...]:
  lines = path.read_text(encoding='utf-8').splitlines()
  return tuple(line.partition('\t')[::2] for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m rnnzoo.tasks.motion.ntu_conversion',
      description='Converts a folder of .skeleton files to one array.',
  )
  parser.add_argument('source', help='folder of .skeleton files')
  parser.add_argument('destination', help='folder of the result')
  parser.add_argument(
      '--num_processes',
      type=int,
      help='how many read files; one a core, if not given; 0 for none beside'
      ' this one',
  )
  given = parser.parse_args(arguments)
  start = time.monotonic()
  try:
    result = convert(given.source, given.destination, given.num_processes)
  except (OSError, ValueError) as error:
    print(f'error: {error}', file=sys.stderr)
    full = errno.ENOSPC, errno.EDQUOT
    if isinstance(error, OSError) and error.errno in full:
      print(
          f'the disk of {given.destination} is full; make room and start the'
          ' conversion again',
          file=sys.stderr,
      )
    return 1
  except process.BrokenProcessPool:
    print(
        'error: a process that read files was killed; start the conversion'
        ' again, with fewer --num_processes if memory was short',
        file=sys.stderr,
    )
    return 1
  except KeyboardInterrupt:
    print('interrupted; start the conversion again', file=sys.stderr)
    return 130
  _print_result(result, pathlib.Path(given.destination), start)
  return 0


def _print_result(
    result: Result, destination: pathlib.Path, start: float
) -> None:
  seconds = time.monotonic() - start
  for count, text in (
      (
          result.num_converted,
          f'recordings with {result.num_frames:,} frames are in {destination}',
      ),
      (
          result.num_read,
          f'files were read in {seconds:.1f} s, {result.num_read / seconds:.0f}'
          ' a second',
      ),
      (
          len(result.left_out),
          'files are converted in part; how many frames and persons are left'
          f' out of each is in {destination / LEFT_OUT}',
      ),
      (
          len(result.skipped),
          'files or links are skipped; the reasons are in'
          f' {destination / SKIPPED}',
      ),
  ):
    if count:
      print(f'{count:,} {text}')


if __name__ == '__main__':
  sys.exit(main())
