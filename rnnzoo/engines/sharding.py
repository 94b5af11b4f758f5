"""Runs that are sharded over devices, where the types of arrays say so.

On a mesh whose axes are Explicit, as `jax.make_mesh` makes them, the type of an
array names the mesh axes that it is sharded over. Sequences do not depend on
each other, nor do the heads of a recurrent kernel, nor the features of a linear
or a diagonal recurrence. So each device runs its own share: the run over time
goes into `jax.shard_map`, on every path, GPU kernels included. An array
that a part needs whole is gathered before; the transpose sums its gradients,
and returns them sharded as the array is.
"""

from collections.abc import Callable, Iterable, Sequence
import contextvars
import functools
import math
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from pallas_kernels import devices

Array = jax.Array
Names = tuple[str, ...]
Positions = tuple[int | None, ...]


class Over(NamedTuple):
  """The mesh axes that parts of a run are over.

  Attributes:
    batch: mesh axes of all batch axes.
    time: mesh axes of the steps.
    features: mesh axes of heads, or of features that are independent.
  """

  batch: Names = ()
  time: Names = ()
  features: Names = ()


_NOWHERE = Over()
_over: contextvars.ContextVar[Over] = contextvars.ContextVar(
    'over', default=_NOWHERE
)


class Axes(NamedTuple):
  """Positions, in the arrays of a run, of the axes that may be over devices.

  Each attribute has a position for every batch axis, one for time and one for
  features or heads, in this order; None where an array has no such axis.

  Attributes:
    flags: axes of an array of all steps without features, and of a layer's x.
    gates: axes of input gates of all steps.
    steps: axes of carries of all steps.
    lengths: axes of an array with batch axes only.
    carry: axes of a carry.
    parameters: axes of parameters, [..., F].
    heads: axes of a recurrent kernel, [G, N, D, D].
    whole: axes of an array that every part needs whole.
  """

  flags: Positions
  gates: Positions
  steps: Positions
  lengths: Positions
  carry: Positions
  parameters: Positions
  heads: Positions
  whole: Positions


def axes_of_run(
    shape: Sequence[int], time_major: bool = False, linear: bool = False
) -> Axes:
  """Returns the axes of a run that may be over devices.

  Args:
    shape: shape of a flag for all steps: batch axes, and time behind them.
    time_major: whether time is the first axis instead.
    linear: whether the cell is, so that time may be over devices too.
  """
  count = len(shape) - 1
  batch = tuple(range(count))
  time = 0 if time_major else count
  whole = (None,) * count
  lead = (
      *(axis + time_major for axis in batch),
      time if linear and shape[time] else None,
  )
  return Axes(
      flags=(*lead, None),
      gates=(*lead, -1),
      steps=(*lead, count + 1),
      lengths=(*batch, None, None),
      carry=(*batch, None, count),
      parameters=(*whole, None, -1),
      heads=(*whole, None, 1),
      whole=(*whole, None, None),
  )


def over_devices() -> Over:
  """Returns where `spread` has put the run that is being traced."""
  return _over.get()


def is_sharded(*trees: Any) -> bool:
  """Returns whether the type of any array says that it is sharded."""
  return any(any(_explicit(x)[1]) for x in _arrays(trees))


def sharding(x: Array) -> NamedSharding:
  """Returns how x is sharded over Explicit axes, as its type says."""
  mesh, entries = _explicit(x)
  return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))


def as_sharded(x: Array, other: Array) -> Array:
  """Returns x with the sharding of `other`, an array of as many axes."""
  if not is_sharded(other):
    return x
  wanted = sharding(other)
  return _typed(x, wanted.mesh, wanted.spec, other)


def batch_alike(given: Sequence[Any], batch_axes: int = 1) -> list[Any]:
  """Returns arrays or trees, all with their batch over equal mesh axes.

  The first `batch_axes` axes are the batch; all others are whole.
  """
  if not is_sharded(given):
    return list(given)
  positions = [(*range(batch_axes), None)] * len(given)
  return place(given, positions, choose(given, positions))


def flags_as_sharded(
    mask: Any, seq_lengths: Any, y: Array, time_major: bool = False
) -> tuple[Any, Any]:
  """Returns a caller's flags as arrays, over the mesh axes of an output.

  The caller may have sharded them over other axes than x.

  Args:
    mask: bool [..., T], or None.
    seq_lengths: int [...], or None.
    y: output of a layer, [..., T, F].
    time_major: whether time is the first axis.
  """
  given = [None if a is None else jnp.asarray(a) for a in (mask, seq_lengths)]
  if is_sharded(y):
    axes = axes_of_run(y.shape[:-1], time_major, linear=True)
    positions = axes.flags, axes.flags, axes.lengths
    over = choose([y], positions[:1])
    given = place([y, *given], positions, over)[1:]
  return given[0], given[1]


def choose(
    split: Sequence[Any], positions: Sequence[Positions], parts: int = 1
) -> tuple[Names, ...]:
  """Returns the mesh axes that each of the independent axes is over.

  The first array that is sharded along an axis sets its mesh axes, without the
  mesh axes of an earlier axis: a parameter that is sharded over the batch's
  mesh axis, to save memory, is gathered.

  Args:
    split: arrays or trees of arrays.
    positions: positions of the independent axes in the arrays of each `split`.
    parts: number of heads, or of features that are independent.
  """
  over: list[Names] = []
  last = len(positions[0]) - 1
  for axis in range(last + 1):
    taken = {name for names in over for name in names}
    found: Names = ()
    for x, where in _flat(split, positions):
      if found or not isinstance(x, Array):
        continue
      position = _position(where[axis], x)
      if position is None:
        continue
      mesh, entries = _explicit(x)
      names = tuple(n for n in entries[position] if n not in taken)
      if axis < last or parts % _size(mesh, names) == 0:
        found = names
    over.append(found)
  return tuple(over)


def place(
    split: Sequence[Any],
    positions: Sequence[Positions],
    over: Sequence[Names],
) -> list[Any]:
  """Returns arrays sharded over these mesh axes, and over no others.

  Args:
    split: arrays or trees of arrays.
    positions: positions of the independent axes in the arrays of each `split`.
    over: the mesh axes that these are over.
  """
  sharded = _sharded_array(split)
  mesh = _explicit(sharded)[0]

  def placed(part, where):
    return jax.tree.map(
        lambda x: _typed(x, mesh, _spec(mesh, over, where, x), sharded), part
    )

  return list(map(placed, split, positions))


def spread(
    function: Callable[[Any], Any],
    split: Sequence[Any],
    *,
    positions: Sequence[Positions],
    out_positions: Any,
    over: Sequence[Names],
) -> Any:
  """Returns function(split), each device with its part of `split`.

  An array that is sharded over other mesh axes is gathered along these, with a
  warning.

  Args:
    function: function of a list like `split`.
    split: arrays or trees of arrays, or None.
    positions: positions of the independent axes in the arrays of each `split`:
      the axes of `Axes`, or rows alone.
    out_positions: a tree of such positions, a prefix of the results' tree.
    over: mesh axes from `choose`.
  """
  used = {name for names in over for name in names}
  for x in _arrays(split):
    others = {n for entry in _explicit(x)[1] for n in entry} - used
    if others:
      logging.log_first_n(
          logging.WARNING,
          'An array of type %s is gathered along its axes that are sharded over'
          ' %s: a device needs them whole. jax.sharding.reshard shards the'
          ' batch instead, or heads, or features that are independent.',
          1,
          jax.typeof(x),
          sorted(others),
      )
  mesh = _explicit(_sharded_array(split))[0]
  split = place(split, positions, over)
  if not used:
    return function(split)
  leaves, tree = jax.tree.flatten(split)
  explicit = _explicit_axes(mesh)

  def part(*leaves):
    token = _over.set(_as_over(over))
    try:
      return function(jax.tree.unflatten(tree, leaves))
    finally:
      _over.reset(token)

  if devices.varies(leaves):
    # Inside the caller's `jax.shard_map` over other axes. The residuals of a
    # `jax.shard_map` name all axes that they vary over, the caller's too, which
    # JAX (0.10 to 0.12) cannot lower: there are none but the arguments.
    part = jax.checkpoint(part)
  return jax.shard_map(
      part,
      mesh=mesh,
      in_specs=tuple(
          _spec(mesh, over, where, x) for x, where in _flat(split, positions)
      ),
      out_specs=jax.tree.map(
          lambda where: _sharded(zip(where, over, strict=True)),
          out_positions,
          is_leaf=_is_positions,
      ),
      # Empty for all: JAX leaves out axes that `jax.vmap` maps over.
      axis_names=set() if len(explicit) == len(mesh.axis_names) else explicit,
  )(*leaves)


def over_rows(
    function: Callable[[Sequence[Array]], Any],
    size: int,
    axes: Sequence[int | None],
    arrays: Sequence[Array],
) -> Any:
  """Returns function(arrays), each device with its rows of a `jax.vmap`.

  Args:
    function: function of a list like `arrays`; its results lead with rows.
    size: number of rows.
    axes: axis of each array's rows; None where it has none.
    arrays: arrays whose rows may be sharded over an Explicit axis.
  """
  positions = [(axis,) for axis in axes]
  over = choose(arrays, positions, size)
  if not any(over):
    return function(arrays)
  return spread(
      lambda own: function(devices.alike(own)),
      arrays,
      positions=positions,
      out_positions=(0,),
      over=over,
  )


def _as_over(over: Sequence[Names]) -> Over:
  """Returns mesh axes from `choose`, all batch axes joined."""
  if len(over) == 1:  # Rows of a `jax.vmap`.
    return Over(batch=over[0])
  *batch, time, features = over
  return Over(tuple(name for names in batch for name in names), time, features)


def _arrays(tree: Any) -> list[Array]:
  return [x for x in jax.tree.leaves(tree) if isinstance(x, Array)]


def _flat(split: Sequence[Any], positions: Sequence[Positions]):
  """Returns pairs of an array and its positions."""
  return [
      (x, where)
      for part, where in zip(split, positions, strict=True)
      for x in jax.tree.leaves(part)
  ]


def _is_positions(x: Any) -> bool:
  return isinstance(x, tuple) and not any(isinstance(p, tuple) for p in x)


def _sharded_array(tree: Any) -> Array:
  """Returns the first array whose type says that it is sharded."""
  return next(x for x in _arrays(tree) if is_sharded(x))


def _size(mesh: Any, names: Names) -> int:
  return math.prod(mesh.shape[name] for name in names)


def _position(position: int | None, x: Any) -> int | None:
  """Returns a position from the start; None if x has no such axis."""
  rank = len(jax.typeof(x).shape)
  if position is None or not -rank <= position < rank:
    return None
  return position % rank


def _spec(
    mesh: Any, over: Sequence[Names], where: Positions, x: Any
) -> PartitionSpec:
  """Returns how x is sharded; a number that features share is whole."""
  shape = jax.typeof(x).shape
  placed = []
  for axis, names in zip(where, over, strict=True):
    position = _position(axis, x)
    if position is not None and shape[position] % _size(mesh, names) == 0:
      placed.append((position, names))
  return _sharded(placed)


def _sharded(placed: Iterable[tuple[int | None, Names]]) -> PartitionSpec:
  entries = {i: names for i, names in placed if names and i is not None}
  return PartitionSpec(*map(entries.get, range(max(entries, default=-1) + 1)))


def _explicit(x: Array) -> tuple[Any, list[tuple[str, ...]]]:
  """Returns the mesh of x, and the Explicit axes that each axis is over."""
  sharding = jax.typeof(x).sharding
  known = _explicit_axes(sharding.mesh)
  entries = []
  for entry in sharding.spec:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    entries.append(tuple(n for n in names if n in known))
  return sharding.mesh, entries


def _explicit_axes(mesh: Any) -> set[str]:
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return {name for name, kind in kinds if kind == AxisType.Explicit}


def _typed(x: Any, mesh: Any, wanted: PartitionSpec, sharded: Array) -> Any:
  """Returns x sharded as `wanted` says, and whole over all other axes.

  The mesh is that of `sharded`, any array on it.
  """
  given = jax.typeof(x).sharding
  if not given.mesh.empty:
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted))
  if not any(wanted):
    return x
  return _onto_mesh(x, sharded, NamedSharding(mesh, wanted))


@functools.partial(jax.jit, static_argnums=(2,), keep_unused=True, inline=True)
def _onto_mesh(x: Any, sharded: Array, wanted: NamedSharding) -> Any:
  """Reshards x, which has no mesh, also where the caller has no `jit`.

  Types name the mesh without its devices: `sharded` brings those.
  """
  del sharded
  return jax.sharding.reshard(x, wanted)
