"""Affine maps h -> a h + b: what steps of a linear recurrence amount to.

A map that forgets (a = 0) takes b alone: the product would turn an infinity
before it into NaN. A product of factors that underflows forgets nothing, so
that what comes after an infinity does not depend on how time is cut: it becomes
the smallest normal number.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import streams

Array = jax.Array
Map = tuple[Array, Array]

# Bits of the smallest normal float32.
_SMALLEST = 1 << 23


def step(pair: Map, h: Array) -> Array:
  """Returns a h + b of one step."""
  a, b = pair
  return jnp.where(a == 0, b, a * h + b)


def apply(pair: Map, h: Array) -> Array:
  """Returns a h + b of many steps, where a may have overflowed and h be 0."""
  a, b = pair
  return jnp.where((a == 0) | (h == 0), b, a * h + b)


def compose(maps: Sequence[Map]) -> Map:
  """Returns the affine map that a sequence of them amounts to."""
  a, b = maps[0]
  forgets = a == 0
  for pair in maps[1:]:
    forgets |= pair[0] == 0
    a, b = pair[0] * a, step(pair, b)
  # A product that has overflowed before a factor of 0 is NaN by now.
  return jnp.where(forgets, 0.0, _not_zero(a)), b


def _not_zero(x: Array) -> Array:
  """Returns x, but for zeros the smallest normal number of their sign."""
  signed = lax.bitcast_convert_type(x, jnp.int32) | _SMALLEST
  return jnp.where(x == 0, lax.bitcast_convert_type(signed, jnp.float32), x)


class Exchange:
  """How warpgroups learn what the blocks before theirs amount to.

  Args:
    walk: over time.
    barriers: by which arriving blocks are waited for.
    refs: scratch, as `exchange_types` lists it.

  Attributes:
    alone: whether there is only one warpgroup.
  """

  def __init__(self, walk, barriers, refs):
    self.walk, self.barriers = walk, barriers
    self.count = walk.config.warpgroups
    self.alone = self.count == 1
    if self.count > 1:
      self.maps, self.barrier = refs

  def arrive(self, wave):
    """Waits for this warpgroup's block."""
    self.walk.wait(self.barriers, wave)

  def run(self, wave, maps: Sequence[Map], h: Array) -> tuple[Array, Array]:
    """Returns h before this warpgroup's block, and h after the whole wave.

    Args:
      wave: index of the wave.
      maps: of each step in this warpgroup's block.
      h: before the wave.
    """
    if self.count == 1:
      return h, h
    start = h
    for i, pair in enumerate(self._share(wave, maps)):
      start = h if i == 0 else jnp.where(self.walk.warpgroup == i, h, start)
      h = apply(pair, h)
    return start, h

  def _share(self, wave, maps: Sequence[Map]) -> list[Map]:
    """Returns the map of every warpgroup's block."""
    total = compose(maps)
    # One of two sets may still be read by a warpgroup that is behind.
    slot = lax.rem(wave, 2)
    for i, value in enumerate(total):
      self.maps[slot, self.walk.warpgroup, i] = value
    plgpu.barrier_arrive(self.barrier)
    plgpu.barrier_wait(self.barrier)
    return [
        (self.maps[slot, w, 0], self.maps[slot, w, 1])
        for w in range(self.count)
    ]


def exchange_types(config: streams.Config) -> list:
  """Returns the scratch of an `Exchange`."""
  if config.warpgroups == 1:
    return []
  shape = (2, config.warpgroups, 2, streams.LANES)
  return [
      plgpu.SMEM(shape, jnp.float32),
      plgpu.Barrier(num_arrivals=config.warpgroups),
  ]
