"""Kernels bound by arithmetic: dense recurrences of many rows.

carry[t] = update(theta, x[t], R h[t-1], carry[t-1]), as in `dense`. With
hundreds of rows a step's product fills the device, and its tensor cores or the
L2 cache are the limit instead of latency. So R does not stay on chip: it
streams from the L2 cache through shared memory, as in any matrix product, and
the update of a tile's elements follows where its product was summed. A few
hundred rows make fewer tiles than CTAs. Each CTA then keeps one tile, and its
part of R, on chip for the whole sequence.

    op.py            one differentiable operation
    choice.py        where it pays; limits.py: sizes that can run
    tuning.py        how large tiles are: a Config
    cut.py           tiles, which CTA has which, and how CTAs wait for others
    plan.py          static facts of one kernel, and arrays the adjoint keeps
    kernel_call.py   grid, scratch, counters
    forward.py       the kernels, with timelines of a step
    backward.py
    products.py      the product of a tile, slice by slice
    fragments.py     which thread has which elements of a tile

With R on chip, `on_chip` has the parts of a tile, their sums and the facts that
differ; `on_chip_products` has the product, and `on_chip_backward` the adjoint,
where several CTAs share out a sum. `low_tiles` has the order of tiles of 32
rows, for batches of so few.

Glossary:

    row          a sequence of the batch.
    unit         a feature of one head.
    tile         some rows and units of one head, with all gates; a CTA
                 computes one at a time.
    row block    all tiles of certain rows and a head; they wait for each other
                 in each step, and for no other.
    slice        64 of the elements that a product sums over.
    part         eight units of one row, which one thread has.
    operand      the factor of a product that changes from step to step: h, or
                 the gates' cotangents.
    matrix       the fixed factor: R, or R transposed.
    low tile     one of 32 rows, whose product is transposed.
    team         CTAs of a cluster, each with a part of the sum of a tile.
    start        the carry that a step starts from, after a reset.
"""
