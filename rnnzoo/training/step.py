"""The compiled functions of an experiment: initialise, train, evaluate.

One call of `train_steps` does many steps in a loop on the device. The state
carries all that the next call needs, so the numbers do not depend on where
calls begin and end.

The functions also run on several devices. Each device works on its part of a
batch, and they sum gradients, losses and BatchNorm's statistics: batches are
global, and dropout draws its masks for the global batch.

Dimensions: N examples of a split, S steps of an epoch, B batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import copy
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
from rnnzoo.training import optimization
from rnnzoo.training import placement as placements
from rnnzoo.training import visits as visits_lib

# The masks of DropConnect have a key that no count of dropout's keys reaches.
_DROPCONNECT = 2**31 - 1


class TrainState(NamedTuple):
  """The state that one step of training passes to the next."""

  params: nnx.State  # The trained parameters.
  # All else that the model stores: BatchNorm's running averages.
  statistics: nnx.State
  optimizer: optax.OptState  # The optimiser's state.
  step: jax.Array  # int32 [], steps done since the start of training.
  # float32 [], sum of the mean losses of this epoch's steps so far.
  loss: jax.Array
  # float32 [] each, a sum like `loss` of each score that is a metric.
  scores: dict[str, jax.Array]
  # float32 [], a sum like `loss` of the whole gradient's norm before anything
  # is done to it, without steps that were skipped.
  gradient_norm: jax.Array
  # The factor of the loss in float16; None for none.
  loss_scale: dynamic_scale.DynamicScale | None
  # int32 [], steps that were skipped since the start of training.
  skipped: jax.Array
  # The mean of the parameters of so many steps, float32 []; while these are 0,
  # the parameters. None for training without a mean.
  mean: tuple[nnx.State, jax.Array] | None = None

  @property
  def tested(self) -> tuple[nnx.State, nnx.State]:
    """Returns the parameters and statistics that are validated and kept."""
    params = self.params if self.mean is None else self.mean[0]
    return params, self.statistics


class Loaded(NamedTuple):
  """A split whose batches are gathered already, or on the host."""

  # Function that returns arrays [K, B, ...] by name, K at a time.
  pieces: Callable[[], Iterable[Mapping[str, jax.Array]]]
  size: int  # The number of examples, N; results of later examples are cut off.


class Program:
  """The compiled functions of an experiment, shared by all of its seeds.

  Attributes:
    steps_per_epoch: the number of steps, S.
    shuffle: (key, epoch) -> the order of an epoch, see `Visits.order`.
    train_steps: (state, examples, order, num_steps, scale, key) -> the state
      `num_steps` later, S later for None. Then the compiler knows how many
      steps there are, so a GPU need not ask the host after each whether to go
      on. `scale` multiplies the learning rate. The given state is donated: it
      cannot be used afterwards. `Visits.visit` explains examples and order.

  `eval_batch_size` is rounded up to a multiple of the number of devices;
  `loss_scale` is the factor of the loss at the start, None for none;
  `keep_data_on` is 'device', or 'host' for splits that are not to be loaded
  whole; `dropconnect_rate` is the share of entries of the recurrent matrices
  that a training step drops. Parameters of factor 0 in `rate_factors` are
  frozen, all others are the optimizer's matter. `averages` is whether states
  hold the mean of parameters.
  """

  def __init__(
      self,
      task: protocol.Task,
      optimizer: optax.GradientTransformation,
      eval_batch_size: int,
      placement: placements.Placement = placements.ONE_DEVICE,
      loss_scale: dynamic_scale.DynamicScale | None = None,
      keep_data_on: str = 'device',
      dropconnect_rate: float = 0.0,
      rate_factors: Sequence[tuple[str, float]] = (),
      averages: bool = False,
  ):
    self._averages = averages
    self._task, self._optimizer = task, optimizer
    self._eval_batch_size, self._placement = eval_batch_size, placement
    self._loss_scale, self._keep_data_on = loss_scale, keep_data_on
    self._dropconnect_rate = dropconnect_rate
    self._visits = visits_lib.Visits(
        task.splits['train'], task.batch_size, placement
    )
    self.steps_per_epoch = self._visits.steps_per_epoch
    self._structure, params, _ = abstract(task)
    self._rate_factors = optimization.rate_factors(rate_factors)(params)
    if dropconnect_rate:
      try:
        jax.eval_shape(self._drop, params, jax.random.key(0))
      except ValueError as error:
        raise ValueError(
            f'config.model.dropconnect_rate={dropconnect_rate}: {error}'
        ) from error
    self._score_names = tuple(
        metric.name
        for metric in protocol.epoch_metrics(task)
        if not metric.of and metric.name != protocol.LOSS.name
    )
    self._init = jax.jit(self._first_state)
    self.shuffle = jax.jit(self._visits.order)
    self._compile(0)

  def _compile(self, axis: int) -> None:
    """Makes the functions whose results have so many axes of seeds."""
    over_seeds = jax.vmap if axis else lambda function, unused_axes: function
    jit = functools.partial(jax.jit, **self._placement.outputs())
    # A number of steps is traced: calls of any length share one compilation.
    steps = over_seeds(self._steps, (0, None, 0, None, 0, 0))
    self.train_steps: Any = jit(steps, donate_argnums=0)

    def evaluate_batches(*given, predict):
      one = functools.partial(self._results, predict=predict)
      return over_seeds(one, (0, 0, None, None))(*given)

    self._axis = axis
    self._evaluate_batches = jit(evaluate_batches, static_argnames='predict')

  @functools.cached_property
  def at_once(self) -> 'Program':
    """The program of several seeds in one call.

    Its states, orders, scales, keys and results have a leading axis, one entry
    a seed; `init` and `shuffle` take one seed.
    """
    several = copy.copy(self)
    several._compile(1)
    return several

  def init(
      self, key: jax.Array, taken: Mapping[str, Any] | None = None
  ) -> TrainState:
    """Returns the state before the first step; `taken` arrays replace some."""
    return self._placement.replicate(self._init(key, dict(taken or {})))

  def load(self, examples: Any) -> Any:
    """Returns a split as `evaluate` takes it, on the devices if it is to be."""
    if not isinstance(examples, Mapping):
      return tuple(map(self.load, examples))
    on_host = self._keep_data_on == 'host'
    if not on_host and self._placement.mesh is None:
      return jax.device_put(dict(examples))
    size, batches = protocol.num_examples(examples), self._placement.batches
    order = self._evaluation_order(size)
    if not on_host:
      held = [batches(examples, order)]
      return Loaded(lambda: held, size)
    length = placements.batches_of_piece(examples, *order.shape)
    rows = [
        placements.rows_of_piece(order, first, length)
        for first in range(0, len(order), length)
    ]
    return Loaded(lambda: (batches(examples, some) for some in rows), size)

  def evaluate(
      self, params: Any, statistics: Any, split: Any, predict: bool = False
  ) -> protocol.Evaluation:
    """Returns the results of all examples of a split, numpy arrays [N, ...].

    The split is a result of `load`, or examples. Predictions, a list for
    buckets, are None unless wanted.
    """
    axis, order = self._axis, None
    if isinstance(split, Mapping):
      size, examples = protocol.num_examples(split), split
      order, split = self._evaluation_order(size), Loaded(
          lambda: [examples], size
      )
    if not isinstance(split, Loaded):
      results = [self.evaluate(params, statistics, b, predict) for b in split]
      joined = jax.tree.map(
          lambda *arrays: np.concatenate(arrays, axis),
          *[result._replace(predictions=None) for result in results],
      )
      predictions = [result.predictions for result in results]
      return joined._replace(predictions=predictions if predict else None)
    evaluate = functools.partial(self._evaluate_batches, params, statistics)
    parts: list[protocol.Evaluation] = []
    for examples in split.pieces():
      parts.append(evaluate(examples, order, predict=predict))
      # One piece is on its way while the results of the one before are read.
      parts[-2:-1] = [jax.tree.map(np.asarray, part) for part in parts[-2:-1]]

    def join(*arrays):
      # Batches and the examples of each become one axis.
      x = np.concatenate(arrays, axis)
      x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
      return x[(slice(None),) * axis + (slice(split.size),)]

    return jax.tree.map(join, *parts)

  def _evaluation_order(self, size: int) -> np.ndarray:
    """Returns the examples of each batch of a test, int32 [S, B].

    The last batch is filled up with example 0, whose results are cut off.
    """
    count = self._placement.num_devices
    batch = -(-min(size, self._eval_batch_size) // count) * count
    indices = np.zeros(-(-size // batch) * batch, np.int32)
    indices[:size] = np.arange(size)
    return indices.reshape(-1, batch)

  def _first_state(self, key, taken) -> TrainState:
    """Returns the state before the first step; it is traced."""

    def choose(path, leaf):
      name = jax.tree_util.keystr(path)
      return taken[name].astype(leaf.dtype) if name in taken else leaf

    _, *stored = split(self._task.build_model(nnx.Rngs(key)))
    params, statistics = jax.tree_util.tree_map_with_path(choose, stored)
    params = rnnzoo.constrain(params)
    zero = jnp.zeros((), jnp.float32)
    return TrainState(
        params,
        statistics,
        self._optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        loss=zero,
        scores=dict.fromkeys(self._score_names, zero),
        gradient_norm=zero,
        loss_scale=self._loss_scale,
        skipped=jnp.zeros((), jnp.int32),
        mean=(params, zero) if self._averages else None,
    )

  def _drop(self, params, key):
    """Returns parameters of which a share is dropped."""
    return rnnzoo.dropconnect(params, self._dropconnect_rate, key)

  def _freeze(self, params, frozen):
    """Returns parameters, those that are frozen from the second tree."""
    choose = lambda factor, new, old: new if factor else old
    return jax.tree.map(choose, self._rate_factors, params, frozen)

  def _loss(self, params, statistics, batch, key):
    """Returns the mean loss, and the new statistics and mean scores."""
    params = self._freeze(params, jax.lax.stop_gradient(params))
    if self._dropconnect_rate:
      # A key that the stream of dropout keys does not have.
      params = self._drop(params, jax.random.fold_in(key, _DROPCONNECT))
    # Variables of this trace: the model writes its running averages, and Rngs
    # count.
    model = nnx.merge(self._structure, params, statistics, copy=True)
    results = self._task.evaluate(model, batch, nnx.Rngs(dropout=key))
    shape = (protocol.num_examples(batch),)
    losses = getattr(results, 'losses', None)
    if losses is None or jnp.shape(losses) != shape:
      got = 'none' if losses is None else jnp.shape(losses)
      raise ValueError(
          f'{type(self._task).__name__}.evaluate must return a tasks.Evaluation'
          f' with losses of shape {shape}, one an example; got {got}'
      )
    mean = functools.partial(_mean, weights=results.weights)
    scores = jax.tree.map(mean, self._scores_of(results))
    _, _, statistics = split(model)
    return mean(results.losses), (statistics, scores)

  def _step(self, state: TrainState, examples, order, scale, key) -> TrainState:
    """Returns the state one step later."""
    dropout_key = jax.random.fold_in(key, state.step)

    def differentiate(batch):
      given = state.params, state.statistics, batch, dropout_key
      if state.loss_scale is None:
        found = jax.value_and_grad(self._loss, has_aux=True)(*given)
        return None, None, *found
      return state.loss_scale.value_and_grad(self._loss, has_aux=True)(*given)

    found = self._visits.visit(differentiate, examples, order, state.step)
    loss_scale, finite, (loss, (statistics, scores)), gradients = found
    # flax has scaled ones in float32; an optimiser wants the parameters' dtype.
    cast = lambda gradient, param: gradient.astype(param.dtype)
    gradients = jax.tree.map(cast, gradients, state.params)
    with jax.named_scope('optimizer'):
      updates, optimizer_state = self._optimizer.update(
          gradients, state.optimizer, state.params
      )
      updates = optax.tree.scale(scale, updates)
      params = rnnzoo.constrain(optax.apply_updates(state.params, updates))
      params = self._freeze(params, state.params)
    first = state.step % self.steps_per_epoch == 0
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
        _mean_of(state.mean, params),
    )
    if finite is None:
      return new
    # A step whose gradients are not finite changes nothing but its counters.
    skipped = new._replace(
        params=state.params,
        statistics=state.statistics,
        optimizer=state.optimizer,
        mean=state.mean,
        gradient_norm=total(state.gradient_norm, 0.0),
        skipped=state.skipped + 1,
    )
    return jax.tree.map(functools.partial(jnp.where, finite), new, skipped)

  def _steps(self, state, examples, order, num_steps, scale, key) -> TrainState:
    """Returns the state `num_steps` later, an epoch later for None."""
    return jax.lax.fori_loop(
        0,
        self.steps_per_epoch if num_steps is None else num_steps,
        lambda _, state: self._step(state, examples, order, scale, key),
        state,
    )

  def _results(self, params, statistics, examples, order, predict):
    """Returns the results of batches, with predictions if `predict`."""

    def evaluate_batch(batch):
      model = nnx.merge(self._structure, params, statistics)
      if order is not None:
        batch = {name: array[batch] for name, array in examples.items()}
      results = self._task.evaluate(model, batch)
      return results._replace(
          scores=self._scores_of(results),
          predictions=results.predictions if predict else None,
      )

    return jax.lax.map(evaluate_batch, examples if order is None else order)

  def _scores_of(self, results):
    """Returns the scores that are metrics, or says which one is missing."""
    for name in self._score_names:
      if name not in results.scores:
        raise ValueError(
            f'{type(self._task).__name__}.evaluate must give the score'
            f' {name!r}, which is one of the metrics'
        )
    return {name: results.scores[name] for name in self._score_names}


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Returns (structure, parameters, all else that the model stores)."""
  graphdef, params, statistics = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
  return graphdef, params, statistics


def abstract(task: protocol.Task) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Returns `split` of a task's model, with shapes in place of arrays."""
  return split(nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0))))


def _mean_of(mean: Any, params: nnx.State) -> Any:
  """Returns `TrainState.mean` one step later."""
  if mean is None:
    return None
  old, count = mean
  more = lambda a, b: jnp.where(count > 0, a + (b - a) / (count + 1), b)
  new = jax.tree.map(lambda a, b: more(a, b).astype(b.dtype), old, params)
  return new, jnp.where(count > 0, count + 1, 0)


def _mean(x: jax.Array, weights: jax.Array | None) -> jax.Array:
  """Returns the weighted mean over the examples of the global batch."""
  if weights is None:
    return jnp.mean(x)
  weights = weights.astype(jnp.float32)
  return jnp.sum(weights * x) / jnp.sum(weights)
