"""Attention: which steps of a sequence matter to a query.

    a_s = softmax_s(v . tanh(W_q q + W_k y_s)),    context = sum_s a_s y_s

Dimensions: B batch, S steps of the source, C features of its values y, F of the
query q, A hidden ones.

References:
  Bahdanau et al., Neural machine translation by jointly learning to align and
  translate, 2015: equations 5 and 6, and their appendix A.1.2.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

Array = jax.Array


class AdditiveAttention(nnx.Module):
  """Weights of steps by v . tanh(W_q query + W_k value)."""

  def __init__(
      self,
      query_features: int,
      value_features: int,
      features: int,
      *,
      dtype: Any = None,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      query_features: F.
      value_features: C.
      features: A.
      dtype: to compute in; None for that of the parameters.
      rngs: `nnx.Rngs` that they are drawn from.
    """
    self.query = nnx.Linear(query_features, features, dtype=dtype, rngs=rngs)
    self.key = nnx.Linear(
        value_features, features, use_bias=False, dtype=dtype, rngs=rngs
    )
    self.score = nnx.Linear(features, 1, use_bias=False, dtype=dtype, rngs=rngs)

  def __call__(
      self, query: Array, keys: Array, values: Array, valid: Array
  ) -> tuple[Array, Array]:
    """Returns the context [B, C], and the weights [B, S].

    Args:
      query: [B, F].
      keys: `self.key` of the values, [B, S, A].
      values: [B, S, C].
      valid: bool [B, S], false in padding.
    """
    hidden = jnp.tanh(self.query(query)[..., None, :] + keys)
    scores = self.score(hidden)[..., 0].astype(jnp.float32)
    # A source of padding alone has no weights, rather than NaN.
    weights = jax.nn.softmax(jnp.where(valid, scores, -1e30), axis=-1)
    weights = jnp.where(valid, weights, 0.0)
    context = jnp.einsum(
        '...s,...sc->...c', weights.astype(values.dtype), values
    )
    return context, weights
