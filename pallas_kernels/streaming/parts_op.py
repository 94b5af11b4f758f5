"""Linear recurrences of which this device has some steps of a longer sequence.

Other devices have the steps before, so a run may turn out to have begun with a
wrong h. `run_twice` then writes the right results over those of the first run,
in the same memory. Whether it does is known on the device alone: the kernels
read a switch there, and end at once where it is off. So no host waits, and no
array is copied. Both runs are one kernel to the compiler.

None of these functions is differentiable, and `jax.vmap` has to run them one by
one.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import sharding
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import linear
from pallas_kernels.streaming import linear_adjoint
from pallas_kernels.streaming import recurrence as recurrence_lib
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import tuning

Array = jax.Array
Recurrence = recurrence_lib.Recurrence

# The last carry of a first run -> the switch of the second, a boolean scalar,
# and the carry that it begins with, float32 [B, F].
Second = Callable[[Array], tuple[Array, Array]]


def end(
    recurrence: Recurrence,
    arrays: Sequence[Array],
    carry: Array | None,
    reset: Array | None,
    switch: Array | None,
) -> Array:
  """Returns h after the last step alone, float32 [B, F].

  Args:
    recurrence: the static arguments; without parameters.
    arrays: inputs, [B, T, F].
    carry: h before the first step, float32 [B, F], or None for zeros.
    reset: bool [B, T] or None.
    switch: a boolean scalar, or None for true; where false nothing runs, and
      the result is anything.
  """
  call = _Call(recurrence, (arrays, carry, reset, switch))
  arrays, carry, reset, switch = call.operands
  config = tuning.linear(
      call.layout, streams.streams_of(arrays), (), recurrence.target
  )
  operands = call.of(config, arrays, carry, reset, switch)
  _, last = linear.forward(*operands)
  return last[:, : call.features]


def run_twice(
    recurrence: Recurrence,
    arrays: Sequence[Array],
    carry: Array,
    reset: Array | None,
    switch: Array,
    second: Second,
) -> Array:
  """Runs a recurrence, and once more in place if its end asks for it.

  Args:
    recurrence: the static arguments; without parameters.
    arrays: inputs, [B, T, F].
    carry: h before the first step, float32 [B, F].
    reset: bool [B, T] or None.
    switch: of the first run, a boolean scalar.
    second: the second run; one of the two has to happen.

  Returns:
    h, [B, T, F].
  """
  call = _Call(recurrence, (arrays, carry, reset))
  arrays, carry, reset = call.operands
  outs = (streams.Stream(0, None, recurrence.call.out_dtype),)
  config = tuning.linear(
      call.layout, streams.streams_of(arrays), outs, recurrence.target
  )
  of = lambda *given: call.of(config, arrays, *given)
  plan, *first = of(carry, reset, switch)
  h = jax.empty_ref(jax.ShapeDtypeStruct(plan.layout.shape, outs[0].dtype))
  _, last = linear.forward(plan, *first, h)
  again, carry = second(last[:, : call.features])
  linear.forward(*of(call.pad(carry), reset, again), h)
  return call.result(plan, jax.freeze(h))


def adjoint_end(
    recurrence: Recurrence,
    arrays: Sequence[Array],
    reset: Array | None,
    d_last: Array,
    d_h: Array,
    switch: Array | None,
) -> Array:
  """Returns the cotangent of the carry alone, float32 [B, F].

  Args:
    recurrence: the static arguments; without parameters.
    arrays: inputs, [B, T, F].
    reset: bool [B, T] or None.
    d_last: cotangent of h after the last step, float32 [B, F].
    d_h: cotangent of h.
    switch: as for `end`.
  """
  call = _Call(recurrence, (arrays, reset, d_last, d_h, switch))
  arrays, reset, d_last, d_h, switch = call.operands
  config = tuning.linear(
      call.layout, _read(arrays, d_h), (), recurrence.target, True
  )
  plan, theta, arrays, carry, restart, flags, switch = call.of(
      config, arrays, None, reset, switch
  )
  operands = theta, carry, restart, flags, switch, d_last
  # h is not read; the kernel wants an array in its place.
  d_carry = linear_adjoint.backward_into(plan, operands, arrays, d_h, d_h, ())
  return d_carry[:, : call.features]


def adjoint_twice(
    recurrence: Recurrence,
    arrays: Sequence[Array],
    carry: Array,
    reset: Array | None,
    h: Array,
    d_last: Array,
    d_h: Array,
    switch: Array,
    second: Second,
) -> tuple[tuple[Array, ...], Array]:
  """Runs the adjoint, and once more in place if its end asks for it.

  Args:
    recurrence: the static arguments; without parameters.
    arrays: inputs, [B, T, F].
    carry: h before the first step, float32 [B, F].
    reset: bool [B, T] or None.
    h: after every step, [B, T, F].
    d_last: cotangent of h after the last step, float32 [B, F].
    d_h: cotangent of h, [B, T, F].
    switch: of the first run, a boolean scalar.
    second: the second run: takes the cotangent of `carry` for the last carry,
      and returns `d_last` for the carry.

  Returns:
    The cotangents of `arrays` and of `carry`.
  """
  call = _Call(recurrence, (arrays, carry, reset, h, d_last, d_h))
  arrays, carry, reset, h, d_last, d_h = call.operands
  outs = streams.streams_of(arrays)
  config = tuning.linear(
      call.layout, _read(arrays, h, d_h), outs, recurrence.target, True
  )

  def of(d_last, switch):
    plan, theta, inputs, start, restart, flags, switch = call.of(
        config, arrays, carry, reset, switch
    )
    return plan, (theta, start, restart, flags, switch, d_last), inputs

  plan, first, inputs = of(d_last, switch)
  d_arrays = [
      jax.empty_ref(jax.ShapeDtypeStruct(plan.layout.widened(x), x.dtype))
      for x in arrays
  ]

  def run(operands):
    d_carry = linear_adjoint.backward_into(
        plan, operands, inputs, h, d_h, d_arrays
    )
    return d_carry[:, : call.features]

  d_carry = run(first)
  again, d_last = second(d_carry)
  other = run(of(call.pad(d_last), again)[1])
  results = tuple(call.result(plan, jax.freeze(x)) for x in d_arrays)
  return results, jnp.where(again, other, d_carry)


def _read(arrays: Sequence[Array], *others: Array) -> list[streams.Stream]:
  """Returns the streams that an adjoint reads."""
  # Of a plain scan's inputs it reads a.
  return [streams.Stream(0, None, x.dtype) for x in (arrays[0], *others)]


class _Call:
  """Operands, padded to features that kernels can read.

  Args:
    recurrence: the static arguments.
    operands: arrays, [B, T, F] or [B, F], flags, a switch, or None.
  """

  def __init__(self, recurrence: Recurrence, operands: Any):
    self.features = recurrence.shape[-1]
    operands = sharding.alike(autodiff.differentiable_once(operands))
    self.like = jax.tree.leaves(operands)[0]
    aligned = recurrence.aligned(jax.tree.leaves(operands[0]))
    shape = *recurrence.shape[:2], aligned
    self.recurrence = dataclasses.replace(recurrence, shape=shape)
    self.layout = self.recurrence.layout
    self.operands = jax.tree.map(self.pad, operands)

  def pad(self, x: Array) -> Array:
    """Pads features; small operands have whole tiles."""
    if x.ndim < 2 or x.dtype == jnp.bool_:
      return x
    *_, aligned = self.recurrence.shape
    x = sharding.like(x, self.like)
    if x.ndim == 2:
      return streams.pad_to_tiles(aligned, x)
    return streams.pad_features(x, aligned)

  def of(self, config, arrays, carry, reset, switch):
    """Returns the plan of a kernel, and its operands up to the switch."""
    recurrence = self.recurrence
    flags = step_flags.pack(reset, None)
    plan = recurrence.plan(config, carry, None, flags, switch)
    states = None if carry is None else carry[None]
    theta = jnp.zeros((1, self.layout.padded), jnp.float32)
    given = recurrence.kernel_operands(theta, arrays, states, None, flags)
    switch = given.flags if switch is None else self._word(switch)
    return plan, *given, switch

  def _word(self, switch: Array) -> Array:
    """Returns a switch as kernels read it."""
    return sharding.like(switch.astype(jnp.int32)[None], self.like)

  def result(self, plan, x: Array) -> Array:
    """Returns an array of a kernel without what was padded."""
    x = sharding.like(plan.layout.narrow(x), self.like)
    return x[..., : self.features]
