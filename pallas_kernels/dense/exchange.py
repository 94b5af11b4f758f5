"""What CTAs tell each other through device memory."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import config as config_lib
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
Shape = config_lib.Shape
flag = thread_layout.flag
LANES = ptx.LANES

# Steps that are in an exchange.
_SLOTS = 8


class Exchange:
  """What CTAs tell each other, step by step, through device memory.

  A few slots are used in turn, so that they stay in the L2 cache. A slot that
  holds `waiting.POISON` has not been written for its step yet. Its writer
  poisons it again when all have read it, which is certain as soon as all have
  written the next one, and long before it is written again. (A CTA without
  units writes nothing, but its team does not without its sums.)

  Args:
    cta: coordinates.
    ref: [slots, B, gates, F] in device memory.
    gates: how many arrays there are in a step.
  """

  def __init__(self, cta: Cta, ref: Ref, gates: int):
    self.cta, self.ref, self.gates = cta, ref, gates

  @staticmethod
  def shape(shape: Shape, gates: int) -> tuple[int, ...]:
    """Returns the shape of the array in device memory."""
    return _SLOTS, shape.batch, gates, shape.features

  def offset(self, step, row, gate):
    """Returns where a row of a step's gate starts."""
    shape = self.cta.shape
    per_row = self.gates * shape.features
    fixed = row * per_row + gate * shape.features
    return fixed + (step & (_SLOTS - 1)) * (shape.batch * per_row)

  def publish(self, step, values: Sequence[Array]):
    """Tells all other CTAs this thread's elements, one a gate."""
    cta = self.cta
    row = cta.row0 + cta.own.column
    feature = cta.feature(cta.own.unit)
    for gate, value in enumerate(values):
      instructions.store(
          self.ref,
          self.offset(step, row, gate) + feature,
          value,
          cta.dtype,
          shared=False,
          where=cta.own.valid,
          publish=True,
      )

  def retire(self, step):
    """Poisons a step's slot again; by threads that have nothing else to do."""
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
      sync.fill(self.ref, jnp.where(where, at, 0), size, flag(where))

  def settle(self, step):
    """Makes sure, every few steps, that slots are poisoned in time."""
    cta = self.cta
    turn = (step & (_SLOTS // 2 - 1)) == 0
    if cta.config.warpgroups > 1:
      turn &= cta.thread.group == cta.config.warpgroups - 1
    pl.when(turn)(sync.fence)

  def clear(self):
    """Poisons all slots, before all CTAs meet."""
    for slot in range(_SLOTS):
      self.retire(jnp.int32(slot))
