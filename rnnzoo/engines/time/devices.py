"""Time over devices: linear recurrences of which each device has some steps.

A part of the steps is one affine map from the h before it to its last h, so the
devices exchange these maps, [batch, features] each, and no steps. Each then
knows the h before its part, and runs its steps from there:

    h after parts 0 .. p = A_p h + b_p,   A_p = product of the part's a

The map is composed from the part's last steps backwards, and only of as many as
it depends on. If the product of their |a| is so small that it takes every
finite h to zero, the map forgets all steps before. So most of a part is read
once, by the run itself; where some a stay near 1, all of it is read twice.

An infinity or NaN decays in no number of steps, and may be among steps that no
map was composed of. A device sees that in its own last h. All devices then run
again, by the maps of all steps. XLA takes branches on the host, which waits for
the device then.

The functions below are called inside `jax.shard_map`. They take the names of
the mesh axes that time is over, and so do the functions of `maps.py`.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import jax
from jax import export
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType

Array = jax.Array

# Axes of a mesh, major to minor as in a PartitionSpec; none: time is whole.
Names = tuple[str, ...]

# Steps that one round of `_total` composes: XLA makes a round one loop.
_ROUND = 16

# Last steps of a part that its map is composed of at first, and how many times
# as many are taken next, again and again, until nothing before them matters.
FEW, MORE = 4096, 16

# Steps: (start, stop) -> (a, b), each [stop - start, ...] or, with time as the
# second axis, [batch, stop - start, ...].
Read = Callable[[int, int], tuple[Array, Array]]
Compose = Callable[[Any, Any], Any]


def run(
    compose: Compose,
    read: Read,
    run_from: Callable[[Array], tuple[Any, Array]],
    h0: Array,
    time: int,
    reverse: bool,
    over: Names,
    *,
    axis: int = 0,
    end: Read | None = None,
) -> tuple[Any, Array]:
  """Runs this device's part of the steps.

  Args:
    compose: function of two maps (a, b), the first of which acts first.
    read: returns some of this device's steps, in h0's dtype.
    run_from: runs all steps: takes h before the first, [...], and returns its
      results, and h after the last, [...].
    h0: [...], h before the first of all steps, equal on all devices.
    time: the number of this device's steps.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.
    axis: axis of time in the arrays of `read`.
    end: returns the b of the map of some steps, and a bound of log2 |a|, both
      like h0, faster than they are composed. A second run is a loop then, which
      JAX cannot transpose, and whose results XLA need not copy.

  Returns:
    The results, and h before the first step of this device's part.
  """
  if export.is_symbolic_dim(time):
    raise NotImplementedError(
        f'Time over devices needs a number of steps that is known, got {time}.'
    )

  def find(first: int):
    """Returns h before this part, by maps of at least so many last steps."""
    own = jnp.stack(_map(compose, read, time, reverse, axis, first))
    maps = lax.all_gather(own, over)
    return _after(compose, maps, lax.axis_index(over), h0, reverse)

  def attempt(before: Array):
    results, last = run_from(before)
    return results, before, last

  if time <= FEW:
    return attempt(find(time))[:2]
  again = lambda: attempt(find(time))[:2]
  if end is None:
    *found, last = attempt(find(FEW))
    is_wrong = _somewhere(~jnp.isfinite(last), over)
    return lax.cond(is_wrong, again, lambda: tuple(found))
  own, bits = end(0, FEW) if reverse else end(time - FEW, time)
  ends, place = _gather(own, over), lax.axis_index(over)
  behind = lax.dynamic_index_in_dim(
      ends, (place + 1 if reverse else place - 1) % len(ends), keepdims=False
  )
  behind = jnp.where(is_first(reverse, over), h0, behind)
  is_long = _somewhere(~(bits < -_bits(h0.dtype)), over)
  most = min(MORE * FEW, time)
  before = lax.cond(is_long, lambda: find(most), lambda: behind)
  *found, last = attempt(before)
  _, *found = lax.while_loop(
      lambda state: state[0],
      lambda state: (state[0] & False, *again()),
      (_somewhere(~jnp.isfinite(last), over), *found),
  )
  return tuple(found)


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


def _map(
    compose: Compose,
    read: Read,
    time: int,
    reverse: bool,
    axis: int,
    first: int,
) -> tuple[Array, Array]:
  """Returns the map of a part's steps, (a, b), each [...].

  Args:
    compose: function of two maps (a, b), the first of which acts first.
    read: returns some of the steps.
    time: their number.
    reverse: whether the recurrence runs from the last step to the first.
    axis: axis of time in the arrays of `read`.
    first: how many of the last steps are composed at first; all these steps
      count then, even where every finite h is forgotten after.
  """
  ends = [first]
  while ends[-1] < time:
    ends.append(min(MORE * ends[-1], time))

  def total(start: int, stop: int):
    """Counts steps from the part's last one."""
    bounds = (start, stop) if reverse else (time - stop, time - start)
    found = _total(compose, *read(*bounds), reverse, axis)
    # XLA takes all branches of a condition where they are elementwise, however
    # long they are.
    return lax.optimization_barrier(found)

  def extend(found, later: Sequence[tuple[int, int]]):
    """Adds the steps before those found, as long as they matter."""
    if not later:
      return found[0]
    (a, b), bits = found
    forgets = bits < -_bits(a.dtype)

    def further():
      earlier, more = total(*later[0])
      return extend((compose(earlier, (a, b)), bits + more), later[1:])

    return lax.cond(
        jnp.all(forgets),
        # As a step with a = 0 does; infinities are looked for later.
        lambda: (jnp.where(forgets, 0, a), b),
        further,
    )

  return extend(total(0, ends[0]), list(itertools.pairwise(ends)))


def _bits(dtype) -> float:
  """Returns n: the product of any finite number and 2^-n is zero, or tiny."""
  info = jnp.finfo(dtype)
  # A little more, for the rounding of a sum of logarithms.
  return 1.05 * float(info.maxexp - info.minexp + info.nmant)


def _after(
    compose: Compose, maps: Array, index: Array, h0: Array, reverse: bool
) -> Array:
  """Returns h before a part, given the maps of all.

  Args:
    compose: function of two maps (a, b), the first of which acts first.
    maps: [parts, 2, ...].
    index: index of the part.
    h0: h before the first of all steps.
    reverse: whether the recurrence runs from the last step to the first.
  """
  order: Sequence[int] = range(maps.shape[0])
  h = (jnp.zeros_like(h0), h0)
  for part in reversed(order) if reverse else order:
    is_before = part > index if reverse else part < index
    after = compose(h, (maps[part, 0], maps[part, 1]))
    h = jax.tree.map(lambda x, y, use=is_before: jnp.where(use, x, y), after, h)
  return h[1]


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


def _total(
    compose: Compose, a: Array, b: Array, reverse: bool, axis: int
) -> tuple[tuple[Array, Array], Array]:
  """Returns the map of some steps, (a, b), and a bound of log2 |a|, all [...].

  The bound knows no underflow, other than of a few steps.
  """
  if reverse:
    a, b = jnp.flip(a, axis), jnp.flip(b, axis)
  bits = None
  while bits is None or a.shape[axis] > 1:
    steps = a.shape[axis]
    size = min(_ROUND, steps)
    widths = [(0, 0)] * a.ndim
    widths[axis] = 0, -steps % size
    # Padding is the identity.
    a = jnp.pad(a, widths, constant_values=1)
    b = jnp.pad(b, widths)
    shape = *a.shape[:axis], -1, size, *a.shape[axis + 1 :]
    a, b = a.reshape(shape), b.reshape(shape)
    at = lambda x, step: lax.index_in_dim(x, step, axis + 1, keepdims=False)
    total = at(a, 0), at(b, 0)
    for step in range(1, size):
      total = compose(total, (at(a, step), at(b, step)))
    # XLA would make one kernel of two rounds, which reads some steps twice.
    a, b = lax.optimization_barrier(total)
    if bits is None:
      bits = jnp.sum(jnp.log2(jnp.abs(a)), axis)
  return (a.squeeze(axis), b.squeeze(axis)), bits
