"""Layers whose parameters are all random: zero biases hide mistakes.

And layers, of arrays or of types, as functions of their parameters.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import models


def make(cls, *args, scale=0.4, seed=0, **options):
  """Returns a layer by name or class, with parameters ~ N(0, scale²)."""
  if isinstance(cls, str):
    cls = rnnzoo.LAYERS[cls]
  made = nnx.eval_shape(lambda: cls(*args, rngs=nnx.Rngs(0), **options))
  graphdef, state = nnx.split(made)
  rng = np.random.default_rng(seed)
  draw = lambda p: jnp.asarray(scale * rng.standard_normal(p.shape), p.dtype)
  layer = nnx.merge(graphdef, jax.tree.map(draw, state))
  for part in nnx.iter_modules(layer):
    part = part[1]
    if isinstance(part, rnnzoo.RecurrentLayer) and part.learned_carry:
      carry = as_carry(part.cell, [c[...] for c in part.learned_carry])
      for variable, value in zip(part.learned_carry, carry, strict=True):
        variable.set_value(value)
  return layer


def pure(layer, method='__call__'):
  """Returns (state, *args, **options) -> results of a method, and the state."""
  graphdef, state = nnx.split(layer)

  def call(state, *args, **options):
    return getattr(nnx.merge(graphdef, state), method)(*args, **options)

  return call, state


def squares(layer, **given):
  """Returns (state, x, **options) -> sum of y² in float32, and the state."""
  call, state = pure(layer)

  def loss(state, x, **options):
    y = call(state, x, **given, **options)
    return jnp.sum(y.astype(jnp.float32) ** 2)

  return loss, state


def seq2seq(encoder, features, decoder=rnnzoo.GRU, embedding=3, **options):
  """Returns a translator of tokens 0 to 8 with an encoder of its own."""
  rngs = nnx.Rngs(0)
  given = {'num_source_tokens': 9, 'num_target_tokens': 9, 'rngs': rngs}
  decoder = decoder(embedding + encoder.out_features, features, rngs=rngs)
  return models.Seq2Seq(encoder, decoder, **given, **options)


def carry(layer, *batch_shape, seed=1):
  """Returns a carry as a run of the layer could have left it."""
  rng = np.random.default_rng(seed)
  shape = (*batch_shape, layer.out_features)
  draw = lambda: 0.4 * rng.standard_normal(shape).astype(np.float32)
  return as_carry(layer.cell, [draw() for _ in layer.cell.carry_names])


def as_carry(cell, arrays):
  """Makes any arrays a carry: sLSTM's normaliser is at least 1."""
  return tuple(
      1 + array**2 if name == 'n' else array
      for name, array in zip(cell.carry_names, arrays, strict=True)
  )
