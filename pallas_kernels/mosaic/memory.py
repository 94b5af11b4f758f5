"""Loads and stores of single threads, in shared and in device memory.

A function whose name ends in `_smem` takes an offset in bytes from the start of
a reference to shared memory; one in `_gmem` takes an offset in elements of a
reference to device memory. Accesses of one thread happen in the order written.
Other threads see them after a barrier, a fence or an mbarrier only (`sync`,
`mailbox`).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Puts %base + %offset, an offset in bytes, into the register a.
_SMEM_ADDRESS = '.reg .u32 a; add.u32 a, %base, %offset;'


def gmem_address(size: int) -> str:
  """Returns code that puts the address of element %offset into register a.

  Args:
    size: bytes of an element, a power of two.
  """
  return (
      '.reg .u64 a, o; cvt.s64.s32 o, %offset;'
      f' shl.b64 o, o, {_log2(size)}; add.u64 a, %base, o;'
  )


def _log2(size: int) -> int:
  return size.bit_length() - 1


def load_smem(ref: Ref, offset: Array, dtype, count: int = 1) -> Array:
  """Returns float32 of elements of `dtype`, or int32 as they are.

  Args:
    ref: an array in shared memory, of any shape.
    offset: the place in bytes, int32.
    dtype: the elements' dtype.
    count: elements a thread.
  """
  return _load('shared', _SMEM_ADDRESS, ref, offset, dtype, count)


def load_gmem(ref: Ref, offset: Array, dtype, count: int = 1) -> Array:
  """As `load_smem`, from device memory with an offset in elements."""
  address = gmem_address(jnp.dtype(dtype).itemsize)
  return _load('global', address, ref, offset, dtype, count)


def _load(space: str, address: str, ref, offset, dtype, count: int) -> Array:
  dtype = jnp.dtype(dtype)
  result = jnp.int32 if dtype == jnp.int32 else jnp.float32
  if dtype == jnp.int32:
    code = f' ld.{space}.b32 %value, [a];'
  elif dtype == jnp.float32:
    code = f' ld.{space}.f32 %value, [a];'
  else:
    code = f' .reg .b16 h; ld.{space}.b16 h, [a];'
    code += f' cvt.f32.{ptx.SHORT[dtype.name]} %value, h;'
  operands = {'base': ref, 'offset': offset}
  code = '{' + address + code + '}'
  return ptx.emit(code, {'value': result}, operands, count=count)[0]


def store_smem(
    ref: Ref, offset: Array, value: Array, dtype, where: Array | None = None
) -> None:
  """Stores float32 values as `dtype`, or int32 as they are.

  Args:
    ref: an array in shared memory, of any shape.
    offset: the place in bytes, int32.
    value: float32 or int32.
    dtype: the elements' dtype.
    where: int32, not 0 in threads that store; None for all threads.
  """
  _store('shared', _SMEM_ADDRESS, ref, offset, value, dtype, where)


def store_gmem(
    ref: Ref, offset: Array, value: Array, dtype, where: Array | None = None
) -> None:
  """As `store_smem`, to device memory with an offset in elements."""
  address = gmem_address(jnp.dtype(dtype).itemsize)
  _store('global', address, ref, offset, value, dtype, where)


def store_relaxed(
    ref: Ref, offset: Array, value: Array, dtype, where: Array | None = None
) -> None:
  """As `store_gmem`, for elements that other CTAs poll."""
  address = gmem_address(jnp.dtype(dtype).itemsize)
  _store('relaxed.gpu.global', address, ref, offset, value, dtype, where)


def _store(space: str, address: str, ref, offset, value, dtype, where) -> None:
  dtype = jnp.dtype(dtype)
  operands = {'base': ref, 'offset': offset, 'value': value}
  code, guard = predicate(where, operands)
  if dtype == jnp.int32:
    code += f' {guard}st.{space}.b32 [a], %value;'
  elif dtype == jnp.float32:
    code += f' {guard}st.{space}.f32 [a], %value;'
  else:
    code += f' .reg .b16 h; cvt.rn.{ptx.SHORT[dtype.name]}.f32 h, %value;'
    code += f' {guard}st.{space}.b16 [a], h;'
  code = '{' + address + code + '}'
  ptx.emit(code, {}, operands, count=ptx.per_thread(value))


def predicate(where: Array | None, operands: dict[str, Any]) -> tuple[str, str]:
  """Returns code that sets predicate p, and the prefix of a guarded store.

  Args:
    where: int32, not 0 in threads that store; None for all threads.
    operands: operands of the code; `where` is added to them.
  """
  if where is None:
    return '', ''
  operands['where'] = where
  return ' .reg .pred p; setp.ne.s32 p, %where, 0;', '@p '


def load_words_smem(
    ref: Ref, offset, where=None, count: int = 4
) -> list[Array]:
  """Returns words as int32 [128], zeros where `where` is 0.

  Args:
    ref: an array in shared memory, of any shape.
    offset: the place in bytes, int32.
    where: int32, not 0 in threads that load; None for all threads.
    count: words, 2 or 4.
  """
  return _load_words('shared', _SMEM_ADDRESS, ref, offset, where, count)


def load_words_gmem(
    ref: Ref, offset, size: int, where=None, count: int = 4
) -> list[Array]:
  """As `load_words_smem`, with an offset in elements of `size` bytes.

  Args:
    ref: an array in device memory.
    offset: the place in elements, int32.
    size: bytes of an element.
    where: int32, not 0 in threads that load; None for all threads.
    count: words, 2 or 4.
  """
  return _load_words('global', gmem_address(size), ref, offset, where, count)


def _load_words(space: str, address: str, ref, offset, where, count: int = 4):
  words = {f'w{i}': jnp.int32 for i in range(count)}
  operands = {'base': ref, 'offset': offset}
  code, guard = predicate(where, operands)
  if where is not None:
    code += ''.join(f' mov.b32 %{word}, 0;' for word in words)
  names = ', '.join(f'%{word}' for word in words)
  code += f' {guard}ld.{space}.v{count}.b32 {{{names}}}, [a];'
  return list(ptx.emit('{' + address + code + '}', words, operands))


def store_words_smem(
    ref: Ref, offset, words: Sequence[Array], where=None
) -> None:
  """As `store_smem`, of four int32 [128] side by side, 16 bytes."""
  _store_words('shared', 'b32', _SMEM_ADDRESS, ref, offset, words, where)


def store_words_gmem(
    ref: Ref, offset, words: Sequence[Array], size: int, where=None
) -> None:
  """As `store_words_smem`, with an offset in elements of `size` bytes."""
  address = gmem_address(size)
  _store_words('global', 'b32', address, ref, offset, words, where)


def store_pair_smem(
    ref: Ref, offset: Array, pair: Sequence[Array], where=None
) -> None:
  """As `store_smem`, of two float32 [128] side by side."""
  _store_words('shared', 'f32', _SMEM_ADDRESS, ref, offset, pair, where)


def _store_words(
    space: str, kind: str, address: str, ref, offset, words, where
):
  named = {f'w{i}': word for i, word in enumerate(words)}
  operands = {'base': ref, 'offset': offset, **named}
  code, guard = predicate(where, operands)
  names = ', '.join(f'%{name}' for name in named)
  code += f' {guard}st.{space}.v{len(named)}.{kind} [a], {{{names}}};'
  ptx.emit('{' + address + code + '}', {}, operands)


def load_matrices(ref: Ref, offset: Array, count: int) -> Sequence[Array]:
  """Loads transposed 8 x 8 matrices of 16-bit elements; whole warps do.

  Args:
    ref: an array in shared memory.
    offset: places of matrix rows in bytes: the first matrix's in lanes 0 to 7,
      the second one's in the next 8 lanes, and so on.
    count: number of matrices, 1, 2 or 4.

  Returns:
    Two elements of each matrix as an int32 [128]: lane l has column l/4 of rows
    2 (l mod 4) and the next.
  """
  words = {f'w{i}': jnp.int32 for i in range(count)}
  names = ', '.join(f'%{name}' for name in words)
  code = (
      '{ .reg .u32 s; add.u32 s, %base, %offset;'
      f' ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{names}}}, [s];'
      ' }'
  )
  return ptx.emit(code, words, {'base': ref, 'offset': offset})


def store_matrices(
    ref: Ref, offset: Array, words: Sequence[Array], where: Array | None
) -> None:
  """Stores transposed 8 x 8 matrices; undoes `load_matrices`.

  Args:
    ref: an array in shared memory.
    offset: places of matrix rows, in the lanes of `load_matrices`.
    words: two elements of each of 1, 2 or 4 matrices.
    where: int32, not 0 in warps that store; None for all warps.
  """
  named = {f'w{i}': word for i, word in enumerate(words)}
  names = ', '.join(f'%{name}' for name in named)
  operands = {'base': ref, 'offset': offset, **named}
  code, guard = predicate(where, operands)
  code = (
      f'{{ .reg .u32 s; add.u32 s, %base, %offset;{code} {guard}stmatrix.sync'
      f'.aligned.m8n8.x{len(words)}.trans.shared.b16 [s], {{{names}}}; }}'
  )
  ptx.emit(code, {}, operands)


def fetch(
    shared_ref: Ref, shared_offset, ref: Ref, offset, size: int, where
) -> None:
  """Starts copying 16 bytes to shared memory, or filling them with zeros.

  Args:
    shared_ref: the destination, in shared memory.
    shared_offset: the place in shared memory, in bytes.
    ref: the source, in device memory.
    offset: the place in elements.
    size: bytes of an element.
    where: int32, 2 for a copy, 1 for zeros, 0 for nothing.
  """
  code = gmem_address(size) + (
      ' .reg .u32 s, n; .reg .pred p; add.u32 s, %shared_base, %shared_offset;'
      ' setp.gt.s32 p, %where, 1; selp.u32 n, 16, 0, p;'
      ' setp.gt.s32 p, %where, 0;'
      ' @p cp.async.cg.shared.global [s], [a], 16, n;'
  )
  operands = {
      'shared_base': shared_ref,
      'shared_offset': shared_offset,
      'base': ref,
      'offset': offset,
      'where': where,
  }
  ptx.emit('{' + code + '}', {}, operands)


def fetch_commit() -> None:
  """Makes one group of the copies that this thread has started."""
  ptx.emit('cp.async.commit_group;', {}, {})


def fetch_wait(pending: int) -> None:
  """Waits until at most `pending` of this thread's groups are in flight."""
  ptx.emit(f'cp.async.wait_group {pending};', {}, {})


# Some rows of a warp's 32 features. Complex arrays hold pairs of float32.


def copy_rows(
    ref: Ref, place: Array, source: Ref, offset: Array, rows: 'Rows', row: Array
) -> None:
  """Starts copying rows from device memory to shared memory.

  Args:
    ref: an array in shared memory.
    place: the place in bytes of this lane's first part of a row.
    source: an array in device memory.
    offset: the place of that part in elements.
    rows: the rows.
    row: int32, the row of that part; next is the row `rows.together` later.
  """
  size, together = rows.chunk, rows.together
  cache = 'cg' if size == 16 else 'ca'
  code = gmem_address(rows.dtype.itemsize) + (
      ' .reg .u32 s, t, u, n; .reg .pred p, q;'
      ' add.u32 s, %base_s, %place; add.s32 u, %first, %row;'
  )
  for i in range(0, rows.count, together):
    lanes = ''
    if i + together > rows.count:
      code += f' setp.lt.u32 q, %row, {rows.count - i};'
      lanes = '@q '
    code += (
        f' add.s32 t, u, {i}; setp.lt.u32 p, t, %end;'
        f' selp.b32 n, %size, 0, p; {lanes}cp.async.{cache}.shared.global'
        f' [s+{i * rows.shared}], [a], {size}, n;'
        f' add.u64 a, a, {together * rows.stride};'
    )
  operands = {'base': source, 'offset': offset, 'base_s': ref, 'place': place}
  bounds = {'first': rows.first, 'end': rows.end, 'size': rows.inside * size}
  ptx.emit('{' + code + '}', {}, operands | bounds | {'row': row})


def load_rows(ref: Ref, place: Array, rows: 'Rows') -> list[tuple[Array, ...]]:
  """Returns rows that are in shared memory, from a place on, as float32."""
  code = _SMEM_ADDRESS
  results: dict[str, Any] = {}
  for i in range(rows.count):
    at = f'[a+{i * rows.shared}];'
    results |= dict.fromkeys(rows.names(i), jnp.float32)
    names = [f'%{name}' for name in rows.names(i)]
    if rows.dtype.itemsize == 8:
      code += f' ld.shared.v2.f32 {{{", ".join(names)}}}, {at}'
    elif rows.dtype.itemsize == 4:
      code += f' ld.shared.f32 {names[0]}, {at}'
    else:
      code += f' {{ .reg .b16 h; ld.shared.b16 h, {at}'
      code += f' cvt.f32.{ptx.SHORT[rows.dtype.name]} {names[0]}, h; }}'
  operands = {'base': ref, 'offset': place}
  found = iter(ptx.emit('{' + code + '}', results, operands))
  return [tuple(next(found) for _ in rows.names(i)) for i in range(rows.count)]


def store_rows(
    ref: Ref, offset: Array, values: Sequence[Sequence[Array]], rows: 'Rows'
) -> None:
  """Stores rows in device memory.

  Args:
    ref: an array in device memory.
    offset: the place of the first row in elements.
    values: the float32 numbers of each row: two of a complex array.
    rows: the rows.
  """
  code = gmem_address(rows.dtype.itemsize) + (
      ' .reg .u32 t; .reg .pred p, q; setp.ne.s32 q, %inside, 0;'
  )
  operands: dict[str, Any] = {'base': ref, 'offset': offset}
  operands |= {'first': rows.first, 'end': rows.end, 'inside': rows.inside}
  for i, row in enumerate(values):
    operands |= dict(zip(rows.names(i), row, strict=True))
    names = [f'%{name}' for name in rows.names(i)]
    code += f' add.s32 t, %first, {i}; setp.lt.and.u32 p, t, %end, q;'
    if rows.dtype.itemsize == 8:
      code += f' @p st.global.v2.f32 [a], {{{", ".join(names)}}};'
    elif rows.dtype.itemsize == 4:
      code += f' @p st.global.f32 [a], {names[0]};'
    else:
      kind = ptx.SHORT[rows.dtype.name]
      code += f' {{ .reg .b16 h; cvt.rn.{kind}.f32 h, {names[0]};'
      code += ' @p st.global.b16 [a], h; }'
    code += f' add.u64 a, a, {rows.stride};'
  ptx.emit('{' + code + '}', {}, operands)


def sync_warp() -> None:
  """Waits for the lanes of a warp, and lets each see what the others wrote."""
  ptx.emit('bar.warp.sync 0xFFFFFFFF;', {}, {})


@dataclasses.dataclass(frozen=True)
class Rows:
  """Consecutive steps of a thread's features.

  Attributes:
    count: number of rows.
    first: time of the first row, int32; may be negative.
    end: number of steps of the array: rows beyond it, and before 0, are zeros,
      and are not stored.
    inside: int32, 1 in threads whose feature the array has, else 0.
    dtype: dtype of the array: complex64, float32, or one of 16 bits.
    stride: bytes from row to row in device memory.
    shared: the same in shared memory.
    chunk: bytes that a thread copies at once.
  """

  count: int
  first: Any
  end: int
  inside: Array
  dtype: Any
  stride: int
  shared: int
  chunk: int = 0

  @property
  def together(self) -> int:
    """Number of rows that a warp copies at once."""
    return self.chunk // self.dtype.itemsize

  def names(self, i: int) -> tuple[str, ...]:
    """Returns names of the numbers of a row, as operands."""
    return (f're{i}', f'im{i}') if self.dtype.itemsize == 8 else (f'x{i}_',)
