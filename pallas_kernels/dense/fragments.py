"""Tiles of 16-bit elements as tensor cores hold them, 8 x 8 at a time.

Where the warps of a CTA share out rows only, a thread has the elements that a
tensor core leaves it: one unit of two columns, of every 8 units and 8 columns;
or of one of these, where columns are there twice.
Two instructions move such matrices between shared memory and threads, up to
four at once and two elements to a word, where element by element there would be
two for each. What they ask for is that 8 units lie side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import config as config_lib
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any


def usable(config: config_lib.Config, dtype, written: bool) -> bool:
  """Returns whether a thread's elements of a dtype are parts of matrices."""
  # Threads that have a column of two of a tile can read both, but not write.
  if config.twice and written:
    return False
  return config.sums == 1 and jnp.dtype(dtype).itemsize == 2


class Matrices:
  """Some arrays of a thread's elements, in tiles.

  Args:
    cta: coordinates.
    count: how many arrays.
    place: (array, column, unit) -> where in the tiles, in bytes, 8 units lie.
    written: whether they are written, so that no matrix may be beyond.
  """

  def __init__(
      self,
      cta: thread_layout.Cta,
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
    # Which matrices an instruction moves, and where this thread's row lies.
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
        exists = thread_layout.flag(unit0 + 8 * members[0][1] <= last)
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
    """Returns this thread's elements, float32, array by array.

    Args:
      ref: in shared memory.
      start: of the tiles, in bytes.
      dtype: of the elements.
    """
    words: list[list[Any]] = [
        [None] * self.per_array for _ in range(self.count)
    ]
    for indices, address, _ in self.groups:
      found = instructions.load_matrices(ref, address + start, len(indices))
      for (array, i), word in zip(indices, found, strict=True):
        words[array][i] = word
    halves = instructions.lower, instructions.upper
    elements = lambda word: self.cta.kept_of([f(word, dtype) for f in halves])
    return [
        ptx.stack([x for word in row for x in elements(word)]) for row in words
    ]

  def write(self, ref: Ref, start, values: Sequence[Array], dtype) -> None:
    """Writes this thread's elements.

    Args:
      ref: in shared memory.
      start: of the tiles, in bytes.
      values: float32, one for each array.
      dtype: of the elements.
    """
    words = []
    for value in values:
      elements = ptx.unstack(value)
      pairs = zip(elements[::2], elements[1::2], strict=True)
      words.append([instructions.narrow(*pair, dtype) for pair in pairs])
    for indices, address, exists in self.groups:
      instructions.store_matrices(
          ref,
          address + start,
          [words[array][i] for array, i in indices],
          exists,
      )
