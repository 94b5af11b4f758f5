"""Recurrences with a dense or block-diagonal kernel: persistent in time.

carry_t = update(theta, x_t, R h_{t-1}, carry_{t-1}), and its adjoint. What
takes time is latency: one step's product cannot start before the step before it
has ended. So the recurrent kernel stays in registers, the carry never leaves
them, inputs arrive several steps ahead, outputs leave without being waited for,
and only what is multiplied is exchanged; `cta.py` says between whom and how.

The adjoint multiplies the transposed kernel with the gates' cotangents, step by
step; the gates themselves, and the gradient of the kernel, are products over
all steps at once and are left to the compiler.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import pointwise
from pallas_kernels.mosaic_gpu import cta as cta_lib
from pallas_kernels.mosaic_gpu import exchange as exchange_lib
from pallas_kernels.mosaic_gpu import flags as flags_lib
from pallas_kernels.mosaic_gpu import product as product_lib
from pallas_kernels.mosaic_gpu import ptx
from pallas_kernels.mosaic_gpu import tiles

Array = jax.Array
Stream = cta_lib.Stream
Product = product_lib.Product


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static in a call.

  Attributes:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise, in tuples.
    operand: (theta, inputs, h_gates, carry) -> what the last recurrent gate
      multiplies; None where that is h.
    params: how many rows of theta there are.
    gates: how many inputs there are.
    recurrent: how many recurrent gates there are.
    shape: sizes.
    reverse: whether time runs from the last step to the first.
    flags: whether some steps restart or are held.
    dtype: of the inputs and of what is multiplied.
    config: how the work is cut.
    clip: bound of what comes back through a product, or None.
    stop: whether nothing does.
  """

  update: Callable[..., Any]
  operand: Callable[..., Any] | None
  params: int
  gates: int
  recurrent: int
  shape: cta_lib.Shape
  reverse: bool
  flags: bool
  dtype: Any
  config: Any
  clip: float | None = None
  stop: bool = False

  @property
  def stages(self) -> list[Product]:
    """The products of a step."""
    if self.operand is None:
      return [Product(self.recurrent, 0, False)]
    last = self.recurrent - 1
    return [Product(last, 0, False), Product(1, last, False)]

  @property
  def adjoints(self) -> list[Product]:
    """Those of the adjoint, the last stage first."""
    return [Product(p.gates, p.first, True) for p in reversed(self.stages)]

  @property
  def ahead(self) -> int:
    """How many steps' inputs are needed before their step."""
    return 1 if self.flags else 0


def prepare_flags(flags: Array, shape: cta_lib.Shape) -> Array:
  """[B, T] -> int32 [T, B'], B' the batch rounded up to 4."""
  missing = -shape.batch % 4
  return jnp.pad(flags.T, ((0, 0), (0, missing)))


def forward(
    plan: Plan,
    theta: Array,
    x: Array,
    matrix: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array | None,
    wanted: Sequence[tuple[int, Any]],
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
    flags: int32 [T, B'], as `prepare_flags` returns them, or None.
    wanted: which arrays of the carry are returned for all steps besides h, and
      in which dtype.
    save: whether what the adjoint needs is returned too.

  Returns:
    h after every step, in `plan.dtype`, and what is wanted, each [B, T, F]; the
    carry after the last step, [S, B, F]; if saved, the carries but h that every
    step starts from, float32, each [B, T, F]; and the operand of the second
    product, [B, T, F], if there is one.
  """
  shape, config = plan.shape, plan.config
  states = carry.shape[0]
  two = plan.operand is not None
  stages = plan.stages
  ins, outs = forward_streams(plan, x.dtype, states, wanted, save)
  outputs = 1 + len(wanted)
  saved = states - 1 if save else 0
  kept = two and save
  planes = len(matrix)
  split = planes == 2
  exchanged = len(stages) if config.through_device else 0
  legalize = functools.partial(
      pointwise.legalize, fast=jnp.dtype(plan.dtype).itemsize == 2
  )
  # What the first step and restarts multiply, as it would have been published.
  first = _publishable(carry[0], plan.dtype)
  again = _publishable(restart[0], plan.dtype) if plan.flags else first
  operands = [theta, carry, restart, first, again, *matrix, x]
  if plan.flags:
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
    cta = cta_lib.Cta(config, shape, plan.reverse, plan.dtype)
    ring = tiles.Ring(cta, ins, inputs, scratch[0])
    multipliers = [
        product_lib.Multiplier(
            cta, stage, matrix, *scratch[2 + 3 * i : 5 + 3 * i]
        )
        for i, stage in enumerate(stages)
    ]
    ring.prologue()
    theta = tuple(cta.read_param(theta, i) for i in range(plan.params))
    restart = cta.read_rows(restart, states) if plan.flags else None
    state = cta.read_rows(carry, states)

    def restarts(step):
      """Where the carry restarts before a step that is in the ring."""
      if not plan.flags:
        return None
      return (ring.read(step, 1)[0] & flags_lib.RESET) != 0

    def held(step):
      if not plan.flags:
        return None
      return (ring.read(step, 1)[0] & flags_lib.HOLD) != 0

    def pointwise_step(step, start, gates, finish):
      row = tuple(ring.read(step, 0))
      h_gates = gates
      u = None
      if two:
        u = legalize(plan.operand)(theta, row, h_gates, start)
        h_gates = (*h_gates, *finish(u))
      new = legalize(plan.update)(theta, row, h_gates, start)
      return flags_lib.select(held(step), start, new), u

    ring.wait(plan.ahead)
    for multiplier in multipliers:
      multiplier.clear()
    cta.meet()
    if not config.through_device:
      staging = tiles.Staging(cta, outs, out_refs, scratch[1])
      state = flags_lib.select(restarts(jnp.int32(0)), restart, state)
      multipliers[0].put(jnp.int32(0), state[:1])
      multipliers[0].share(jnp.int32(0))

      def loop(step, state):
        # What is multiplied is what the step before has put.
        product = multipliers[0]
        product.ready(step)
        sums = product.multiply(step)
        ring.advance(step)
        pl.when(step > 0)(lambda: staging.flush(step - 1))
        gates = tuple(product.gather(step, sums))

        def finish(u):
          product = multipliers[1]
          product.put(step, (u,))
          product.share(step)
          product.ready(step)
          return product.gather(step, product.multiply(step))

        new, u = pointwise_step(step, state, gates, finish)
        following = new
        if plan.flags:
          following = flags_lib.select(restarts(step + 1), restart, new)
        multipliers[0].put(step + 1, following[:1])
        written = [new[0], *(new[i] for i, _ in wanted)]
        written += [*state[1 : 1 + saved], *[u] * kept]
        for i, value in enumerate(written):
          staging.write(step, i, (value,))
        ring.wait(plan.ahead)
        # Nobody would wait for what is sent after the last step.
        share = lambda: multipliers[0].share(step + 1)
        if config.cluster > 1:
          pl.when(step + 1 < shape.time)(share)
        else:
          share()
        return *following, *(new if plan.flags else ())

      # With flags, what the next step starts from is not all of the carry.
      init = state * (2 if plan.flags else 1)
      state = _loop(shape.time, lambda step, s: loop(step, s[:states]), init)
      # No CTA leaves while another one may write to its shared memory.
      cta.meet()
      staging.flush(jnp.int32(shape.time - 1))
      cta.write_rows(last_ref, state[-states:])
      return

    exchanges = [exchange_lib.Exchange(cta, ref, 1) for ref in exchange_refs]
    _meet(cta, exchanges)

    def loop(step, state):
      time = cta.time(step)
      product, exchange = multipliers[0], exchanges[0]

      def at_reset(column):
        flags = ring.read_flags_of(step, 1, column)
        return flags & flags_lib.RESET, again

      replace = at_reset if plan.flags else None
      product.fetch(exchange, step - 1, step, first, replace)
      ring.advance(step)
      product.ready(step)
      ring.wait(plan.ahead - 1)
      sums = product.multiply(step)
      gates = tuple(product.gather(step, sums))
      pl.when(step > 1)(lambda: exchange.retire(step - 2))
      exchange.settle(step)
      start = flags_lib.select(restarts(step), restart, state)

      def finish(u):
        product, exchange = multipliers[1], exchanges[1]
        exchange.publish(step, (u,))
        product.fetch(exchange, step, step)
        product.ready(step)
        results = product.gather(step, product.multiply(step))
        pl.when(step > 0)(lambda: exchange.retire(step - 1))
        return results

      new, u = pointwise_step(step, start, gates, finish)
      exchange.publish(step, new[:1])
      written = [new[0], *(new[i] for i, _ in wanted)]
      written += [*start[1 : 1 + saved], *[u] * kept]
      for ref, stream, value in zip(out_refs, outs, written, strict=True):
        cta.write(ref, time, value, stream.dtype, stream)
      return tuple(new)

    state = _loop(shape.time, loop, state)
    cta.meet()
    cta.write_rows(last_ref, state)

  stream = lambda s: jax.ShapeDtypeStruct(shape.stream(s), s.dtype)
  small = jax.ShapeDtypeStruct(carry.shape, jnp.float32)
  exchange = jax.ShapeDtypeStruct(
      exchange_lib.Exchange.shape(shape, 1), plan.dtype
  )
  results = _kernel(
      plan,
      body,
      'dense_recurrence',
      ins,
      outs,
      stages,
      split,
      (*map(stream, outs), small, *(exchange,) * exchanged),
  )(*operands)
  results, last = results[: len(outs)], results[len(outs)]
  u = results[-1] if kept else None
  carries = tuple(results[:outputs])
  return carries, last, tuple(results[outputs : outputs + saved]), u


def backward(
    plan: Plan,
    theta: Array,
    x: Array,
    h_gates: Array,
    starts: Sequence[Array],
    matrix: Sequence[Array],
    flags: Array | None,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[Array, Array | None, Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: as for `forward`, except `config`.
    theta: as for `forward`.
    x: as for `forward`.
    h_gates: the recurrent gates of every step, [N, B, T, G', D].
    starts: the carries that every step starts from, each [B, T, F].
    matrix: R, [G', N, D, D] indexed [gate, head, from, to], as for `forward`.
    flags: as for `forward`.
    d_carries: cotangents of the first of the carries, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, F].

  Returns:
    The cotangents of x, [B, T, G, F]; of the recurrent gates, [N, B, T, G', D],
    or None where these are those of x in the same order; of the carry before
    the first step, [S, B, F]; and, to be summed over the batch, of theta
    [P, B, F] and of the restart [S, B, F].
  """
  shape, config = plan.shape, plan.config
  states, outputs = len(starts), len(d_carries)
  two = plan.operand is not None
  adjoints = plan.adjoints
  d_dtypes = [d.dtype for d in d_carries]
  ins, outs = backward_streams(plan, x.dtype, states, d_dtypes)
  arrays = [x, h_gates, *starts, *d_carries]
  if plan.flags:
    arrays.append(flags)
  planes = len(matrix)
  split = planes == 2
  rows = max(plan.params, 1)
  exchanged = len(adjoints) if config.through_device else 0

  def linearise(theta, row, gates, start):
    return jax.vjp(plan.update, theta, row, gates, start)[1]

  def linearise_operand(theta, row, gates, start):
    return jax.vjp(plan.operand, theta, row, gates, start)[1]

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
    cta = cta_lib.Cta(config, shape, not plan.reverse, plan.dtype)
    ring = tiles.Ring(cta, ins, inputs, scratch[0])
    multipliers = [
        product_lib.Multiplier(
            cta, product, matrix, *scratch[2 + 3 * i : 5 + 3 * i]
        )
        for i, product in enumerate(adjoints)
    ]
    ring.prologue()
    theta = tuple(cta.read_param(theta, i) for i in range(plan.params))

    def flags_at(step, bit):
      if not plan.flags:
        return None
      return (ring.read(step, len(ins) - 1)[0] & bit) != 0

    def linear(step):
      """Everything of a step that does not depend on the adjoint."""
      row = tuple(ring.read(step, 0))
      gates = tuple(ring.read(step, 1))
      start = tuple(ring.read(step, 2 + i)[0] for i in range(states))
      g = tuple(ring.read(step, 2 + states + i)[0] for i in range(outputs))
      pulls = [pointwise.legalize(linearise)(theta, row, gates, start)]
      if two:
        pulls.append(
            pointwise.legalize(linearise_operand)(theta, row, gates[:-1], start)
        )
      idle = flags_at(step, flags_lib.HOLD)
      resets = flags_at(step, flags_lib.RESET)
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
      d_new = flags_lib.select(idle, zeros, d_carry)
      d_theta, d_row, d_gates, d_start = pointwise.pull(pulls[0], d_new)
      if two:
        d_u = through(d_gates[-1])
        more = pointwise.pull(pulls[1], d_u)
        d_theta, d_row, d_start = jax.tree.map(
            jnp.add, (d_theta, d_row, d_start), (more[0], more[1], more[3])
        )
        d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
      kept = flags_lib.select(idle, d_carry, zeros) if plan.flags else None
      return d_theta, d_row, d_gates, d_start, kept, resets

    def close(d_start, kept, resets, d_h, d_restart):
      """Adds up the cotangent of the carry before the step."""
      if d_h is not None:
        d_start = (d_start[0] + bounded(d_h), *d_start[1:])
      if kept is not None:
        d_start = tuple(map(jnp.add, d_start, kept))
        zeros = (0.0,) * states
        d_in = flags_lib.select(resets, d_start, zeros)
        d_restart = tuple(map(jnp.add, d_restart, d_in))
        d_start = flags_lib.select(resets, zeros, d_start)
      return d_start, d_restart

    zero = cta.zeros()
    d_carry = cta.read_rows(d_last, states)
    d_sums = tuple(zero for _ in theta)
    d_restart = (zero,) * states if plan.flags else ()
    distinct = lambda d_row, d_gates: [tuple(d_row), tuple(d_gates)][
        : len(outs)
    ]
    for multiplier in multipliers:
      multiplier.clear()
    if not config.through_device:
      staging = tiles.Staging(cta, outs, out_refs, scratch[1])
    else:
      exchanges = [
          exchange_lib.Exchange(cta, ref, product.operands)
          for ref, product in zip(exchange_refs, adjoints, strict=True)
      ]
      _meet(cta, exchanges)
    ring.wait(1)
    cta.meet()

    def multiply(i, step, values, before, meanwhile, after):
      """One product, and what is done around it.

      Args:
        i: which.
        step: which.
        values: this thread's elements of its operand.
        before: called when these are on their way.
        meanwhile: called when it is time for something else.
        after: called when all threads have got here.
      """
      product = multipliers[i]
      if not config.through_device:
        product.put(step, values)
        before()
        product.share(step)
        if config.cluster > 1:
          after()
          product.ready(step)
          sums = product.multiply(step)
        else:
          sums = product.multiply(step)
          after()
        other = meanwhile()
        return product.gather(step, sums)[0], other
      exchange = exchanges[i]
      exchange.publish(step, values)
      before()
      other = meanwhile()
      product.fetch(exchange, step, step)
      after()
      product.ready(step)
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
        nothing = lambda: None
        d_u, _ = multiply(0, step, (d_gate,), nothing, nothing, nothing)
        return bounded(d_u)

      d_theta, d_row, d_gates, d_start, kept, resets = pull(
          jax.tree.unflatten(tree, leaves), d_carry, through
      )

      def before():
        for i, values in enumerate(distinct(d_row, d_gates)):
          if not config.through_device:
            staging.write(step, i, values)
            continue
          for gate, value in enumerate(values):
            cta.write(
                out_refs[i], cta.time(step), value, plan.dtype, outs[i], gate
            )
        ring.wait(2)

      def after():
        ring.advance(step)
        if not config.through_device:
          staging.flush(step)

      def meanwhile():
        return jax.tree.leaves(linear(step + 1))

      if plan.stop:
        before()
        cta.barrier()
        after()
        d_h, leaves = None, meanwhile()
      else:
        last = len(multipliers) - 1
        d_h, leaves = multiply(
            last,
            step,
            d_gates[: adjoints[last].gates],
            before,
            meanwhile,
            after,
        )
      d_start, d_restart = close(d_start, kept, resets, d_h, d_restart)
      d_sums = tuple(map(jnp.add, d_sums, d_theta))
      return d_start, d_sums, d_restart, leaves

    d_carry, d_sums, d_restart, _ = _loop(
        shape.time, loop, (d_carry, d_sums, d_restart, leaves)
    )
    # No CTA leaves while another one may write to its shared memory.
    cta.meet()
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
  results = _kernel(
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
  d_gates = results[1] if len(outs) > 1 else None
  return results[0], d_gates, d_carry, d_theta, d_restart


def forward_streams(plan: Plan, x_dtype, states: int, wanted, save: bool):
  """Returns the streams that `forward` reads and writes."""
  ins = [Stream(x_dtype, plan.gates)]
  if plan.flags:
    ins.append(Stream(jnp.int32, flags=True))
  outs = [Stream(plan.dtype), *(Stream(dtype) for _, dtype in wanted)]
  if save:
    outs += [Stream(jnp.float32)] * (states - 1)
    outs += [Stream(plan.dtype)] * (plan.operand is not None)
  return ins, outs


def backward_streams(plan: Plan, x_dtype, states: int, d_dtypes):
  """Returns the streams that `backward` reads and writes."""
  ins = [
      Stream(x_dtype, plan.gates),
      Stream(plan.dtype, plan.recurrent, by_head=True),
  ]
  ins += [Stream(plan.dtype)] + [Stream(jnp.float32)] * (states - 1)
  ins += [Stream(dtype) for dtype in d_dtypes]
  if plan.flags:
    ins.append(Stream(jnp.int32, flags=True))
  outs = [Stream(plan.dtype, plan.gates)]
  # One product over all steps follows, a head at a time, so that it wants heads
  # first; with one head that is the order of the inputs.
  same = shared_gates(plan, states) == tuple(range(plan.gates))
  if plan.shape.heads > 1 or not same:
    outs.append(Stream(plan.dtype, plan.recurrent, by_head=True))
  return ins, outs


def needs(plan: Plan, ins, outs, products, config) -> tuple[int, int]:
  """Returns registers for the recurrent kernel, and bytes of shared memory."""
  split = jnp.dtype(plan.dtype) == jnp.float32
  registers = sum(
      4 * product.halves(config) * product.blocks(config, plan.shape)
      for product in products
  )
  words = _words(plan.shape, config, ins, outs, products, split)
  # Each buffer starts at a multiple of 1024 bytes.
  size = sum(-(-4 * n // 1024) * 1024 for n in words)
  return registers * (2 if split else 1), size


def _words(shape, config, ins, outs, products, split) -> list[int]:
  """Returns the shared memory that a kernel takes, in int32."""
  words = [
      tiles.Ring.words(config, ins),
      0 if config.through_device else tiles.Staging.words(config, outs),
  ]
  for product in products:
    words += [
        product_lib.Multiplier.operand_words(config, shape, product, split),
        product_lib.Multiplier.partial_words(config, product),
        product_lib.Multiplier.SIGNAL_WORDS,
    ]
  return [max(n, 32) for n in words]


def shared_gates(plan: Plan, states: int) -> tuple[int | None, ...]:
  """Returns for each recurrent gate the input with the same cotangent.

  Where a gate is the sum x + R h, the two cotangents are one array, which need
  not be written twice.
  """
  aval = jax.ShapeDtypeStruct((ptx.LANES,), jnp.float32)
  avals = lambda n: (aval,) * n

  def pull(theta, row, gates, start, d_new, d_u):
    _, f = jax.vjp(plan.update, theta, row, gates, start)
    _, d_row, d_gates, _ = f(d_new)
    if plan.operand is not None:
      _, f = jax.vjp(plan.operand, theta, row, gates[:-1], start)
      more = f(d_u)
      d_row = tuple(map(jnp.add, d_row, more[1]))
      d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
    return d_row, d_gates

  numbers = pointwise.value_numbers(
      pull,
      avals(plan.params),
      avals(plan.gates),
      avals(plan.recurrent),
      avals(states),
      avals(states),
      aval,
  )
  d_row, d_gates = numbers[: plan.gates], numbers[plan.gates :]
  taken: set[int] = set()
  same: list[int | None] = []
  for number in d_gates:
    found = [j for j, n in enumerate(d_row) if n == number and j not in taken]
    same.append(found[0] if found else None)
    taken.update(found[:1])
  return tuple(same)


def _loop(time: int, body: Callable[..., Any], init: Any) -> Any:
  """Loops over steps that are int32, whatever JAX makes of Python's numbers."""
  return lax.fori_loop(0, time, lambda i, s: body(i.astype(jnp.int32), s), init)


def _publishable(x: Array, dtype) -> Array:
  """Casts, without NaNs that look like `ptx.POISON`."""
  return jnp.where(jnp.isnan(x), jnp.nan, x).astype(dtype)


def _flag(condition) -> Array:
  return jnp.where(condition, jnp.int32(1), jnp.int32(0))


def _meet(cta: cta_lib.Cta, exchanges: Sequence[exchange_lib.Exchange]) -> None:
  """Poisons this CTA's parts of the exchanges, and waits for all CTAs."""
  for exchange in exchanges:
    exchange.clear()
  ptx.fence()
  cta.barrier()
  semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)
  shape, config = cta.shape, cta.config
  slices = pl.cdiv(shape.batch, config.columns)
  ctas = shape.heads * shape.parts(config) * slices
  plgpu.semaphore_signal(semaphore, 1, memory_scope='gpu')
  plgpu.semaphore_wait(
      semaphore,
      ctas * config.warpgroups,
      decrement=False,
      memory_scope='gpu',
  )


def _kernel(plan, body, name, ins, outs, products, split, out_type):
  """Returns a kernel as a function of arrays."""
  config, shape = plan.config, plan.shape
  grid = {'slice': pl.cdiv(shape.batch, config.columns), 'head': shape.heads}
  options: dict[str, Any] = {}
  if config.warpgroups > 1:
    options = {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  if config.through_device:
    grid['group'] = shape.parts(config) // config.cluster
  if config.cluster > 1:
    options |= {'cluster': (config.cluster,), 'cluster_names': ('rank',)}
  words = _words(shape, config, ins, outs, products, split)
  body.__name__ = name
  kernel = plgpu.kernel(
      body,
      out_type=tuple(out_type),
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in words],
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      **options,
  )
  if config.through_device:
    # Under vmap a kernel gains an axis of its grid. CTAs that wait for each
    # other have to be on the device at once, so these take turns.
    return jax.custom_batching.sequential_vmap(kernel)
  return kernel
