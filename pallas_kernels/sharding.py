"""The mesh axes that arrays vary over, under `jax.shard_map`.

There a replicated array, such as a parameter or a zero carry, has another type
than one of which each device has its own part. Loops, kernels and derivatives
want one type; the cast's transpose sums over the devices.
"""

from typing import Any

import jax
from jax import lax


def alike(tree: Any) -> Any:
  """Makes all arrays of a tree vary over the axes that any of them does."""
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  return jax.tree.map(lambda x: _over(x, axes), tree)


def like(x, other):
  """Makes x vary over the axes that another array varies over."""
  return _over(x, _axes(other))


def varies(tree: Any) -> bool:
  """Returns whether any array of a tree varies over a mesh axis."""
  return any(map(_axes, jax.tree.leaves(tree)))


def _axes(x) -> frozenset[Any]:
  return jax.typeof(x).manual_axis_type.varying


def _over(x, axes: frozenset[Any]):
  missing = tuple(sorted(axes - _axes(x)))
  return lax.pcast(x, missing, to='varying') if missing else x
