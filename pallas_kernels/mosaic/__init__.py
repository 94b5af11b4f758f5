"""Kernel bodies for Mosaic GPU, Pallas's compiler for Hopper and newer.

`linear` and `diagonal` hold a kernel and its adjoint each, and walk over time
as `streams` says: the memory of the device bounds them. `dense_forward` and
`dense_backward` are bound by the latency of a step; `cta` says how their work
is cut. All treat resets and masks as `flags` says.
"""
