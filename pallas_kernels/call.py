"""The static options of a recurrence in one record."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """Static (hashable) options of one run over time.

  The record travels whole from a layer to the kernels, so that an option is
  named where it is given and where it acts, and nowhere in between.

  Attributes:
    reverse: run from the last step to the first.
    both_directions: run the second half of the heads in the other direction, at
      the same time.
    levels: so many layers of equal size, which need nothing of each other, run
      at the same time: level l has the l-th part of the heads. Arrays of all
      steps, inputs and outputs, hold one level after the other, [L, B, T, ...].
    time_major: inputs and outputs are [T, B, ...] instead of [B, T, ...].
    outputs: number of the carry's arrays that are returned for all steps.
    out_dtype: dtype of these; None for the engine's own choice.
    recurrent_gradient_clip: bound of the cotangent that comes back through each
      product with the recurrent kernel; None for none.
    zero_not_finite: before it is bounded, a NaN or an infinity in that
      cotangent becomes zero.
    stop_recurrent_gradient: that cotangent is zero.
    cast_kernel: the recurrent kernel, in float32, is cast to the dtype of the
      inputs, and its gradient is not: that of several runs can be added up.
    keep_gates: the gates W x, and what kernels in tiles write of R h, are kept
      for the backward pass. Otherwise that pass multiplies again.
  """

  reverse: bool = False
  both_directions: bool = False
  levels: int = 1
  time_major: bool = False
  outputs: int = 1
  out_dtype: Any = None
  recurrent_gradient_clip: float | None = None
  zero_not_finite: bool = False
  stop_recurrent_gradient: bool = False
  cast_kernel: bool = False
  keep_gates: bool = True

  @property
  def groups(self) -> int:
    """Parts of the heads that have flags of their own."""
    return 2 if self.both_directions else self.levels

  def bounded(self, d: jax.Array) -> jax.Array:
    """Returns a cotangent that came back through a product, as options say."""
    clip = self.recurrent_gradient_clip
    if self.zero_not_finite:
      # No comparison with a NaN holds.
      d = jnp.where(jnp.maximum(d, -d) < jnp.inf, d, 0)
    if clip is not None:
      d = jnp.minimum(jnp.maximum(d, -clip), clip)
    return d
