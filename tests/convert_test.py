"""Loading weights of other libraries; golden_test.py compares what they do."""

import types

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import numpy as np

import rnnzoo
from rnnzoo import convert

IN, FEATURES = 3, 4


def make(cls, **options):
  return cls(IN, FEATURES, rngs=nnx.Rngs(0), **options)


def torch_weights(width, in_features=IN, features=FEATURES):
  return {
      'weight_ih_l0': np.ones((width, in_features)),
      'weight_hh_l0': np.ones((width, features)),
      'bias_ih_l0': np.ones(width),
      'bias_hh_l0': np.ones(width),
  }


class ConvertTest(parameterized.TestCase):

  def test_takes_a_part_of_a_model(self):
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda a: rng.standard_normal(a.shape), torch_weights(12)
    )
    model = {'encoder.' + k: v for k, v in arrays.items()}
    model['decoder.weight'] = np.ones(3)
    whole, part = make(rnnzoo.GRU), make(rnnzoo.GRU)
    convert.from_torch(whole, arrays)
    convert.from_torch(part, model, prefix='encoder.')
    np.testing.assert_array_equal(part.kernel[...], whole.kernel[...])
    np.testing.assert_allclose(
        whole.cell_params['recurrent_bias'][...],
        arrays['bias_hh_l0'][8:],
        rtol=1e-6,
    )

  def test_without_biases(self):
    arrays = torch_weights(12)
    del arrays['bias_ih_l0'], arrays['bias_hh_l0']
    layer = make(rnnzoo.GRU, use_bias=False)
    layer.cell_params['recurrent_bias'][...] = np.ones(FEATURES)
    convert.from_torch(layer, arrays)
    self.assertEqual(float(layer.cell_params['recurrent_bias'].sum()), 0)

  def test_keeps_param_dtype(self):
    layer = make(rnnzoo.LSTM, param_dtype='bfloat16')
    convert.from_torch(layer, torch_weights(16))
    self.assertEqual(layer.kernel.dtype, 'bfloat16')

  def test_reads_tensors(self):
    # What convert needs of a torch.Tensor.
    array = np.ones((FEATURES, IN), np.float32)
    tensor = types.SimpleNamespace(
        dtype='torch.bfloat16', float=lambda: array, cpu=lambda: tensor
    )
    tensor.detach = lambda: tensor
    layer = make(rnnzoo.Elman)
    convert.from_torch(layer, torch_weights(4) | {'weight_ih_l0': tensor})
    np.testing.assert_array_equal(layer.kernel[0], array.T)


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('Elman', {}, {}, "no entry 'weight_ih_l0'.* shape"),
      ('GRU', {}, torch_weights(4), r'\(12, 3\) for a GRU .* got \(4, 3\)'),
      ('Elman', {'use_bias': False}, torch_weights(4), r"\['bias_hh_l0', 'bia"),
      ('Elman', {'num_heads': 2}, torch_weights(4), 'num_heads=1, got .*=2'),
      ('SLSTM', {}, torch_weights(16), 'Elman, GRU and LSTM .* got SLSTM'),
      (
          'Elman',
          {},
          torch_weights(4) | {'weight_ih_l1': np.ones((4, 4))},
          r"no place for: \['weight_ih_l1'\]",
      ),
  )
  def test_from_torch(self, name, options, weights, message):
    layer = make(rnnzoo.LAYERS[name], **options)
    before = jax.tree.map(np.asarray, nnx.state(layer))
    with self.assertRaisesRegex(ValueError, message):
      convert.from_torch(layer, weights)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)

  @parameterized.parameters(
      ('GRU', nnx.LSTMCell, {}, 'LSTMCell .* does not compute what GRU'),
      ('Elman', nnx.SimpleCell, {'activation_fn': nnx.relu}, 'with relu does'),
      ('Elman', nnx.SimpleCell, {'residual': True}, 'without residual'),
      ('GRU', nnx.GRUCell, {'gate_fn': nnx.hard_sigmoid}, 'gate_fn=nnx.sig'),
      ('Elman', nnx.Linear, {}, 'cell must be an nnx.SimpleCell.*got Linear'),
  )
  def test_from_flax(self, name, cell, options, message):
    cell = cell(IN, FEATURES, **options, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, message):
      convert.from_flax(make(rnnzoo.LAYERS[name]), cell)

  def test_from_flax_sizes(self):
    cell = nnx.GRUCell(IN + 1, FEATURES, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, r'\(3, 12\) for.*got \(4, 12\)'):
      convert.from_flax(make(rnnzoo.GRU), cell)


if __name__ == '__main__':
  absltest.main()
