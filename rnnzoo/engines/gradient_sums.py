"""Gradients of parameters that every device has whole, summed as one array.

Under `jax.shard_map` the transpose of making an array vary over devices is the
sum of its cotangents. XLA joins such sums too, but late: its copies before and
after the joint sum are kernels of their own, two for each array. The copies
made here become part of the kernels that compute the gradients, and of those
that read their sum.

A stack has two sums. That of all levels but the first (`vary_beside`) is to run
beside the backward kernel of the first level, which leaves multiprocessors
free. Matrix products do not: one of them took up to twice as long beside a sum.
So the sum begins before the kernel (`tie`), and the products behind the kernel
wait for it. XLA alone would begin the sum where it takes its time for that of
the products.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

from rnnzoo.engines import derivatives

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


def vary_beside(tree: Any, names: Names, gates: Array) -> tuple[Any, Array]:
  """`vary`, and gates whose cotangent is there after the sum of gradients.

  Args:
    tree: arrays that are the same on all devices.
    names: the mesh axes.
    gates: of a recurrence that the arrays have no part in. What they are made
      of is differentiated after the sum.

  Returns:
    Arrays that vary over the mesh axes, and the gates.
  """
  leaves, structure = jax.tree.flatten(tree)
  own = _inexact(leaves)
  varied, gates = _vary_beside(names, tuple(leaves[i] for i in own), gates)
  leaves = [x if i in own else _one(x, names) for i, x in enumerate(leaves)]
  return jax.tree.unflatten(structure, _with(leaves, own, varied)), gates


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _vary_beside(names, arrays, gates):
  return tuple(_one(x, names) for x in arrays), gates


def _beside_tangent(names, primals, tangents):
  (arrays, gates), (d_arrays, d_gates) = primals, tangents
  results = _vary_beside(names, arrays, gates)

  def sum_flat(flats):
    nonlocal d_gates
    if not _is_zero(d_gates):
      # In the transpose no cotangent leaves before all are there.
      together = derivatives.identity(
          lax.optimization_barrier, (flats, d_gates)
      )
      flats, d_gates = together
    return [_one(flat, names) for flat in flats]

  d_varied = _through_flat(sum_flat, results[0], d_arrays)
  if _is_zero(d_gates):
    d_gates = jnp.zeros_like(gates)
  return results, (d_varied, d_gates)


_vary_beside.defjvp(_beside_tangent, symbolic_zeros=True)


def tie(tree: Any, x: Array) -> tuple[Any, Array]:
  """Returns both; the cotangent of x is there when those of the tree are.

  Args:
    tree: arrays, of `vary_beside`.
    x: the input of the levels that they are parameters of. What makes x is
      differentiated after the tree, so that the sum of its gradients can begin.
  """
  leaves, structure = jax.tree.flatten(tree)
  own = _inexact(leaves)
  tied, x = _tie(tuple(leaves[i] for i in own), x)
  return jax.tree.unflatten(structure, _with(leaves, own, tied)), x


@jax.custom_jvp
def _tie(arrays, x):
  return arrays, x


def _tie_tangent(primals, tangents):
  d_arrays, d_x = tangents
  if _is_zero(d_x):
    return primals, (
        tuple(map(_instantiated, d_arrays, primals[0])),
        jnp.zeros_like(primals[1]),
    )

  def join(flats):
    nonlocal d_x
    flats, d_x = derivatives.identity(lax.optimization_barrier, (flats, d_x))
    return flats

  d_arrays = _through_flat(join, primals[0], d_arrays)
  return primals, (d_arrays, d_x)


_tie.defjvp(_tie_tangent, symbolic_zeros=True)


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
  sum_flat = lambda flats: [_one(flat, names) for flat in flats]
  return varied, _through_flat(sum_flat, varied, d_arrays)


_vary.defjvp(_tangent, symbolic_zeros=True)


def _through_flat(function, results, d_arrays) -> tuple[Array, ...]:
  """Returns tangents of `results`: a function's, of those side by side.

  Args:
    function: flat arrays -> flat arrays, linear.
    results: arrays.
    d_arrays: a tangent of each. Those of frozen parameters have no sum.
  """
  moving = [i for i, d in enumerate(d_arrays) if not _is_zero(d)]
  own = [d_arrays[i] for i in moving]
  groups = _groups(own)
  flats = [
      jnp.concatenate([own[i].reshape(-1) for i in group]) for group in groups
  ]
  d_results = [
      _instantiated(d, x) for d, x in zip(d_arrays, results, strict=True)
  ]
  for group, flat in zip(groups, function(flats), strict=True):
    parts = lax.split(flat, [own[i].size for i in group])
    for i, part in zip(group, parts, strict=True):
      d_results[moving[i]] = part.reshape(own[i].shape)
  return tuple(d_results)


def _inexact(arrays) -> list[int]:
  """Returns the numbers of arrays that have gradients."""
  return [
      i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]


def _with(arrays, places: Sequence[int], others) -> list[Any]:
  """Returns arrays with others in these places."""
  found = dict(enumerate(arrays)) | dict(zip(places, others, strict=True))
  return list(found.values())


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
