"""Kernels bound by memory: linear and diagonal recurrences."""
