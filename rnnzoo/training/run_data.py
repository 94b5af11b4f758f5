"""The data of a run: are the data here the data that it was trained on?

A task describes its data, in numbers that another machine may have rounded
otherwise, and a digest covers every bit of the arrays.
"""

from collections.abc import Iterator, Mapping
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


class Data(NamedTuple):
  """The data that are here."""

  dataset: str  # The name of the data set that was really read.
  # The value of `Task.describe` after a round trip by JSON.
  described: Mapping[str, Any] | None = None
  digest: str = ''  # The SHA-256 of the name and the arrays.
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
  content = hashlib.sha256(task.dataset.encode())
  for name, array in _arrays(task):
    content.update(f'{name} {array.dtype} {array.shape}'.encode())
    content.update(array.reshape(-1).view(np.uint8).data)
  return Data(task.dataset, described, content.hexdigest())


def _arrays(task: tasks.Task) -> Iterator[tuple[str, np.ndarray]]:
  """Yields a task's arrays with their paths; a `Generator` has its source."""
  splits = {}
  for name, split in task.splits.items():
    if isinstance(split, protocol.Generator):
      split = split.source
    splits[name] = [dict(bucket) for bucket in protocol.buckets(split)]
  for path, array in jax.tree_util.tree_leaves_with_path(splits):
    yield jax.tree_util.keystr(path), np.ascontiguousarray(array)


def check(there: Data, here: Data, whose: str, goes_on: bool) -> None:
  """Raises ValueError if a run was on other data.

  `whose` begins the message. Where descriptions agree, a run that does not go
  on gets a warning of other numbers.
  """
  text = _described_otherwise(there.described, here.described)
  if not text and there.digest == here.digest:
    return
  words = f'{whose} with other data ({text or "other numbers in its arrays"})'
  if not text and not goes_on:
    print(f'WARNING: {words}', flush=True)
    return
  raise ValueError(
      f'{words}; put back the data that it was trained on, or pass another'
      ' --workdir'
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
