"""Parts of time as sequences of their own, for kernels that take many at once.

A sequence of T steps is cut into C parts of L steps, which stand side by side
either in the batch, [B, T, ..., F] -> [B C, L, ..., F], which moves nothing in
memory, or in the features, -> [1, L, ..., B C F]. A kernel has 128 lanes for
features, and few features would leave most of them empty.

Small arrays have a row for each part, [C, B F], in the order of the loop.
"""

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
  """How time is cut.

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
    """Returns [C, B F], for each part the same carry [B, F]."""
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
