"""The kernel that runs the adjoint of a dense recurrence.

The loop runs against the order of the recurrence. A step is
linearised one step ahead, while a hand-off is under way. Within a
CTA or cluster the time of one step is, downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    pull the cotangent d_c[t] back through the update of step t
    d_gates -> operand slot; wait for inputs of step t + 1
    ======= barrier of the CTA ==========
    send d_gates to the peers              d_gates -> peers' operand slots
    store d_x, copy inputs, linearise t+1  d_x -> staging -> device memory
    wait: mbarrier, all d_gates are here
    multiply R' d_gates, gather sums
    add up d_c[t + 1]

(One CTA alone sends nothing and multiplies right after the barrier.) Over the
device:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    pull the cotangent d_c[t] back through the update of step t
    publish d_gates                        d_gates -> exchange (L2)
    write d_x, linearise t + 1             d_x -> device memory
    poll d_gates of all -> operand
    ======= barrier of the CTA ==========
    multiply R' d_gates, gather sums
    sentinel -> slot of step t - 1
    add up d_c[t + 1]

If warps poll the operand straight into registers (`operand.py`),
each polls while it multiplies, and the only barrier is where sums are gathered.

A cell with an operand u of its own has a first hand-off and product inside the
pull, which give the cotangent of u.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import operand as operand_lib
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import product as product_lib
from pallas_kernels.dense import ring as ring_lib
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import step_flags

# The parts of a step of the adjoint that both of its loops share.


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
  streams_gmem: cut.AdjointInputs


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    streams_gmem: cotangents that are written in every step.
    d_carry_gmem: cotangent of the carry before the first step, [S, B, F].
    d_theta_gmem: cotangents of theta, summed over time, [P, B, F].
    d_restart_gmem: cotangent of the restart, summed over time, [S, B, F].
    exchanges_gmem: exchanges of the products' operands, over the device only.
  """

  streams_gmem: cut.AdjointOutputs
  d_carry_gmem: Any
  d_theta_gmem: Any
  d_restart_gmem: Any
  exchanges_gmem: tuple[Any, ...]


class Cotangents(NamedTuple):
  """Cotangents that go from step to step, this thread's elements.

  Attributes:
    d_carry: cotangent of the carry.
    d_theta: cotangent of theta, summed up.
    d_restart: cotangent of the restart, summed up; empty if nobody asks for it.
  """

  d_carry: tuple[Array, ...]
  d_theta: tuple[Array, ...]
  d_restart: tuple[Any, ...]


class Linear(NamedTuple):
  """The parts of a step that do not depend on its cotangent.

  Attributes:
    pulls: pullbacks of the update and, if there is one, of the operand.
    d_outputs: cotangents of the outputs.
    held: condition that the carry is held, or None.
    resets: condition that it restarts before the step, or None.
  """

  pulls: list[Any]
  d_outputs: tuple[Array, ...]
  held: Any
  resets: Any


class Pulled(NamedTuple):
  """Cotangents of a step's arguments, but for its products.

  Attributes:
    d_theta: cotangent of theta.
    d_row: cotangent of the inputs.
    d_gates: cotangent of the recurrent gates.
    d_start: cotangent of the carry that the step starts from, but for d_gates.
    passed: cotangent that a held step passes on, or None without a mask.
    resets: condition that the carry restarts before the step, or None.
  """

  d_theta: Any
  d_row: Any
  d_gates: Any
  d_start: Any
  passed: Any
  resets: Any


class Steps(kernel_call.Steps):
  """The parts of a step that both loops share, for one thread.

  Args:
    plan: static facts of the kernel.
    ins: references.
    smem: references to shared memory.

  Attributes:
    init: cotangents before the first step of the loop.
  """

  def __init__(self, plan: plan_lib.Plan, ins: Inputs, smem: plan_lib.Smem):
    super().__init__(plan, ins.streams_gmem, ins.matrix_gmem, smem)
    cta = self.cta
    self._again: Any = None
    if plan.again:
      (product,) = plan.stages
      h = operand_lib.TileOperand(self.ring.tiles.starts[0])
      words = product_lib.Smem(None, None, None, rest=smem.again)
      self._again = product_lib.Multiplier(
          cta, product, h, ins.again_gmem, words, kept=0
      )
    self.ring.prologue()
    # A larger error would show: derivatives multiply rounded values.
    self._accuracy = plan.accuracy(2**-22)
    functions = [plan.update]
    if plan.operand is not None:
      functions.append(plan.operand)
    self._linearise = [
        cells.legalize(functools.partial(_linearise, f), self._accuracy)
        for f in functions
    ]
    self._theta = self.read_theta(ins.theta_gmem)
    zero = cta.zeros()
    self.init = Cotangents(
        d_carry=ring_lib.read_rows(cta, ins.d_last_gmem, plan.states),
        d_theta=tuple(zero for _ in self._theta),
        d_restart=(zero,) * plan.states if plan.restart_learns else (),
    )
    for multiplier in self.multipliers:
      multiplier.operand.clear()

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
    return Linear(pulls, d_outputs, self.held(step), self.restarts(step))

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
      through: maps the cotangent of the last recurrent gate to the cotangent of
        its factor, with the second product.
    """
    plan, accuracy = self.plan, self._accuracy
    outputs = len(linear.d_outputs)
    seen = tuple(map(jnp.add, d_carry, linear.d_outputs))
    d_carry = (*seen, *d_carry[outputs:])
    zeros = (0.0,) * plan.states
    d_new = step_flags.select(linear.held, zeros, d_carry)
    d_theta, d_row, d_gates, d_start = cells.pull(
        linear.pulls[0], d_new, accuracy
    )
    if plan.operand is not None:
      if plan.call.stop_recurrent_gradient:
        d_u = self.cta.zeros()
      else:
        d_u = self.plan.call.bounded(through(d_gates[-1]))
      more = cells.pull(linear.pulls[1], d_u, accuracy)
      d_theta, d_row, d_start = jax.tree.map(
          jnp.add, (d_theta, d_row, d_start), (more[0], more[1], more[3])
      )
      d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
    # A cotangent that is the constant 0 has no layout yet.
    d_row, d_gates, d_start = jax.tree.map(
        self.cta.spread, (d_row, d_gates, d_start)
    )
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


# The two loops of the adjoint, see `backward.py` for their timelines.


def within_cluster(
    steps: Steps, outs: Outputs, smem: plan_lib.Smem
) -> Cotangents:
  """Loops over time with hand-offs in shared memory."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  staging = ring_lib.Staging(
      cta, plan.streams.outs, outs.streams_gmem, smem.staging
  )
  ring.wait(1)
  cta.cluster_barrier()
  leaves, tree = jax.tree.flatten(steps.linear(jnp.int32(0)))

  def multiply(product: product_lib.Multiplier, step, values, begin):
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


def over_device(steps: Steps, outs: Outputs) -> Cotangents:
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
        ring_lib.write_step(cta, ref, stream, time, values)
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


# The kernel.


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: plan_lib.Plan,
    theta: Array,
    x: Array,
    h_gates: Sequence[Array],
    starts: Sequence[Array],
    matrix: Sequence[Array],
    again: Sequence[Array],
    flags: Array | None,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[Array, Sequence[Array], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: static facts of the kernel, with `adjoint`.
    theta: float32 [plan.params or 1, F].
    x: the inputs, [B, T, G, F].
    h_gates: the recurrent gates of every step, float32 [N, B, T, G', D], an
      array for each product; none with
      `plan.again`.
    starts: the carries that every step starts from, as `forward` returns them.
    matrix: R, [G', N, D, D] indexed [gate, head, from, to], or its two parts.
    again: R transposed as `forward` gets it, if `plan.again`, else nothing.
    flags: int32 [T, 1 or 2, B'], or None.
    d_carries: cotangents of the first of the carries, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, F].

  Returns:
    The cotangents of x, [B, T, G, F]; of the recurrent gates, as `h_gates`, or
    nothing where x's cotangents equal them in order too; of the carry before
    the first step, [S, B, F]; and, to be summed over the batch, of theta
    [P, B, F] and of the restart [S, B, F].
  """
  shape = plan.shape
  inputs = Inputs(
      theta_gmem=theta,
      d_last_gmem=d_last,
      matrix_gmem=tuple(matrix),
      again_gmem=tuple(again),
      streams_gmem=cut.AdjointInputs(
          x, tuple(h_gates), tuple(starts), tuple(d_carries), flags
      ),
  )
  rows = lambda n: jax.ShapeDtypeStruct(
      (n, shape.batch, shape.features), jnp.float32
  )
  out_type = Outputs(
      streams_gmem=kernel_call.stream_types(plan),
      d_carry_gmem=rows(plan.states),
      d_theta_gmem=rows(max(plan.params, 1)),
      d_restart_gmem=rows(plan.states),
      exchanges_gmem=kernel_call.exchange_types(plan),
  )

  def body(ins, outs, smem):
    steps = Steps(plan, ins, smem)
    if plan.config.through_device:
      sums = over_device(steps, outs)
    else:
      sums = within_cluster(steps, outs, smem)
    ring_lib.write_rows(steps.cta, outs.d_carry_gmem, sums.d_carry)
    ring_lib.write_rows(steps.cta, outs.d_theta_gmem, sums.d_theta)
    ring_lib.write_rows(steps.cta, outs.d_restart_gmem, sums.d_restart)

  name = 'dense_recurrence_adjoint'
  outs = kernel_call.run(plan, name, body, inputs, out_type)
  return (
      outs.streams_gmem.d_x,
      outs.streams_gmem.d_gates,
      outs.d_carry_gmem,
      outs.d_theta_gmem,
      outs.d_restart_gmem,
  )
