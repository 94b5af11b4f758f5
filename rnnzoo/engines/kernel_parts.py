"""Linear recurrences by GPU kernels, with time over devices.

`time_parts.py` finds the h that a device's part begins with. The kernels then
run as they do where time is whole, with their own adjoint: a, b and h keep
their dtype, and each is read or written once.
"""

import functools

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import linear_scan_op
from pallas_kernels import sharding
from rnnzoo.engines import associative
from rnnzoo.engines import selection
from rnnzoo.engines import time_parts

Array = jax.Array


def linear_scan(
    a: Array,
    b: Array,
    h0: Array,
    reset: Array | None,
    reverse: bool,
    over: time_parts.Names,
    restarts: Array | None = None,
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for this device's steps.

  Args:
    a: [B, T, F].
    b: [B, T, F].
    h0: h before the first of all steps, float32 [B, F].
    reset: bool [B, T], in the order of the loop, or None.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over, inside `jax.shard_map`.
    restarts: bool [B, T], further resets, which a = 0 and b make already; or
      None.

  Returns:
    h, [B, T, F], in the dtype of a and b.
  """
  if export.is_symbolic_dim(a.shape[1]):
    raise NotImplementedError('A GPU kernel needs sizes that are known.')
  keeps = jnp.ones((a.shape[0], 1), bool)
  for flags in (reset, restarts):
    if flags is not None:
      keeps &= ~jnp.any(flags, 1)[:, None]
  a, b, h0, reset, keeps = sharding.alike((a, b, h0, reset, keeps))
  with selection.in_reverse_mode():
    return _run((reverse, over), a, b, h0, reset, keeps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, a, b, h0, reset, keeps):
  return _forward(static, a, b, h0, reset, keeps)[0]


def _forward(static, a, b, h0, reset, keeps):
  run = _one_by_one(_run_forward, static, a.shape[1])
  h, before = run(a, b, h0, reset, keeps)
  return h, (a, b, before, reset, keeps, h)


def _run_forward(static, a, b, h0, reset, keeps):
  """Returns h, and h before the first step of this part."""
  reverse, over = static
  time = a.shape[1]
  if time > time_parts.FEW:
    kernels = _Forward((a, b), reset, keeps, reverse)
    return time_parts.run_kernels(
        associative.compose, kernels, h0, time, reverse, over
    )

  def run_from(h):
    out = pallas_kernels.linear_scan(a, b, h, reset=reset, reverse=reverse)
    return out, out[:, 0 if reverse else -1].astype(h.dtype)

  def read(start, stop):
    own, forcing, flags = _steps((a, b, reset), start, stop, h0.dtype)
    return associative.restarted(
        own, forcing, flags, jnp.zeros_like(own[:, :1])
    )

  return time_parts.run(
      associative.compose, read, run_from, h0, time, reverse, over, axis=1
  )


class _Forward:
  """The kernels of a part, for `time_parts.run_kernels`.

  Args:
    steps: a and b, [B, T, F].
    reset: bool [B, T] or None.
    keeps: where no reset is, bool [B, 1].
    reverse: whether the recurrence runs from the last step to the first.
  """

  def __init__(self, steps, reset: Array | None, keeps: Array, reverse: bool):
    self._steps, self._reset, self._reverse = steps, reset, reverse
    self._keeps = keeps
    a, b = steps
    self._part = linear_scan_op.Part(a, b, reset, reverse)

  def end(self, start: int, stop: int):
    a, b, reset = _steps((*self._steps, self._reset), start, stop, None)
    part = linear_scan_op.Part(a, b, reset, self._reverse)
    return part.end(), _bits(a, reset)

  def map(self, is_wanted: Array):
    return self._part.product(is_wanted), self._part.end(is_wanted)

  def keeps(self) -> Array:
    return self._keeps

  def run_twice(self, h: Array, is_wanted: Array, second):
    return self._part.run_twice(h, is_wanted, second)


def _backward(static, saved, d_h):
  a, b, before, reset, keeps, h = saved
  run = _one_by_one(_run_backward, static, a.shape[1])
  return *run(a, b, before, reset, keeps, h, d_h), None, None


def _run_backward(static, a, b, before, reset, keeps, h, d_h):
  """Returns the cotangents of a, b and h0."""
  reverse, over = static
  time, zero = a.shape[1], jnp.zeros_like(before)
  if time > time_parts.FEW:
    kernels = _Backward((a, b, before, h, d_h), reset, keeps, reverse)
    results, _ = time_parts.run_kernels(
        associative.compose, kernels, zero, time, not reverse, over
    )
  else:

    def run_from(d_last):
      *d_arrays, d_first = linear_scan_op.adjoint(
          a, b, before, h, d_last, d_h, reset=reset, reverse=reverse
      )
      return (d_arrays, d_first), d_first

    def read(start, stop):
      own, g, flags = _steps((a, d_h, reset), start, stop, before.dtype)
      own, _ = associative.restarted(own, g, flags, jnp.zeros_like(own[:, :1]))
      return own, jnp.where(own == 0, 0, own * g)

    results, _ = time_parts.run(
        associative.compose,
        read,
        run_from,
        zero,
        time,
        not reverse,
        over,
        axis=1,
    )
  d_arrays, d_before = results
  is_first = time_parts.is_first(reverse, over)
  return *d_arrays, jnp.where(is_first, d_before, 0)


_run.defvjp(_forward, _backward)


class _Backward:
  """The kernels of a part's adjoint, for `time_parts.run_kernels`.

  Args:
    arrays: a and b, [B, T, F], h before the steps, [B, F], after each, and its
      cotangent.
    reset: bool [B, T] or None.
    keeps: where no reset is, bool [B, 1].
    reverse: whether the steps ran from the last to the first.
  """

  def __init__(self, arrays, reset: Array | None, keeps: Array, reverse: bool):
    self._arrays, self._reset, self._reverse = arrays, reset, reverse
    self._keeps = keeps
    a, b, *_ = arrays
    self._part = linear_scan_op.Part(a, b, reset, reverse)

  def end(self, start: int, stop: int):
    a, b, _, _, g = self._arrays
    a, b, g, reset = _steps((a, b, g, self._reset), start, stop, None)
    part = linear_scan_op.Part(a, b, reset, self._reverse)
    return part.adjoint_end(g), _bits(a, reset)

  def map(self, is_wanted: Array):
    *_, g = self._arrays
    part = self._part
    return part.product(is_wanted), part.adjoint_end(g, is_wanted)

  def keeps(self) -> Array:
    return self._keeps

  def run_twice(self, d_last: Array, is_wanted: Array, second):
    _, _, before, h, g = self._arrays
    return self._part.adjoint_twice(before, h, d_last, g, is_wanted, second)


def _one_by_one(function, static, time: int):
  """Returns a function of arrays.

  `jax.vmap` runs it once for each element where a device decides on kernels:
  each element may decide otherwise, and references have no vmap rule. Outside
  of `jax.jit` references have to stay inside of such a function, too.
  """
  run = functools.partial(function, static)
  if time <= time_parts.FEW:
    return run
  return jax.custom_batching.sequential_vmap(run)


def _bits(a, reset):
  """Returns a bound of log2 |product of a|, [B, F]; it knows no underflow."""
  bits = jnp.log2(jnp.abs(a.astype(jnp.float32)))
  if reset is not None:
    bits = jnp.where(reset[..., None], -jnp.inf, bits)
  return jnp.sum(bits, 1)


def _steps(arrays, start: int, stop: int, dtype):
  """Returns some steps, in a dtype unless it is None; flags as they are."""
  cut = [
      None if x is None else lax.slice_in_dim(x, start, stop, axis=1)
      for x in arrays
  ]
  return [
      x if x is None or x.dtype == bool else x.astype(dtype or x.dtype)
      for x in cut
  ]
