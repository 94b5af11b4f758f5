"""The kernel that runs a recurrence in tiles, with R on the chip.

As `forward`, of fewer rows: a CTA has one tile for all steps, and its part of R
in shared memory. A step of a CTA, downwards:

    warpgroup that multiplies              warpgroups that update
    -------------------------------------  -----------------------------------
    wait: counter of the row block         read x[t]
    slices of h[t] -> ring buffer          x[t + 1] -> L2 cache
    multiply slices as they arrive         wait
    leave the sums in shared memory
                                           update
                                           store h[t+1]
                                           add one to the counter
                                           store all else

The carry stays in registers.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import forward
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import kernel_call
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_products
from pallas_kernels.tiled import resident
from pallas_kernels.tiled import resident_plan
from pallas_kernels.tiled import resident_products
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any
Carry = tuple[Array, ...]


@functools.partial(jax.jit, static_argnums=0)
def run(plan: resident_plan.Plan, inputs: forward.Inputs) -> forward.Outputs:
  """Runs the recurrence; arrays as in `forward`, without its `state`."""
  out_type = forward.out_type(plan)._replace(state=None)
  buffers: Any = resident_products.Buffers
  if plan.config.low:
    buffers = low_products.Buffers
    types = buffers.types(plan.config, plan.turns, plan.dtype)
  else:
    types = buffers.types(plan.config, plan.columns, plan.turns, plan.dtype)
  body = lambda *args: _Warpgroup(plan, *args).run()
  kernel = kernel_call.kernel(
      plan,
      'resident_recurrence',
      body,
      inputs,
      out_type,
      buffers,
      types,
  )
  *results, _ = kernel(*jax.tree.leaves(inputs))
  return jax.tree.unflatten(jax.tree.structure(out_type), results)


class _Warpgroup:
  """The work of one warpgroup."""

  def __init__(
      self,
      plan,
      ins: forward.Inputs,
      outs: forward.Outputs,
      counters,
      buffers,
      own,
  ):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.counters, self.own = counters, own
    self.tile = plan.tiles.find()
    self.parts = [
        resident.Part.of(plan.tiles, self.tile, own, i)
        for i in range(plan.config.parts)
    ]
    arrivals = plan.tiles.arrivals
    self.sums = resident.Sums(plan.config, buffers.operand.ref)
    make: Any = functools.partial(
        resident_products.Products, columns=plan.columns
    )
    if plan.config.low:
      make = low_products.Products
    self.products = make(
        config=plan.config,
        turns=plan.turns,
        first=0,
        steps=plan.time,
        operand=self._operand,
        matrix=plan.slice_of_tile(ins.matrix, self.tile),
        wait=lambda s: counters.wait(self.tile.counter, (s + 1) * arrivals),
        send=self.sums.put,
        buffers=buffers,
    )
    # A quarter of the error of rounding h to bfloat16.
    self._update = cells.legalize(plan.update, plan.accuracy(2**-11))

  def _operand(self, step, k):
    plan = self.plan
    rows = pl.ds(self.tile.row, plan.config.rows)
    columns = pl.ds(k * limits.DEPTH, limits.DEPTH)
    if plan.save:
      return plan.slice_of_step(self.outs.h, step, rows, columns)
    return self.outs.h.at[step & 1, rows, columns]

  def run(self) -> None:
    low = self.plan.config.low
    if low:
      one = (ptx.thread() == 0) & (self.own == 0)
      self.products.open(one.astype(jnp.int32))
      sync.barrier(self.plan.config.warpgroups)
    multiply = self.products.multiply if low else self.products.run
    pl.when(self.own == 0)(multiply)
    if low:
      pl.when(self.own == 1)(self._run_updates)
      pl.when(self.own == 2)(self.products.copy)
    else:
      pl.when(self.own > 0)(self._run_updates)

  def _run_updates(self) -> None:
    """The work of a warpgroup that updates."""
    plan = self.plan
    first = jnp.int32(0)
    carries = []
    for part in self.parts:
      given = plan.read_rows(self.ins.carry, part.place, plan.states)
      start = forward.restarted(plan, self.ins, first, part.place, given)
      self._store_h(first, part.place, start[0])
      carries.append(tuple(map(fragments.laid_out, start)))
    teams.publish(self.counters, self.tile, plan.config.updating)
    for part, start in zip(self.parts, carries, strict=True):
      self._store_others(first, part.place, start)
    lax.fori_loop(
        0,
        plan.time,
        lambda s, carries: self._step(s.astype(jnp.int32), carries),
        tuple(carries),
    )

  def _step(self, s, carries: tuple[Carry, ...]) -> tuple[Carry, ...]:
    plan, ins = self.plan, self.ins
    time = plan.time_of(s)
    all_loaded = [
        (
            plan.read_theta(ins.theta, part.place),
            plan.load_steps(ins.x, part.place, time, plan.gates, plan.x_dtype),
        )
        for part in self.parts
    ]
    size = jnp.dtype(plan.x_dtype).itemsize
    following = plan.time_of(jnp.minimum(s + 1, plan.time - 1))
    for part in self.parts:
      plan.prefetch_part([(ins.x, plan.gates, size)], part.place, following)
    self.sums.wait()
    updated = []
    for part, start, loaded in zip(
        self.parts, carries, all_loaded, strict=True
    ):
      gates = self.sums.gates(part)
      theta, x = loaded[0], tuple(gate.value() for gate in loaded[1])
      new = self._update(theta, x, gates, start)
      if plan.flags:
        hold = plan.read_flag(ins.flags, part.place, time, step_flags.HOLD)
        new = step_flags.select(hold, start, new)
      start = forward.restarted(plan, self.ins, s + 1, part.place, new)
      going_on = part.place.only(s + 1 < plan.time)
      self._store_h(s + 1, going_on, start[0])
      updated.append((forward.kept_gates(plan, x, gates), new, start))
    teams.publish(self.counters, self.tile, plan.config.updating)
    for part, results in zip(self.parts, updated, strict=True):
      self._store(s, part.place, *results)
    return tuple(
        tuple(map(fragments.laid_out, start)) for _, _, start in updated
    )

  def _store_h(self, s, place, h) -> None:
    """Stores the operand of step s."""
    plan = self.plan
    if plan.save:
      time = plan.time_of(jnp.minimum(s, plan.time - 1))
      plan.write_steps(self.outs.h, place, time, [h], plan.dtype)
      return
    at = ((s & 1) * plan.batch + place.row) * plan.features + place.feature
    fragments.write(self.outs.h, at, h, plan.dtype, place.valid)

  def _store_others(self, s, place, start) -> None:
    """Stores the carry that step s starts from, but for h."""
    plan = self.plan
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    for ref, value in zip(self.outs.others, start[1:], strict=False):
      plan.write_steps(ref, place, time, [value], jnp.float32)

  def _store(self, s, place, gates, new, start) -> None:
    """Stores the results of step s that no other CTA waits for."""
    plan, outs = self.plan, self.outs
    time = plan.time_of(s)
    if plan.save:
      plan.write_kept(outs.gates, place, time, gates)
    for ref, value in zip(outs.carries, new, strict=False):
      plan.write_steps(ref, place, time, [value], plan.call.out_dtype)
    last = s == plan.time - 1
    plan.write_rows(outs.last, place.only(last), new)
    self._store_others(s + 1, place.only(jnp.logical_not(last)), start)
