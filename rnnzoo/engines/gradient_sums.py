"""Gradients of parameters that every device has whole, summed as one array.

Under `jax.shard_map` the transpose of making an array vary over devices is the
sum of its cotangents. XLA joins such sums too, but late: its copies before and
after the joint sum are kernels of their own, two for each array. The copies
made here become part of the kernels that compute the gradients, and of those
that read their sum.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

Array = jax.Array
Names = tuple[str, ...]

# Largest sum, except of one array that is larger. Beyond, what a sum waits for
# costs more than another sum. At 0 each array has its own.
MOST_BYTES = 32 << 20


def vary(tree: Any, names: Names) -> Any:
  """Returns arrays that vary over mesh axes; their gradients share sums.

  Args:
    tree: arrays that are the same on all devices.
    names: the mesh axes; maybe none.
  """
  if not names:
    return tree
  leaves, structure = jax.tree.flatten(tree)
  for dtype in dict.fromkeys(x.dtype for x in leaves):
    own = [i for i, x in enumerate(leaves) if x.dtype == dtype]
    if not jnp.issubdtype(dtype, jnp.inexact):
      for i in own:
        leaves[i] = _one(leaves[i], names)
      continue
    varied = _vary(names, tuple(leaves[i] for i in own))
    for i, x in zip(own, varied, strict=True):
      leaves[i] = x
  return jax.tree.unflatten(structure, leaves)


def _is_zero(tangent: Any) -> bool:
  return type(tangent) is SymbolicZero


def _instantiated(tangent: Any, primal: Array) -> Array:
  return jnp.zeros_like(primal) if _is_zero(tangent) else tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _vary(names, arrays):
  return tuple(_one(x, names) for x in arrays)


def _tangent(names, primals, tangents):
  (arrays,), (d_arrays,) = primals, tangents
  varied = _vary(names, arrays)
  d_varied = [
      _instantiated(d, x) for d, x in zip(d_arrays, varied, strict=True)
  ]
  # Those of frozen parameters have no sum.
  moving = [i for i, d in enumerate(d_arrays) if not _is_zero(d)]
  own = [d_arrays[i] for i in moving]
  for group in _groups(own):
    flat = jnp.concatenate([own[i].reshape(-1) for i in group])
    parts = lax.split(_one(flat, names), [own[i].size for i in group])
    for i, part in zip(group, parts, strict=True):
      d_varied[moving[i]] = part.reshape(own[i].shape)
  return varied, tuple(d_varied)


_vary.defjvp(_tangent, symbolic_zeros=True)


def _one(x, names: Names):
  return lax.pcast(x, names, to='varying')


def _groups(arrays) -> list[list[int]]:
  """Returns the numbers of arrays that share a sum, all of one dtype."""
  groups: list[list[int]] = []
  for dtype in dict.fromkeys(x.dtype for x in arrays):
    size = MOST_BYTES
    for i, x in enumerate(arrays):
      if x.dtype != dtype:
        continue
      size += x.size * x.dtype.itemsize
      if size > MOST_BYTES:
        groups.append([])
        size = x.size * x.dtype.itemsize
      groups[-1].append(i)
  return groups
