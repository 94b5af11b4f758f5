"""Your own sequences: arrays in .npz files, a config, and no code.

    python train.py --config=configs/gru_sequences.py \
        --config.data.path=mine.npz

npz.py says which arrays a file holds. `config.data.path` is one file, or a
folder of files:

  train.npz, validation.npz, test.npz   the splits; each may be in several
                                        files, train_0.npz, train_1.npz, ...;
  any other names                       parts of one whole, in order of names.

`config.data.source` can name a classification set of TFDS instead. An image is
a sequence of its rows or of its pixels; numbers [T, F] are as they are, and [F]
is a sequence of single numbers. More axes than two are flattened into F.
Sequences may end at different steps.

A missing validation or test split is split off the training data, by
`split_seed`, `validation_fraction` and `test_fraction`; with one class a
sequence, each class gives about an equal share.
"""

from collections.abc import Mapping
import pathlib
import re
from typing import Any

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.series import answers
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks
from rnnzoo.tasks.series import sequence_task

_RULES: fields.Rules = {
    **sequence_task.RULES,
    'source': fields.Rule(
        "'files' or 'tfds:<name>'",
        lambda value: value == 'files'
        or (isinstance(value, str) and tfds_sets.is_source(value)),
    ),
    'data_dir': fields.text(),
    'sequence': fields.one_of(('row', 'pixel')),
    'path': fields.text(),
    'kind': fields.one_of(('classification', 'regression')),
    'every_step': fields.flag(),
    'missing': fields.one_of(('refuse', 'zero')),
    'test_fraction': fields.number(0, 1, above=True, below=True),
}


class OwnSequences(sequence_task.SequenceTask):
  """Sequences of .npz files; classes or numbers, of a sequence or a step."""

  rules = _RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_sequences.py`."""
    self._set_up(config)
    data = config.data
    if data.source != 'files':
      fields.check_unread(data, ('path',), 'source')
      name, splits = _read_tfds(data)
    else:
      unread = {'data_dir': '', 'sequence': 'row'}
      fields.check_unread(data, unread, 'source')
      if not data.path:
        raise ValueError(
            'config.data.path must be an .npz file with x, y and maybe lengths,'
            ' or a folder of such files; see configs/base_sequences.py'
        )
      path = fields.expand(data.path, 'config.data.path')
      form = npz.Form(data.kind, data.every_step, data.missing)
      name, splits = path.name, read_splits(path, form)
    every_step = data.every_step
    divided_splits = divided(splits, data, every_step)
    super().__init__(config, name, *divided_splits, every_step=every_step)


def read_splits(
    path: pathlib.Path, form: npz.Form
) -> dict[str, sequence_arrays.Sequences]:
  """Returns the splits that a file or folder has; 'train' is among them."""
  if not path.is_dir():
    return {'train': npz.read(path, form)}
  files = sorted(f for f in path.iterdir() if f.suffix.lower() == '.npz')
  if not files:
    raise FileNotFoundError(f'{path} holds no .npz file')
  pattern = re.compile(rf'({"|".join(sequence_arrays.SPLITS)})([-_.].*)?')
  found = {file: pattern.fullmatch(file.stem) for file in files}
  split_of = {file: match[1] for file, match in found.items() if match}
  likely = [f for f in files if re.search('(?i)train|val|test', f.stem)]
  if not split_of and not likely:
    split_of = dict.fromkeys(files, 'train')
  if len(split_of) < len(files) or 'train' not in split_of.values():
    raise ValueError(
        f'{path} must hold train.npz, and maybe validation.npz and test.npz, or'
        ' parts of one whole whose names have no such words in them; it holds'
        f' {", ".join(file.name for file in files[:8])}'
    )
  parts: dict[str, list[sequence_arrays.Sequences]] = {}
  first = None
  for file, split in split_of.items():
    part = npz.read(file, form)
    first = first or (file.name, part)
    sequence_checks.check_fit(str(file), part, *first, form.every_step)
    parts.setdefault(split, []).append(part)
  return {
      split: sequence_arrays.concatenate(several, form.every_step)
      for split, several in parts.items()
  }


def encode(
    splits: Mapping[str, sequence_arrays.Sequences], every_step: bool
) -> tuple[dict[str, sequence_arrays.Sequences], answers.Classes]:
  """Returns splits with classes as int32, and the classes, sorted.

  Labels are of one kind: integers, booleans or strings, as `npz` reads them.
  """
  real = [split.y[split.known(every_step)] for split in splits.values()]
  labels = np.unique(np.concatenate(real))
  names = [str(label) for label in labels.tolist()]
  if len(names) < 2:
    raise ValueError(f'y must have two classes at least; all are {names[0]!r}')
  encoded = {}
  for name, split in splits.items():
    # Padding has some class, which nobody looks at.
    y = np.searchsorted(labels, split.y).clip(0, len(labels) - 1)
    y = y.astype(np.int32)
    if every_step:
      y[split.valid() & ~split.known(every_step)] = sequence_arrays.NO_LABEL
    encoded[name] = split._replace(y=y)
  return encoded, answers.Classes(names)


def divided(
    parts: Mapping[str, sequence_arrays.Sequences],
    data: ml_collections.ConfigDict,
    every_step: bool = False,
) -> tuple[dict[str, sequence_arrays.Sequences], answers.Answers]:
  """Returns all splits of a config, and the kind of the answers.

  The parts are 'train' and, where the data have them, further splits.
  """
  classes = None
  if data.kind == 'classification':
    parts, classes = encode(parts, every_step)
  splits = sequence_arrays.complete_splits(
      parts,
      {'test': data.test_fraction, 'validation': data.validation_fraction},
      data.split_seed,
      stratify=classes is not None and not every_step,
  )
  return splits, classes or numbers(splits['train'], data)


def numbers(
    train: sequence_arrays.Sequences, data: ml_collections.ConfigDict
) -> answers.Numbers:
  """Returns the answers of a regression, by `config.data` and what trains."""
  size = train.y.shape[-1]
  if not data.standardize:
    return answers.Numbers(np.zeros(size), np.ones(size))
  known = train.known(data.get('every_step', False))
  return answers.Numbers(*sequence_arrays.standardization(train.y, known))


def _read_tfds(
    data: ml_collections.ConfigDict,
) -> tuple[str, dict[str, sequence_arrays.Sequences]]:
  """Returns the name of a set of TFDS, and its splits with labels as y."""
  source, reading = data.source, data.sequence
  for field, value in (('kind', 'classification'), ('every_step', False)):
    if data[field] != value:
      raise ValueError(
          f'config.data.{field} must be {value!r} for'
          f' config.data.source={source!r}; got {data[field]!r}'
      )
  found = tfds_sets.read(source, data.data_dir)
  is_image = type(found.input).__name__ == 'Image'
  if reading != 'row' and not is_image:
    raise ValueError(
        f'config.data.sequence would be ignored with config.data.source='
        f"{source!r}, which has no images; it must be 'row' there, got"
        f' {reading!r}'
    )
  splits = {}
  for name, examples in found.splits.items():
    sequences = [
        _sequence(example, source, is_image and reading == 'pixel')
        for example in examples.inputs
    ]
    if len({sequence.shape[1] for sequence in sequences}) > 1:
      raise ValueError(
          f'config.data.source={source!r} has steps of different sizes in'
          f' {name!r}: {sorted({s.shape[1] for s in sequences})[:5]}; images of'
          ' different widths cannot be read by rows'
      )
    place = f'config.data.source={source!r}, {name!r}'
    labels = _labels(examples.targets, found.target, place)
    x, lengths = sequence_arrays.pad(sequences)
    if not is_image:  # They have dark edges.
      x = npz.checked(x, lengths, data.missing, f'{place}: x')
    splits[name] = sequence_arrays.Sequences(x, lengths, labels)
    sequence_checks.check_fit(place, splits[name], 'train', splits['train'])
  return found.name, splits


def _sequence(example: Any, source: str, by_pixel: bool) -> np.ndarray:
  """Returns an example as numbers [T, F]."""
  array = np.asarray(example)
  if array.dtype.kind not in 'biuf' or not array.ndim or not array.size:
    raise ValueError(
        f'config.data.source={source!r} must have images or arrays of numbers'
        f' as inputs; got {array.dtype} of shape {array.shape}'
    )
  if by_pixel:
    array = array.reshape(-1, array.shape[-1])
  return array.reshape(len(array), -1)


def _labels(targets: list[Any], feature: Any, name: str) -> np.ndarray:
  """Returns the labels of examples: names of classes, or integers."""
  labels = np.asarray(targets)
  if labels.dtype.kind not in 'iub' or labels.ndim != 1:
    raise ValueError(
        f'{name}: a target must be a class; got {labels.dtype} of shape'
        f' {labels.shape[1:]}'
    )
  if labels.min() < 0:
    raise ValueError(f'{name} has examples without a label')
  names = np.array(getattr(feature, 'names', None) or [])
  if not len(names) or all(one.isdecimal() for one in names):
    return labels
  return names[labels]
