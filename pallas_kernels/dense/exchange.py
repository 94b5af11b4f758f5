"""Operands in device memory, through which all CTAs of a device exchange h.

A few slots, one for each of the last steps, stay in the L2 cache. An element
that still is the sentinel (`mailbox.SENTINEL`) has not been written for its
step: readers poll the data itself, so a hand-off is one trip through the L2
cache without a flag or a fence.

    step t of the loop    publish h[t+1]
    step t + 1            poll h[t+1], then publish h[t+2]
    step t + 2            poll h[t+2], so all have read h[t+1]: retire it, that
                          is, put the sentinel back
    step t + 8            publish h[t+9] in the same slot

(In the adjoint a step polls the operand that it publishes, and retires the
operand of the step before.)
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any
Cta = threads.Cta
Config = cut.Config
Shape = cut.Shape
flag = threads.flag
LANES = ptx.LANES


class Exchange(mailbox.MailboxRing):
  """An operand of all CTAs of a head, step by step, in device memory.

  A writer retires a slot when all CTAs have read its elements. That is certain
  as soon as all have published the next step. A CTA without units publishes
  nothing, so it needs a team in which others wait for its sums: `tuning` gives
  teams to adjoints only.

  Args:
    cta: coordinates.
    ref: [slots, B, gates, F'] in device memory, F' features from one row to the
      next.
    gates: arrays of one step.
  """

  slots = 8
  steps_between_fences = 4

  def __init__(self, cta: Cta, ref: Ref, gates: int):
    self.cta, self.ref, self.gates = cta, ref, gates
    self.pitch = self._pitch(cta.config, cta.shape)

  @staticmethod
  def shape(config: Config, shape: Shape, gates: int) -> tuple[int, ...]:
    """Returns the shape of the array in device memory."""
    pitch = Exchange._pitch(config, shape)
    return Exchange.slots, shape.batch, gates, pitch

  @staticmethod
  def _pitch(config: Config, shape: Shape) -> int:
    # Blocks of all gates are then at fixed distances from each other.
    return 32 * shape.blocks if config.direct else shape.features

  def offset(self, step, row, gate):
    """Returns the element at which a row of a step's gate starts."""
    shape = self.cta.shape
    per_row = self.gates * self.pitch
    fixed = row * per_row + gate * self.pitch
    return fixed + self.slot(step) * (shape.batch * per_row)

  def publish(self, step, values: Sequence[Array]):
    """Stores this thread's elements for all CTAs, one array a gate."""
    cta = self.cta
    row = cta.row0 + cta.own.column
    feature = cta.feature(cta.own.unit)
    for gate, value in enumerate(values):
      mailbox.publish(
          self.ref,
          self.offset(step, row, gate) + feature,
          value,
          cta.dtype,
          where=cta.own.valid,
      )

  def retire(self, step):
    """Puts the sentinel back into a step's slot, by the last warpgroup."""
    cta, config = self.cta, self.cta.config
    size = cta.dtype.itemsize
    per_row = config.units * size // 16
    total = self.gates * config.columns * per_row
    last = cta.thread.index - (cta.config.threads - LANES)
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
    return due & (self.cta.thread.group == warpgroups - 1)

  def clear(self):
    for slot in range(self.slots):
      self.retire(jnp.int32(slot))
