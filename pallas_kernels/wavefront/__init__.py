"""One kernel for a wavefront: levels of a stack, their products and all.

Level l needs the outputs of level l - 1 up to the same step, and no more. Some
CTAs make gates of one level, from columns of W that stay in their registers and
shared memory. Others run recurrences as the kernels in `dense` do. Counters in
device memory tell CTAs which steps are done. So the products W x run beside the
recurrences, and nothing is launched between parts of time.

    op.py               arrays of layers -> the kernel
    plan.py             static facts: how gates are shared out
    forward.py          the kernel: which warpgroup has which task
    gate_products.py    the gates of a CTA
    operands.py         which thread has which elements of W and of gates
    chunks.py           chunks of time, and who knows of them

It runs forward, without derivatives.
"""
