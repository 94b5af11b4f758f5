"""Time over devices: linear recurrences of which each device has some steps.

A part of the steps is one affine map from the h before it to its last h, so the
devices exchange these maps, [batch, features] each, and no steps. Each then
knows the h before its part, and runs its steps from there:

    h after parts 0 .. p = A_p h + b_p,   A_p = product of the part's a

The functions below are called inside `jax.shard_map`. They take the names of
the mesh axes that time is over, and those of `associative.py` take them too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

Array = jax.Array

# Axes of a mesh, major to minor as in a PartitionSpec; none: time is whole.
Names = tuple[str, ...]

# Steps that one round of `_total` composes: XLA makes one loop of them.
_ROUND = 16


def carry_in(
    compose: Callable[[Any, Any], Any],
    a: Array,
    b: Array,
    h0: Array,
    reverse: bool,
    over: Names,
) -> Array:
  """Returns h before the first step of this device's part, [...].

  Args:
    compose: of two maps (a, b), the first of which acts first.
    a: [T, ...], this device's part.
    b: [T, ...], like a.
    h0: [...], h before the first of all steps, the same on all devices.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  if export.is_symbolic_dim(a.shape[0]):
    raise NotImplementedError(
        f'Time over devices needs a number of steps that is known, got'
        f' {a.shape[0]}.'
    )
  own = jnp.stack(_total(compose, a, b, reverse))
  maps = lax.all_gather(own, over)
  index = lax.axis_index(over)
  order: Sequence[int] = range(maps.shape[0])
  h = (jnp.zeros_like(h0), h0)
  for part in reversed(order) if reverse else order:
    is_before = part > index if reverse else part < index
    after = compose(h, (maps[part, 0], maps[part, 1]))
    h = jax.tree.map(lambda x, y, use=is_before: jnp.where(use, x, y), after, h)
  return h[1]


def is_first(reverse: bool, over: Names) -> Array:
  """Returns whether this device has the steps that the recurrence begins with.

  Args:
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  last = lax.axis_size(over) - 1
  return lax.axis_index(over) == (last if reverse else 0)


def last_carry(h: Array, reverse: bool, over: Names) -> Array:
  """Returns h after all steps, on every device.

  Args:
    h: [...], after the last step of this device's part.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  return lax.psum(jnp.where(is_first(not reverse, over), h, 0), over)


def steps(time: int, over: Names) -> Array:
  """Returns the numbers of this device's steps in the whole sequence, [T].

  Args:
    time: T, the number of steps of this device.
    over: the mesh axes that time is over; none where time is whole.
  """
  own = jnp.arange(time)
  return lax.axis_index(over) * time + own if over else own


def whole(time: int, over: Names) -> int:
  """Returns the number of steps on all devices.

  Args:
    time: the number of steps of this device.
    over: the mesh axes that time is over; none where time is whole.
  """
  return time * lax.axis_size(over) if over else time


def boundary(reset: Array, axis: int, over: Names) -> Array:
  """Turns boundaries between t-1 and t into restarts of a reversed run.

  Args:
    reset: bool, this device's steps.
    axis: which axis of `reset` is time.
    over: the mesh axes that time is over.
  """
  first = lax.slice_in_dim(reset, 0, 1, axis=axis)
  # Nothing is sent to the last device, which has zeros then: no restart.
  pairs = [(i + 1, i) for i in range(lax.axis_size(over) - 1)]
  following = lax.ppermute(first, over, pairs)
  rest = lax.slice_in_dim(reset, 1, reset.shape[axis], axis=axis)
  return jnp.concatenate([rest, following], axis=axis)


def _total(compose, a: Array, b: Array, reverse: bool) -> tuple[Array, Array]:
  """Returns the map of all steps of a part, (a, b), each [...]."""
  if reverse:
    a, b = jnp.flip(a, 0), jnp.flip(b, 0)
  while a.shape[0] > 1:
    steps = a.shape[0]
    size = min(_ROUND, steps)
    widths = [(0, -steps % size)] + [(0, 0)] * (a.ndim - 1)
    # Padding is the identity.
    a = jnp.pad(a, widths, constant_values=1)
    b = jnp.pad(b, widths)
    a, b = (x.reshape(-1, size, *x.shape[1:]) for x in (a, b))
    total = a[:, 0], b[:, 0]
    for step in range(1, size):
      total = compose(total, (a[:, step], b[:, step]))
    a, b = total
  return a[0], b[0]
