"""Converts a folder of `.skeleton` files to one array.

    python -m rnnzoo.tasks.motion.ntu_conversion SOURCE DESTINATION

SOURCE is searched with all folders in it, so both parts of NTU RGB+D 120 may
lie side by side. DESTINATION gets the files that `ntu_arrays` explains, and
skipped.txt: every file that was not converted, with the reason.

Several processes read the files, a block of them at a time, and write each
block as it is done. A conversion that was killed goes on where it was, if it is
started again in the same way.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import process
import contextlib
import hashlib
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from typing import NamedTuple
import zipfile

import numpy as np
import tqdm

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files

SKIPPED = 'skipped.txt'

_BLOCKS = 'blocks'
_BLOCK_FILES = 64


class Result(NamedTuple):
  """How a conversion went.

  Attributes:
    num_converted: recordings that the destination holds.
    num_frames: frames of all of them.
    skipped: (file, reason) of all others.
    num_read: files that this call read; an earlier one may have read some.
  """

  num_converted: int
  num_frames: int
  skipped: tuple[tuple[str, str], ...]
  num_read: int


class _Block(NamedTuple):
  """Recordings of some files.

  Attributes:
    frames: float32 [frames, 2, 25, 3].
    lengths: of the converted ones.
    names: of the converted ones.
    skipped: files that are not converted.
    reasons: why.
  """

  frames: np.ndarray
  lengths: np.ndarray
  names: np.ndarray
  skipped: np.ndarray
  reasons: np.ndarray


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    num_processes: int | None = None,
    block_files: int = _BLOCK_FILES,
) -> Result:
  """Converts all `.skeleton` files of a folder and the folders in it.

  Args:
    source: the folder.
    destination: another one, which is made; files of an earlier call with the
      same source are used.
    num_processes: how many read files; None for one a core, 0 for none beside
      this one.
    block_files: how many files are written together.

  Raises:
    FileNotFoundError: there is no such source, or no `.skeleton` file in it.
    ValueError: two files have one name, no file can be converted, or the
      destination holds another conversion.
    OSError: the disk is full, say.
  """
  source, destination = pathlib.Path(source), pathlib.Path(destination)
  paths = _find(source)
  digest = _digest(source, paths)
  before = ntu_arrays.read_source(destination)
  if before not in (None, digest):
    raise ValueError(
        f'{destination} holds what other files were converted to; name another'
        ' folder'
    )
  blocks = destination / _BLOCKS / digest
  num_read = 0
  if before is None:
    blocks.mkdir(parents=True, exist_ok=True)
    jobs = [
        (source, paths[start : start + block_files], blocks / f'{start}.npz')
        for start in range(0, len(paths), block_files)
    ]
    num_read = _convert_blocks(jobs, num_processes)
    _join(destination, [path for _, _, path in jobs], digest)
  # A kill may have come between the index and this.
  _remove_blocks(destination / _BLOCKS)
  return _result(destination, num_read)


def _find(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns the paths of all files, in the order of their names."""
  if not source.is_dir():
    raise FileNotFoundError(f'the folder {source} does not exist')
  # Some file systems and archivers write names in capitals.
  paths = sorted(
      (p for p in source.rglob('*') if p.suffix.lower() == '.skeleton'),
      key=lambda path: path.name,
  )
  if not paths:
    raise FileNotFoundError(f'{source} has no .skeleton file')
  known: dict[str, pathlib.Path] = {}
  for path in paths:
    other = known.setdefault(path.stem, path)
    if other is not path:
      raise ValueError(f'{other} and {path} have one name; leave one of them')
  return paths


def _digest(source: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
  """Returns a name for these files as they are."""
  digest = hashlib.sha256()
  for path in paths:
    try:
      state = path.stat()
    except OSError:  # A link to nothing, which is skipped.
      state = path.lstat()
    name = _printable(str(path.relative_to(source)))
    digest.update(f'{name} {state.st_size} {state.st_mtime_ns}\n'.encode())
  return digest.hexdigest()[:16]


def _printable(text: str) -> str:
  r"""Returns a text in one line of UTF-8: other characters become '\x..'."""
  text = os.fsencode(text).decode('utf-8', 'backslashreplace')
  return ''.join(
      char if char.isprintable() else char.encode('unicode_escape').decode()
      for char in text
  )


def _convert_blocks(jobs, num_processes: int | None) -> int:
  """Converts the blocks that are not there yet; returns of how many files."""
  left = [job for job in jobs if not _is_whole(job[-1])]
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
        bar.update(_convert_block(*job))
      return count
    with futures.ProcessPoolExecutor(
        min(num_processes or os.cpu_count() or 1, max(len(left), 1)),
        # A fork would copy the threads' locks as well.
        mp_context=multiprocessing.get_context('spawn'),
        initializer=_end_with_parent,
    ) as pool:
      running = [pool.submit(_convert_block, *job) for job in left]
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


def _convert_block(
    source: pathlib.Path, paths: Sequence[pathlib.Path], block: pathlib.Path
) -> int:
  """Writes a block and returns of how many files it is."""
  frames = [np.zeros((0, ntu_files.BODIES, ntu_files.JOINTS, 3), np.float32)]
  names, skipped, reasons = [], [], []
  for path in paths:
    try:
      name = ntu_files.parse_name(path.name).text()
      frames.append(ntu_files.arrange(ntu_files.read(path)))
      names.append(name)
    except (ValueError, OSError) as error:
      skipped.append(_printable(str(path.relative_to(source))))
      reasons.append(_printable(' '.join(str(error).split())))
  partial = block.with_suffix('.part')
  with partial.open('wb') as file:
    content = _Block(
        np.concatenate(frames),
        np.array([len(part) for part in frames[1:]], np.int32),
        np.array(names, str),
        np.array(skipped, str),
        np.array(reasons, str),
    )
    np.savez(file, **content._asdict())
  os.replace(partial, block)
  return len(paths)


def _is_whole(block: pathlib.Path) -> bool:
  """Returns whether a block is there; a crash of the machine may cut it."""
  return block.is_file() and zipfile.is_zipfile(block)


def _read_block(path: pathlib.Path) -> _Block:
  with np.load(path, allow_pickle=False) as content:
    return _Block(*(content[field] for field in _Block._fields))


def _join(
    destination: pathlib.Path, paths: Sequence[pathlib.Path], digest: str
) -> None:
  """Writes the frames of all blocks as one array, the list, and the index."""
  names: list[str] = []
  lengths: list[int] = []
  skipped: list[str] = []
  for path in paths:
    block = _read_block(path)
    names += block.names.tolist()
    lengths += block.lengths.tolist()
    for name, reason in zip(block.skipped, block.reasons, strict=True):
      skipped.append(f'{name}\t{reason}\n')
  (destination / SKIPPED).write_text(''.join(skipped), encoding='utf-8')
  if not names:
    raise ValueError(
        f'none of {len(skipped)} files could be converted; see'
        f' {destination / SKIPPED}'
    )
  partial = destination / (ntu_arrays.FRAMES + '.part')
  frames = np.lib.format.open_memmap(
      partial,
      'w+',
      np.float32,
      (sum(lengths), ntu_files.BODIES, ntu_files.JOINTS, 3),
  )
  start = 0
  for path in paths:
    part = _read_block(path).frames
    frames[start : start + len(part)] = part
    start += len(part)
  frames.flush()
  os.replace(partial, destination / ntu_arrays.FRAMES)
  ntu_arrays.write_index(destination, names, lengths, digest)


def _remove_blocks(folder: pathlib.Path) -> None:
  """Removes the blocks of all conversions; what else is there stays."""
  for path in folder.glob('*'):
    if re.fullmatch('[0-9a-f]{16}', path.name):
      shutil.rmtree(path, ignore_errors=True)
  with contextlib.suppress(OSError):  # It is not there, or not empty.
    folder.rmdir()


def _result(destination: pathlib.Path, num_read: int) -> Result:
  recordings = ntu_arrays.read(destination)
  lines = (destination / SKIPPED).read_text(encoding='utf-8').splitlines()
  return Result(
      len(recordings.names),
      len(recordings.frames),
      tuple((line.split('\t')[0], line.split('\t', 1)[1]) for line in lines),
      num_read,
  )


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m rnnzoo.tasks.motion.ntu_conversion',
      description='Converts a folder of .skeleton files to one array.',
  )
  parser.add_argument('source', help='folder of .skeleton files')
  parser.add_argument('destination', help='folder of the result')
  parser.add_argument(
      '--num_processes', type=int, help='one a core, if not given'
  )
  given = parser.parse_args(arguments)
  if given.num_processes is not None and given.num_processes < 0:
    parser.error('--num_processes must be 0 or more')
  start = time.monotonic()
  try:
    result = convert(given.source, given.destination, given.num_processes)
  except (OSError, ValueError) as error:
    print(f'error: {error}', file=sys.stderr)
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
  if result.skipped:
    print(
        f'{len(result.skipped):,} files are skipped; the reasons are in'
        f' {pathlib.Path(given.destination) / SKIPPED}'
    )
  return 0


if __name__ == '__main__':
  sys.exit(main())
