"""The linear part A of a step h' = A h + b, one small matrix for each feature.

h is a tuple of one array, or of two. A has one of three forms:

    a                      h of one array
    (re, im)               h of two, a complex number: [[re, -im], [im, re]]
    ((p, q), (r, s))       h of two, any 2 x 2 matrix
"""

from collections.abc import Callable
import operator
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Vector = tuple[Any, ...]

Product = Callable[[Any, Any], Any]


def is_matrix(a: Any) -> bool:
  """Returns whether A is given as four numbers."""
  return isinstance(a, tuple) and isinstance(a[0], tuple)


def rows(a: Any) -> tuple[Vector, ...]:
  """Returns the rows of A."""
  if not isinstance(a, tuple):
    return ((a,),)
  if is_matrix(a):
    return a
  re, im = a
  return (re, -im), (im, re)


def times(a: Any, h: Vector, product: Product = operator.mul) -> Vector:
  """Returns A h.

  Args:
    a: A.
    h: arrays.
    product: product of a number of A and one of h.
  """
  found = []
  for row in rows(a):
    terms = [product(x, y) for x, y in zip(row, h, strict=True)]
    found.append(sum(terms[1:], terms[0]))
  return tuple(found)


def after(a: Any, first: Any, product: Product = operator.mul) -> Any:
  """Returns the product A A', of which A' acts first, in the form of both."""
  if not is_matrix(a):
    vector = first if isinstance(first, tuple) else (first,)
    found = times(a, vector, product)
    return found if isinstance(first, tuple) else found[0]
  columns = [times(a, column, product) for column in zip(*first, strict=True)]
  return tuple(zip(*columns, strict=True))


def transposed(a: Any) -> Any:
  """Returns the transpose of A."""
  if is_matrix(a):
    return tuple(zip(*a, strict=True))
  if isinstance(a, tuple):
    re, im = a
    return re, -im
  return a


def outer(a: Any, left: Vector, right: Vector) -> Any:
  """Returns the gradient of left^T A right by A, in the form of A.

  Args:
    a: A, of which only the form is read.
    left: arrays.
    right: arrays.
  """
  if is_matrix(a):
    return tuple(tuple(x * y for y in right) for x in left)
  if isinstance(a, tuple):
    (p, q), (re, im) = left, right
    return p * re + q * im, q * re - p * im
  return left[0] * right[0]


def is_zero(a: Any) -> Array:
  """Returns where all of A is exactly 0: such a step forgets."""
  zero, *others = [x == 0 for x in jax.tree.leaves(a)]
  for other in others:
    zero &= other
  return zero


def add(x: Vector, y: Vector) -> Vector:
  """Returns the sum of two vectors."""
  return tuple(map(operator.add, x, y))


def where(condition: Any, chosen: Any, other: Any) -> Any:
  """Chooses between trees of one structure; `chosen` may be one number."""
  if not isinstance(chosen, tuple):
    return jax.tree.map(lambda y: jnp.where(condition, chosen, y), other)
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), chosen, other)


def identity(a: Any, one: Any = 1.0, zero: Any = 0.0) -> Any:
  """Returns A = 1 in the form of A.

  Args:
    a: A, of which only the form is read.
    one: the number 1, or an array of ones.
    zero: the number 0, or an array of zeros.
  """
  if is_matrix(a):
    return (one, zero), (zero, one)
  return (one, zero) if isinstance(a, tuple) else one
