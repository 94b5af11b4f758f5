"""Affine maps h -> a h + b, of one or many steps of a linear recurrence.

A map that forgets (a = 0) takes b alone: the product would turn an infinity
before it into NaN. A product of factors that underflows forgets nothing, so
that values after an infinity do not depend on the cut of time: it becomes the
smallest normal number.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

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
  """Returns the composition of maps, the first one applied first."""
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
