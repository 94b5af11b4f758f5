"""The two loops of the adjoint, see `backward.py` for their timelines."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import backward_step
from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import resident_matmul
from pallas_kernels.dense import smem_pipeline

Array = jax.Array
Outputs = backward_step.Outputs
Steps = backward_step.Steps


def within_cluster(
    steps: Steps, outs: Outputs, smem: plan_lib.Smem
) -> backward_step.Cotangents:
  """Loops over time with hand-offs in shared memory."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  staging = smem_pipeline.Staging(
      cta, plan.streams.outs, outs.streams_gmem, smem.staging
  )
  ring.wait(1)
  cta.cluster_barrier()
  leaves, tree = jax.tree.flatten(steps.linear(jnp.int32(0)))

  def multiply(product: resident_matmul.Multiplier, step, values, begin):
    """Returns a product, and the results of the work done meanwhile.

    Args:
      product: the product.
      step: the step.
      values: this thread's elements of its operand.
      begin: called before the hand-off; it returns a function that is called
        while the operand or the product is under way.
    """
    product.operand.put(step, values)
    meanwhile = begin()
    product.operand.share(step)
    if cta.config.cluster > 1:
      other = meanwhile()
      product.operand.ready(step)
      sums = product.multiply(step)
    else:
      sums = product.multiply(step)
      other = meanwhile()
    return product.gather(step, sums)[0], other

  def body(step, state):
    sums, leaves = state

    def through(d_gate):
      nothing = lambda: lambda: None
      return multiply(steps.multipliers[0], step, (d_gate,), nothing)[0]

    pulled = steps.pull(jax.tree.unflatten(tree, leaves), sums.d_carry, through)

    def begin():
      load = staging.put(step, steps.outputs(pulled))
      ring.wait(2)

      def meanwhile():
        store = load()
        ring.advance(step)
        store()
        return jax.tree.leaves(steps.linear(step + 1))

      return meanwhile

    if plan.call.stop_recurrent_gradient:
      meanwhile = begin()
      cta.barrier()
      d_h, leaves = None, meanwhile()
    else:
      d_h, leaves = multiply(
          steps.multipliers[-1], step, steps.operand(pulled), begin
      )
    return steps.close(pulled, d_h, sums), leaves

  sums, _ = kernel_call.loop(plan.shape.time, body, (steps.init, leaves))
  # No CTA leaves while another may still write to its shared memory.
  cta.cluster_barrier()
  staging.finish()
  return sums


def over_device(steps: Steps, outs: Outputs) -> backward_step.Cotangents:
  """Loops over time with hand-offs through the device."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  exchanges = [
      exchange_lib.Exchange(cta, ref, multiplier.product.operands)
      for ref, multiplier in zip(
          outs.exchanges_gmem, steps.multipliers, strict=True
      )
  ]
  kernel_call.device_barrier(cta, exchanges)
  ring.wait(1)
  cta.cluster_barrier()
  leaves, tree = jax.tree.flatten(steps.linear(jnp.int32(0)))

  def multiply(i: int, step, values, meanwhile: Callable[[], Any]):
    """Returns the i-th product, and the result of `meanwhile`.

    Args:
      i: the product.
      step: the step.
      values: this thread's elements of its operand.
      meanwhile: called while the operand is under way.
    """
    product, exchange = steps.multipliers[i], exchanges[i]
    exchange.publish(step, values)
    other = meanwhile()
    if cta.config.direct:
      product.operand.fetch(exchange, step)
    else:
      product.operand.fetch(exchange, step, step)
    if i == len(exchanges) - 1:
      ring.advance(step)
    product.operand.ready(step)
    sums = product.multiply(step)
    (result,) = product.gather(step, sums)
    pl.when(step > 0)(lambda: exchange.retire(step - 1))
    exchange.settle(step)
    return result, other

  def body(step, state):
    sums, leaves = state

    def through(d_gate):
      return multiply(0, step, (d_gate,), lambda: None)[0]

    pulled = steps.pull(jax.tree.unflatten(tree, leaves), sums.d_carry, through)

    def write():
      time = cta.time(step)
      refs = jax.tree.leaves(outs.streams_gmem)
      streams = jax.tree.leaves(plan.streams.outs)
      written = steps.outputs(pulled)
      for ref, stream, values in zip(refs, streams, written, strict=True):
        gmem_io.write_step(cta, ref, stream, time, values)
      ring.wait(2)

    def linearise():
      return jax.tree.leaves(steps.linear(step + 1))

    def meanwhile():
      write()
      return linearise()

    if plan.call.stop_recurrent_gradient:
      write()
      cta.barrier()
      d_h, leaves = None, linearise()
      ring.advance(step)
    else:
      last = len(exchanges) - 1
      d_h, leaves = multiply(last, step, steps.operand(pulled), meanwhile)
    return steps.close(pulled, d_h, sums), leaves

  sums, _ = kernel_call.loop(plan.shape.time, body, (steps.init, leaves))
  cta.cluster_barrier()
  return sums
