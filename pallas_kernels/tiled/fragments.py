"""Places of the elements of a tile: which thread has which rows and units.

A tensor core leaves thread l of a warp two columns in each eight: 2 (l mod 4)
and the next. The columns of R are put in such an order, `permute`, that
these are eight units in sequence in each group of 32. So a thread reads and
writes 16 bytes at a time, and the four threads of a row 64.

A part is eight units of one row: an array [8 * 128], eight elements a thread.
Teams have parts of four units, and groups of 16.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import vector
import numpy as np

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.tiled import cut

Array = jax.Array
Ref = Any

# Units of a part.
UNITS = 8

# Rows of a thread in a product.
_HALVES = 2


def laid_out(x: Array) -> Array:
  """Returns a part that may be equal in all threads, with a layout."""
  return plgpu.layout_cast(x, ptx.layout(ptx.per_thread(x)))


def permute(matrix: Array, units: int = UNITS) -> Array:
  """Orders units, the last axis, as the columns of a product.

  Args:
    matrix: [..., units].
    units: number of units of a part.
  """
  lead = matrix.shape[:-1]
  # [group, l mod 4, which eight columns, which of two]
  matrix = matrix.reshape(*lead, -1, 4, units // 2, 2)
  return jnp.swapaxes(matrix, -3, -2).reshape(*lead, -1)


def parts(total: Array, units: int = UNITS) -> list[Array]:
  """Splits a product [64, columns] into parts of so many units.

  Returns:
    For each group of columns two parts: one of the thread's first row, and one
    of the row eight further.
  """
  # Registers of two columns in a group, for each of two rows.
  columns = units // 2
  groups = total.shape[1] // (4 * units)
  part = plgpu.ShapeDtypeStruct(
      (units * ptx.LANES,), np.dtype(np.float32), layout=ptx.layout(units)
  )

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA,), return_type=(part,) * (groups * _HALVES)
  )
  def inline(_, x):
    registers = list(x.registers.flat)
    results = []
    for group in range(groups):
      for half in range(_HALVES):
        first = group * columns
        pairs = [
            registers[(first + j) * _HALVES + half] for j in range(columns)
        ]
        values = [
            vector.extract(
                pair,
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([i]),
            )
            for pair in pairs
            for i in range(2)
        ]
        results.append(ptx.fragmented(values, jnp.float32))
    return tuple(results)

  return list(inline(total))


def cleared(total: Array, groups: Sequence[int], negative: Array) -> Array:
  """Returns a product [64, columns] with zeros in some groups of columns.

  Every register is changed by a mask that the compiler does not know. If only
  some registers change between two products into them, ptxas lets
  each instruction of a tensor core wait for the one before (C7511).

  Args:
    total: the product.
    groups: numbers of groups of 32 columns.
    negative: int32, below zero.
  """
  results = {'ones': jnp.int32, 'zeros': jnp.int32}
  code = 'shr.s32 %ones, %x, 31; not.b32 %zeros, %ones;'
  masks = ptx.emit(code, results, {'x': negative})

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA, ptx.layout(1), ptx.layout(1)),
      return_type=plgpu.ShapeDtypeStruct(
          total.shape, np.dtype(np.float32), layout=plgpu.Layout.WGMMA
      ),
  )
  def inline(_, x, *masks):
    first = ir.DenseI64ArrayAttr.get([0])
    ones, zeros = (
        vector.extract(m, dynamic_position=[], static_position=first)
        for mask in masks
        for m in mask.registers.flat
    )
    registers = x.registers.copy()
    floats = registers.flat[0].type
    words = ir.VectorType.get(floats.shape, ones.type)
    # As in `parts`.
    count = UNITS // 2 * _HALVES
    for i, register in enumerate(x.registers.flat):
      mask = zeros if i // count in groups else ones
      mask = vector.broadcast(words, mask)
      word = arith.andi(arith.bitcast(words, register), mask)
      registers.flat[i] = arith.bitcast(floats, word)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=x.layout, _is_signed=None
    )

  return inline(total, *masks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """The place of this thread's part in a tile.

  Attributes:
    row: a row of the batch, int32 [128].
    feature: the first one, int32 [128].
    valid: int32 [128], not 0 where the row exists.
  """

  row: Array
  feature: Array
  valid: Array

  def only(self, condition) -> 'Place':
    """Returns the place, valid only where a scalar condition holds."""
    valid = self.valid * condition.astype(jnp.int32)
    return dataclasses.replace(self, valid=valid)

  @classmethod
  def of(cls, tiles, tile, warpgroup, group: int, half: int):
    """Returns the place of a part.

    Args:
      tiles: all tiles.
      tile: the tile.
      warpgroup: number of this warpgroup.
      group: number of the group of units.
      half: index of one of a thread's two rows.
    """
    thread = ptx.thread()
    warp, lane = thread >> 5, thread & 31
    row = tile.row + warpgroup * cut.ROWS + warp * 16 + half * 8
    row = row + (lane >> 2)
    unit = tile.block * tiles.config.units + group * cut.GROUP
    feature = tile.head * tiles.size + unit + (lane & 3) * UNITS
    return cls(
        row=jnp.minimum(row, tiles.batch - 1),
        feature=feature,
        valid=(row < tiles.batch).astype(jnp.int32),
    )


def load(
    ref: Ref, offset: Array, dtype, where=None, units: int = UNITS
) -> list[Array]:
  """Starts to read a part; `decode` makes float32 of the words.

  Args:
    ref: an array in device memory.
    offset: the place of its first element, a multiple of `units`.
    dtype: the elements' dtype.
    where: int32, not 0 in threads that read; zeros elsewhere. None for all.
    units: number of units of the part, 8 or 4.

  Returns:
    An int32 [128] for two elements of 16 bits or one of float32; eight of
    float32 in the order of `_spread`.
  """
  if jnp.dtype(dtype).itemsize == 2:
    return memory.load_words_gmem(ref, offset, 2, where, units // 2)
  if units == 4:
    return memory.load_words_gmem(ref, offset, 4, where)
  first, second = _spread(offset)
  words = memory.load_words_gmem(ref, first, 4, where)
  return words + memory.load_words_gmem(ref, second, 4, where)


def decode(words: Sequence[Array], dtype) -> list[Array]:
  """Returns the units of words that were loaded, each float32 [128].

  Args:
    words: all that `load` returned, or some where they have two units each.
    dtype: the elements' dtype.
  """
  if jnp.dtype(dtype).itemsize == 4:
    floats = [instructions.as_float(word) for word in words]
    return floats if len(floats) == 4 else _exchange(floats[:4], floats[4:])
  return [
      take(word, dtype)
      for word in words
      for take in (instructions.lower, instructions.upper)
  ]


def read(ref: Ref, offset: Array, dtype, units: int = UNITS) -> Array:
  """Returns a part, float32, from where `load` reads it."""
  return ptx.stack(decode(load(ref, offset, dtype, None, units), dtype))


def write(ref: Ref, offset: Array, value: Array, dtype, where: Array) -> None:
  """Stores a part where `load` reads it, in threads with `where`."""
  values = ptx.unstack(laid_out(value))
  if jnp.dtype(dtype).itemsize == 4 and len(values) == 4:
    words = [instructions.as_word(x) for x in values]
    memory.store_words_gmem(ref, offset, words, 4, where)
    return
  if jnp.dtype(dtype).itemsize == 4:
    floats = _exchange(values[:4], values[4:])
    words = [instructions.as_word(x) for x in floats]
    first, second = _spread(offset)
    memory.store_words_gmem(ref, first, words[:4], 4, where)
    memory.store_words_gmem(ref, second, words[4:], 4, where)
    return
  memory.store_words_gmem(ref, offset, narrow(values, dtype), 2, where)


def pack(value: Array, dtype) -> list[Array]:
  """Returns the words that `write` stores of a part, of 16 bits an element."""
  return narrow(ptx.unstack(laid_out(value)), dtype)


def _odd() -> Array:
  """Returns whether a thread is the second of two neighbours, int32 [128]."""
  return ptx.thread() & 1


def _spread(offset: Array) -> tuple[Array, Array]:
  """Returns where a thread accesses float32 instead of its own eight.

  Two neighbours have 64 bytes in sequence. If each accessed its own 32 bytes,
  an instruction would touch half of each sector of memory. So the two access
  the first 32 bytes by one instruction and the rest by a second one, and
  `_exchange` their elements.
  """
  odd = _odd()
  first = offset - odd * UNITS + odd * 4
  return first, first + UNITS


def _exchange(first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
  """Exchanges four of eight float32 with the neighbour; undoes itself."""
  odd = _odd() != 0
  received = [
      instructions.shuffle(jnp.where(odd, a, b), 1)
      for a, b in zip(first, second, strict=True)
  ]
  lower = [jnp.where(odd, x, a) for x, a in zip(received, first, strict=True)]
  upper = [jnp.where(odd, b, x) for x, b in zip(received, second, strict=True)]
  return [*lower, *upper]


def narrow(values: Sequence[Array], dtype) -> list[Array]:
  """Packs float32 [128] as 16-bit elements, two a word."""
  return [
      instructions.narrow(low, high, dtype)
      for low, high in zip(values[::2], values[1::2], strict=True)
  ]


def prefetch(ref: Ref, offset: Array, size: int, where: Array) -> None:
  """Brings the 128 bytes around an element to the L2 cache.

  Args:
    ref: an array in device memory.
    offset: the element's place.
    size: bytes of an element.
    where: int32, not 0 in threads that do it.
  """
  operands = {'base': ref, 'offset': offset}
  code, guard = memory.predicate(where, operands)
  code += memory.gmem_address(size) + f' {guard}prefetch.global.L2 [a];'
  ptx.emit('{' + code + '}', {}, operands)


def sum_rows(values: Sequence[Array]) -> Array:
  """Sums eight or four float32 [128] over the eight rows of a warp.

  Returns:
    In each thread one sum: the one whose number is `unit`.
  """
  lane = ptx.thread() & 31
  values = list(values)
  for mask in (16, 8, 4):
    if len(values) == 1:
      values = [values[0] + instructions.shuffle(values[0], mask)]
      continue
    upper = (lane & mask) != 0
    half = len(values) // 2
    keep = [
        jnp.where(upper, b, a)
        for a, b in zip(values[:half], values[half:], strict=True)
    ]
    give = [
        jnp.where(upper, a, b)
        for a, b in zip(values[:half], values[half:], strict=True)
    ]
    values = [
        k + instructions.shuffle(g, mask)
        for k, g in zip(keep, give, strict=True)
    ]
  return values[0]


def add(ref: Ref, offset: Array, value: Array) -> None:
  """Adds float32 [128] to elements that no other thread changes."""
  code = memory.gmem_address(4) + ' red.relaxed.gpu.global.add.f32 [a], %value;'
  operands = {'base': ref, 'offset': offset, 'value': value}
  ptx.emit('{' + code + '}', {}, operands)


def unit(units: int = UNITS) -> Array:
  """Returns which of a part's units this thread has after `sum_rows`."""
  lane = ptx.thread() & 31
  pair = ((lane >> 4) & 1) * 2 + ((lane >> 3) & 1)
  return pair if units == 4 else pair * 2 + ((lane >> 2) & 1)
