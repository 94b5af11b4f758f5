"""Vectors of tokens, also of a batch that is sharded over devices."""

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import checks
from rnnzoo.engines import sharding

Array = jax.Array


@jax.named_scope('embedding')
def vectors(embed: nnx.Embed, tokens: Array) -> Array:
  """Returns the vectors [..., E] of tokens.

  JAX does not choose how a gather with indices over an Explicit axis of a mesh
  is sharded; here the vectors are sharded as the tokens are.

  Args:
    embed: the table [V, E].
    tokens: int [...].

  Raises:
    ValueError: the table has no values.
  """
  shape = embed.num_embeddings, embed.features
  checks.parameter(embed.embedding.get_value(), shape, 'Embed.embedding')
  if not sharding.is_sharded(tokens) or embed.num_embeddings == 1:
    return embed(tokens)
  (table,) = embed.promote_dtype(
      (embed.embedding[...],), dtype=embed.dtype, inexact=False
  )
  return table.at[tokens].get(
      mode='fill',
      fill_value=jnp.nan,
      out_sharding=sharding.sharding(tokens),
  )
