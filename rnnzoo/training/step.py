"""The compiled functions of an experiment: initialise, train, evaluate.

One call of `train_steps` or `train_epoch` does many steps in a loop on the
device. The state carries all that the next call needs, so the numbers do not
depend on where calls of `train_steps` begin and end.

The functions also run on several devices. Each device works on its part of a
batch, and they sum gradients, losses and BatchNorm's statistics: batches are
global, and dropout draws its masks for the global batch.

Dimensions: N examples of a split, S steps of an epoch, B batch.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rnnzoo
from rnnzoo.tasks import protocol
from rnnzoo.training import placement as placements
from rnnzoo.training import visits as visits_lib

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
    scores: float32 [] each, a sum like `loss` of each score that is a metric.
    gradient_norm: float32 [], a sum like `loss` of the whole gradient's norm
      before anything is done to it, without steps that were skipped.
    loss_scale: the factor of the loss in float16; None for none.
    skipped: int32 [], steps that were skipped since the start of training.
  """

  params: nnx.State
  statistics: nnx.State
  optimizer: optax.OptState
  step: jax.Array
  loss: jax.Array
  scores: dict[str, jax.Array]
  gradient_norm: jax.Array
  loss_scale: dynamic_scale.DynamicScale | None
  skipped: jax.Array


class Loaded(NamedTuple):
  """A split whose batches are gathered already, or on the host.

  Attributes:
    pieces: function that returns arrays [K, B, ...] by name, K at a time.
    size: the number of examples, N; results of later examples are cut off.
  """

  pieces: Callable[[], Iterable[Mapping[str, jax.Array]]]
  size: int


class Program(NamedTuple):
  """The compiled functions, shared by all seeds of an experiment.

  Attributes:
    steps_per_epoch: the number of steps, S.
    init: (key) -> TrainState.
    load: (split) -> the split as `evaluate` takes it, on the devices.
    shuffle: (key, epoch) -> the order of an epoch, see `Visits.order`.
    train_steps: (state, examples, order, num_steps, scale, key) -> the state
      `num_steps` later. `scale` multiplies the learning rate. The given state
      is donated: it cannot be used afterwards. `Visits.visit` explains examples
      and order.
    train_epoch: (state, examples, order, scale, key) -> the state S steps
      later. The compiler knows how many steps there are, so a GPU need not ask
      the host after each whether to go on.
    evaluate: (params, statistics, split, predict=False) -> the results of all
      its examples, numpy arrays [N, ...]. Predictions are None unless asked
      for, and a list for buckets.
    at_once: a `Program` whose functions take several seeds in one call: states,
      orders, scales, keys and results have a leading axis, one entry a seed.
      Its `init` and `shuffle` take one seed.
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
    loss_scale: dynamic_scale.DynamicScale | None = None,
    keep_data_on: str = 'device',
    dropconnect_rate: float = 0.0,
) -> Program:
  """Returns the compiled functions of an experiment.

  Args:
    task: the data, the model and its loss.
    optimizer: the function from gradients to updates.
    eval_batch_size: B in evaluation, where no gradients need memory; rounded up
      to a multiple of the number of devices.
    placement: the devices.
    loss_scale: the factor of the loss at the start; None for none.
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
  _check_dropconnect(params, dropconnect_rate)
  functions = _Functions(
      task=task,
      optimizer=optimizer,
      visits=visits,
      structure=structure,
      score_names=tuple(
          metric.name
          for metric in protocol.epoch_metrics(task)
          if not metric.of and metric.name != protocol.LOSS.name
      ),
      loss_scale=loss_scale,
      dropconnect_rate=dropconnect_rate,
  )
  init = jax.jit(functions.init)
  batches_of = functools.partial(
      evaluation_order, eval_batch_size, placement.num_devices
  )
  jit = functools.partial(jax.jit, **placement.outputs())

  def program(axis, over_seeds):
    def evaluate_batches(params, statistics, examples, order, predict):
      one = functools.partial(functions.evaluate_batches, predict=predict)
      return over_seeds(one, (0, 0, None, None))(
          params, statistics, examples, order
      )

    # The number of steps is traced: calls of any length share one compilation.
    steps = over_seeds(functions.steps, (0, None, 0, None, 0, 0))
    epoch = over_seeds(functions.epoch, (0, None, 0, 0, 0))
    return Program(
        steps_per_epoch=visits.steps_per_epoch,
        init=lambda key: placement.replicate(init(key)),
        load=functools.partial(load, placement, keep_data_on, batches_of),
        shuffle=jax.jit(visits.order),
        train_steps=jit(steps, donate_argnums=0),
        train_epoch=jit(epoch, donate_argnums=0),
        evaluate=functools.partial(
            evaluate,
            jit(evaluate_batches, static_argnames='predict'),
            axis,
            batches_of,
        ),
    )

  one_seed = program(0, lambda function, unused_axes: function)
  return one_seed._replace(at_once=program(1, jax.vmap))


def _check_dropconnect(params: nnx.State, rate: float) -> None:
  """Raises ValueError if there is no matrix of which a share can be dropped."""
  drop = lambda params, key: rnnzoo.dropconnect(params, rate, key)
  try:
    if rate:
      jax.eval_shape(drop, params, jax.random.key(0))
  except ValueError as error:
    raise ValueError(
        f'config.model.dropconnect_rate={rate}: {error}'
    ) from error


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Functions:
  """The functions of an experiment before they are compiled.

  Attributes:
    task: the data, the model and its loss.
    optimizer: the function from gradients to updates.
    visits: the examples that each step sees.
    structure: the model without its arrays.
    score_names: the scores that are metrics.
    loss_scale: the factor of the loss at the start, see `make_program`.
    dropconnect_rate: the share of entries that a step drops.
  """

  task: protocol.Task
  optimizer: optax.GradientTransformation
  visits: visits_lib.Visits
  structure: nnx.GraphDef
  score_names: tuple[str, ...]
  loss_scale: dynamic_scale.DynamicScale | None
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
        loss_scale=self.loss_scale,
        skipped=jnp.zeros((), jnp.int32),
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
      given = state.params, state.statistics, batch, dropout_key
      if state.loss_scale is None:
        found = jax.value_and_grad(self.loss, has_aux=True)(*given)
        return None, None, *found
      return state.loss_scale.value_and_grad(self.loss, has_aux=True)(*given)

    loss_scale, finite, (loss, (statistics, scores)), gradients = (
        self.visits.visit(differentiate, examples, order, state.step)
    )
    # flax has scaled ones in float32; an optimiser wants the parameters' dtype.
    gradients = jax.tree.map(
        lambda g, p: g.astype(p.dtype), gradients, state.params
    )
    with jax.named_scope('optimizer'):
      updates, optimizer_state = self.optimizer.update(
          gradients, state.optimizer, state.params
      )
      updates = optax.tree.scale(scale, updates)
      params = rnnzoo.constrain(optax.apply_updates(state.params, updates))
    first = state.step % self.visits.steps_per_epoch == 0
    total = lambda sum_, x: jnp.where(first, 0.0, sum_) + x
    new = TrainState(
        params,
        statistics,
        optimizer_state,
        state.step + 1,
        total(state.loss, loss),
        jax.tree.map(total, state.scores, scores),
        total(state.gradient_norm, optax.tree.norm(gradients)),
        loss_scale,
        state.skipped,
    )
    if finite is None:
      return new
    # A step whose gradients are not finite changes nothing but its counters.
    skipped = new._replace(
        params=state.params,
        statistics=state.statistics,
        optimizer=state.optimizer,
        gradient_norm=total(state.gradient_norm, 0.0),
        skipped=state.skipped + 1,
    )
    return jax.tree.map(functools.partial(jnp.where, finite), new, skipped)

  def epoch(self, state, examples, order, scale, key) -> TrainState:
    """Returns the state an epoch later."""
    num_steps = self.visits.steps_per_epoch
    return self.steps(state, examples, order, num_steps, scale, key)

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


def evaluation_order(
    batch_size: int, num_devices: int, size: int
) -> np.ndarray:
  """Returns the examples of each batch of a test, int32 [S, B].

  The last batch is filled up with example 0, whose results are cut off.

  Args:
    batch_size: batch size B, rounded up to a multiple of the number of devices.
    num_devices: the number of devices that share a batch.
    size: the number of examples, N.
  """
  batch = -(-min(size, batch_size) // num_devices) * num_devices
  indices = np.zeros(-(-size // batch) * batch, np.int32)
  indices[:size] = np.arange(size)
  return indices.reshape(-1, batch)


def load(
    placement: placements.Placement,
    keep_data_on: str,
    batches_of: Callable[[int], np.ndarray],
    examples: Any,
) -> Any:
  """Returns a split as `evaluate` takes it, on the devices if it is to be.

  Args:
    placement: the devices.
    keep_data_on: 'device' or 'host'.
    batches_of: (N) -> int32 [S, B], the examples of each batch.
    examples: the split.
  """
  if not isinstance(examples, Mapping):
    rest = placement, keep_data_on, batches_of
    return tuple(load(*rest, bucket) for bucket in examples)
  if keep_data_on == 'device' and placement.mesh is None:
    return jax.device_put(dict(examples))
  size = protocol.num_examples(examples)
  pieces = functools.partial(
      placement.pieces, examples, batches_of(size), keep_data_on
  )
  if keep_data_on == 'host':
    return Loaded(pieces, size)
  held = list(pieces())
  return Loaded(lambda: held, size)


def evaluate(
    evaluate_batches: Callable[..., protocol.Evaluation],
    axis: int,
    batches_of: Callable[[int], np.ndarray],
    params: nnx.State,
    statistics: nnx.State,
    split: Any,
    predict: bool = False,
) -> protocol.Evaluation:
  """Returns the results of all examples of a split.

  Args:
    evaluate_batches: the compiled function, which returns [..., S, B, ...].
    axis: the index of axis S of its results.
    batches_of: (N) -> int32 [S, B], the examples of each batch.
    params: the parameters.
    statistics: all else that the model stores.
    split: a result of `load`, or examples.
    predict: whether predictions are wanted.
  """
  if not isinstance(split, Mapping | Loaded):
    rest = evaluate_batches, axis, batches_of, params, statistics
    of_buckets = [evaluate(*rest, bucket, predict) for bucket in split]
    predictions = [part.predictions for part in of_buckets] if predict else None
    joined = jax.tree.map(
        lambda *arrays: np.concatenate(arrays, axis),
        *[part._replace(predictions=None) for part in of_buckets],
    )
    return joined._replace(predictions=predictions)
  order = None
  if isinstance(split, Mapping):
    order = batches_of(protocol.num_examples(split))
    split = Loaded(
        functools.partial(iter, [split]), protocol.num_examples(split)
    )
  parts: list[protocol.Evaluation] = []
  for examples in split.pieces():
    parts.append(
        evaluate_batches(params, statistics, examples, order, predict=predict)
    )
    # One piece is on its way while the results of the one before are read.
    parts[-2:-1] = [jax.tree.map(np.asarray, part) for part in parts[-2:-1]]

  def join(*arrays):
    # Batches and the examples of each become one axis.
    x = np.concatenate(arrays, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x[(slice(None),) * axis + (slice(split.size),)]

  return jax.tree.map(join, *parts)


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
