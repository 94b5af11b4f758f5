"""The parts of a step of the forward kernel that both of its loops share."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dense import gate_sums
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import resident_matmul
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.dense import streams as streams_lib
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
  streams_gmem: streams_lib.ForwardInputs


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    streams_gmem: arrays that are written step by step.
    last_gmem: carry after the last step, [S, B, F].
    exchanges_gmem: exchanges of the products' operands, over the device only.
  """

  streams_gmem: streams_lib.ForwardOutputs
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
        plan.call,
        plan.dtype,
    )
    self.ring = smem_pipeline.Ring(
        cta, plan.streams.ins, ins.streams_gmem, smem.ring
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
    self._sums = self._find_sums()
    self.restart: Any = None
    if plan.flags:
      self.restart = gmem_io.read_rows(cta, ins.restart_gmem, plan.states)
    self.carry = gmem_io.read_rows(cta, ins.carry_gmem, plan.states)
    self.ring.wait(plan.ahead)
    for multiplier in multipliers:
      if not multiplier.product.late:
        multiplier.operand.clear()
    cta.cluster_barrier()

  def _find_sums(self) -> gate_sums.GateSums | None:
    """Returns the update by sums that products may start from, or None."""
    plan = self.plan
    # The many products of parts of float32 would be rounded beside x.
    if plan.split or plan.operand is not None:
      return None
    # In the loop over the device all sums start from zero.
    if plan.config.through_device or not self.first.sharing.starts:
      return None
    element = jax.ShapeDtypeStruct(self.cta.zeros().shape, jnp.float32)
    counts = plan.params, plan.gates, plan.recurrent, plan.states
    return gate_sums.find(plan.update, *((element,) * n for n in counts))

  @property
  def adds(self) -> bool:
    """Whether sums of a product start from inputs."""
    return self._sums is not None

  def starts(self, row: Carry | None) -> Any:
    """Returns what the sums of a step's first product start from, or None.

    Args:
      row: the inputs; not None if `adds`.
    """
    if self._sums is None:
      return None
    return self._legalize(self._sums.starts)(self._theta, row)

  def restarts(self, step) -> Any:
    """Returns where the carry restarts before a step in the ring, or None."""
    if not self.plan.flags:
      return None
    return (self.ring.tiles.flags.read(step)[0] & step_flags.RESET) != 0

  def held(self, step) -> Any:
    """Returns where the carry is held over a step in the ring, or None."""
    if not self.plan.holds:
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
    update = plan.update if self._sums is None else self._sums.update

    def step(*gates):
      new = self._legalize(update)(self._theta, row, (*known, *gates), start)
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

  def outputs(self, results, start: Carry, u) -> list[Sequence[Array]]:
    """Returns a step's values of the streams that are written, in order.

    Args:
      results: the outputs.
      start: the carry that the step starts from.
      u: the factor of the second product, or None.
    """
    plan = self.plan
    values = [*results]
    if plan.save:
      values += [*start, *([] if u is None else [u])]
    return [(value,) for value in values]
