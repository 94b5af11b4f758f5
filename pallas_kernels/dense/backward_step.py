"""The parts of a step of the adjoint that both of its loops share."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import operand as operand_lib
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import resident_matmul
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.dense import streams as streams_lib
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags

Array = jax.Array


class Inputs(NamedTuple):
  """Arrays that the kernel reads, or their references in device memory.

  Attributes:
    theta_gmem: [P, F].
    d_last_gmem: cotangent of the carry after the last step, [S, B, F].
    matrix_gmem: parts of R, each [G', N, D, D].
    again_gmem: R transposed, where R h is multiplied again.
    streams_gmem: arrays that are read step by step.
  """

  theta_gmem: Any
  d_last_gmem: Any
  matrix_gmem: tuple[Any, ...]
  again_gmem: tuple[Any, ...]
  streams_gmem: streams_lib.AdjointInputs


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    streams_gmem: cotangents that are written in every step.
    d_carry_gmem: cotangent of the carry before the first step, [S, B, F].
    d_theta_gmem: cotangents of theta, summed over time, [P, B, F].
    d_restart_gmem: cotangent of the restart, summed over time, [S, B, F].
    exchanges_gmem: exchanges of the products' operands, over the device only.
  """

  streams_gmem: streams_lib.AdjointOutputs
  d_carry_gmem: Any
  d_theta_gmem: Any
  d_restart_gmem: Any
  exchanges_gmem: tuple[Any, ...]


class Cotangents(NamedTuple):
  """Cotangents that go from step to step, this thread's elements.

  Attributes:
    d_carry: of the carry.
    d_theta: of theta, summed up.
    d_restart: of the restart, summed up; empty where nobody asks for it.
  """

  d_carry: tuple[Array, ...]
  d_theta: tuple[Array, ...]
  d_restart: tuple[Any, ...]


class Linear(NamedTuple):
  """The parts of a step that do not depend on its cotangent.

  Attributes:
    pulls: pullbacks of the update and, if there is one, of the operand.
    d_outputs: cotangents of the outputs.
    held: where the carry is held, or None.
    resets: where it restarts before the step, or None.
  """

  pulls: list[Any]
  d_outputs: tuple[Array, ...]
  held: Any
  resets: Any


class Pulled(NamedTuple):
  """Cotangents of a step's arguments, but for its products.

  Attributes:
    d_theta: of theta.
    d_row: of the inputs.
    d_gates: of the recurrent gates.
    d_start: of the carry that the step starts from, without d_gates' share.
    passed: cotangent that a held step passes on, or None without a mask.
    resets: where the carry restarts before the step, or None.
  """

  d_theta: Any
  d_row: Any
  d_gates: Any
  d_start: Any
  passed: Any
  resets: Any


class Steps:
  """The parts of a step that both loops share, for one thread.

  Args:
    plan: static facts of the kernel.
    ins: references.
    smem: references to shared memory.

  Attributes:
    cta: coordinates.
    ring: ring buffer of the streams.
    multipliers: the products of a step, that of the first stage last.
    init: cotangents before the first step of the loop.
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
    self.multipliers = resident_matmul.multipliers(
        cta, plan.products(plan.config), ins.matrix_gmem, smem.products
    )
    self._again: Any = None
    if plan.again:
      (product,) = plan.stages
      h = operand_lib.TileOperand(self.ring.tiles.starts[0])
      words = resident_matmul.Smem(None, None, None, rest=smem.again)
      self._again = resident_matmul.Multiplier(
          cta, product, h, ins.again_gmem, words, kept=0
      )
    self.ring.prologue()
    # A larger error would show: derivatives multiply rounded values.
    self._accuracy = plan.accuracy(2**-22)
    functions = [plan.update]
    if plan.operand is not None:
      functions.append(plan.operand)
    self._linearise = [
        pointwise.legalize(functools.partial(_linearise, f), self._accuracy)
        for f in functions
    ]
    self._theta = tuple(
        gmem_io.read_param(cta, ins.theta_gmem, i) for i in range(plan.params)
    )
    zero = cta.zeros()
    self.init = Cotangents(
        d_carry=gmem_io.read_rows(cta, ins.d_last_gmem, plan.states),
        d_theta=tuple(zero for _ in self._theta),
        d_restart=(zero,) * plan.states if plan.restart_learns else (),
    )
    for multiplier in self.multipliers:
      multiplier.operand.clear()

  def _flags(self, step, bit: int) -> Any:
    if not (self.plan.holds if bit == step_flags.HOLD else self.plan.flags):
      return None
    return (self.ring.tiles.flags.read(step)[0] & bit) != 0

  def linear(self, step) -> Linear:
    """Reads and linearises a step."""
    plan, tiles = self.plan, self.ring.tiles
    row = tuple(tiles.x.read(step))
    if plan.again:
      gates = tuple(self._again.gather(step, self._again.multiply(step)))
    else:
      gates = tuple(x for tile in tiles.h_gates for x in tile.read(step))
    start = tuple(tile.read(step)[0] for tile in tiles.starts)
    d_outputs = tuple(tile.read(step)[0] for tile in tiles.d_carries)
    pulls = [self._linearise[0](self._theta, row, gates, start)]
    if plan.operand is not None:
      pulls.append(self._linearise[1](self._theta, row, gates[:-1], start))
    held = self._flags(step, step_flags.HOLD)
    return Linear(pulls, d_outputs, held, self._flags(step, step_flags.RESET))

  def pull(
      self,
      linear: Linear,
      d_carry: tuple[Array, ...],
      through: Callable[[Array], Array],
  ) -> Pulled:
    """Pulls a cotangent back through one step, up to the first product.

    Args:
      linear: the step.
      d_carry: cotangent of the carry after the step.
      through: maps the last recurrent gate's cotangent to that of its factor,
        by the second product.
    """
    plan, accuracy = self.plan, self._accuracy
    outputs = len(linear.d_outputs)
    seen = tuple(map(jnp.add, d_carry, linear.d_outputs))
    d_carry = (*seen, *d_carry[outputs:])
    zeros = (0.0,) * plan.states
    d_new = step_flags.select(linear.held, zeros, d_carry)
    d_theta, d_row, d_gates, d_start = pointwise.pull(
        linear.pulls[0], d_new, accuracy
    )
    if plan.operand is not None:
      if plan.call.stop_recurrent_gradient:
        d_u = self.cta.zeros()
      else:
        d_u = self.plan.call.bounded(through(d_gates[-1]))
      more = pointwise.pull(linear.pulls[1], d_u, accuracy)
      d_theta, d_row, d_start = jax.tree.map(
          jnp.add, (d_theta, d_row, d_start), (more[0], more[1], more[3])
      )
      d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
    passed = None
    if plan.holds:
      passed = step_flags.select(linear.held, d_carry, zeros)
    return Pulled(d_theta, d_row, d_gates, d_start, passed, linear.resets)

  def outputs(self, pulled: Pulled) -> list[Sequence[Array]]:
    """Returns a step's values of the streams that are written, in order."""
    plan = self.plan
    if not plan.streams.outs.d_gates:
      return [pulled.d_row]
    parts = [pulled.d_gates[p.first :][: p.gates] for p in plan.stages]
    return [pulled.d_row, *parts]

  def operand(self, pulled: Pulled) -> Sequence[Array]:
    """Returns the factor of the last product: its gates' cotangents."""
    return pulled.d_gates[: self.multipliers[-1].product.gates]

  def close(
      self, pulled: Pulled, d_h: Array | None, sums: Cotangents
  ) -> Cotangents:
    """Adds up the cotangents that the next step starts from.

    Args:
      pulled: cotangents of this step's arguments.
      d_h: result of the last product, or None for zero.
      sums: cotangents that this step started from.
    """
    d_start, d_restart = pulled.d_start, sums.d_restart
    # An update that does not read h passes a plain zero on; a sum has a layout.
    d_h = self.cta.zeros() if d_h is None else self.plan.call.bounded(d_h)
    d_start = (d_start[0] + d_h, *d_start[1:])
    if pulled.passed is not None:
      d_start = tuple(map(jnp.add, d_start, pulled.passed))
    zeros = (0.0,) * self.plan.states
    if d_restart:
      d_in = step_flags.select(pulled.resets, d_start, zeros)
      d_restart = tuple(map(jnp.add, d_restart, d_in))
    d_start = step_flags.select(pulled.resets, zeros, d_start)
    d_theta = tuple(map(jnp.add, sums.d_theta, pulled.d_theta))
    return Cotangents(d_start, d_theta, d_restart)


def _linearise(function: Callable[..., Any], *args) -> Any:
  """Returns the pullback of a function at args."""
  return jax.vjp(function, *args)[1]
