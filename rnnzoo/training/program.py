"""The compiled functions of an experiment: initialise, train, evaluate.

One call of `train_steps` or `train_epoch` does many steps in a loop on the
device. The state carries all that the next call needs, so it does not matter
where calls of `train_steps` begin and end: the numbers are the same.

Dimensions: N examples of a split, S steps of an epoch, B batch.
"""

from collections.abc import Callable, Mapping
import functools
import time
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rnnzoo
from rnnzoo import tasks

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
    shuffle: (key, epoch) -> int32 [S, B], which examples each step sees. The
      last batch is filled up with the first examples of the same order, so
      every example is seen in every epoch.
    train_steps: (state, examples, order, num_steps, scale, key) -> the state
      `num_steps` later. `scale` multiplies the learning rate. The given state
      is donated: it cannot be used afterwards.
    train_epoch: (state, examples, order, scale, key) -> the state S steps
      later, likewise. The compiler knows how many steps there are, so a GPU
      need not ask the host after each whether to go on.
    evaluate: (params, statistics, examples) -> (losses [N], predictions [N]).
  """

  init: Callable[..., TrainState]
  shuffle: Callable[..., jax.Array]
  train_steps: Callable[..., TrainState]
  train_epoch: Callable[..., TrainState]
  evaluate: Callable[..., tuple[np.ndarray, np.ndarray]]


def make_program(
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    eval_batch_size: int,
) -> Program:
  """Returns the compiled functions of an experiment.

  Args:
    task: what is learnt.
    optimizer: how.
    eval_batch_size: B in evaluation, where no gradients need memory.

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

  @functools.partial(jax.jit, donate_argnums=0)
  def train_steps(state, examples, order, num_steps, scale, key):
    # The number of steps is traced: calls of any length share one compilation.
    return steps(state, examples, order, num_steps, scale, key)

  @functools.partial(jax.jit, donate_argnums=0)
  def train_epoch(state, examples, order, scale, key):
    return steps(state, examples, order, steps_per_epoch, scale, key)

  @jax.jit
  def evaluate_batches(params, statistics, examples, order):
    def evaluate_batch(indices):
      model = nnx.merge(graphdef, params, statistics)
      return task.evaluate(model, _take(examples, indices))

    return jax.lax.map(evaluate_batch, order)

  def evaluate(params, statistics, examples):
    size = len(examples['label'])
    batch = min(size, eval_batch_size)
    num_batches = -(-size // batch)
    # The last batch is filled up with example 0, whose results are cut off.
    order = np.zeros(num_batches * batch, np.int32)
    order[:size] = np.arange(size)
    losses, predictions = evaluate_batches(
        params, statistics, examples, order.reshape(num_batches, batch)
    )
    return (
        np.asarray(losses).reshape(-1)[:size],
        np.asarray(predictions).reshape(-1)[:size],
    )

  return Program(init, shuffle, train_steps, train_epoch, evaluate)


def run_epoch(
    program: Program,
    state: TrainState,
    examples: Mapping[str, jax.Array | np.ndarray],
    order: jax.Array,
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> TrainState:
  """Returns the state an epoch later: after one call, or on a CPU several.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    examples: the training split, on the device.
    order: what `program.shuffle` returned.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  num_steps = len(order)
  if jax.default_backend() != 'cpu':
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
