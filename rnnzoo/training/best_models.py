"""The models of best epochs: read from checkpoints, and tested."""

import pathlib
from typing import Any

from flax import nnx

from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import program as programs
from rnnzoo.training import run_directory


def best_model(experiment: experiments.Experiment, seed: int) -> nnx.Module:
  """Returns the model of a seed's best epoch so far.

  Args:
    experiment: what `prepare` returned for the run directory.
    seed: which of its seeds.

  Raises:
    FileNotFoundError: the seed has no checkpoint.
  """
  return restore(experiment.task, experiment.workdir, seed)


def restore(
    task: protocol.Task, workdir: pathlib.Path, seed: int
) -> nnx.Module:
  """Returns the model of a seed's best epoch so far.

  Args:
    task: whose model it is.
    workdir: the run directory.
    seed: which of its seeds.

  Raises:
    FileNotFoundError: the seed has no checkpoint.
  """
  directory = workdir / f'seed_{seed}' / 'checkpoints'
  if not directory.is_dir():
    parents = [found.parent for found in workdir.glob('seed_*/checkpoints')]
    names = sorted(parent.name.removeprefix('seed_') for parent in parents)
    there = f'those of seeds {", ".join(names)}' if names else 'none at all'
    raise FileNotFoundError(
        f'there is no checkpoint of seed {seed!r} in {workdir}; there are'
        f' {there}'
    )
  abstract = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(seed)))
  graphdef, *state = programs.split(abstract)
  with run_directory.checkpoints(workdir, seed) as checkpoints:
    best = checkpoints.restore_best(tuple(state))
  if best is None:
    raise FileNotFoundError(f'there is no checkpoint in {directory}')
  return nnx.merge(graphdef, *best)


def evaluate(
    experiment: experiments.Experiment, best: Any, test: Any
) -> dict[str, Any]:
  """Returns the results of 'test', and of all splits that are further ones.

  Args:
    experiment: what `prepare` returned.
    best: (parameters, statistics).
    test: what `program.load` made of that split.
  """
  program, task = experiment.program, experiment.task
  abstract = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
  model = nnx.merge(programs.split(abstract)[0], *best, copy=True)
  tests = {}
  for name, split in task.splits.items():
    if name not in ('train', 'validation'):
      # One at a time: they may be long.
      loaded = test if name == 'test' else program.load(split)
      evaluation = program.evaluate(*best, loaded, predict=True)
      measured = task.measure(model, name, evaluation.predictions)
      tests[name] = metrics_lib.of_test(evaluation, measured, task)
  return tests
