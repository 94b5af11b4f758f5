"""The data of a run: are the data here the data that it was trained on?

A task describes its data, and a digest covers every bit of the data. Data that
were rounded on another machine have another digest; a summary of each array
tells them from other data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import json
import math
import types
from typing import Any, NamedTuple

import jax
import numpy as np

from rnnzoo import settings
from rnnzoo import tasks
from rnnzoo.tasks import protocol
from rnnzoo.training import files

# Parts that are summed, and columns that are told apart.
_PARTS, _MOST_COLUMNS = 16, 64
# How much rounding changes sums: a share of the column's, and of the greatest.
_OF_COLUMN, _OF_ALL = 1e-4, 1e-7


class Data(NamedTuple):
  """The data that are here."""

  dataset: str  # The name of the data set that was really read.
  # The value of `Task.describe` after a round trip by JSON.
  described: Mapping[str, Any] | None = None
  digest: str = ''  # The SHA-256 of all this and of the arrays.
  # Function that returns summaries of arrays by their paths.
  summary: Callable[[], Mapping[str, Sequence[str]]] = dict
  # Digests of the weights that seeds begin with, by seed.
  taken: Mapping[str, str] = types.MappingProxyType({})


def of_task(task: tasks.Task) -> Data:
  """Returns the data of a task."""
  if not isinstance(task, tasks.Task):
    raise ValueError(
        'what makes the task must return an rnnzoo.tasks.Task, got'
        f' {settings.a(type(task))}'
    )
  try:
    described = json.loads(json.dumps(task.describe(), allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
        'Task.describe must return what JSON holds: finite numbers, strings,'
        f' True, False, None, lists and dicts; this one has more ({error})'
    ) from error
  content = hashlib.sha256(f'{task.dataset} {files.digest(described)}'.encode())
  for name, array in _arrays(task):
    content.update(f'{name} {array.dtype} {array.shape}'.encode())
    content.update(array.reshape(-1).view(np.uint8).data)
  summary = lambda: {name: summarise(array) for name, array in _arrays(task)}
  return Data(task.dataset, described, content.hexdigest(), summary)


def _arrays(task: tasks.Task) -> Iterator[tuple[str, np.ndarray]]:
  """Yields a task's arrays with their paths; a `Generator` has its source."""
  splits = {}
  for name, split in task.splits.items():
    if isinstance(split, protocol.Generator):
      split = split.source
    splits[name] = [dict(bucket) for bucket in protocol.buckets(split)]
  for path, array in jax.tree_util.tree_leaves_with_path(splits):
    yield jax.tree_util.keystr(path), np.ascontiguousarray(array)


def check(
    there: Data, here: Data, whose: str, goes_on: bool, has_own_tests: bool
) -> None:
  """Raises ValueError if a run was on other data; other bits get a warning.

  `whose` begins the message. A run that does not go on gets a warning of other
  numbers, too; `has_own_tests` lets data that are tests alone differ.
  """
  text = _described_otherwise(there.described, here.described)
  other = ''
  if not text and there.digest != here.digest:
    numbers = here.summary()
    names = differences(there.summary() or numbers, numbers)
    if has_own_tests:
      trained_on = ("['train']", "['validation']")
      names = [name for name in names if name.startswith(trained_on)]
    other = f'other numbers in {", ".join(names[:3])}' if names else ''
  if text or (goes_on and other):
    raise ValueError(
        f'{whose} with other data ({text or other}); put back the data that it'
        ' was trained on, or pass another --workdir'
    )
  if other:
    print(f'WARNING: {whose} with other data ({other})', flush=True)
  elif there.digest != here.digest and not has_own_tests:
    print(
        f'WARNING: {whose} as it was; the data here are not the same in every'
        ' bit',
        flush=True,
    )


def _described_otherwise(there: Any, here: Any) -> str:
  """Returns where descriptions differ by more than rounding."""
  # By path, as "['mean'][0]".
  there, here = (
      {
          jax.tree_util.keystr(path): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(
              tree, is_leaf=lambda x: not x
          )
      }
      for tree in (there, here)
  )
  # Another machine may sum in another order.
  alike = [
      name
      for name, value in here.items()
      if isinstance(value, float)
      and isinstance(there.get(name), float)
      and math.isclose(there[name], value, rel_tol=1e-12, abs_tol=1e-15)
  ]
  return files.differences(there, here, alike)


def summarise(array: np.ndarray) -> list[str]:
  """Returns an array's dtype and shape, and more for `differences`.

  That is a digest or, for floats, a line for each column of the last axis: the
  sums of several parts with random signs, which another order changes as well.
  """
  kind = f'{array.dtype} {array.shape}'
  if array.dtype.kind != 'f' or not array.size:
    return [kind, hashlib.sha256(array.tobytes()).hexdigest()]
  is_table = array.ndim > 1 and array.shape[-1] <= _MOST_COLUMNS
  columns = array.reshape(len(array), -1, array.shape[-1] if is_table else 1)
  rng = np.random.RandomState(0)  # Equal numbers with any numpy.
  signs = lambda count: rng.choice([-1.0, 1.0], count)
  steps = signs(columns.shape[1])
  sums = [
      np.einsum('n,t,ntc->c', signs(len(part)), steps, part)
      for part in np.array_split(columns, _PARTS)
  ]
  lines = (' '.join(map('{:.9g}'.format, x)) for x in np.transpose(sums))
  return [kind, *lines]


def differences(
    there: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]]
) -> list[str]:
  """Returns the names of arrays that differ by more than rounding."""
  return [
      name
      for name in sorted(there.keys() | here.keys())
      if not _are_alike(there.get(name, []), here.get(name, []))
  ]


def _are_alike(there: Sequence[str], here: Sequence[str]) -> bool:
  if there[:1] != here[:1] or 'float' not in there[0]:
    return there == here
  one, other = (
      np.array([line.split() for line in lines[1:]], float)
      for lines in (there, here)
  )
  sizes = np.abs(one).max(axis=1, keepdims=True)
  most = _OF_COLUMN * sizes + _OF_ALL * sizes.max()
  return bool(np.all(np.abs(one - other) <= most))
