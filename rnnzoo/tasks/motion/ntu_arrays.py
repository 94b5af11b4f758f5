"""Recordings of skeletons as arrays: in memory, and as a folder of two files.

  frames.npy    float32 [frames of all, 2, 25, 3], mapped into memory;
  index.json    names, and how many frames each has.

`rnnzoo.tasks.motion.ntu_conversion` makes such a folder. It writes the index
last, so a folder with an index is whole.
"""

import json
import os
import pathlib
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_tracks

FRAMES, INDEX = 'frames.npy', 'index.json'


class Recordings(NamedTuple):
  """Recordings of two bodies."""

  names: list[ntu_files.Name]  # Names of recordings, [N].
  # N arrays float32 [n, 2, 25, 3]: x, y, z in metres, zeros for an absent body.
  frames: list[np.ndarray]


def read(directory: str | os.PathLike[str]) -> Recordings:
  """Returns the recordings of a folder; their frames stay on the disk."""
  directory = pathlib.Path(directory)
  if not (directory / INDEX).is_file():
    raise FileNotFoundError(
        f'{directory} has no {INDEX}; config.data.data_dir must be the folder'
        ' that python -m rnnzoo.tasks.motion.ntu_conversion made of .skeleton'
        ' files'
    )
  try:
    index = json.loads((directory / INDEX).read_text(encoding='utf-8'))
    names = [ntu_files.parse_name(name) for name in index['names']]
    lengths = index['lengths']
    if not len(set(names)) == len(lengths) > 0 or not all(
        type(length) is int and length > 0 for length in lengths
    ):
      raise ValueError(f'{INDEX} does not list recordings, each of them once')
    frames = np.lib.format.open_memmap(directory / FRAMES, mode='r')
    shape = (sum(lengths), *ntu_tracks.FRAME)
    if frames.shape != shape or frames.dtype != np.float32:
      raise ValueError(
          f'{FRAMES} must hold float32 {shape}, as {INDEX} says; it holds'
          f' {frames.dtype} {frames.shape}'
      )
    parts = np.split(np.asarray(frames), np.cumsum(lengths)[:-1])
    for name, part in zip(names, parts, strict=True):
      ntu_files.check_frames(part, name.text())
    return Recordings(names, parts)
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
        f'{directory} is damaged: {error}; copy it again, or remove its'
        f' {INDEX} and convert again'
    ) from error
