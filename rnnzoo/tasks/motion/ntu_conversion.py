"""Converts a folder of `.skeleton` files to one array.

    python -m rnnzoo.tasks.motion.ntu_conversion SOURCE DESTINATION

SOURCE is searched with all folders in it and all that it links to, so both
parts of NTU RGB+D 120 may lie side by side. DESTINATION gets the files that
`ntu_arrays` explains, and skipped.txt: every file that was not converted, every
link to nothing, and every link to a file or folder that is there without it,
with the reason. left_out.txt lists files whose frames or persons are not all
converted, and how many are left out. Meanwhile it needs twice the space.

Several processes read the files, a block of them at a time, and write each
block as it is done. A conversion that was killed goes on where it was, if it is
started again in the same way.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import process
import contextlib
import errno
import fcntl
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import tqdm

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_blocks
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_search

SKIPPED, LEFT_OUT = 'skipped.txt', 'left_out.txt'

_BLOCKS = 'blocks'
_BLOCK_FILES = 64

# Codes of a write where no more fits.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Result(NamedTuple):
  """How a conversion went.

  Attributes:
    num_converted: recordings that the destination holds.
    num_frames: frames of all of them.
    skipped: (file, reason) of all others.
    left_out: (file, how many frames and persons) of files converted in part.
    num_read: files that this call read; an earlier one may have read some.
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
    block_files: int = _BLOCK_FILES,
) -> Result:
  """Converts all `.skeleton` files of a folder and the folders it leads to.

  Args:
    source: the folder. Links in it are followed.
    destination: another one, which is made; files of an earlier call with the
      same source are used.
    num_processes: how many read files; None for one a core, 0 for none beside
      this one.
    block_files: how many files are written together.

  Raises:
    FileNotFoundError: there is no such source, or no `.skeleton` file in it.
    NotADirectoryError: the source or the destination is a file.
    ValueError: two files have one name, no file can be converted, the
      destination holds another conversion or a damaged one, or is in use by
      one.
    OSError: a folder cannot be read, or the disk is full, say.
  """
  if num_processes is not None:
    _check_integer('num_processes', num_processes, 0)
  _check_integer('block_files', block_files, 1)
  source, destination = map(fields.expand, (source, destination))
  _check_destination(destination)
  found = ntu_search.find(source)
  digest = ntu_search.digest(source, found.paths)
  try:
    destination.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise OSError(
        f'the destination {destination} cannot be made: {error.strerror}'
    ) from error
  with _locked(destination):
    with _mended_by_hand(destination):
      before = ntu_arrays.read_source(destination)
    if before not in (None, digest):
      raise ValueError(
          f'{destination} holds what other files were converted to, or the same'
          ' before they or this program changed; name another folder'
      )
    num_read = 0
    if before is None:
      # Blocks of another size hold other files.
      blocks = destination / _BLOCKS / digest / str(block_files)
      blocks.mkdir(parents=True, exist_ok=True)
      jobs = [
          (
              source,
              found.paths[start : start + block_files],
              blocks / f'{start}.npz',
          )
          for start in range(0, len(found.paths), block_files)
      ]
      num_read = _convert_blocks(jobs, num_processes)
      repeated = [
          ntu_blocks.listed_line(source, path, reason)
          for path, reason in found.repeated
      ]
      _join(destination, [path for _, _, path in jobs], repeated, digest)
    # A kill may have come between the index and this.
    _remove_blocks(destination / _BLOCKS)
    return _result(destination, num_read)


def _check_integer(name: str, value: object, least: int) -> None:
  if type(value) is not int or value < least:
    raise ValueError(f'{name} must be an integer from {least}; got {value!r}')


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
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
          f'{destination} is in use by another conversion; wait for its end,'
          ' or name another folder'
      ) from error
    except OSError as error:  # Some network file systems have no locks.
      print(
          f'WARNING: {destination} cannot be locked ({error.strerror}); no'
          ' other conversion may use it now.',
          file=sys.stderr,
      )
    yield
  finally:
    os.close(descriptor)


def _convert_blocks(jobs, num_processes: int | None) -> int:
  """Converts the blocks that are not there yet; returns of how many files."""
  left = [job for job in jobs if not ntu_blocks.is_whole(job[-1])]
  total = sum(len(paths) for _, paths, _ in jobs)
  count = sum(len(paths) for _, paths, _ in left)
  bar = tqdm.tqdm(
      total=total,
      initial=total - count,
      unit='file',
      dynamic_ncols=True,
      disable=not sys.stderr.isatty(),
  )
  with bar:
    if num_processes == 0:
      for job in left:
        bar.update(ntu_blocks.convert(*job))
      return count
    with futures.ProcessPoolExecutor(
        min(num_processes or os.cpu_count() or 1, max(len(left), 1)),
        # A fork would copy the threads' locks as well.
        mp_context=multiprocessing.get_context('spawn'),
        initializer=_end_with_parent,
    ) as pool:
      running = [pool.submit(ntu_blocks.convert, *job) for job in left]
      try:
        for done in futures.as_completed(running):
          bar.update(done.result())
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
  return count


def _end_with_parent() -> None:
  """Ends this process when the one that started it is killed."""

  def wait():
    parent = multiprocessing.parent_process()
    if parent is not None:
      parent.join()
      os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _join(
    destination: pathlib.Path,
    paths: Sequence[pathlib.Path],
    repeated: Sequence[str],
    digest: str,
) -> None:
  """Writes the frames of all blocks as one array, the list, and the index."""
  names: list[str] = []
  lengths: list[int] = []
  skipped: list[str] = []
  left_out: list[str] = []
  for path in paths:
    block = ntu_blocks.read(path)
    names += block.names.tolist()
    lengths += block.lengths.tolist()
    skipped += block.skipped.tolist()
    left_out += block.left_out.tolist()
  for name, lines in ((SKIPPED, [*skipped, *repeated]), (LEFT_OUT, left_out)):
    (destination / name).write_text(
        ''.join(f'{line}\n' for line in lines), encoding='utf-8'
    )
  if not names:
    raise ValueError(
        f'none of {len(skipped)} files could be converted; see'
        f' {destination / SKIPPED}'
    )
  partial = destination / (ntu_arrays.FRAMES + '.part')
  # Not mapped into memory: a full disk would end this process by a signal.
  with partial.open('wb') as file:
    np.lib.format.write_array_header_1_0(
        file,
        {
            'descr': np.lib.format.dtype_to_descr(np.dtype(np.float32)),
            'fortran_order': False,
            'shape': (sum(lengths), ntu_files.BODIES, ntu_files.JOINTS, 3),
        },
    )
    for path in paths:
      file.write(ntu_blocks.read(path).frames.tobytes())
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, destination / ntu_arrays.FRAMES)
  ntu_arrays.write_index(destination, names, lengths, digest)


def _remove_blocks(folder: pathlib.Path) -> None:
  """Removes the blocks of all conversions; what else is there stays."""
  for path in folder.glob('*'):
    if re.fullmatch('[0-9a-f]{16}', path.name):
      shutil.rmtree(path, ignore_errors=True)
  with contextlib.suppress(OSError):  # It is not there, or not empty.
    folder.rmdir()


@contextlib.contextmanager
def _mended_by_hand(destination: pathlib.Path) -> Iterator[None]:
  """Says how a folder that is read becomes a whole one."""
  try:
    yield
  except (FileNotFoundError, ValueError) as error:
    raise ValueError(
        f'{destination} holds a conversion that is not whole: {error}. Remove'
        f' {destination / ntu_arrays.INDEX} and start the conversion again'
    ) from error


def _result(destination: pathlib.Path, num_read: int) -> Result:
  with _mended_by_hand(destination):
    recordings = ntu_arrays.read(destination)
    return Result(
        len(recordings.names),
        len(recordings.frames),
        _listed(destination / SKIPPED),
        _listed(destination / LEFT_OUT),
        num_read,
    )


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
  if given.num_processes is not None and given.num_processes < 0:
    parser.error('--num_processes must be 0 or more')
  start = time.monotonic()
  try:
    result = convert(given.source, given.destination, given.num_processes)
  except (OSError, ValueError) as error:
    print(f'error: {error}', file=sys.stderr)
    if isinstance(error, OSError) and error.errno in _FULL:
      print(
          f'the disk of {given.destination} is full; make room and start the'
          ' conversion again to go on',
          file=sys.stderr,
      )
    return 1
  except process.BrokenProcessPool:
    print(
        'error: a process that read files was killed; start the conversion'
        ' again to go on, with fewer --num_processes if memory was short',
        file=sys.stderr,
    )
    return 1
  except KeyboardInterrupt:
    print('interrupted; start the conversion again to go on', file=sys.stderr)
    return 130
  seconds = time.monotonic() - start
  print(
      f'{result.num_converted:,} recordings with {result.num_frames:,} frames'
      f' are in {given.destination}'
  )
  if result.num_read:
    print(
        f'{result.num_read:,} files were read in {seconds:.1f} s,'
        f' {result.num_read / seconds:.0f} a second'
    )
  if result.left_out:
    print(
        f'{len(result.left_out):,} files are converted in part; how many frames'
        ' and persons are left out of each is in'
        f' {pathlib.Path(given.destination) / LEFT_OUT}'
    )
  if result.skipped:
    print(
        f'{len(result.skipped):,} files or links are skipped; the reasons are'
        f' in {pathlib.Path(given.destination) / SKIPPED}'
    )
  return 0


if __name__ == '__main__':
  sys.exit(main())
