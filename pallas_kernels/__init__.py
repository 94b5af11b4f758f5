"""Generic GPU engines for recurrences, written in Pallas.

An engine knows no cell and no neural-network library: it takes arrays and,
where the recurrence is not linear, a pointwise update function. So this package
imports jax only.

Two functions are public, and `Call`, the static options of the second:

* `linear_scan`: h_t = a_t h_{t-1} + b_t.
* `recurrence`: carry_t = update(x_t, R h_{t-1}, carry_{t-1}).

Both are differentiable in all their arrays, and both raise
`NotImplementedError`, the error by which a caller learns that it has to run the
same computation on another path, where the device, the jax version, a dtype or
the cell is one that the kernels cannot run.

From the outside in: `affine` and `recurrent` hold the two functions, `engine`
and `dense` make forward and backward kernels one differentiable operation (for
linear and diagonal recurrences, and for all others), `tuning` and
`dense_tuning` choose how they cut their work, `projection` is the product that
gives a recurrence its input gates, `targets` knows the device, `pointwise`
turns a cell's equations and their derivatives into kernel code, and
`mosaic_gpu` holds the kernels.
"""

from pallas_kernels.call import Call
from pallas_kernels.linear_scan_op import linear_scan
from pallas_kernels.recurrence_op import recurrence

__all__ = ['Call', 'linear_scan', 'recurrence']
