"""Batches over devices where XLA chooses the sharding: Auto axes of a mesh.

There the type of an array says nothing about its sharding while a program is
traced, and XLA would gather the operands of a kernel, which it cannot split.
`over_batch` tells XLA that it can split one axis, the batch. It asks
for the kernel of one device's part when it knows the sharding.

With Explicit axes or inside `jax.shard_map` each device has its part already.
"""

from collections.abc import Callable, Sequence
import contextvars
import math
from typing import Any

import jax
from jax.experimental import custom_partitioning
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from pallas_kernels import devices
from pallas_kernels import promotion

# The position of the batch axis in an array that has none.
WHOLE = -1

# Whether the function of `over_batch` is traced: XLA splits no part again.
_in_part: contextvars.ContextVar[bool] = contextvars.ContextVar(
    'in_part', default=False
)


def over_batch(
    target: devices.Target,
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    positions: Any,
    out_positions: Any,
) -> Callable[..., Any]:
  """Returns the function, each device with its part of the batch.

  Args:
    target: the device that the function is compiled for.
    function: takes any batch; static sizes come from its operands' shapes.
      Without batches of its own, a result is a sum over the batch.
    operands: the arguments it will get: arrays, trees of arrays or None.
    positions: a tree of the batch's axes, a prefix of the tree `operands`.
    out_positions: a tree of axes of the results; `WHOLE` where they are summed.
  """
  if target.interpret or not may_be_split(operands):
    return function
  tree = jax.tree.structure(operands)
  out_tree: list[Any] = []

  # XLA asks for a part when the caller's settings are back.
  @promotion.of_ranks
  def run(*flat):
    token = _in_part.set(True)
    try:
      results = function(*jax.tree.unflatten(tree, flat))
    finally:
      _in_part.reset(token)
    results, structure = jax.tree.flatten(results)
    out_tree[:] = [structure]
    return results

  def out_axes() -> list[int]:
    whole = jax.tree.unflatten(out_tree[0], range(out_tree[0].num_leaves))
    return _spread(out_positions, whole)

  split = _partitioned(run, _spread(positions, operands), out_axes)

  def over_devices(*operands):
    results = split(*jax.tree.leaves(operands))
    return jax.tree.unflatten(out_tree[0], results)

  return over_devices


def may_be_split(operands: Any) -> bool:
  """Whether XLA may shard these arrays over several devices."""
  if _in_part.get():
    return False
  types = map(jax.typeof, jax.tree.leaves(operands))
  meshes = [t.sharding.mesh for t in types] + [jax.sharding.get_abstract_mesh()]
  if any(AxisType.Manual in mesh.axis_types for mesh in meshes):
    return False
  known = [mesh for mesh in meshes if mesh.size > 1]
  if known:
    return any(AxisType.Auto in mesh.axis_types for mesh in known)
  # The mesh is unknown where arrays get their sharding from `jit` itself.
  return jax.device_count() > 1


def _spread(prefix: Any, tree: Any) -> list[Any]:
  """Returns the leaves of a prefix, each as often as it stands for a leaf."""
  spread: list[Any] = []
  jax.tree.map(
      lambda leaf, part: spread.extend([leaf] * len(jax.tree.leaves(part))),
      prefix,
      tree,
  )
  return spread


def _partitioned(
    run: Callable[..., Sequence[jax.Array]],
    axes: Sequence[int],
    out_axes: Callable[[], Sequence[int]],
):
  """Returns a function of arrays that XLA can split along the batch.

  Args:
    run: the function.
    axes: the batch's axis in each operand.
    out_axes: says where it is in each result, once `run` was traced.
  """

  def partition(mesh, operands, results):
    names = _names(mesh, operands, axes)

    def shardings(arrays, axes):
      return [
          NamedSharding(mesh, _spec(names, axis, len(x.shape)))
          for x, axis in zip(arrays, axes, strict=True)
      ]

    def part(*operands):
      return [
          jax.lax.psum(x, names) if axis == WHOLE and names else x
          for x, axis in zip(run(*operands), out_axes(), strict=True)
      ]

    own = tuple(shardings(operands, axes))
    return mesh, part, shardings(results, out_axes()), own

  def rule(mesh, operands, results):
    del mesh
    ranks = lambda types: [len(t.shape) for t in types]
    return _rule(ranks(operands), ranks(results), axes, out_axes())

  split = custom_partitioning.custom_partitioning(run)
  split.def_partition(partition, sharding_rule=rule)
  mapped = jax.custom_batching.custom_vmap(
      lambda first, *rest: split(_not_for_export_p.bind(first), *rest)
  )

  @mapped.def_vmap
  def _map(size, batched, *flat):
    del size
    many = jax.vmap(run, [0 if yes else None for yes in batched])
    shift = lambda axis, yes: axis + 1 if yes and axis != WHOLE else axis
    results = _partitioned(
        many,
        list(map(shift, axes, batched)),
        lambda: [shift(axis, True) for axis in out_axes()],
    )(*flat)
    return results, [True] * len(results)

  return mapped


# Returns its operand. XLA calls back into this process to split a kernel, so an
# exported program would have nobody to call.
_not_for_export_p = core.Primitive('not_for_export')
_not_for_export_p.def_impl(lambda x: x)
_not_for_export_p.def_abstract_eval(lambda x: x)


def _lower(ctx, x):
  if ctx.module_context.lowering_parameters.for_export:
    raise NotImplementedError(
        'jax.export cannot write GPU kernels that XLA splits over the Auto axes'
        ' of a mesh. Export with Explicit axes, as jax.make_mesh has them, for'
        " one device, inside jax.shard_map, or with implementation='scan'."
    )
  return [x]


mlir.register_lowering(_not_for_export_p, _lower)


def _names(mesh, operands, axes) -> tuple[str, ...]:
  """Returns the axes of the mesh that the batch is over."""
  for x, axis in zip(operands, axes, strict=True):
    if axis != WHOLE and isinstance(x.sharding, NamedSharding):
      entry = x.sharding.spec[axis]
      names = (entry,) if isinstance(entry, str) else tuple(entry or ())
      if names and x.shape[axis] % math.prod(mesh.shape[n] for n in names) == 0:
        return names
  return ()


def _spec(names: tuple[str, ...], axis: int, rank: int) -> PartitionSpec:
  return PartitionSpec(
      *(names if i == axis and names else None for i in range(rank))
  )


def _rule(ranks, out_ranks, axes, out_axes):
  """Returns the rule for XLA's partitioner: it may split the batch only."""
  others: list[str] = []

  def factors(rank: int, axis: int) -> str:
    names = []
    for i in range(rank):
      if i != axis:
        others.append(f'd{len(others)}')
      names.append('batch' if i == axis else others[-1])
    return ' '.join(names)

  sides = (
      ', '.join(map(factors, ranks, axes))
      for ranks, axes in ((ranks, axes), (out_ranks, out_axes))
  )
  return ' -> '.join(sides), {'need_replication_factors': tuple(others)}
