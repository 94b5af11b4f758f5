"""The operand of a product, through which CTAs of a cluster exchange h.

Every CTA holds the whole operand of a step in its shared memory, 16 bits an
element. Its layout is [slot][plane][column][gate, unit], with the chunks of a
column permuted as in `ring.py`.

    'shared', 'cluster':
      put     each thread stores its elements in its own CTA's operand
      share   barrier of the CTA; each thread sends 16-byte chunks of its CTA's
              part to the operands of the peers (st.async)
      ready   wait on an mbarrier, which counts the bytes from all peers

    'device':
      publish each thread stores its elements in an exchange (exchange.py)
      fetch   each thread polls chunks of the exchange, of all CTAs, and stores
              them in its own CTA's operand
      ready   barrier of the CTA
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import partition
from pallas_kernels.dense import ring as ring_lib
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = threads.Cta
flag = threads.flag
permutation = ring_lib.permutation

# Chunks of 16 bytes that a thread polls at once, each in six registers.
_TOGETHER = 12


class Operand:
  """An operand of a step, from all CTAs of a head, in this CTA's shared memory.

  Args:
    cta: coordinates.
    products: the products that read it, one and the late ones after it.
    ref: int32 in shared memory, `words` of it.
    signals: mbarriers, int32 in shared memory, `SIGNAL_WORDS` of it.

  Attributes:
    team: CTAs that share out the gates.
    operands: gates that this CTA multiplies.
    member: CTA of the team.
    gate0: first gate of this CTA.
    rows: columns that can lie in the batch; no others are sent or read.
  """

  # Three mbarriers: for two slots, and for the sums of a team.
  SIGNAL_WORDS = 6

  def __init__(
      self, cta: Cta, products: Sequence[partition.Product], ref, signals
  ):
    self.cta, self.ref, self.signals = cta, ref, signals
    config, shape = cta.config, cta.shape
    product = products[0]
    self.team = product.team(config)
    self.operands = product.operands // self.team
    self.member = cta.rank if self.team > 1 else jnp.int32(0)
    self.gate0 = self.member * self.operands
    self.rows = min(config.columns, shape.batch)
    self.plane_bytes = self._plane_bytes(config, shape, products)
    self._matrices = None
    if threads.usable(config, cta.short, written=True):
      place = lambda i, column, unit: self._place(
          i % self.planes, i // self.planes, column, cta.unit0 + unit
      )
      self._matrices = threads.Matrices(
          cta, self.operands * self.planes, place, written=True
      )

  @staticmethod
  def _plane_bytes(config, shape, products) -> int:
    # Parts of a sum are rounded up to whole blocks; the rest holds zeros.
    blocks = max(
        p.parts(config, shape) * p.blocks(config, shape) for p in products
    )
    return config.columns * pl.cdiv(blocks, 2) * 128

  @classmethod
  def words(cls, config, shape, products, split: bool) -> int:
    """Returns the shared memory of an operand, in int32."""
    planes = config.slots * (2 if split else 1)
    return planes * cls._plane_bytes(config, shape, products) // 4

  @property
  def planes(self) -> int:
    return 2 if self.cta.split else 1

  def clear(self):
    """Fills the operand with zeros and makes the mbarriers.

    A barrier of the cluster has to follow.
    """
    cta = self.cta
    words = cta.config.slots * self.planes * self.plane_bytes // 4
    for k in range(pl.cdiv(words, cta.config.threads)):
      at = cta.thread.index + k * cta.config.threads
      memory.store_smem(
          self.ref,
          4 * at,
          ptx.full(1, 0, jnp.int32),
          jnp.int32,
          where=flag(at < words),
      )
    if cta.config.cluster > 1 or cta.config.exchange == 'cluster':
      sync.make_signals(self.signals, (1, 1, 1), flag(cta.thread.index == 0))

  def _slot(self, step):
    slot = step & (self.cta.config.slots - 1)
    return slot * (self.planes * self.plane_bytes)

  def _place(self, plane, gate, column, unit):
    """Returns the byte of an element in a slot."""
    pitch = self.plane_bytes // self.cta.config.columns
    byte = 2 * (gate * (32 * self.cta.shape.blocks) + unit)
    chunk = (byte >> 4) ^ permutation(column)
    start = plane * self.plane_bytes + column * pitch
    return start + (chunk << 4) + (byte & 15)

  def put(self, step, values: Sequence[Array]):
    """Stores this thread's elements in the operand, one array a gate."""
    cta, slot = self.cta, self._slot(step)
    parts = list(values)
    if cta.split:
      highs = map(instructions.round_short, values)
      pairs = zip(highs, values, strict=True)
      parts = [part for high, x in pairs for part in (high, x - high)]
    if self._matrices is not None:
      self._matrices.write(self.ref, slot, parts, cta.short)
      return
    for i, part in enumerate(parts):
      gate, plane = divmod(i, self.planes)
      at = self._place(plane, gate, cta.own.column, cta.unit0 + cta.own.unit)
      memory.store_smem(
          self.ref, slot + at, part, cta.short, where=cta.own.valid
      )

  def share(self, step):
    """Waits for the CTA's `put`, and sends its part to all peers."""
    cta, config = self.cta, self.cta.config
    cta.barrier()
    if config.cluster == 1:
      return
    gates = self.operands
    per_row = config.units // 8
    total = gates * self.planes * self.rows * per_row
    peers = config.cluster - 1
    for k in range(pl.cdiv(total * peers, cta.config.threads)):
      q = cta.thread.index + k * cta.config.threads
      peer = lax.div(q, jnp.int32(total))
      rest = q - peer * total
      row = lax.div(rest, jnp.int32(per_row))
      unit = cta.unit0 + 8 * (rest - row * per_row)
      column = lax.rem(row, jnp.int32(self.rows))
      gate = lax.div(row, jnp.int32(self.rows))
      plane = lax.div(gate, jnp.int32(gates))
      at = self._place(plane, gate - plane * gates, column, unit)
      at += self._slot(step)
      where = flag((peer < peers) & (unit < cta.shape.size))
      rank = lax.rem(cta.rank + 1 + peer, jnp.int32(config.cluster))
      words = memory.load_words_smem(self.ref, at, where=where)
      sync.send(self.ref, at, words, self.signals, step & 1, rank, where)
    own = jnp.clip(cta.shape.size - cta.unit0, 0, config.units)
    size = 2 * gates * self.planes * self.rows * (cta.shape.size - own)
    sync.expect(self.signals, step & 1, size, flag(cta.thread.index == 0))

  def ready(self, step):
    """Waits until the operand is whole, after `share` or `fetch`."""
    config = self.cta.config
    if config.through_device:
      self.cta.barrier()
    elif config.cluster > 1:
      sync.await_signal(self.signals, step & 1, (step >> 1) & 1)

  def fetch(
      self,
      exchange: exchange_lib.Exchange,
      told,
      step,
      first: Ref | None = None,
      replace: Callable[[Any], tuple[Any, Ref]] | None = None,
  ):
    """Polls an exchange and stores the operand.

    Args:
      exchange: the exchange.
      told: the step of the exchange.
      step: the step of this operand.
      first: [B, F] to read instead at step 0.
      replace: maps a column to (int32 condition, reference [B, F]) to read
        instead where the condition is not 0. The exchange is polled there too:
        its data also says that other CTAs are done with earlier steps.
    """
    cta, size = self.cta, self.cta.dtype.itemsize
    if cta.config.delay:
      sync.delay(cta.config.delay)
    total = self.operands * self.rows * (cta.shape.size // 8)
    rounds = range(pl.cdiv(total, cta.config.threads))
    # All chunks that are polled at once are in registers at once.
    together = _TOGETHER // self.planes
    for start in rounds[::together]:
      pieces = [
          self._piece(
              exchange, told, cta.thread.index + k * cta.config.threads, total
          )
          for k in rounds[start:][:together]
      ]
      places = []
      for piece in pieces:
        for j in range(0, 4 * self.planes, 4):
          place: tuple[Any, ...] = (exchange.ref, piece.at + j)
          if first is not None:
            place = *place, (flag(step == 0), first, piece.plain + j)
          places.append(place)
      # One loop for all: a warp waits for the last of its chunks anyway.
      flat = mailbox.poll(
          places, size, in_pairs=self.cta.config.capability >= (9, 0)
      )
      for k, piece in enumerate(pieces):
        words = flat[4 * self.planes * k :][: 4 * self.planes]
        if replace is not None:
          condition, ref = replace(piece.column)
          other = []
          for j in range(0, 4 * self.planes, 4):
            other += memory.load_words_gmem(
                ref, piece.plain + j, size=size, where=condition
            )
          words = [
              jnp.where(condition != 0, x, y)
              for x, y in zip(other, words, strict=True)
          ]
        self._store(step, piece, words)

  def _piece(self, exchange: exchange_lib.Exchange, told, index, total: int):
    """Returns the index-th chunk of 8 elements of a step."""
    cta, shape = self.cta, self.cta.shape
    per_row = shape.size // 8
    exists = index < total
    index = jnp.where(exists, index, 0)
    row = lax.div(index, jnp.int32(per_row))
    unit = 8 * (index - row * per_row)
    gate = lax.div(row, jnp.int32(self.rows))
    column = row - gate * self.rows
    # Nothing beyond the batch is ever published.
    row = jnp.minimum(cta.row0 + column, shape.batch - 1)
    feature = cta.head * shape.size + unit
    at = exchange.offset(told, row, self.gate0 + gate) + feature
    plain = row * shape.features + feature
    return _Piece(gate, column, unit, flag(exists), at, plain)

  def _store(self, step, piece: '_Piece', words: Sequence[Array]):
    """Stores 8 elements, given as words of the exchange, in the operand."""
    parts: Sequence[Sequence[Array]] = [words]
    if self.cta.split:
      parts = instructions.split_short(
          [instructions.as_float(w) for w in words]
      )
    for plane, part in enumerate(parts):
      at = self._place(plane, piece.gate, piece.column, piece.unit)
      memory.store_words_smem(
          self.ref, self._slot(step) + at, part, where=piece.exists
      )

  def fragments(self, step, first, i: int) -> list[list[list[Array]]]:
    """Returns this thread's 8 elements of each plane and tile, as four words.

    Args:
      step: the step.
      first: this thread's first block.
      i: the block, counted from there.
    """
    return [
        [
            self._fragment(step, plane, first + i, tile)
            for tile in range(self.cta.config.tiles)
        ]
        for plane in range(self.planes)
    ]

  def _fragment(self, step, plane: int, block, tile: int) -> list[Array]:
    """Returns this thread's 8 elements of a block's column, as four words."""
    cta = self.cta
    pitch = self.plane_bytes // cta.config.columns
    column = cta.tile_column(tile, cta.thread.quad)
    chunk = (4 * block + cta.thread.place) ^ permutation(column)
    at = self._slot(step) + plane * self.plane_bytes
    at = at + column * pitch + (chunk << 4)
    return memory.load_words_smem(self.ref, at)


class TileOperand:
  """An operand that is a tile of a ring buffer, of 16 bits.

  The tile holds all units of a head, in whole blocks.

  Args:
    tiles: `ring.RingTiles` of one gate.
  """

  team = operands = 1

  def __init__(self, tiles: Any):
    self.tiles = tiles
    self.member = self.gate0 = jnp.int32(0)

  def fragments(self, step, first, i: int) -> list[list[Sequence[Array]]]:
    """Returns this thread's elements, see `Operand.fragments`."""
    ring = self.tiles.ring
    cta = ring.cta
    start = ring.slot(step) + self.tiles.offset
    unit = 8 * (4 * (first + i) + cta.thread.place)
    columns = [
        cta.tile_column(tile, cta.thread.quad)
        for tile in range(cta.config.tiles)
    ]
    places = [ring_lib.place(cta.config, 2, c, unit) for c in columns]
    return [[memory.load_words_smem(ring.buffer, start + p) for p in places]]


@dataclasses.dataclass(frozen=True)
class _Piece:
  """8 elements of a step, 16 or 32 bytes.

  Attributes:
    gate: gate of the operand.
    column: column of the CTA.
    unit: first unit of the head.
    exists: int32, 0 where a thread has no chunk.
    at: first element in the exchange.
    plain: first element in an array [B, F].
  """

  gate: Array
  column: Array
  unit: Array
  exists: Array
  at: Array
  plain: Array


# An operand of which warps poll h straight into fragments of tensor cores.
#
# A large head spreads over most of the device, and in each step every CTA needs
# all of h. Here no CTA keeps it in shared memory (`operand.py` does): each warp
# has a part of the sums, so it needs a part of h, and each of its threads polls
# the elements that it multiplies. A warp whose part has come multiplies while
# others wait, and shared memory has room for R.
#
# A step of one warp, downwards:
#
#     threads and tensor cores             under way meanwhile
#     -----------------------------------  -----------------------------------
#     wait for some cycles                 group 0 of the operand
#     poll group 0
#     multiply group 0                     group 1
#     poll group 1
#     multiply group 1                     group 2
#     ...
#     wait until all warps have read the sums of the step before
#     sums -> shared memory
#     ======= barrier of the CTA ==========
#
# A group is a few blocks. The blocks of a warp lie at fixed distances from each
# other in the exchange, so a thread needs one address for each tile of columns.


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
    team, operands, member, gate0: facts as in `Operand`.
  """

  def __init__(self, cta: Cta, product: partition.Product, signals: Ref):
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
    self.lines: list[mailbox.Line] = []
    self.seen: list[Array] = []
    self.found: list[Array] = []

  def _masks(self, product: partition.Product) -> list[Array]:
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
        its data also says that other CTAs are done with earlier steps.
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
      self.lines.append(mailbox.Line(exchange.ref, at, instead))
    self._look(0)

  def _pieces(self, group: int) -> list[mailbox.Piece]:
    """Returns the pieces of a group, block by block."""
    start = group * self.per_group
    pieces = []
    for i in range(start, min(start + self.per_group, self.blocks)):
      exists = None
      if self.masks:
        exists = self.masks[i // _BITS], i % _BITS
      for tile in range(self.cta.config.tiles):
        pieces.append(mailbox.Piece(tile, 64 * i, exists))
    return pieces

  def _look(self, group: int):
    """Begins to read a group, if there is one."""
    pieces = self._pieces(group)
    self.seen = mailbox.look(self.lines, pieces) if pieces else []

  def fragments(self, step, first, i: int) -> list[list[list[Array]]]:
    """As `Operand.fragments`; called for each block in turn."""
    del step, first
    tiles = self.cta.config.tiles
    group, start = divmod(i, self.per_group)
    if start == 0:
      pieces = self._pieces(group)
      self.found = mailbox.await_pieces(self.lines, pieces, self.seen)
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
