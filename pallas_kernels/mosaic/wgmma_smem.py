"""16-bit matrices in shared memory, as `wgmma` and TMA want them.

A row is 128 bytes. Its eight 16-byte parts are permuted, differently for each
row of eight, so that neither reading along a row nor storing the fragments of
tensor cores meets bank conflicts. Pallas calls that a tiling and a swizzle, and
applies them to its own stores.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Elements of a row.
WIDTH = 64

_BYTES = 2


def matrices(*shape: int, dtype) -> Any:
  """Returns the type of matrices [..., rows, columns], columns in WIDTHs."""
  tiling: Any = plgpu.TilingTransform
  swizzle: Any = plgpu.SwizzleTransform
  transforms = tiling((8, WIDTH)), swizzle(_BYTES * WIDTH)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def for_tma(ref: Ref, index: tuple[Any, ...], interpret: bool) -> Ref:
  """Returns one matrix [rows, WIDTH] to be copied.

  By its tiles, each of which is as wide as the matrix, Pallas would want arrays
  in device memory to consist of whole ones.

  Args:
    ref: matrices.
    index: which one.
    interpret: whether on a CPU, where they are arrays like any other.
  """
  if interpret:
    return ref.at[index]
  swizzled, _ = ref.transforms
  untiled = type(ref)(ref.ref, (swizzled,)).at[index]
  return untiled.reshape(*ref.shape[-2:])


class Rows:
  """Rows of 128 features, an element a thread, in two matrices of WIDTH.

  Args:
    dtype: of the elements.
    interpret: whether on a CPU.
  """

  def __init__(self, dtype, interpret: bool):
    self.dtype, self.interpret = dtype, interpret
    if not interpret:
      lane = ptx.thread()
      self._matrix, column = lane // WIDTH, lane & (WIDTH - 1)
      # By row of eight: the part of the row, and where in it.
      self._columns = [
          (((column >> 3) ^ row) << 4) + ((column & 7) << 1) for row in range(8)
      ]

  def _offset(self, ref: Ref, index, first, row: int) -> Array:
    """Returns where this thread's element lies, in bytes."""
    rows = ref.shape[-2]
    matrix = 0
    for i, size in zip((*index, 0), ref.shape[:-2], strict=True):
      matrix = matrix * size + i
    start = (matrix * rows + first + row) * (_BYTES * WIDTH)
    own = self._matrix * (rows * _BYTES * WIDTH) + self._columns[row % 8]
    return own + start

  def read(self, ref: Ref, index: tuple[Any, ...], first, row: int) -> Array:
    """Returns a row, float32 [128].

    Args:
      ref: matrices [..., 2, rows, WIDTH].
      index: which two.
      first: a multiple of 8.
      row: which row, counted from `first`.
    """
    if self.interpret:
      halves = [ref[(*index, k, first + row)] for k in range(2)]
      return jnp.concatenate(halves).astype(jnp.float32)
    at = self._offset(ref, index, first, row)
    return memory.load_smem(ref.ref, at, self.dtype)

  def write(self, ref: Ref, first, row: int, value: Array) -> None:
    """Writes a row of matrices [2, rows, WIDTH]; arguments as for `read`."""
    if self.interpret:
      for k, half in enumerate(jnp.split(value.astype(self.dtype), 2)):
        ref[k, first + row] = half
      return
    at = self._offset(ref, (), first, row)
    memory.store_smem(ref.ref, at, value, self.dtype)
