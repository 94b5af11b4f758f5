"""An epoch: training, validation, conclusions, of one seed or several."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rnnzoo.tasks import protocol
from rnnzoo.training import at_once
from rnnzoo.training import calls
from rnnzoo.training import checkpointing
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import loss_scaling
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import pieces
from rnnzoo.training import records as records_lib
from rnnzoo.training import seed_state


@dataclasses.dataclass(eq=False)
class Seed:
  """One of the seeds that train at once.

  Attributes:
    seed: of initialisation, shuffling and dropout.
    run: how far it has come.
    feed: its training examples.
    key: of dropout.
    checkpoints: its checkpoints.
    records: what is told and written of it.
  """

  seed: int
  run: seed_state.SeedState
  feed: feeds.Feed | pieces.Pieces
  key: jax.Array
  checkpoints: checkpointing.Checkpoints
  records: records_lib.Records


def find_active(
    experiment: experiments.Experiment, group: Sequence[Seed]
) -> list[Seed]:
  """Returns the seeds that train next, in one compiled call; [] at the end.

  A call has one lesson of a `Generator`. A process that was killed may have
  left some seeds an epoch ahead of others: those that are in the next lesson
  wait.
  """
  going = [one for one in group if not one.run.stopped]
  lessons = [lesson(experiment, one) for one in going]
  return [
      one
      for one, own in zip(going, lessons, strict=True)
      if own == min(lessons)
  ]


def lesson(experiment: experiments.Experiment, one: Seed) -> int:
  """Returns the index of the lesson that a seed's next epoch has."""
  split = experiment.task.splits['train']
  if not isinstance(split, protocol.Generator):
    return 0
  return split.lesson(len(one.run.history) + 1)


def train(
    experiment: experiments.Experiment,
    group: Sequence[Seed],
    active: Sequence[Seed],
) -> tuple[Any, Any]:
  """Trains for one epoch; returns parameters and statistics.

  Args:
    experiment: what `prepare` returned.
    group: the seeds of the compiled call. Those of several have a leading axis.
    active: the ones whose state changes, of `find_active`.
  """
  steps = experiment.steps_per_epoch

  def tell(done, whole=False):
    for one in active if whole else active[:1]:
      one.records.update(len(one.run.history) * steps + done)

  program = experiment.program
  # The others take part in an epoch of these.
  epochs: list[Any] = [
      one.feed.epoch(len((one if one in active else active[0]).run.history) + 1)
      for one in group
  ]
  if isinstance(group[0].feed, pieces.Pieces):
    return _train_from_host(experiment, group[0], epochs[0], tell)
  states = [one.run.state for one in group]
  scales = [_scale(experiment, one.run) for one in group]
  keys = [one.key for one in group]
  if len(group) == 1:
    examples, order = epochs[0]
    state = calls.run_epoch(
        program, states[0], examples, order, scales[0], keys[0], tell
    )
    group[0].run.state = state
    return state.params, state.statistics
  examples, order = epochs[0]
  if order is None:  # Of a generator, each seed has a key.
    examples = at_once.stack([examples for examples, _ in epochs])
  else:
    order = at_once.stack([order for _, order in epochs])
  state = calls.run_epoch(
      program.at_once,
      at_once.stack(states),
      examples,
      order,
      at_once.stack(scales),
      at_once.stack(keys),
      tell,
  )
  tell(steps, whole=True)
  for one, own in zip(group, at_once.unstack(state, len(group)), strict=True):
    if one in active:
      one.run.state = own
  return state.params, state.statistics


def _train_from_host(
    experiment: experiments.Experiment,
    one: Seed,
    epoch: Iterator[pieces.Piece],
    tell: Callable[[int], None],
) -> tuple[Any, Any]:
  """Trains a seed for one epoch; returns parameters and statistics."""
  state = calls.run_pieces(
      experiment.program,
      one.run.state,
      epoch,
      _scale(experiment, one.run),
      one.key,
      tell,
  )
  one.run.state = state
  return state.params, state.statistics


def validate(
    experiment: experiments.Experiment,
    group: Sequence[Seed],
    trained: tuple[Any, Any],
    split: Any,
) -> dict[int, protocol.Evaluation]:
  """Returns the results of the validation by seed.

  Args:
    experiment: what `prepare` returned.
    group: the seeds.
    trained: what `train` returned of them.
    split: on the devices.
  """
  program = experiment.program
  if len(group) == 1:
    return {group[0].seed: program.evaluate(*trained, split)}
  whole = program.at_once.evaluate(*trained, split)
  return {
      one.seed: jax.tree.map(lambda x, place=place: x[place], whole)
      for place, one in enumerate(group)
  }


def conclude(
    experiment: experiments.Experiment,
    run: seed_state.SeedState,
    evaluation: protocol.Evaluation,
) -> bool:
  """Draws the conclusions of an epoch, and returns whether it is the best.

  Args:
    experiment: what `prepare` returned.
    run: the seed.
    evaluation: of its validation.
  """
  config, epoch = experiment.config, len(run.history) + 1
  metrics = protocol.epoch_metrics(experiment.task)
  validation = metrics_lib.of_examples(evaluation, metrics)
  mean = lambda total: float(total) / experiment.steps_per_epoch
  totals = run.state.scores | {'loss': run.state.loss}
  train = metrics_lib.of_means(jax.tree.map(mean, totals), metrics)
  scaling = run.state.loss_scaling
  before = sum(row.get('skipped_steps', 0) for row in run.history)
  skipped = loss_scaling.skipped_steps(scaling) - before
  num_updates = max(experiment.steps_per_epoch - skipped, 1)
  row = {
      'epoch': epoch,
      # Of the last step, without the digits that float32 makes up.
      'learning_rate': float(f'{learning_rate(experiment, run, -1):.6g}'),
      **{f'train_{name}': value for name, value in train.items()},
      'gradient_norm': float(run.state.gradient_norm) / num_updates,
      **{f'validation_{name}': value for name, value in validation.items()},
      **learned_numbers(run.state.params),
  }
  if scaling is not None:
    row |= {
        'skipped_steps': skipped,
        'loss_scale': float(scaling.dynamic.scale),
    }
  run.history.append(row)
  warm = _steps(run) >= config.optimizer.warmup_steps
  return run.conclude(
      config,
      experiment.plateau,
      metrics,
      functools.partial(learning_rate, experiment, run) if warm else None,
      lesson_epochs=_lesson_epochs(experiment),
  )


def _lesson_epochs(experiment: experiments.Experiment) -> int:
  """Returns how many epochs have lessons that come first."""
  split = experiment.task.splits['train']
  if not isinstance(split, protocol.Generator):
    return 0
  return sum(num_epochs for num_epochs, _ in split.lessons)


def learned_numbers(params: Any) -> dict[str, float]:
  """Returns the parameters that are one number, A-GRU's ε say, by path."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='.')
  return {
      name(path).removesuffix('.value'): float(leaf)
      for path, leaf in jax.tree.leaves_with_path(params)
      if leaf.ndim == 0
  }


def _scale(
    experiment: experiments.Experiment, run: seed_state.SeedState
) -> jax.Array:
  """Returns the plateau rule's factor of the learning rate."""
  return run.plateau.scale if experiment.plateau else jnp.ones(())


def learning_rate(
    experiment: experiments.Experiment,
    run: seed_state.SeedState,
    offset: int = 0,
) -> float:
  """Returns the learning rate of the next step, or so many steps later."""
  step = jnp.maximum(_steps(run) + offset, 0)
  return float(experiment.schedule(step) * _scale(experiment, run))


def _steps(run: seed_state.SeedState) -> jax.Array:
  """Returns the steps that the optimiser knows of: none that was skipped."""
  return run.state.step - loss_scaling.skipped_steps(run.state.loss_scaling)
