"""DropConnect on recurrent matrices: training drops entries of R itself.

The mask is drawn once a call, outside the time loop, so every path and kernel
runs as without it.

References:
  Wan et al., Regularization of neural networks using DropConnect, 2013.
  Merity, Keskar, Socher, Regularizing and optimizing LSTM language models,
  2018: DropConnect on an LSTM's R.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import settings


def dropconnect(params: Any, rate: float, key: jax.Array) -> Any:
  """Drops a share of the entries of every recurrent matrix.

  Entries are zeroed with probability `rate`, and the others are divided by
  1 - rate. All sequences of a batch and all steps share one mask, and gradients
  reach the entries that stay. Recurrences of single units, as in `IndRNN`, have
  no matrix and are left alone.

  >>> from flax import nnx
  >>> import rnnzoo
  >>> layer = rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0))
  >>> structure, params = nnx.split(layer, nnx.Param)
  >>> def loss(params, x, key):
  ...   layer = nnx.merge(structure, rnnzoo.dropconnect(params, 0.5, key))
  ...   return jnp.mean(layer(x) ** 2)
  >>> gradients = jax.grad(loss)(params, jnp.ones((2, 5, 3)), jax.random.key(1))

  Args:
    params: the state of a model, such as `nnx.state(model, nnx.Param)`.
    rate: the share that is dropped, in [0, 1).
    key: of the masks.

  Returns:
    A state of the same structure.

  Raises:
    ValueError: the rate is not in [0, 1), there is no recurrent matrix,
      `params` is a model, or `key` is none.
  """
  settings.dropout_rate(rate, 'rate')
  rate = float(rate)  # A numpy scalar would widen bfloat16; 0 is an int.
  if isinstance(params, nnx.Module):
    raise ValueError(
        'params must be the state of a model, as nnx.state(model, nnx.Param);'
        f' got {settings.a(type(params))} itself'
    )
  leaves, structure = jax.tree.flatten_with_path(params)
  count = sum(_is_matrix(path, leaf) for path, leaf in leaves)
  if not count:
    raise ValueError(
        'dropconnect needs a recurrent matrix, such as an LSTM has; there is'
        ' none in this state.'
    )
  try:
    keys = iter(jax.random.split(key, count))
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'key must be one key of JAX, got {key!r:.80}; jax.random.key(0) would'
        ' work.'
    ) from error
  values = []
  for path, leaf in leaves:
    if _is_matrix(path, leaf):
      kept = jax.random.bernoulli(next(keys), 1 - rate, leaf.shape)
      leaf = jnp.where(kept, leaf / (1 - rate), 0)
    values.append(leaf)
  return jax.tree.unflatten(structure, values)


def _is_matrix(path: Any, leaf: jax.Array) -> bool:
  names = [getattr(entry, 'key', None) for entry in path]
  return 'recurrent_kernel' in names and leaf.shape[-1] > 1
