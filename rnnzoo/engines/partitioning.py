"""Batches that are sharded over devices, where the types of arrays say so.

On a mesh whose axes are Explicit, as `jax.make_mesh` makes them, the type of an
array names the mesh axes that it is sharded over. Sequences do not depend on
each other, so each device runs its own part of the batch: the run over time
goes into `jax.shard_map`, on every path, GPU kernels included. The transpose
sums gradients of parameters over the devices and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import logging
import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

Array = jax.Array
Positions = tuple[int | None, ...]


def is_sharded(x: Any) -> bool:
  """Returns whether the type of x says that it is sharded over devices."""
  return hasattr(x, 'dtype') and any(_explicit(x)[1])


class Axes(NamedTuple):
  """Which axes of a run over time may be over devices.

  Attributes:
    steps: positions of the axes in an array of all steps.
    carry: the same in a carry, which has no time.
    over: the mesh axes that time is over.
  """

  steps: tuple[int, ...]
  carry: Positions
  over: tuple[str, ...]


def axes_of_run(
    x: Array, time_major: bool, linear: bool, batch_axes: int | None = None
) -> Axes:
  """Returns the axes of a run over x that may be over devices.

  Args:
    x: inputs of all steps, [..., T, I], or [T, ..., I] if `time_major`.
    time_major: whether time is the first axis.
    linear: whether the cell is, so that time may be over devices too.
    batch_axes: number of batch axes, if x has other axes behind time than one.
  """
  count = x.ndim - 2 if batch_axes is None else batch_axes
  batch = tuple(range(count))
  lead = tuple(axis + time_major for axis in batch)
  time = 0 if time_major else count
  if not linear or not x.shape[time]:
    return Axes(lead, batch, ())
  return Axes((*lead, time), (*batch, None), _explicit(x)[1][time])


def spread(
    function: Callable[[Any, Any], Any],
    shared: Any,
    split: Any,
    *,
    positions: Any,
    out_positions: Any,
    like: Array,
    axes: Sequence[int],
) -> Any:
  """Returns function(shared, split), each device with its part of `split`.

  Without Explicit sharding this is a plain call. Sharding along other axes than
  the independent ones is undone first, with a warning.

  Args:
    function: (shared, split) -> arrays.
    shared: arrays that all parts need whole; gathered where they are sharded.
    split: a tuple of arrays, trees of arrays, or None.
    positions: for each of `split`, the positions of the independent axes in its
      arrays.
    out_positions: a tree of such positions, a prefix of that of the results.
    like: the array whose type says how the independent axes are sharded.
    axes: the positions of these axes in `like`.
  """
  mesh, entries = _explicit(like)
  over = [entries[axis] for axis in axes]
  others = [e for axis, e in enumerate(entries) if axis not in axes and e]
  if others:
    logging.log_first_n(
        logging.WARNING,
        'An input of type %s is gathered along its axes that are sharded over'
        ' %s: a device needs them whole. jax.sharding.reshard shards its batch'
        ' instead.',
        1,
        jax.typeof(like),
        sorted({name for e in others for name in e}),
    )
  if not any(over):
    if others:
      split = jax.tree.map(lambda x: _typed(x, mesh, PartitionSpec()), split)
    return function(shared, split)

  def spec(where: Positions) -> PartitionSpec:
    placed = {
        position: names
        for position, names in zip(where, over, strict=True)
        if names and position is not None
    }
    size = max(placed, default=-1) + 1
    return PartitionSpec(*(placed.get(i) for i in range(size)))

  def typed(part, where):
    return jax.tree.map(lambda x: _typed(x, mesh, spec(where)), part)

  split = tuple(map(typed, split, positions))
  shared = jax.tree.map(lambda x: _typed(x, mesh, PartitionSpec()), shared)
  return jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(PartitionSpec(), tuple(map(spec, positions))),
      out_specs=jax.tree.map(spec, out_positions, is_leaf=_is_positions),
      axis_names={name for names in over for name in names},
  )(shared, split)


def _is_positions(x: Any) -> bool:
  return isinstance(x, tuple) and not any(isinstance(p, tuple) for p in x)


def _explicit(x: Array) -> tuple[Any, list[tuple[str, ...]]]:
  """Returns the mesh of x, and the Explicit axes that each axis is over."""
  sharding = jax.typeof(x).sharding
  mesh = sharding.mesh
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  entries = []
  for entry in sharding.spec:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    explicit = (n for n in names if kinds.get(n) == AxisType.Explicit)
    entries.append(tuple(explicit))
  return mesh, entries


def _typed(x: Any, mesh: Any, wanted: PartitionSpec) -> Any:
  """Returns x sharded as `wanted` says, and whole over all other axes."""
  given = jax.typeof(x).sharding
  if given.mesh.empty and not any(wanted):
    return x
  return jax.sharding.reshard(x, NamedSharding(mesh, wanted))
