"""Linear recurrences of projected inputs: x W and the scan in one kernel.

A linear cell's gates are free of h: W x_t is all that they need of the input.
A product and a scan in two kernels write these pre-activations to device memory
and read them again. Here they go from the tensor cores to the scan through
shared memory, and while one block of steps is scanned the next one is
multiplied.

A block is 128 steps of 128 features of one sequence, with all gates. CTAs take
blocks in the order of time (`projected_blocks`). A block needs h of the block
before it: a mailbox hands it on from that block's CTA. A CTA is four
warpgroups: two multiply half a block each, one scans, one loads x and W
(`projected_warpgroups`).

Products are `wgmma`, Hopper's: 16-bit operands, float32 sums. Pre-activations
are rounded to 16 bits, as between two kernels.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.streaming import block_flags
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import projected_blocks
from pallas_kernels.streaming import projected_refs
from pallas_kernels.streaming import projected_warpgroups
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Plan = kernel_call.Plan
BLOCK = projected_blocks.BLOCK
HALF = projected_blocks.HALF
LANES = streams.LANES
DEPTH = projected_warpgroups.DEPTH
ROWS = projected_warpgroups.ROWS
STAGES = projected_warpgroups.STAGES

# More gates have no place in registers.
MOST_GATES = 2

# To a `Walk`, the steps that are scanned at a time are a segment of a block.
CONFIG = time_blocks.Config(
    rows=ROWS, warpgroups=1, segments=BLOCK // ROWS, stages=STAGES
)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames='keep')
def forward(
    plan: Plan,
    ctas: int,
    theta: Array,
    x: Array,
    input_kernel: Array,
    carry: Array,
    restart: Array,
    flags: Array,
    *,
    keep: bool,
) -> tuple[Array, Array, Array | None]:
  """Runs the recurrence.

  Args:
    plan: the static arguments, with `CONFIG`.
    ctas: number of CTAs that fit on the device at once.
    theta: [plan.params, Fp], with Fp the padded features.
    x: [B, T, I], 16-bit.
    input_kernel: W, [G, I, F].
    carry: as for `linear.forward`, and so are restart and flags.
    restart: [B, Fp].
    flags: int32 [B, T].
    keep: whether to return the pre-activations.

  Returns:
    h, [B, T, F] in x's dtype; h after the last step, float32 [B, Fp]; the
    pre-activations W x, [B, T, G, F], if `keep`, else None.
  """
  layout, interpret = plan.layout, plan.interpret is not None
  gates, depth, features = input_kernel.shape
  blocks = projected_blocks.Blocks(
      layout, plan.reverse, 1 if interpret else ctas
  )
  # TMA wants rows of x to start at multiples of 16 bytes, and W to consist of
  # tiles of 8 rows. Interpret mode knows no copies that reach beyond an array.
  aligned = streams.round_up(depth, DEPTH if interpret else 8)
  weights = _arrange(input_kernel.astype(x.dtype), aligned)
  x = layout.widen(streams.pad_features(x, aligned))
  matrices = lambda *shape: wgmma_smem.matrices(*shape, dtype=x.dtype)
  small = (layout.batch, layout.padded)
  outputs = [
      jax.ShapeDtypeStruct(layout.shape, x.dtype),
      jax.ShapeDtypeStruct(small, jnp.float32),
      jax.ShapeDtypeStruct((blocks.waves, *small), jnp.float32),
  ]
  if keep:
    shape = (*layout.shape[:2], gates, features)
    outputs.append(jax.ShapeDtypeStruct(shape, x.dtype))

  def projected_linear_recurrence(*refs):
    end = 6 + len(outputs)
    roles = projected_warpgroups.Warpgroups(
        plan=plan,
        blocks=blocks,
        gates=gates,
        depth=depth,
        operands=projected_refs.Operands(*refs[:6]),
        results=projected_refs.Results(*refs[6:end]),
        buffers=projected_refs.Buffers(*refs[end:]),
    )
    warpgroup = lax.axis_index('warpgroup')
    pl.when(warpgroup < 2)(lambda: roles.multiply(warpgroup))
    pl.when(warpgroup == 2)(roles.scan)
    pl.when(warpgroup == 3)(roles.load)

  h, last, _, *kept = plgpu.kernel(
      projected_linear_recurrence,
      out_type=tuple(outputs),
      grid=(blocks.ctas,),
      grid_names=('cta',),
      num_threads=4,
      thread_name='warpgroup',
      scratch_types=[
          matrices(STAGES, BLOCK, DEPTH),
          matrices(STAGES, DEPTH, gates * LANES),
          matrices(2, gates, 2, HALF, wgmma_smem.WIDTH),
          matrices(2, HALF, wgmma_smem.WIDTH),
          plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
          plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
          plgpu.Barrier(num_barriers=2),
          plgpu.Barrier(num_barriers=2),
      ],
      compiler_params=compiler_params.COMPILER_PARAMS,
      interpret=plan.interpret,
  )(theta, x, weights, carry, restart, block_flags.pack(plan, flags))
  return layout.narrow(h), last, layout.narrow(kept[0]) if keep else None


def _arrange(kernel: Array, depth: int) -> Array:
  """[G, I, F] -> [depth, tiles G LANES]: all gates of a tile side by side."""
  gates, inputs, features = kernel.shape
  padded = streams.round_up(features, LANES)
  kernel = streams.pad_features(kernel, padded)
  kernel = kernel.reshape(gates, inputs, -1, LANES)
  kernel = jnp.transpose(kernel, (1, 2, 0, 3)).reshape(inputs, gates * padded)
  return jnp.pad(kernel, [(0, depth - inputs), (0, 0)])
