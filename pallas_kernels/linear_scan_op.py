"""`linear_scan`: h_t = a_t h_{t-1} + b_t as an operation of its own."""

from collections.abc import Callable
import dataclasses

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


class Part:
  """A scan of some steps of a longer sequence, whose others precede elsewhere.

  Nothing of it is differentiable, and `jax.vmap` has to run it one by one. A
  switch is a boolean scalar, or None for true; where false nothing runs, and
  the result is anything.

  Args:
    a: [B, T, F], as for `linear_scan`, and so are the others.
    b: [B, T, F].
    reset: bool [B, T] or None.
    reverse: whether the steps run from the last to the first.
  """

  def __init__(self, a: Array, b: Array, reset: Array | None, reverse: bool):
    self._inputs, self._reset = (a, b), reset
    self._static = _checked(a, b, None, reset, reverse, False)[0]

  def end(self, switch: Array | None = None) -> Array:
    """Returns h after the last step, from h = 0, float32 [B, F]."""
    static = self._static
    return _parts().end(static, self._inputs, None, self._reset, switch)

  def product(self, switch: Array | None = None) -> Array:
    """Returns the product of all a, float32 [B, F].

    It is zero over a reset or an a of 0 alone. One that underflows is the
    smallest normal number: such steps forget no infinity.
    """
    product = self._of_factors(_scale, switch)
    is_kept = self._of_factors(_keep, switch) != 0
    tiny = jnp.copysign(jnp.finfo(product.dtype).tiny, product)
    return jnp.where((product == 0) & is_kept, tiny, product)

  def _of_factors(self, step, switch: Array | None) -> Array:
    """Returns h after the last step, from h = 1, by steps of a alone."""
    a, _ = self._inputs
    static = dataclasses.replace(self._static, step=step)
    one = jnp.ones((a.shape[0], a.shape[2]), jnp.float32)
    return _parts().end(static, (a,), one, self._reset, switch)

  def run_twice(
      self,
      h0: Array,
      switch: Array,
      second: Callable[[Array], tuple[Array, Array]],
  ) -> Array:
    """Returns h, [B, T, F], by a run and maybe another one in its place.

    Args:
      h0: float32 [B, F], for the first run.
      switch: whether the first run happens.
      second: takes h after the last step of the first run, float32 [B, F], and
        returns the switch of the second, and h0 for it. One of the two has to
        happen.
    """
    return _parts().run_twice(
        self._static, self._inputs, h0, self._reset, switch, second
    )

  def adjoint_end(self, d_h: Array, switch: Array | None = None) -> Array:
    """Returns the cotangent of h0, float32 [B, F], given that of h."""
    a, _ = self._inputs
    zero = jnp.zeros((a.shape[0], a.shape[2]), jnp.float32)
    static = self._static
    return _parts().adjoint_end(
        static, self._inputs, self._reset, zero, d_h, switch
    )

  def adjoint_twice(
      self,
      h0: Array,
      h: Array,
      d_last: Array,
      d_h: Array,
      switch: Array,
      second: Callable[[Array], tuple[Array, Array]],
  ) -> tuple[tuple[Array, Array], Array]:
    """Returns the cotangents of (a, b) and of h0, like `run_twice`.

    Args:
      h0: float32 [B, F].
      h: the result, [B, T, F].
      d_last: a further cotangent of h after the last step, float32 [B, F], for
        the first run.
      d_h: cotangent of h.
      switch: whether the first run happens.
      second: takes the cotangent of h0, and returns the switch of the second
        run, and d_last for it.
    """
    given = h0, self._reset, h, d_last, d_h
    return _parts().adjoint_twice(
        self._static, self._inputs, *given, switch, second
    )


def _parts():
  """Returns the module of kernels; Pallas is imported where it works."""
  from pallas_kernels.streaming import parts_op

  return parts_op


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


def _scale(theta, row):
  """Returns the coefficients of a product of a."""
  del theta
  (a,) = row
  return a, 0 * a


def _keep(theta, row):
  """Returns the coefficients of a product of 0 where a is 0, and else of 1."""
  del theta
  (a,) = row
  return jnp.where(a == 0, a, 1), 0 * a
