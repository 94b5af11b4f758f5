"""From a config to an experiment that is ready to run.

Everything that can be wrong with a config, the data or the run directory is
found here, before any training, and told in one sentence.
"""

import pathlib
from typing import NamedTuple

import jax
import ml_collections
import optax

from rnnzoo import tasks
from rnnzoo.training import optimization
from rnnzoo.training import program as programs
from rnnzoo.training import run_directory

MONITORS = ('validation_loss', 'validation_accuracy')


class Experiment(NamedTuple):
  """A config that was found to be in order, ready to run.

  Attributes:
    config: the resolved config.
    workdir: the run directory, which belongs to this config.
    name: of the experiment.
    task: the task with its data.
    program: the compiled functions.
    schedule: the learning rate as a function of the step.
    plateau: the rule that lowers the learning rate, or None.
    steps_per_epoch: steps in which each example is seen.
  """

  config: ml_collections.ConfigDict
  workdir: pathlib.Path
  name: str
  task: tasks.Task
  program: programs.Program
  schedule: optax.Schedule
  plateau: optax.GradientTransformationExtraArgs | None
  steps_per_epoch: int


def prepare(
    config: ml_collections.ConfigDict, workdir: str, name: str = 'experiment'
) -> Experiment:
  """Reads the data and checks all that can be checked before training.

  Args:
    config: what to do; `configs/base_smnist.py` explains the fields.
    workdir: the run directory, which is resumed if it holds a run; '' for a
      new one under runs/.
    name: of the experiment, for the report.

  Raises:
    ValueError: a field's value cannot be, or the run directory belongs to
      another config.
    NotImplementedError: the implementation that the config names cannot run.
    OSError: data are missing.
  """
  _check(config)
  plateau = optimization.make_plateau(config.optimizer)
  optimization.make_optimizer(config.optimizer, 1)  # Before the data.
  task = tasks.TASKS[config.task](config)
  num_examples = len(task.splits['train']['label'])
  steps_per_epoch = -(-num_examples // task.batch_size)
  num_steps = config.num_epochs * steps_per_epoch
  program = programs.make_program(
      task,
      optimization.make_optimizer(config.optimizer, num_steps),
      config.eval_batch_size,
  )
  key = jax.random.key(0)
  # Tracing one step, without running it, finds what the model will not take.
  jax.eval_shape(
      program.train_steps,
      jax.eval_shape(program.init, key),
      task.splits['train'],
      jax.eval_shape(program.shuffle, key, 0),
      0,
      1.0,
      key,
  )
  return Experiment(
      config=config,
      workdir=run_directory.open_or_create(config, task.dataset, workdir, name),
      name=name,
      task=task,
      program=program,
      schedule=optimization.make_schedule(config.optimizer, num_steps),
      plateau=plateau,
      steps_per_epoch=steps_per_epoch,
  )


def _check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if a field that training itself reads cannot be."""
  for name, value, least in (
      ('num_epochs', config.num_epochs, 1),
      ('num_seeds', config.num_seeds, 1),
      ('seed', config.seed, 0),
      ('batch_size', config.batch_size, 1),
      ('eval_batch_size', config.eval_batch_size, 1),
      ('checkpoint_every', config.checkpoint_every, 1),
      ('checkpoint_seconds', config.checkpoint_seconds, 0),
      ('early_stopping.patience', config.early_stopping.patience, 0),
  ):
    if value < least:
      raise ValueError(f'config.{name} must be at least {least}, got {value}')
  for name, value, known in (
      ('task', config.task, tasks.TASKS),
      ('monitor', config.monitor, MONITORS),
  ):
    if value not in known:
      raise ValueError(
          f'config.{name} is {value!r}; known are {", ".join(map(repr, known))}'
      )
