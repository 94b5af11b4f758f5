"""Files of inputs for a trained model, and files of its answers.

An `.npz` file holds the inputs of `Trained.predict`: one array, or several by
name. Sequences of numbers may lie in it as they do for training (x or steps,
and lengths); y is not read.

A `.csv` file holds sequences of numbers, one step a row, under a line of names.
Rows with the same entry in the column `sequence` are one sequence; without that
column there is one. An empty entry is a missing value.
"""

from collections.abc import Iterator
import csv
import io
import pathlib
from typing import Any

import numpy as np

from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import trained as trained_lib


def read(path: pathlib.Path) -> Any:
  """Returns the inputs in a file, as `Trained.predict` takes them.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is no such file.
  """
  if path.suffix.lower() == '.csv':
    return _read_csv(path)
  if path.suffix.lower() != '.npz':
    raise ValueError(f'{path} must be an .npz or .csv file')
  arrays = npz.load(path, None)
  arrays.pop('y', None)
  if 'steps' in arrays and 'lengths' in arrays:
    steps, ends = arrays.pop('steps'), np.cumsum(arrays.pop('lengths'))
    if not len(ends) or ends[-1] != len(steps):
      raise ValueError(f'{path}: lengths must sum to the rows of steps')
    arrays['x'], arrays['lengths'] = sequence_arrays.pad(
        np.split(steps, ends[:-1])
    )
  if 'x' in arrays and arrays['x'].ndim == 2:
    arrays['x'] = arrays['x'][..., None]
  return arrays if len(arrays) != 1 else next(iter(arrays.values()))


def _read_csv(path: pathlib.Path) -> dict[str, np.ndarray]:
  sequences: dict[str, list[list[float]]] = {}
  with path.open(encoding='utf-8-sig', newline='') as file:
    rows = csv.reader(file)
    names = next(rows, [])
    place = names.index('sequence') if 'sequence' in names else None
    for row in rows:
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
  return {'x': x, 'lengths': lengths}


def write(
    path: pathlib.Path | None,
    trained: trained_lib.Trained,
    inputs: Any,
    proba: bool,
) -> None:
  """Writes answers to a file, or as CSV to the standard output.

  A CSV file has a row an answer: the places of its sequence and, of answers at
  every step, of its step; the name of the class or the numbers; and, if asked
  for, a probability a class. An `.npz` file has the arrays `predictions`,
  `probabilities` and `class_names`.

  Args:
    path: the file, replaced as a whole; None for the standard output.
    trained: the model.
    inputs: the result of `read`.
    proba: whether to write probabilities.

  Raises:
    OSError: the file cannot be written.
    ValueError: the task cannot use the inputs, or the name has another ending.
    NotImplementedError: the task has no such answers.
  """
  ending = '.csv' if path is None else path.suffix.lower()
  if ending not in ('.csv', '.npz'):
    raise ValueError(f'--output must end in .csv or .npz, got {path}')
  found: dict[str, Any] = {'predictions': np.asarray(trained.predict(inputs))}
  if proba:
    found['probabilities'] = np.asarray(trained.predict_proba(inputs))
  names = getattr(trained.task, 'class_names', None)
  if path is not None and ending == '.npz':
    if names:
      found['class_names'] = np.array(names)
    with files.naming(path), path.open('wb') as file:
      np.savez(file, **found)
    return
  lengths = inputs.get('lengths') if isinstance(inputs, dict) else None
  text = io.StringIO()
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
    yield [*place, *(entry for column in columns for entry in column[place])]
