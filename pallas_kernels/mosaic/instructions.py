"""Arithmetic, conversions and matrix products, of threads and of warps."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import ptx

Array = jax.Array


def _map(code: str, result, operands: dict[str, Any]) -> Array:
  """Emits a pure function of the elements of threads, with one result %y."""
  count = max(map(ptx.per_thread, operands.values()))
  return ptx.emit(code, {'y': result}, operands, count=count, pure=True)[0]


def reciprocal(x: Array) -> Array:
  """Returns 1 / x of float32, to an error of 1e-7; denormals count as 0."""
  # A value that is equal in all threads may have no layout.
  x = plgpu.layout_cast(x, ptx.layout(ptx.per_thread(x)))
  return _map('rcp.approx.ftz.f32 %y, %x;', jnp.float32, {'x': x})


def round_short(x: Array) -> Array:
  """Rounds float32 to bfloat16 and back."""
  code = (
      '{ .reg .b16 h, z; cvt.rn.bf16.f32 h, %x; mov.b16 z, 0;'
      ' mov.b32 %y, {z, h}; }'
  )
  return _map(code, jnp.float32, {'x': x})


def narrow(low: Array, high: Array, dtype) -> Array:
  """Packs two float32 as 16-bit elements of `dtype` in one int32 word."""
  short = ptx.SHORT[jnp.dtype(dtype).name]
  code = f'cvt.rn.{short}x2.f32 %y, %high, %low;'
  return _map(code, jnp.int32, {'low': low, 'high': high})


def upper(word: Array, dtype=jnp.bfloat16) -> Array:
  """Returns the float32 of the upper 16-bit element of a word."""
  if jnp.dtype(dtype) == jnp.float16:
    return _half(word, 'h')
  return as_float(word & jnp.int32(-65536))


def lower(word: Array, dtype=jnp.bfloat16) -> Array:
  """Returns the float32 of the lower 16-bit element of a word."""
  if jnp.dtype(dtype) == jnp.float16:
    return _half(word, 'l')
  return as_float(jnp.left_shift(word, jnp.int32(16)))


def _half(word: Array, part: str) -> Array:
  code = f'{{ .reg .b16 l, h; mov.b32 {{l, h}}, %x; cvt.f32.f16 %y, {part}; }}'
  return ptx.emit(code, {'y': jnp.float32}, {'x': word}, pure=True)[0]


def split_short(values: Sequence[Array]) -> tuple[list[Array], list[Array]]:
  """Splits float32 into bfloat16 high and low parts, two elements a word."""
  high, low = [], []
  for a, b in zip(values[::2], values[1::2], strict=True):
    word = narrow(a, b, jnp.bfloat16)
    high.append(word)
    low.append(narrow(a - lower(word), b - upper(word), jnp.bfloat16))
  return high, low


def as_float(words: Array) -> Array:
  """Returns the float32 with the bits of int32 words."""
  return _map('mov.b32 %y, %x;', jnp.float32, {'x': words})


def as_word(x: Array) -> Array:
  """Returns the int32 with the bits of float32 values."""
  return _map('mov.b32 %y, %x;', jnp.int32, {'x': x})


def shuffle(x: Array, mask: int) -> Array:
  """Returns float32 [128] of the lane with number `lane ^ mask` in the warp."""
  code = f'shfl.sync.bfly.b32 %y, %x, {mask}, 31, 0xFFFFFFFF;'
  return ptx.emit(code, {'y': jnp.float32}, {'x': x}, pure=True)[0]


def mma(
    acc: Sequence[Array], a: Sequence[Array], b: Sequence[Array], dtype
) -> tuple[Array, ...]:
  """Returns acc + a b of a warp's fragments: 16 rows, 8 columns, 16 deep.

  Args:
    acc: four float32 [128]: rows l/4 (twice) and l/4 + 8 (twice), columns 2 (l
      mod 4) and the next, l the lane.
    a: four int32 [128], two elements each: rows as acc's first and third,
      columns 2 (l mod 4) and the next; then these rows, 8 columns further.
    b: two int32 [128]: column l/4, rows 2 (l mod 4) and the next; 8 further.
    dtype: the dtype of a and b, 16 bits.
  """
  short = ptx.SHORT[jnp.dtype(dtype).name]
  code = (
      f'mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32'
      ' {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1},'
      ' {%c0, %c1, %c2, %c3};'
  )
  operands = {
      f'{letter}{i}': x
      for letter, xs in (('a', a), ('b', b), ('c', acc))
      for i, x in enumerate(xs)
  }
  results = {f'd{i}': jnp.float32 for i in range(4)}
  return ptx.emit(code, results, operands, pure=True)
