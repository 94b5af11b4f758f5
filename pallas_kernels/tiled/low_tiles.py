"""Tiles of 32 rows: the matrix is the first factor of their product.

A tensor core multiplies 64 rows at a time. A batch of fewer rows would waste
half of the 64, so the product of a low tile is transposed: 64 columns of the
matrix are its rows, and the rows of the batch its columns.

    product      [64 columns, 32 rows], 16 columns a warp

Lane l of a warp has the columns l/4 and l/4 + 8, each for rows 2 (l mod 4) and
the next in every eight. The columns are put in such an order, `order`, that the
two are units in sequence. For eight rows and 16 units a warp leaves 512 bytes
in shared memory, 16 of each thread: two units of one row, and of the next. A
thread that updates has four units of one row and reads 8 bytes of two others.
"""

from collections.abc import Sequence
from typing import Any

import jax
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

# Rows of a tile, and the columns of its matrix.
ROWS, COLUMNS = 32, 64

# Columns of a warp.
GROUP = 16

# Rows of the batch whose sums lie together.
OCTET = 8


def order(matrix: Array) -> Array:
  """Orders units, the last axis, as the columns of a product.

  Args:
    matrix: [..., units].
  """
  lead = matrix.shape[:-1]
  # [group, lane // 4, which of two]
  matrix = matrix.reshape(*lead, -1, GROUP // 2, 2)
  return jnp.swapaxes(matrix, -2, -1).reshape(*lead, -1)


def words(product: Array) -> list[Sequence[Array]]:
  """Returns the four words that a thread leaves of each eight rows.

  Args:
    product: [64, 32].
  """
  octets = product.shape[1] // OCTET
  one = plgpu.ShapeDtypeStruct(
      (ptx.LANES,), np.dtype(np.float32), layout=ptx.layout(1)
  )

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA,), return_type=(one,) * (4 * octets)
  )
  def inline(_, x):
    registers = list(x.registers.flat)
    results = []
    for octet in range(octets):
      # Registers of the first column, then of the column eight further.
      pairs = registers[2 * octet : 2 * octet + 2]
      for row in range(2):
        for pair in pairs:
          value = vector.extract(
              pair,
              dynamic_position=[],
              static_position=ir.DenseI64ArrayAttr.get([row]),
          )
          results.append(ptx.fragmented([value], jnp.float32))
    return tuple(results)

  values = [instructions.as_word(x) for x in inline(product)]
  return [values[i : i + 4] for i in range(0, len(values), 4)]


def sender() -> Array:
  """Returns where a thread leaves its words of eight rows, in bytes."""
  return _place(ptx.thread() & 31)


def read(ref: Ref, at: Array) -> Array:
  """Returns four units of a row, float32 [4 * 128].

  Lane l of a warp gets units 4 (l mod 4) and following of row l/4 of eight.

  Args:
    ref: an array in shared memory.
    at: the place of the sums of the eight rows, in bytes.
  """
  lane = ptx.thread() & 31
  row, quarter = lane >> 2, lane & 3
  found = []
  for half in range(2):
    source = quarter * 8 + half * 4 + (row >> 1)
    place = at + _place(source) + (row & 1) * 8
    found += memory.load_words_smem(ref, place, count=2)
  return ptx.stack([instructions.as_float(word) for word in found])


def _place(lane: Array) -> Array:
  """Returns where the words of a lane lie: no two of a read in one bank."""
  return (lane ^ (((lane >> 3) & 3) << 1)) << 4
