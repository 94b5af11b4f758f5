"""The adjoint of a recurrence in tiles, with R' on the chip.

As `backward`, of fewer rows: a team of CTAs has one tile for all steps, and
each CTA a part of R' in shared memory. A step of a CTA, downwards:

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

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import backward
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import kernel_call
from pallas_kernels.tiled import on_chip
from pallas_kernels.tiled import on_chip_products
from pallas_kernels.tiled import plan as plan_lib

Array = jax.Array
DEPTH = plan_lib.DEPTH


class _State(NamedTuple):
  """Arrays of a thread, kept from step to step, for each of its parts.

  Attributes:
    d_carry: cotangent of the carry that the step before began with.
    d_theta: sums over a warp's rows, of which the thread has one.
    d_restart: cotangent of the restart; empty without flags.
  """

  d_carry: tuple[tuple[Array, ...], ...]
  d_theta: tuple[tuple[Array, ...], ...]
  d_restart: tuple[tuple[Array, ...], ...]


@functools.partial(jax.jit, static_argnums=0)
def run(plan: on_chip.AdjointPlan, inputs: backward.Inputs) -> backward.Outputs:
  """Runs the adjoint."""
  octets = plan.tiles.row_blocks * plan.config.rows // 8
  buffers = on_chip_products.Buffers
  types = {
      **buffers.types(plan),
      'sums': plgpu.SMEM((plan.config.sum_words,), jnp.int32),
      'signal': plgpu.SMEM((sync.SIGNAL_WORDS,), jnp.int32),
  }
  return kernel_call.run(
      plan,
      'team_recurrence_adjoint',
      _Warpgroup,
      buffers,
      types,
      inputs=inputs,
      out_type=backward.out_type(plan, octets),
  )


class _Warpgroup(backward.Warpgroup):
  """The work of one warpgroup."""

  def __init__(self, plan, ins, outs, counters, buffers, own):
    super().__init__(plan, ins, outs, counters, own)
    self.tile = plan.tiles.find()
    self.parts = [
        on_chip.TeamPart.of(plan.tiles, self.tile, own, i)
        for i in range(plan.config.parts)
    ]
    arrivals = plan.tiles.arrivals
    self.sums = on_chip.TeamSums(
        plan.config, buffers.sums, buffers.signal, buffers.operand.ref
    )
    self.products = on_chip_products.Products(
        plan=plan,
        first=1,
        steps=plan.time + 1,
        operand=self._operand,
        matrix=plan.slice_of_tile(ins.matrix, self.tile),
        wait=lambda s: counters.wait(self.tile.counter, s * arrivals),
        send=self.sums.send,
        buffers=buffers,
    )
    # 1 in exactly one thread of the CTA, else 0.
    self._one = ((ptx.thread() == 0) & (own == 1)).astype(jnp.int32)

  def _operand(self, step, k):
    plan = self.plan
    slices = plan.size // DEPTH
    k = lax.axis_index('member') * plan.turns + k
    gate = lax.div(k, jnp.int32(slices))
    first = gate * plan.features + (k - gate * slices) * DEPTH
    rows = pl.ds(self.tile.row, plan.config.rows)
    columns = pl.ds(first, DEPTH)
    return plan.slice_of_step(self._d_gates, step - 1, rows, columns)

  def run(self) -> None:
    self.sums.open(self._one)
    if self.plan.config.low:
      self.products.open(self._one)
    sync.cluster_barrier()
    self.products.run(self.own, self._update)
    # No CTA ends while others send to it.
    sync.cluster_barrier()

  def _update(self) -> None:
    """The work of a warpgroup that updates."""
    plan, outs = self.plan, self.outs
    zeros = ptx.full(on_chip.UNITS, 0.0)
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

  def _write_theta(self, part: on_chip.TeamPart, sums) -> None:
    """Stores sums over eight rows, of rows that are not there too."""
    plan = self.plan
    unit = fragments.unit(on_chip.UNITS)
    for row, value in enumerate(sums):
      at = (part.octet * max(plan.params, 1) + row) * plan.features
      at = at + part.place.feature + unit
      memory.store_gmem(self.outs.d_theta, at, value, jnp.float32, part.inside)

  def _step(self, s, state: _State) -> _State:
    plan, places = self.plan, [part.place for part in self.parts]
    begins = s < plan.time
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    all_loaded = [
        (plan.read_theta(self.ins.theta, place), self._load_step(time, place))
        for place in places
    ]
    self._prefetch(s + 1)
    pulls = [
        self._linearise(theta, *_values((loaded.x, loaded.gates, loaded.start)))
        for theta, loaded in all_loaded
    ]
    pl.when(s > 0)(lambda: self._receive(s))
    d_theta, d_restart, d_carry = [], [], []
    for i, part in enumerate(self.parts):
      restart = state.d_restart[i] if plan.flags else ()
      d_new, restart = self._close(s, part, state.d_carry[i], restart)
      d_own, d_start = self._pull(
          begins, time, part.place, d_new, pulls[i], all_loaded[i][1]
      )
      d_restart.append(restart)
      d_theta.append(d_own)
      d_carry.append(
          tuple(
              fragments.laid_out(jnp.where(begins, x, y))
              for x, y in zip(d_start, d_new, strict=True)
          )
      )
    on_chip.publish(self.counters, self.tile, plan.config.updating)
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

  def _prefetch(self, s) -> None:
    """Brings the arrays of a step to the L2 cache."""
    plan = self.plan
    streams = self._streams()
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    for part in self.parts:
      plan.prefetch_part(streams, part.place, time)

  def _close(self, s, part, d_carry, d_restart) -> tuple[Any, Any]:
    """Returns the cotangents of the carry after step s, and of restarts."""
    plan = self.plan
    # The buffer is uninitialised before the first product.
    total = jnp.where(s > 0, self.sums.total(part), 0)
    d_start = (d_carry[0] + plan.call.bounded(total), *d_carry[1:])
    if not plan.flags:
      return d_start, ()
    again = self._restarts(s, part.place)
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

    def hold():
      if not self.plan.flags:
        return None
      flags = self.ins.flags
      return self.plan.read_flag(flags, place, time, step_flags.HOLD)

    d_theta, d_x, d_gates, d_start = self._pull_step(
        d_carry, _values(loaded.d_outputs), hold, lambda: pull
    )
    self._write_gates(time, place.only(begins), d_x, d_gates)
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


def _values(tree: Any) -> Any:
  """Returns a tree of parts, loaded or not, as arrays."""
  is_leaf = lambda x: isinstance(x, plan_lib.Loaded)
  value = lambda x: x.value() if is_leaf(x) else x
  return jax.tree.map(value, tree, is_leaf=is_leaf)
