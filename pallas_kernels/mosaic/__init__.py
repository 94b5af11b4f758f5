"""The ground that the three kernel families stand on, for Mosaic GPU.

Mosaic GPU is Pallas's compiler for Hopper and newer. Modules, bottom up:

    ptx                 code for single threads, by names of operands
    memory              loads and stores: `_smem` by bytes, `_gmem` by elements
    instructions        arithmetic, conversions, tensor cores
    wgmma_smem          matrices in shared memory, for TMA and tensor cores
    sync                barriers, fences, mbarriers
    mailbox             hand-off between CTAs through device memory (sentinels)
    compiler_params     options of all kernels

    cells               a cell's equations, and their derivatives, in a kernel
    approximations      tanh, exp and others from fast instructions

    affine_maps         maps h -> a h + b, and their composition
    step_flags          resets and masks
    autodiff            the error for a second derivative

A value is float32 or int32 [128] or [n * 128], one or n elements for each
thread of a warpgroup.
"""
