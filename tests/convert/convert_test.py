"""Loading weights of other libraries; golden_test.py compares what they do."""

import dataclasses
import functools
import types
from unittest import mock

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
from rnnzoo.cells import lstm

IN, FEATURES = 3, 4

STACK = functools.partial(rnnzoo.Stack, rnnzoo.GRU)
DENSE = functools.partial(rnnzoo.DenseStack, rnnzoo.GRU)


def make(cls, **options):
  return cls(IN, FEATURES, rngs=nnx.Rngs(0), **options)


def square_slstm():
  return rnnzoo.SLSTM(4, 4, rngs=nnx.Rngs(0))


def xlstm_weights():
  layer = square_slstm()
  layer.kernel[...] = jnp.zeros_like(layer.kernel)
  return convert.to_xlstm(layer)


def torch_weights(width, in_features=IN, features=FEATURES):
  return {
      'weight_ih_l0': np.ones((width, in_features)),
      'weight_hh_l0': np.ones((width, features)),
      'bias_ih_l0': np.ones(width),
      'bias_hh_l0': np.ones(width),
  }


ones = nnx.initializers.ones_init()


class OtherCell(nnx.GRUCell):
  """A cell that may compute anything."""


@dataclasses.dataclass(frozen=True)
class OtherLSTMCell(lstm.LSTMCell):
  """A cell that may compute anything."""


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

  def test_zoneout_has_no_weights(self):
    plain, layer = make(rnnzoo.GRU), make(rnnzoo.GRU, zoneout_rate=0.1)
    for each in plain, layer:
      convert.from_torch(each, torch_weights(12))
    chex.assert_trees_all_equal(nnx.state(plain), nnx.state(layer))
    with self.assertRaisesRegex(ValueError, 'for which torch has no place'):
      convert.to_torch(layer)

  def test_keeps_param_dtype(self):
    layer = make(rnnzoo.LSTM, param_dtype='bfloat16')
    convert.from_torch(layer, torch_weights(16))
    self.assertEqual(layer.kernel.dtype, 'bfloat16')

  @parameterized.parameters('float16', 'uint8', 'bfloat16', 'int32')
  def test_sums_keep_what_narrow_dtypes_lose(self, dtype):
    number = {'float16': 4e4, 'uint8': 200, 'bfloat16': 257, 'int32': 2e9}
    full = lambda *shape: np.full(shape, number[dtype]).astype(dtype)
    one = float(full(1)[0])
    arrays = {k: full(*a.shape) for k, a in torch_weights(4).items()}
    layer = make(rnnzoo.Elman)
    convert.from_torch(layer, arrays)
    np.testing.assert_array_equal(layer.bias, np.float32(2 * one))
    gru = make(rnnzoo.GRU)
    convert.from_keras(gru, [full(3, 12), full(4, 12), full(2, 12)])
    np.testing.assert_array_equal(gru.bias[:2], np.float32(2 * one))
    np.testing.assert_array_equal(gru.bias[2], np.float32(one))
    lstm = make(rnnzoo.LSTM)
    convert.from_haiku(lstm, {'linear': {'w': full(7, 16), 'b': full(16)}})
    np.testing.assert_array_equal(lstm.bias[1], np.float32(one + 1))
    vanilla = make(rnnzoo.Elman, activation='relu')
    sides = {
        'linear': {'w': full(3, 4), 'b': full(4)},
        'linear_1': {'w': full(4, 4), 'b': full(4)},
    }
    convert.from_haiku(vanilla, sides)
    np.testing.assert_array_equal(vanilla.bias, np.float32(2 * one))
    folded, _ = convert.fold_projection(
        {'weight_hr_l0': full(1, 4), 'weight_hh_l0': full(16, 1)}
    )
    np.testing.assert_array_equal(folded['weight_hh_l0'], one * one)

  def test_a_projection_in_a_model(self):
    one = np.ones
    weights = {'weight_hr_l0': one((2, 4)), 'weight_hh_l0': one((16, 2))}
    folded, projection = convert.fold_projection(weights)
    model = {f'core.{name}': value for name, value in weights.items()}
    got, of_model = convert.fold_projection(
        model | {'head.weight': one((2, 3))}, prefix='core.'
    )
    np.testing.assert_array_equal(of_model, projection)
    self.assertEqual(list(got), list(folded))
    np.testing.assert_array_equal(got['weight_hh_l0'], folded['weight_hh_l0'])
    nested, _ = convert.fold_projection({'core': weights}, prefix='core/')
    self.assertEqual(list(nested), list(folded))

  def test_a_sum_that_is_too_large(self):
    arrays = {k: a * 4e4 for k, a in torch_weights(12).items()}
    layer = make(rnnzoo.GRU, param_dtype='float16')
    message = 'sum of bias_ih_l0 and bias_hh_l0 is too large .*float16'
    with self.assertRaisesRegex(ValueError, message):
      convert.from_torch(layer, arrays)

  @pytest.mark.slow
  def test_keeps_shardings(self):
    mesh = jax.make_mesh((1,), ('x',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))

    def sharded(module):
      state = nnx.state(module)
      nnx.update(module, jax.device_put(state, sharding))
      return module

    square = square_slstm
    block = functools.partial(rnnzoo.SLSTMBlock, 4, 4, rngs=nnx.Rngs(0))
    cell = functools.partial(nnx.GRUCell, IN, FEATURES, rngs=nnx.Rngs(0))
    gru = sharded(make(rnnzoo.GRU))
    convert.from_torch(gru, torch_weights(12))
    filled = sharded(block())
    convert.from_xlstm(filled, convert.to_xlstm(block()))
    flashrnn = sharded(square())
    convert.from_flashrnn(flashrnn, *convert.to_flashrnn(square())[:2])
    other = sharded(cell())
    convert.to_flax(make(rnnzoo.GRU), other)
    for module in (gru, filled, flashrnn, other):
      for path, value in nnx.to_flat_state(nnx.state(module)):
        with self.subTest(path):
          self.assertEqual(value.get_value().sharding, sharding)
    plain = make(rnnzoo.GRU)
    convert.from_torch(plain, torch_weights(12))
    self.assertFalse(plain.kernel.get_value().committed)

  def test_reads_tensors(self):
    # The part of torch.Tensor that convert uses.
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
      (
          *('Elman', {}),
          {f'rnn.{name}': x for name, x in torch_weights(4).items()},
          "prefix='rnn.' would find it",
      ),
      ('SLSTM', {}, torch_weights(16), 'Elman, GRU and LSTM .* got SLSTM'),
      (
          *('Elman', {}),
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
      ('GRU', OtherCell, {}, 'got OtherCell'),
      ('Elman', nnx.SimpleCell, {'carry_init': ones}, 'with its carry_init'),
      ('LSTM', nnx.LSTMCell, {'carry_init': ones}, 'with its carry_init'),
  )
  def test_flax(self, name, cell, options, message):
    cell = cell(IN, FEATURES, **options, rngs=nnx.Rngs(0))
    for convert_cell in convert.from_flax, convert.to_flax:
      with self.assertRaisesRegex(ValueError, message):
        convert_cell(make(rnnzoo.LAYERS[name]), cell)

  @parameterized.parameters(
      ('Elman', nnx.SimpleCell), ('GRU', nnx.GRUCell), ('LSTM', nnx.LSTMCell)
  )
  def test_flax_biases_set_by_hand(self, name, cell):
    cell = cell(IN, FEATURES, rngs=nnx.Rngs(0))
    side = cell.io if name == 'LSTM' else cell.dense_i
    other = cell.ho if name == 'LSTM' else cell.dense_h
    bias, none = sorted((side.bias, other.bias), key=lambda b: b is None)
    for side.bias, other.bias in ((none, none), (bias, bias)):
      for convert_cell in convert.from_flax, convert.to_flax:
        with self.assertRaisesRegex(ValueError, "has .*/bias'"):
          convert_cell(make(rnnzoo.LAYERS[name]), cell)

  def test_what_stands_beside_it(self):
    gru = make(rnnzoo.GRU)
    rnn = nnx.RNN(nnx.GRUCell(IN, FEATURES, rngs=nnx.Rngs(0)))
    with self.assertRaisesRegex(ValueError, 'got RNN of flax.nnx'):
      convert.from_flax(gru, rnn)
    with self.assertRaisesRegex(ValueError, 'got dict of builtins'):
      convert.from_flax(gru, {'params': {}})
    module = mock.Mock(spec=['state_dict'])
    with self.assertRaisesRegex(ValueError, r'Its state_dict\(\) would work'):
      convert.from_torch(gru, module)

  @parameterized.parameters(
      (
          lambda: convert.from_torch(
              make(rnnzoo.LSTM),
              {'core.weight_hr_l0': np.ones((2, 4))},
              prefix='core.',
          ),
          r"fold_projection\(state_dict, prefix='core.'\)",
      ),
      (
          lambda: convert.fold_projection(
              {'core.weight_hh_l0': np.ones((16, 4)), 'head': np.ones(1)},
              prefix='core.',
          ),
          "no entry 'core.weight_hr_l0'.*'core.weight_hh_l0', 'head'",
      ),
      (
          lambda: convert.fold_projection(
              torch_weights(16) | {'weight_hr_l0': np.ones((2, 4))}
          ),
          r'weight_hh_l0 must have 2 columns.* \(16, 4\)',
      ),
      (
          lambda: convert.to_torch(make(rnnzoo.GRU, learn_initial_carry=True)),
          'torch has no learned initial carry',
      ),
      (
          lambda: convert.from_torch(make(STACK, residual=True), {}),
          'torch has no residual sums between levels',
      ),
      (
          lambda: convert.from_torch(make(DENSE), {}),
          'torch has no levels over the outputs of all below',
      ),
      (lambda: convert.to_torch(make(STACK), cell=True), 'no cell for a Stack'),
      (
          lambda: convert.to_torch(make(rnnzoo.GRU), prefix=3),
          'prefix must be a str, got 3',
      ),
      (
          lambda: convert.from_haiku(make(rnnzoo.GRU), {}),
          'before the product with R',
      ),
      (
          lambda: convert.to_haiku(make(rnnzoo.Elman), prefix='core/'),
          "activation='relu', got 'tanh'",
      ),
      (
          lambda: convert.from_keras(
              make(rnnzoo.GRU),
              [np.ones((3, 12)), np.ones((4, 12)), np.ones(12)],
          ),
          'reset_after=False',
      ),
      (
          lambda: convert.from_keras(make(rnnzoo.LSTM), [np.ones((3, 16))]),
          'must be 3 arrays for this LSTM .*, got 1',
      ),
      (lambda: convert.to_keras(make(STACK)), 'keras has no Stack'),
      (
          lambda: convert.from_linen(
              make(rnnzoo.GRU), {'params': convert.to_linen(make(rnnzoo.GRU))}
          ),
          "no entry 'ir/kernel'.* prefix='params/' would find it",
      ),
      (
          lambda: convert.from_linen(
              make(rnnzoo.Elman),
              convert.to_linen(make(rnnzoo.Elman)) | {'more': np.ones(1)},
          ),
          r"no place for: \['more'\]",
      ),
      (
          lambda: convert.from_flashrnn(
              make(rnnzoo.LSTM, num_heads=2), np.ones((4, 1, 4, 4)), np.ones(4)
          ),
          r'R must have shape \(4, 2, 2, 2\)',
      ),
      (
          lambda: convert.from_xlstm(
              make(rnnzoo.SLSTM), {'conv1d.conv.weight': np.ones(1)}
          ),
          'in_features = 3 and features = 4',
      ),
      (
          lambda: convert.from_xlstm(
              square_slstm(), xlstm_weights() | {'conv1d.conv.bias': np.ones(4)}
          ),
          r"no place for: \['conv1d.conv.bias'\]",
      ),
      (
          lambda: convert.to_xlstm(square_slstm()),
          'not zero between different heads',
      ),
      (
          lambda: convert.to_flashrnn(make(rnnzoo.Elman, activation='relu')),
          'applies tanh',
      ),
  )
  def test_refused(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  @pytest.mark.slow
  def test_refused_both_ways(self):
    both = {
        'torch': (convert.to_torch, convert.from_torch),
        'keras': (convert.to_keras, convert.from_keras),
        'haiku': (
            functools.partial(convert.to_haiku, prefix=''),
            convert.from_haiku,
        ),
        'linen': (convert.to_linen, convert.from_linen),
        'FlashRNN': (
            convert.to_flashrnn,
            functools.partial(convert.from_flashrnn, b=np.ones(1)),
        ),
        'xLSTM': (convert.to_xlstm, convert.from_xlstm),
    }
    structured = make(rnnzoo.LSTM, recurrent_structure=jnp.negative)
    other = make(functools.partial(rnnzoo.RecurrentLayer, OtherLSTMCell()))
    peephole = make(rnnzoo.LSTM, peephole=True)
    projected = make(rnnzoo.LSTM, projection=4)
    tanh_relu = [
        functools.partial(rnnzoo.Elman, activation=name)
        for name in ('tanh', 'relu')
    ]
    ways = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU)
    stack = lambda layers: make(
        functools.partial(rnnzoo.Stack, layers, num_layers=2)
    )
    two_ways = make(ways)
    two_ways.forward, two_ways.backward = [make(cls) for cls in tanh_relu]
    biases = rnnzoo.GRU, functools.partial(rnnzoo.GRU, use_bias=False)
    sizes = rnnzoo.GRU, lambda n, m, rngs: rnnzoo.GRU(n, m + 1, rngs=rngs)
    half_biased = make(ways)
    half_biased.backward = make(biases[1])
    square = lambda cls, **options: cls(4, 4, rngs=nnx.Rngs(0), **options)
    slstm, block = rnnzoo.SLSTM, rnnzoo.SLSTMBlock
    tirex = {'conv_width': 0, 'norm': 'rms', 'mlp_activation': 'silu'}
    good = [
        convert.to_xlstm(square(block, **options))
        for options in ({}, {**tirex, 'max_forget': 15})
    ]
    weights = convert.to_xlstm(square(block, residual=False, conv_width=0))
    del weights['group_norm.weight']
    for library, layer, message, *given in (
        *((name, structured, 'negative') for name in list(both)[:-1]),
        *((name, other, 'RecurrentLayer') for name in list(both)[:-1]),
        *((name, peephole, 'PeepholeLSTM') for name in list(both)[:-1]),
        *((name, projected, 'Only torch') for name in list(both)[1:-1]),
        ('torch', make(STACK, norm='layer'), 'no normalisation between'),
        ('torch', make(STACK, norm='batch'), 'no normalisation between'),
        ('torch', stack(tanh_relu), 'one cell in all levels .*tanh.*relu'),
        ('torch', stack([rnnzoo.GRU, ways]), 'has 3 in 2 levels'),
        ('torch', stack(biases), 'one use_bias in all levels .*True.*False'),
        ('torch', stack(sizes), 'one number of features in all .*4 and 5'),
        ('keras', half_biased, 'one use_bias in all levels .*True.*False'),
        ('keras', two_ways, 'one cell in all levels .*tanh.*relu'),
        ('FlashRNN', square(slstm, max_forget=15), 'no max_forget'),
        ('FlashRNN', square(slstm, min_normalizer=0), 'no max_forget'),
        ('xLSTM', square(slstm, recurrent_structure=jnp.negative), 'negative'),
        ('xLSTM', square(slstm, max_forget=5), 'None or 15, .* 5', weights),
        ('xLSTM', square(block, max_forget=15), 'be None, .* 15', good[0]),
        ('xLSTM', square(block, **tirex), 'be 15, .* None', good[1]),
    ):
      with self.subTest(f'{library}, {message}'):
        to, back = both[library]
        before = nnx.to_pure_dict(nnx.state(layer))
        with self.assertRaisesRegex(ValueError, message):
          to(layer)
        with self.assertRaisesRegex(ValueError, message):
          back(layer, *(given or [[] if library == 'keras' else {}]))
        after = nnx.to_pure_dict(nnx.state(layer))
        chex.assert_trees_all_equal(after, before)

  def test_to_flax_refuses_a_recurrent_bias(self):
    layer, cell = make(rnnzoo.GRU), nnx.GRUCell(IN, FEATURES, rngs=nnx.Rngs(0))
    layer.cell_params['recurrent_bias'][...] = np.ones(FEATURES)
    with self.assertRaisesRegex(ValueError, 'has no bias b_hn'):
      convert.to_flax(layer, cell)

  def test_layers_without_values(self):
    rngs = nnx.Rngs(0)
    cell = nnx.GRUCell(IN, FEATURES, rngs=rngs)
    abstract = nnx.eval_shape(lambda: make(rnnzoo.GRU))
    block = nnx.eval_shape(lambda: rnnzoo.SLSTMBlock(4, 4, rngs=nnx.Rngs(0)))
    abstract_cell = nnx.eval_shape(
        lambda: nnx.GRUCell(IN, FEATURES, rngs=nnx.Rngs(0))
    )
    for call in (
        lambda: convert.to_torch(abstract),
        lambda: convert.to_keras(abstract),
        lambda: convert.to_flax(abstract, cell),
        lambda: convert.from_flax(make(rnnzoo.GRU), abstract_cell),
        lambda: convert.to_xlstm(block),
    ):
      with self.assertRaisesRegex(ValueError, 'has a shape but no values'):
        call()
    convert.from_torch(abstract, torch_weights(12))
    np.testing.assert_array_equal(abstract.kernel, np.ones((3, IN, FEATURES)))
    convert.to_flax(make(rnnzoo.GRU), abstract_cell)
    self.assertIsInstance(abstract_cell.dense_h.kernel.get_value(), jax.Array)

  def test_from_flax_sizes(self):
    cell = nnx.GRUCell(IN + 1, FEATURES, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, r'\(3, 12\) for.*got \(4, 12\)'):
      convert.from_flax(make(rnnzoo.GRU), cell)


if __name__ == '__main__':
  absltest.main()
