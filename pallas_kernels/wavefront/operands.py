"""Factors and results of tensor cores, in registers.

Of a matrix with 64 rows, thread 32 w + l of a warpgroup has the rows 16 w + l/4
and the eighth after it, and of each eight columns those of 2 (l mod 4) and the
next.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
import numpy as np

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Rows or columns of a part of a matrix.
OCTET = 8

_SIZE = 64

# Bytes of a row of W in shared memory, 128 columns.
_PITCH = 256

# Columns that a lane reads of a row, and rows that it reads at once.
_PER_LANE, _ROWS_IN_FLIGHT = 4, 8


def stage(
    kernels: Sequence[Ref],
    level,
    row: int,
    rows: int,
    column,
    ref: Ref,
    index: Array,
    threads: int,
    dtype,
) -> None:
  """Copies rows of a level's W, and 128 columns, to shared memory.

  A warp reads whole lines of device memory, which no thread could that reads
  what it multiplies.

  Args:
    kernels: W of each level, [G, I, F], in float32 or `dtype`. I of the first
      may differ.
    level: which one.
    row: the first row.
    rows: number of rows; zeros where W has none.
    column: the first column, of G F.
    ref: the shared memory, for `load`.
    index: of this thread among those that call it, int32 [128].
    threads: their number.
    dtype: of the elements in shared memory, 16 bits.
  """
  warps = threads // 32
  turns = pl.cdiv(rows, warps * _ROWS_IN_FLIGHT)
  own = _PER_LANE * (index & 31)
  for number, kernel in enumerate(kernels):
    gates, inputs, features = kernel.shape
    gate = lax.div(column + own, jnp.int32(features))
    start = gate * ((inputs - 1) * features) + column + own
    inside = column + own < gates * features

    @pl.when(level == number)
    def _(kernel=kernel, start=start, inside=inside):
      size = jnp.dtype(kernel.dtype).itemsize

      @pl.loop(0, turns)
      def _(turn):
        first = turn.astype(jnp.int32) * (warps * _ROWS_IN_FLIGHT)
        first = first + (index >> 5)
        places = [first + warps * i for i in range(_ROWS_IN_FLIGHT)]
        loaded = []
        for place in places:
          exists = inside & (row + place < kernel.shape[1])
          at = jnp.where(exists, start + (row + place) * kernel.shape[2], 0)
          words = memory.load_words_gmem(
              kernel,
              at,
              size=size,
              where=exists.astype(jnp.int32),
              count=_PER_LANE * size // 4,
          )
          loaded.append(words)
        for place, words in zip(places, loaded, strict=True):
          if size == 4:
            x = [instructions.as_float(word) for word in words]
            words = [instructions.narrow(x[i], x[i + 1], dtype) for i in (0, 2)]
          memory.store_pair_smem(
              ref,
              _staged(place, own),
              words,
              where=(place < rows).astype(jnp.int32),
          )


def _staged(row, column):
  """Returns the byte of an element in shared memory.

  The eight columns of a row that `load` reads at once are permuted by rows, so
  that it meets no bank conflicts.
  """
  part = (column >> 3) ^ (row & 7)
  return row * _PITCH + (part << 4) + 2 * (column & 7)


def load(ref: Ref, row: int, column, dtype) -> Array:
  """Returns 64 rows and 64 columns of what `stage` has copied, transposed.

  Args:
    ref: the shared memory.
    row: the first row.
    column: the first column.
    dtype: of the elements.

  Returns:
    [columns, rows].
  """
  thread = ptx.thread()
  lane = thread & 31
  # Lanes point at rows of four matrices: eight rows further every two.
  own = row + (lane & 7) + ((lane >> 4) << 3)
  column = column + 16 * (thread >> 5) + (((lane >> 3) & 1) << 3)
  words: list[Array] = []
  for block in range(0, _SIZE, 2 * OCTET):
    at = _staged(own + block, column)
    words += memory.load_matrices(ref, at, 4)

  types = (ptx.layout(1),) * len(words)
  result = plgpu.ShapeDtypeStruct(
      (_SIZE, _SIZE), dtype, layout=plgpu.Layout.WGMMA
  )

  @plgpu.inline_mgpu(arg_types=types, return_type=result)
  def factor(_, *words):
    is_half = jnp.dtype(dtype) == jnp.float16
    element = ir.F16Type.get() if is_half else ir.BF16Type.get()
    pair = ir.VectorType.get((2,), element)
    registers = np.empty(len(words), dtype=object)
    for i, word in enumerate(words):
      registers[i] = vector.bitcast(pair, word.registers.flat[0])
    shape = mgpu.WGMMA_LAYOUT.registers_shape((_SIZE, _SIZE))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape),
        _layout=mgpu.WGMMA_LAYOUT,
        _is_signed=None,
    )

  return factor(*words)


def narrow(product: Array, dtype) -> list[Array]:
  """Returns a product's elements in 16 bits.

  Args:
    product: float32 [64, columns].
    dtype: of the words.

  Returns:
    Words of two columns; for each octet of columns those of both rows.
  """
  pairs = product.shape[1] // 4
  one = plgpu.ShapeDtypeStruct((ptx.LANES,), jnp.float32, layout=ptx.layout(1))

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA,), return_type=(one,) * (2 * pairs)
  )
  def elements(_, x):
    return tuple(
        ptx.fragmented(
            [
                vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([i]),
                )
            ],
            jnp.float32,
        )
        for register in x.registers.flat
        for i in range(2)
    )

  values = elements(product)
  # Of eight columns: two of the first row, then two of the other one.
  return [
      instructions.narrow(low, high, dtype)
      for low, high in zip(values[::2], values[1::2], strict=True)
  ]


def octet(words: Sequence[Array]) -> list[Array]:
  """Returns eight rows side by side of each column of two octets of columns.

  Lane l has the (l mod 4) / 2-th octet's column l/4, and the octet of rows l
  mod 2 of its warp's two.

  Args:
    words: four of `narrow`, of two octets of columns.
  """
  return _exchange([instructions.transpose(word) for word in words])


def _exchange(words: Sequence[Array]) -> list[Array]:
  """Exchanges words of four lanes: lane i's j-th becomes lane j's i-th."""
  words = list(words)
  for mask in (1, 2):
    upper = (ptx.thread() & mask) != 0
    for i in range(4):
      if i & mask:
        continue
      low, high = words[i], words[i | mask]
      got = instructions.shuffle_word(jnp.where(upper, low, high), mask)
      words[i] = jnp.where(upper, got, low)
      words[i | mask] = jnp.where(upper, high, got)
  return words
