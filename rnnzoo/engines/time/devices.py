"""Time over devices: linear recurrences of which each device has some steps.

A part of the steps is one affine map from the h before it to its last h, so the
devices exchange these maps, [batch, features] each, and no steps. Each then
knows the h before its part:

    h after parts 0 .. p = A_p h + b_p,   A_p = product of the part's a

XLA computes the maps from the part's begin to each of its steps, and applies
them to that h. A kernel reads and writes less if it runs its steps from that h.
b is the last h of a run from h = 0. If the |a| of the last steps have so small
a product that it takes every finite h to zero, a run of these steps alone ends
with that b, and nothing else is needed. Else all of the part is read twice.

An infinity or NaN decays in no number of steps, and may be before the last
steps. A device sees that in its own last h, and all devices run again, by the
maps of all steps. XLA takes branches on the host, which waits for the device
then.

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

# Last steps of a part that its map is found from, unless more of them matter.
FEW = 4096

Compose = Callable[[Any, Any], Any]


def run(
    run_from: Callable[[Array], tuple[Any, Array]],
    end: Callable[[int, int], Array],
    factors: Callable[[int, int], Array],
    compose: Compose,
    h0: Array,
    time: int,
    reverse: bool,
    over: Names,
) -> tuple[Any, Array]:
  """Runs this device's part of the steps by a kernel.

  Args:
    run_from: runs all steps: takes h before the first, [B, F], and returns its
      results, and h after the last, [B, F].
    end: runs the steps from start to stop from h = 0, and returns the last h.
    factors: returns the a of these steps, [B, stop - start, F], like h0.
    compose: function of two maps (a, b), the first of which acts first.
    h0: [B, F], h before the first of all steps, equal on all devices.
    time: the number of this device's steps.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.

  Returns:
    The results, and h before the first step of this device's part.
  """

  def find() -> Array:
    """Returns h before this part, by the maps of all steps."""
    own = _product(factors(0, time)), run_from(jnp.zeros_like(h0))[1]
    return enter(compose, own, h0, reverse, over)

  def attempt(before: Array):
    results, last = run_from(before)
    return results, before, last

  if time <= FEW:
    return attempt(find())[:2]
  few = (0, FEW) if reverse else (time - FEW, time)
  ends, place = _gather(end(*few), over), lax.axis_index(over)
  behind = lax.dynamic_index_in_dim(
      ends, (place + 1 if reverse else place - 1) % len(ends), keepdims=False
  )
  behind = jnp.where(is_first(reverse, over), h0, behind)
  bits = jnp.sum(jnp.log2(jnp.abs(factors(*few))), 1)
  is_long = _somewhere(~(bits < -_bits(h0.dtype)), over)
  *found, last = attempt(lax.cond(is_long, find, lambda: behind))
  # A loop, and no branch: XLA need not copy its results.
  _, *found = lax.while_loop(
      lambda state: state[0],
      lambda state: (state[0] & False, *attempt(find())[:2]),
      (_somewhere(~jnp.isfinite(last), over) & ~is_long, *found),
  )
  return tuple(found)


def enter(
    compose: Compose,
    own: tuple[Any, Any],
    h0: Any,
    reverse: bool,
    over: Names,
) -> Any:
  """Returns h before this device's part, given the map (A, b) of each."""
  leaves, tree = jax.tree.flatten(own)
  maps = lax.all_gather(jnp.stack(leaves), over)
  of_part = lambda part: jax.tree.unflatten(tree, list(maps[part]))
  return _after(compose, of_part, lax.axis_index(over), h0, reverse, over)


def _product(a: Array) -> Array:
  """Returns the product of [B, T, F] over T; only a factor of 0 makes it 0."""
  product = jnp.prod(a, 1)
  tiny = jnp.copysign(jnp.finfo(a.dtype).tiny, product)
  return jnp.where(
      jnp.any(a == 0, 1), 0, jnp.where(product == 0, tiny, product)
  )


def _somewhere(flags: Array, over: Names) -> Array:
  """Returns whether a flag is set on any device."""
  return lax.psum(jnp.any(flags).astype(jnp.int32), over) > 0


def _gather(x: Array, over: Names) -> Array:
  """Returns the x of all devices, [devices, ...].

  A small sum takes less time than `all_gather` and `ppermute`.
  """
  count, index = lax.axis_size(over), lax.axis_index(over)
  places = lax.broadcasted_iota(jnp.int32, (count, *(1,) * x.ndim), 0)
  return lax.psum(jnp.where(places == index, x, 0), over)


def _bits(dtype) -> float:
  """Returns n: the product of any finite number and 2^-n is zero, or tiny."""
  info = jnp.finfo(dtype)
  # A little more, for the rounding of a sum of logarithms.
  return 1.05 * float(info.maxexp - info.minexp + info.nmant)


def _after(
    compose: Compose,
    of_part: Callable[[int], Any],
    index: Array,
    h0: Any,
    reverse: bool,
    over: Names,
) -> Any:
  """Returns h before a part, given the maps of all.

  Args:
    compose: function of two maps (A, b), the first of which acts first.
    of_part: returns the map of a part.
    index: index of the part.
    h0: h before the first of all steps.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  order: Sequence[int] = range(lax.axis_size(over))
  a, _ = of_part(0)
  state = jax.tree.map(jnp.zeros_like, a), h0
  for part in reversed(order) if reverse else order:
    is_before = part > index if reverse else part < index
    after = compose(state, of_part(part))
    state = jax.tree.map(
        lambda x, y, use=is_before: jnp.where(use, x, y), after, state
    )
  return state[1]


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


def sum_earlier(x: Array, reverse: bool, over: Names) -> Array:
  """Returns the sum of x of all devices that have earlier steps.

  Args:
    x: an array of this device.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
  """
  of_all, index = _gather(x, over), lax.axis_index(over)
  places = lax.broadcasted_iota(jnp.int32, of_all.shape, 0)
  is_earlier = places > index if reverse else places < index
  return jnp.sum(jnp.where(is_earlier, of_all, 0), 0)


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
    axis: axis of time in `reset`.
    over: the mesh axes that time is over.
  """
  first = lax.slice_in_dim(reset, 0, 1, axis=axis)
  # Nothing is sent to the last device, which has zeros then: no restart.
  pairs = [(i + 1, i) for i in range(lax.axis_size(over) - 1)]
  following = lax.ppermute(first, over, pairs)
  rest = lax.slice_in_dim(reset, 1, reset.shape[axis], axis=axis)
  return jnp.concatenate([rest, following], axis=axis)
