"""The sizes of errors in a trajectory: their scale, and roundings to follow."""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import products

Array = jax.Array
Carry = cell_lib.Carry

# In `scales_so_far` each step divides the numbers of earlier steps by 2 to the
# power of `_FADING_BITS`: they halve in 32 steps.
_FADING_BITS = 0.03125
_FADES = 2.0**-_FADING_BITS


def rounding(s: Carry) -> float:
  """Returns the relative size of one rounding."""
  return float(jnp.finfo(s[0].dtype).eps)


def signs(shape, seed: int) -> Array:
  """Returns random signs, equal in every run: [T, 1, F]."""
  time, _, features = shape
  # Behind a barrier, or XLA would compute all signs while it compiles.
  steps = lax.optimization_barrier(lax.iota(jnp.uint32, time))
  index = steps[:, None, None] * np.uint32(features)
  index += lax.iota(jnp.uint32, features) + np.uint32(seed << 16)
  # A hash by two multiplications.
  mixed = (index ^ (index >> 15)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
  return 1 - 2 * (mixed >> 31).astype(jnp.int32)


def scales(
    new: Carry, *, heads: int, begins: Array | None, reverse: bool
) -> Carry:
  """Returns the scale of a head's numbers after each step, [T, B, F or 1].

  A rounding error in the step has this scale: the largest number of the carries
  after it and before it. A large carry that the recurrence has forgotten does
  not count, nor does one before a reset.

  Args:
    new: the carry after the steps, each [T, B, F].
    heads: N; no head sees another head.
    begins: bool [T, B, 1], the steps that do not depend on the carry before, or
      None.
    reverse: whether time runs from the last step to the first.
  """

  def with_step_before(x):
    zero = jnp.zeros_like(x[:1])
    before = jnp.concatenate((x[1:], zero) if reverse else (zero, x[:-1]))
    if begins is not None:
      before = jnp.where(begins, 0, before)
    return jnp.maximum(x, before)

  scale = [_of_heads(jnp.abs(x), heads) for x in new]
  return tuple(map(with_step_before, scale))


def scales_together(
    new: Carry, *, heads: int, begins: Array | None, reverse: bool
) -> Carry:
  """Returns one scale for all arrays, the largest number so far, like `scales`.

  Cotangents have it: a step's is a sum over later ones, and may be small where
  these are large.
  """
  scale = [_of_heads(jnp.abs(x), heads) for x in new]
  scale = [functools.reduce(jnp.maximum, scale)] * len(new)
  return _largest_so_far(scale, begins, reverse)


def scales_so_far(
    new: Carry, *, heads: int, begins: Array | None, reverse: bool
) -> Carry:
  """Returns the scale that the growth of errors is judged in, like `scales`.

  It is the largest number of a head so far, where earlier steps' numbers fade
  by `_FADES` a step: a trajectory that passes through 0 has the scale of the
  steps around it, and a carry of 1e6 counts for 640 steps.
  """
  scale = [_of_heads(jnp.abs(x), heads) for x in new]
  time = lax.iota(scale[0].dtype, scale[0].shape[0])
  faded = _FADING_BITS * (time[::-1] if reverse else time)[:, None, None]
  largest_of = _largest_so_far(
      [jnp.log2(x) + faded for x in scale], begins, reverse
  )
  return tuple(
      jnp.maximum(jnp.exp2(y - faded), x)
      for x, y in zip(scale, largest_of, strict=True)
  )


def scales_of_steps(
    new: Carry,
    before: Carry,
    begins: Array | None,
    heads: int,
    noise: Carry | None,
) -> Carry:
  """Returns the scales of some steps, like `scales`, for each feature.

  A large number of one feature says nothing about another that does not see it.
  So the scale is no larger than the noise of the feature itself.

  Args:
    new: the carry after the steps, each [n, B, F].
    before: the carry before these steps.
    begins: bool [n, B, 1], as in `scales`, or None.
    heads: N.
    noise: result of `noise`; None where each head has one scale.
  """
  if begins is not None:
    before = tuple(jnp.where(begins, 0, x) for x in before)
  own = [
      jnp.maximum(jnp.abs(x), jnp.abs(y))
      for x, y in zip(new, before, strict=True)
  ]
  scale = tuple(_of_heads(x, heads) for x in own)
  if noise is None:
    return scale
  larger = map(jnp.maximum, own, noise)
  return tuple(map(jnp.minimum, scale, larger))


def noise(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    x_gates: cell_lib.Gates,
    start: Carry,
) -> Carry:
  """Returns the rounding errors of a step by itself, in roundings.

  To first order, errors of eps times the terms that an equation adds up: a gate
  adds up |x| + |R| |h|, and if it is saturated its error does not matter.
  Arguments are as in `scan_steps.multiply`; `start` is after any restart.
  """
  size = functools.partial(jax.tree.map, jnp.abs)
  h_gates = products.multiply(kernels[0], start[0])
  sizes = products.multiply(size(kernels[0]), size(start[0]))
  if isinstance(cell, cell_lib.TwoStageCell):
    operand = lambda *given: (cell.operand(params, *given),)
    given = x_gates, h_gates, start
    (value,), (rounded,) = _terms(operand, given, size((x_gates, sizes, start)))
    h_gates += products.multiply(kernels[1], value)
    sizes += products.multiply(size(kernels[1]), rounded)
  update = functools.partial(cell.update, params)
  given = x_gates, h_gates, start
  return _terms(update, given, size((x_gates, sizes, start)))[1]


def _terms(equations, given, sizes) -> tuple[Carry, Carry]:
  """Returns values, and |value| + sum |d value / d x| size of all given x."""
  flat, tree = jax.tree.flatten(given)

  def push(row):
    tangents = map(lambda r, x: jnp.broadcast_to(r, x.shape), row, flat)
    return jax.jvp(equations, given, jax.tree.unflatten(tree, list(tangents)))

  rows = devices.like(jnp.eye(len(flat), dtype=flat[0].dtype), flat[0])
  values, slopes = jax.vmap(push, out_axes=(None, 0))(rows)
  total = [jnp.abs(value) for value in values]
  for i, size in enumerate(jax.tree.leaves(sizes)):
    for j, slope in enumerate(slopes):
      # A gate that an infinity saturates rounds nothing: 0 times inf is NaN.
      term = jnp.abs(slope[i]) * size
      total[j] += jnp.where(slope[i] == 0, 0, term)
  return values, tuple(total)


def _largest_so_far(
    values: Sequence[Array], begins: Array | None, reverse: bool
) -> Carry:
  """Returns the largest of each array up to each step, since it began."""
  if begins is None:
    return tuple(lax.cummax(x, axis=0, reverse=reverse) for x in values)
  so_far = functools.partial(
      lax.associative_scan, _larger, reverse=reverse, axis=0
  )
  flags = [jnp.broadcast_to(begins, x.shape) for x in values]
  return tuple(so_far((f, x))[1] for f, x in zip(flags, values, strict=True))


class Scales(NamedTuple):
  """The scales of one step, for steps in turn, each [B, F or 1].

  Attributes:
    own: the largest of a head's numbers.
    step: scales, as `scales` returns them.
    so_far: scales, as `scales_so_far` returns them.
  """

  own: Carry
  step: Carry
  so_far: Carry

  @classmethod
  def before(cls, init: Carry, heads: int) -> 'Scales':
    """Returns zeros, as before the first step."""
    zero = tuple(_of_heads(jnp.zeros_like(x), heads) for x in init)
    return cls(zero, zero, zero)

  def after(self, new: Carry, heads: int, begins: Array | None) -> 'Scales':
    """Returns the scales of the next step.

    Args:
      new: the carry after it, each [B, F].
      heads: N.
      begins: bool [B, 1], or None.
    """
    own = tuple(_of_heads(jnp.abs(x), heads) for x in new)
    before, faded = self.own, tuple(_FADES * x for x in self.so_far)
    if begins is not None:
      forget = lambda carry: tuple(jnp.where(begins, 0, x) for x in carry)
      before, faded = forget(before), forget(faded)
    larger = lambda carry: tuple(map(jnp.maximum, carry, own))
    return Scales(own, larger(before), larger(faded))


def _of_heads(x: Array, heads: int) -> Array:
  """Returns the largest of each head, [..., F]; [..., 1] for one head."""
  if heads == 1:
    return jnp.max(x, axis=-1, keepdims=True)
  if heads == x.shape[-1]:
    return x
  own = x.reshape(*x.shape[:-1], heads, -1)
  worst = jnp.max(own, axis=-1, keepdims=True)
  return jnp.broadcast_to(worst, own.shape).reshape(x.shape)


def _larger(before, after):
  """Joins the largest of two stretches of steps, each (begins, largest)."""
  begins, own = after
  return before[0] | begins, jnp.where(begins, own, jnp.maximum(before[1], own))


def largest(values: Carry, scale: Carry) -> Array:
  """Returns the largest value, each in its scale; finite if all are."""
  info = jnp.finfo(values[0].dtype)

  def relative(x, y):
    found = jnp.abs(x) / jnp.maximum(y, float(info.tiny))
    # A number is no overflow, whatever its scale.
    bounded = jnp.minimum(found, float(info.max))
    return jnp.max(jnp.where(jnp.isfinite(x), bounded, found))

  return jnp.max(jnp.stack(list(map(relative, values, scale))))
