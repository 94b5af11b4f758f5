"""Recordings of skeletons as arrays: in memory, and as a folder of two files.

  frames.npy    float32 [frames of all, 2, 25, 3], mapped into memory;
  index.json    names, how many frames each has, and their source.

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
  if directory.is_file():
    raise FileNotFoundError(
        f'{directory} is a file; name the folder that python -m'
        ' rnnzoo.tasks.motion.ntu_conversion made, which holds'
        f' {INDEX} and {FRAMES}'
    )
  for name in (INDEX, FRAMES):
    if not (directory / name).is_file():
      raise FileNotFoundError(
          f'{directory} has no {name}; python -m'
          ' rnnzoo.tasks.motion.ntu_conversion makes it from .skeleton files'
      )
  index = read_index(directory)
  frames = _read_frames(directory / FRAMES, sum(index['lengths']))
  try:
    names = [ntu_files.parse_name(name) for name in index['names']]
    if len(set(names)) < len(names):
      raise ValueError('it lists a recording twice')
  except ValueError as error:
    raise ValueError(f'{directory / INDEX} is damaged: {error}') from error
  parts = np.split(frames, np.cumsum(index['lengths'])[:-1])
  for name, part in zip(index['names'], parts, strict=True):
    damaged = f'{directory / FRAMES} is damaged: {name}'
    if place := ntu_files.find_wrong(part):
      frame, body, joint, axis = place
      raise ValueError(
          f'{damaged} has {"xyz"[axis]}={part[place]:g} in its frame {frame},'
          f' body {body}, joint {joint}, counted from 0; all must be numbers of'
          f' metres within {ntu_files.MOST_METRES:g}; copy or convert it again'
      )
    if not (shown := part.any(axis=(1, 2, 3))).all():
      raise ValueError(
          f'{damaged} shows nobody in its frame {shown.argmin()}, counted from'
          ' 0: all is zero; convert it again'
      )
  return Recordings(names, parts)


def read_index(directory: pathlib.Path) -> dict:
  """Returns the index of a folder: 'source', 'names' and 'lengths'."""
  path = directory / INDEX
  try:
    index = json.loads(path.read_text(encoding='utf-8'))
    whole = (
        isinstance(index['source'], str)
        and len(index['names']) == len(index['lengths']) > 0
        and all(isinstance(name, str) for name in index['names'])
        and all(
            type(length) is int and 0 < length < 2**31
            for length in index['lengths']
        )
    )
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is damaged: {error!r}') from error
  if not whole:
    raise ValueError(f'{path} is damaged: it does not list recordings')
  return index


def _read_frames(path: pathlib.Path, num_frames: int) -> np.ndarray:
  try:
    frames = np.load(path, mmap_mode='r', allow_pickle=False)
    if not isinstance(frames, np.ndarray):
      raise ValueError('it holds several arrays, as an .npz file')
  except (ValueError, EOFError) as error:
    raise ValueError(
        f'{path} is damaged: {error}; copy or convert it again'
    ) from error
  shape = (num_frames, *ntu_tracks.FRAME)
  if frames.shape != shape or frames.dtype != np.float32:
    raise ValueError(
        f'{path} must hold float32 {shape}, as {INDEX} says; it holds'
        f' {frames.dtype} {frames.shape}'
    )
  return np.asarray(frames)
