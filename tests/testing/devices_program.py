"""Training steps on a number of devices, for training/devices_test.py.

  python -m tests.testing.devices_program [KIND:]COUNT...

For each count, it trains two epochs of a task with BatchNorm and dropout, or of
one whose training data are of this kind, 'generator' or 'buckets', and prints a
line of JSON: the numbers of all leaves that training leaves behind, and the
collectives in the compiled step.
"""

import json
import math
import re
import sys

import jax
import numpy as np
import optax

from rnnzoo import tasks
from rnnzoo.training import feed as feeds
from rnnzoo.training import placement as placements
from rnnzoo.training import step as step_lib
from tests.testing import made_up_data
from tests.testing import made_up_task

KINDS = (
    'all-reduce',
    'all-gather',
    'all-to-all',
    'collective-permute',
    'reduce-scatter',
)


def train(count: int, kind: str) -> dict:
  """Returns what is left after two epochs on `count` devices."""
  task: tasks.Task
  if kind:
    task = made_up_data.SumTask(kind=kind)
  else:
    task = made_up_task.SignTask(num_layers=2, norm='batch', dropout_rate=0.2)
  placement = placements.choose(task.batch_size, count)
  program = step_lib.Program(task, optax.adam(1e-2), 4, placement)
  train_split = task.splits['train']
  is_generator = isinstance(train_split, tasks.Generator)
  if placement.mesh is None and not is_generator:
    train_split = program.load(train_split)
  feed = feeds.Feed(program, placement, train_split, jax.random.key(1), 2)
  state = program.init(jax.random.key(0))
  for epoch in (1, 2):
    (piece,) = feed.epoch(epoch)
    rest = *piece, 1.0, jax.random.key(2)
    if epoch == 1:
      step = program.train_steps.lower(state, *rest).compile()
    state = step(state, *rest)
  evaluation = program.evaluate(
      state.params,
      state.statistics,
      program.load(task.splits['validation']),
      predict=True,
  )
  leaves = jax.tree.leaves((state, evaluation))
  return {
      'count': count,
      'leaves': [np.asarray(x).astype(float).tolist() for x in leaves],
      'sizes': [x.size for x in jax.tree.leaves(state.params)],
      'collectives': collectives(step.as_text()),
      'devices': len(jax.tree.leaves(state)[0].sharding.device_set),
  }


def collectives(text: str) -> list[tuple[str, int, str]]:
  """Returns (kind, how many numbers, where) of all that devices exchange.

  Args:
    text: of a compiled program. A loop's body is a computation of its own.
  """
  found = []
  computation = ''
  for line in text.splitlines():
    if line and not line[0].isspace():
      computation = line.split()[0]
    match = re.search(rf' ({"|".join(KINDS)})(?:-start)?\(', line)
    if match:
      shapes = re.findall(r'\w+\[([\d,]*)\]', line[: match.start()])
      sizes = [math.prod(map(int, filter(None, s.split(',')))) for s in shapes]
      found.append((match[1], sum(sizes), computation))
  return found


if __name__ == '__main__':
  for argument in sys.argv[1:]:
    kind, _, number = argument.rpartition(':')
    print(json.dumps(train(int(number), kind)), flush=True)
