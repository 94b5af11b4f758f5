"""A linear cell over time that is sharded over devices.

Each device projects its own steps and runs them by the path that it would take
alone, from the h before its part. `devices.py` finds that h, given the map of
each part, h -> A h + b.

A kernel reads and writes less if it runs its steps from that h. b is the last h
of a run from h = 0. If the |a| of the last steps have so small a product that
it takes every finite h to zero, a run of these steps alone ends with that b,
and nothing else is needed. Else all of the part is read twice.

An infinity or NaN decays in no number of steps, and may be before the last
steps. A device sees that in its own last h, and all devices run again, by the
maps of all steps. XLA takes branches on the host, which waits for the device
then. The adjoint is the kernels' own: a, b and h keep their dtype, and each is
read or written once.
"""

import functools

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import api
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import choice as choice_lib
from rnnzoo.engines import selection
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices
from rnnzoo.engines.time import maps

Array = jax.Array
Carry = cell_lib.Carry

# Last steps of a part that its map is found from, unless more of them matter.
FEW = 4096


def linear_scan(
    a: Array,
    b: Array,
    h0: Array,
    reset: Array | None,
    reverse: bool,
    over: time_devices.Names,
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for this device's steps, [B, T, F].

  Args:
    a: [B, T, F], like b.
    b: in the dtype of h.
    h0: h before the first of all steps, float32 [B, F].
    reset: bool [B, T], in the order of the loop, or None.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over, inside `jax.shard_map`.
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

  def end(start, stop):
    own, forcing, flags = _steps((a, b, reset), start, stop)
    return api.last(own, forcing, reset=flags, reverse=reverse)

  h, before = _on_devices(run_from, end, (a, reset), h0, reverse, over)
  return h, (a, b, before, reset, h)


def _backward(static, saved, d_h):
  a, b, before, reset, h = saved
  reverse, over = static

  def run_from(d_last):
    *d_arrays, d_before = api.adjoint(
        a, b, before, h, d_last, d_h, reset=reset, reverse=reverse
    )
    return tuple(d_arrays) + (d_before,), d_before

  zero = jnp.zeros_like(before)

  def end(start, stop):
    own, *others, flags = _steps((a, b, h, d_h, reset), start, stop)
    forcing, own_h, g = others
    # The last result, d_first, does not depend on the h before these steps.
    *_, d_first = api.adjoint(
        own, forcing, zero, own_h, zero, g, reset=flags, reverse=reverse
    )
    return d_first

  (d_a, d_b, d_before), _ = _on_devices(
      run_from, end, (a, reset), zero, not reverse, over
  )
  is_first = time_devices.is_first(reverse, over)
  return d_a, d_b, jnp.where(is_first, d_before, 0), None


_run.defvjp(_forward, _backward)


def _on_devices(run_from, end, steps, h0, reverse, over):
  """Runs this device's part of the steps.

  Args:
    run_from: runs all steps: takes h before the first, [B, F], and returns its
      results, and h after the last, [B, F].
    end: runs the steps from start to stop from h = 0, and returns the last h.
    steps: the steps' (a, reset).
    h0: [B, F], h before the first of all steps, equal on all devices.
    reverse: whether the recurrence runs from the last step to the first.
    over: the mesh axes that time is over.

  Returns:
    The results, and h before the first step of this device's part.
  """
  time = steps[0].shape[1]

  def factors(start, stop):
    a, reset = _steps(steps, start, stop)
    a = a.astype(h0.dtype)
    return a if reset is None else jnp.where(reset[..., None], 0, a)

  def find() -> Array:
    """Returns h before this part, by the maps of all steps."""
    own = _product(factors(0, time)), (run_from(jnp.zeros_like(h0))[1],)
    return time_devices.enter(maps.compose, own, (h0,), reverse, over)[0]

  def attempt(before: Array):
    results, last = run_from(before)
    return results, before, last

  if time <= FEW:
    return attempt(find())[:2]
  few = (0, FEW) if reverse else (time - FEW, time)
  ends, place = time_devices.gather(end(*few), over), lax.axis_index(over)
  behind = lax.dynamic_index_in_dim(
      ends, (place + 1 if reverse else place - 1) % len(ends), keepdims=False
  )
  behind = jnp.where(time_devices.is_first(reverse, over), h0, behind)
  bits = jnp.sum(jnp.log2(jnp.abs(factors(*few))), 1)
  is_long = time_devices.somewhere(~(bits < -_bits(h0.dtype)), over)
  *found, last = attempt(lax.cond(is_long, find, lambda: behind))
  is_lost = time_devices.somewhere(~jnp.isfinite(last), over)
  # A loop, and no branch: XLA need not copy its results.
  _, *found = lax.while_loop(
      lambda state: state[0],
      lambda state: (state[0] & False, *attempt(find())[:2]),
      (is_lost & ~is_long, *found),
  )
  return tuple(found)


def _product(a: Array) -> Array:
  """Returns the product of [B, T, F] over T; only a factor of 0 makes it 0."""
  product = jnp.prod(a, 1)
  tiny = jnp.copysign(jnp.finfo(a.dtype).tiny, product)
  return jnp.where(
      jnp.any(a == 0, 1), 0, jnp.where(product == 0, tiny, product)
  )


def _bits(dtype) -> float:
  """Returns n: the product of any finite number and 2^-n is zero, or tiny."""
  info = jnp.finfo(dtype)
  # A little more, for the rounding of a sum of logarithms.
  return 1.05 * float(info.maxexp - info.minexp + info.nmant)


def _steps(arrays, start: int, stop: int):
  """Returns some steps of arrays, [B, T, ...], or None."""
  cut = lambda x: lax.slice_in_dim(x, start, stop, axis=1)
  return [None if x is None else cut(x) for x in arrays]


def run(
    cell: cell_lib.LinearCell,
    projection: call_lib.Projection,
    operands: call_lib.Operands,
    call: call_lib.Call,
    implementation: selection.Implementation,
    over: time_devices.Names,
) -> tuple[Carry, Carry]:
  """Runs a linear cell, of whose steps this device has a part.

  Args:
    cell: the equations.
    projection: map from `operands.x` to the input gates.
    operands: the arrays; x and the flags are this device's steps, and the carry
      is before the first of all steps. Carry and restart are arrays.
    call: static options.
    implementation: paths to try, as `rnnzoo.unroll` takes them.
    over: the mesh axes that time is over, major to minor.

  Returns:
    The final carry, each [B, F], which is equal on all devices, and the carry
    after this device's steps, each [B, T, F], or [T, B, F] if time-major.
  """
  shape = operands.x.shape
  operands = operands if call.time_major else operands.swapped()
  if operands.reset is not None and call.reverse:
    reset = time_devices.boundary(operands.reset, 0, over)
    operands = operands._replace(reset=reset)
  if cell.reads_starts:
    starts = scan_steps.with_starts(
        devices.alike(operands),
        call,
        0,
        lambda reduce, own: time_devices.earlier(
            reduce, own, call.reverse, over
        ),
    )
    operands = operands._replace(reset=starts)

  choice = choice_lib.Run(
      names=selection.names(implementation, linear=True),
      paths=(_scan, _associative_scan, _pallas),
      static=(cell, projection, call.reverse, over),
      label=type(cell).__name__,
  )
  h = choice(operands, shape)
  last = jax.tree.map(lambda x: x[0 if call.reverse else -1], h)
  last = tuple(time_devices.last_carry(x, call.reverse, over) for x in last)
  h = h[: call.outputs]
  if not call.time_major:
    h = tuple(jnp.swapaxes(x, 0, 1) for x in h)
  return last, h


def _pallas(cell, projection, reverse, over, operands, options=None):
  del options  # For other recurrences.
  # If the caller's arrays are batch-major, XLA removes these transposes.
  if len(cell.carry_names) > 1:
    raise NotImplementedError(
        f'GPU kernels run {type(cell).__name__}, which has a carry of two'
        " arrays, where time is whole; implementation='associative_scan' would"
        ' work over devices.'
    )
  swap = lambda x: jnp.swapaxes(x, 0, 1)
  a, (b,) = maps.coefficients(cell, projection, operands)
  a, b = map(swap, (jnp.broadcast_to(a, b.shape), b))
  h0 = operands.carry[0]
  return (swap(linear_scan(a, b, h0, None, reverse, over)),)


def _by(solve, cell, projection, reverse, over, operands, options=None):
  del options  # For other recurrences.
  return maps.unroll(cell, projection, operands, reverse, solve, over)


_scan = functools.partial(_by, maps.step_scan)
_associative_scan = functools.partial(_by, maps.compose_scan)
