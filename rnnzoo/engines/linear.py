"""The first-order linear recurrence as an operation of its own."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import choice as choice_lib
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices
from rnnzoo.engines.time import linear_parts
from rnnzoo.engines.time import maps

Array = jax.Array


@promotion.of_ranks
def linear_scan(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    reset: Array | None = None,
    reverse: bool = False,
    time_axis_name: str | Sequence[str] | None = None,
    implementation: selection.Implementation = None,
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t, the first-order linear recurrence.

  >>> import jax.numpy as jnp, rnnzoo
  >>> a = jnp.full((1, 4, 1), 0.5)
  >>> rnnzoo.linear_scan(a, jnp.ones_like(a))[0, :, 0].tolist()
  [1.0, 1.5, 1.75, 1.875]

  Batch, time and features may be sharded over Explicit axes of a mesh. If
  time is, the devices exchange the affine maps of their parts, [...,
  features] each, and no steps. A product of `a` over steps of a part, as of all
  steps in 'associative_scan', must not overflow, even where h stays finite; of
  an infinite a, h behind it may be NaN where step by step it is infinite. If
  a is exactly 0, h starts anew, also after an infinity or NaN; docs/devices.md
  has the exception where time is sharded.

  Args:
    a: [..., time, features], with any batch axes or none; or [features], free
      of time, which no path stores for every step. Real or complex.
    b: [..., time, features].
    h0: h before the first step, [..., features]; zeros if None.
    reset: bool [..., time]; where true, h restarts from zero before the step;
        with `reverse`, where it goes from that step to the one before.
    reverse: run from the last step to the first.
    time_axis_name: mesh axis that time is sharded over inside `jax.shard_map`,
      or several axes, major to minor. `a`, `b` and `reset` are then
      this device's steps, and h0 is before the first of all steps.
    implementation: paths to try, as `unroll` takes them.

  Returns:
    h, [..., time, features], in the dtype of a and b; sums are float32 or
    wider.

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the implementation named cannot run this.
  """
  a, b, h0, reset, out_dtype = _checked(a, b, h0, reset)
  settings.boolean(reverse, 'reverse')
  over = settings.axis_names(time_axis_name, 'time_axis_name')
  is_free = a.ndim == 1
  *batch_shape, time, features = b.shape
  given = a, b, h0, reset
  time_devices.check_names(over, given)
  if sharding.is_sharded(given):
    # Sequences and features are independent, and parts of time nearly so.
    axes = sharding.axes_of_run(b.shape[:-1], linear=True)
    of_a = axes.parameters if is_free else axes.steps
    positions = of_a, axes.steps, axes.carry, axes.flags
    names = sharding.choose(given, positions, features)
    return sharding.spread(
        lambda own: linear_scan(
            *own[:3],
            reset=own[3],
            reverse=reverse,
            time_axis_name=(*over, *names[-2]),
            implementation=implementation,
        ),
        given,
        positions=positions,
        out_positions=axes.steps,
        over=names,
    )
  a, b, h0 = devices.alike([a, b, h0])
  if time == 0:
    return b.astype(out_dtype)
  shape, batch = b.shape, math.prod(batch_shape)
  b = b.reshape(batch, time, features)
  a = a if is_free else a.reshape(b.shape)
  h0 = h0.reshape(batch, features)
  if reset is not None:
    reset = reset.reshape(batch, time)
    if over and reverse:
      reset = time_devices.boundary(reset, 1, over)
    else:
      reset = scan_steps.boundary(reset, reverse, axis=1)

  b = choice_lib.marked(b, implementation)
  choice = choice_lib.Run(
      names=selection.names(implementation, linear=True),
      paths=(_scan, _associative_scan, _pallas),
      static=(reverse, over),
      label='linear_scan',
      slower_kernel=''
      if implementation is not None or over
      else choice_lib.slower_linear_kernel(batch, time, features),
  )
  h = choice((a, b, h0, reset), b.shape)
  return h.reshape(shape).astype(out_dtype)


def _checked(a, b, h0, reset) -> tuple[Any, ...]:
  """Returns the arguments as arrays, and the dtype of the result."""
  a, b = checks.array(a, 'a'), checks.array(b, 'b')
  if b.ndim < 2 or a.shape not in (b.shape, b.shape[-1:]):
    raise ValueError(
        'b must be [..., time, features], and a the same or [features]; got'
        f' shapes {b.shape} and {a.shape}.'
    )
  checks.number(a, 'a', or_complex=True)
  checks.number(b, 'b', or_complex=True)
  out_dtype = jnp.result_type(a, b)
  if not jnp.issubdtype(out_dtype, jnp.inexact):
    raise ValueError(f'a and b must be floating-point, got {out_dtype}.')
  *batch_shape, time, features = b.shape
  reset = checks.flags(reset, b.shape[:-1], 'reset')
  dtype = promotion.wide(out_dtype)
  if h0 is None:
    h0 = jnp.zeros((*batch_shape, features), dtype)
  h0 = checks.array(h0, 'h0')
  checks.number(h0, 'h0', or_complex=True)
  if jnp.iscomplexobj(h0) and not jnp.issubdtype(dtype, jnp.complexfloating):
    raise ValueError(
        f'h0 must be real where a and b are, got {h0.dtype}; a complex b would'
        ' work.'
    )
  if h0.shape != (*batch_shape, features):
    raise ValueError(
        f'h0 must be [..., features] = {(*batch_shape, features)}, got'
        f' {h0.shape}.'
    )
  return a, b, h0.astype(dtype), reset, out_dtype


def _pallas(reverse: bool, over, operands, options=None):
  del options  # For other recurrences: a and b are given.
  *arrays, reset = operands
  selection.check_known(arrays[1].shape)
  a, b, h0 = selection.for_kernel(tuple(arrays))
  if over:
    if jnp.issubdtype(b.dtype, jnp.complexfloating):
      raise NotImplementedError(
          'GPU kernels run a complex linear_scan where time is whole;'
          " implementation='associative_scan' would work over devices."
      )
    a = jnp.broadcast_to(a, b.shape)
    return linear_parts.linear_scan(a, b, h0, reset, reverse, over)
  with selection.in_reverse_mode():
    return pallas_kernels.linear_scan(a, b, h0, reset=reset, reverse=reverse)


def _by_xla(solve, reverse: bool, over, operands, options=None):
  del options  # For other recurrences.
  a, b, h0, reset = operands
  a, b = a.astype(h0.dtype), b.astype(h0.dtype)
  a = a[None, None] if a.ndim == 1 else a
  zero = jnp.zeros_like(h0[:, None])
  a, (b,) = maps.restarted(a, (b,), reset, (zero,))
  a_t, b_t = jnp.swapaxes(a, 0, 1), jnp.swapaxes(b, 0, 1)
  (h,) = maps.linear_scan(solve, reverse, a_t, (b_t,), (h0,), over)
  return jnp.swapaxes(h, 0, 1)


_scan = functools.partial(_by_xla, maps.step_scan)
_associative_scan = functools.partial(_by_xla, maps.compose_scan)
