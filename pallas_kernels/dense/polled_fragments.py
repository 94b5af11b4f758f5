"""Where warps poll h of all CTAs straight into fragments of tensor cores.

A large head spreads over most of the device, and in each step every CTA needs
all of h. Here no CTA keeps it in shared memory (`operand.py` does): each warp
has a part of the sums, so it needs a part of h, and each of its threads polls
the elements that it multiplies. A warp whose part has come multiplies while
others wait, and shared memory has room for R.

A step of one warp, downwards:

    threads and tensor cores             under way meanwhile
    -----------------------------------  -----------------------------------
    wait for some cycles                 group 0 of the operand
    poll group 0
    multiply group 0                     group 1
    poll group 1
    multiply group 1                     group 2
    ...
    wait until all warps have read the sums of the step before
    sums -> shared memory
    ======= barrier of the CTA ==========

A group is a few blocks. The blocks of a warp lie at fixed distances from each
other in the exchange, so a thread needs one address for each tile of columns.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import matmul_partition
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import mailbox_lines
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
flag = thread_layout.flag

# Bits of a mask.
_BITS = 32


class PolledFragments:
  """An operand that warps poll from an exchange, in place of an `Operand`.

  Args:
    cta: coordinates.
    product: the product that reads it.
    signals: mbarriers, int32 in shared memory, `Operand.SIGNAL_WORDS` of it:
      one says that all warps have read the sums of a step, the last one is for
      the sums of a team.

  Attributes:
    team, operands, member, gate0: as of `Operand`.
  """

  def __init__(self, cta: Cta, product: matmul_partition.Product, signals: Ref):
    self.cta, self.signals = cta, signals
    config = cta.config
    self.team = product.team(config)
    self.operands = product.operands // self.team
    self.member = cta.rank if self.team > 1 else jnp.int32(0)
    self.gate0 = self.member * self.operands
    self.blocks = product.blocks(config, cta.shape)
    self.per_group = max(1, config.together // config.tiles)
    part = lax.div(cta.thread.warp, jnp.int32(product.row_warps(config)))
    self.first = part * self.blocks
    self.masks = self._masks(product)
    self.lines: list[mailbox_lines.Line] = []
    self.seen: list[Array] = []
    self.found: list[Array] = []

  def _masks(self, product: matmul_partition.Product) -> list[Array]:
    """Returns a bit for each block: whether it has elements for this thread.

    Returns nothing where all have.
    """
    config, shape = self.cta.config, self.cta.shape
    total = self.operands * shape.blocks
    if self.blocks * product.parts(config, shape) == total:
      if shape.size == 32 * shape.blocks:
        return []
    masks = [jnp.int32(0)] * (-(-self.blocks // _BITS))
    for i in range(self.blocks):
      block = self.first + i
      unit = 32 * lax.rem(block, jnp.int32(shape.blocks))
      unit += 8 * self.cta.thread.place
      exists = flag((block < total) & (unit < shape.size))
      masks[i // _BITS] |= exists << (i % _BITS)
    return masks

  def clear(self):
    """Makes the mbarriers; a barrier of the cluster has to follow."""
    first = flag(self.cta.thread.index == 0)
    sync.make_signals(self.signals, (self.cta.config.warps, 1, 1), first)

  def fetch(
      self,
      exchange: exchange_lib.Exchange,
      told,
      replace: Callable[[Any], tuple[Any, Ref]] | None = None,
  ):
    """Begins to poll the operand of a step.

    Args:
      exchange: the exchange.
      told: the step of the exchange.
      replace: maps a column to (int32 condition, reference [B, F]) to read
        instead where the condition is not 0. The exchange is polled there too:
        its data also says that the others are done with earlier steps.
    """
    cta, shape = self.cta, self.cta.shape
    if cta.config.delay:
      sync.delay(cta.config.delay)
    unit = 32 * self.first + 8 * cta.thread.place
    self.lines = []
    for tile in range(cta.config.tiles):
      column = cta.tile_column(tile, cta.thread.quad)
      # Nothing beyond the batch is ever published.
      row = jnp.minimum(cta.row0 + column, shape.batch - 1)
      instead = None
      if replace is not None:
        condition, ref = replace(column)
        instead = condition, ref, row * shape.features + unit
      at = exchange.offset(told, row, self.gate0) + unit
      self.lines.append(mailbox_lines.Line(exchange.ref, at, instead))
    self._look(0)

  def _pieces(self, group: int) -> list[mailbox_lines.Piece]:
    """Returns the pieces of a group, its blocks one after the other."""
    start = group * self.per_group
    pieces = []
    for i in range(start, min(start + self.per_group, self.blocks)):
      exists = None
      if self.masks:
        exists = self.masks[i // _BITS], i % _BITS
      for tile in range(self.cta.config.tiles):
        pieces.append(mailbox_lines.Piece(tile, 64 * i, exists))
    return pieces

  def _look(self, group: int):
    """Begins to read a group, if there is one."""
    pieces = self._pieces(group)
    self.seen = mailbox_lines.look(self.lines, pieces) if pieces else []

  def fragments(self, step, first, i: int) -> list[list[list[Array]]]:
    """As `Operand.fragments`; called for one block after the other."""
    del step, first
    tiles = self.cta.config.tiles
    group, start = divmod(i, self.per_group)
    if start == 0:
      pieces = self._pieces(group)
      self.found = mailbox_lines.await_pieces(self.lines, pieces, self.seen)
      self._look(group + 1)
    words = self.found[4 * tiles * start :]
    return [[words[4 * tile : 4 * tile + 4] for tile in range(tiles)]]

  @property
  def planes(self) -> int:
    return 1

  def ready(self, step):
    """The operand is waited for where it is multiplied."""

  def await_sums(self, step):
    """Waits until all warps have read the sums of the step before."""
    sync.await_signal(self.signals, 0, (step - 1) & 1, scope='cta')

  def tell_sums(self):
    """Says that this warp has read the sums of a step."""
    sync.arrive(self.signals, 0, self.cta.thread.lane)
