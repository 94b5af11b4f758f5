"""16-bit matrices in shared memory, as `wgmma` and TMA want them.

A row is 128 bytes. Its eight 16-byte parts are permuted, differently for each
row of eight, so that neither reading along a row nor storing the fragments of
tensor cores meets bank conflicts. Pallas calls that a tiling and a swizzle, and
applies them to its own stores.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

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


def for_tma(ref: Ref, index: tuple[Any, ...]) -> Ref:
  """Returns one matrix [rows, WIDTH] to be copied.

  By its tiles, each of which is as wide as the matrix, Pallas would want arrays
  in device memory to consist of whole ones.

  Args:
    ref: matrices.
    index: index of the matrix.
  """
  swizzled, _ = ref.transforms
  untiled = type(ref)(ref.ref, (swizzled,)).at[index]
  return untiled.reshape(*ref.shape[-2:])
