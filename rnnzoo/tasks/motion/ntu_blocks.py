"""Blocks of a conversion: the frames of some `.skeleton` files in one file.

A block is written whole or not at all, so a conversion that is started again
reads the files of those that are missing.
"""

from collections.abc import Sequence
import os
import pathlib
from typing import NamedTuple
import zipfile

import numpy as np

from rnnzoo.tasks.motion import ntu_files


class Block(NamedTuple):
  """Recordings of some files.

  Attributes:
    frames: float32 [frames, 2, 25, 3].
    lengths: of the converted ones.
    names: of the converted ones.
    skipped: lines of skipped.txt, of files that are not converted.
    left_out: lines of left_out.txt, of files that are converted in part.
  """

  frames: np.ndarray
  lengths: np.ndarray
  names: np.ndarray
  skipped: np.ndarray
  left_out: np.ndarray


def listed_line(source: pathlib.Path, path: pathlib.Path, reason: str) -> str:
  """Returns a line of skipped.txt or left_out.txt, without its end.

  Args:
    source: the folder that is converted.
    path: of a file or link in it.
    reason: why it is skipped, or what of it is left out.
  """
  name = ntu_files.printable(str(path.relative_to(source)))
  return f'{name}\t{ntu_files.printable(" ".join(reason.split()))}'


def convert(
    source: pathlib.Path, paths: Sequence[pathlib.Path], block: pathlib.Path
) -> int:
  """Writes a block and returns of how many files it is.

  Args:
    source: the folder that is converted.
    paths: of the block's files.
    block: the path to write to.
  """
  frames = [np.zeros((0, ntu_files.BODIES, ntu_files.JOINTS, 3), np.float32)]
  names, skipped, left_out = [], [], []
  for path in paths:
    try:
      name = ntu_files.parse_name(path.name).text()
      recording = ntu_files.read(path)
      frames.append(ntu_files.arrange(recording))
      names.append(name)
      if text := ntu_files.left_out(recording):
        left_out.append(listed_line(source, path, text))
    except (ValueError, OSError) as error:
      skipped.append(listed_line(source, path, str(error)))
  partial = block.with_suffix('.part')
  with partial.open('wb') as file:
    content = Block(
        np.concatenate(frames),
        np.array([len(part) for part in frames[1:]], np.int32),
        np.array(names, str),
        np.array(skipped, str),
        np.array(left_out, str),
    )
    np.savez(file, **content._asdict())
  os.replace(partial, block)
  return len(paths)


def is_whole(block: pathlib.Path) -> bool:
  """Returns whether a block is there; a crash of the machine may cut it."""
  return block.is_file() and zipfile.is_zipfile(block)


def read(path: pathlib.Path) -> Block:
  """Returns a block.

  Raises:
    ValueError: it was damaged; it is removed, to be made once more.
  """
  try:
    with np.load(path, allow_pickle=False) as content:
      return Block(*(content[field] for field in Block._fields))
  except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
    path.unlink()
    raise ValueError(
        f'{path} was damaged, and is removed; start the conversion again to'
        ' make it once more'
    ) from error
