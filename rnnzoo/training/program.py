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
import functools
import time
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rnnzoo
from rnnzoo import tasks
from rnnzoo.training import placement as placements

# Seconds that one compiled call should take on a CPU: long enough for Python's
# share to vanish, short enough for the progress bar to move.
_SHORT_CALL, _LONG_CALL = 0.3, 1.5


class TrainState(NamedTuple):
  """What one step of training passes to the next.

  Attributes:
    params: the trained parameters.
    statistics: all else that the model stores: BatchNorm's running averages.
    optimizer: the optimiser's state.
    step: int32 [], steps done since the start of training.
    loss: float32 [], sum of the mean losses of this epoch's steps so far.
    accuracy: float32 [], likewise.
    gradient_norm: float32 [], likewise, of the whole gradient before anything
      is done to it.
  """

  params: nnx.State
  statistics: nnx.State
  optimizer: optax.OptState
  step: jax.Array
  loss: jax.Array
  accuracy: jax.Array
  gradient_norm: jax.Array


class Program(NamedTuple):
  """The compiled functions, shared by all seeds of an experiment.

  Attributes:
    init: (key) -> TrainState.
    load: (examples) -> a split on the devices, as `evaluate` takes it.
    shuffle: (key, epoch) -> int32 [S, B], which examples each step sees. The
      last batch is filled up with the first examples of the same order, so
      every example is seen in every epoch.
    train_steps: (state, examples, order, num_steps, scale, key) -> the state
      `num_steps` later. `scale` multiplies the learning rate. The given state
      is donated: it cannot be used afterwards. Examples are arrays [N, ...];
      where `order` is None, arrays [S, B, ...] in the order of the epoch.
    train_epoch: (state, examples, order, scale, key) -> the state S steps
      later, likewise. The compiler knows how many steps there are, so a GPU
      need not ask the host after each whether to go on.
    evaluate: (params, statistics, examples) -> (losses [N], predictions [N]).
  """

  init: Callable[..., TrainState]
  load: Callable[[tasks.Examples], Any]
  shuffle: Callable[..., jax.Array]
  train_steps: Callable[..., TrainState]
  train_epoch: Callable[..., TrainState]
  evaluate: Callable[..., tuple[np.ndarray, np.ndarray]]


def make_program(
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    eval_batch_size: int,
    placement: placements.Placement = placements.ONE_DEVICE,
) -> Program:
  """Returns the compiled functions of an experiment.

  Args:
    task: what is learnt.
    optimizer: how.
    eval_batch_size: B in evaluation, where no gradients need memory; rounded up
      to a multiple of the number of devices.
    placement: the devices.

  Raises:
    ValueError: the task cannot build its model.
  """
  num_examples = len(task.splits['train']['label'])
  batch_size = task.batch_size
  steps_per_epoch = -(-num_examples // batch_size)
  graphdef, _, _ = split(nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0))))

  @jax.jit
  def init(key):
    model = task.build_model(nnx.Rngs(key))
    _, params, statistics = split(model)
    params = rnnzoo.constrain(params)
    zero = jnp.zeros((), jnp.float32)
    return TrainState(
        params,
        statistics,
        optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        loss=zero,
        accuracy=zero,
        gradient_norm=zero,
    )

  @jax.jit
  def shuffle(key, epoch):
    order = jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)
    wrapped = jnp.arange(steps_per_epoch * batch_size) % num_examples
    return order[wrapped].reshape(steps_per_epoch, batch_size)

  def loss_fn(params, statistics, batch, key):
    # Variables of this trace: the model writes its running averages, and Rngs
    # count.
    model = nnx.merge(graphdef, params, statistics, copy=True)
    losses, predictions = task.evaluate(model, batch, nnx.Rngs(dropout=key))
    accuracy = jnp.mean(predictions == batch['label'], dtype=jnp.float32)
    _, _, statistics = split(model)
    return jnp.mean(losses), (statistics, accuracy)

  def step(state, examples, order, scale, key):
    step_in_epoch = state.step % steps_per_epoch
    if order is None:
      batch = _batch(examples, step_in_epoch)
    else:
      batch = _take(examples, order[step_in_epoch])
    dropout_key = jax.random.fold_in(key, state.step)
    (loss, (statistics, accuracy)), gradients = jax.value_and_grad(
        loss_fn, has_aux=True
    )(state.params, state.statistics, batch, dropout_key)
    updates, optimizer_state = optimizer.update(
        gradients, state.optimizer, state.params
    )
    updates = optax.tree.scale(scale, updates)
    params = optax.apply_updates(state.params, updates)
    total = lambda sum_, x: jnp.where(step_in_epoch == 0, 0.0, sum_) + x
    return TrainState(
        rnnzoo.constrain(params),
        statistics,
        optimizer_state,
        state.step + 1,
        total(state.loss, loss),
        total(state.accuracy, accuracy),
        total(state.gradient_norm, optax.tree.norm(gradients)),
    )

  def steps(state, examples, order, num_steps, scale, key):
    return jax.lax.fori_loop(
        0,
        num_steps,
        lambda _, state: step(state, examples, order, scale, key),
        state,
    )

  @functools.partial(jax.jit, donate_argnums=0, **placement.outputs())
  def train_steps(state, examples, order, num_steps, scale, key):
    # The number of steps is traced: calls of any length share one compilation.
    return steps(state, examples, order, num_steps, scale, key)

  @functools.partial(jax.jit, donate_argnums=0, **placement.outputs())
  def train_epoch(state, examples, order, scale, key):
    return steps(state, examples, order, steps_per_epoch, scale, key)

  @functools.partial(jax.jit, **placement.outputs())
  def evaluate_batches(params, statistics, examples, order):
    def evaluate_batch(batch):
      model = nnx.merge(graphdef, params, statistics)
      if order is not None:
        batch = _take(examples, batch)
      return task.evaluate(model, batch)

    return jax.lax.map(evaluate_batch, examples if order is None else order)

  def evaluation_order(size):
    each = -(-min(size, eval_batch_size) // placement.num_devices)
    batch = each * placement.num_devices
    num_batches = -(-size // batch)
    # The last batch is filled up with example 0, whose results are cut off.
    order = np.zeros(num_batches * batch, np.int32)
    order[:size] = np.arange(size)
    return order.reshape(num_batches, batch)

  def load(examples):
    if placement.mesh is None:
      return jax.device_put(dict(examples))
    order = evaluation_order(len(examples['label']))
    return placement.batches(examples, order)

  def evaluate(params, statistics, examples):
    if isinstance(examples, placements.Batches):
      (examples, size), order = examples, None
    else:
      size = len(examples['label'])
      order = evaluation_order(size)
    losses, predictions = evaluate_batches(params, statistics, examples, order)
    return (
        np.asarray(losses).reshape(-1)[:size],
        np.asarray(predictions).reshape(-1)[:size],
    )

  return Program(
      init=lambda key: placement.replicate(init(key)),
      load=load,
      shuffle=shuffle,
      train_steps=train_steps,
      train_epoch=train_epoch,
      evaluate=evaluate,
  )


def run_epoch(
    program: Program,
    state: TrainState,
    examples: Mapping[str, jax.Array | np.ndarray],
    order: jax.Array | None,
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> TrainState:
  """Returns the state an epoch later: after one call, or on a CPU several.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    examples: the training split, on the devices.
    order: what `program.shuffle` returned, or None where `examples` are in that
      order.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  num_steps = len(examples['label'] if order is None else order)
  # Several processes have to make the same calls, however long these take.
  if jax.default_backend() != 'cpu' or jax.process_count() > 1:
    state = jax.block_until_ready(
        program.train_epoch(state, examples, order, scale, key)
    )
    on_progress(num_steps)
    return state
  # An epoch may take minutes here, and another call costs next to nothing.
  done, call_steps = 0, 1
  while done < num_steps:
    call_steps = min(call_steps, num_steps - done)
    start = time.monotonic()
    state = jax.block_until_ready(
        program.train_steps(state, examples, order, call_steps, scale, key)
    )
    seconds = time.monotonic() - start
    done += call_steps
    on_progress(done)
    if seconds < _SHORT_CALL:
      call_steps *= 2
    elif seconds > _LONG_CALL:
      call_steps = max(call_steps // 2, 1)
  return state


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Returns (structure, parameters, all else that the model stores)."""
  graphdef, params, statistics = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
  return graphdef, params, statistics


def _take(
    examples: Mapping[str, jax.Array], indices: jax.Array
) -> dict[str, jax.Array]:
  return {name: array[indices] for name, array in examples.items()}


def _batch(
    examples: Mapping[str, jax.Array], index: jax.Array
) -> dict[str, jax.Array]:
  take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return {name: take(array, index) for name, array in examples.items()}
