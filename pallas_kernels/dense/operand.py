"""The operand of a product: how it gets from CTA to CTA, step by step.

Words are those of `product.py`; a *plane* is one of the two parts of float32
operands.
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
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
flag = thread_layout.flag
permutation = smem_tiles.permutation

# Pieces of 16 bytes that a thread asks for at once, each in six registers.
_TOGETHER = 12


class Operand:
  """What all CTAs of a head have made of a step, in this CTA's shared memory.

  Args:
    cta: coordinates.
    products: of which it is the operand, one and those that are late.
    ref: int32 in shared memory, `words` of it.
    signals: int32 in shared memory, `SIGNAL_WORDS` of it.
  """

  # For the operands of two steps, and for what a team has summed.
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
    # Columns that may be in the batch; no others are sent or read.
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
    # What rounding up to parts of a sum adds is multiplied with zeros.
    blocks = max(
        p.parts(config, shape) * p.blocks(config, shape) for p in products
    )
    return config.columns * pl.cdiv(blocks, 2) * 128

  @classmethod
  def words(cls, config, shape, products, split: bool) -> int:
    """Shared memory for what is multiplied."""
    planes = config.slots * (2 if split else 1)
    return planes * cls._plane_bytes(config, shape, products) // 4

  @property
  def planes(self) -> int:
    return 2 if self.cta.split else 1

  def clear(self):
    """Fills the operand's tiles with zeros; before a meeting of the cluster."""
    cta = self.cta
    words = cta.config.slots * self.planes * self.plane_bytes // 4
    for k in range(pl.cdiv(words, cta.config.threads)):
      at = cta.thread.index + k * cta.config.threads
      instructions.store(
          self.ref,
          4 * at,
          ptx.full(1, 0, jnp.int32),
          jnp.int32,
          shared=True,
          where=flag(at < words),
      )
    sync.make_signals(self.signals, 3, flag(cta.thread.index == 0))

  def _slot(self, step):
    slot = step & (self.cta.config.slots - 1)
    return slot * (self.planes * self.plane_bytes)

  def _place(self, plane, gate, column, unit):
    """Returns where an element lies in a slot, in bytes."""
    pitch = self.plane_bytes // self.cta.config.columns
    byte = 2 * (gate * (32 * self.cta.shape.blocks) + unit)
    chunk = (byte >> 4) ^ permutation(column)
    start = plane * self.plane_bytes + column * pitch
    return start + (chunk << 4) + (byte & 15)

  def put(self, step, values: Sequence[Array]):
    """Puts this thread's elements of the operand into it, one a gate."""
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
      instructions.store(
          self.ref, slot + at, part, cta.short, shared=True, where=cta.own.valid
      )

  def share(self, step):
    """Sends what the threads of this CTA have put to the cluster."""
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
      words = instructions.load_words(
          self.ref, at, shared=True, size=2, where=where
      )
      sync.send(self.ref, at, words, self.signals, step & 1, rank, where)
    own = jnp.clip(cta.shape.size - cta.unit0, 0, config.units)
    size = 2 * gates * self.planes * self.rows * (cta.shape.size - own)
    sync.expect(self.signals, step & 1, size, flag(cta.thread.index == 0))

  def ready(self, step):
    """Waits for what other CTAs have made, after `share` or `fetch`."""
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
    """Reads the operand from an exchange, as soon as all is there.

    Args:
      exchange: where.
      told: the step of the exchange.
      step: the step of this operand.
      first: [B, F], what is read instead for step 0.
      replace: maps a column to (int32 condition, reference [B, F]) that is read
        instead where the condition is not 0, but no sooner: that the others
        have published also says that they are done with earlier steps.
    """
    cta, size = self.cta, self.cta.dtype.itemsize
    if cta.config.delay:
      sync.delay(cta.config.delay)
    total = self.operands * self.rows * (cta.shape.size // 8)
    rounds = range(pl.cdiv(total, cta.config.threads))
    # What is asked for at once is in registers at once.
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
      # All in one loop: a wait for one is a wait for all, in a warp.
      flat = sync.poll(places, size)
      for k, piece in enumerate(pieces):
        words = flat[4 * self.planes * k :][: 4 * self.planes]
        if replace is not None:
          condition, ref = replace(piece.column)
          other = []
          for j in range(0, 4 * self.planes, 4):
            other += instructions.load_words(
                ref, piece.plain + j, shared=False, size=size, where=condition
            )
          words = [
              jnp.where(condition != 0, x, y)
              for x, y in zip(other, words, strict=True)
          ]
        self._store(step, piece, words)

  def _piece(self, exchange: exchange_lib.Exchange, told, index, total: int):
    """Returns which 8 elements of a step a thread reads, by their index."""
    cta, shape = self.cta, self.cta.shape
    per_row = shape.size // 8
    exists = index < total
    index = jnp.where(exists, index, 0)
    row = lax.div(index, jnp.int32(per_row))
    unit = 8 * (index - row * per_row)
    gate = lax.div(row, jnp.int32(self.rows))
    column = row - gate * self.rows
    # What is beyond the batch is never published.
    row = jnp.minimum(cta.row0 + column, shape.batch - 1)
    feature = cta.head * shape.size + unit
    at = exchange.offset(told, row, self.gate0 + gate) + feature
    plain = row * shape.features + feature
    return _Piece(gate, column, unit, flag(exists), at, plain)

  def _store(self, step, piece: '_Piece', words: Sequence[Array]):
    """Puts 8 elements, as words of the exchange, into the operand."""
    parts = [words]
    if self.cta.split:
      parts = _parts([instructions.as_float(w) for w in words])
    for plane, part in enumerate(parts):
      at = self._place(plane, piece.gate, piece.column, piece.unit)
      instructions.store_words(
          self.ref,
          self._slot(step) + at,
          part,
          shared=True,
          size=2,
          where=piece.exists,
      )

  def fragment(self, step, plane: int, block, tile: int) -> list[Array]:
    """Returns a thread's part of a block for a tensor core, as four words."""
    cta = self.cta
    pitch = self.plane_bytes // cta.config.columns
    column = cta.tile_column(tile, cta.thread.quad)
    chunk = (4 * block + cta.thread.place) ^ permutation(column)
    at = self._slot(step) + plane * self.plane_bytes
    at = at + column * pitch + (chunk << 4)
    return instructions.load_words(self.ref, at, shared=True, size=2)


@dataclasses.dataclass(frozen=True)
class _Piece:
  """8 elements of a step, 16 or 32 bytes.

  Attributes:
    gate: of the operand.
    column: of the CTA.
    unit: the first of the head's.
    exists: int32, 0 where a thread has none.
    at: where in the exchange, in elements.
    plain: where in an array [B, F].
  """

  gate: Array
  column: Array
  unit: Array
  exists: Array
  at: Array
  plain: Array


def _parts(values: Sequence[Array]):
  """Packs eight float32 as words of their high and of their low parts."""
  high, low = [], []
  for a, b in zip(values[::2], values[1::2], strict=True):
    word = instructions.narrow(a, b, jnp.bfloat16)
    high.append(word)
    low.append(
        instructions.narrow(
            a - instructions.lower(word),
            b - instructions.upper(word),
            jnp.bfloat16,
        )
    )
  return high, low
