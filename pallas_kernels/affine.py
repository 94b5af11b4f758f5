"""`linear_scan`: h_t = a_t h_{t-1} + b_t as an operation of its own."""

import jax
import jax.numpy as jnp

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
    reset: bool [B, T]; where true, h restarts from zero before the step, in the
      order of the loop.
    reverse: run from the last step to the first.
    time_major: a, b and h are [T, B, F] instead.

  Returns:
    h, [B, T, F], in the dtype that a and b promote to.

  Raises:
    NotImplementedError: the device, the jax version or a dtype is one that the
      kernels cannot run.
  """
  target = targets.current()
  targets.check_dtypes('linear_scan', (a, b))
  # Pallas's GPU backend is imported where it is known to work.
  from pallas_kernels import engine

  batch, time, features = a.shape
  if time_major:
    batch, time = time, batch
  targets.check_sizes('linear_scan', batch, time, features)
  if h0 is None:
    h0 = jnp.zeros((batch, features), jnp.float32)
  h0 = h0.astype(jnp.float32)[None]
  call = engine.Call(
      step=_inputs,
      linear=True,
      params=0,
      shape=(batch, time, features),
      time_major=time_major,
      reverse=reverse,
      outputs=1,
      out_dtype=jnp.result_type(a, b),
      target=target,
  )
  theta = jnp.zeros((1, features), jnp.float32)
  zeros = jnp.zeros_like(h0)
  _, (h,) = engine.run(call, theta, (a, b), h0, zeros, reset, None)
  return h


def _inputs(theta, row):
  """The coefficients of a plain scan: its inputs."""
  del theta
  return tuple(row)
