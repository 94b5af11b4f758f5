"""Programs that ours are compared with inside a suite.

They are an LSTM written by hand for `lax.scan`, a linear recurrence for
`lax.associative_scan`, JAX's own binding of cuDNN's LSTM, and flax's cells in
loops.
"""

import functools
from typing import Any

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import convert

LAX_SCAN = 'lax_scan_8'  # Eight steps of the loop are unrolled.
CUDNN = 'cudnn'
FLAX = 'flax'
LAX_ASSOCIATIVE = 'lax.associative_scan'
NAMES = LAX_SCAN, CUDNN, FLAX, LAX_ASSOCIATIVE


def lax_scan(arrays: Any) -> jax.Array:
  """An LSTM on given gates: `lax.scan`, and autodiff backward.

  h is kept in the gates' dtype, c in float32.
  """
  x_gates, kernel = arrays['x_gates'], arrays['kernel']
  batch, time, gates, features = x_gates.shape
  _, heads, size, _ = kernel.shape
  packed = jnp.moveaxis(kernel, 0, 2).reshape(heads, size, gates * size)
  xs = x_gates.reshape(batch, time, gates, heads, size)
  xs = xs.transpose(1, 0, 3, 2, 4).reshape(time, batch, heads, gates * size)

  def step(carry, x):
    h, c = carry
    sums = x + jnp.einsum('bnd,nde->bne', h, packed)
    i, f, g, o = jnp.split(sums.astype(jnp.float32), gates, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(x.dtype)
    return (h, c), h

  h, c = (each.reshape(batch, heads, size) for each in arrays['carry'])
  _, h = jax.lax.scan(step, (h.astype(xs.dtype), c), xs, unroll=8)
  return jnp.swapaxes(h, 0, 1).reshape(batch, time, features)


def lax_associative_scan(arrays: Any) -> jax.Array:
  """A linear recurrence of given a [F] and b, by composing pairs (a, b)."""
  a, b = arrays['a'], arrays['b']
  compose = lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1])
  pairs = jnp.broadcast_to(a, b.shape), b
  return jax.lax.associative_scan(compose, pairs, axis=1)[1]


def cudnn(arrays: Any) -> jax.Array:
  """The LSTM of cuDNN on x, with the state of an `rnnzoo.LSTM` of one head."""
  x, state = arrays['x'], arrays['state']
  if jax.default_backend() != 'gpu' or x.dtype != jnp.float32:
    raise NotImplementedError("JAX's cuDNN LSTM needs a GPU and float32.")
  from jax.experimental import rnn  # Warns where there is no GPU.

  kernel, recurrent, bias = (
      state[name][...] for name in ('kernel', 'recurrent_kernel', 'bias')
  )
  _, in_features, features = kernel.shape
  # [gates, to, from], then two biases, which are added.
  flat = [jnp.swapaxes(w, 1, 2).ravel() for w in (kernel, recurrent[:, 0])]
  weights = jnp.concatenate([*flat, bias.ravel(), jnp.zeros(bias.size)])
  batch, time, _ = x.shape
  zero = jnp.zeros((1, batch, features), jnp.float32)
  lengths = jnp.full((batch,), time, jnp.int32)
  y, *_ = rnn.lstm(
      x, zero, zero, weights, lengths, in_features, features, 1, 0.0, False
  )
  return y


class FlaxScannedRNN(linen.Module):
  """The class that programs for agents copy: GRUCell over time, with resets."""

  features: int

  @functools.partial(
      linen.scan,
      variable_broadcast='params',
      in_axes=0,
      out_axes=0,
      split_rngs={'params': False},
  )
  @linen.compact
  def __call__(self, carry, x):
    inputs, resets = x
    carry = jnp.where(resets[:, None], jnp.zeros_like(carry), carry)
    return linen.GRUCell(features=self.features)(carry, inputs)


def flax_scanned(arrays: Any, resets: jax.Array) -> jax.Array:
  """`FlaxScannedRNN` with the state of an `rnnzoo.GRU`, time-major."""
  state, x = arrays['state'], arrays['x']
  kernel, recurrent, bias = (
      state[name] for name in ('kernel', 'recurrent_kernel', 'bias')
  )
  cell: dict[str, Any] = {}
  for i, gate in enumerate('rzn'):
    cell[f'i{gate}'] = {'kernel': kernel[i], 'bias': bias[i]}
    cell[f'h{gate}'] = {'kernel': recurrent[i, 0]}
  cell['hn']['bias'] = state['cell_params']['recurrent_bias']
  features = kernel.shape[-1]
  h = jnp.zeros((x.shape[1], features), x.dtype)
  params = {'params': {'GRUCell_0': cell}}
  found: Any = FlaxScannedRNN(features).apply(params, h, (x, resets))
  return found[1]


class FlaxCells(nnx.Module):
  """flax's cells with the weights of a layer or stack, for single steps."""

  def __init__(self, stack: Any, dtype):
    self.dtype = dtype
    self.cells: Any = nnx.List([])
    for layer in getattr(stack, 'layers', [stack]):
      make = FLAX_CELLS[type(layer).__name__]
      sizes = layer.in_features, layer.out_features
      self.cells.append(make(*sizes, dtype=dtype, rngs=nnx.Rngs(0)))
      convert.to_flax(layer, self.cells[-1])

  def initial_carry(self, batch_shape: tuple[int, ...]) -> Any:
    """Returns zeros."""
    carries = [
        cell.initialize_carry((*batch_shape, cell.in_features), nnx.Rngs(0))
        for cell in self.cells
    ]
    return jax.tree.map(lambda c: c.astype(self.dtype), tuple(carries))

  def step(self, carry, x):
    """Returns the carries after a step, and y."""
    carries = []
    for cell, own in zip(self.cells, carry, strict=True):
      new, x = cell(own, x)
      carries.append(new)
    return tuple(carries), x


FLAX_CELLS: dict[str, Any] = {'LSTM': nnx.OptimizedLSTMCell, 'GRU': nnx.GRUCell}
