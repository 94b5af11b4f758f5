"""The kernels that run a recurrence in tiles.

If R streams, a step of a CTA with one tile is, downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    multiply slices of W x, if any         slices of W and x -> ring buffer
    take and store gates that are no sums
    wait: counter of the row block         first slices of R -> ring buffer
                                           first slices of h[t] -> ring buffer
    multiply slices as they arrive         all further slices
                                           x[t] -> L2 cache
    for each part of the tile:             first slices of R, for step t + 1
      read x[t] and the carry; update      x[t] and the carry of the next part
      store h[t+1]
    add one to the counter
    store all else                         results -> device memory

With fewer rows, a CTA has one tile for all steps, its part of R in shared
memory and the carry in registers:

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
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import kernel_call
from pallas_kernels.tiled import on_chip
from pallas_kernels.tiled import on_chip_products
from pallas_kernels.tiled import plan as plan_lib
from pallas_kernels.tiled import products

Array = jax.Array
Ref = Any
Carry = tuple[Array, ...]


class Inputs(NamedTuple):
  """Arrays in device memory that are read.

  Attributes:
    theta: float32 [P, F].
    x: inputs of all steps, [B, T, G F]; None where the kernel multiplies.
    source: operand of W, [B, T, I], or None.
    matrix: R as `plan.arrange` orders it, or W and R as `plan.arrange_both`.
    carry: float32 [S, B, F].
    restart: float32 [S, B, F], or None without flags.
    flags: int32 [T, B], or None.
  """

  theta: Any
  x: Any
  source: Any
  matrix: Any
  carry: Any
  restart: Any
  flags: Any


class Outputs(NamedTuple):
  """Arrays in device memory that are written.

  Attributes:
    carries: outputs of all steps, each [B, T, F].
    h: h that every step starts from, 16 bits, [B, T, F]; [2, B, F] for two
      steps in turn unless it is saved.
    others: further arrays that every step starts from, if saved, float32
      [B, T, F].
    gates: R h of every step, if saved, with x added to gates that are sums,
      in `Plan.kept_dtype`, [B, T, G' F].
    alone: inputs in no sum, if saved and multiplied here, [B, T, K F].
    last: float32 [S, B, F].
    state: the carry that a step starts from, float32 [S, B, F]; None where it
      stays in registers.
  """

  carries: tuple[Any, ...]
  h: Any
  others: tuple[Any, ...]
  gates: Any
  alone: Any
  last: Any
  state: Any


def _out_type(plan: plan_lib.Plan) -> Outputs:
  """Returns the types of a kernel's outputs."""
  steps, rows = plan.steps_type, (plan.batch, plan.features)
  state = jax.ShapeDtypeStruct((plan.states, *rows), jnp.float32)
  two = jax.ShapeDtypeStruct((2, *rows), plan.dtype)
  return Outputs(
      carries=(steps(plan.call.out_dtype),) * plan.call.outputs,
      h=steps(plan.dtype) if plan.save else two,
      others=(steps(jnp.float32),) * (plan.states - 1) if plan.save else (),
      gates=steps(plan.kept_dtype, plan.recurrent) if plan.save else None,
      alone=steps(plan.x_dtype, len(plan.alone))
      if plan.save and plan.takes
      else None,
      last=state,
      state=None if isinstance(plan, on_chip.Plan) else state,
  )


@functools.partial(jax.jit, static_argnums=0)
def forward(plan: plan_lib.Plan, inputs: Inputs) -> Outputs:
  """Runs the recurrence."""
  outs = _out_type(plan)
  run = functools.partial(kernel_call.run, plan, inputs=inputs, out_type=outs)
  if isinstance(plan, on_chip.Plan):
    buffers = on_chip_products.Buffers
    types = buffers.types(plan)
    return run('resident_recurrence', _OnChip, buffers, types)
  types = products.Buffers.types(plan.config, plan.columns, plan.dtype)
  return run('tiled_recurrence', _Streamed, products.Buffers, types)


class _Warpgroup:
  """The work of one warpgroup, as far as both kernels share it."""

  def __init__(self, plan, ins: Inputs, outs: Outputs, counters, own):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.counters, self.own = counters, own
    # A quarter of the error of rounding h to bfloat16.
    update = plan.update_of_kept if plan.depth else plan.update
    self._update = cells.legalize(update, plan.accuracy(2**-11))

  def _restarted(self, s, place, carry) -> Carry:
    """Returns the carry of a part that step s starts from."""
    plan, ins = self.plan, self.ins
    if not plan.flags:
      return carry
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    again = plan.read_flag(ins.flags, place, time, step_flags.RESET)
    restart = plan.read_rows(ins.restart, place, plan.states)
    return step_flags.select(again, restart, carry)

  def _step(
      self, s, time: Callable[[], Any], place, theta, x, h_gates, start
  ) -> tuple[Carry, Carry]:
    """Returns the carry after step s, and the one that the next starts from."""
    plan = self.plan
    new = self._update(theta, x, h_gates, start)
    if plan.flags:
      hold = plan.read_flag(self.ins.flags, place, time(), step_flags.HOLD)
      new = step_flags.select(hold, start, new)
    return new, self._restarted(s + 1, place, new)

  def _kept(self, x, h_gates) -> tuple[Any, ...]:
    """Returns `Plan.kept` of a part for the adjoint, as `write_kept` stores it.

    If the kernel has multiplied W x the gates are sums already. Gates outside
    the range of their dtype are saturated; an infinity would turn them into
    NaN. Words have half of a thread's registers that the gates have.
    """
    plan = self.plan
    if not plan.save:
      return ()
    gates = h_gates if plan.depth else plan.kept(x, h_gates)
    most = float(jnp.finfo(plan.kept_dtype).max)
    bounded = lambda gate: jnp.minimum(jnp.maximum(gate, -most), most)
    if plan.kept_dtype == jnp.float32:
      return tuple(fragments.laid_out(bounded(gate)) for gate in gates)
    # One gate after another: few registers hold both forms.
    return tuple(fragments.pack(bounded(gate), jnp.float16) for gate in gates)

  def _slice_of_h(self, step, tile, first) -> Ref:
    """Returns a slice of the operand of a step, from a feature on."""
    plan = self.plan
    rows = pl.ds(tile.row, plan.config.rows)
    columns = pl.ds(first, plan_lib.DEPTH)
    if plan.save:
      return plan.slice_of_step(self.outs.h, step, rows, columns)
    return self.outs.h.at[step & 1, rows, columns]

  def _store_h(self, s, time_of: Callable[[Any], Any], place, h) -> None:
    """Stores the operand of step s."""
    plan = self.plan
    if plan.save:
      plan.write_steps(self.outs.h, place, time_of(s), [h], plan.dtype)
      return
    at = ((s & 1) * plan.batch + place.row) * plan.features + place.feature
    fragments.write(self.outs.h, at, h, plan.dtype, place.valid)

  def _store_others(self, time: Callable[[], Any], place, start) -> None:
    """Stores the carry that a step starts from for the adjoint, but for h."""
    for ref, value in zip(self.outs.others, start[1:], strict=False):
      self.plan.write_steps(ref, place, time(), [value], jnp.float32)

  def _store_step(self, time, place, gates, new) -> None:
    """Stores the results of a step that no other CTA waits for."""
    plan, outs = self.plan, self.outs
    if plan.save:
      plan.write_kept(outs.gates, place, time, gates)
    for ref, value in zip(outs.carries, new, strict=False):
      plan.write_steps(ref, place, time, [value], plan.call.out_dtype)


class _Streamed(_Warpgroup):
  """The work of one warpgroup where R streams from the L2 cache."""

  def __init__(self, plan, ins: Inputs, outs: Outputs, counters, buffers, own):
    super().__init__(plan, ins, outs, counters, own)
    self.tiles = plan.tiles
    arrivals = self.tiles.arrivals
    self.products = products.Products(
        plan=plan,
        first=0,
        steps=plan.time,
        operand=self._operand,
        matrix=plan.slice_of(ins.matrix),
        early_operand=self._source,
        between=self._take if plan.takes else None,
        wait=lambda s, tile: counters.wait(tile.counter, (s + 1) * arrivals),
        prefetch=self._prefetch,
        buffers=buffers,
        warpgroup=own,
    )

  def _operand(self, step, tile, k) -> Ref:
    first = tile.head * self.plan.size + k * plan_lib.DEPTH
    return self._slice_of_h(step, tile, first)

  def _source(self, step, tile, k):
    rows = pl.ds(tile.row, self.plan.config.rows)
    columns = pl.ds(k * plan_lib.DEPTH, plan_lib.DEPTH)
    return self.plan.slice_of_step(self.ins.source, step, rows, columns)

  def _prefetch(self, step, tile) -> None:
    if self.plan.depth:
      return
    size = jnp.dtype(self.plan.x_dtype).itemsize
    streams = [(self.ins.x, self.plan.gates, size)]
    self.plan.prefetch(streams, tile, self.own, self.plan.time_of(step))

  def run(self) -> None:
    plan, tiles = self.plan, self.tiles

    @pl.loop(0, tiles.count())
    def _(i):
      tile = tiles.find(i)
      for index in plan.parts:
        place = fragments.Place.of(tiles, tile, self.own, *index)
        carry = plan.read_rows(self.ins.carry, place, plan.states)
        start = self._restarted(jnp.int32(0), place, carry)
        self._store_h(jnp.int32(0), plan.time_of, place, start[0])
        self._store_carry(jnp.int32(0), place, start)
      self.counters.publish(tile.counter, self.own)

    self.products.for_each(self._finish, self._prepare)

  def _prepare(self, s, tile):
    """Starts to read the arrays of the first part."""
    place = fragments.Place.of(self.tiles, tile, self.own, 0, 0)
    return self._load(s, place)

  def _take(self, s, tile, product) -> tuple[Any, Array]:
    """Takes the inputs that are in no sum out of W x, and stores them.

    Their columns are of R h from then on.
    """
    plan = self.plan
    taken = []
    for index, gates in plan.with_gates(fragments.parts(product)):
      words = [fragments.pack(gates[j], plan.x_dtype) for j in plan.apart]
      taken.append([plan_lib.Loaded(w, plan.x_dtype) for w in words])
      if plan.save:
        place = fragments.Place.of(self.tiles, tile, self.own, *index)
        plan.write_words(self.outs.alone, place, plan.time_of(s), words)
    groups = plan.config.groups
    columns = [j * groups + i for j in plan.apart for i in range(groups)]
    return taken, fragments.cleared(product, columns, s - plan.time)

  def _finish(self, s, tile, product, prepared, taken=()) -> None:
    """Updates a tile, and publishes h before it stores all else."""
    parts = list(self.plan.with_gates(fragments.parts(product)))
    place = lambda i: fragments.Place.of(
        self.tiles, tile, self.own, *parts[i][0]
    )
    all_loaded = self.plan.in_order(
        prepared, lambda i: self._load(s, place(i)), len(parts)
    )
    updated = [
        self._update_part(s, place(i), parts[i][1], taken[i] if taken else x, c)
        for i, (x, c) in all_loaded
    ]
    self.counters.publish(tile.counter, self.own)
    for i, results in enumerate(updated):
      self._store(s, place(i), *results)

  def _load(self, s, place) -> tuple[Any, Any]:
    """Starts to read the inputs and the carry of a step."""
    plan, ins, outs = self.plan, self.ins, self.outs
    time = plan.time_of(s)
    gates = 0 if plan.depth else plan.gates
    x = plan.load_steps(ins.x, place, time, gates, plan.x_dtype)
    start: list[Any] = []
    for i, needed in enumerate(plan.needed):
      if not needed:
        start.append(None)
      elif plan.save and i:
        others = outs.others[i - 1]
        start += plan.load_steps(others, place, time, 1, jnp.float32)
      else:
        start.append(plan.load_row(outs.state, place, i))
    return x, start

  def _update_part(self, s, place, h_gates, x, start) -> tuple[Any, Any, Any]:
    """Returns kept gates, the carry after a step, and the next one's start.

    The h of that is stored.
    """
    plan = self.plan
    zeros = ptx.full(fragments.UNITS, 0.0)
    theta = plan.read_theta(self.ins.theta, place)
    x = tuple(gate.value() for gate in x)
    start = tuple(zeros if c is None else c.value() for c in start)
    time = lambda: plan.time_of(s)
    new, following = self._step(s, time, place, theta, x, h_gates, start)
    pl.when(s + 1 < plan.time)(
        lambda: self._store_h(s + 1, plan.time_of, place, following[0])
    )
    return self._kept(x, h_gates), new, following

  def _store_carry(self, s, place, start) -> None:
    """Stores the carry that step s starts from, but for the operand."""
    plan, outs = self.plan, self.outs
    own = [n and not (plan.save and i) for i, n in enumerate(plan.needed)]
    plan.write_rows(outs.state, place, start, own)
    self._store_others(lambda: plan.time_of(s), place, start)

  def _store(self, s, place, gates, new, start) -> None:
    """Stores the results of step s that no other CTA waits for."""
    plan = self.plan
    self._store_step(plan.time_of(s), place, gates, new)
    last = s == plan.time - 1
    pl.when(last)(lambda: plan.write_rows(self.outs.last, place, new))
    pl.when(jnp.logical_not(last))(
        lambda: self._store_carry(s + 1, place, start)
    )


class _OnChip(_Warpgroup):
  """The work of one warpgroup where a CTA has its part of R."""

  def __init__(self, plan, ins: Inputs, outs: Outputs, counters, buffers, own):
    super().__init__(plan, ins, outs, counters, own)
    self.tile = tile = plan.tiles.find()
    self.parts = [
        on_chip.Part.of(plan.tiles, tile, own, i)
        for i in range(plan.config.parts)
    ]
    arrivals = plan.tiles.arrivals
    self.sums = on_chip.Sums(plan.config, buffers.operand.ref)
    self.products = on_chip_products.Products(
        plan=plan,
        first=0,
        steps=plan.time,
        operand=lambda s, k: self._slice_of_h(s, tile, k * plan_lib.DEPTH),
        matrix=plan.slice_of_tile(ins.matrix, tile),
        wait=lambda s: counters.wait(tile.counter, (s + 1) * arrivals),
        send=self.sums.put,
        buffers=buffers,
    )

  def run(self) -> None:
    if self.plan.config.low:
      one = (ptx.thread() == 0) & (self.own == 0)
      self.products.open(one.astype(jnp.int32))
      sync.barrier(self.plan.config.warpgroups)
    self.products.run(self.own, self._run_updates)

  def _run_updates(self) -> None:
    """The work of a warpgroup that updates."""
    plan = self.plan
    first = jnp.int32(0)
    carries = []
    for part in self.parts:
      given = plan.read_rows(self.ins.carry, part.place, plan.states)
      start = self._restarted(first, part.place, given)
      self._store_h(first, self._time_of, part.place, start[0])
      carries.append(tuple(map(fragments.laid_out, start)))
    on_chip.publish(self.counters, self.tile, plan.config.updating)
    for part, start in zip(self.parts, carries, strict=True):
      self._store_carry(first, part.place, start)
    lax.fori_loop(
        0,
        plan.time,
        lambda s, carries: self._all_parts(s.astype(jnp.int32), carries),
        tuple(carries),
    )

  def _time_of(self, s) -> Any:
    """Returns the time of step s; behind the last step the time of that."""
    return self.plan.time_of(jnp.minimum(s, self.plan.time - 1))

  def _all_parts(self, s, carries: tuple[Carry, ...]) -> tuple[Carry, ...]:
    """Runs step s; returns the carries that the next one starts from."""
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
    following = self._time_of(s + 1)
    for part in self.parts:
      plan.prefetch_part([(ins.x, plan.gates, size)], part.place, following)
    self.sums.wait()
    updated = []
    for part, start, loaded in zip(
        self.parts, carries, all_loaded, strict=True
    ):
      place, gates = part.place, self.sums.gates(part)
      theta, x = loaded[0], tuple(gate.value() for gate in loaded[1])
      new, start = self._step(s, lambda: time, place, theta, x, gates, start)
      going_on = place.only(s + 1 < plan.time)
      self._store_h(s + 1, self._time_of, going_on, start[0])
      updated.append((self._kept(x, gates), new, start))
    on_chip.publish(self.counters, self.tile, plan.config.updating)
    for part, results in zip(self.parts, updated, strict=True):
      self._store(s, part.place, *results)
    return tuple(
        tuple(map(fragments.laid_out, start)) for _, _, start in updated
    )

  def _store(self, s, place, gates, new, start) -> None:
    """Stores the results of step s that no other CTA waits for."""
    plan = self.plan
    self._store_step(plan.time_of(s), place, gates, new)
    last = s == plan.time - 1
    plan.write_rows(self.outs.last, place.only(last), new)
    self._store_carry(s + 1, place.only(jnp.logical_not(last)), start)

  def _store_carry(self, s, place, start) -> None:
    """Stores the carry that step s starts from, but for the operand."""
    time = self._time_of(s)
    self._store_others(lambda: time, place, start)
