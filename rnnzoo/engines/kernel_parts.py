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
from pallas_kernels import api
from pallas_kernels import devices
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
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for this device's steps.

  Args:
    a: [B, T, F].
    b: [B, T, F].
    h0: h before the first of all steps, float32 [B, F].
    reset: bool [B, T], in the order of the loop, or None.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over, inside `jax.shard_map`.

  Returns:
    h, [B, T, F], in the dtype of a and b.
  """
  if export.is_symbolic_dim(a.shape[1]):
    raise NotImplementedError('A GPU kernel needs sizes that are known.')
  a, b, h0, reset = devices.alike((a, b, h0, reset))
  with selection.in_reverse_mode():
    return _run((reverse, over), a, b, h0, reset)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static, a, b, h0, reset):
  return _forward(static, a, b, h0, reset)[0]


def _forward(static, a, b, h0, reset):
  reverse, over = static

  def run_from(h):
    out = pallas_kernels.linear_scan(a, b, h, reset=reset, reverse=reverse)
    return out, out[:, 0 if reverse else -1].astype(h.dtype)

  def read(start, stop):
    own, forcing, flags = _steps((a, b, reset), start, stop, h0.dtype)
    return associative.restarted(
        own, forcing, flags, jnp.zeros_like(own[:, :1])
    )

  def end(start, stop):
    own, forcing, flags = _steps((a, b, reset), start, stop, None)
    last = api.last(own, forcing, reset=flags, reverse=reverse)
    return last, _bits(own, flags)

  functions = associative.compose, read, run_from
  h, before = time_parts.run(
      *functions, h0, a.shape[1], reverse, over, axis=1, end=end
  )
  return h, (a, b, before, reset, h)


def _backward(static, saved, d_h):
  a, b, before, reset, h = saved
  reverse, over = static

  def run_from(d_last):
    *d_arrays, d_before = api.adjoint(
        a, b, before, h, d_last, d_h, reset=reset, reverse=reverse
    )
    return tuple(d_arrays) + (d_before,), d_before

  def read(start, stop):
    own, g, flags = _steps((a, d_h, reset), start, stop, before.dtype)
    own, _ = associative.restarted(own, g, flags, jnp.zeros_like(own[:, :1]))
    return own, jnp.where(own == 0, 0, own * g)

  zero = jnp.zeros_like(before)

  def end(start, stop):
    own, *others, flags = _steps((a, b, h, d_h, reset), start, stop, None)
    forcing, own_h, g = others
    # The last result, d_first, does not depend on the h before these steps.
    *_, d_first = api.adjoint(
        own, forcing, zero, own_h, zero, g, reset=flags, reverse=reverse
    )
    return d_first, _bits(own, flags)

  functions = associative.compose, read, run_from
  (d_a, d_b, d_before), _ = time_parts.run(
      *functions, zero, a.shape[1], not reverse, over, axis=1, end=end
  )
  is_first = time_parts.is_first(reverse, over)
  return d_a, d_b, jnp.where(is_first, d_before, 0), None


_run.defvjp(_forward, _backward)


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
