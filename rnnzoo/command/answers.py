"""Files of inputs for a trained model, and files of its answers.

An `.npz` file holds the inputs of `Trained.predict`: one array, or several by
name. Sequences of numbers lie in it as they do for training (x and lengths); y
is not read.

A `.csv` file holds sequences of numbers, one step a row, under a line of names.
Rows with the same entry in the column `sequence` are one sequence, wherever
they are; without that column there is one. An empty entry is a missing value.
Columns are told apart by their order, which must be the order in training.
"""

from collections.abc import Iterator
import csv
import io
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rnnzoo import tasks
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import trained as trained_lib


class Inputs(NamedTuple):
  """Inputs of a file."""

  arrays: dict[str, np.ndarray]  # Arrays by name.
  # Names of the sequences; None for their numbers.
  names: list[str] | None = None

  def of(self, task: tasks.Task) -> Any:
    """Returns them as a method of `Trained` takes them, for its task."""
    arrays = dict(self.arrays)
    if not task.y_is_input:
      arrays.pop('y', None)
    if not arrays.keys() - {'lengths', 'start'}:
      raise ValueError('the file of --input must hold x, the inputs')
    return arrays if len(arrays) != 1 else next(iter(arrays.values()))


def read(path: pathlib.Path) -> Inputs:
  """Returns the inputs in a file."""
  if path.suffix.lower() == '.csv':
    try:
      return _read_csv(path)
    except (csv.Error, UnicodeError) as error:
      raise ValueError(f'{path} is no CSV file in UTF-8: {error}') from error
  if path.suffix.lower() != '.npz':
    raise ValueError(f'{path} must be an .npz or .csv file')
  arrays = npz.load(path, None)
  if 'x' in arrays and arrays['x'].ndim == 2:
    arrays['x'] = arrays['x'][..., None]
  return Inputs(arrays)


def _read_csv(path: pathlib.Path) -> Inputs:
  sequences: dict[str, list[list[float]]] = {}
  with path.open(encoding='utf-8-sig', newline='') as file:
    rows = csv.reader(file)
    names = next(rows, [])
    if names and all(map(_is_number, names)):
      raise ValueError(
          f'{path} must begin with a line of names, got the numbers'
          f' {", ".join(names[:4])}'
      )
    place = names.index('sequence') if 'sequence' in names else None
    for row in filter(None, rows):
      if len(row) != len(names):
        raise ValueError(
            f'{path}, line {rows.line_num}: there are {len(row)} entries under'
            f' {len(names)} names'
        )
      name = '' if place is None else row.pop(place)
      try:
        step = [float(entry) if entry.strip() else np.nan for entry in row]
      except ValueError as error:
        raise ValueError(f'{path}, line {rows.line_num}: {error}') from error
      sequences.setdefault(name, []).append(step)
  if not sequences:
    raise ValueError(f'{path} must hold a line of names, and lines of numbers')
  x, lengths = sequence_arrays.pad([*map(np.array, sequences.values())])
  known = None if place is None else [*sequences]
  return Inputs({'x': x, 'lengths': lengths}, known)


def _is_number(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def score(inputs: Inputs, trained: trained_lib.Trained) -> dict[str, float]:
  """Returns the metrics of a model on inputs with 'y'; see `Trained.score`.

  Raises:
    ValueError: there is no y, or the task cannot use the inputs.
    NotImplementedError: the task has no such thing.
  """
  if 'y' not in inputs.arrays or trained.task.y_is_input:
    raise ValueError(
        '--input must be an .npz file with the answers as y, of a task that'
        f' does not read y; got the arrays {", ".join(inputs.arrays)}'
    )
  return trained.score(inputs.of(trained.task), inputs.arrays['y'])


def write(
    path: pathlib.Path | None,
    trained: trained_lib.Trained,
    read_inputs: Inputs,
    proba: bool,
) -> None:
  """Writes answers as CSV to a file, or to the standard output.

  There is a row an answer: the places of its sequence and, of answers at every
  step, of its step; the name of the class or the numbers; and, if asked for, a
  probability a class.

  `path` is replaced as a whole; None is the standard output.

  Raises:
    OSError: the file cannot be written.
    ValueError: the task cannot use the inputs, or the name has another ending.
    NotImplementedError: the task has no such answers.
  """
  if path is not None and path.suffix.lower() != '.csv':
    raise ValueError(f'--output must end in .csv, got {path}')
  inputs = read_inputs.of(trained.task)
  found: dict[str, Any] = {'predictions': np.asarray(trained.predict(inputs))}
  if proba:
    found['probabilities'] = np.asarray(trained.predict_proba(inputs))
  names = getattr(trained.task, 'class_names', None)
  lengths = inputs.get('lengths') if isinstance(inputs, dict) else None
  text = io.StringIO()
  if read_inputs.names:
    found['sequences'] = read_inputs.names
  rows = _rows(found, names, lengths, trained.task.every_step)
  csv.writer(text, lineterminator='\n').writerows(rows)
  if path is None:
    processes.say(text.getvalue(), end='')
  else:
    files.write_atomically(path, text.getvalue())


def _rows(found, names, lengths, every_step: bool) -> Iterator[list[Any]]:
  """Yields the names of the columns, and a row for each answer."""
  predictions = found['predictions']
  axes = 2 if every_step else 1
  heads = ['sequence', 'step'][:axes]
  if names and predictions.ndim == axes:
    predictions = np.array(names, object)[predictions]
  columns = [predictions.reshape(*predictions.shape[:axes], -1)]
  size = columns[0].shape[-1]
  heads += (
      [f'prediction_{i}' for i in range(size)] if size > 1 else ['prediction']
  )
  if 'probabilities' in found:
    columns.append(found['probabilities'])
    count = columns[1].shape[-1]
    heads += [f'p({name})' for name in names or range(count)]
  yield heads
  for place in np.ndindex(*predictions.shape[:axes]):
    if every_step and lengths is not None and place[1] >= lengths[place[0]]:
      continue
    row, *step = place
    row = found.get('sequences', range(row + 1))[row]
    yield [row, *step, *(entry for c in columns for entry in c[place])]
