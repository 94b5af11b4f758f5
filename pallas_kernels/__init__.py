"""Generic GPU engines for recurrences, written in Pallas.

An engine knows no cell and no neural-network library: it takes arrays and,
where the recurrence is not linear, a pointwise update function. So this package
imports jax only.

Two functions are public, and `Call`, the static options of the second:

* `linear_scan`: h_t = a_t h_{t-1} + b_t.
* `recurrence`: carry_t = update(x_t, R h_{t-1}, carry_{t-1}).

Both are differentiable in all their arrays. Both raise `NotImplementedError`
where the kernels cannot run a device, a jax version, a dtype or a cell; the
caller then runs the computation on another path.

Modules, outermost first:

* `api` holds the two functions; `arguments` checks their arguments, `call` is
  the record of a caller's options, `step` a cell as kernels call it,
  `projection` the product W x; `devices` knows the device and the mesh.
* `streaming` holds the kernels bound by memory, for linear and diagonal
  recurrences, `dense` those bound by latency, for dense and block-diagonal
  ones, and `tiled` those bound by arithmetic, for many rows. In each `op` makes
  forward and backward kernels one differentiable operation, `tuning` chooses
  the cut of the work and `kernel_call` launches.
* `mosaic` is the ground of all: instructions, hand-off between CTAs, and a
  cell's equations as kernel code.
"""

from pallas_kernels.api import linear_scan
from pallas_kernels.api import recurrence
from pallas_kernels.call import Call

__all__ = ['Call', 'linear_scan', 'recurrence']
