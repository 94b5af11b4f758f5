"""Factors and results of tensor cores, in registers.

Of a matrix with 64 rows, thread 32 w + l of a warpgroup has the rows 16 w + l/4
and the eighth after it, and of each eight columns those of 2 (l mod 4) and the
next.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
import numpy as np

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Rows or columns of a part of a matrix.
OCTET = 8

_SIZE = 64


def load(kernels: Sequence[Ref], level, row, column, dtype) -> Array:
  """Returns 64 rows of a level's W, and 64 columns of all gates, transposed.

  Args:
    kernels: W of each level, [G, I, F], in float32 or `dtype`. I of the first
      may differ.
    level: which one.
    row: the first row.
    column: the first column, of G F.
    dtype: of the result, 16 bits.

  Returns:
    [columns, rows], zeros where W has none.
  """
  thread = ptx.thread()
  own = column + 16 * (thread >> 5) + ((thread & 31) >> 2)
  row = row + 2 * (thread & 3)
  gates, lowest, features = kernels[0].shape
  others = kernels[-1].shape[1]
  rows = jnp.where(level == 0, jnp.int32(lowest), jnp.int32(others))
  starts = []
  for column in (own, own + OCTET):
    gate = lax.div(column, jnp.int32(features))
    start = gate * (rows - 1) * features + column
    exists = column < gates * features
    starts.append(jnp.where(exists, start, jnp.int32(-1)))
  words: list[Array] = []
  for block in range(0, _SIZE, 2 * OCTET):
    words += _block(kernels, level, starts, row + block, rows, dtype)

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


def _block(
    kernels: Sequence[Ref], level, starts, row, rows, dtype
) -> list[Array]:
  """Returns a thread's elements of two octets of rows and of columns.

  Args:
    kernels: W of each level.
    level: which one.
    starts: places of the two columns in the first row; -1 where there is none.
    row: the thread's first row; its others are 1, 8 and 9 further.
    rows: number of rows.
    dtype: of the result, 16 bits.

  Returns:
    Four words, two rows each: of both columns, then of those 8 rows further.
  """
  pitch = kernels[0].shape[2]
  given = jnp.dtype(kernels[0].dtype)
  short, size = ptx.SHORT[jnp.dtype(dtype).name], given.itemsize
  bases = [f'base_{"abcdefghijklmnop"[i]}' for i in range(len(kernels))]
  code = (
      '{ .reg .u64 a, b, o; .reg .pred p, c, d, q; .reg .u32 n; .reg .f32 x, y;'
      f' .reg .b16 h; mov.u64 b, %{bases[0]};'
  )
  for i, base in enumerate(bases[1:], 1):
    code += f' setp.eq.s32 p, %level, {i}; @p mov.u64 b, %{base};'
  for address, exists, start in ('acm', 'bdn'):
    start = {'m': '%first', 'n': '%second'}[start]
    code += (
        f' mad.lo.s32 n, %row, {pitch}, {start}; cvt.s64.s32 o, n;'
        f' mad.lo.u64 {address}, o, {size}, b;'
        f' setp.ge.s32 {exists}, {start}, 0;'
    )
  words = []
  for octet in range(2):
    for half in range(2):
      for name, i in (('x', 0), ('y', 1)):
        further = OCTET * octet + i
        at = f'{"ab"[half]}+{size * further * pitch}'
        code += f' add.s32 n, %row, {further}; setp.lt.s32 p, n, %rows;'
        code += f' mov.f32 {name}, 0.0;'
        code += f' and.pred q, p, {"cd"[half]};'
        if given == jnp.float32:
          code += f' @q ld.global.nc.f32 {name}, [{at}];'
        else:
          code += f' mov.b16 h, 0; @q ld.global.nc.b16 h, [{at}];'
          code += f' cvt.f32.{ptx.SHORT[given.name]} {name}, h;'
      words.append(f'word_{"abcd"[2 * octet + half]}')
      code += f' cvt.rn.{short}x2.f32 %{words[-1]}, y, x;'
  operands = {'level': level, 'row': row, 'rows': rows}
  operands |= {'first': starts[0], 'second': starts[1]}
  operands |= dict(zip(bases, kernels, strict=True))
  results = dict.fromkeys(words, jnp.int32)
  return list(ptx.emit(code + ' }', results, operands, pure=True))


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


def octets(words: Sequence[Array]) -> list[list[Array]]:
  """Returns eight rows side by side of each column.

  Lane l has of each two octets of columns the (l mod 4) / 2-th one's column
  l/4, and the octet of rows l mod 2 of its warp's two.

  Args:
    words: of `narrow`.

  Returns:
    For each two octets of columns, four words.
  """
  words = [instructions.transpose(word) for word in words]
  return [_exchange(words[i : i + 4]) for i in range(0, len(words), 4)]


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
