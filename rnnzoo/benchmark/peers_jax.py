"""Peers on JAX, with the weights of a layer of ours: flax, haiku, keras.

Each function returns a function of parameters and x, and the parameters.
"""

from collections.abc import Callable
import os
from typing import Any

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import convert
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import timing
from rnnzoo.convert import weights

Function = Callable[[Any, jax.Array], jax.Array]
Parts = tuple[Function, Any]


def program(
    make: Callable[[rnnzoo.RecurrentLayer], Parts],
    ours: rnnzoo.RecurrentLayer,
    arrays: tuple[np.ndarray, np.ndarray],
    dtype: str,
    backward: bool,
) -> tuple[Callable[[], Any], dict[str, Any]]:
  """Compiles a layer, or its gradients, for given weights and inputs.

  Args:
    make: one of the functions below.
    ours: the layer that has the weights.
    arrays: x, [B, T, I], and the weights of the sum that is differentiated, [B,
      T, D].
    dtype: dtype of the computation.
    backward: whether to return gradients of that sum, by all parameters and x.

  Returns:
    A call without arguments whose result begins with y or the gradient by x,
    and the fields of a row: seconds of compilation and bytes by use.
  """
  function, params = make(ours)
  is_number = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
  params, x, w = jax.tree.map(
      lambda a: jnp.asarray(a, dtype) if is_number(a) else a, (params, *arrays)
  )

  def run(params, x, w):
    if not backward:
      return (function(params, x),)
    loss = lambda x, p: jnp.sum((function(p, x) * w).astype(jnp.float32))
    return jax.grad(loss, (0, 1), allow_int=True)(x, params)

  built = timing.build(run, params, x, w)
  call = lambda: built.call(params, x, w)
  return call, {'compile_s': built.compile_s, **built.memory}


def scan(ours: Any) -> Parts:
  """Our own layer by `lax.scan`."""
  layer = nnx.clone(ours)
  for part, _, _ in weights.parts(layer):
    part.implementation = 'scan'
  return zoo(layer)


def zoo(ours: rnnzoo.RecurrentLayer) -> Parts:
  """Our own layer, by the path that is chosen for this device."""
  graphdef, params = nnx.split(ours)
  return lambda params, x: nnx.merge(graphdef, params)(x), params


def flax_nnx(ours: Any) -> Parts:
  """nnx.RNN of the cell with the fewest matrix products, for each layer."""
  makes = baselines.FLAX_CELLS | {'Elman': nnx.SimpleCell}
  functions, params, levels = [], [], []
  for part, level, backward in weights.parts(ours):
    make = makes[type(part).__name__]
    function, own = _nnx(make, part, reverse=backward, keep_order=True)
    functions.append(function)
    params.append(own)
    levels.append(level)

  def run(params, x):
    for level in dict.fromkeys(levels):
      ys = [
          function(own, x)
          for function, own, at in zip(functions, params, levels, strict=True)
          if at == level
      ]
      x = jnp.concatenate(ys, axis=-1)
    return x

  return run, params


def flax_lstm_cell(ours: rnnzoo.RecurrentLayer) -> Parts:
  """nnx.RNN of the cell with a matrix product for each gate."""
  return _nnx(nnx.LSTMCell, ours)


def _nnx(make: Any, ours: rnnzoo.RecurrentLayer, **options: Any) -> Parts:
  cell = make(ours.in_features, ours.out_features, rngs=nnx.Rngs(0))
  convert.to_flax(ours, cell)
  rnn = nnx.RNN(cell, **options)
  graphdef, params, rest = nnx.split(rnn, nnx.Param, ...)  # type: ignore[misc]
  # The cell counts its random numbers, which needs variables of its own.
  return (
      lambda params, x: nnx.merge(graphdef, params, rest, copy=True)(x),
      params,
  )


def flax_linen(ours: rnnzoo.RecurrentLayer) -> Parts:
  """linen.RNN of the cell with the fewest matrix products."""
  makes = {'LSTM': linen.OptimizedLSTMCell, 'GRU': linen.GRUCell}
  make: Any = makes[type(ours).__name__]
  rnn: Any = linen.RNN(make(ours.out_features))
  params = {'params': {'cell': convert.to_linen(ours)}}
  return lambda params, x: rnn.apply(params, x), params


def haiku(ours: rnnzoo.RecurrentLayer) -> Parts:
  """hk.dynamic_unroll of hk.LSTM; its GRU has other equations."""
  import haiku as hk

  def run(x):
    core = hk.LSTM(ours.out_features)
    start = jax.tree.map(
        lambda c: c.astype(x.dtype), core.initial_state(x.shape[0])
    )
    return hk.dynamic_unroll(core, x, start, time_major=False)[0]

  apply = hk.without_apply_rng(hk.transform(run)).apply
  return apply, convert.to_haiku(ours, prefix='lstm/')


def keras(ours: rnnzoo.RecurrentLayer) -> Parts:
  """keras.layers.LSTM or GRU, on JAX."""
  os.environ.setdefault('KERAS_BACKEND', 'jax')
  import keras as library

  if library.backend.backend() != 'jax':
    raise NotImplementedError('keras runs on another backend than JAX.')
  make = getattr(library.layers, type(ours).__name__)
  layer = make(ours.out_features, return_sequences=True, dtype='float32')
  layer.build((None, None, ours.in_features))
  layer.set_weights(convert.to_keras(ours))
  rest = [v.value for v in layer.non_trainable_variables]

  def run(params, x):
    if x.dtype != jnp.float32:
      raise NotImplementedError('The suite has keras in float32 only.')
    return layer.stateless_call(params, rest, x)[0]

  return run, [v.value for v in layer.trainable_variables]
