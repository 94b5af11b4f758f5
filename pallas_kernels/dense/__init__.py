"""Kernels bound by latency: recurrences with a product R h in every step."""
