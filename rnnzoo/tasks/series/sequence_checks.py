"""Data of sequences, described before anything is trained on them.

Dimensions: N sequences, T time, F columns.
"""

from collections.abc import Mapping, Sequence
import hashlib
from typing import Any

import numpy as np

from rnnzoo.tasks.series import answers as answers_lib
from rnnzoo.tasks.series import sequence_arrays

# Columns or classes that are named in one line.
_MOST_NAMES = 8
_LEAST_DEVIATION = float(np.finfo(np.float32).tiny)  # less counts as none


def check_fit(
    name: str,
    part: sequence_arrays.Sequences,
    first_name: str,
    first: sequence_arrays.Sequences,
    every_step: bool = False,
) -> None:
  """Raises ValueError unless two parts agree in columns and kind of answers.

  Sequences may be longer in one part, and labels of any kind. The names, of
  files or splits, are for the message.
  """
  words = []
  for one in (part, first):
    kind = 'text' if one.y.dtype.kind in 'US' else 'numbers'
    shape = list(one.y.shape[2 if every_step else 1 :])
    words.append(f'{one.x.shape[-1]} columns of x, and {kind} {shape} as y')
  if words[0] != words[1]:
    raise ValueError(
        f'{name} must be like {first_name}, with {words[1]}; it has {words[0]}'
    )


def check_splits(
    splits: Mapping[str, sequence_arrays.Sequences],
    answers: answers_lib.Answers,
    every_step: bool,
) -> None:
  """Raises ValueError unless a model of 'train' can answer all splits.

  Each must fit 'train' by `check_fit`, and have one of its classes at least.
  """
  train = splits['train']
  for name, split in splits.items():
    check_fit(name, split, 'train', train, every_step)
    if isinstance(answers, answers_lib.Classes):
      found, known = (
          np.unique(part.y[part.known(every_step)]) for part in (split, train)
      )
      if not np.isin(found, known).any():
        named = lambda y: _names('class', [answers.names[i] for i in y])
        raise ValueError(
            f'{name}: y has the {named(found)}, but the {named(known)} in'
            ' train: no answer could be right'
        )


def padding(x: np.ndarray, lengths: np.ndarray) -> str:
  """Returns a sentence on last steps that may be padding; '' for none.

  They are zero, or NaN, in all columns, and their number differs between
  sequences. `x` is [N, T, F], `lengths` int [N].
  """
  count, steps, _ = x.shape
  is_blank = ((x == 0) | np.isnan(x)).all(-1)
  runs = np.where(is_blank.all(1), steps, is_blank[:, ::-1].argmin(1))
  number, total = np.count_nonzero(runs), int(runs.sum())
  # Other such steps are chance, or data.
  if lengths.min() < steps or not runs.max() > max(1, runs.min()):
    return ''
  if number < max(2, count / 20) or 2 * total < is_blank.sum():
    return ''
  return (
      f'{number:,} of {count:,} sequences end in steps of zeros or NaN,'
      f' {total:,} of {count * steps:,} steps. Models see them as data; if they'
      ' are padding, the array lengths must say how many steps are data'
  )


def summarize(
    splits: Mapping[str, sequence_arrays.Sequences],
    answers: answers_lib.Answers,
    every_step: bool,
) -> dict[str, Any]:
  """Returns numbers about data, for report.json.

  'splits' has lengths and answers of each, 'columns' statistics of each column
  over the valid training steps, 'warnings' sentences.
  """
  found: dict[str, Any] = {'splits': {}}
  for name, split in splits.items():
    found['splits'][name] = {
        'sequences': len(split.x),
        'shortest': int(split.lengths.min()),
        'mean_length': float(split.lengths.mean()),
        'longest': int(split.lengths.max()),
        'missing': int(np.isnan(split.x[split.valid()]).sum()),
        **answers.describe(split.y[split.known(every_step)]),
    }
  train = splits['train']
  found['columns'] = sequence_arrays.statistics(train.x[train.valid()])
  found['warnings'] = [
      *_column_warnings(found['columns'], '', train.x.dtype),
      *_column_warnings(
          found['splits']['train'].get('answers', []), ' of y', train.y.dtype
      ),
      *_class_warnings(found['splits']),
      *_repeated(splits),
  ]
  return found


def lines(name: str, summary: Mapping[str, Any]) -> list[str]:
  """Returns the lines to print of data's name and summary by `summarize`."""
  splits = summary['splits']
  sizes = ', '.join(f'{split["sequences"]} {n}' for n, split in splits.items())
  shortest = min(split['shortest'] for split in splits.values())
  longest = max(split['longest'] for split in splits.values())
  mean = splits['train']['mean_length']
  length = f'{shortest} to {longest} (mean {mean:.1f})'
  text = [
      f'data: {name}: {sizes} sequences of'
      f' {length if shortest < longest else longest} steps,'
      f' {len(summary["columns"])} column(s)'
  ]
  if classes := splits['train'].get('classes'):
    total = sum(classes.values())
    shares = sorted(classes.items(), key=lambda item: -item[1])
    if len(shares) > _MOST_NAMES:
      shares = [*shares[: _MOST_NAMES - 1], shares[-1]]
    named = ', '.join(f'{n} {c / total:.1%}' for n, c in shares)
    most = '' if len(classes) <= _MOST_NAMES else 'most and least of them '
    text.append(f'data: {len(classes)} classes, {most}in train: {named}')
  return text + [f'WARNING: data: {text}' for text in summary['warnings']]


def _column_warnings(
    columns: list[dict[str, Any]], of: str, dtype: np.dtype
) -> list[str]:
  """Returns warnings about columns of x, or of y, where `of` is ' of y'."""
  constant, far, missing, found = [], [], [], []
  for i, c in enumerate(columns):
    if c['min'] == c['max'] or c['deviation'] < _LEAST_DEVIATION:
      constant.append(i)
    # Other types are standardised in float64.
    elif dtype == np.float32:
      if abs(c['mean']) > sequence_arrays.FAR_FROM_ZERO * c['deviation']:
        far.append(i)
    if c['missing']:
      missing.append(i)
  if constant:
    found.append(
        f'constant in train: {_names("column", constant)}{of} (as float32)'
    )
  if far:
    found.append(
        f'{_names("column", far)}{of}: so far from zero that float32 has few'
        ' digits left for what changes; subtract a constant first'
    )
  if missing:
    total = sum(column['missing'] for column in columns)
    found.append(
        f'{total} values of train are missing, in {_names("column", missing)};'
        ' they count as the mean where columns are standardised, else as 0'
    )
  return found


def _class_warnings(splits: Mapping[str, Any]) -> list[str]:
  found = []
  for name, count in splits['train'].get('classes', {}).items():
    if not count:
      counts = [
          (part['classes'][name], split) for split, part in splits.items()
      ]
      others = ' and '.join(f'{n} of {split}' for n, split in counts if n)
      found.append(
          f'the class {name!r} has no training example; it can never be right'
          f' for {others}'
      )
  return found


def _repeated(splits: Mapping[str, sequence_arrays.Sequences]) -> list[str]:
  """Returns a warning for each split whose sequences training sees, too."""
  digests = {
      name: [
          hashlib.blake2b(x[:length].tobytes(), digest_size=16).digest()
          for x, length in zip(split.x, split.lengths, strict=True)
      ]
      for name, split in splits.items()
  }
  seen = set(digests.pop('train'))
  counts = {n: sum(d in seen for d in found) for n, found in digests.items()}
  return [
      f'{count} of {len(digests[name])} sequences of {name} are in train, too'
      for name, count in counts.items()
      if count
  ]


def _names(kind: str, items: Sequence[Any]) -> str:
  shown = ', '.join(map(str, items[:_MOST_NAMES]))
  more = len(items) - _MOST_NAMES
  if more > 0:
    shown += f' and {more} more'
  plural = 'es' if kind.endswith('s') else 's'
  return f'{kind}{plural if len(items) > 1 else ""} {shown}'
