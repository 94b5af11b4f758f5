"""Kernels bound by memory: linear and diagonal recurrences.

Which kernel runs which recurrence:

    linear, linear_adjoint      linear in the carry (minGRU, minLSTM, a plain
                                `linear_scan`)
    diagonal, diagonal_adjoint  a diagonal recurrent kernel (IndRNN, IRevRNN)

A call goes through

    op                  pads arrays; custom_vjp and vmap rule
    recurrence          the static record of a call; `tuning` picks the cut
    linear ...          a kernel: the loop over time
    kernel_call         the plan of a kernel, and its launch

and a kernel is made of `streams` (arrays), `time_blocks` (the cut of time),
`ring_buffers` (blocks on their way), `block_flags` (resets and masks),
`small_operands`, `handoff_warpgroups` and `handoff_ctas`.

Glossary:

    stream      one [B, T, F] array, or one gate of a [B, T, G, F] array
    tile        128 features of one sequence, one for each thread of a warpgroup
    block       the steps that a warpgroup computes at a time
    wave        one block for each warpgroup of each segment of a sequence
    segment     the blocks of one CTA, where several CTAs share a sequence
    cut         rows of a block, warpgroups, segments, stages: a `Config`
    stage       slot of a ring buffer of inputs, in shared memory
    map         h -> A h + B, the composition of the steps of a block
    hand-off    h, or maps, from one warpgroup or CTA to the next
    sentinel    NaN bit pattern that no computation produces: not published yet
    theta       numbers that each feature has: parameters, biases, diagonal R
    flags       int32 [B, T]: whether a step restarts or holds the carry
"""
