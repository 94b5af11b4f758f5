"""Cells made of a diagonal cell, whose carry also says how it came about.

Parts of time run side by side. One loop finds the carry after a part and how
it depends on the carry before, in registers: `Tangent` has the derivative,
`Clipped` an exact map where the cell has one. Kernels run both as they run any
cell: equations are pointwise, and a jaxpr of `jax.jvp` is one too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib

Array = jax.Array

# The name of the recurrent kernel's diagonal among the parameters, [G, F].
WEIGHTS = 'recurrent_weights'


@dataclasses.dataclass(frozen=True)
class _Made(cell_lib.Cell):
  """A cell with the gates of another one.

  Attributes:
    cell: the equations of h.
  """

  cell: cell_lib.Cell

  @property
  def input_gates(self) -> int:  # type: ignore[override]
    return self.cell.input_gates

  @property
  def recurrent_gates(self) -> int:  # type: ignore[override]
    return self.cell.recurrent_gates


@dataclasses.dataclass(frozen=True)
class Tangent(_Made):
  """A cell of one array; carry (h, slope), slope' = dh'/dh slope."""

  carry_names = ('h', 'slope')

  def update(self, params, x_gates, h_gates, carry):
    del h_gates  # They are made of h here, to be differentiated.
    own, weights = _split(params)
    h, slope = carry

    def step(h):
      h_gates = tuple(w * h for w in weights)
      (new,) = self.cell.update(own, x_gates, h_gates, (h,))
      return new

    return jax.jvp(step, (h,), (slope,))


@dataclasses.dataclass(frozen=True)
class Clipped(_Made):
  """h' = clip(a h + b, low, high) of all steps so far; carry (a, b, low, high).

  The guess of the cell that it is made of is one recurrence of that form.
  """

  carry_names = ('a', 'b', 'low', 'high')

  def update(self, params, x_gates, h_gates, carry):
    del h_gates
    step = map_of_step(self.cell, params, x_gates)
    if step is None:
      raise NotImplementedError(f'{self.cell} has no clipped map.')
    like = carry[0]
    step = tuple(
        jnp.broadcast_to(jnp.asarray(x, like.dtype), like.shape) for x in step
    )
    return compose(carry, step)


@dataclasses.dataclass(frozen=True)
class Clip(cell_lib.Cell):
  """h' = clip(a h + b, low, high), with all four as input gates."""

  input_gates = 4
  recurrent_gates = 1
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params, h_gates
    return (apply(x_gates, carry[0]),)


@dataclasses.dataclass(frozen=True)
class Largest(cell_lib.Cell):
  """The largest so far, as far as it is remembered: m' = max(k m, value).

  k is the size of a slope, at most 1; it is 1 where the slope is NaN.
  """

  input_gates = 2
  recurrent_gates = 1
  carry_names = ('m',)

  def update(self, params, x_gates, h_gates, carry):
    del params, h_gates
    slope, value = x_gates
    kept = jnp.maximum(slope, -slope)
    kept = jnp.where(kept < 1, kept, 1.0)
    # An infinite carry that is forgotten would be NaN.
    before = jnp.where(kept == 0, 0.0, kept * carry[0])
    return (jnp.maximum(before, value),)


def map_of_step(cell: cell_lib.Cell, params, x_gates) -> Any:
  """Returns (a, b, low, high) of a step, or None where a guess is none.

  Args:
    cell: a cell whose carry is one array.
    params: parameters, `WEIGHTS` included.
    x_gates: input gates of the step.
  """
  if not cell.has_exact_guess:
    return None
  own, weights = _split(params)
  found: list[Any] = []

  def solve(start, a, b, low=-jnp.inf, high=jnp.inf):
    del start
    found.append((a, b, low, high))
    return zero, after

  zero = jnp.zeros_like(x_gates[0])
  after = zero + 1  # An array of its own, to be known again.
  h_gates = (zero,) * cell.recurrent_gates
  guess = cell.guess(own, x_gates, h_gates, (zero,), weights, solve)
  if guess is None or len(found) != 1 or guess[0] is not after:
    return None
  return found[0]


def has_map(cell: cell_lib.Cell, params) -> bool:
  """Returns whether a step is a clipped affine map."""
  gates = (jnp.zeros((1,)),) * cell.input_gates
  first = {k: jnp.asarray(v)[..., :1] for k, v in params.items()}
  return map_of_step(cell, first, gates) is not None


def _split(params):
  own = {k: v for k, v in params.items() if k != WEIGHTS}
  return own, params[WEIGHTS]


def compose(first, second):
  """Returns the clipped affine map of two, of which `first` acts first."""
  a1, b1, low1, high1 = first
  a2, b2, low2, high2 = second
  ends = _line(a2, b2, low1), _line(a2, b2, high1)
  return (
      a2 * a1,
      _line(a2, b2, b1),
      _clip(jnp.minimum(*ends), low2, high2),
      _clip(jnp.maximum(*ends), low2, high2),
  )


def apply(maps, h):
  """Returns clip(a h + b, low, high) for maps (a, b, low, high)."""
  a, b, low, high = maps
  return _clip(_line(a, b, h), low, high)


def _line(a, b, h):
  """Returns a h + b, where a = 0 forgets an infinite h."""
  return jnp.where(a == 0, b, a * h + b)


def _clip(x, low, high):
  return jnp.minimum(jnp.maximum(x, low), high)
