"""Converts a folder of `.skeleton` files to one array.

    python -m rnnzoo.tasks.motion.ntu_conversion SOURCE DESTINATION

SOURCE is searched with all folders in it, so both parts of NTU RGB+D 120 may
lie side by side. DESTINATION gets the files that `ntu_arrays` explains, and two
lists: skipped.txt has each file that was not converted, with the reason;
left_out.txt has each file whose frames or persons are not all converted, and
how many are left out.

Several processes read the files; this one writes the frames in order. The index
is written last, so a conversion that was killed starts anew.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import process
import contextlib
import json
import os
import pathlib
import sys
from typing import BinaryIO, NamedTuple

import joblib
import numpy as np
import tqdm

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_tracks

SKIPPED, LEFT_OUT = 'skipped.txt', 'left_out.txt'


class Result(NamedTuple):
  """The outcome of a conversion."""

  num_converted: int  # Number of recordings in the destination.
  num_frames: int  # Number of their frames.
  # (file, reason) of each file that is not converted.
  skipped: tuple[tuple[str, str], ...]
  # (file, how many frames and persons) of files converted in part.
  left_out: tuple[tuple[str, str], ...]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    num_processes: int = -1,
) -> Result:
  """Converts all `.skeleton` files of a folder and the folders in it.

  Args:
    source: the folder.
    destination: the folder of the result, which is made. One that holds a
      result is refused.
    num_processes: number of processes that read files, as joblib counts: -1 for
      one a core.

  Raises:
    OSError: a folder cannot be read or made, or the disk is full, say.
  """
  source = fields.expand(source)
  destination = fields.expand_directory(destination, 'destination')
  if (destination / ntu_arrays.INDEX).exists():
    raise ValueError(
        f'{destination} holds a conversion; name another folder, or remove its'
        f' {ntu_arrays.INDEX}'
    )
  lists = _write(destination, source, _find(source), num_processes)
  recordings = ntu_arrays.read(destination)
  return Result(
      len(recordings.names),
      sum(map(len, recordings.frames)),
      *map(tuple, lists.values()),
  )


def _find(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns `.skeleton` files by name."""
  if not source.is_dir():
    raise FileNotFoundError(
        f'the source {source} is no folder; name the one that the .skeleton'
        ' files are in'
    )
  files: dict[str, pathlib.Path] = {}
  for path in sorted(source.rglob('*')):
    # Some file systems and archivers write names in capitals.
    if path.suffix.lower() == '.skeleton':
      if (other := files.setdefault(path.stem, path)) is not path:
        raise ValueError(
            f'{other} and {path} have one name; a recording may be there once'
        )
  if not files:
    raise FileNotFoundError(f'{source} has no .skeleton file')
  return sorted(files.values(), key=lambda path: path.name)


def _read(path: pathlib.Path) -> tuple[np.ndarray | None, str]:
  """Returns frames and a text of what is left out; or None and the reason."""
  try:
    ntu_files.parse_name(path.name)
    return ntu_tracks.read(path)
  except (ValueError, OSError) as error:
    return None, str(error)


def _write(
    destination: pathlib.Path,
    source: pathlib.Path,
    paths: Sequence[pathlib.Path],
    num_processes: int,
) -> dict[str, list[tuple[str, str]]]:
  """Writes the frames of all files, both lists and the index.

  Returns:
    The lists, of (file, reason), by their names.
  """
  names: list[str] = []
  lengths: list[int] = []
  lists: dict[str, list[tuple[str, str]]] = {SKIPPED: [], LEFT_OUT: []}
  destination.mkdir(parents=True, exist_ok=True)
  array = destination / ntu_arrays.FRAMES
  bar = tqdm.tqdm(paths, unit='file', dynamic_ncols=True, disable=None)
  parallel = joblib.Parallel(num_processes, return_as='generator')
  results = parallel(joblib.delayed(_read)(path) for path in paths)
  with array.open('wb') as file, bar, contextlib.closing(results):
    _write_header(file, 0)
    for path, (frames, text) in zip(bar, results, strict=True):
      if text:
        entry = str(path.relative_to(source)), ' '.join(text.split())
        lists[SKIPPED if frames is None else LEFT_OUT].append(entry)
      if frames is not None:
        names.append(path.stem)
        lengths.append(len(frames))
        file.write(frames.tobytes())
    file.seek(0)
    _write_header(file, sum(lengths))
    file.flush()
    os.fsync(file.fileno())
    for name, entries in lists.items():
      lines = ''.join(f'{path}\t{reason}\n' for path, reason in entries)
      (destination / name).write_bytes(os.fsencode(lines))
    if not names:
      array.unlink()
      raise ValueError(
          f'none of {len(paths)} files could be converted; see'
          f' {destination / SKIPPED}'
      )
    content = {'names': names, 'lengths': lengths}
    partial = destination / (ntu_arrays.INDEX + '.part')
    partial.write_text(json.dumps(content), encoding='utf-8')
    os.replace(partial, destination / ntu_arrays.INDEX)
  return lists


def _write_header(file: BinaryIO, num_frames: int) -> None:
  """Writes the header of an .npy file, of one size for any number of frames."""
  shape = (num_frames, *ntu_tracks.FRAME)
  header = {'descr': '<f4', 'fortran_order': False, 'shape': shape}
  np.lib.format.write_array_header_1_0(file, header)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the program and returns its exit code."""
  parser = argparse.ArgumentParser(
      prog='python -m rnnzoo.tasks.motion.ntu_conversion',
      description='Converts a folder of .skeleton files to one array.',
  )
  parser.add_argument('source', help='folder of .skeleton files')
  parser.add_argument('destination', help='folder of the result')
  parser.add_argument('--num_processes', type=int, default=-1)
  given = parser.parse_args(arguments)
  try:
    result = convert(given.source, given.destination, given.num_processes)
  except (OSError, ValueError, process.BrokenProcessPool) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('interrupted; start the conversion again', file=sys.stderr)
    return 130
  print(
      f'{result.num_converted:,} recordings with {result.num_frames:,} frames'
      f' are in {given.destination}'
      f'\n{len(result.left_out):,} files are converted in part, see {LEFT_OUT}'
      f' there; {len(result.skipped):,} files are skipped, see'
      f' {SKIPPED}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(main())
