"""Products with the recurrent kernel over all steps at once, left to XLA.

One GEMM before the adjoint's loop forms the recurrent gates of all steps again,
and the gradient of the recurrent kernel is one GEMM after it.
"""

import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import wgmma_smem

Array = jax.Array

# Elements of a result that keep the device busy.
_BUSY = 1 << 21
# Fewest products that are worth a sum of their own.
_SUMMED = 64


def h_gates(h: Array, kernel: Array) -> Array:
  """[N, B, T, 1, D] and [G, N, D, D] -> float32 [N, B, T, G, D].

  The sums stay float32, as in the forward kernel: rounded to the dtype of h,
  they made errors of some gradients twice as large.
  """
  heads, *lead, _, size = h.shape
  product = lax.dot_general(
      h.reshape(heads, -1, size),
      jnp.transpose(kernel, (1, 2, 0, 3)).reshape(heads, size, -1),
      (((2,), (1,)), ((0,), (0,))),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(heads, *lead, -1, size)


def d_kernel(h: Array, d_gates: Array) -> Array:
  """[N, B, T, 1, D] and [N, B, T, G, D] -> float32 [G, N, D, D]."""
  heads, *lead, gates, size = d_gates.shape
  steps = math.prod(lead)
  result = gates * heads * size**2
  # A small result of a long sum would be left to a few multiprocessors, so the
  # sum is cut in parts.
  parts = 1
  while (
      parts * result < _BUSY
      and steps % (2 * parts) == 0
      and steps >= 2 * parts * _SUMMED
  ):
    parts *= 2
  # This order of axes transposes no array of all steps.
  sums = lax.dot_general(
      h.reshape(heads, parts, -1, size),
      d_gates.reshape(heads, parts, -1, gates * size),
      (((2,), (2,)), ((0, 1), (0, 1))),
      preferred_element_type=jnp.float32,
  )
  sums = jnp.sum(sums, axis=1).reshape(heads, size, gates, size)
  return jnp.transpose(sums, (2, 0, 1, 3))


# The gradient of R of small heads, from cotangents that lie as x does.
#
# XLA's product of all heads wants them head by head, so the adjoint would write
# one more copy of its largest array, [B, T, G, F]. Here each CTA has a head and
# a stretch of all rows (steps of all sequences), and sums h' d_gates over them.
# TMA copies 64 rows at a time. The device's memory is the limit: 12 heads of 64
# units with four gates and 256 x 1024 rows took .47 ms on an H200, as long as
# XLA's product of cotangents that lie head by head.


# Rows that are added at a time, and how many times as many are on their way.
_ROWS, _STAGES = 64, 4

# Rows that a warpgroup multiplies at once, and the elements of its sums.
_UNITS, _SUMS = 64, 64 * 256

# Units of a head; the fewest rows, since a copy of fewer ones costs little; and
# their divisor, since TMA copies rows in eights.
_SIZES, _FEWEST_ROWS, _DIVISOR = (64, 128), 4096, 8


def fits(rows: int, size: int) -> bool:
  """Returns whether `d_kernel` can run and pays.

  Args:
    rows: B T.
    size: D.
  """
  return size in _SIZES and rows >= _FEWEST_ROWS and rows % _DIVISOR == 0


def d_small_kernel(h: Array, d_gates: Array, cores: int) -> Array:
  """[N, B, T, 1, D] and [B, T, G, N D] -> float32 [G, N, D, D].

  Args:
    h: 16 bits.
    d_gates: cotangents of the gates, in h's dtype.
    cores: multiprocessors of the device.
  """
  heads, *lead, _, size = h.shape
  gates, rows = d_gates.shape[-2], math.prod(lead)
  h = h.reshape(heads, rows, size)
  d_gates = d_gates.reshape(rows, -1)
  most = max(_SUMS // size**2, 1)
  # Gates of a CTA.
  own = max(n for n in range(1, most + 1) if gates % n == 0)
  tiles = heads * gates // own
  parts = max(cores // tiles, 1)
  turns = pl.cdiv(pl.cdiv(rows, _ROWS), parts)

  def gradient_of_heads(h, d_gates, out):
    cta = lax.axis_index('cta')
    part = lax.div(cta, jnp.int32(tiles))
    tile = cta - part * tiles
    first = lax.div(tile, jnp.int32(heads))
    head = tile - first * heads
    first *= own

    def spec(column):
      # Rows beyond the last one are read as zeros.
      return plgpu.BlockSpec(
          (_ROWS, size),
          lambda k: (part * turns + k, column),
          transforms=wgmma_smem.matrices(_ROWS, size, dtype=h.dtype).transforms,
          delay_release=1,
      )

    def run(*sums):
      def add(_, h_smem, *d_gates_smem):
        for i, total in enumerate(sums):
          gate, block = divmod(i, size // _UNITS)
          units = h_smem.at[:, pl.ds(block * _UNITS, _UNITS)]
          factor = units.transpose((1, 0))
          plgpu.wgmma(total, factor, d_gates_smem[gate])
        # The products of the turn before are done.
        plgpu.wgmma_wait(len(sums))

      columns = [(first + i) * heads + head for i in range(own)]
      plgpu.emit_pipeline(
          add,
          grid=(turns,),
          in_specs=[spec(0), *map(spec, columns)],
          max_concurrent_steps=_STAGES,
      )(h.at[head], *[d_gates] * own)
      plgpu.wgmma_wait(0)
      for i, total in enumerate(sums):
        gate, block = divmod(i, size // _UNITS)
        units = pl.ds(block * _UNITS, _UNITS)
        out[part, first + gate, head, units] = total[...]

    total = plgpu.ACC((_UNITS, size), jnp.float32)
    pl.run_scoped(run, *[total] * (own * size // _UNITS))

  kernel = plgpu.kernel(
      gradient_of_heads,
      out_type=jax.ShapeDtypeStruct(
          (parts, gates, heads, size, size), jnp.float32
      ),
      grid=(parts * tiles,),
      grid_names=('cta',),
      compiler_params=compiler_params.COMPILER_PARAMS,
  )
  sums = mailbox.one_at_a_time(kernel)(h, d_gates)
  return jnp.sum(sums, axis=0)
