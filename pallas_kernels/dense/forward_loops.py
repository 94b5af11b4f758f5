"""The two loops of the forward kernel, see `forward.py` for their timelines."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import resident_matmul
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags

Array = jax.Array
Carry = tuple[Array, ...]


class Inputs(NamedTuple):
  """Arrays that the kernel reads, or their references in device memory.

  Attributes:
    theta_gmem: [P, F].
    carry_gmem: carry before the first step, [S, B, F].
    restart_gmem: carry after a reset, [S, B, F].
    first_gmem: h of `carry_gmem` as an operand, [B, F].
    again_gmem: h of `restart_gmem` as an operand, [B, F].
    matrix_gmem: parts of R, each [G', N, D, D].
    streams_gmem: inputs and flags.
  """

  theta_gmem: Any
  carry_gmem: Any
  restart_gmem: Any
  first_gmem: Any
  again_gmem: Any
  matrix_gmem: tuple[Any, ...]
  streams_gmem: plan_lib.ForwardInputs


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    streams_gmem: what is written in every step.
    last_gmem: carry after the last step, [S, B, F].
    exchanges_gmem: exchanges of the products' operands, over the device only.
  """

  streams_gmem: plan_lib.ForwardOutputs
  last_gmem: Any
  exchanges_gmem: tuple[Any, ...]


class Steps:
  """The parts of a step that both loops share, for one thread.

  Making it starts the ring buffer, loads the matrices and waits for the CTAs of
  the cluster.

  Args:
    plan: static facts of the kernel.
    ins: references.
    smem: references to shared memory.

  Attributes:
    carry: this thread's elements of the carry before the first step.
    first: the first product of a step.
    late: the product of gates that the second operand does not need, or None.
    last: the last product of a step.
  """

  def __init__(self, plan: plan_lib.Plan, ins: Inputs, smem: plan_lib.Smem):
    self.plan = plan
    self.cta = cta = thread_layout.Cta(
        plan.config,
        plan.shape,
        plan.reverse,
        plan.call.both_directions,
        plan.dtype,
    )
    self.ring = smem_pipeline.Ring(
        cta, plan.streams[0], ins.streams_gmem, smem.ring
    )
    multipliers = resident_matmul.multipliers(
        cta, plan.products(plan.config), ins.matrix_gmem, smem.products
    )
    self.first, self.last = multipliers[0], multipliers[-1]
    self.late = multipliers[1] if len(multipliers) > 2 else None
    self.ring.prologue()
    # A quarter of the error of rounding h to bfloat16, twice that of float16.
    accuracy = plan.accuracy(2**-11)
    self._legalize = functools.partial(pointwise.legalize, accuracy=accuracy)
    self._theta = tuple(
        gmem_io.read_param(cta, ins.theta_gmem, i) for i in range(plan.params)
    )
    self.restart: Any = None
    if plan.flags:
      self.restart = gmem_io.read_rows(cta, ins.restart_gmem, plan.states)
    self.carry = gmem_io.read_rows(cta, ins.carry_gmem, plan.states)
    self.ring.wait(plan.ahead)
    for multiplier in multipliers:
      if not multiplier.product.late:
        multiplier.operand.clear()
    cta.cluster_barrier()

  def restarts(self, step) -> Any:
    """Returns where the carry restarts before a step in the ring, or None."""
    if not self.plan.flags:
      return None
    return (self.ring.tiles.flags.read(step)[0] & step_flags.RESET) != 0

  def held(self, step) -> Any:
    """Returns where the carry is held over a step in the ring, or None."""
    if not self.plan.flags:
      return None
    return (self.ring.tiles.flags.read(step)[0] & step_flags.HOLD) != 0

  def operand(self, start: Carry, row: Carry, gates: Sequence[Array]) -> Array:
    """Returns the factor of the last product.

    Args:
      start: the carry that the step starts from.
      row: the inputs.
      gates: the early recurrent gates; `plan.operand` reads no others.
    """
    function: Any = self.plan.operand
    missing = [self.cta.zeros()] * (self.plan.recurrent - 1 - len(gates))
    return self._legalize(function)(self._theta, row, (*gates, *missing), start)

  def begin_update(
      self, start: Carry, row: Carry, known: Sequence[Array], hold, again
  ) -> Callable[[Sequence[Array]], Any]:
    """Begins the pointwise part of a step, as far as gates are known.

    Args:
      start: the carry that the step starts from.
      row: the inputs.
      known: the first recurrent gates, those that are known.
      hold: where the carry is held, or None.
      again: where the carry restarts before the next step, or None.

    Returns:
      A function of the other recurrent gates that ends it. It returns h of the
      next step; the outputs; and a function that returns the carry that the
      next step starts from and the carry after this step.
    """
    plan, outputs = self.plan, self.plan.call.outputs

    def step(*gates):
      new = self._legalize(plan.update)(
          self._theta, row, (*known, *gates), start
      )
      new = step_flags.select(hold, start, new)
      following = step_flags.select(again, self.restart, new)
      return (following[0], *new[:outputs], *following[1:], *new[outputs:])

    gate = jax.ShapeDtypeStruct(self.cta.zeros().shape, jnp.float32)
    others = [gate] * (plan.recurrent - len(known))
    apply = pointwise.in_turn(step, others, 1 + outputs)

    def finish(gates):
      (h, *results), later = apply(*gates)

      def rest():
        others = later()
        following = (h, *others[: plan.states - 1])
        return following, (*results, *others[plan.states - 1 :])

      return h, results, rest

    return finish

  def multiply_late(self, step) -> Any:
    """Multiplies the late gates; `multiply_last` takes the result."""
    if self.late is None:
      return None
    sums = self.late.multiply(step)
    self.late.spread(sums)
    return sums

  def multiply_last(self, step, late: Any) -> list[Array]:
    """Returns the late gates, if any, and the last gate."""
    self.last.operand.ready(step)
    results = self.last.gather(step, self.last.multiply(step))
    if self.late is None:
      return results
    return self.late.collect(step, late) + results

  def outputs(self, results, start: Carry, u) -> list[Array]:
    """Returns a step's values of the streams that are written, in order."""
    save = self.plan.save
    return jax.tree.leaves(
        plan_lib.ForwardOutputs(
            carries=tuple(results),
            starts=start if save else (),
            operand=u if save else None,
        )
    )


def within_cluster(
    steps: Steps, outs: Outputs, smem: plan_lib.Smem
) -> Sequence[Array]:
  """Loops over time with hand-offs in shared memory; returns the last carry."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  first, last = steps.first, steps.last
  staging = smem_pipeline.Staging(
      cta, plan.streams[1], outs.streams_gmem, smem.staging
  )
  zero = jnp.int32(0)
  state = step_flags.select(steps.restarts(zero), steps.restart, steps.carry)
  first.operand.put(zero, state[:1])

  def start_product(step, meanwhile: Callable[[], Any]):
    """Multiplies the operand that all have put; `gather` ends it."""
    first.operand.share(step)
    if cta.config.cluster > 1:
      # The peers' parts are under way.
      other = meanwhile()
      first.operand.ready(step)
      return first.multiply(step), other
    sums = first.multiply(step)
    return sums, meanwhile()

  def body(step, state):
    start, _, row, sums = state
    flags = steps.held(step), steps.restarts(step + 1)
    u = None
    if plan.operand is not None:
      gates = first.gather(step, sums)
      u = steps.operand(start, row, gates)
      last.operand.put(step, (u,))
      last.operand.share(step)
      late = steps.multiply_late(step)
      finish = steps.begin_update(start, row, gates, *flags)
      gates = steps.multiply_last(step, late)
    else:
      finish = steps.begin_update(start, row, (), *flags)
      gates = first.gather(step, sums)
    h, results, rest = finish(gates)
    first.operand.put(step + 1, (h,))
    written = steps.outputs(results, start, u)
    load = staging.put(step, [(value,) for value in written])
    ring.wait(plan.ahead)

    def meanwhile():
      # Loads are issued well before their results are used.
      row = tuple(ring.tiles.x.read(step + 1))
      store = load()
      ring.advance(step + 1)
      store()
      return *rest(), row

    sums, others = start_product(step + 1, meanwhile)
    following, new, row = others
    return following, new if plan.flags else (), row, sums

  def before():
    row = tuple(ring.tiles.x.read(zero))
    ring.advance(zero)
    return row

  sums, row = start_product(zero, before)
  # With flags, the next step may start from another carry than this one's.
  init = state, state if plan.flags else (), row, sums
  state, new, *_ = kernel_call.loop(plan.shape.time, body, init)
  # No CTA leaves while another may still write to its shared memory.
  cta.cluster_barrier()
  staging.finish()
  return new if plan.flags else state


def over_device(steps: Steps, ins: Inputs, outs: Outputs) -> Sequence[Array]:
  """Loops over time with hand-offs through the device; returns the carry."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  first, last = steps.first, steps.last
  exchanges = [
      exchange_lib.Exchange(cta, ref, 1) for ref in outs.exchanges_gmem
  ]
  kernel_call.device_barrier(cta, exchanges)
  exchange = exchanges[0]

  def body(step, state):
    time = cta.time(step)

    def at_reset(column):
      flags = ring.tiles.flags.read_flags_of(step, column)
      return flags & step_flags.RESET, ins.again_gmem

    start = step_flags.select(steps.restarts(step), steps.restart, state)
    row = tuple(ring.tiles.x.read(step))
    flags = steps.held(step), None
    replace = at_reset if plan.flags else None
    first.operand.fetch(exchange, step - 1, step, ins.first_gmem, replace)
    ring.advance(step)
    ring.wait(0)
    first.operand.ready(step)
    u = None
    if plan.operand is not None:
      gates = first.gather(step, first.multiply(step))
      u = steps.operand(start, row, gates)
      exchanges[1].publish(step, (u,))
      late = steps.multiply_late(step)
      # All CTAs have published h of the step before.
      pl.when(step > 1)(lambda: exchange.retire(step - 2))
      pl.when(step > 0)(lambda: exchanges[1].retire(step - 1))
      exchange.settle(step)
      finish = steps.begin_update(start, row, gates, *flags)
      last.operand.fetch(exchanges[1], step, step)
      gates = steps.multiply_last(step, late)
    else:
      finish = steps.begin_update(start, row, (), *flags)
      gates = first.gather(step, first.multiply(step))
      pl.when(step > 1)(lambda: exchange.retire(step - 2))
      exchange.settle(step)
    h, results, rest = finish(gates)
    exchange.publish(step, (h,))
    written = steps.outputs(results, start, u)
    refs = jax.tree.leaves(outs.streams_gmem)
    streams = jax.tree.leaves(plan.streams[1])
    for ref, stream, value in zip(refs, streams, written, strict=True):
      gmem_io.write_step(cta, ref, stream, time, (value,))
    return rest()[1]

  state = kernel_call.loop(plan.shape.time, body, steps.carry)
  cta.cluster_barrier()
  return state
