"""The kernel that runs the adjoint of a dense recurrence."""

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


def backward(
    plan: kernel_call.Plan,
    theta: Array,
    x: Array,
    h_gates: Sequence[Array],
    starts: Sequence[Array],
    matrix: Sequence[Array],
    flags: Array | None,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[Array, Sequence[Array], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: as for `forward`, except `config`.
    theta: as for `forward`.
    x: as for `forward`.
    h_gates: the recurrent gates of every step, [N, B, T, G', D], those of the
      second product apart from those of the first.
    starts: the carries that every step starts from, as `forward` returns them.
    matrix: R, [G', N, D, D] indexed [gate, head, from, to], as for `forward`.
    flags: as for `forward`.
    d_carries: cotangents of the first of the carries, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, F].

  Returns:
    The cotangents of x, [B, T, G, F]; of the recurrent gates, as `h_gates`, or
    nothing where these are those of x in the same order; of the carry before
    the first step, [S, B, F]; and, to be summed over the batch, of theta
    [P, B, F] and of the restart [S, B, F].
  """
  shape, config = plan.shape, plan.config
  states, outputs = len(starts), len(d_carries)
  two = plan.operand is not None
  adjoints = plan.adjoints
  d_dtypes = [d.dtype for d in d_carries]
  ins, outs = kernel_call.backward_streams(plan, x.dtype, states, d_dtypes)
  arrays = [x, *h_gates, *starts, *d_carries]
  if flags is not None:
    arrays.append(flags)
  planes = len(matrix)
  split = planes == 2
  rows = max(plan.params, 1)
  exchanged = len(adjoints) if config.through_device else 0

  # More would show: derivatives multiply what the forward kernel has rounded.
  accuracy = kernel_call.accuracy(plan, 2**-22)
  legalize = functools.partial(pointwise.legalize, accuracy=accuracy)

  def linearise(theta, row, gates, start):
    return jax.vjp(plan.update, theta, row, gates, start)[1]

  def linearise_operand(theta, row, gates, start):
    operand: Any = plan.operand
    return jax.vjp(operand, theta, row, gates, start)[1]

  def body(*refs):
    theta, d_last = refs[:2]
    matrix = refs[2 : 2 + planes]
    n = 2 + planes
    inputs = refs[n : n + len(ins)]
    n += len(ins)
    out_refs = refs[n : n + len(outs)]
    n += len(outs)
    d_carry_ref, d_theta_ref, d_restart_ref = refs[n : n + 3]
    n += 3
    exchange_refs, scratch = refs[n : n + exchanged], refs[n + exchanged :]
    cta = thread_layout.Cta(
        config, shape, not plan.reverse, plan.both, plan.dtype
    )
    ring = smem_pipeline.Ring(cta, ins, inputs, scratch[0])
    multipliers = kernel_call.multipliers(cta, adjoints, matrix, scratch[2:])
    ring.prologue()
    theta = tuple(cta.read_param(theta, i) for i in range(plan.params))

    def flags_at(step, bit):
      if not plan.flags:
        return None
      return (ring.read(step, len(ins) - 1)[0] & bit) != 0

    def linear(step):
      """Everything of a step that does not depend on the adjoint."""
      n = 1 + len(h_gates)
      row = tuple(ring.read(step, 0))
      gates = tuple(x for i in range(1, n) for x in ring.read(step, i))
      start = tuple(ring.read(step, n + i)[0] for i in range(states))
      g = tuple(ring.read(step, n + states + i)[0] for i in range(outputs))
      pulls = [legalize(linearise)(theta, row, gates, start)]
      if two:
        pulls.append(legalize(linearise_operand)(theta, row, gates[:-1], start))
      idle = flags_at(step, step_flags.HOLD)
      resets = flags_at(step, step_flags.RESET)
      return pulls, g, idle, resets

    def bounded(d):
      if plan.clip is not None:
        d = jnp.minimum(jnp.maximum(d, -plan.clip), plan.clip)
      return d

    def pull(ahead, d_carry, through):
      """Pulls one step back, as far as products have to be gathered.

      Args:
        ahead: what `linear` returned.
        d_carry: cotangent of the carry after the step.
        through: maps the last recurrent gate's cotangent to the operand's.
      """
      pulls, g, idle, resets = ahead
      seen = tuple(map(jnp.add, d_carry, g))
      d_carry = (*seen, *d_carry[outputs:])
      zeros = (0.0,) * states
      d_new = step_flags.select(idle, zeros, d_carry)
      d_theta, d_row, d_gates, d_start = pointwise.pull(
          pulls[0], d_new, accuracy
      )
      if two:
        d_u = through(d_gates[-1])
        more = pointwise.pull(pulls[1], d_u, accuracy)
        d_theta, d_row, d_start = jax.tree.map(
            jnp.add, (d_theta, d_row, d_start), (more[0], more[1], more[3])
        )
        d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
      kept = step_flags.select(idle, d_carry, zeros) if plan.flags else None
      return d_theta, d_row, d_gates, d_start, kept, resets

    def close(d_start, kept, resets, d_h, d_restart):
      """Adds up the cotangent of the carry before the step."""
      if d_h is not None:
        d_start = (d_start[0] + bounded(d_h), *d_start[1:])
      if kept is not None:
        d_start = tuple(map(jnp.add, d_start, kept))
        zeros = (0.0,) * states
        d_in = step_flags.select(resets, d_start, zeros)
        d_restart = tuple(map(jnp.add, d_restart, d_in))
        d_start = step_flags.select(resets, zeros, d_start)
      return d_start, d_restart

    zero = cta.zeros()
    d_carry = cta.read_rows(d_last, states)
    d_sums = tuple(zero for _ in theta)
    d_restart = (zero,) * states if plan.flags else ()

    def distinct(d_row, d_gates):
      """Returns what is written, one tuple a stream."""
      parts = [d_gates[p.first :][: p.gates] for p in plan.stages]
      return [d_row, *parts][: len(outs)]

    for multiplier in multipliers:
      multiplier.operand.clear()
    if not config.through_device:
      staging = smem_pipeline.Staging(cta, outs, out_refs, scratch[1])
    else:
      exchanges = [
          exchange_lib.Exchange(cta, ref, product.operands)
          for ref, product in zip(exchange_refs, adjoints, strict=True)
      ]
      kernel_call.meet(cta, exchanges)
    ring.wait(1)
    cta.meet()

    def multiply(i, step, values, begin):
      """One product, and what is done while its operand or it is on its way.

      Args:
        i: which.
        step: which.
        values: this thread's elements of its operand.
        begin: called when these are on their way. It returns a function, which
          is called when all threads of the CTA have met; at once, where the way
          is through the device.
      """
      product = multipliers[i]
      if not config.through_device:
        product.operand.put(step, values)
        meanwhile = begin()
        product.operand.share(step)
        if config.cluster > 1:
          other = meanwhile()
          product.operand.ready(step)
          sums = product.multiply(step)
        else:
          sums = product.multiply(step)
          other = meanwhile()
        return product.gather(step, sums)[0], other
      exchange = exchanges[i]
      exchange.publish(step, values)
      other = begin()()
      product.operand.fetch(exchange, step, step)
      if i == len(multipliers) - 1:
        ring.advance(step)
      product.operand.ready(step)
      sums = product.multiply(step)
      (result,) = product.gather(step, sums)
      pl.when(step > 0)(lambda: exchange.retire(step - 1))
      exchange.settle(step)
      return result, other

    leaves, tree = jax.tree.flatten(linear(jnp.int32(0)))

    def loop(step, state):
      d_carry, d_sums, d_restart, leaves = state

      def through(d_gate):
        if plan.stop:
          return cta.zeros()
        d_u, _ = multiply(0, step, (d_gate,), lambda: lambda: None)
        return bounded(d_u)

      d_theta, d_row, d_gates, d_start, kept, resets = pull(
          jax.tree.unflatten(tree, leaves), d_carry, through
      )

      def begin():
        written = distinct(d_row, d_gates)
        load = None
        if not config.through_device:
          load = staging.put(step, written)
        else:
          time = cta.time(step)
          for ref, stream, values in zip(out_refs, outs, written, strict=True):
            for gate, value in enumerate(values):
              cta.write(ref, time, value, plan.dtype, stream, gate)
        ring.wait(2)

        def meanwhile():
          if load is not None:
            store = load()
            ring.advance(step)
            store()
          return jax.tree.leaves(linear(step + 1))

        return meanwhile

      if plan.stop:
        meanwhile = begin()
        cta.barrier()
        d_h, leaves = None, meanwhile()
        if config.through_device:
          ring.advance(step)
      else:
        last = len(multipliers) - 1
        own = d_gates[: adjoints[last].gates]
        d_h, leaves = multiply(last, step, own, begin)
      d_start, d_restart = close(d_start, kept, resets, d_h, d_restart)
      d_sums = tuple(map(jnp.add, d_sums, d_theta))
      return d_start, d_sums, d_restart, leaves

    d_carry, d_sums, d_restart, _ = kernel_call.loop(
        shape.time, loop, (d_carry, d_sums, d_restart, leaves)
    )
    # No CTA leaves while another one may write to its shared memory.
    cta.meet()
    if not config.through_device:
      staging.finish()
    cta.write_rows(d_carry_ref, d_carry)
    cta.write_rows(d_theta_ref, d_sums)
    cta.write_rows(d_restart_ref, d_restart)

  stream = lambda s: jax.ShapeDtypeStruct(shape.stream(s), s.dtype)
  small = lambda n: jax.ShapeDtypeStruct(
      (n, shape.batch, shape.features), jnp.float32
  )
  exchanges = [
      jax.ShapeDtypeStruct(
          exchange_lib.Exchange.shape(shape, product.operands), plan.dtype
      )
      for product in adjoints[:exchanged]
  ]
  results = kernel_call.kernel(
      plan,
      body,
      'dense_recurrence_adjoint',
      ins,
      outs,
      adjoints,
      split,
      (
          *map(stream, outs),
          small(states),
          small(rows),
          small(states),
          *exchanges,
      ),
  )(theta, d_last, *matrix, *arrays)
  d_carry, d_theta, d_restart = results[len(outs) : len(outs) + 3]
  return results[0], results[1 : len(outs)], d_carry, d_theta, d_restart
