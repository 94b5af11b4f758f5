"""Affine maps h -> A h + b, of one or many steps of a linear recurrence.

h and b are tuples, and A has a form of `linear_maps`. A map that forgets (A =
0) takes b alone: the product would turn an infinity before it into NaN. A
product of factors that underflows forgets nothing, so that values after an
infinity do not depend on the cut of time: it becomes the smallest normal
number.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import linear_maps
from pallas_kernels.mosaic import cells

Array = jax.Array
Vector = linear_maps.Vector
Map = tuple[Any, Vector]

# Bits of the smallest normal float32.
_SMALLEST = 1 << 23


def step(pair: Map, h: Vector) -> Vector:
  """Returns A h + b of one step."""
  a, b = pair
  found = linear_maps.add(linear_maps.times(a, h), b)
  return linear_maps.where(linear_maps.is_zero(a), b, found)


def apply(pair: Map, h: Vector) -> Vector:
  """Returns A h + b of many steps, where A may have overflowed and h be 0."""
  a, b = pair
  return linear_maps.add(linear_maps.times(a, h, _product), b)


def _product(x: Array, y: Array) -> Array:
  return jnp.where((x == 0) | (y == 0), 0.0, x * y)


def compose(maps: Sequence[Map]) -> Map:
  """Returns the composition of maps, the first one applied first."""
  a, b = maps[0]
  once = cells.traced_once(step)
  for pair in maps[1:]:
    b = once(pair, b)
  forgets = linear_maps.is_zero(a)
  numbers = [tuple(map(id, jax.tree.leaves(each))) for each, _ in maps]
  if len(set(numbers)) == 1:
    a = _power(a, len(maps))
  else:
    once = cells.traced_once(_after)
    for each, _ in maps[1:]:
      a, forgets = once(each, a, forgets)
  # A product that has overflowed before a factor of 0 is NaN by now.
  return linear_maps.where(forgets, 0.0, _not_zero(a)), b


def _after(later: Any, a: Any, forgets: Array) -> tuple[Any, Array]:
  """Returns the product of both A, and whether one of them was 0."""
  return linear_maps.after(later, a), forgets | linear_maps.is_zero(later)


def _power(a: Any, exponent: int) -> Any:
  """Returns a power of A, by squares."""
  if exponent == 1:
    return a
  half = _power(a, exponent // 2)
  square = linear_maps.after(half, half)
  return linear_maps.after(a, square) if exponent % 2 else square


def _not_zero(a: Any) -> Any:
  """Returns A, with the smallest normal numbers where all of it is zero."""

  def tiny(x):
    signed = lax.bitcast_convert_type(x, jnp.int32) | _SMALLEST
    return lax.bitcast_convert_type(signed, jnp.float32)

  return linear_maps.where(linear_maps.is_zero(a), jax.tree.map(tiny, a), a)
