"""The compiled functions of an experiment: initialise, train, evaluate.

One call of `train_steps` or `train_epoch` does many steps in a loop on the
device. The state carries all that the next call needs, so it does not matter
where calls of `train_steps` begin and end: the numbers are the same.

On several devices the functions are the same. Each of them works on its part of
a batch, and they sum gradients, losses and BatchNorm's statistics: batches are
global, and dropout masks are those of the global batch.

Dimensions: N examples of a split, S steps of an epoch, B batch.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rnnzoo
from rnnzoo.tasks import protocol
from rnnzoo.training import at_once
from rnnzoo.training import loss_scaling as scaling_lib
from rnnzoo.training import placement as placements
from rnnzoo.training import visits as visits_lib

# The results of all examples of a split, batch by batch.
#
# Dimensions: N examples of a split, S batches, B examples of a batch.


class OnHost(NamedTuple):
  """A split that stays on the host.

  Attributes:
    examples: arrays [N, ...] by name.
    placement: the devices that evaluate.
  """

  examples: protocol.Examples
  placement: placements.Placement


def order(batch_size: int, num_devices: int, size: int) -> np.ndarray:
  """Returns the examples of each batch, int32 [S, B].

  The last batch is filled up with example 0, whose results are cut off.

  Args:
    batch_size: B, rounded up to a multiple of the number of devices.
    num_devices: that share a batch.
    size: N.
  """
  each = -(-min(size, batch_size) // num_devices)
  batch = each * num_devices
  num_batches = -(-size // batch)
  indices = np.zeros(num_batches * batch, np.int32)
  indices[:size] = np.arange(size)
  return indices.reshape(num_batches, batch)


def whole(
    evaluation_order: Callable[[int], np.ndarray],
    evaluate_batches: Callable[..., protocol.Evaluation],
    axis: int,
    params: nnx.State,
    statistics: nnx.State,
    split: Any,
    predict: bool = False,
) -> protocol.Evaluation:
  """Returns the results of all examples of a split.

  Args:
    evaluation_order: (N) -> int32 [S, B], the examples of each batch.
    evaluate_batches: the compiled function, which returns [..., S, B, ...].
    axis: which axis of its results is the first of these.
    params: the parameters.
    statistics: all else that the model stores.
    split: what `load` returned.
    predict: whether predictions are wanted.
  """

  def join(size, x):
    # Batches and the examples of each become one axis.
    x = np.asarray(x)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x[(slice(None),) * axis + (slice(size),)]

  def run_on_host(split):
    # One piece is on its way while the results of the one before are read.
    size, running, parts = protocol.num_examples(split.examples), [], []
    indices = evaluation_order(size)
    length = placements.batches_of_piece(split.examples, *indices.shape)
    for first in range(0, len(indices), length):
      steps = np.minimum(np.arange(first, first + length), len(indices) - 1)
      piece = split.placement.batches(split.examples, indices[steps]).examples
      running.append(
          evaluate_batches(params, statistics, piece, None, predict=predict)
      )
      if len(running) > 1:
        parts.append(jax.tree.map(np.asarray, running.pop(0)))
    parts.append(jax.tree.map(np.asarray, running.pop()))
    whole = jax.tree.map(lambda *x: np.concatenate(x, axis), *parts)
    return jax.tree.map(functools.partial(join, size), whole)

  def run(examples):
    if isinstance(examples, OnHost):
      return run_on_host(examples)
    if isinstance(examples, placements.Batches):
      (examples, size), indices = examples, None
    else:
      size = protocol.num_examples(examples)
      indices = evaluation_order(size)
    return jax.tree.map(
        functools.partial(join, size),
        evaluate_batches(
            params, statistics, examples, indices, predict=predict
        ),
    )

  if isinstance(split, Mapping | placements.Batches | OnHost):
    return run(split)
  parts = [run(bucket) for bucket in split]
  predictions = [part.predictions for part in parts] if predict else None
  joined = jax.tree.map(
      lambda *arrays: np.concatenate(arrays, axis),
      *[part._replace(predictions=None) for part in parts],
  )
  return joined._replace(predictions=predictions)


# The masks of DropConnect have a key that no count of dropout's keys reaches.
_DROPCONNECT = 2**31 - 1


class TrainState(NamedTuple):
  """The state that one step of training passes to the next.

  Attributes:
    params: the trained parameters.
    statistics: all else that the model stores: BatchNorm's running averages.
    optimizer: the optimiser's state.
    step: int32 [], steps done since the start of training.
    loss: float32 [], sum of the mean losses of this epoch's steps so far.
    scores: float32 [] each, likewise, of the scores that are metrics.
    gradient_norm: float32 [], likewise, of the whole gradient before anything
      is done to it, without those of steps that were skipped.
    loss_scaling: the state of loss scaling, None without it.
  """

  params: nnx.State
  statistics: nnx.State
  optimizer: optax.OptState
  step: jax.Array
  loss: jax.Array
  scores: dict[str, jax.Array]
  gradient_norm: jax.Array
  loss_scaling: scaling_lib.LossScaling | None = None


class Program(NamedTuple):
  """The compiled functions, shared by all seeds of an experiment.

  Attributes:
    steps_per_epoch: S.
    init: (key) -> TrainState.
    load: (split) -> it on the devices, as `evaluate` takes it.
    shuffle: (key, epoch) -> what `Visits.order` returns, int32 [S, B] for
      arrays: which examples each step sees.
    train_steps: (state, examples, order, num_steps, scale, key) -> the state
      `num_steps` later. `scale` multiplies the learning rate. The given state
      is donated: it cannot be used afterwards. Examples and order are those of
      `Visits.visit`.
    train_epoch: (state, examples, order, scale, key) -> the state S steps
      later, likewise. The compiler knows how many steps there are, so a GPU
      need not ask the host after each whether to go on.
    evaluate: (params, statistics, split, predict=False) -> the results of all
      its examples, numpy arrays [N, ...]. Predictions are None unless asked
      for, and a list for buckets.
    at_once: a `Program` of the same functions for several seeds in one call:
      states, orders, scales, keys and results have a leading axis, one entry a
      seed. Its `init` and `shuffle` are those of one seed.
  """

  steps_per_epoch: int
  init: Callable[..., TrainState]
  load: Callable[[protocol.Split], Any]
  shuffle: Callable[..., Any]
  train_steps: Callable[..., TrainState]
  train_epoch: Callable[..., TrainState]
  evaluate: Callable[..., protocol.Evaluation]
  at_once: Any = None


def make_program(
    task: protocol.Task,
    optimizer: optax.GradientTransformation,
    eval_batch_size: int,
    placement: placements.Placement = placements.ONE_DEVICE,
    loss_scale_interval: int | None = None,
    keep_data_on: str = 'device',
    dropconnect_rate: float = 0.0,
) -> Program:
  """Returns the compiled functions of an experiment.

  Args:
    task: what is learnt.
    optimizer: how.
    eval_batch_size: B in evaluation, where no gradients need memory; rounded up
      to a multiple of the number of devices.
    placement: the devices.
    loss_scale_interval: what `loss_scaling.interval` returned.
    keep_data_on: 'device', or 'host' for splits that are not to be loaded as a
      whole.
    dropconnect_rate: the share of entries of the recurrent matrices that a
      training step drops.

  Raises:
    ValueError: the task cannot build its model, or the model has no matrix of
      which a share is to be dropped.
  """
  visits = visits_lib.Visits(task.splits['train'], task.batch_size, placement)
  structure, params, _ = split(
      nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
  )
  if dropconnect_rate:
    drop = lambda params, key: rnnzoo.dropconnect(params, dropconnect_rate, key)
    try:
      jax.eval_shape(drop, params, jax.random.key(0))
    except ValueError as error:
      raise ValueError(
          f'config.model.dropconnect_rate={dropconnect_rate}: {error}'
      ) from error
  training = _Training(
      task=task,
      optimizer=optimizer,
      visits=visits,
      structure=structure,
      score_names=tuple(
          metric.name
          for metric in protocol.epoch_metrics(task)
          if not metric.of and metric.name != protocol.LOSS.name
      ),
      loss_scale_interval=loss_scale_interval,
      dropconnect_rate=dropconnect_rate,
  )
  compiled = functools.partial(jax.jit, **placement.outputs())
  init = jax.jit(training.init)
  evaluate_batches = compiled(
      training.evaluate_batches, static_argnames='predict'
  )

  # The number of steps is traced: calls of any length share one compilation.
  def train_steps(state, examples, order, num_steps, scale, key):
    return training.steps(state, examples, order, num_steps, scale, key)

  def train_epoch(state, examples, order, scale, key):
    num_steps = visits.steps_per_epoch
    return training.steps(state, examples, order, num_steps, scale, key)

  evaluation_order = functools.partial(
      order, eval_batch_size, placement.num_devices
  )

  def load(examples):
    if isinstance(examples, protocol.Generator):
      return examples
    if not isinstance(examples, Mapping):
      return tuple(map(load, examples))
    if keep_data_on == 'host':
      return OnHost(examples, placement)
    if placement.mesh is None:
      return jax.device_put(dict(examples))
    order = evaluation_order(protocol.num_examples(examples))
    return placement.batches(examples, order)

  evaluate = functools.partial(whole, evaluation_order)
  program = Program(
      steps_per_epoch=visits.steps_per_epoch,
      init=lambda key: placement.replicate(init(key)),
      load=load,
      shuffle=jax.jit(visits.order),
      train_steps=compiled(train_steps, donate_argnums=0),
      train_epoch=compiled(train_epoch, donate_argnums=0),
      evaluate=functools.partial(evaluate, evaluate_batches, 0),
  )
  return program._replace(
      at_once=program._replace(
          train_steps=at_once.train(train_steps),
          train_epoch=at_once.train(train_epoch),
          evaluate=functools.partial(
              evaluate, at_once.evaluate(evaluate_batches), 1
          ),
      )
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Training:
  """The functions of an experiment before they are compiled.

  Attributes:
    task: what is learnt.
    optimizer: how.
    visits: which examples each step sees.
    structure: of the model, without its arrays.
    score_names: of the scores that are metrics.
    loss_scale_interval: as for `make_program`.
    dropconnect_rate: likewise.
  """

  task: protocol.Task
  optimizer: optax.GradientTransformation
  visits: visits_lib.Visits
  structure: nnx.GraphDef
  score_names: tuple[str, ...]
  loss_scale_interval: int | None
  dropconnect_rate: float

  def init(self, key) -> TrainState:
    """Returns the state before the first step."""
    model = self.task.build_model(nnx.Rngs(key))
    _, params, statistics = split(model)
    params = rnnzoo.constrain(params)
    zero = jnp.zeros((), jnp.float32)
    return TrainState(
        params,
        statistics,
        self.optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        loss=zero,
        scores=dict.fromkeys(self.score_names, zero),
        gradient_norm=zero,
        loss_scaling=scaling_lib.begin(self.loss_scale_interval),
    )

  def loss(self, params, statistics, batch, key):
    """Returns the mean loss, and the new statistics and mean scores."""
    if self.dropconnect_rate:
      # A key that the stream of dropout keys does not have.
      own = jax.random.fold_in(key, _DROPCONNECT)
      params = rnnzoo.dropconnect(params, self.dropconnect_rate, own)
    # Variables of this trace: the model writes its running averages, and Rngs
    # count.
    model = nnx.merge(self.structure, params, statistics, copy=True)
    results = self.task.evaluate(model, batch, nnx.Rngs(dropout=key))
    mean = functools.partial(_mean, weights=results.weights)
    scores = jax.tree.map(mean, self._scores_of(results))
    _, _, statistics = split(model)
    return mean(results.losses), (statistics, scores)

  def step(self, state: TrainState, examples, order, scale, key) -> TrainState:
    """Returns the state one step later."""
    dropout_key = jax.random.fold_in(key, state.step)

    def differentiate(batch):
      return scaling_lib.differentiate(
          self.loss,
          state.loss_scaling,
          state.params,
          state.statistics,
          batch,
          dropout_key,
      )

    loss, (statistics, scores), gradients, scaling, finite = self.visits.visit(
        differentiate, examples, order, state.step
    )
    with jax.named_scope('optimizer'):
      updates, optimizer_state = self.optimizer.update(
          gradients, state.optimizer, state.params
      )
      updates = optax.tree.scale(scale, updates)
      params = rnnzoo.constrain(optax.apply_updates(state.params, updates))
    params, statistics, optimizer_state, norm = scaling_lib.choose(
        finite,
        (params, statistics, optimizer_state, optax.tree.norm(gradients)),
        (state.params, state.statistics, state.optimizer, 0.0),
    )
    first = state.step % self.visits.steps_per_epoch == 0
    total = lambda sum_, x: jnp.where(first, 0.0, sum_) + x
    return TrainState(
        params,
        statistics,
        optimizer_state,
        state.step + 1,
        total(state.loss, loss),
        jax.tree.map(total, state.scores, scores),
        total(state.gradient_norm, norm),
        scaling,
    )

  def steps(self, state, examples, order, num_steps, scale, key) -> TrainState:
    """Returns the state `num_steps` later."""
    return jax.lax.fori_loop(
        0,
        num_steps,
        lambda _, state: self.step(state, examples, order, scale, key),
        state,
    )

  def evaluate_batches(self, params, statistics, examples, order, predict):
    """Returns the results of batches, with predictions if `predict`."""

    def evaluate_batch(batch):
      model = nnx.merge(self.structure, params, statistics)
      if order is not None:
        batch = {name: array[batch] for name, array in examples.items()}
      results = self.task.evaluate(model, batch)
      return results._replace(
          scores=self._scores_of(results),
          predictions=results.predictions if predict else None,
      )

    return jax.lax.map(evaluate_batch, examples if order is None else order)

  def _scores_of(self, results):
    """Returns the scores that are metrics, or says which one is missing."""
    for name in self.score_names:
      if name not in results.scores:
        raise ValueError(
            f'{type(self.task).__name__}.evaluate must give the score {name!r},'
            ' which is one of the metrics'
        )
    return {name: results.scores[name] for name in self.score_names}


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Returns (structure, parameters, all else that the model stores)."""
  graphdef, params, statistics = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
  return graphdef, params, statistics


def _mean(x: jax.Array, weights: jax.Array | None) -> jax.Array:
  """Returns the weighted mean over the examples of the global batch."""
  if weights is None:
    return jnp.mean(x)
  weights = weights.astype(jnp.float32)
  return jnp.sum(weights * x) / jnp.sum(weights)
