"""Converts a folder of `.skeleton` files to one array.

    python -m rnnzoo.tasks.motion.ntu_conversion SOURCE DESTINATION

SOURCE is searched with all folders in it and all that it links to, so both
parts of NTU RGB+D 120 may lie side by side. DESTINATION gets the files that
`ntu_arrays` explains, and two lists: skipped.txt has each file or link that was
not converted, with the reason; left_out.txt has each file whose frames or
persons are not all converted, and how many are left out.

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
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from typing import BinaryIO, NamedTuple

import numpy as np
import tqdm

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_search
from rnnzoo.tasks.motion import ntu_tracks

SKIPPED, LEFT_OUT = 'skipped.txt', 'left_out.txt'

# Files that a process reads before it hands over the frames.
_FILES_AT_ONCE = 16

# Codes of an error of a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Result(NamedTuple):
  """The outcome of a conversion.

  Attributes:
    num_converted: number of recordings in the destination.
    num_frames: number of their frames.
    skipped: (file, reason) of each file or link that is not converted.
    left_out: (file, how many frames and persons) of files converted in part.
    num_read: number of files that this call read; 0 if an earlier call
      converted them.
  """

  num_converted: int
  num_frames: int
  skipped: tuple[tuple[str, str], ...]
  left_out: tuple[tuple[str, str], ...]
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
  if num_processes is not None:
    if type(num_processes) is not int or num_processes < 0:
      raise ValueError(
          f'num_processes must be an integer from 0; got {num_processes!r}'
      )
  source, destination = map(fields.expand, (source, destination))
  _check_destination(destination)
  paths, repeated = ntu_search.find(source)
  digest = ntu_search.digest(source, paths)
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
  """Returns a file's frames, and a text of the frames and persons left out.

  For a file that cannot be converted, returns None and the reason.
  """
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
    repeated: ntu_search.Reasons,
    num_processes: int | None,
) -> None:
  """Writes the frames of all files, both lists and the index."""
  names: list[str] = []
  lengths: list[int] = []
  lists: dict[str, ntu_search.Reasons] = {SKIPPED: [], LEFT_OUT: []}
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
    lines = (_line(path.relative_to(source), text) for path, text in entries)
    (destination / name).write_text(''.join(lines), encoding='utf-8')
  if not names:
    partial.unlink()
    raise ValueError(
        f'none of {len(paths)} files could be converted; see'
        f' {destination / SKIPPED}'
    )
  os.replace(partial, destination / ntu_arrays.FRAMES)
  ntu_arrays.write_index(destination, names, lengths, digest)


def _write_header(file: BinaryIO, num_frames: int) -> None:
  """Writes the header of an .npy file, of one size for any number of frames."""
  np.lib.format.write_array_header_1_0(
      file,
      {
          'descr': np.lib.format.dtype_to_descr(np.dtype(np.float32)),
          'fortran_order': False,
          'shape': (num_frames, ntu_tracks.BODIES, ntu_files.JOINTS, 3),
      },
  )


def _line(path: pathlib.Path, reason: str) -> str:
  name, text = str(path), ' '.join(reason.split())
  return f'{ntu_search.printable(name)}\t{ntu_search.printable(text)}\n'


def _listed(path: pathlib.Path) -> tuple[tuple[str, str], ...]:
  lines = path.read_text(encoding='utf-8').splitlines()
  parts = [line.partition('\t') for line in lines]
  return tuple((name, text) for name, _, text in parts)


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
    if isinstance(error, OSError) and error.errno in _FULL:
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
  print(
      f'{result.num_converted:,} recordings with {result.num_frames:,} frames'
      f' are in {destination}'
  )
  if result.num_read:
    print(
        f'{result.num_read:,} files were read in {seconds:.1f} s,'
        f' {result.num_read / seconds:.0f} a second'
    )
  if result.left_out:
    print(
        f'{len(result.left_out):,} files are converted in part; how many frames'
        f' and persons are left out of each is in {destination / LEFT_OUT}'
    )
  if result.skipped:
    print(
        f'{len(result.skipped):,} files or links are skipped; the reasons are'
        f' in {destination / SKIPPED}'
    )


if __name__ == '__main__':
  sys.exit(main())
