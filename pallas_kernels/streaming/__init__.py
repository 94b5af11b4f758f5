"""Kernels bound by memory: linear and diagonal recurrences.

Which kernel runs which recurrence:

    linear      linear in the carry (minGRU, LRU, LinOSS, a plain `linear_scan`)
    diagonal    a diagonal recurrent kernel (IndRNN, IRevRNN)

Modules, from the call to the hardware:

    op             the differentiable operation: padding, custom_vjp, vmap rule
    tuning         picks the cut
    linear.py      the kernels: the loop over time, forward and adjoint
    diagonal.py
    kernel_call    a kernel's plan, launch, small operands and flags
    handoffs       how h passes between warpgroups and CTAs
    blocks         arrays, the cut of time, and ring buffers in shared memory
    lanes          the same without TMA: each thread copies for itself

Glossary:

    stream      one [B, T, F] array, or one gate of a [B, T, G, F] array
    tile        128 features of one sequence, one for each thread of a warpgroup
    block       the steps that a warpgroup computes at a time
    wave        one block for each warpgroup of each segment of a sequence
    segment     the blocks of one CTA, where several CTAs share a sequence
    cut         rows of a block, warpgroups, segments, stages: a `Config`
    stage       slot of a ring buffer of inputs, in shared memory
    map         h -> A h + B, the composition of the steps of a block
    group       eight segments, of which one composes the maps of all
    hand-off    h, or maps, from one warpgroup or CTA to the next
    sentinel    NaN bit pattern that no computation produces: not published yet
    theta       numbers that each feature has: parameters, biases, diagonal R
    flags       int32 [B, T]: whether a step restarts or holds the carry
"""
