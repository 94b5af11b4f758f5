"""Kernel bodies for Mosaic GPU, Pallas's compiler for Hopper and newer.

`linear` and `diagonal` hold a kernel and its adjoint each. Both walk over time
as `streams` says, and both treat resets and masks as `flags` says.
"""
