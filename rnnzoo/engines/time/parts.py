"""Parts of time that run side by side, step by step within a part.

A run over all parts takes as many steps in turn as a part has, whatever T is,
and no more arithmetic than all steps at once. It leaves steps that do not
follow from each other only at the joints, where one part ends and the next
begins.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from rnnzoo import cell as cell_lib

Array = jax.Array
Carry = cell_lib.Carry

# A part has about as many steps as there are parts, up to this.
_LONGEST = 32


def for_all_mapped(flag: Array) -> Array:
  """Returns the flag; under `jax.vmap`, whether it holds in all of its rows.

  Under `jax.vmap` a `lax.cond` whose predicate differs between rows runs both
  branches, and a `lax.while_loop` selects in every round. If one predicate
  holds for all rows, one branch runs.
  """
  return _for_all_mapped_p.bind(flag)


_for_all_mapped_p = core.Primitive('for_all_mapped')
_for_all_mapped_p.def_impl(lambda flag: flag)
_for_all_mapped_p.def_abstract_eval(lambda flag: flag)
mlir.register_lowering(
    _for_all_mapped_p, mlir.lower_fun(lambda flag: flag, multiple_results=False)
)


def _for_all_rows(args, dims):
  (flag,), (axis,) = args, dims
  return for_all_mapped(jnp.all(flag, axis=axis)), None


batching.primitive_batchers[_for_all_mapped_p] = _for_all_rows


class Parts:
  """Steps of a window, cut into parts of time.

  The carries that parts end with are [count, B, F], in the order of the loop.

  Attributes:
    length: steps of a part.
    count: number of parts.
  """

  def __init__(
      self,
      body: Callable[[Carry, Any], tuple[Carry, Any]],
      init: Carry,
      xs: Any,
      reverse: bool,
  ):
    """Cuts time.

    Args:
      body: (carry, x) -> (carry, y), one step, as in `lax.scan`.
      init: the carry before the first step, each [B, F].
      xs: the steps' own arrays, [T, ...].
      reverse: whether time runs from the last step to the first.
    """
    self._time = jax.tree.leaves(xs)[0].shape[0]
    self._init, self._reverse = init, reverse
    self.length = min(_LONGEST, math.isqrt(self._time - 1) + 1)
    self.count = -(-self._time // self.length)
    self._xs = xs
    self._step = jax.vmap(lambda carry, x: body(carry, x)[0])

  def ends(self, s: Carry) -> Carry:
    """Returns the ends of parts, of carries after all steps [T, B, F]."""
    return self.at(self.length - 1, s)

  def run(self, ends: Carry) -> Carry:
    """Runs all parts once, each from the end of the one before it.

    Args:
      ends: the carries that parts begin with; the last one has no effect.

    Returns:
      The carries that parts end with.
    """
    body = lambda i, carry: self._step(carry, self.at(i, self._xs))
    return lax.fori_loop(0, self.length, body, self._begun(ends))

  def run_often(self, ends: Carry, times: Array) -> Carry:
    """Runs all parts so many times, each time from the ends that were found."""
    _, ends = lax.while_loop(
        lambda state: ~for_all_mapped(state[0] <= 0),
        lambda state: (state[0] - 1, self.run(state[1])),
        (times, ends),
    )
    return ends

  def carries(self, ends: Carry) -> Carry:
    """Runs all parts once, like `run`.

    Returns:
      The carries after all steps, each [T, B, F].
    """
    body = lambda carry, i: (self._step(carry, self.at(i, self._xs)),) * 2
    steps = jnp.arange(self.length)
    _, found = lax.scan(body, self._begun(ends), steps)
    return tuple(map(self._joined, found))

  def with_ends(self, s: Carry, ends: Carry) -> Carry:
    """Returns carries with others where parts end, but for the last part.

    Args:
      s: carries after all steps, each [T, B, F].
      ends: carries that parts end with, as in `run`.
    """
    at = jnp.arange(1, self.count) * self.length - 1
    at = self._time - 1 - at if self._reverse else at
    return tuple(x.at[at].set(e[:-1]) for x, e in zip(s, ends, strict=True))

  def _begun(self, ends):
    return tuple(
        jnp.concatenate([c[None], e[:-1]])
        for c, e in zip(self._init, ends, strict=True)
    )

  def at(self, i, tree):
    """Returns step i of every part, [count, ...], of arrays [T, ...]."""
    # Not all steps in another order at once: that copy would stay in memory.
    steps = jnp.arange(self.count) * self.length + i
    steps = jnp.minimum(steps, self._time - 1)
    steps = self._time - 1 - steps if self._reverse else steps
    return jax.tree.map(lambda x: x[steps], tree)

  def _joined(self, x):
    """Returns [T, ...] of [length, count, ...]."""
    x = jnp.swapaxes(x, 0, 1)
    x = x.reshape(self.count * self.length, *x.shape[2:])[: self._time]
    return jnp.flip(x, 0) if self._reverse else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
  """Parts of time as sequences of their own, for kernels that take many.

  A sequence of T steps is cut into C parts of L steps, which stand side by side
  either in the batch, [B, T, ..., F] -> [B C, L, ..., F], which moves nothing
  in memory, or in the features, -> [1, L, ..., B C F]. A kernel has 128 lanes
  for features, and few features would leave most lanes empty. Small arrays have
  a row for each part, [C, B F], in the order of the loop.

  Attributes:
    batch: B.
    time: T.
    features: F.
    count: C, at least 2.
    reverse: whether time runs from the last step to the first.
    in_features: whether parts stand side by side in the features.
  """

  batch: int
  time: int
  features: int
  count: int
  reverse: bool
  in_features: bool

  @property
  def length(self) -> int:
    """L: the last part of the loop has steps of zeros where C L > T."""
    return -(-self.time // self.count)

  @property
  def missing(self) -> int:
    """Number of steps of zeros, at the end of the loop."""
    return self.count * self.length - self.time

  def steps(self, x: Array) -> Array:
    """Folds an array [B, T, ...], which ends in F if parts are features."""
    pads = (self.missing, 0) if self.reverse else (0, self.missing)
    if self.missing:
      x = jnp.pad(x, [(0, 0), pads] + [(0, 0)] * (x.ndim - 2))
    if not self.in_features:
      return x.reshape(self.batch * self.count, self.length, *x.shape[2:])
    x = x.reshape(self.batch, self.count, self.length, *x.shape[2:])
    x = jnp.moveaxis(x, (0, 1), (-3, -2))
    return x.reshape(1, *x.shape[:-3], -1)

  def unfolded(self, x: Array) -> Array:
    """Returns [B, T, F] of a folded array [B C, L, F] or [1, L, B C F]."""
    parts = self.batch, self.count
    if self.in_features:
      x = x[0].reshape(self.length, *parts, self.features)
      x = jnp.moveaxis(x, 0, 2)
    x = x.reshape(self.batch, self.count * self.length, self.features)
    start = self.missing if self.reverse else 0
    return x[:, start : start + self.time]

  def rows(self, carry: Array) -> Array:
    """Returns [C, B F], in the order of the loop, of a folded carry."""
    carry = carry.reshape(self.batch, self.count, self.features)
    rows = jnp.swapaxes(carry, 0, 1).reshape(self.count, -1)
    return rows[::-1] if self.reverse else rows

  def carry(self, rows: Array) -> Array:
    """The inverse of `rows`: [B C, F] or [1, B C F]."""
    rows = rows[::-1] if self.reverse else rows
    parts = rows.reshape(self.count, self.batch, self.features)
    parts = jnp.swapaxes(parts, 0, 1)
    if self.in_features:
      return parts.reshape(1, -1)
    return parts.reshape(-1, self.features)

  def every(self, carry: Array) -> Array:
    """Returns [C, B F], one carry [B, F] repeated for each part."""
    return jnp.broadcast_to(
        carry.reshape(1, -1), (self.count, self.batch * self.features)
    )

  def small(self, x: Array) -> Array:
    """Folds an array with one number for each feature, [..., F]."""
    if not self.in_features:
      return x
    lead = x.shape[:-1]
    x = jnp.broadcast_to(x, (*lead, self.features))[..., None, :]
    x = jnp.broadcast_to(x, (*lead, self.batch * self.count, self.features))
    return x.reshape(*lead, -1)
