"""The gates W x of all levels, chunk by chunk.

A CTA has 128 columns of one level's W, for the whole sequence: as many in
registers as these hold, and the others in shared memory. It multiplies the
transposed of W by slices of x, which are 64 rows: some rows of the batch at a
few times. Each of two warpgroups has 64 of the columns:

    two warps    x, or the outputs of the level below -> slots   ==arrived==>
                 wait for free slots                             <==free==
    multiply     slice by slice; store the gates
    one warp     waits for outputs of the level below
    one warp     counts gates

So shared memory has to deliver half of a product's operands alone, and has
room for many slices on their way. W comes first, through the slots as well: all
threads copy whole lines of it. The CTAs of a cluster have the same rows. Each
reads a part of every slice, and sends it to all, which halves what the L2 cache
has to deliver. benchmarks/tuning_wavefront_h200.json has other ways.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.wavefront import chunks as chunks_lib
from pallas_kernels.wavefront import operands
from pallas_kernels.wavefront import plan as plan_lib

Array = jax.Array
Ref = Any

# Warps that copy slices: one alone would be too slow.
COPIERS = 2

# Warps of a warpgroup, each of which frees a slot.
_WARPS = 4

# The first of the barriers of warpgroups that multiply, one for each.
_BARRIERS = 12

# The barrier of all of them.
_MEETING = 14

# Cycles that the second of them is behind the first: one stores gates while
# tensor cores are the other's.
_APART = 1500

# Slices of a product that are multiplied at once, so that tensor cores have
# work while a warpgroup waits for the next one.
_IN_FLIGHT = 2

# A part of the gates of the product before is stored after each slice from this
# one on: stores of all at once would leave tensor cores idle.
_FIRST_STORE = 2


class Buffers(NamedTuple):
  """Shared memory of the products.

  Attributes:
    matrix: slices of W that registers do not hold, transposed, [slices, columns
      of the CTA, DEPTH].
    slices: of x, a ring buffer, [stages, ROWS, DEPTH].
    free: mbarriers, a slot is free in all CTAs of the cluster.
    arrived: mbarriers, a slot is full.
  """

  matrix: Ref
  slices: Ref
  free: Ref
  arrived: Ref

  @classmethod
  def types(cls, plan: plan_lib.Plan) -> list[Any]:
    """Returns the types of the buffers."""
    matrices = functools.partial(wgmma_smem.matrices, dtype=plan.dense.dtype)
    columns = plan_lib.CONSUMERS * plan_lib.COLUMNS
    return [
        matrices(max(plan.in_smem, 1), columns, plan_lib.DEPTH),
        matrices(plan.stages, plan_lib.ROWS, plan_lib.DEPTH),
        plgpu.SMEM((2 * plan.stages,), jnp.int32),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of one CTA.

  Attributes:
    plan: static facts.
    x: inputs of the lowest level.
    below: outputs of all levels but the highest.
    gates: of all levels, which are written.
    kernels: W of each level, [G, I, F].
    counters: of all levels.
    words: of the CTA.
    buffers: shared memory.
    level: that it makes gates of.
    block: which of its columns.
  """

  plan: plan_lib.Plan
  x: Ref
  below: Ref
  gates: Ref
  kernels: Sequence[Ref]
  counters: chunks_lib.Counters
  words: chunks_lib.Words
  buffers: Buffers
  level: Any
  block: Any

  def open(self, where) -> None:
    """Makes the mbarriers; before all CTAs meet.

    Args:
      where: int32, not 0 in the one thread that does it.
    """
    arrivals = _WARPS * plan_lib.CONSUMERS * plan_lib.MEMBERS
    counts = (arrivals,) * self.plan.stages
    sync.make_signals(self.buffers.free, counts, where)

  @property
  def _count(self) -> int:
    """Number of products."""
    return self.plan.chunks.count * self.plan.parts

  def _find(self, n) -> tuple[Any, Any]:
    """Returns the chunk of the n-th product, and which part of the batch."""
    chunk = lax.div(n, jnp.int32(self.plan.parts))
    return chunk, n - chunk * self.plan.parts

  def copy(self, number: int) -> None:
    """Fills slots of the ring buffer; each of `COPIERS` warps calls it.

    Args:
      number: of the warp among them.
    """
    plan = self.plan

    @pl.loop(0, self._count)
    def _(n):
      n = n.astype(jnp.int32)
      chunk, part = self._find(n)
      lowest = self.level == 0
      level = jnp.maximum(self.level - 1, 0)
      self.words.wait(chunks_lib.Words.CHUNKS, chunk + 1)
      pl.when(~lowest)(sync.fence_copies)
      copy = functools.partial(self._copy_slices, number, n, part)
      time = plan.chunks.start(chunk)
      kept = time & (plan.windows[1] - 1)
      below = self.below.at[level]
      pl.when(lowest)(functools.partial(copy, self.x, time))
      pl.when(~lowest)(functools.partial(copy, below, kept))

  def _copy_slices(self, number, n, part, ref, time) -> None:
    """Copies a warp's slices of the n-th product."""
    plan, stages = self.plan, jnp.int32(self.plan.stages)
    rows = pl.ds(part * plan.rows, plan.rows)
    times = pl.ds(time, plan.chunks.steps)
    lead = (times, rows) if plan.dense.shape.time_major else (rows, times)
    count = n * plan.turns + number
    turn = lax.div(count, stages)

    def copy(i, state):
      slot, turn = state
      k = i.astype(jnp.int32) * COPIERS + number
      sync.await_signal(self.buffers.free, slot, turn & 1, scope='cta')
      plgpu.copy_gmem_to_smem(
          ref.at[(*lead, pl.ds(k * plan_lib.DEPTH, plan_lib.DEPTH))],
          self._slot(slot),
          self.buffers.arrived.at[slot],
          collective_axes='member',
      )
      slot = slot + COPIERS
      again = slot >= stages
      return (
          jnp.where(again, slot - stages, slot),
          jnp.where(again, turn + 1, turn),
      )

    own = pl.cdiv(plan.turns - number, COPIERS)
    lax.fori_loop(0, own, copy, (count - turn * stages, turn))

  def _slot(self, slot) -> Ref:
    """Returns a slot, to be copied to."""
    plan, ref = self.plan, self.buffers.slices
    lead = plan.rows, plan.chunks.steps
    lead = lead[::-1] if plan.dense.shape.time_major else lead
    # As in `wgmma_smem.for_tma`.
    swizzled, _ = ref.transforms
    untiled = type(ref)(ref.ref, (swizzled,)).at[slot]
    return untiled.reshape(*lead, plan_lib.DEPTH)

  def look_out(self) -> None:
    """Passes on which chunks may be copied and multiplied; one warp does."""
    plan, recurrences = self.plan, self.plan.recurrences

    @pl.loop(0, plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)

      @pl.when(self.level > 0)
      def _():
        index = self.counters.outputs(self.level - 1, chunk)
        self.counters.wait(index, recurrences)

      # Gates take the place of earlier ones, which have been read.
      @pl.when(chunk >= plan_lib.CHUNKS_OF_GATES)
      def _():
        earlier = chunk - plan_lib.CHUNKS_OF_GATES
        index = self.counters.outputs(self.level, earlier)
        self.counters.wait(index, recurrences)

      self.words.put(chunks_lib.Words.CHUNKS, chunk + 1)

  def tell(self) -> None:
    """Counts the gates that all have stored; one warp does."""

    @pl.loop(0, self.plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)
      for consumer in range(plan_lib.CONSUMERS):
        word = chunks_lib.Words.PRODUCTS + consumer
        self.words.wait(word, (chunk + 1) * self.plan.parts, nap=40)
      self.counters.add(self.counters.gates(self.level, chunk))

  def multiply(self, consumer) -> None:
    """Makes gates; each of the warpgroups that multiply calls it.

    Args:
      consumer: its number among them, which is that in the CTA.
    """
    matrix = self._load(consumer)
    pl.when(consumer > 0)(functools.partial(sync.delay, _APART))

    def multiply(n, before):
      n = n.astype(jnp.int32)
      # The next product is under way while the one before is stored.
      stores = self._stores(consumer, before, n - 1)
      product = pl.run_scoped(
          functools.partial(self._product, matrix, n, stores),
          plgpu.ACC((plan_lib.COLUMNS, plan_lib.ROWS), jnp.float32),
      )
      return operands.narrow(product, self.plan.dense.dtype)

    size = plan_lib.COLUMNS * plan_lib.ROWS // (2 * ptx.LANES)
    none = [ptx.full(1, 0, jnp.int32)] * size
    last = lax.fori_loop(0, self._count, multiply, none)
    for store in self._stores(consumer, last, self._count - 1):
      store()

  def stage(self, group, turn: int = 0) -> None:
    """Copies slices of W to the ring buffer, before any of x.

    Args:
      group: number of this warpgroup; for the first turn all of the CTA call
        it, later those that multiply.
      turn: which slices: as many as fit at a time.
    """
    plan = self.plan
    first = turn * plan.staged
    groups = plan_lib.CONSUMERS if turn else plan_lib.WARPGROUPS
    operands.stage(
        self.kernels,
        self.level,
        first * plan_lib.DEPTH,
        min(plan.staged, plan.turns - first) * plan_lib.DEPTH,
        self.block * (plan_lib.CONSUMERS * plan_lib.COLUMNS),
        self.buffers.slices.ref,
        group * ptx.LANES + ptx.thread(),
        groups * ptx.LANES,
        plan.dense.dtype,
    )

  def _load(self, consumer) -> list[Any]:
    """Returns W of a warpgroup's columns, slice by slice, as factors."""
    plan = self.plan
    column = consumer * plan_lib.COLUMNS
    matrix: list[Any] = []
    for k in range(plan.turns):
      turn, place = divmod(k, plan.staged)
      if turn and not place:
        sync.barrier(plan_lib.CONSUMERS, _MEETING)  # All have loaded.
        self.stage(consumer, turn)
        sync.barrier(plan_lib.CONSUMERS, _MEETING)
      slice_ = operands.load(
          self.buffers.slices.ref,
          place * plan_lib.DEPTH,
          column,
          plan.dense.dtype,
      )
      if k < plan.in_registers:
        matrix.append(slice_)
        continue
      columns = pl.ds(column, plan_lib.COLUMNS)
      part = self.buffers.matrix.at[k - plan.in_registers, columns]
      part[...] = slice_
      matrix.append(part)
    plgpu.commit_smem()
    for slot in range(plan.stages):
      self._free(slot)
    return matrix

  def _product(
      self,
      matrix: Sequence[Any],
      n,
      meanwhile: Sequence[Callable[[], None]],
      total,
  ) -> Array:
    """Returns the n-th product, a warpgroup's own columns by ROWS.

    Args:
      matrix: of `_load`.
      n: which one.
      meanwhile: functions that are called while slices are multiplied.
      total: accumulator.
    """
    buffers, stages = self.buffers, self.plan.stages
    taken: list[Any] = []
    waiting = list(meanwhile)
    slot = lax.rem(n * len(matrix), jnp.int32(stages))
    for k, factor in enumerate(matrix):
      plgpu.barrier_wait(buffers.arrived.at[slot])
      plgpu.wgmma(total, factor, buffers.slices.at[slot].T)
      due = 1 if k >= _FIRST_STORE else 0
      if k == len(matrix) - 1:
        due = len(waiting)
      for function in waiting[:due]:
        function()
      del waiting[:due]
      if len(taken) == _IN_FLIGHT:
        plgpu.wgmma_wait(_IN_FLIGHT)
        self._free(taken.pop(0))
      taken.append(slot)
      slot = jnp.where(slot == stages - 1, 0, slot + 1)
    result = total[...]
    for slot in taken:
      self._free(slot)
    return result

  def _free(self, slot) -> None:
    """Tells all CTAs of the cluster that a slot is free, once for each warp."""
    lane = ptx.thread() & 31
    sync.arrive_at_all(self.buffers.free, slot, lane, plan_lib.MEMBERS)

  def _stores(
      self, consumer, words: Sequence[Array], n
  ) -> list[Callable[[], None]]:
    """Returns functions that store the gates of the n-th product, in turn.

    The last one says that all are stored. None are if n is -1.
    """
    plan, shape = self.plan, self.plan.dense.shape
    n = jnp.int32(n)
    chunk, part = self._find(n)
    thread = ptx.thread()
    warp, lane = thread >> 5, thread & 31
    column = self.block * (plan_lib.CONSUMERS * plan_lib.COLUMNS)
    column = column + consumer * plan_lib.COLUMNS
    column = column + 16 * warp + operands.OCTET * (lane & 1)
    window = plan.windows[0]
    start = self.level * (shape.batch * window)
    inner = plan.rows if shape.time_major else plan.chunks.steps

    def store(pair: int) -> None:
      octet = operands.octet(words[4 * pair :][:4])
      place = 16 * pair + operands.OCTET * ((lane & 3) >> 1) + (lane >> 2)
      where = place >> (inner.bit_length() - 1), place & (inner - 1)
      row, time = where[::-1] if shape.time_major else where
      row = row + part * plan.rows
      time = time + plan.chunks.start(chunk)
      kept = time & (window - 1)
      at = row * window + kept
      if shape.time_major:
        at = kept * shape.batch + row
      exists = (row < shape.batch) & (time < shape.time)
      exists &= (column < plan.width) & (n >= 0)
      memory.store_words_gmem(
          self.gates,
          jnp.where(exists, (start + at) * plan.width + column, 0),
          octet,
          size=2,
          where=exists.astype(jnp.int32),
      )

    def tell() -> None:
      sync.barrier(1, _BARRIERS + consumer)  # All have stored.
      one = (ptx.thread() == 0).astype(jnp.int32)
      self.words.put_by(one, chunks_lib.Words.PRODUCTS + consumer, n + 1)

    pairs = range(len(words) // 4)
    return [*(functools.partial(store, pair) for pair in pairs), tell]
