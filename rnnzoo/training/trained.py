"""Trained models of a run, for users and for the modes of `train.py`."""

from collections.abc import Iterator
import dataclasses
import functools
import os
import pathlib
from typing import Any

from flax import nnx
import jax
import ml_collections

from rnnzoo import tasks
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.training import best_models
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import program as programs
from rnnzoo.training import reporting
from rnnzoo.training import run_directory


@dataclasses.dataclass(frozen=True)
class Trained:
  """The model of the best epoch of one seed.

  Attributes:
    model: it.
    config: of the run.
    seed: which of the run's seeds.
    task: with its data; `task.splits` shows what inputs look like.
  """

  model: nnx.Module
  config: ml_collections.ConfigDict
  seed: int
  task: tasks.Task

  def predict(self, inputs: Any) -> jax.Array:
    """Returns predictions, by one compiled call for inputs of one shape.

    Args:
      inputs: arrays [B, ...], as in the task's splits; the task's
        `check_inputs` says which, and sees all but traced ones.

    Raises:
      ValueError: the task cannot use these inputs.
      NotImplementedError: the task has no such thing; the message says so.
    """
    leaves = jax.tree.leaves(inputs)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
      inputs = self.task.check_inputs(inputs)
    return self._compiled(nnx.state(self.model), inputs)

  @functools.cached_property
  def _compiled(self):
    graphdef = nnx.graphdef(self.model)
    return jax.jit(
        lambda state, inputs: self.task.predict(
            nnx.merge(graphdef, state), inputs
        )
    )


def load(directory: str | os.PathLike[str], seed: int | None = None) -> Trained:
  """Returns a trained model of a run, finished or not.

  Nothing is written, so the run may go on meanwhile.

  Args:
    directory: the run directory.
    seed: which of its seeds; None for the first.

  Raises:
    FileNotFoundError: there is no run, or the seed has no checkpoint.
    ValueError: the run had another task or other data than there are here.
    RunFileError: a file is not what was written there.
  """
  path = pathlib.Path(directory).expanduser()
  for name in ('config.json', 'run.json'):
    if not (path / name).is_file():
      raise FileNotFoundError(f'{path} holds no run: it has no {name}')
  config = run_directory.read_config(path / 'config.json')
  fields.check(config, {'task': fields.text()}, 'config')
  task = tasks.find(config.task)(config)
  dataset = files.read_json(path / 'run.json', dict).get('dataset')
  if task.dataset != dataset:
    raise ValueError(
        f'the run in {path} was on {dataset!r}, but the data here are'
        f' {task.dataset!r}'
    )
  seed = config.seed if seed is None else seed
  return Trained(best_models.restore(task, path, seed), config, seed, task)


def evaluate(experiment: experiments.Experiment) -> str:
  """Tests the best model of each seed once more; returns the last line.

  Raises:
    FileNotFoundError: a seed has no checkpoint.
  """
  config, task = experiment.config, experiment.task
  metrics, tests = protocol.all_metrics(task), []
  test = experiment.program.load(task.splits['test'])
  for seed in range(config.seed, config.seed + config.num_seeds):
    model = best_models.best_model(experiment, seed)
    best = experiment.placement.replicate(programs.split(model)[1:])
    results = best_models.evaluate(experiment, best, test)
    for name, values in results.items():
      numbers = ', '.join(f'{m.name} {m.text(values[m.name])}' for m in metrics)
      processes.say(f'seed {seed}: {name} {numbers}')
    tests.append(results['test'])
  summary = {'test': reporting.summary(tests, metrics)}
  return reporting.main_result(summary, metrics)


def predict(
    experiment: experiments.Experiment, lines: Iterator[str]
) -> Iterator[str]:
  """Returns a line for each line, by the first seed's best model."""
  model = best_models.best_model(experiment, experiment.config.seed)
  return iter(
      experiment.task.predict_lines(
          model, (line.rstrip('\n') for line in lines)
      )
  )


def sample(experiment: experiments.Experiment, prompt: str) -> Iterator[str]:
  """Returns pieces of text, by the first seed's best model."""
  seed = experiment.config.seed
  model = best_models.best_model(experiment, seed)
  return iter(experiment.task.sample(model, prompt, jax.random.key(seed)))
