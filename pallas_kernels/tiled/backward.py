"""The kernel that runs the adjoint of a recurrence in tiles, R' streaming.

The loop runs against the order of the recurrence. A tile of step t is, for some
rows and units, the cotangent of the carry that step t + 1 started from: R'
d_gates of that step, and the part that its update passed on. Downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    wait: counter of the row block         first slices of R' -> ring buffer
                                           first slices of d_gates[t+1]
    multiply slices as they arrive         all further slices
    for each part of the tile:             first slices of R', for step t - 1
      read inputs, R h and carries of t
      pull the cotangent through update
      store d_x[t], d_gates[t]
    add one to the counter

After the first step one more product gives the cotangent of the carry before.
Few tiles leave CTAs without one. Then a team of CTAs has a tile: each sums over
a part of the gates, and finishes some parts of the tile (`_Team`).
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import kernel_call
from pallas_kernels.tiled import plan as plan_lib
from pallas_kernels.tiled import products

Array = jax.Array
Ref = Any


class Inputs(NamedTuple):
  """Arrays in device memory that are read.

  Attributes:
    theta: float32 [P, F].
    x: inputs of all steps that are in no sum, [B, T, K F], or None.
    matrix: R transposed, as `plan.arrange` orders it.
    h: h that every step starts from, 16 bits, [B, T, F].
    others: other arrays that every step starts from, each [B, T, F].
    gates: gates of every step in `Plan.kept_dtype`, [B, T, G' F].
    d_carries: cotangents of the outputs, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, F].
    flags: int32 [T, B], or None.
  """

  theta: Any
  x: Any
  matrix: Any
  h: Any
  others: tuple[Any, ...]
  gates: Any
  d_carries: tuple[Any, ...]
  d_last: Any
  flags: Any


class Outputs(NamedTuple):
  """Arrays in device memory that are written.

  Attributes:
    d_x: cotangents of the inputs, [B, T, G F].
    d_gates: cotangents of R h, [B, T, G' F], or None where they are `d_x`.
    d_carry: cotangent of the carry before the first step, float32 [S, B, F];
      until then of the carry of the current step.
    d_theta: cotangents of theta, to be summed over rows, float32 [rows, P, F].
    d_restart: float32 [S, B, F], or None without flags.
  """

  d_x: Any
  d_gates: Any
  d_carry: Any
  d_theta: Any
  d_restart: Any


class Loaded(NamedTuple):
  """A part of a step that is on its way.

  Attributes:
    x: inputs that are in no sum.
    gates: R h and sums.
    start: the carry that the step starts from.
    d_outputs: cotangents of its outputs.
  """

  x: Any
  gates: Any
  start: Any
  d_outputs: Any


def out_type(plan: plan_lib.Plan, sums: int) -> Outputs:
  """Returns the types of a kernel's outputs.

  Args:
    plan: static facts of the kernel.
    sums: cotangents of theta that are left to be added up.
  """
  float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  rows = float32(plan.states, plan.batch, plan.features)
  return Outputs(
      d_x=plan.steps_type(plan.dtype, plan.gates),
      d_gates=None
      if plan.shared
      else plan.steps_type(plan.dtype, plan.recurrent),
      d_carry=rows,
      d_theta=float32(sums, max(plan.params, 1), plan.features),
      d_restart=rows if plan.flags else None,
  )


@functools.partial(jax.jit, static_argnums=0)
def backward(plan: plan_lib.Plan, inputs: Inputs) -> Outputs:
  """Runs the adjoint."""
  octets = plan.tiles.row_blocks * plan.config.rows // 8
  types = products.Buffers.types(plan.config, plan.columns, plan.dtype)
  if plan.config.members > 1:
    types['sums'] = plgpu.SMEM((plan.config.sum_words,), jnp.int32)
    types['signal'] = plgpu.SMEM((sync.SIGNAL_WORDS,), jnp.int32)
  return kernel_call.run(
      plan,
      'tiled_recurrence_adjoint',
      _Streamed,
      products.Buffers,
      types,
      inputs=inputs,
      out_type=out_type(plan, octets),
  )


class Warpgroup:
  """The work of one warpgroup, as far as both kernels share it."""

  def __init__(self, plan, ins: Inputs, outs: Outputs, counters, own):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.counters, self.own = counters, own
    # A larger error would show: derivatives multiply rounded values.
    self._accuracy = plan.accuracy(2**-22)
    linearise = lambda *args: jax.vjp(plan.update_of_kept, *args)[1]
    self._linearise = cells.legalize(linearise, self._accuracy)

  @property
  def _d_gates(self) -> Ref:
    return self.outs.d_x if self.plan.shared else self.outs.d_gates

  def _streams(self) -> list[tuple[Any, int, int]]:
    """Returns the arrays that a step reads, for `Plan.prefetch`."""
    plan, ins = self.plan, self.ins
    out = jnp.dtype(plan.call.out_dtype).itemsize
    alone = len(plan.alone)
    inputs = [(ins.x, alone, jnp.dtype(plan.x_dtype).itemsize)] if alone else []
    return [
        *inputs,
        (ins.gates, plan.recurrent, plan.kept_dtype.itemsize),
        (ins.h, 1, 2),
        *((ref, 1, 4) for ref in ins.others),
        *((ref, 1, out) for ref in ins.d_carries),
    ]

  def _load_step(self, time, place) -> Loaded:
    """Starts to read the arrays of a part."""
    plan, ins = self.plan, self.ins
    load = lambda ref, gates, dtype: plan.load_steps(
        ref, place, time, gates, dtype
    )
    return Loaded(
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

  def _restarts(self, s, place) -> Array:
    """Returns where the carry restarted after step s of the loop."""
    plan = self.plan
    time = plan.time_of(jnp.maximum(s - 1, 0))
    again = plan.read_flag(self.ins.flags, place, time, step_flags.RESET)
    return again & (s > 0)

  def _pull_step(
      self, d_carry, d_outputs, hold: Callable[[], Any], pull: Callable[[], Any]
  ) -> tuple[Any, Any, Any, Any]:
    """Pulls the cotangent of a carry back through a step.

    Args:
      d_carry: cotangent of the carry after the step.
      d_outputs: cotangents of the step's outputs.
      hold: () -> where the carry is held, or None.
      pull: () -> the pullback of the update.

    Returns:
      The cotangents of theta, of the inputs, of R h and of the carry before.
    """
    plan, zeros = self.plan, (0.0,) * self.plan.states
    for i, d in enumerate(d_outputs):
      d_carry = (*d_carry[:i], d_carry[i] + d, *d_carry[i + 1 :])
    held = hold()
    d_new = step_flags.select(held, zeros, d_carry)
    d_theta, d_x, d_gates, d_start = cells.pull(pull(), d_new, self._accuracy)
    d_x = plan.input_gates(d_x, d_gates)
    if held is not None:
      passed = step_flags.select(held, d_carry, zeros)
      d_start = tuple(map(jnp.add, d_start, passed))
    return d_theta, d_x, d_gates, d_start

  def _write_gates(self, time, place, d_x, d_gates) -> None:
    plan = self.plan
    plan.write_steps(self.outs.d_x, place, time, d_x, plan.dtype)
    if not plan.shared:
      plan.write_steps(self.outs.d_gates, place, time, d_gates, plan.dtype)


class _Team:
  """A team of CTAs, each with a part of the sums of one tile.

  Every CTA leaves its sums in the shared memory of those that finish them, and
  nobody sends again before all have read: the next operand needs every part.

  Args:
    config: how the work is cut.
    buffers: shared memory.
    warpgroup: number of this warpgroup.
  """

  def __init__(self, config, buffers: products.Buffers, warpgroup):
    self.config, self.ref, self.signal = config, buffers.sums, buffers.signal
    self.member = jax.lax.axis_index('member')
    self._thread = ptx.thread() + warpgroup * ptx.LANES
    self._one = (self._thread == 0).astype(jnp.int32)

  def open(self) -> None:
    sync.make_signals(self.signal, (1,), self._one)
    sync.cluster_barrier()

  def _at(self, member, index: int, half: int) -> Array:
    """Returns where a member's sums lie with the CTA that finishes them."""
    place = (member * self.config.parts + index) * 2 + half
    return (place * (self.config.warpgroups * ptx.LANES) + self._thread) * 16

  def send(self, product_parts: list[Array]) -> None:
    """Sends every part to the member that finishes it."""
    all_threads = ptx.full(1, 1, jnp.int32)
    for i, part in enumerate(product_parts):
      rank, index = divmod(i, self.config.parts)
      words = [instructions.as_word(x) for x in ptx.unstack(part)]
      for half in range(2):
        sync.send(
            self.ref,
            self._at(self.member, index, half),
            words[4 * half : 4 * half + 4],
            self.signal,
            0,
            jnp.int32(rank),
            all_threads,
        )
    sync.expect(self.signal, 0, jnp.int32(4 * self.config.sum_words), self._one)

  def wait(self, count) -> None:
    """Waits until all members have sent so many times, one or more."""
    sync.await_signal(self.signal, 0, (count - 1) & 1)

  def total(self, index: int) -> Array:
    """Returns the sum of all members for a part, float32 [8 * 128]."""
    sums = []
    for sender in range(self.config.members):
      places = [self._at(sender, index, half) for half in range(2)]
      words = [w for at in places for w in memory.load_words_smem(self.ref, at)]
      sums.append(ptx.stack([instructions.as_float(word) for word in words]))
    return functools.reduce(jnp.add, sums)


class _Streamed(Warpgroup):
  """The work of one warpgroup."""

  def __init__(self, plan, ins: Inputs, outs: Outputs, counters, buffers, own):
    super().__init__(plan, ins, outs, counters, own)
    self.tiles = plan.tiles
    arrivals = self.tiles.arrivals
    never = plan.call.stop_recurrent_gradient
    self.team, self._first = None, jnp.int32(0)
    if plan.config.members > 1:
      self.team = _Team(plan.config, buffers, own)
      self._first = self.team.member * plan.turns
    matrix = plan.slice_of(ins.matrix)
    self.products = products.Products(
        plan=plan,
        first=plan.time + 1 if never else 1,
        steps=plan.time + 1,
        operand=self._operand,
        matrix=lambda tile, k: matrix(tile, self._first + k),
        wait=lambda s, tile: counters.wait(tile.counter, s * arrivals),
        prefetch=self._prefetch,
        buffers=buffers,
        warpgroup=own,
    )

  def _operand(self, step, tile, k):
    plan, k = self.plan, self._first + k
    slices = plan.size // plan_lib.DEPTH
    gate = jax.lax.div(k, jnp.int32(slices))
    first = gate * plan.features + tile.head * plan.size
    first = first + (k - gate * slices) * plan_lib.DEPTH
    rows = pl.ds(tile.row, plan.config.rows)
    columns = pl.ds(first, plan_lib.DEPTH)
    return plan.slice_of_step(self._d_gates, step - 1, rows, columns)

  def _prefetch(self, step, tile) -> None:
    plan = self.plan
    # After the last step nothing is read.
    time = plan.time_of(jnp.minimum(step, plan.time - 1))
    plan.prefetch(self._streams(), tile, self.own, time)

  def run(self) -> None:
    plan, tiles = self.plan, self.tiles
    if self.team:
      self.team.open()

    @pl.loop(0, tiles.count())
    def _(i):
      tile = tiles.find(i)
      zero = ptx.full(fragments.UNITS, 0.0)
      for index in range(plan.config.parts):
        place = self._place(tile, index)
        d_last = plan.read_rows(self.ins.d_last, place, plan.states)
        plan.write_rows(self.outs.d_carry, place, d_last)
        if plan.flags:
          plan.write_rows(self.outs.d_restart, place, [zero] * plan.states)
        for row in range(plan.params):
          at = self._theta_at(tile, index, row)
          zeros = ptx.full(1, 0.0)
          memory.store_gmem(self.outs.d_theta, at, zeros, jnp.float32)

    self.products.for_each(self._finish, self._prepare)
    if self.team:  # No CTA ends while others send to it.
      sync.cluster_barrier()

  def _index(self, i: int) -> tuple[Any, Any]:
    """Returns the group and the row of the i-th part of this CTA."""
    number = jnp.int32(i)
    if self.team:
      number = number + self.team.member * self.plan.config.parts
    return number >> 1, number & 1

  def _place(self, tile, i: int) -> fragments.Place:
    return fragments.Place.of(self.tiles, tile, self.own, *self._index(i))

  def _theta_at(self, tile, i: int, row: int) -> Array:
    """Returns where this thread's sum over eight rows of its warp is."""
    plan = self.plan
    octet = jax.lax.div(tile.row, jnp.int32(8)) + self.own * 8
    octet = octet + (ptx.thread() >> 5) * 2 + self._index(i)[1]
    at = (octet * max(plan.params, 1) + row) * plan.features
    return at + self._place(tile, i).feature + fragments.unit()

  def _prepare(self, s, tile):
    """Starts to read the arrays of the first part."""
    return self._load(s, self._place(tile, 0))

  def _finish(self, s, tile, product, prepared) -> None:
    plan, team = self.plan, self.team
    sums, own = fragments.parts(product), s >= self.products.first
    if team:
      pl.when(own)(lambda: team.send(sums))
    all_loaded = plan.in_order(
        prepared,
        lambda i: self._load(s, self._place(tile, i)),
        plan.config.parts,
    )
    begins = s < plan.time
    for i, (loaded, d_carry) in all_loaded:
      if team and not i:
        pl.when(own)(lambda: team.wait(s))
      # Nothing was sent before the first product.
      d_h = jnp.where(own, team.total(i), 0) if team else sums[i]
      place = self._place(tile, i)
      d_carry = self._close(s, place, d_h, d_carry)
      pull = functools.partial(self._pull, s, tile, i, d_carry, loaded)
      end = functools.partial(
          plan.write_rows, self.outs.d_carry, place, d_carry
      )
      pl.when(begins)(pull)
      pl.when(jnp.logical_not(begins))(end)
    self.counters.publish(tile.counter, self.own)

  def _load(self, s, place) -> tuple[Loaded, Any]:
    """Starts to read a part for step s of the loop, and the carry's cotangent.

    The product is still to be added to that.
    """
    plan = self.plan
    time = plan.time_of(jnp.minimum(s, plan.time - 1))
    first = ptx.full(1, 1, jnp.int32) * (s == 0).astype(jnp.int32)
    loaded = self._load_step(time, place)
    # An update that needs no such array passes no cotangent on.
    d_carry = tuple(
        plan.load_row(self.outs.d_carry, place, i, None if needed else first)
        for i, needed in enumerate(plan.needed)
    )
    return loaded, d_carry

  def _close(self, s, place, d_h, d_carry) -> tuple[Array, ...]:
    """Returns the cotangent of the carry after step s of the loop."""
    plan, outs = self.plan, self.outs
    d_start = tuple(x.value() for x in d_carry)
    if not plan.call.stop_recurrent_gradient:
      d_start = (d_start[0] + plan.call.bounded(d_h), *d_start[1:])
    if not plan.flags:
      return d_start
    again = self._restarts(s, place)
    d_restart = plan.read_rows(outs.d_restart, place, plan.states)
    zeros = (0.0,) * plan.states
    d_in = step_flags.select(again, d_start, zeros)
    plan.write_rows(outs.d_restart, place, map(jnp.add, d_restart, d_in))
    return step_flags.select(again, zeros, d_start)

  def _pull(self, s, tile, i: int, d_carry, loaded) -> None:
    """Pulls a part's cotangents back through step s of the loop."""
    plan, ins, place = self.plan, self.ins, self._place(tile, i)
    time = plan.time_of(s)
    theta = plan.read_theta(ins.theta, place)
    hold = None
    if plan.flags:
      hold = plan.read_flag(
          ins.flags, place, time, step_flags.HOLD, fragments.UNITS // 2
      )
    # Four units at a time have their intermediate results in registers.
    halves = _in_halves((theta, d_carry, loaded))
    pulled = [self._pull_half(hold, *half) for half in halves]
    d_theta, d_x, d_gates, d_start = jax.tree.map(
        lambda *x: ptx.stack([v for y in x for v in _units(y)]), *pulled
    )
    self._write_gates(time, place, d_x, d_gates)
    plan.write_rows(self.outs.d_carry, place, d_start, plan.needed)
    self._add_theta(tile, i, d_theta)

  def _pull_half(self, hold, theta, d_carry, loaded) -> Any:
    """Returns the cotangents of four units' arguments."""
    d_theta, d_x, d_gates, d_start = self._pull_step(
        d_carry,
        loaded.d_outputs,
        lambda: hold,
        lambda: self._linearise(theta, loaded.x, loaded.gates, loaded.start),
    )
    return d_theta, d_x, () if self.plan.shared else d_gates, d_start

  def _add_theta(self, tile, i: int, d_theta) -> None:
    """Adds the sums over eight rows, of which this thread has one."""
    valid = self._place(tile, i).valid != 0
    for row, d in enumerate(d_theta):
      # A row that is not there repeats the last one.
      values = [jnp.where(valid, v, 0) for v in ptx.unstack(d)]
      at = self._theta_at(tile, i, row)
      fragments.add(self.outs.d_theta, at, fragments.sum_rows(values))


def _units(x: Array) -> list[Array]:
  """Returns each unit of four, float32 [128]."""
  # A value that is equal in all threads may have no layout.
  return ptx.unstack(plgpu.layout_cast(x, ptx.layout(fragments.UNITS // 2)))


def _in_halves(tree: Any) -> list[Any]:
  """Cuts parts, loaded or not, into their first and last four units."""
  half = fragments.UNITS // 2

  def cut(x):
    if isinstance(x, plan_lib.Loaded):
      return x.halves()
    x = plgpu.layout_cast(x, ptx.layout(fragments.UNITS))
    units = ptx.unstack(x)
    return [ptx.stack(units[:half]), ptx.stack(units[half:])]

  leaves, structure = jax.tree.flatten(
      tree, is_leaf=lambda x: isinstance(x, plan_lib.Loaded)
  )
  pairs = [cut(x) for x in leaves]
  return [
      jax.tree.unflatten(structure, [pair[i] for pair in pairs])
      for i in range(2)
  ]
