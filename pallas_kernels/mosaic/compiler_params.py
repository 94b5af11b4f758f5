"""How Mosaic GPU compiles all kernels of this package."""

from jax.experimental.pallas import mosaic_gpu as plgpu

# Barriers are placed by hand: barriers that Pallas would insert at accesses to
# shared memory take several times as long as the arithmetic.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
