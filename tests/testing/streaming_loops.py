"""Plain loops in place of the kernels for linear and diagonal recurrences.

They do what the functions of `pallas_kernels/streaming/op.py`
around the kernels do, for any device: `with streaming_loops.instead():`.
"""

from collections.abc import Iterator
import contextlib
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import devices
from rnnzoo.engines.time import maps
from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from pallas_kernels.mosaic import step_flags
  from pallas_kernels.streaming import op


@contextlib.contextmanager
def instead() -> Iterator[None]:
  """Runs recurrences by these loops, as if there were an H200."""
  target = devices.Target(132, False, (10, 0))
  loops = {'_forward': forward, '_backward': backward}
  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(devices, 'current', lambda: target))
    for name, loop in loops.items():
      stack.enter_context(mock.patch.object(op, name, loop))
    yield


def forward(static, theta, arrays, carry, restart, flags):
  """Returns the last carry [S, B, Fp] and arrays of all steps, [B, T, F]."""
  last, carries = _loop(static, theta, arrays, carry, restart, flags)
  dtype = static.call.out_dtype
  carries = carries[: static.call.outputs]
  return last, tuple(h.astype(dtype) for h in carries)


def backward(static, theta, arrays, carries, carry, restart, flags, given):
  """Returns the cotangents of arrays, carry, theta and restart."""
  zeros = jnp.zeros((len(carries), *given[0].shape[1:]), jnp.float32)
  start = zeros if carry is None else carry
  again = zeros if restart is None else restart

  def run(arrays, start, theta, again):
    return _loop(static, theta, arrays, start, again, flags)

  (last, whole), pull = jax.vjp(run, arrays, start, theta, again)
  d_last, d_carries = given
  d_whole = [jnp.zeros_like(h) for h in whole]
  for i, d in enumerate(d_carries):
    d_whole[i] = d.astype(jnp.float32)
  d_arrays, *others = pull((d_last.astype(last.dtype), tuple(d_whole)))
  return d_arrays, *others


def _loop(static, theta, arrays, carry, restart, flags):
  """Runs the steps, in float32; a carry is padded to Fp features."""
  features = static.shape[-1]
  padded = theta.shape[-1]
  axis = static.batch_axis
  batch = arrays[0].shape[axis]
  rows = tuple(theta[: static.params, :features])
  gates = []
  for x in arrays:
    x = jnp.swapaxes(x, 0, 1 - axis).astype(jnp.float32)
    gates += [x] if x.ndim == 3 else [x[:, :, i] for i in range(x.shape[2])]
  zeros = jnp.zeros((static.states, batch, features), jnp.float32)
  zeros = devices.like(zeros, gates[0])
  start, again = (
      zeros if c is None else c[..., :features] for c in (carry, restart)
  )
  if flags is None:
    flags = jnp.zeros((batch, gates[0].shape[0]), jnp.int32)

  def step(old, inputs):
    row, flag = inputs
    reset, hold = (
        (flag & bit != 0)[:, None]
        for bit in (step_flags.RESET, step_flags.HOLD)
    )
    old = tuple(jnp.where(reset, x, y) for x, y in zip(again, old, strict=True))
    if static.linear:
      starts = (reset.astype(jnp.float32),) * static.reads_starts
      new = maps.affine(*static.step(rows, (*row, *starts)), old)
    else:
      new = static.step(rows, row, old)
    new = tuple(jnp.where(hold, x, y) for x, y in zip(old, new, strict=True))
    return new, new

  last, carries = lax.scan(
      step, tuple(start), (tuple(gates), flags.T), reverse=static.call.reverse
  )
  last = jnp.pad(jnp.stack(last), ((0, 0), (0, 0), (0, padded - features)))
  return last, tuple(jnp.swapaxes(h, 0, 1 - axis) for h in carries)
