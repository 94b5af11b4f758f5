"""Layers against torch's numbers, recorded by golden/record_torch.py.

Against flax's cells, see convert/libraries_test.py; for cells that neither has,
equations_test.py.
"""

import functools
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import convert
from tests.testing import reference

GOLDEN = pathlib.Path(__file__).parent / 'golden'
TORCH_LAYERS = {'rnn': 'Elman', 'lstm': 'LSTM', 'gru': 'GRU'}


def load(kind, variant):
  """Returns one recorded module's arrays by name."""
  prefix = variant + '/'
  with np.load(GOLDEN / f'{kind}.npz') as data:
    return {
        k.removeprefix(prefix): data[k] for k in data if k.startswith(prefix)
    }


def state_dict(golden, flat):
  """Splits all weights, or their gradients, by torch's names."""
  arrays, start = {}, 0
  rows, columns = golden['rows'], golden['columns']
  for name, n, m in zip(golden['names'], rows, columns, strict=True):
    shape = (n, m) if name.startswith('weight') else (n,)
    size = np.prod(shape)
    arrays[str(name)] = flat[start : start + size].reshape(shape)
    start += size
  return arrays


def unstacked(carries, bidirectional):
  """torch's [layer, batch, features] per carry as a stack's carry."""
  levels = [tuple(c) for c in zip(*carries, strict=True)]
  if bidirectional:
    levels = zip(levels[::2], levels[1::2], strict=True)
  return tuple(levels)


class TorchTest(parameterized.TestCase):

  @parameterized.product(
      kind=tuple(TORCH_LAYERS),
      variant=('one_layer', 'two_layers', 'bidirectional'),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_agrees(self, kind, variant):
    golden = load(kind, variant)
    bidirectional = variant == 'bidirectional'
    cls = rnnzoo.LAYERS[TORCH_LAYERS[kind]]
    if bidirectional:
      cls = functools.partial(rnnzoo.Bidirectional, cls)
    num_layers = 1 if variant == 'one_layer' else 2
    _, _, in_features = golden['x'].shape
    features = golden['initial'].shape[-1]
    # Recorded in float64, stored in float32.
    with jax.enable_x64(True):
      layer = rnnzoo.Stack(
          *(cls, in_features, features),
          num_layers=num_layers,
          param_dtype=jnp.float64,
          rngs=nnx.Rngs(0),
      )
      convert.from_torch(layer, state_dict(golden, golden['weights']))
      carry_of = lambda arrays: jax.tree.map(
          jnp.float64, unstacked(arrays, bidirectional)
      )
      weights = (golden['w_y'], carry_of(golden['w_final']))

      @reference.jit
      def run(layer, x, carry):
        def loss(layer, x, carry):
          final, y = layer.unroll(
              x, initial_carry=carry, seq_lengths=golden.get('seq_lengths')
          )
          terms = jax.tree.map(lambda w, o: jnp.sum(w * o), weights, (y, final))
          return sum(jax.tree.leaves(terms)), (final, y)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            layer, x, carry
        )

      (_, (final, y)), (d_layer, d_x, d_carry) = run(
          layer, jnp.float64(golden['x']), carry_of(golden['initial'])
      )
      d_weights = gradients_as_torch(d_layer, bidirectional)
      for got, want in (
          (y, golden['y']),
          (final, carry_of(golden['final'])),
          (d_x, golden['d_x']),
          (d_carry, carry_of(golden['d_initial'])),
          (d_weights, state_dict(golden, golden['d_weights'])),
      ):
        got, want = map(jax.tree.leaves, (got, want))
        chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-6)


def gradients_as_torch(d_layer, bidirectional):
  """Gradients of a stack under torch's names and in torch's layout."""
  arrays = {}
  for index, level in enumerate(d_layer.layers):
    parts = {f'_l{index}': level}
    if bidirectional:
      parts = {
          f'_l{index}': level.forward,
          f'_l{index}_reverse': level.backward,
      }
    for suffix, part in parts.items():
      rows = lambda w: np.swapaxes(w, -1, -2).reshape(-1, w.shape[-2])
      d_bias = np.asarray(part.bias[...])
      d_bias_hh = d_bias.copy()
      if 'recurrent_bias' in part.cell_params:
        d_bias_hh[-1] = part.cell_params['recurrent_bias'][...]
      arrays |= {
          'weight_ih' + suffix: rows(part.kernel[...]),
          'weight_hh' + suffix: rows(part.recurrent_kernel[:, 0]),
          # Each gate's two biases are added, so their gradients are equal.
          'bias_ih' + suffix: d_bias.reshape(-1),
          'bias_hh' + suffix: d_bias_hh.reshape(-1),
      }
  return arrays


if __name__ == '__main__':
  absltest.main()
