"""The adjoint of a recurrence in tiles, with R' on the chip.

As `backward`, of fewer rows: a team of CTAs has one tile for all steps, and
each of them a part of R' in shared memory. A step of a CTA, downwards:

    warpgroup that multiplies              warpgroups that update
    -------------------------------------  -----------------------------------
    wait: counter of the row block         read inputs, R h and carries of t
    slices of d_gates[t+1] -> ring buffer  inputs of the step after -> L2 cache
    multiply slices as they arrive         linearise the update
    send the sums to the team              wait: sums of all CTAs of the team
                                           pull the cotangent through
                                           store d_x[t], d_gates[t]
                                           add one to the counter

Cotangents of the carry and of theta stay in registers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import backward
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import kernel_call
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_products
from pallas_kernels.tiled import resident_products
from pallas_kernels.tiled import team_plan
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any


class _State(NamedTuple):
  """Arrays of a thread, kept from step to step, for each of its parts.

  Attributes:
    d_carry: cotangent of the carry that the step before began with.
    d_theta: sums over a warp's rows, of which the thread has one.
    d_restart: as `backward.Outputs`; empty without flags.
  """

  d_carry: tuple[tuple[Array, ...], ...]
  d_theta: tuple[tuple[Array, ...], ...]
  d_restart: tuple[tuple[Array, ...], ...]


class _Loaded(NamedTuple):
  """A part of a step that is on its way.

  Attributes:
    theta: parameters.
    x: inputs that are in no sum.
    gates: R h and sums.
    start: the carry that the step starts from.
    d_outputs: cotangents of its outputs.
  """

  theta: Any
  x: Any
  gates: Any
  start: Any
  d_outputs: Any


@functools.partial(jax.jit, static_argnums=0)
def run(plan: team_plan.Plan, inputs: backward.Inputs) -> backward.Outputs:
  """Runs the adjoint."""
  rows = jax.ShapeDtypeStruct(inputs.d_last.shape, jnp.float32)
  octets = plan.tiles.row_blocks * plan.config.rows // 8
  out_type = backward.Outputs(
      d_x=plan.steps_type(plan.dtype, plan.gates),
      d_gates=None
      if plan.shared
      else plan.steps_type(plan.dtype, plan.recurrent),
      d_carry=rows,
      d_theta=jax.ShapeDtypeStruct(
          (octets, max(plan.params, 1), plan.features), jnp.float32
      ),
      d_restart=rows if plan.flags else None,
  )
  types = teams_types(plan)
  body = lambda *args: _Warpgroup(plan, *args).run()
  kernel = kernel_call.kernel(
      plan,
      'team_recurrence_adjoint',
      body,
      inputs,
      out_type,
      _Buffers,
      types,
  )
  *results, _ = kernel(*jax.tree.leaves(inputs))
  return jax.tree.unflatten(jax.tree.structure(out_type), results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Buffers(resident_products.Buffers):
  """Shared memory of a CTA; that of low tiles as `low_products.Buffers`.

  Attributes:
    sums: as `teams.Sums`, and so is signal.
  """

  sums: Ref
  signal: Ref


def teams_types(plan: team_plan.Plan) -> dict[str, Any]:
  """Returns the types of `_Buffers` by name."""
  if plan.config.low:
    types = low_products.Buffers.types(plan.config, plan.turns, plan.dtype)
  else:
    types = resident_products.Buffers.types(
        plan.config, plan.config.units, plan.turns, plan.dtype
    )
  return {
      **types,
      'sums': plgpu.SMEM((teams.Sums.words(plan.config),), jnp.int32),
      'signal': plgpu.SMEM((teams.Sums.SIGNAL_WORDS,), jnp.int32),
  }


class _Warpgroup:
  """The work of one warpgroup."""

  def __init__(
      self,
      plan,
      ins: backward.Inputs,
      outs: backward.Outputs,
      counters,
      buffers,
      own,
  ):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.counters, self.own = counters, own
    self.tile = plan.tiles.find()
    self.parts = [
        teams.Part.of(plan.tiles, self.tile, own, i)
        for i in range(plan.config.parts)
    ]
    arrivals = plan.tiles.arrivals
    self.sums = teams.Sums(
        plan.config, buffers.sums, buffers.signal, buffers.operand.ref
    )
    make: Any = functools.partial(
        resident_products.Products, columns=plan.config.units
    )
    if plan.config.low:
      make = low_products.Products
    self.products = make(
        config=plan.config,
        turns=plan.turns,
        first=1,
        steps=plan.time + 1,
        operand=self._operand,
        matrix=plan.slice_of_tile(ins.matrix, self.tile),
        wait=lambda s: counters.wait(self.tile.counter, s * arrivals),
        send=self.sums.send,
        buffers=buffers,
    )
    # Of all threads of the CTA one.
    self._one = ((ptx.thread() == 0) & (own == 1)).astype(jnp.int32)
    # A larger error would show: derivatives multiply rounded values.
    self._accuracy = plan.accuracy(2**-22)
    linearise = lambda *args: jax.vjp(plan.update_of_kept, *args)[1]
    self._linearise = cells.legalize(linearise, self._accuracy)

  def _operand(self, step, k):
    plan = self.plan
    slices = plan.size // limits.DEPTH
    k = lax.axis_index('member') * plan.turns + k
    gate = lax.div(k, jnp.int32(slices))
    first = gate * plan.features + (k - gate * slices) * limits.DEPTH
    d_gates = self.outs.d_x if plan.shared else self.outs.d_gates
    return plan.slice_of_rows(d_gates, step - 1, self.tile, first)

  def run(self) -> None:
    low = self.plan.config.low
    self.sums.open(self._one)
    if low:
      self.products.open(self._one)
    sync.cluster_barrier()
    multiply = self.products.multiply if low else self.products.run
    pl.when(self.own == 0)(multiply)
    if low:
      pl.when(self.own == 1)(self._update)
      pl.when(self.own == 2)(self.products.copy)
    else:
      pl.when(self.own > 0)(self._update)
    # No CTA ends while others send to it.
    sync.cluster_barrier()

  def _update(self) -> None:
    """The work of a warpgroup that updates."""
    plan, outs = self.plan, self.outs
    zeros = ptx.full(teams.UNITS, 0.0)
    state = _State(
        d_carry=tuple(
            tuple(plan.read_rows(self.ins.d_last, part.place, plan.states))
            for part in self.parts
        ),
        d_theta=((ptx.full(1, 0.0),) * plan.params,) * len(self.parts),
        d_restart=((zeros,) * plan.states,) * len(self.parts) * plan.flags,
    )

    def step(s, state):
      return self._step(s.astype(jnp.int32), state)

    state = lax.fori_loop(0, plan.time + 1, step, state)
    for i, part in enumerate(self.parts):
      plan.write_rows(outs.d_carry, part.place, state.d_carry[i])
      if plan.flags:
        plan.write_rows(outs.d_restart, part.place, state.d_restart[i])
      self._write_theta(part, state.d_theta[i])

  def _write_theta(self, part: teams.Part, sums) -> None:
    """Stores sums over eight rows, of rows that are not there too."""
    plan = self.plan
    unit = fragments.unit(teams.UNITS)
    for row, value in enumerate(sums):
      at = (part.octet * max(plan.params, 1) + row) * plan.features
      at = at + part.place.feature + unit
      memory.store_gmem(self.outs.d_theta, at, value, jnp.float32, part.inside)

  def _step(self, s, state: _State) -> _State:
    plan, places = self.plan, [part.place for part in self.parts]
    begins = s < plan.time
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    all_loaded = [self._load(time, place) for place in places]
    self._prefetch(s + 1)
    pulls = [
        self._linearise(
            loaded.theta,
            *backward.values((loaded.x, loaded.gates, loaded.start)),
        )
        for loaded in all_loaded
    ]
    pl.when(s > 0)(lambda: self._receive(s))
    d_theta, d_restart, d_carry = [], [], []
    for i, part in enumerate(self.parts):
      restart = state.d_restart[i] if plan.flags else ()
      d_new, restart = self._close(s, part, state.d_carry[i], restart)
      d_own, d_start = self._pull(
          begins, time, part.place, d_new, pulls[i], all_loaded[i]
      )
      d_restart.append(restart)
      d_theta.append(d_own)
      d_carry.append(
          tuple(
              fragments.laid_out(jnp.where(begins, x, y))
              for x, y in zip(d_start, d_new, strict=True)
          )
      )
    teams.publish(self.counters, self.tile, plan.config.updating)
    return _State(
        d_carry=tuple(d_carry),
        d_theta=tuple(
            self._add_theta(begins, part, sums, d)
            for part, sums, d in zip(
                self.parts, state.d_theta, d_theta, strict=True
            )
        ),
        d_restart=tuple(d_restart) if plan.flags else (),
    )

  def _receive(self, s) -> None:
    self.sums.expect(self._one)
    self.sums.wait(s)

  def _load(self, time, place) -> _Loaded:
    """Starts to read the arrays of a part."""
    plan, ins = self.plan, self.ins
    load = lambda ref, gates, dtype: plan.load_steps(
        ref, place, time, gates, dtype
    )
    return _Loaded(
        theta=plan.read_theta(ins.theta, place),
        x=load(ins.x, len(plan.alone), plan.x_dtype),
        gates=load(ins.gates, plan.recurrent, plan.kept_dtype),
        start=(
            *load(ins.h, 1, plan.dtype),
            *(load(ref, 1, jnp.float32)[0] for ref in ins.others),
        ),
        d_outputs=tuple(
            load(ref, 1, plan.call.out_dtype)[0] for ref in ins.d_carries
        ),
    )

  def _prefetch(self, s) -> None:
    """Brings the arrays of a step to the L2 cache."""
    plan = self.plan
    streams = backward.streams(plan, self.ins)
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    for part in self.parts:
      plan.prefetch_part(streams, part.place, time)

  def _close(self, s, part, d_carry, d_restart) -> tuple[Any, Any]:
    """Returns the cotangents of the carry after step s, and of restarts."""
    plan = self.plan
    # Before the first product there is anything.
    total = jnp.where(s > 0, self.sums.total(part), 0)
    d_start = (d_carry[0] + plan.call.bounded(total), *d_carry[1:])
    if not plan.flags:
      return d_start, ()
    time = plan.time_of(jnp.maximum(s - 1, 0))
    again = plan.read_flag(self.ins.flags, part.place, time, step_flags.RESET)
    again = again & (s > 0)
    zeros = (0.0,) * plan.states
    d_in = step_flags.select(again, d_start, zeros)
    d_restart = tuple(
        fragments.laid_out(x + y) for x, y in zip(d_restart, d_in, strict=True)
    )
    return step_flags.select(again, zeros, d_start), d_restart

  def _pull(self, begins, time, place, d_carry, pull, loaded):
    """Pulls a part's cotangents back through a step.

    Returns:
      The cotangents of theta, and of the carry that the step starts from.
    """
    plan, outs = self.plan, self.outs
    zeros = (0.0,) * plan.states
    for i, d in enumerate(backward.values(loaded.d_outputs)):
      d_carry = (*d_carry[:i], d_carry[i] + d, *d_carry[i + 1 :])
    hold = None
    if plan.flags:
      hold = plan.read_flag(self.ins.flags, place, time, step_flags.HOLD)
    d_new = step_flags.select(hold, zeros, d_carry)
    d_theta, d_x, d_gates, d_start = cells.pull(pull, d_new, self._accuracy)
    d_x = plan.input_gates(d_x, d_gates)
    if hold is not None:
      passed = step_flags.select(hold, d_carry, zeros)
      d_start = tuple(map(jnp.add, d_start, passed))
    place = place.only(begins)
    plan.write_steps(outs.d_x, place, time, d_x, plan.dtype)
    if not plan.shared:
      plan.write_steps(outs.d_gates, place, time, d_gates, plan.dtype)
    return d_theta, d_start

  def _add_theta(self, begins, part, sums, d_theta) -> tuple[Array, ...]:
    """Adds the sums over a warp's rows, of which this thread has one."""
    valid = part.place.only(begins).valid
    added = []
    for before, d in zip(sums, d_theta, strict=True):
      # A row that is not there repeats the last one.
      values = ptx.unstack(fragments.laid_out(d))
      values = [jnp.where(valid != 0, x, 0) for x in values]
      added.append(fragments.laid_out(before + fragments.sum_rows(values)))
    return tuple(added)
