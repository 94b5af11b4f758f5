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
    both_directions: run the second half of the heads in the opposite direction,
      side by side with the first half.
    levels: number of layers of equal size, independent of each other, that run
      side by side: level l has the l-th part of the heads. Arrays of all
      steps, inputs and outputs, hold level by level, [L, B, T, ...].
    time_major: inputs and outputs are [T, B, ...] instead of [B, T, ...].
    outputs: number of the carry's arrays that are returned for all steps.
    out_dtype: dtype of these arrays; None for the engine's own choice.
    recurrent_gradient_clip: bound of the cotangent that comes back through each
      product with the recurrent kernel; None for none.
    zero_not_finite: turn a NaN or an infinity in that cotangent into zero,
      before it is bounded.
    stop_recurrent_gradient: make that cotangent zero.
    cast_kernel: the recurrent kernel, in float32, is cast to the dtype of the
      inputs, and its gradient is not: gradients of several runs can be summed.
    starts: the first step starts a sequence, for a cell that reads starts: no
      carry was given.
    keep_gates: the gates W x, and the part of R h that kernels in tiles write,
      are kept for the backward pass. Otherwise that pass multiplies again.
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
  starts: bool = False
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
