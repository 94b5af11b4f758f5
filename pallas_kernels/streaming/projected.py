"""Linear recurrences of projected inputs: x W and the scan in one kernel.

A linear cell's gates are free of h, so all they need of the input is W x_t. A
product and a scan one after the other write these pre-activations to device
memory and read them again. Here they go from the tensor cores to the scan
through shared memory, and while one block of steps is scanned the next one is
multiplied.

A block is 128 steps of 128 features of one sequence, with all gates. CTAs take
one block after the other in the order of time. What they need of the block
before is the h that it ends with, which comes through device memory from a CTA
that is done with it or at work on it. A CTA is four warpgroups: two multiply
half a block each, one scans, one loads x and W. They tell each other by
barriers which buffers are full and which are free.

Products are `wgmma`, Hopper's: 16-bit operands, float32 sums. Pre-activations
are rounded to 16 bits, as between two kernels.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import handoff_ctas
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import time_blocks
from pallas_kernels.streaming import wgmma_smem

Array = jax.Array
Plan = kernel_call.Plan
Ref = Any

LANES = time_blocks.LANES

# More gates have no place in registers.
MOST_GATES = 2

# Steps of a block, and of the half of it that one warpgroup multiplies.
BLOCK, _HALF = 128, 64

# Steps that are scanned at a time.
_ROWS = 16

# How many inputs are multiplied at a time, and how many times that is on its
# way from device memory. It leaves 2 KiB of shared memory.
_DEPTH, _STAGES = wgmma_smem.WIDTH, 3

# Registers of a thread that multiplies, scans and loads. In all warpgroups
# together there are 512; 88 to 136 for the scan made no difference.
_MULTIPLYING, _SCANNING, _LOADING = 176, 120, 40

# To a `Walk`, the steps that are scanned at a time are a segment of a block.
CONFIG = time_blocks.Config(_ROWS, 1, BLOCK // _ROWS, _STAGES)


def forward(
    plan: Plan,
    ctas: int,
    params: Array,
    x: Array,
    kernel: Array,
    h0: Array,
    restart: Array,
    flags: Array,
    keep: bool,
) -> tuple[Array, Array, Array | None]:
  """Runs the recurrence.

  Args:
    plan: what is static, with `CONFIG`.
    ctas: how many CTAs there may be on the device at once.
    params: [plan.params, Fp], with Fp the padded features.
    x: [B, T, I], 16-bit.
    kernel: W, [G, I, F].
    h0: as for `linear.forward`, and so are restart and flags.
    restart: [B, Fp].
    flags: int32 [B, T].
    keep: whether to return the pre-activations.

  Returns:
    h, [B, T, F] in x's dtype; h after the last step, float32 [B, Fp]; the
    pre-activations W x, [B, T, G, F], if `keep`, else None.
  """
  layout, interpret = plan.layout, plan.interpret is not None
  gates, depth, features = kernel.shape
  work = _Work(layout, plan.reverse, 1 if interpret else ctas)
  # TMA wants rows of x to start at multiples of 16 bytes, and W to consist of
  # tiles of 8 rows. Interpret mode knows no copies that reach beyond an array.
  aligned = time_blocks.round_up(depth, _DEPTH if interpret else 8)
  weights = _arrange(kernel.astype(x.dtype), aligned)
  x = layout.widen(time_blocks.pad_features(x, aligned))
  matrices = lambda *shape: wgmma_smem.matrices(*shape, dtype=x.dtype)
  small = (layout.batch, layout.padded)
  outputs = [
      jax.ShapeDtypeStruct(layout.shape, x.dtype),
      jax.ShapeDtypeStruct(small, jnp.float32),
      jax.ShapeDtypeStruct((work.waves, *small), jnp.float32),
  ]
  if keep:
    shape = (*layout.shape[:2], gates, features)
    outputs.append(jax.ShapeDtypeStruct(shape, x.dtype))

  def projected_linear_recurrence(*refs):
    operands, results = refs[:6], refs[6 : 6 + len(outputs)]
    scratch = refs[6 + len(outputs) :]
    roles = _Roles(plan, work, gates, depth, operands, results, *scratch)
    warpgroup = lax.axis_index('warpgroup')
    pl.when(warpgroup < 2)(lambda: roles.multiply(warpgroup))
    pl.when(warpgroup == 2)(roles.scan)
    pl.when(warpgroup == 3)(roles.load)

  h, last, _, *kept = plgpu.kernel(
      projected_linear_recurrence,
      out_type=tuple(outputs),
      grid=(work.ctas,),
      grid_names=('cta',),
      num_threads=4,
      thread_name='warpgroup',
      scratch_types=[
          matrices(_STAGES, BLOCK, _DEPTH),
          matrices(_STAGES, _DEPTH, gates * LANES),
          matrices(2, gates, 2, _HALF, wgmma_smem.WIDTH),
          matrices(2, _HALF, wgmma_smem.WIDTH),
          plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
          plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
          plgpu.Barrier(num_barriers=2),
          plgpu.Barrier(num_barriers=2),
      ],
      compiler_params=kernel_call.COMPILER_PARAMS,
      interpret=plan.interpret,
  )(params, x, weights, h0, restart, flags)
  return layout.narrow(h), last, layout.narrow(kept[0]) if keep else None


def _arrange(kernel: Array, depth: int) -> Array:
  """[G, I, F] -> [depth, tiles G LANES]: side by side what is read at once."""
  gates, inputs, features = kernel.shape
  padded = time_blocks.round_up(features, LANES)
  kernel = time_blocks.pad_features(kernel, padded)
  kernel = kernel.reshape(gates, inputs, -1, LANES)
  kernel = jnp.transpose(kernel, (1, 2, 0, 3)).reshape(inputs, gates * padded)
  return jnp.pad(kernel, [(0, depth - inputs), (0, 0)])


@dataclasses.dataclass(frozen=True)
class _Work:
  """All blocks, in the order in which CTAs take them.

  Attributes:
    layout: of all arrays.
    reverse: whether time runs from the last step to the first.
    most: how many CTAs there may be.
  """

  layout: time_blocks.Layout
  reverse: bool
  most: int

  @property
  def tiles(self) -> int:
    """Tiles of features."""
    return self.layout.padded // LANES

  @property
  def chains(self) -> int:
    """Blocks that do not depend on each other."""
    return self.layout.batch * self.tiles

  @property
  def waves(self) -> int:
    """Blocks of a sequence."""
    return pl.cdiv(self.layout.time, BLOCK)

  @property
  def ctas(self) -> int:
    return min(self.most, self.waves * self.chains)

  def count(self):
    """Returns how many blocks this CTA has."""
    others = self.ctas - 1 - lax.axis_index('cta')
    return lax.div(self.waves * self.chains + others, jnp.int32(self.ctas))

  def find(self, i):
    """Returns the i-th block of this CTA: wave, batch row, tile."""
    block = lax.axis_index('cta') + i * self.ctas
    wave = lax.div(block, jnp.int32(self.chains))
    chain = block - wave * self.chains
    row = lax.div(chain, jnp.int32(self.tiles))
    return wave, row, chain - row * self.tiles

  def start(self, wave):
    """Returns the earliest time in a block."""
    return (self.waves - 1 - wave if self.reverse else wave) * BLOCK


class _Roles:
  """What warpgroups do.

  A ring's slot or a buffer is free once for every time that it is full, and
  once more at the end, when it is waited for so that no barrier is left over.

  Args:
    plan: what is static.
    work: which blocks there are.
    gates: G.
    depth: I.
    operands: references to params, x, W, h0, restart and flags.
    results: references to h, h after the last step, h after every block, and
      perhaps to the pre-activations.
    x_ring: [stages, block, depth].
    kernel_ring: [stages, depth, G LANES].
    gates_buffer: pre-activations of both halves of a block.
    h_buffer: h of half a block.
    arrived: barriers, full slots of the rings.
    consumed: free ones.
    computed: full halves of the gates' buffer.
    scanned: free ones.
  """

  def __init__(
      self,
      plan: Plan,
      work: _Work,
      gates: int,
      depth: int,
      operands: Sequence[Ref],
      results: Sequence[Ref],
      x_ring: Ref,
      kernel_ring: Ref,
      gates_buffer: Ref,
      h_buffer: Ref,
      arrived: Ref,
      consumed: Ref,
      computed: Ref,
      scanned: Ref,
  ):
    self.plan, self.work, self.gates = plan, work, gates
    self.turns = pl.cdiv(depth, _DEPTH)
    self.params, self.x, self.kernel, *self.starts, self.flags = operands
    self.h, self.last, self.relay, *self.kept = results
    self.x_ring, self.kernel_ring = x_ring, kernel_ring
    self.gates_buffer, self.h_buffer = gates_buffer, h_buffer
    self.arrived, self.consumed = arrived, consumed
    self.computed, self.scanned = computed, scanned
    self.interpret = plan.interpret is not None

  def load(self) -> None:
    """Copies x and W to the rings."""
    _set_registers(_LOADING)
    layout = self.plan.layout

    def block(i, slot):
      wave, row, tile = self.work.find(i)
      start = self.work.start(wave)
      columns = pl.ds(tile * (self.gates * LANES), self.gates * LANES)

      def turn(k, slot):
        plgpu.barrier_wait(self.consumed.at[slot])
        inputs = pl.ds(k * _DEPTH, _DEPTH)
        plgpu.copy_gmem_to_smem(
            layout.block(self.x, None, row, start, BLOCK, inputs),
            wgmma_smem.for_tma(self.x_ring, (slot,), self.interpret),
            self.arrived.at[slot],
        )
        plgpu.copy_gmem_to_smem(
            self.kernel.at[inputs, columns],
            self.kernel_ring.at[slot],
            self.arrived.at[slot],
        )
        return _following(slot)

      return lax.fori_loop(0, self.turns, turn, slot)

    lax.fori_loop(0, self.work.count(), block, jnp.int32(0))
    for slot in range(_STAGES):
      plgpu.barrier_wait(self.consumed.at[slot])

  def multiply(self, half) -> None:
    """Puts pre-activations of half a block into their buffer."""
    _set_registers(_MULTIPLYING)
    for slot in range(_STAGES):
      plgpu.barrier_arrive(self.consumed.at[slot])

    def product(slot, *sums):
      def turn(k, slots):
        before, slot = slots
        plgpu.barrier_wait(self.arrived.at[slot])
        x = self.x_ring.at[slot, pl.ds(half * _HALF, _HALF)]
        for gate, total in enumerate(sums):
          kernel = self.kernel_ring.at[slot, :, pl.ds(gate * LANES, LANES)]
          plgpu.wgmma(total, x, kernel)
        # Those of the turn before are done.
        plgpu.wgmma_wait(self.gates)
        free = lambda: plgpu.barrier_arrive(self.consumed.at[before])
        pl.when(k > 0)(free)
        return slot, _following(slot)

      before, slot = lax.fori_loop(0, self.turns, turn, (slot, slot))
      totals = [total[...] for total in sums]
      plgpu.barrier_arrive(self.consumed.at[before])
      return totals, slot

    def block(i, slot):
      totals, slot = pl.run_scoped(
          lambda *sums: product(slot, *sums),
          *[plgpu.ACC((_HALF, LANES), jnp.float32)] * self.gates,
      )
      if self.kept:  # Those of the block before have left the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.barrier_wait(self.scanned.at[half])
      for gate, total in enumerate(totals):
        total = total.astype(self.gates_buffer.dtype)
        for k in range(2):
          columns = slice(k * wgmma_smem.WIDTH, (k + 1) * wgmma_smem.WIDTH)
          self.gates_buffer[half, gate, k] = total[:, columns]
      plgpu.barrier_arrive(self.computed.at[half])
      for kept in self.kept:
        plgpu.commit_smem()
        for gate in range(self.gates):
          index = (half, gate)
          self._leave(self.gates_buffer, index, kept, gate, i, half)
        plgpu.commit_smem_to_gmem_group()
      return slot

    lax.fori_loop(0, self.work.count(), block, jnp.int32(0))
    plgpu.barrier_wait(self.scanned.at[half])
    plgpu.wait_smem_to_gmem(0)

  def scan(self) -> None:
    """Runs the recurrence over the pre-activations."""
    _set_registers(_SCANNING)
    plan = self.plan
    for half in range(2):
      plgpu.barrier_arrive(self.scanned.at[half])
    rows = wgmma_smem.Rows(self.h_buffer.dtype, self.interpret)
    chain = _Chain(self.relay, self.work, self.interpret)
    h0, restart = self.starts

    def block(i, _):
      wave, row, tile = self.work.find(i)
      walk = time_blocks.Walk(
          plan.layout,
          plan.config,
          plan.reverse,
          row,
          pl.ds(tile * LANES, LANES),
      )
      theta, start, flags = handoff_ctas.small(
          plan, walk, self.params, restart, self.flags
      )
      first = lambda: handoff_ctas.initial(walk, h0, plan.carry)
      h = chain.take(wave, walk, first)
      for part in range(2):
        half = 1 - part if plan.reverse else part
        plgpu.barrier_wait(self.computed.at[half])
        # h of the half before has left its buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scan = self._scanner(rows, walk, wave, part, theta, start, flags)
        h = lax.fori_loop(0, _HALF // _ROWS, scan, h)
        if part:  # As soon as it is known: others wait for it.
          chain.hand_on(wave, walk, h)
        plgpu.barrier_arrive(self.scanned.at[half])
        plgpu.commit_smem()
        self._leave(self.h_buffer, (), self.h, None, i, half)
        plgpu.commit_smem_to_gmem_group()

      last = wave == self.work.waves - 1
      pl.when(last)(lambda: handoff_ctas.leave(walk, self.last, h))
      return 0

    lax.fori_loop(0, self.work.count(), block, 0)
    plgpu.wait_smem_to_gmem(0)

  def _scanner(self, rows, walk, wave, part: int, theta, restart, flags):
    """Returns (k, h) -> h, which scans some of the steps of half a block."""
    half = 1 - part if walk.reverse else part

    def scan(k, h):
      segment = part * (_HALF // _ROWS) + k
      steps = dataclasses.replace(walk, segment=segment)
      flags_of = step_flags.Block(steps, flags, wave)
      first = _HALF - _ROWS - k * _ROWS if walk.reverse else k * _ROWS
      inputs = []
      for i in range(_ROWS):
        gates = [
            rows.read(self.gates_buffer, (half, gate), first, steps.row(i))
            for gate in range(self.gates)
        ]
        inputs.append(tuple(gates))
      accuracy = kernel_call.accuracy(self.plan)
      pairs = pointwise.map_rows(self.plan.step, theta, inputs, accuracy)
      for i, pair in enumerate(pairs):
        h = affine_maps.step(flags_of.map(i, pair, restart), h)
        rows.write(self.h_buffer, first, steps.row(i), h)
      return h

    return scan

  def _leave(self, buffer, index, ref, gate: int | None, i, half) -> None:
    """Starts copying half of the i-th block to device memory."""
    layout = self.plan.layout
    wave, row, tile = self.work.find(i)
    start = self.work.start(wave) + half * _HALF
    for k in range(2):
      features = pl.ds(tile * LANES + k * wgmma_smem.WIDTH, wgmma_smem.WIDTH)
      plgpu.copy_smem_to_gmem(
          wgmma_smem.for_tma(buffer, (*index, k), self.interpret),
          layout.block(ref, gate, row, start, _HALF, features),
          commit_group=False,
      )


class _Chain(mailbox.Mailbox):
  """Hands h from the CTA of a block to that of the next block in time.

  Each block has a place of its own, so no place is ever emptied again.

  Args:
    ref: float32 [waves, B, Fp] in device memory.
    work: the blocks.
    interpret: whether on a CPU, where one CTA has all blocks.
  """

  def __init__(self, ref: Ref, work: _Work, interpret: bool):
    self.ref, self.work, self.interpret = ref, work, interpret
    if interpret:
      return
    self.lane = ptx.thread()
    mailbox.open_all([self], work.ctas, 1)

  def clear(self) -> None:
    @pl.loop(0, self.work.count())
    def _(i):
      wave, row, tile = self.work.find(i)
      place = self._place(wave, row, tile * LANES) + self.lane
      memory.store_gmem(self.ref, place, mailbox.sentinel(), jnp.int32)

  def _place(self, wave, row, features):
    layout = self.work.layout
    return (wave * layout.batch + row) * layout.padded + features

  def take(self, wave, walk, first: Callable[[], Array]) -> Array:
    """Returns h before a block.

    Args:
      wave: of the block.
      walk: over its sequence and features.
      first: returns h before the first block of the sequence.
    """

    def poll():
      place = self._place(wave - 1, walk.batch, walk.features.start)
      words = mailbox.poll([(self.ref, place + (self.lane & ~3))], 4)
      own = words[0]
      for i, word in enumerate(words):
        own = jnp.where((self.lane & 3) == i, word, own)
      return instructions.as_float(own)

    read = lambda: walk.read(self.ref, wave - 1, walk.batch)
    return lax.cond(wave > 0, read if self.interpret else poll, first)

  def hand_on(self, wave, walk, h: Array) -> None:
    """Publishes h after a block."""
    if self.interpret:
      self.ref[wave, walk.batch, walk.features] = h
      return
    place = self._place(wave, walk.batch, walk.features.start) + self.lane
    mailbox.publish(self.ref, place, h, jnp.float32)


def _set_registers(count: int) -> None:
  """Gives this warpgroup more or fewer registers than it was launched with."""
  action: Literal['increase', 'decrease'] = 'increase'
  if count < 2**16 // (4 * LANES):
    action = 'decrease'
  plgpu.set_max_registers(count, action=action)


def _following(slot):
  return jnp.where(slot == _STAGES - 1, 0, slot + 1)
