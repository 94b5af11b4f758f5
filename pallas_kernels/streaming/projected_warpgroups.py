"""The warpgroups of `projected`: two multiply, one scans, one loads.

A CTA works on its blocks in the order of time. Arrows are mbarriers:

    load      x, W -> rings         ==arrived==>  multiply
              waits for free slots  <==consumed== multiply
    multiply  x W -> gates_buffer   ==computed==> scan
              waits for a free half <==scanned==  scan
    scan      h -> h_buffer -> device memory, and h to the next block's CTA

Each of the two that multiply has 64 of the 128 steps of a block. So while one
half is scanned the other one, or the next block, is multiplied.
"""

import dataclasses
from typing import Literal

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.streaming import block_flags
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import projected_blocks
from pallas_kernels.streaming import projected_refs
from pallas_kernels.streaming import small_operands
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Array = jax.Array
LANES = streams.LANES
HALF = projected_blocks.HALF

# Steps that are scanned at a time.
ROWS = 16

# Inputs that are multiplied at a time, and slots of the rings for them. They
# leave 2 KiB of shared memory.
DEPTH, STAGES = wgmma_smem.WIDTH, 3

# Registers of a thread that multiplies, scans and loads. In all warpgroups
# together there are 512.
_MULTIPLYING, _SCANNING, _LOADING = 176, 120, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroups:
  """The three roles of warpgroups in a CTA.

  All buffers are free at the start. At the end their writers wait until they
  are free again, so that no arrival at an mbarrier is left over.

  Attributes:
    plan: the static arguments.
    blocks: of all CTAs.
    gates: G.
    depth: I.
    operands: references that are read.
    results: references that are written.
    buffers: shared memory.
  """

  plan: kernel_call.Plan
  blocks: projected_blocks.Blocks
  gates: int
  depth: int
  operands: projected_refs.Operands
  results: projected_refs.Results
  buffers: projected_refs.Buffers

  @property
  def _turns(self) -> int:
    """Number of slots of the rings that a block takes."""
    return pl.cdiv(self.depth, DEPTH)

  @property
  def _interpret(self) -> bool:
    return self.plan.interpret is not None

  def load(self) -> None:
    """Copies x and W to the rings."""
    _set_registers(_LOADING)
    layout = self.plan.layout

    def block(i, slot):
      wave, row, tile = self.blocks.find(i)
      start = self.blocks.start(wave)
      columns = pl.ds(tile * (self.gates * LANES), self.gates * LANES)

      def turn(k, slot):
        plgpu.barrier_wait(self.buffers.consumed.at[slot])
        inputs = pl.ds(k * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(
            layout.block(
                self.operands.x,
                None,
                row,
                start,
                projected_blocks.BLOCK,
                inputs,
            ),
            wgmma_smem.for_tma(self.buffers.x_ring, (slot,), self._interpret),
            self.buffers.arrived.at[slot],
        )
        plgpu.copy_gmem_to_smem(
            self.operands.kernel.at[inputs, columns],
            self.buffers.kernel_ring.at[slot],
            self.buffers.arrived.at[slot],
        )
        return _following(slot)

      return lax.fori_loop(0, self._turns, turn, slot)

    lax.fori_loop(0, self.blocks.count(), block, jnp.int32(0))
    for slot in range(STAGES):
      plgpu.barrier_wait(self.buffers.consumed.at[slot])

  def multiply(self, half) -> None:
    """Multiplies half a block: x W into the buffer of pre-activations."""
    _set_registers(_MULTIPLYING)
    for slot in range(STAGES):
      plgpu.barrier_arrive(self.buffers.consumed.at[slot])

    def product(slot, *sums):
      def turn(k, slots):
        before, slot = slots
        plgpu.barrier_wait(self.buffers.arrived.at[slot])
        x = self.buffers.x_ring.at[slot, pl.ds(half * HALF, HALF)]
        for gate, total in enumerate(sums):
          kernel = self.buffers.kernel_ring.at[
              slot, :, pl.ds(gate * LANES, LANES)
          ]
          plgpu.wgmma(total, x, kernel)
        # The products of the turn before are done.
        plgpu.wgmma_wait(self.gates)
        free = lambda: plgpu.barrier_arrive(self.buffers.consumed.at[before])
        pl.when(k > 0)(free)
        return slot, _following(slot)

      before, slot = lax.fori_loop(0, self._turns, turn, (slot, slot))
      totals = [total[...] for total in sums]
      plgpu.barrier_arrive(self.buffers.consumed.at[before])
      return totals, slot

    def block(i, slot):
      totals, slot = pl.run_scoped(
          lambda *sums: product(slot, *sums),
          *[plgpu.ACC((HALF, LANES), jnp.float32)] * self.gates,
      )
      if self.results.gates is not None:
        # Those of the block before have left the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      plgpu.barrier_wait(self.buffers.scanned.at[half])
      for gate, total in enumerate(totals):
        total = total.astype(self.buffers.gates_buffer.dtype)
        for k in range(2):
          columns = slice(k * wgmma_smem.WIDTH, (k + 1) * wgmma_smem.WIDTH)
          self.buffers.gates_buffer[half, gate, k] = total[:, columns]
      plgpu.barrier_arrive(self.buffers.computed.at[half])
      if self.results.gates is not None:
        plgpu.commit_smem()
        for gate in range(self.gates):
          buffer, index = self.buffers.gates_buffer, (half, gate)
          self._store(buffer, index, self.results.gates, gate, i, half)
        plgpu.commit_smem_to_gmem_group()
      return slot

    lax.fori_loop(0, self.blocks.count(), block, jnp.int32(0))
    plgpu.barrier_wait(self.buffers.scanned.at[half])
    plgpu.wait_smem_to_gmem(0)

  def scan(self) -> None:
    """Runs the recurrence over the pre-activations."""
    _set_registers(_SCANNING)
    plan = self.plan
    for half in range(2):
      plgpu.barrier_arrive(self.buffers.scanned.at[half])
    rows = wgmma_smem.Rows(self.buffers.h_buffer.dtype, self._interpret)
    chain = projected_blocks.Chain(
        self.results.chain, self.blocks, self._interpret
    )
    operands = self.operands

    def block(i, _):
      wave, row, tile = self.blocks.find(i)
      walk = time_blocks.Walk(
          layout=plan.layout,
          config=plan.config,
          reverse=plan.reverse,
          batch=row,
          features=pl.ds(tile * LANES, LANES),
      )
      theta, restart, flags = small_operands.read(
          plan, walk, operands.theta, operands.restart, operands.flags
      )
      first = lambda: small_operands.initial(
          walk, operands.carry, plan.has_carry
      )
      h = chain.take(wave, walk, first)
      for part in range(2):
        half = 1 - part if plan.reverse else part
        plgpu.barrier_wait(self.buffers.computed.at[half])
        # h of the half before has left its buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scan = self._scanner(rows, walk, wave, part, theta, restart, flags)
        h = lax.fori_loop(0, HALF // ROWS, scan, h)
        if part:  # As soon as it is known: others wait for it.
          chain.hand_on(wave, walk, h)
        plgpu.barrier_arrive(self.buffers.scanned.at[half])
        plgpu.commit_smem()
        self._store(self.buffers.h_buffer, (), self.results.h, None, i, half)
        plgpu.commit_smem_to_gmem_group()

      last = wave == self.blocks.waves - 1
      pl.when(last)(
          lambda: small_operands.write_last(walk, self.results.last, h)
      )
      return 0

    lax.fori_loop(0, self.blocks.count(), block, 0)
    plgpu.wait_smem_to_gmem(0)

  def _scanner(self, rows, walk, wave, part: int, theta, restart, flags):
    """Returns (k, h) -> h, which scans the k-th ROWS of half a block."""
    half = 1 - part if walk.reverse else part

    def scan(k, h):
      segment = part * (HALF // ROWS) + k
      steps = dataclasses.replace(walk, segment=segment)
      flags_of = block_flags.BlockFlags(steps, flags, wave)
      first = HALF - ROWS - k * ROWS if walk.reverse else k * ROWS
      inputs = []
      for i in range(ROWS):
        gates = [
            rows.read(
                self.buffers.gates_buffer, (half, gate), first, steps.row(i)
            )
            for gate in range(self.gates)
        ]
        inputs.append(tuple(gates))
      accuracy = kernel_call.accuracy(self.plan)
      pairs = pointwise.map_rows(self.plan.step, theta, inputs, accuracy)
      for i, pair in enumerate(pairs):
        h = affine_maps.step(flags_of.map(i, pair, restart), h)
        rows.write(self.buffers.h_buffer, first, steps.row(i), h)
      return h

    return scan

  def _store(self, buffer, index, ref, gate: int | None, i, half) -> None:
    """Starts copying half of the i-th block to device memory."""
    layout = self.plan.layout
    wave, row, tile = self.blocks.find(i)
    start = self.blocks.start(wave) + half * HALF
    for k in range(2):
      features = pl.ds(tile * LANES + k * wgmma_smem.WIDTH, wgmma_smem.WIDTH)
      plgpu.copy_smem_to_gmem(
          wgmma_smem.for_tma(buffer, (*index, k), self._interpret),
          layout.block(ref, gate, row, start, HALF, features),
          commit_group=False,
      )


def _set_registers(count: int) -> None:
  """Gives this warpgroup more or fewer registers than it was launched with."""
  action: Literal['increase', 'decrease'] = 'increase'
  if count < 2**16 // (4 * LANES):
    action = 'decrease'
  plgpu.set_max_registers(count, action=action)


def _following(slot):
  return jnp.where(slot == STAGES - 1, 0, slot + 1)
