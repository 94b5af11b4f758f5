"""What the forward pass keeps of its gates for the adjoint.

Of a gate that is a sum x + R h the sum is kept; of others R h, and the input
alone. The kernels compute what is kept. Here are the same
arrays for gates that were not kept, and for a device whose rows are so few that
it runs by the kernels of the family 'dense'.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tiled import plan as plan_lib

Array = jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Inputs:
  """The type of inputs of which the backward pass has no array.

  Attributes:
    gates: G.
    dtype: of the inputs.
  """

  gates: int
  dtype: Any

  def beside(self, h: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of the inputs that belong to h, [B, T, F]."""
    batch, time, features = h.shape
    shape = batch, time, self.gates, features
    return jax.ShapeDtypeStruct(shape, self.dtype)


def alone(plan: plan_lib.Plan, x: Array) -> Array | None:
  """Returns the inputs that are in no sum, [B, T, K, F], or None."""
  if len(plan.alone) == plan.gates:
    return x
  if not plan.alone:
    return None
  return jnp.stack([x[:, :, i] for i in plan.alone], axis=2)


def _h_gates(plan: plan_lib.Plan, h: Array, recurrent_kernel: Array) -> Array:
  """Returns R h of all steps.

  Args:
    plan: of either pass.
    h: that every step starts from, [B, T, F].
    recurrent_kernel: R, [G', N, D, D].

  Returns:
    float32 [B, T, G', F].
  """
  lead = h.shape[:2]
  product = jnp.einsum(
      'abnd,gndk->abgnk',
      h.reshape(*lead, plan.heads, plan.size),
      recurrent_kernel.astype(plan.dtype),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(*lead, plan.recurrent, -1)


def kept(
    plan: plan_lib.Plan, h: Array, x: Array, recurrent_kernel: Array
) -> Array:
  """Returns the gates as the forward kernel keeps them.

  Args:
    plan: as for `_h_gates`, and so are h and recurrent_kernel.
    h: that every step starts from, [B, T, F].
    x: inputs, [B, T, G, F].
    recurrent_kernel: R.

  Returns:
    [B, T, G' F] in `Plan.kept_dtype`.
  """
  product = _h_gates(plan, h, recurrent_kernel)
  split = lambda a: [a[:, :, i] for i in range(a.shape[2])]
  gates = jnp.concatenate(plan.kept(split(x), split(product)), axis=-1)
  most = float(jnp.finfo(plan.kept_dtype).max)
  return jnp.clip(gates, -most, most).astype(plan.kept_dtype)


def inputs(
    plan: plan_lib.Plan,
    h: Array,
    gates: Array,
    alone: Array | None,
    recurrent_kernel: Array,
    dtype: Any,
) -> Array:
  """Returns the inputs of all steps, which the sums have in them.

  Args:
    plan: as for `_h_gates`, and so are h and recurrent_kernel.
    h: that every step starts from.
    gates: from `kept`.
    alone: from `alone`.
    recurrent_kernel: R.
    dtype: of the inputs.

  Returns:
    [B, T, G, F].
  """
  if alone is not None and len(plan.alone) == plan.gates:
    return alone
  sums = gates.reshape(*h.shape[:2], plan.recurrent, -1)
  sums = sums - _h_gates(plan, h, recurrent_kernel)
  split = lambda a: [a[:, :, i].astype(dtype) for i in range(a.shape[2])]
  own = [] if alone is None else split(alone)
  return jnp.stack(plan.input_gates(own, split(sums)), axis=2)
