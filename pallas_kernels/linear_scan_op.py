"""`linear_scan`: h_t = a_t h_{t-1} + b_t as an operation of its own."""

import jax
import jax.numpy as jnp

from pallas_kernels import arguments
from pallas_kernels import call as call_lib
from pallas_kernels import sharding
from pallas_kernels import targets

Array = jax.Array


def linear_scan(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    reset: Array | None = None,
    reverse: bool = False,
    time_major: bool = False,
) -> Array:
  """Computes h_t = a_t h_{t-1} + b_t on the GPU.

  One read of a and b, one write of h; the gradient reads a, h and its own
  cotangent once and writes two. Sums are float32.

  Args:
    a: [B, T, F]; float32, bfloat16 or float16.
    b: [B, T, F].
    h0: h before the first step, [B, F]; zeros if None.
    reset: bool [B, T], also where arrays are time-major; where true, h restarts
      from zero before the step, in the order of the loop.
    reverse: run from the last step to the first.
    time_major: a, b and h are [T, B, F] instead.

  Returns:
    h, [B, T, F], in the dtype that a and b promote to.

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the device, the jax version, a dtype or a size is one
      that the kernels cannot run; or a second derivative is asked for.
  """
  _, (h,) = _run(a, b, h0, reset, reverse, time_major)
  return h


def last(
    a: Array, b: Array, *, reset: Array | None = None, reverse: bool = False
) -> Array:
  """Computes h after the last step, from h = 0, for parts of a sequence.

  Args:
    a: [B, T, F], as for `linear_scan`, and so are the others.
    b: [B, T, F].
    reset: bool [B, T].
    reverse: run from the last step to the first.

  Returns:
    h, float32 [B, F].
  """
  return _run(a, b, None, reset, reverse, False)[0][0]


def adjoint(
    a: Array,
    b: Array,
    h0: Array,
    h: Array,
    d_last: Array,
    d_h: Array,
    *,
    reset: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array, Array]:
  """Computes the gradient of `linear_scan` alone, for parts of a sequence.

  Args:
    a: [B, T, F], as for `linear_scan`, and so are the others.
    b: [B, T, F]; not read.
    h0: [B, F].
    h: the result, [B, T, F].
    d_last: a further cotangent of h after the last step, [B, F].
    d_h: cotangent of h, [B, T, F].
    reset: bool [B, T].
    reverse: whether the steps ran from the last to the first.

  Returns:
    The cotangents of a, b and h0, the last in float32.
  """
  operands = sharding.alike((a, b, h0, reset, h, d_last, d_h))
  a, b, h0, reset, h, d_last, d_h = operands
  recurrence, theta, h0 = _checked(a, b, h0, reset, reverse, False)
  from pallas_kernels.streaming import op as streaming_op

  d_last = d_last.astype(jnp.float32)[None]
  (d_a, d_b), d_h0 = streaming_op.linear_adjoint_of(
      recurrence, theta, (a, b), h0, reset, h, d_last, d_h
  )
  return d_a, d_b, d_h0[0]


def _run(a, b, h0, reset, reverse, time_major):
  """Returns the last h, [1, B, F], and a tuple of all."""
  a, b, h0, reset = sharding.alike((a, b, h0, reset))
  recurrence, theta, h0 = _checked(a, b, h0, reset, reverse, time_major)
  # Pallas's GPU backend is imported where it is known to work.
  from pallas_kernels.streaming import op as streaming_op

  return streaming_op.run(
      recurrence,
      theta,
      (a, b),
      input_kernel=None,
      carry=h0,
      restart=None,
      reset=reset,
      mask=None,
  )


def _checked(a, b, h0, reset, reverse, time_major):
  """Returns the static arguments, theta and h0 as `streaming.op` takes them."""
  target = targets.current()
  if a.ndim != 3:
    raise ValueError(f'a must be [batch, time, features], got {a.shape}.')
  arguments.shape('b', b, 'like a', a.shape)
  arguments.dtypes('linear_scan', (a.dtype, b.dtype))
  arguments.unsharded('linear_scan', (a, b, h0, reset))
  from pallas_kernels.streaming import recurrence as recurrence_lib

  batch, time, features = a.shape
  if time_major:
    batch, time = time, batch
  arguments.sizes('linear_scan', batch, time, features)
  arguments.flags('reset', reset, batch, time)
  if h0 is not None:
    arguments.shape('h0', h0, '[batch, features]', (batch, features))
    h0 = h0.astype(jnp.float32)[None]
  recurrence = recurrence_lib.Recurrence(
      step=_inputs,
      linear=True,
      params=0,
      shape=(batch, time, features),
      call=call_lib.Call(
          reverse=reverse,
          time_major=time_major,
          out_dtype=jnp.result_type(a, b),
      ),
      target=target,
  )
  return recurrence, jnp.zeros((1, features), jnp.float32), h0


def _inputs(theta, row):
  """Returns the coefficients of a plain scan: its inputs."""
  del theta
  return tuple(row)
