"""Kernels bound by latency: recurrences with a product R h in every step.

carry[t] = update(theta, x[t], R h[t-1], carry[t-1]), and its adjoint. A step's
product cannot start before the last step has ended, so latency decides: R stays
on chip for the whole sequence, the carry never leaves registers, inputs arrive
several steps ahead, outputs leave without being waited for, and CTAs exchange
nothing but h. The adjoint multiplies R transposed with the gates' cotangents,
which its CTAs exchange.

    op.py             one differentiable operation
    gradients.py      the gradient of R, a sum over all steps
    tuning.py         how many CTAs, warpgroups and columns: a Config
    plan.py           static facts of one kernel, and a batch in pieces
    kernel_call.py    grid, scratch, barrier of all CTAs
    forward.py        the kernels: timeline and loop, and one step
    backward.py
    product.py        products with R in registers
    partition.py      how warps share a product and its sums
    operand.py        h as tensor cores read it, in shared memory or polled
    exchange.py       where CTAs all over the device exchange h
    ring.py           inputs and outputs on their way, steps ahead
    threads.py        coordinates of CTAs and threads, and who has which
                      elements of a product; cut.py: sizes

Three kinds of exchange, by the size of a head:

    'shared'   one CTA has all units of a head; through its shared memory.
    'cluster'  the CTAs of a cluster share a head. Each holds the whole operand
               and stores its part into the shared memory of its peers, which
               wait on an mbarrier.
    'device'   more CTAs than a cluster holds share a head. They store their
               parts in device memory and poll it: an element that is still the
               sentinel has not been written. CTAs of a head of 1,536 units or
               more do not hold the operand: each warp polls the elements that
               it multiplies.

Glossary:

    unit       a feature of one head.
    column     a row of the batch: a column of a tensor core's result.
    half       8 rows (units) of a product, half of an m16n8k16 tile.
    octet      8 units side by side.
    block      32 elements that a product sums over.
    operand    the factor of a product that changes from step to step: h, the u
               of a cell with two products, or the gates' cotangents.
    plane      one of the two bfloat16 parts of a float32 operand.
    stage      the products of a step that share an operand.
    stream     an array with a time axis; a tile is one gate of one step of it.
    slot       a step's place in a ring buffer, an operand or an exchange.
    part       the units of a CTA among a head's units; slice: its columns
               among the batch's columns.
    team       CTAs of a cluster that share out the gates of an adjoint's sum.
    sentinel   a NaN bit pattern that no computation produces.
    flags      bits of a step: the carry restarts before it, or is held over it.
    start      the carry that a step starts from, after a reset.
"""
