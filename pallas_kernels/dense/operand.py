"""Where CTAs of a cluster exchange h: the operand of a product.

Every CTA holds the whole operand of a step in its shared memory, 16 bits an
element. Its layout is [slot][plane][column][gate, unit], with the chunks of a
column permuted as in `smem_tiles.py`.

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
from pallas_kernels.dense import fragments
from pallas_kernels.dense import matmul_partition
from pallas_kernels.dense import smem_tiles
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
flag = thread_layout.flag
permutation = smem_tiles.permutation

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
      self, cta: Cta, products: Sequence[matmul_partition.Product], ref, signals
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
    if fragments.usable(config, cta.short, written=True):
      place = lambda i, column, unit: self._place(
          i % self.planes, i // self.planes, column, cta.unit0 + unit
      )
      self._matrices = fragments.Matrices(
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
        its data also says that the others are done with earlier steps.
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
      flat = mailbox.poll(places, size)
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
    tiles: `smem_pipeline.RingTiles` of one gate.
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
    places = [smem_tiles.place(cta.config, 2, c, unit) for c in columns]
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
