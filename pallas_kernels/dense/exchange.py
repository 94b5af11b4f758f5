"""The mailbox through which CTAs exchange h, or cotangents, at every step."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
Shape = thread_layout.Shape
flag = thread_layout.flag
LANES = ptx.LANES


class Exchange(mailbox.MailboxRing):
  """A slot holds the elements of one step, of all CTAs of the grid.

  All CTAs have read a slot as soon as all have published the next one. (A CTA
  without units publishes nothing, but its team waits for its sums.)

  Args:
    cta: coordinates.
    ref: [slots, B, gates, F] in device memory.
    gates: number of arrays in a step.
  """

  slots = 8
  steps_between_fences = 4

  def __init__(self, cta: Cta, ref: Ref, gates: int):
    self.cta, self.ref, self.gates = cta, ref, gates

  @staticmethod
  def shape(shape: Shape, gates: int) -> tuple[int, ...]:
    """Returns the shape of the array in device memory."""
    return Exchange.slots, shape.batch, gates, shape.features

  def offset(self, step, row, gate):
    """Returns where a row of a step's gate starts."""
    shape = self.cta.shape
    per_row = self.gates * shape.features
    fixed = row * per_row + gate * shape.features
    return fixed + self.slot(step) * (shape.batch * per_row)

  def publish(self, step, values: Sequence[Array]):
    """Publishes this thread's elements, one a gate."""
    cta = self.cta
    row = cta.row0 + cta.column
    feature = cta.feature(cta.unit)
    for gate, value in enumerate(values):
      mailbox.publish(
          self.ref,
          self.offset(step, row, gate) + feature,
          value,
          cta.dtype,
          where=cta.valid,
      )

  def retire(self, step):
    """Empties a step's slot, by the last 128 threads: they have least to do."""
    cta, config = self.cta, self.cta.config
    size = cta.dtype.itemsize
    per_row = config.units * size // 16
    total = self.gates * config.columns * per_row
    last = cta.index - (cta.threads - LANES)
    for k in range(pl.cdiv(total, LANES)):
      q = last + k * LANES
      gate = lax.div(q, jnp.int32(config.columns * per_row))
      rest = q - gate * (config.columns * per_row)
      row = lax.div(rest, jnp.int32(per_row))
      unit = cta.unit0 + (rest - row * per_row) * (16 // size)
      row += cta.row0
      where = (last >= 0) & (q < total)
      where &= (unit < cta.shape.size) & (row < cta.shape.batch)
      at = self.offset(step, row, gate) + cta.head * cta.shape.size + unit
      mailbox.fill(self.ref, jnp.where(where, at, 0), size, flag(where))

  def _fences(self, due):
    """Only the warpgroup that retires slots has stores to fence."""
    warpgroups = self.cta.config.warpgroups
    if warpgroups == 1:
      return due
    return due & (self.cta.group == warpgroups - 1)

  def clear(self):
    for slot in range(self.slots):
      self.retire(jnp.int32(slot))
