"""Blocks of `projected`: which CTA takes which, and the hand-off of h."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.streaming import streams

Array = jax.Array
Ref = Any
LANES = streams.LANES

# Steps of a block, and of the half of it that one warpgroup multiplies.
BLOCK, HALF = 128, 64


@dataclasses.dataclass(frozen=True)
class Blocks:
  """All blocks, dealt round-robin to CTAs in the order of time.

  A chain is the blocks of one tile of features of one sequence, which depend on
  each other; a wave is one block of every chain.

  Attributes:
    layout: of all arrays.
    reverse: whether time runs from the last step to the first.
    most: number of CTAs that fit on the device.
  """

  layout: streams.Layout
  reverse: bool
  most: int

  @property
  def tiles(self) -> int:
    """Number of tiles of features."""
    return self.layout.padded // LANES

  @property
  def chains(self) -> int:
    """Number of blocks of a wave."""
    return self.layout.batch * self.tiles

  @property
  def waves(self) -> int:
    """Number of blocks of a chain."""
    return pl.cdiv(self.layout.time, BLOCK)

  @property
  def ctas(self) -> int:
    """Number of CTAs; all are on the device at once."""
    return min(self.most, self.waves * self.chains)

  def count(self):
    """Returns the number of blocks of this CTA."""
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


class Chain(mailbox.Mailbox):
  """Hands h from the CTA of a block to that of the next block in time.

  Each block has a place of its own, so no place is ever emptied again.

  Args:
    ref: float32 [waves, B, Fp] in device memory.
    blocks: all of them.
    interpret: whether on a CPU, where one CTA has all blocks.
  """

  def __init__(self, ref: Ref, blocks: Blocks, interpret: bool):
    self.ref, self.blocks, self.interpret = ref, blocks, interpret
    if interpret:
      return
    self.lane = ptx.thread()
    mailbox.open_all([self], blocks.ctas, 1)

  def clear(self) -> None:
    @pl.loop(0, self.blocks.count())
    def _(i):
      wave, row, tile = self.blocks.find(i)
      place = self._place(wave, row, tile * LANES) + self.lane
      memory.store_gmem(self.ref, place, mailbox.sentinel(), jnp.int32)

  def _place(self, wave, row, features):
    layout = self.blocks.layout
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
