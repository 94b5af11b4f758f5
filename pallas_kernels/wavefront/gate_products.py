"""The gates W x of all levels, chunk by chunk.

A CTA has some columns of one level's W in shared memory, for the whole
sequence. A product has 64 rows: some rows of the batch at a few times. Two
warpgroups multiply in turns:

    two warps    x, or the outputs of the level below -> slots   ==arrived==>
                 wait for outputs, and for free slots            <==free==
    multiply     slice by slice; store the gates; count them

The CTAs of a cluster have the same rows. Each reads a part of every slice, and
sends it to all, which halves what the L2 cache has to deliver.

Tensor cores and shared memory are also the recurrence's, whose steps wait for
each other. So slices give way to it when it multiplies, and gates run only a
few chunks ahead of their recurrence: benchmarks/tuning_wavefront_h200.json has
what that brings.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.wavefront import chunks as chunks_lib
from pallas_kernels.wavefront import plan as plan_lib

Array = jax.Array
Ref = Any

# Warps that copy slices: one alone would be too slow.
COPIERS = 2

# Warps of a warpgroup, each of which frees a slot.
_WARPS = 4

# Barriers of the warpgroups that multiply. Pallas uses the first few of the
# sixteen, and 15 is the recurrence's.
_BARRIERS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Shared memory of the products.

  Attributes:
    matrix: W of the CTA's columns, transposed, [turns, columns, DEPTH].
    slices: of x, a ring buffer, [stages, ROWS, DEPTH].
    free: mbarriers, a slot is free in all CTAs of the cluster.
    loaded: mbarrier, the matrix is there.
    arrived: mbarriers, a slot is full, for each warpgroup that multiplies.
  """

  matrix: Ref
  slices: Ref
  free: Ref
  loaded: Ref
  arrived: tuple[Ref, ...]

  @classmethod
  def types(cls, plan: plan_lib.Plan) -> list[Any]:
    """Returns the types of the buffers."""
    matrices = functools.partial(wgmma_smem.matrices, dtype=plan.dense.dtype)
    arrived = plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages)
    return [
        matrices(plan.turns, plan.columns, plan_lib.DEPTH),
        matrices(plan.stages, plan_lib.ROWS, plan_lib.DEPTH),
        plgpu.SMEM((2 * plan.stages,), jnp.int32),
        plgpu.Barrier(num_arrivals=plan.turns),
        *[arrived] * plan_lib.CONSUMERS,
    ]

  @classmethod
  def of(cls, refs) -> 'Buffers':
    """Returns the buffers of references to them."""
    matrix, slices, free, loaded, *arrived = refs
    return cls(
        matrix=matrix,
        slices=slices,
        free=free,
        loaded=loaded,
        arrived=tuple(arrived),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of one CTA.

  Attributes:
    plan: static facts.
    x: inputs of the lowest level.
    below: outputs of all levels but the highest.
    gates: of all levels, which are written.
    kernels: W of each level, transposed, [G F, I].
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
    arrivals = _WARPS * plan_lib.MEMBERS
    counts = (arrivals,) * self.plan.stages
    sync.make_signals(self.buffers.free, counts, where)

  @property
  def _count(self) -> int:
    """Number of products."""
    return self.plan.chunks.count * self.plan.parts

  @property
  def _turns(self):
    """Slices of this level's inputs."""
    below = pl.cdiv(self.plan.dense.shape.row, plan_lib.DEPTH)
    lowest = pl.cdiv(self.plan.inputs, plan_lib.DEPTH)
    return jnp.where(self.level == 0, jnp.int32(lowest), jnp.int32(below))

  def _find(self, n) -> tuple[Any, Any]:
    """Returns the chunk of the n-th product, and which part of the batch."""
    chunk = lax.div(n, jnp.int32(self.plan.parts))
    return chunk, n - chunk * self.plan.parts

  def load(self) -> None:
    """Copies W to shared memory; one warpgroup calls it."""
    plan = self.plan
    rows = pl.ds(self.block * plan.columns, plan.columns)

    def load(ref):
      for k in range(plan.turns):
        columns = pl.ds(k * plan_lib.DEPTH, plan_lib.DEPTH)
        plgpu.copy_gmem_to_smem(
            ref.at[rows, columns],
            wgmma_smem.for_tma(self.buffers.matrix, (k,), False),
            self.buffers.loaded,
        )

    for level, ref in enumerate(self.kernels):
      pl.when(self.level == level)(functools.partial(load, ref))

  def copy(self, number: int) -> None:
    """Fills slots of the ring buffer; each of `COPIERS` warps calls it.

    Args:
      number: of the warp among them.
    """
    plan, runners = self.plan, self.plan.runners_of_level

    @pl.loop(0, self._count)
    def _(n):
      n = n.astype(jnp.int32)
      chunk, part = self._find(n)
      lowest = self.level == 0
      level = jnp.maximum(self.level - 1, 0)

      # Gates take the place of earlier ones, which have been read.
      @pl.when(chunk >= plan_lib.CHUNKS_OF_GATES)
      def _():
        earlier = chunk - plan_lib.CHUNKS_OF_GATES
        index = self.counters.outputs(self.level, earlier)
        self.counters.wait(index, runners, proxy=False)

      @pl.when(~lowest)
      def _():
        index = self.counters.outputs(level, chunk)
        self.counters.wait(index, runners, proxy=True)

      for consumer in range(plan_lib.CONSUMERS):
        own = lax.rem(n, jnp.int32(plan_lib.CONSUMERS)) == consumer
        copy = functools.partial(self._copy_slices, consumer, number, n, part)
        time = plan.chunks.start(chunk)
        kept = time & (plan.windows[1] - 1)
        below = self.below.at[level]
        pl.when(own & lowest)(functools.partial(copy, self.x, time))
        pl.when(own & ~lowest)(functools.partial(copy, below, kept))

  def _copy_slices(self, consumer, number, n, part, ref, time) -> None:
    """Copies a warp's slices of the n-th product."""
    plan, stages = self.plan, jnp.int32(self.plan.stages)
    rows = pl.ds(part * plan.rows, plan.rows)
    times = pl.ds(time, plan.chunks.steps)
    lead = (times, rows) if plan.dense.shape.time_major else (rows, times)
    count = n * self._turns + number
    turn = lax.div(count, stages)

    def copy(i, state):
      slot, turn = state
      k = i.astype(jnp.int32) * COPIERS + number
      sync.await_signal(self.buffers.free, slot, (turn - 1) & 1, scope='cta')
      plgpu.copy_gmem_to_smem(
          ref.at[(*lead, pl.ds(k * plan_lib.DEPTH, plan_lib.DEPTH))],
          self._slot(slot),
          self.buffers.arrived[consumer].at[slot],
          collective_axes='member',
      )
      slot = slot + COPIERS
      again = slot >= stages
      return (
          jnp.where(again, slot - stages, slot),
          jnp.where(again, turn + 1, turn),
      )

    own = lax.div(self._turns - number + COPIERS - 1, jnp.int32(COPIERS))
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

  def multiply(self, consumer: int) -> None:
    """Makes gates; one warpgroup calls it.

    Args:
      consumer: its number among those that multiply.
    """
    plan = self.plan
    thread = (plan.dense.config.warpgroups + consumer) * ptx.LANES
    plgpu.barrier_wait(self.buffers.loaded)

    @pl.loop(0, pl.cdiv(self._count - consumer, plan_lib.CONSUMERS))
    def _(i):
      n = i.astype(jnp.int32) * plan_lib.CONSUMERS + consumer
      chunk, part = self._find(n)
      product = pl.run_scoped(
          functools.partial(self._product, consumer, n),
          plgpu.ACC((plan_lib.ROWS, plan.columns), jnp.float32),
      )
      self._store(product, chunk, part)
      self.counters.add_together(
          self.counters.gates(self.level, chunk), _BARRIERS + consumer, thread
      )

  def _product(self, consumer: int, n, total) -> Array:
    """Returns the n-th product, a warpgroup's own."""
    buffers, stages = self.buffers, self.plan.stages
    first = lax.rem(n * self._turns, jnp.int32(stages))

    def turn(k, slots):
      before, slot = slots
      k = k.astype(jnp.int32)
      plgpu.barrier_wait(buffers.arrived[consumer].at[slot])
      self.words.give_way()
      plgpu.wgmma(total, buffers.slices.at[slot], buffers.matrix.at[k].T)
      # The product of the turn before is done.
      plgpu.wgmma_wait(1)
      self._free(before, k > 0)
      return slot, jnp.where(slot == stages - 1, 0, slot + 1)

    last, _ = lax.fori_loop(0, self._turns, turn, (first, first))
    result = total[...]
    self._free(last, True)
    return result

  def _free(self, slot, where) -> None:
    """Tells all CTAs of the cluster that a slot is free, once for each warp.

    Args:
      slot: its number.
      where: bool, whether it had a slice.
    """
    lane = jnp.where(where, ptx.thread() & 31, plan_lib.MEMBERS)
    sync.arrive_at_all(self.buffers.free, slot, lane, plan_lib.MEMBERS)

  def _store(self, product: Array, chunk, part) -> None:
    """Stores the gates of some rows and times."""
    plan, shape = self.plan, self.plan.dense.shape
    thread = ptx.thread()
    warp, lane = thread >> 5, thread & 31
    column = self.block * plan.columns + (lane & 3) * _UNITS
    window = plan.windows[0]
    start = self.level * (shape.batch * window)
    inner = plan.rows if shape.time_major else plan.chunks.steps
    for half, groups in enumerate(_groups(product, plan.dense.dtype)):
      n = 16 * warp + 8 * half + (lane >> 2)
      where = n >> (inner.bit_length() - 1), n & (inner - 1)
      row, time = where[::-1] if shape.time_major else where
      row = row + part * plan.rows
      time = time + plan.chunks.start(chunk)
      kept = time & (window - 1)
      at = row * window + kept
      if shape.time_major:
        at = kept * shape.batch + row
      at = (start + at) * plan.width + column
      exists = (row < shape.batch) & (time < shape.time)
      for i, words in enumerate(groups):
        inside = exists & (column + i * plan_lib.GROUP < plan.width)
        memory.store_words_gmem(
            self.gates,
            jnp.where(inside, at + i * plan_lib.GROUP, 0),
            words,
            size=2,
            where=inside.astype(jnp.int32),
        )


# Gates side by side that a thread stores.
_UNITS = 8


def _groups(product: Array, dtype) -> list[list[list[Array]]]:
  """Returns eight columns side by side of each group, in 16 bits.

  Tensor cores leave a thread two columns in each eight: those of 2 (l mod 4)
  and the next. Four threads of a row exchange them.

  Args:
    product: float32 [64, columns].
    dtype: of the words.

  Returns:
    For each of a thread's two rows, and each group, four words.
  """
  pairs = product.shape[1] // 4
  one = plgpu.ShapeDtypeStruct((ptx.LANES,), jnp.float32, layout=ptx.layout(1))

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA,), return_type=(one,) * (2 * pairs)
  )
  def elements(_, x):
    return tuple(
        ptx.fragmented(
            [
                vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([i]),
                )
            ],
            jnp.float32,
        )
        for register in x.registers.flat
        for i in range(2)
    )

  values = elements(product)
  # Of eight columns: two of the first row, then two of the other one.
  words = [
      instructions.narrow(low, high, dtype)
      for low, high in zip(values[::2], values[1::2], strict=True)
  ]
  return [
      [_exchange(words[i : i + 8 : 2]) for i in range(half, len(words), 8)]
      for half in range(2)
  ]


def _exchange(words: list[Array]) -> list[Array]:
  """Exchanges words of four lanes: lane i's j-th becomes lane j's i-th."""
  words = list(words)
  for mask in (1, 2):
    upper = (ptx.thread() & mask) != 0
    for i in range(4):
      if i & mask:
        continue
      low, high = words[i], words[i | mask]
      got = instructions.shuffle_word(jnp.where(upper, low, high), mask)
      words[i] = jnp.where(upper, got, low)
      words[i | mask] = jnp.where(upper, high, got)
  return words
