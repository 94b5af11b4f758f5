"""Writes recordings as `.skeleton` files."""

from collections.abc import Iterable
import os
import pathlib

import numpy as np

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files


def write_files(
    directory: str | os.PathLike[str],
    recordings: ntu_arrays.Recordings,
    indices: Iterable[int] | None = None,
) -> list[pathlib.Path]:
  """Writes recordings as `.skeleton` files and returns their paths.

  Args:
    directory: of the files; it is made.
    recordings: those to write.
    indices: which of them; None for all.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  paths = []
  for index in range(len(recordings.names)) if indices is None else indices:
    path = directory / f'{recordings.names[index].text()}.skeleton'
    path.write_text(file_text(recordings.frames[index]), encoding='ascii')
    paths.append(path)
  return paths


def file_text(frames: np.ndarray) -> str:
  """Returns frames [n, 2, 25, 3] as the text of a `.skeleton` file.

  Fields that hold no position are filled in: those of a body, depth and color
  coordinates, orientations.
  """
  lines = [str(len(frames))]
  for bodies in frames:
    present = [body for body in range(len(bodies)) if bodies[body].any()]
    lines.append(str(len(present)))
    for body in present:
      lines.append(f'7205759403792{body:05} 0 1 1 1 1 0 0.1 -0.05 2')
      lines.append(str(ntu_files.JOINTS))
      lines.extend(
          f'{x:.7g} {y:.7g} {z:.7g} 256.5 212.4 960.3 540.2 0 0 0 1 2'
          for x, y, z in bodies[body].tolist()
      )
  return '\n'.join(lines) + '\n'
