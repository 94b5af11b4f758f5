"""Time over devices: linear recurrences of which each device has some steps.

A part of the steps is one affine map from the h before it to its last h, so the
devices exchange these maps, [batch, features] each, and no steps. Each then
knows the h before its part:

    h after parts 0 .. p = A_p h + b_p,   A_p = product of the part's a

XLA computes the maps from the part's begin to each of its steps, and applies
them to that h; `linear_parts.py` says how a kernel does it.

The functions below are called inside `jax.shard_map`. They take the names of
the mesh axes that time is over, and so do the functions of `maps.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType

Array = jax.Array

# Axes of a mesh, major to minor as in a PartitionSpec; none: time is whole.
Names = tuple[str, ...]


def enter(
    compose: Callable[[Any, Any], Any],
    own: tuple[Any, Any],
    h0: Any,
    reverse: bool,
    over: Names,
) -> Any:
  """Returns h before this device's part, given its map.

  Args:
    compose: function of two maps (A, b), the first of which acts first.
    own: map (A, b) of this device's part.
    h0: h before the first of all steps.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  leaves, tree = jax.tree.flatten(own)
  maps = lax.all_gather(jnp.stack(leaves), over)
  of_part = lambda part: jax.tree.unflatten(tree, list(maps[part]))
  index = lax.axis_index(over)
  order: Sequence[int] = range(lax.axis_size(over))
  state = jax.tree.map(jnp.zeros_like, of_part(0)[0]), h0
  for part in reversed(order) if reverse else order:
    is_before = part > index if reverse else part < index
    after = compose(state, of_part(part))
    state = jax.tree.map(
        lambda x, y, use=is_before: jnp.where(use, x, y), after, state
    )
  return state[1]


def somewhere(flags: Array, over: Names) -> Array:
  """Returns whether a flag is set on any device."""
  return lax.psum(jnp.any(flags).astype(jnp.int32), over) > 0


def gather(x: Array, over: Names) -> Array:
  """Returns the x of all devices, [devices, ...].

  A small sum takes less time than `all_gather` and `ppermute`.
  """
  count, index = lax.axis_size(over), lax.axis_index(over)
  places = lax.broadcasted_iota(jnp.int32, (count, *(1,) * x.ndim), 0)
  return lax.psum(jnp.where(places == index, x, 0), over)


def check_names(over: Names, arrays: Any) -> None:
  """Raises ValueError for mesh axes that no `jax.shard_map` is over here.

  JAX would take the devices along an axis that batch is over for parts of time,
  or end the process.

  Args:
    over: the mesh axes that time is said to be over.
    arrays: a tree, not checked yet.
  """
  if not over:
    return
  meshes = [jax.sharding.get_abstract_mesh()]
  meshes += [
      jax.typeof(x).sharding.mesh
      for x in jax.tree.leaves(arrays)
      if isinstance(x, Array)
  ]
  for mesh in meshes:
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
      if name in over and kind != AxisType.Manual:
        raise ValueError(
            f'time_axis_name={over} is for a call inside jax.shard_map over'
            f' these axes, and {name!r} is an axis of type {kind.name} here. Of'
            ' Explicit axes the type of x says what time is over:'
            ' time_axis_name=None would work.'
        )
  try:
    lax.axis_size(over)
  except NameError as error:
    raise ValueError(
        f'time_axis_name={over} is for a call inside jax.shard_map over these'
        f' axes, and here JAX says: {error}. time_axis_name=None would work'
        ' outside.'
    ) from error


def is_first(reverse: bool, over: Names) -> Array:
  """Returns whether this device has the steps that the recurrence begins with.

  Args:
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  last = lax.axis_size(over) - 1
  return lax.axis_index(over) == (last if reverse else 0)


def earlier(
    reduce: Callable[..., Array], x: Array, reverse: bool, over: Names
) -> Array:
  """Returns the sum, or the largest, x of all devices that have earlier steps.

  Args:
    reduce: jnp.sum, or jnp.max for x from 0.
    x: an array of this device.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  of_all, index = gather(x, over), lax.axis_index(over)
  places = lax.broadcasted_iota(jnp.int32, of_all.shape, 0)
  is_earlier = places > index if reverse else places < index
  return reduce(jnp.where(is_earlier, of_all, 0), 0)


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
  own = jnp.arange(time, dtype=jnp.int32)
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
    axis: axis of time in `reset`.
    over: the mesh axes that time is over.
  """
  first = lax.slice_in_dim(reset, 0, 1, axis=axis)
  # Nothing is sent to the last device, which has zeros then: no restart.
  pairs = [(i + 1, i) for i in range(lax.axis_size(over) - 1)]
  following = lax.ppermute(first, over, pairs)
  rest = lax.slice_in_dim(reset, 1, reset.shape[axis], axis=axis)
  return jnp.concatenate([rest, following], axis=axis)
