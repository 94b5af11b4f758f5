"""The kernel that runs a dense recurrence.

All CTAs of a head hand the operand of each product to each other. Within a CTA
or cluster that goes through shared memory; the time of one step, downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    gather sums of R h[t]                  x[t+1] ... x[t+S-1] -> ring buffer
    update: h[t+1] -> operand slot
    wait: this thread's copies of x[t+1]
    ======= barrier of the CTA ==========
    send h[t+1] to the peers               h[t+1] -> peers' operand slots
    rest of update; store y, copy x[t+S]   y[t] -> staging, y[t-1] -> memory
    wait: mbarrier, all of h[t+1] is here
    multiply R h[t+1]

(One CTA alone sends nothing and multiplies right after the barrier.) Over the
device it goes through an exchange, an array in device memory:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    poll h[t] -> operand                   x[t+1] ... x[t+S-2] -> ring buffer
    start copying x[t+S-1], wait for x[t]
    ======= barrier of the CTA ==========
    multiply R h[t], gather sums
    sentinel -> slot of h[t-1]
    update: publish h[t+1]                 h[t+1] -> exchange (L2)
    write y[t]                             y[t] -> device memory

If warps poll the operand straight into registers (`operand.py`), h before
the first step is published like every other h, each warp polls while it
multiplies, and the only barrier of a step is where the sums are gathered.

If a cell adds x + b to R h, and a warp has whole sums of eight columns in 16
bits, these start from there.

A cell with an operand u of its own has a second product in each step, R' u,
whose operand is handed over in this way between the two.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.extend import core as jex_core
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import ring as ring_lib
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import step_flags

# Gates that a cell adds up: products start from the term R h is added to.
#
# Most cells read x + b + R h of a gate, and neither part for itself. A product
# that starts from x + b then leaves nothing to be added: an update costs two
# operations less an element. A gate that is read in another way, twice for
# instance, has a product of its own as before.


Array = jax.Array


class GateSums(NamedTuple):
  """A cell's update by sums.

  Attributes:
    starts: (theta, inputs) -> for each recurrent gate the term that R h is
      added to, or None.
    update: (theta, inputs, gates, carry) -> carry, where gates of which there
      is a start are sums.
  """

  starts: Callable[..., list[Array | None]]
  update: Callable[..., Any]


def find(update: Callable[..., Any], *args) -> GateSums | None:
  """Returns the update by sums, or None if it adds up no gate.

  Args:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise.
    *args: its arguments, or their types.
  """
  closed, shape = jax.make_jaxpr(update, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  theta, row, gates, _ = args
  first = len(jax.tree.leaves((theta, row)))
  given = jaxpr.invars[:first]
  own: list[Any] = jaxpr.invars[first:][: len(gates)]
  # Variables that theta and the inputs determine; and variables that nothing
  # determines, which all threads share.
  known, constant = {*given}, {*jaxpr.constvars}
  uses: dict[Any, list[Any]] = {}
  for eqn in jaxpr.eqns:
    variables = cells.variables(eqn.invars)
    if variables <= constant:
      constant.update(eqn.outvars)
    elif variables <= known | constant:
      known.update(eqn.outvars)
    for variable in variables:
      uses.setdefault(variable, []).append(eqn)
  starts: list[Any] = []
  added: dict[Any, int] = {}
  for gate in own:
    starts.append(None)
    found = uses.get(gate, [])
    if len(found) != 1 or gate in jaxpr.outvars:
      continue
    (eqn,) = found
    if eqn.primitive.name != 'add':
      continue
    place = 0 if eqn.invars[0] is gate else 1
    other: Any = eqn.invars[1 - place]
    if isinstance(other, jex_core.Literal) or other not in known:
      continue
    # A scalar would have no element for each thread.
    if other.aval.shape == gate.aval.shape:
      starts[-1] = other
      added[eqn.outvars[0]] = place
  if not added:
    return None
  return GateSums(
      lambda theta, row: _starts(closed, given, starts, (theta, row)),
      lambda *args: _update(closed, added, shape, args),
  )


def _starts(closed, given, starts, args) -> list[Array | None]:
  live = {start for start in starts if start is not None}
  eqns: list[Any] = []
  for eqn in reversed(closed.jaxpr.eqns):
    if not live.isdisjoint(eqn.outvars):
      eqns.insert(0, eqn)
      live |= cells.variables(eqn.invars)
  environment = cells.Environment(cells.bind_in_place, lambda value: value)
  environment.bind(closed.jaxpr.constvars, closed.consts)
  environment.bind(given, jax.tree.leaves(args))
  environment.evaluate(eqns)
  return [None if s is None else environment.read([s])[0] for s in starts]


def _update(closed, added, shape, args) -> Any:
  def rule(eqn, inputs: Sequence[Any]):
    place = next((added[v] for v in eqn.outvars if v in added), None)
    if place is not None:
      return [inputs[place]]
    return cells.bind_in_place(eqn, inputs)

  leaves = cells.interpret(
      closed.jaxpr, closed.consts, jax.tree.leaves(args), rule
  )
  return jax.tree.unflatten(jax.tree.structure(shape), leaves)


# The parts of a step of the forward kernel that both of its loops share.


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
  streams_gmem: cut.ForwardInputs


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    streams_gmem: arrays that are written step by step.
    last_gmem: carry after the last step, [S, B, F].
    exchanges_gmem: exchanges of the products' operands, over the device only.
  """

  streams_gmem: cut.ForwardOutputs
  last_gmem: Any
  exchanges_gmem: tuple[Any, ...]


class Steps(kernel_call.Steps):
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
    super().__init__(plan, ins.streams_gmem, ins.matrix_gmem, smem)
    cta, multipliers = self.cta, self.multipliers
    self.first, self.last = multipliers[0], multipliers[-1]
    self.late = multipliers[1] if len(multipliers) > 2 else None
    self.ring.prologue()
    # A quarter of the error of rounding h to bfloat16; twice that to float16.
    accuracy = plan.accuracy(2**-11)
    self._legalize = functools.partial(cells.legalize, accuracy=accuracy)
    self._theta = self.read_theta(ins.theta_gmem)
    self._sums = self._find_sums()
    self.restart: Any = None
    if plan.flags:
      self.restart = ring_lib.read_rows(cta, ins.restart_gmem, plan.states)
    self.carry = ring_lib.read_rows(cta, ins.carry_gmem, plan.states)
    self.ring.wait(plan.ahead)
    for multiplier in multipliers:
      if not multiplier.product.late:
        multiplier.operand.clear()
    cta.cluster_barrier()

  def _find_sums(self) -> GateSums | None:
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
    return find(plan.update, *((element,) * n for n in counts))

  @property
  def adds(self) -> bool:
    """Whether sums of a product start from inputs."""
    return self._sums is not None

  def starts(self, row: Carry | None) -> Any:
    """Returns start values of the sums of a step's first product, or None.

    Args:
      row: the inputs; not None if `adds`.
    """
    if self._sums is None:
      return None
    return self._legalize(self._sums.starts)(self._theta, row)

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
      known: the first recurrent gates, as far as they are known.
      hold: condition that the carry is held, or None.
      again: condition that the next step starts from the restart, or None.

    Returns:
      A function of the later recurrent gates that ends it. It returns h of the
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
    apply = cells.in_turn(step, others, 1 + outputs)

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


# The two loops of the forward kernel, see `forward.py` for their timelines.


def within_cluster(
    steps: Steps, outs: Outputs, smem: plan_lib.Smem
) -> Sequence[Array]:
  """Loops over time with hand-offs in shared memory; returns the last carry."""
  plan, cta, ring = steps.plan, steps.cta, steps.ring
  first, last = steps.first, steps.last
  staging = ring_lib.Staging(
      cta, plan.streams.outs, outs.streams_gmem, smem.staging
  )
  zero = jnp.int32(0)
  state = step_flags.select(steps.restarts(zero), steps.restart, steps.carry)
  first.operand.put(zero, state[:1])

  def start_product(step, meanwhile: Callable[[], Any]):
    """Multiplies the operand that all have put; `gather` ends it.

    Args:
      step: the operand's step.
      meanwhile: () -> results of work to do while others or tensor cores work.

    Returns:
      The sums; the inputs of the step, whose loads are issued well before they
      are used; and the results of `meanwhile`.
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
  if direct:  # Other CTAs publish the operand of step 0, like every operand.
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
      ring_lib.write_step(cta, ref, stream, time, values)
    return rest()[1]

  state = kernel_call.loop(plan.shape.time, body, steps.carry)
  cta.cluster_barrier()
  return state


# The kernel.


@functools.partial(jax.jit, static_argnums=0)
def forward(
    plan: plan_lib.Plan,
    theta: Array,
    x: Array,
    matrix: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array | None,
) -> tuple[tuple[Array, ...], Array, tuple[Array, ...], Array | None]:
  """Runs the recurrence.

  Args:
    plan: static facts of the kernel.
    theta: float32 [plan.params or 1, F].
    x: the inputs, [B, T, G, F].
    matrix: R transposed, [G', N, D, D] indexed [gate, head, to, from], in 16
      bits; two such arrays for the parts of float32.
    carry: carry before the first step, float32 [S, B, F].
    restart: carry after a reset, float32 [S, B, F].
    flags: int32 [T, 1 or 2, B'], as `prepare_flags` returns them, or None.

  Returns:
    The first `plan.call.outputs` arrays of the carry after every step, each [B,
    T, F]; the carry after the last step, [S, B, F]; with `plan.save`, the
    carries that every step starts from, h in `plan.dtype` [N, B, T, 1, D] and
    the rest in float32, each [B, T, F]; and, with `plan.save`, the operand of
    the second product, [N, B, T, 1, D], if there is one.
  """
  first = again = carry[0]
  if plan.config.through_device:  # Rounded as an exchange rounds.
    first = again = kernel_call.without_sentinel(carry[0], plan.dtype)
    if plan.flags:
      again = kernel_call.without_sentinel(restart[0], plan.dtype)
  inputs = Inputs(
      theta_gmem=theta,
      carry_gmem=carry,
      restart_gmem=restart,
      first_gmem=first,
      again_gmem=again,
      matrix_gmem=tuple(matrix),
      streams_gmem=cut.ForwardInputs(x, flags),
  )
  out_type = Outputs(
      streams_gmem=kernel_call.stream_types(plan),
      last_gmem=jax.ShapeDtypeStruct(carry.shape, jnp.float32),
      exchanges_gmem=kernel_call.exchange_types(plan),
  )

  def body(ins, outs, smem):
    steps = Steps(plan, ins, smem)
    if plan.config.through_device:
      last = over_device(steps, ins, outs)
    else:
      last = within_cluster(steps, outs, smem)
    ring_lib.write_rows(steps.cta, outs.last_gmem, last)

  outs = kernel_call.run(plan, 'dense_recurrence', body, inputs, out_type)
  streams = outs.streams_gmem
  return streams.carries, outs.last_gmem, streams.starts, streams.operand
