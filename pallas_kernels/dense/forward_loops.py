"""The two loops of the forward kernel, see `forward.py` for their timelines."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import forward_step
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.mosaic import step_flags

Array = jax.Array
Inputs = forward_step.Inputs
Outputs = forward_step.Outputs
Steps = forward_step.Steps


def within_cluster(
    steps: Steps, outs: Outputs, smem: plan_lib.Smem
) -> Sequence[Array]:
  """Loops over time with hand-offs in shared memory; returns the last carry."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  first, last = steps.first, steps.last
  staging = smem_pipeline.Staging(
      cta, plan.streams.outs, outs.streams_gmem, smem.staging
  )
  zero = jnp.int32(0)
  state = step_flags.select(steps.restarts(zero), steps.restart, steps.carry)
  first.operand.put(zero, state[:1])

  def start_product(step, meanwhile: Callable[[], Any]):
    """Multiplies the operand that all have put; `gather` ends it.

    Args:
      step: of the operand.
      meanwhile: () -> what can be done while others, or tensor cores, work.

    Returns:
      The sums; the inputs of the step, whose loads are issued well before they
      are used; and what `meanwhile` returns.
    """
    first.operand.share(step)
    alone = cta.config.cluster == 1
    read = lambda: tuple(ring.tiles.x.read(step))
    row = None if alone and not steps.adds else read()
    other: Any = None
    if not alone:  # The peers' parts are under way.
      other = meanwhile()
      first.operand.ready(step)
    sums = first.multiply(step, steps.starts(row))
    row = read() if row is None else row
    return sums, row, meanwhile() if alone else other

  def body(step, state):
    start, _, row, sums = state
    flags = steps.held(step), steps.restarts(step + 1)
    u = None
    if plan.operand is not None:
      known = first.gather(step, sums)
      u = steps.operand(start, row, known)
      last.operand.put(step, (u,))
      last.operand.share(step)
      late = steps.multiply_late(step)
      finish = steps.begin_update(start, row, known, *flags)
      gates = steps.multiply_last(step, late)
    else:
      finish = steps.begin_update(start, row, (), *flags)
      gates = first.gather(step, sums)
    h, results, rest = finish(gates)
    first.operand.put(step + 1, (h,))
    load = staging.put(step, steps.outputs(results, start, u))
    ring.wait(plan.ahead)

    def meanwhile():
      store = load()
      ring.advance(step + 1)
      store()
      return rest()

    sums, row, (following, new) = start_product(step + 1, meanwhile)
    return following, new if plan.flags else (), row, sums

  sums, row, _ = start_product(zero, lambda: ring.advance(zero))
  # With flags, the next step may start from another carry than this one's.
  init = state, state if plan.flags else (), row, sums
  state, new, *_ = kernel_call.loop(plan.shape.time, body, init)
  # No CTA leaves while another may still write to its shared memory.
  cta.cluster_barrier()
  staging.finish()
  return new if plan.flags else state


def over_device(
    steps: Steps,
    ins: Inputs,
    outs: Outputs,
) -> Sequence[Array]:
  """Loops over time with hand-offs through the device; returns the carry."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  first, last = steps.first, steps.last
  exchanges = [
      exchange_lib.Exchange(cta, ref, 1) for ref in outs.exchanges_gmem
  ]
  kernel_call.device_barrier(cta, exchanges)
  exchange = exchanges[0]
  direct = cta.config.direct
  if direct:  # The operand of step 0 comes from the others like all others.
    exchange.publish(jnp.int32(-1), (steps.carry[0],))

  def body(step, state):
    time = cta.time(step)

    def at_reset(column):
      flags = ring.tiles.flags.read_flags_of(step, column)
      return flags & step_flags.RESET, ins.again_gmem

    start = step_flags.select(steps.restarts(step), steps.restart, state)
    row = tuple(ring.tiles.x.read(step))
    flags = steps.held(step), None
    replace = at_reset if plan.flags else None
    if direct:
      first.operand.fetch(exchange, step - 1, replace)
    else:
      first.operand.fetch(exchange, step - 1, step, ins.first_gmem, replace)
    ring.advance(step)
    ring.wait(0)
    first.operand.ready(step)
    u = None
    if plan.operand is not None:
      known = first.gather(step, first.multiply(step))
      u = steps.operand(start, row, known)
      exchanges[1].publish(step, (u,))
      late = steps.multiply_late(step)
      # All CTAs have published h of the step before.
      pl.when(step > 1)(lambda: exchange.retire(step - 2))
      pl.when(step > 0)(lambda: exchanges[1].retire(step - 1))
      exchange.settle(step)
      finish = steps.begin_update(start, row, known, *flags)
      last.operand.fetch(exchanges[1], step, step)
      gates = steps.multiply_last(step, late)
    else:
      finish = steps.begin_update(start, row, (), *flags)
      gates = first.gather(step, first.multiply(step))
      told = 0 if direct else 1  # The first step to be retired, less 2.
      pl.when(step > told)(lambda: exchange.retire(step - 2))
      exchange.settle(step)
    h, results, rest = finish(gates)
    exchange.publish(step, (h,))
    written = steps.outputs(results, start, u)
    refs = jax.tree.leaves(outs.streams_gmem)
    streams = jax.tree.leaves(plan.streams.outs)
    for ref, stream, values in zip(refs, streams, written, strict=True):
      gmem_io.write_step(cta, ref, stream, time, values)
    return rest()[1]

  state = kernel_call.loop(plan.shape.time, body, steps.carry)
  cta.cluster_barrier()
  return state
