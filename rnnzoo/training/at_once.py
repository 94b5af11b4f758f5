"""Functions of one seed as functions of several, in one compiled call.

States, orders, scales and keys get a leading axis, one entry a seed.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp


def train(steps: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function of training, compiled for several seeds.

  Args:
    steps: (state, examples, order, ..., scale, key) -> state.
  """

  @functools.partial(jax.jit, donate_argnums=0)
  def train_all(state, examples, order, *rest):
    num_steps, (scale, key) = rest[:-2], rest[-2:]
    # A generator's examples are a key, which each seed has for itself.
    axis = 0 if order is None else None
    one = lambda state, examples, order, scale, key: steps(
        state, examples, order, *num_steps, scale, key
    )
    return jax.vmap(one, in_axes=(0, axis, 0, 0, 0))(
        state, examples, order, scale, key
    )

  return train_all


def evaluate(batches: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function of evaluation, compiled for several seeds.

  Args:
    batches: (params, statistics, examples, order, predict) -> results.
  """

  @functools.partial(jax.jit, static_argnames='predict')
  def evaluate_all(params, statistics, examples, order, predict):
    one = functools.partial(batches, predict=predict)
    return jax.vmap(one, in_axes=(0, 0, None, None))(
        params, statistics, examples, order
    )

  return evaluate_all


@jax.jit
def stack(trees: Sequence[Any]) -> Any:
  """Returns trees of arrays as one, with a leading axis."""
  return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


@functools.partial(jax.jit, static_argnums=1)
def unstack(tree: Any, count: int) -> list[Any]:
  """Returns the entries of a tree of arrays with a leading axis."""
  entry = lambda i: jax.tree.map(lambda x: x[i], tree)
  return [entry(i) for i in range(count)]
