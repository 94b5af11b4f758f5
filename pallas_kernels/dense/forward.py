"""The kernel that runs a dense recurrence."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags

Array = jax.Array
Stream = thread_layout.Stream


def forward(
    plan: kernel_call.Plan,
    theta: Array,
    x: Array,
    matrix: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array | None,
    outputs: int,
    out_dtype: Any,
    save: bool,
) -> tuple[tuple[Array, ...], Array, tuple[Array, ...], Array | None]:
  """Runs the recurrence.

  Args:
    plan: what is static.
    theta: float32 [plan.params or 1, F].
    x: the inputs, [B, T, G, F].
    matrix: R transposed, [G', N, D, D] indexed [gate, head, to, from], in 16
      bits; two of them for the parts of float32.
    carry: what the first step starts from, float32 [S, B, F].
    restart: what a reset restarts from, float32 [S, B, F].
    flags: int32 [T, 1 or 2, B'], as `prepare_flags` returns them, or None.
    outputs: how many arrays of the carry are returned for all steps.
    out_dtype: dtype of these.
    save: whether what the adjoint needs is returned too.

  Returns:
    The carries after every step, each [B, T, F]; the carry after the last step,
    [S, B, F]; if saved, the carries that every step starts from, h in
    `plan.dtype` [N, B, T, 1, D] and the others in float32, each [B, T, F]; and
    the operand of the second product, [N, B, T, 1, D], if there is one.
  """
  shape, config = plan.shape, plan.config
  states = carry.shape[0]
  two = plan.operand is not None
  stages = plan.stages
  products = plan.products(config)
  ins, outs = kernel_call.forward_streams(
      plan, x.dtype, states, outputs, out_dtype, save
  )
  saved = states if save else 0
  kept = two and save
  planes = len(matrix)
  split = planes == 2
  exchanged = len(stages) if config.through_device else 0
  # A quarter of what rounding h to bfloat16 does, twice that for float16.
  accuracy = kernel_call.accuracy(plan, 2**-11)
  legalize = functools.partial(pointwise.legalize, accuracy=accuracy)
  # What the first step and restarts multiply, as it would have been published.
  first = kernel_call.publishable(carry[0], plan.dtype)
  again = (
      kernel_call.publishable(restart[0], plan.dtype) if plan.flags else first
  )
  operands = [theta, carry, restart, first, again, *matrix, x]
  if flags is not None:
    operands.append(flags)

  def body(*refs):
    theta, carry, restart, first, again = refs[:5]
    matrix = refs[5 : 5 + planes]
    n = 5 + planes
    inputs = refs[n : n + len(ins)]
    n += len(ins)
    out_refs, last_ref = refs[n : n + len(outs)], refs[n + len(outs)]
    n += len(outs) + 1
    exchange_refs, scratch = refs[n : n + exchanged], refs[n + exchanged :]
    cta = thread_layout.Cta(config, shape, plan.reverse, plan.both, plan.dtype)
    ring = smem_pipeline.Ring(cta, ins, inputs, scratch[0])
    multipliers = kernel_call.multipliers(cta, products, matrix, scratch[2:])
    first_product, last_product = multipliers[0], multipliers[-1]
    late_product = multipliers[1] if len(multipliers) > 2 else None
    ring.prologue()
    theta = tuple(cta.read_param(theta, i) for i in range(plan.params))
    restart = cta.read_rows(restart, states) if plan.flags else None
    state = cta.read_rows(carry, states)

    def restarts(step):
      """Where the carry restarts before a step that is in the ring."""
      if not plan.flags:
        return None
      return (ring.read(step, 1)[0] & step_flags.RESET) != 0

    def held(step):
      if not plan.flags:
        return None
      return (ring.read(step, 1)[0] & step_flags.HOLD) != 0

    def pointwise_step(start, row, known, hold, again):
      """Begins a step, and returns a function that ends it.

      Args:
        start: the carry that the step starts from.
        row: its inputs.
        known: the recurrent gates that are there, the first ones.
        hold: where the carry is held, or None.
        again: where it restarts before the next step, or None.

      Returns:
        A function of the other recurrent gates. It returns what the next step
        multiplies; the outputs; and a function that returns the carry that the
        next step starts from, and the one after this step.
      """

      def step(*gates):
        new = legalize(plan.update)(theta, row, (*known, *gates), start)
        new = step_flags.select(hold, start, new)
        following = step_flags.select(again, restart, new)
        return (following[0], *new[:outputs], *following[1:], *new[outputs:])

      gate = jax.ShapeDtypeStruct(cta.zeros().shape, jnp.float32)
      others = [gate] * (plan.recurrent - len(known))
      apply = pointwise.in_turn(step, others, 1 + outputs)

      def finish(gates):
        (h, *results), later = apply(*gates)

        def rest():
          others = later()
          following = (h, *others[: states - 1])
          return following, (*results, *others[states - 1 :])

        return h, results, rest

      return finish

    def operand(start, row, gates):
      """Returns what the last product multiplies."""
      function: Any = plan.operand
      # It does not depend on gates that are not there yet.
      missing = [cta.zeros()] * (plan.recurrent - 1 - len(gates))
      return legalize(function)(theta, row, (*gates, *missing), start)

    def multiply_late(step):
      """Returns what `multiply_last` needs to return the late gates too."""
      if late_product is None:
        return None
      sums = late_product.multiply(step)
      late_product.spread(sums)
      return sums

    def multiply_last(step, late):
      """Returns the gates of the late product, if any, and of the last."""
      last_product.operand.ready(step)
      results = last_product.gather(step, last_product.multiply(step))
      if late_product is None:
        return results
      return late_product.collect(step, late) + results

    ring.wait(plan.ahead)
    for multiplier in multipliers:
      if not multiplier.product.late:
        multiplier.operand.clear()
    cta.meet()
    if not config.through_device:
      staging = smem_pipeline.Staging(cta, outs, out_refs, scratch[1])
      state = step_flags.select(restarts(jnp.int32(0)), restart, state)
      first_product.operand.put(jnp.int32(0), state[:1])

      def start_product(step, meanwhile):
        """Multiplies what all have put; results are waited for in `gather`."""
        first_product.operand.share(step)
        if config.cluster > 1:
          # The others' parts are on their way.
          other = meanwhile()
          first_product.operand.ready(step)
          return first_product.multiply(step), other
        sums = first_product.multiply(step)
        return sums, meanwhile()

      def local_loop(step, state):
        start, _, row, sums = state
        flags = held(step), restarts(step + 1)
        u = None
        if two:
          gates = first_product.gather(step, sums)
          u = operand(start, row, gates)
          last_product.operand.put(step, (u,))
          last_product.operand.share(step)
          late = multiply_late(step)
          finish = pointwise_step(start, row, gates, *flags)
          gates = multiply_last(step, late)
        else:
          finish = pointwise_step(start, row, (), *flags)
          gates = first_product.gather(step, sums)
        h, results, rest = finish(gates)
        first_product.operand.put(step + 1, (h,))
        written = [*results, *start[:saved], *[u] * kept]
        load = staging.put(step, [(value,) for value in written])
        ring.wait(plan.ahead)

        def meanwhile():
          # What was asked for is not waited for at once.
          row = tuple(ring.read(step + 1, 0))
          store = load()
          ring.advance(step + 1)
          store()
          return *rest(), row

        sums, others = start_product(step + 1, meanwhile)
        following, new, row = others
        return following, new if plan.flags else (), row, sums

      def before():
        row = tuple(ring.read(jnp.int32(0), 0))
        ring.advance(jnp.int32(0))
        return row

      sums, row = start_product(jnp.int32(0), before)
      # With flags, what the next step starts from is not all of the carry.
      init = state, state if plan.flags else (), row, sums
      state, new, *_ = kernel_call.loop(shape.time, local_loop, init)
      # No CTA leaves while another one may write to its shared memory.
      cta.meet()
      staging.finish()
      cta.write_rows(last_ref, new if plan.flags else state)
      return

    exchanges = [exchange_lib.Exchange(cta, ref, 1) for ref in exchange_refs]
    kernel_call.meet(cta, exchanges)

    def loop(step, state):
      time = cta.time(step)
      product, exchange = first_product, exchanges[0]

      def at_reset(column):
        flags = ring.read_flags_of(step, 1, column)
        return flags & step_flags.RESET, again

      start = step_flags.select(restarts(step), restart, state)
      row = tuple(ring.read(step, 0))
      flags = held(step), None
      replace = at_reset if plan.flags else None
      product.operand.fetch(exchange, step - 1, step, first, replace)
      ring.advance(step)
      ring.wait(0)
      product.operand.ready(step)
      u = None
      if two:
        gates = product.gather(step, product.multiply(step))
        u = operand(start, row, gates)
        exchanges[1].publish(step, (u,))
        late = multiply_late(step)
        # All have published h of the step before this.
        pl.when(step > 1)(lambda: exchange.retire(step - 2))
        pl.when(step > 0)(lambda: exchanges[1].retire(step - 1))
        exchange.settle(step)
        finish = pointwise_step(start, row, gates, *flags)
        last_product.operand.fetch(exchanges[1], step, step)
        gates = multiply_last(step, late)
      else:
        finish = pointwise_step(start, row, (), *flags)
        gates = product.gather(step, product.multiply(step))
        pl.when(step > 1)(lambda: exchange.retire(step - 2))
        exchange.settle(step)
      h, results, rest = finish(gates)
      exchange.publish(step, (h,))
      written = [*results, *start[:saved], *[u] * kept]
      for ref, stream, value in zip(out_refs, outs, written, strict=True):
        cta.write(ref, time, value, stream.dtype, stream)
      return rest()[1]

    state = kernel_call.loop(shape.time, loop, state)
    cta.meet()
    cta.write_rows(last_ref, state)

  stream = lambda s: jax.ShapeDtypeStruct(shape.stream(s), s.dtype)
  small = jax.ShapeDtypeStruct(carry.shape, jnp.float32)
  exchange = jax.ShapeDtypeStruct(
      exchange_lib.Exchange.shape(shape, 1), plan.dtype
  )
  results = kernel_call.kernel(
      plan,
      body,
      'dense_recurrence',
      ins,
      outs,
      products,
      split,
      (*map(stream, outs), small, *(exchange,) * exchanged),
  )(*operands)
  results, last = results[: len(outs)], results[len(outs)]
  u = results[-1] if kept else None
  carries = tuple(results[:outputs])
  return carries, last, tuple(results[outputs : outputs + saved]), u
