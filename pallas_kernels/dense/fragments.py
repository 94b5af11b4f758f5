"""Moves 16-bit tiles between shared memory and fragments, 8 x 8 at a time.

Where warps share out rows only (`sums` = 1), a thread keeps the elements of its
tensor core fragment (`threads.py`). ldmatrix and stmatrix move up to four
8 x 8 matrices of such elements at once, two elements to a word. Element by
element it would take two instructions each. They need 8 units side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any


def usable(config: cut.Config, dtype, written: bool) -> bool:
  """Returns whether ldmatrix, or stmatrix, can move a thread's elements.

  Args:
    config: the cut.
    dtype: the elements' dtype in shared memory.
    written: whether they are stored.
  """
  # With 4 columns a thread keeps one column of each pair. It can read both, but
  # has only one to write.
  if config.twice and written:
    return False
  return config.sums == 1 and jnp.dtype(dtype).itemsize == 2


class Matrices:
  """The 8 x 8 matrices of some tiles that a warp moves.

  Args:
    cta: coordinates.
    count: number of tiles.
    place: (tile, column, unit) -> byte at which 8 units start.
    written: whether they are stored, so that none may lie beyond the units.
  """

  def __init__(
      self,
      cta: threads.Cta,
      count: int,
      place: Callable[[int, Any, Any], Any],
      written: bool,
  ):
    config, size = cta.config, cta.shape.size
    self.count = count
    self.cta = cta
    octets = pl.cdiv(config.units, 8 * cta.config.warps)
    self.per_array = octets * cta.config.tiles
    rest = config.units % (8 * octets * cta.config.warps)
    all_there = rest == 0 and size % config.units == 0
    unit0 = cta.thread.warp * (8 * octets)
    last = jnp.minimum(config.units, size - cta.unit0) - 8
    matrix, row = cta.thread.lane >> 3, cta.thread.lane & 7
    # For each instruction: its matrices (tile, index), the byte of this
    # thread's row, and where the matrices exist.
    self.groups: list[tuple[list[tuple[int, int]], Array, Array | None]] = []

    def group(members):
      addresses = []
      for array, octet, tile in members:
        unit = unit0 + 8 * octet
        if not all_there:
          unit = jnp.minimum(unit, last)
        addresses.append(place(array, cta.tile_column(tile, row), unit))
      address = addresses[0]
      for i, other in enumerate(addresses[1:], 1):
        address = jnp.where(matrix == i, other, address)
      exists = None
      if written and not all_there:
        exists = threads.flag(unit0 + 8 * members[0][1] <= last)
      indices = [
          (a, octet * cta.config.tiles + tile) for a, octet, tile in members
      ]
      self.groups.append((indices, address, exists))

    together = [range(octets)]
    if written and not all_there:
      together = [range(octet, octet + 1) for octet in range(octets)]
    for part in together:
      members = [
          (array, octet, tile)
          for array in range(count)
          for octet in part
          for tile in range(cta.config.tiles)
      ]
      while members:
        number = 1 << (min(4, len(members)).bit_length() - 1)
        group(members[:number])
        members = members[number:]

  def read(self, ref: Ref, start, dtype) -> list[Array]:
    """Returns this thread's elements, float32, one array a tile.

    Args:
      ref: shared memory.
      start: byte at which the tiles start.
      dtype: dtype of the elements.
    """
    words: list[list[Any]] = [
        [None] * self.per_array for _ in range(self.count)
    ]
    for indices, address, _ in self.groups:
      found = memory.load_matrices(ref, address + start, len(indices))
      for (array, i), word in zip(indices, found, strict=True):
        words[array][i] = word
    halves = instructions.lower, instructions.upper
    elements = lambda word: self.cta.kept_of([f(word, dtype) for f in halves])
    return [
        ptx.stack([x for word in row for x in elements(word)]) for row in words
    ]

  def write(self, ref: Ref, start, values: Sequence[Array], dtype) -> None:
    """Stores this thread's elements.

    Args:
      ref: shared memory.
      start: byte at which the tiles start.
      values: float32, one array a tile.
      dtype: dtype of the elements.
    """
    words = []
    for value in values:
      elements = ptx.unstack(value)
      pairs = zip(elements[::2], elements[1::2], strict=True)
      words.append([instructions.narrow(*pair, dtype) for pair in pairs])
    for indices, address, exists in self.groups:
      memory.store_matrices(
          ref,
          address + start,
          [words[array][i] for array, i in indices],
          exists,
      )
