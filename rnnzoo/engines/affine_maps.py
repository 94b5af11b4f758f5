"""Affine maps of a carry, s' = A s + b, composed over time in parallel.

Path 2 needs one for each step: the step itself, linearised around a guess. A
is sparse in one of two ways:

  Pointwise  a carry's S arrays mix, features do not: S x S numbers a feature
  Heads      the features of a head mix as well: one matrix a head

Time is the leading axis, [T, B, ...].
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import associative
from rnnzoo.engines import platforms

Array = jax.Array
Carry = cell_lib.Carry


class Pointwise(NamedTuple):
  """A for every step, without mixing features.

  Attributes:
    entries: [to][from], each [T, B, F].
  """

  entries: tuple[tuple[Array, ...], ...]


class Heads(NamedTuple):
  """A for every step, one matrix for each head.

  Attributes:
    matrix: [T, B, N, S D, S D], indexed [..., to, from]; row s D + d stands for
      feature d of the head in the carry's array s.
  """

  matrix: Array


Maps = Pointwise | Heads


def transpose(maps: Maps) -> Maps:
  """Returns the maps with Aᵀ for A."""
  if isinstance(maps, Heads):
    return Heads(jnp.swapaxes(maps.matrix, -1, -2))
  return Pointwise(tuple(zip(*maps.entries, strict=True)))


def apply(maps: Maps, carry: Carry) -> Carry:
  """Returns A s for every step; the arrays of `carry` are [T, B, F]."""
  if isinstance(maps, Heads):
    column = _columns([carry], maps.matrix)
    return _carries(maps.matrix @ column, carry)[0]
  return tuple(_dot(row, carry) for row in maps.entries)


def solve(maps: Maps, given: Sequence[Carry], reverse: bool) -> list[Carry]:
  """Returns s_t = A_t s_{t-1} + b_t for all t in parallel, from s = 0.

  Args:
    maps: A of every step.
    given: several b to solve for, each S arrays [T, B, F].
    reverse: whether time runs from the last step to the first.
  """
  if isinstance(maps, Heads):
    elements = maps.matrix, _columns(given, maps.matrix)
    solved = over_time(_compose_matrices, elements, reverse=reverse)[1]
    return _carries(solved, given[0])
  if len(maps.entries) == 1:
    scalars = platforms.Functions(_Kernel(reverse), _Compose(reverse))
    operands = maps.entries[0][0], [b for (b,) in given]
    return [(s,) for s in platforms.kernels_if_any(scalars, operands)]
  entries = jnp.stack([jnp.stack(row, axis=1) for row in maps.entries], axis=1)
  columns = jnp.stack([jnp.stack(b, axis=1) for b in given], axis=2)
  solved = over_time(_compose_entries, (entries, columns), reverse=reverse)[1]
  return [
      tuple(solved[:, i, k] for i in range(len(maps.entries)))
      for k in range(len(given))
  ]


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """`solve` for a carry of one array, by the kernel of `linear_scan`."""

  reverse: bool

  def __call__(self, operands: tuple[Array, list[Array]]) -> list[Array]:
    a, given = operands
    run = functools.partial(
        pallas_kernels.linear_scan, reverse=self.reverse, time_major=True
    )
    return [run(a, b) for b in given]


@dataclasses.dataclass(frozen=True)
class _Compose:
  """The same without kernels."""

  reverse: bool

  def __call__(self, operands: tuple[Array, list[Array]]) -> list[Array]:
    a, given = operands
    a, b = a[:, None], jnp.stack(given, axis=1)
    if on_cpu():
      solved = over_time(_compose_scalars, (a, b), reverse=self.reverse)[1]
    else:
      solved = associative.compose_scan(a, b, self.reverse)
    return [solved[:, i] for i in range(len(given))]


def over_time(compose: Callable[[Any, Any], Any], elements, *, reverse: bool):
  """Returns the compositions of all steps up to each one.

  Args:
    compose: as for `lax.associative_scan`; it broadcasts leading axes.
    elements: arrays [T, ...].
    reverse: whether time runs from the last step to the first.
  """
  # Compositions vary over the devices of a `jax.shard_map` if any element does.
  elements = devices.alike(elements)
  run = _in_blocks if on_cpu() else lax.associative_scan
  return run(compose, elements, reverse=reverse)


def on_cpu() -> bool:
  """Returns whether blocks of time are better than a tree of compositions."""
  return jax.default_backend() == 'cpu'


def _in_blocks(compose, elements, *, reverse: bool):
  """`lax.associative_scan` in two rounds of about sqrt(T) steps each.

  The first works on all blocks of time at once, the second on their totals.
  That is half the work, and a small part of the program to be compiled. A CPU
  has no use for more in parallel.

  Args:
    compose: as for `lax.associative_scan`; it broadcasts leading axes.
    elements: arrays [T, ...].
    reverse: whether time runs from the last step to the first.
  """
  time = jax.tree.leaves(elements)[0].shape[0]
  length = math.isqrt(time - 1) + 1
  count = -(-time // length)

  def split(x):
    x = jnp.flip(x, 0) if reverse else x
    widths = [(0, count * length - time)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, widths).reshape(count, length, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1)

  def join(x):
    x = jnp.swapaxes(x, 0, 1).reshape(count * length, *x.shape[2:])[:time]
    return jnp.flip(x, 0) if reverse else x

  def prefixes(elements):
    first, rest = (
        jax.tree.map(lambda x, at=at: x[at], elements)
        for at in (0, slice(1, None))
    )

    def body(total, element):
      total = compose(total, element)
      return total, total

    _, others = lax.scan(body, first, rest)
    return jax.tree.map(
        lambda x, y: jnp.concatenate([x[None], y]), first, others
    )

  within = prefixes(jax.tree.map(split, elements))
  totals = prefixes(jax.tree.map(lambda x: x[-1], within))
  later = compose(
      jax.tree.map(lambda x: x[:-1], totals),
      jax.tree.map(lambda x: x[:, 1:], within),
  )
  return jax.tree.map(
      lambda x, y: join(jnp.concatenate([x[:, :1], y], axis=1)), within, later
  )


def _compose_entries(first, second):
  """Composes [..., S, S, B, F] and [..., S, n, B, F]."""
  (a1, b1), (a2, b2) = first, second
  a2 = a2[..., None, :, :]
  through = lambda x: jnp.sum(a2 * x[..., None, :, :, :, :], axis=-4)
  return through(a1), through(b1) + b2


def _compose_scalars(first, second):
  (a1, b1), (a2, b2) = first, second
  return a2 * a1, a2 * b1 + b2


def _compose_matrices(first, second):
  (a1, b1), (a2, b2) = first, second
  return a2 @ a1, a2 @ b1 + b2


def _dot(row: Sequence[Array], column: Sequence[Array]) -> Array:
  total = row[0] * column[0]
  for a, b in zip(row[1:], column[1:], strict=True):
    total += a * b
  return total


def _columns(given: Sequence[Carry], matrix: Array) -> Array:
  """Returns [T, B, N, S D, len(given)]."""
  heads, size = matrix.shape[-3:-1]
  column = lambda carry: jnp.concatenate(
      [x.reshape(*x.shape[:-1], heads, size // len(carry)) for x in carry],
      axis=-1,
  )
  return jnp.stack(list(map(column, given)), axis=-1)


def _carries(columns: Array, like: Carry) -> list[Carry]:
  """The inverse of `_columns`."""
  count, shape = len(like), like[0].shape
  found = []
  for i in range(columns.shape[-1]):
    parts = jnp.split(columns[..., i], count, axis=-1)
    found.append(tuple(part.reshape(shape) for part in parts))
  return found
