"""Reads and writes a thread's own elements in device memory, one by one.

The small arrays (parameters, first and last carry) go this way, and with an
exchange through the device the outputs too. All other streams pass through
shared memory, 16 bytes at a time (`smem_pipeline.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense import config as config_lib
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import memory

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta


def read_param(cta: Cta, ref: Ref, i: int) -> Array:
  """Returns this thread's elements of row i of an array float32 [P, F]."""
  shape, own = cta.shape, cta.own
  unit = jnp.minimum(cta.unit0 + own.unit, shape.size - 1)
  at = i * shape.features + cta.head * shape.size + unit
  return memory.load_gmem(ref, at, jnp.float32, count=own.count)


def read_rows(cta: Cta, ref: Ref, count: int) -> tuple[Array, ...]:
  """Returns this thread's elements of an array float32 [S, B, F]."""
  return tuple(
      memory.load_gmem(
          ref, _row_offset(cta, i), jnp.float32, count=cta.own.count
      )
      for i in range(count)
  )


def write_rows(cta: Cta, ref: Ref, values: Sequence[Array]) -> None:
  """Stores this thread's elements of an array float32 [S, B, F]."""
  for i, value in enumerate(values):
    at = _row_offset(cta, i)
    memory.store_gmem(ref, at, value, jnp.float32, where=cta.own.valid)


def _row_offset(cta: Cta, i: int) -> Array:
  """Returns the offsets in an array [S, B, F], clamped to its edges."""
  shape, own = cta.shape, cta.own
  row = jnp.minimum(cta.row0 + own.column, shape.batch - 1)
  unit = jnp.minimum(cta.unit0 + own.unit, shape.size - 1)
  at = (i * shape.batch + row) * shape.features
  return at + cta.head * shape.size + unit


def write_step(
    cta: Cta,
    ref: Ref,
    stream: config_lib.Stream,
    time: Array,
    values: Sequence[Array],
) -> None:
  """Stores this thread's elements of one time of a stream, one array a gate."""
  for gate, value in enumerate(values):
    at = _step_offset(cta, time, stream, gate)
    memory.store_gmem(ref, at, value, stream.dtype, where=cta.own.valid)


def _step_offset(cta: Cta, time, stream: config_lib.Stream, gate: int) -> Array:
  """Returns the offsets of this thread's elements in a stream's array."""
  shape, gates, own = cta.shape, stream.tiles, cta.own
  row = shape.size if stream.by_head else shape.row
  by_row, by_time = shape.time, 1
  if shape.time_major:
    by_row, by_time = 1, shape.batch
  # The first term is the same for all steps.
  fixed = (cta.row0 + own.column) * (by_row * gates * row) + gate * row
  if stream.by_head:
    head = cta.head * (shape.batch * shape.time * gates * row)
    fixed = fixed + head + cta.unit0 + own.unit
  else:
    fixed = fixed + cta.first_of_head(gates) + cta.unit0 + own.unit
  return fixed + time * (by_time * gates * row)
