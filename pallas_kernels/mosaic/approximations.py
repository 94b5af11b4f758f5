"""Special functions of kernels, made of fast instructions.

Kernels are compiled with approximate mathematics: exp, tanh and rsqrt are
single instructions of the special-function unit. The functions here turn these
into float32 results. Errors are mostly a few 1e-7 of the result and at most
4e-6, where tanh alone would be off by 5e-4; where results are rounded to 16
bits anyway, `Accuracy` says how much may be saved.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """Accuracy of the special functions of a kernel.

  Attributes:
    error: bound of the absolute error of tanh, the logistic function and
      log1p, where that is cheaper than a relative error of some 1e-7. With
      2^-22 or more, digits near zero are given up; with 2^-11 or more, a
      quarter of the rounding to bfloat16, tanh is a single instruction.
    reciprocal: 1 / x of a float32 array, or None for a square of the reciprocal
      square root.
  """

  error: float = 0.0
  reciprocal: Callable[[Any], Any] | None = None

  @property
  def near(self) -> bool:
    return self.error >= 2**-22

  @property
  def fast(self) -> bool:
    return self.error >= 2**-11


# All digits of float32.
PRECISE = Accuracy()


class Approximations:
  """Special functions of one traced function; costly work is done once.

  The compiler merges equal arithmetic, but not equal special functions, and
  does not know that some functions share most of their work.

  Args:
    accuracy: the accuracy of the functions.
  """

  def __init__(self, accuracy: Accuracy):
    self._accuracy = accuracy
    self._results: dict[Any, Any] = {}
    self._negated: dict[int, Any] = {}
    # Keys hold identities, so the arrays that they identify must stay alive.
    self._alive: list[Any] = []

  def note_negation(self, x, negated) -> None:
    """Remembers that `negated` is -x."""
    self._alive += [negated, x]
    self._negated[id(negated)] = x

  def _once(self, name: str, x, make: Callable[[], Any]):
    """Returns `make()`, called once for each name and x."""
    key = name, id(x)
    if key not in self._results:
      self._alive.append(x)
      self._results[key] = make()
    return self._results[key]

  def logistic(self, x):
    """1 / (1 + exp(-x)); with 1 / (1 + exp(x)) at next to no price."""
    negated = id(x) in self._negated
    x = self._negated.get(id(x), x)
    if self._accuracy.fast:
      half = self._once('half', x, lambda: 0.5 * jnp.tanh(0.5 * x))
      return 0.5 - half if negated else 0.5 + half
    if self._accuracy.near:
      make = lambda: self._reciprocal(1 + lax.exp2((-1 / math.log(2)) * x))
      result = self._once('logistic', x, make)
      return 1 - result if negated else result

    def make_both():
      # Bounded, so that a product with the reciprocal is never inf * 0.
      e = jnp.minimum(lax.exp2((-1 / math.log(2)) * x), 1e30)
      return e, self._reciprocal(1 + e)

    e, result = self._once('logistic', x, make_both)
    return e * result if negated else result

  def div(self, x, y):
    if not jnp.issubdtype(jnp.result_type(y), jnp.floating):
      return lax.div(x, y)
    if not isinstance(y, jax.Array) and jnp.ndim(y) == 0 and y != 0:
      return x * np.float32(1 / float(y))
    return x * self._signed_reciprocal(y)

  def integer_pow(self, x, *, y):
    if y < 0 and self._accuracy.reciprocal is None:
      return self._signed_reciprocal(self.integer_pow(x, y=-y))
    if y < 0:
      # The derivative of a quotient has it next to the reciprocal.
      x, y = self._signed_reciprocal(x), -y
    result = None
    for bit in bin(y)[2:]:
      result = None if result is None else result * result
      if bit == '1':
        result = x if result is None else result * x
    return jnp.ones_like(x) if result is None else result

  def tanh(self, x):
    def make():
      if self._accuracy.fast:
        return jnp.tanh(x)
      if self._accuracy.near:
        return 1 - 2 * self._reciprocal(1 + lax.exp2((2 / math.log(2)) * x))
      return _tanh(x)

    return self._once('tanh', x, make)

  def exp(self, x):
    return self._once('exp', x, lambda: jnp.exp(x))

  def log1p(self, x):
    if self._accuracy.near:
      return jnp.log(1 + x)
    return _log1p(x)

  def _instruction(self, x):
    """Returns 1 / x by one instruction, or None."""
    reciprocal = self._accuracy.reciprocal
    if reciprocal is None or not jnp.ndim(x) or x.dtype != jnp.float32:
      return None
    return reciprocal(x)

  def _reciprocal(self, x):
    """Returns 1 / x for x > 0."""
    found = self._instruction(x)
    if found is not None:
      return found
    root = lax.rsqrt(x)
    return root * root

  def _signed_reciprocal(self, x):
    def make():
      found = self._instruction(x)
      if found is not None:
        return found
      positive = self._reciprocal(jnp.abs(x))
      return jnp.where(x < 0, -positive, positive)

    return self._once('reciprocal', x, make)


def _tanh(x):
  """Returns tanh, by one Newton step from the fast instruction.

  With E = exp(-2|x|), tanh|x| is the root y of (1 - y) - (1 + y) E, which is
  linear in y with slope -(1 + E), and 1 / (1 + E) is (1 + y) / 2. For small x
  the residual has no digits left and the series takes over. Everything but E
  and the last two products is off the critical path, which decides in a
  recurrence.
  """
  fast = jnp.tanh(x)
  size = jnp.abs(fast)
  residual = (1 - size) - (1 + size) * lax.exp2((-2 / math.log(2)) * abs(x))
  half = jnp.where(x < 0, -0.5, 0.5)
  small = jnp.abs(x) < 0.03
  slope = jnp.where(small, 0, half + 0.5 * fast)
  return slope * residual + jnp.where(small, x - x * x * x * (1 / 3), fast)


def _log1p(x):
  series = x * (1 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4 - x * (1 / 5)))))
  return jnp.where(jnp.abs(x) < 0.03, series, jnp.log(1 + x))


def expm1(x, **_):
  """Returns exp(x) - 1."""
  series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
  return jnp.where(jnp.abs(x) < 0.1, series, jnp.exp(x) - 1)


# Primitives that `Approximations` computes, by name. A parameter that means
# something here is passed on.
RULES: dict[str, Callable[..., Any]] = {
    'div': Approximations.div,
    'exp': Approximations.exp,
    'integer_pow': Approximations.integer_pow,
    'log1p': Approximations.log1p,
    'logistic': Approximations.logistic,
    'tanh': Approximations.tanh,
}
