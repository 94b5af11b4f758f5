"""ONNX graphs, run by onnxruntime beside the layers."""

import functools
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import rnnzoo
from rnnzoo import convert
from rnnzoo import models

BI_LSTM = functools.partial(rnnzoo.Bidirectional, rnnzoo.LSTM)
LAYERS = {
    'Elman': functools.partial(rnnzoo.Elman, activation='relu'),
    'GRU': functools.partial(rnnzoo.GRU, num_heads=4),
    'IndRNN': rnnzoo.IndRNN,
    'GRU without bias': functools.partial(rnnzoo.GRU, use_bias=False),
    'LSTM': functools.partial(rnnzoo.LSTM, use_bias=False, num_heads=2),
    'Bidirectional': functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU),
    'Stack': functools.partial(rnnzoo.Stack, BI_LSTM, num_layers=2),
}
# The last one has no steps.
LENGTHS = np.array([7, 3, 1, 0], np.int32)


def draw(*shape):
  rng = np.random.default_rng(sum(shape))
  return rng.standard_normal(shape).astype(np.float32)


def drawn(module):
  graphdef, state = nnx.split(module)
  state = jax.tree.map(lambda p: jnp.asarray(0.4 * draw(*p.shape)), state)
  return nnx.merge(graphdef, state)


class Doubled(models.SequenceModel):

  def __call__(self, x, **options):
    return 2 * super().__call__(x, **options)


class OnnxTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'm.onnx'

  def session(self, model, **options):
    convert.to_onnx(model, self.path, **options)
    return onnxruntime.InferenceSession(str(self.path))

  def run_onnx(self, session, given):
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, given), strict=True))

  @parameterized.product(name=tuple(LAYERS), lengths=(False, True))
  @pytest.mark.few(3)
  def test_layers(self, name, lengths):
    layer = drawn(LAYERS[name](3, 8, rngs=nnx.Rngs(0)))
    options = {'seq_lengths': LENGTHS} if lengths else {}
    session = self.session(layer, seq_lengths=lengths)
    x = draw(4, 7, 3)
    got = self.run_onnx(session, {'x': x, **options})
    np.testing.assert_allclose(got['y'], layer(x, **options), atol=1e-5)

    session = self.session(layer, seq_lengths=lengths, initial_carry=True)
    shapes = {i.name: i.shape for i in session.get_inputs()}
    carry = {
        key: draw(shape[0], 4, shape[2])
        for key, shape in shapes.items()
        if key[:2] in ('h_', 'c_')
    }
    last, y = layer.unroll(x, initial_carry=self.own(layer, carry), **options)
    got = self.run_onnx(session, {'x': x, **options, **carry})
    np.testing.assert_allclose(got['y'], y, atol=1e-5)
    ends = self.own(layer, {key: got[f'last_{key}'] for key in carry})
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5), ends, last
    )
    # Steps of a stream.
    if not lengths and name != 'Stack' and name != 'Bidirectional':
      parts = []
      for t in range(3):
        out = self.run_onnx(session, {'x': x[:, t : t + 1], **carry})
        carry = {key: out[f'last_{key}'] for key in carry}
        parts.append(out['y'])
      np.testing.assert_allclose(np.concatenate(parts, 1), y[:, :3], atol=1e-5)

  def own(self, layer, carry):
    """Returns the carry of a layer, given ONNX's by name."""
    structure = jax.tree.structure(layer.initial_carry((4,)))
    leaves = []
    for level in range(len(layer.layers) if hasattr(layer, 'layers') else 1):
      arrays = [carry[f'{n}_{level}'] for n in 'hc' if f'{n}_{level}' in carry]
      leaves += [a[i] for i in range(len(arrays[0])) for a in arrays]
    return jax.tree.unflatten(structure, leaves)

  def test_models(self):
    rngs = nnx.Rngs(0)
    stack = rnnzoo.Stack(rnnzoo.GRU, 3, 8, num_layers=2, rngs=rngs)
    model = drawn(models.SequenceClassifier(stack, 5, rngs=rngs))
    given = {'x': draw(4, 7, 3), 'seq_lengths': LENGTHS}
    got = self.run_onnx(self.session(model, seq_lengths=True), given)
    want = model(given['x'], seq_lengths=LENGTHS)
    np.testing.assert_allclose(got['y'], want, atol=1e-5)

    layer = rnnzoo.Bidirectional(rnnzoo.LSTM, 8, 8, rngs=rngs)
    options = {'every_step': True, 'num_tokens': 10, 'rngs': rngs}
    model = drawn(models.SequenceModel(layer, 3, **options))
    tokens = np.random.default_rng(0).integers(0, 10, (2, 5))
    got = self.run_onnx(self.session(model), {'x': tokens})
    np.testing.assert_allclose(got['y'], model(tokens), atol=1e-5)

  @parameterized.parameters(
      (rnnzoo.MinGRU, {}, 'ONNX has operators for .* got a MinGRU'),
      (rnnzoo.LSTM, {'peephole': True}, 'got an LSTM with peephole. jax'),
      (rnnzoo.LSTM, {'projection': 2}, 'got an LSTM with projection'),
      (rnnzoo.GRU, {'zoneout_rate': 0.1}, 'got a GRU with zoneout_rate'),
      (rnnzoo.LSTM, {'learn_initial_carry': True}, 'no learned initial carry'),
      (
          functools.partial(rnnzoo.Stack, rnnzoo.GRU, norm='layer'),
          {'num_layers': 2},
          'without norms',
      ),
      (
          functools.partial(rnnzoo.DenseStack, rnnzoo.GRU),
          {'num_layers': 2},
          'DenseStack',
      ),
      (rnnzoo.GRU, {}, 'a Doubled'),
  )
  def test_refused(self, make, options, message):
    layer = make(3, 8, rngs=nnx.Rngs(0), **options)
    if 'Doubled' in message:
      layer = Doubled(layer, 5, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, message):
      convert.to_onnx(layer, self.path)
    self.assertFalse(self.path.exists())

  def test_paths_and_missing_package(self):
    layer = rnnzoo.GRU(3, 8, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(FileNotFoundError, 'folder that exists'):
      convert.to_onnx(layer, self.path / 'm.onnx')
    with self.assertRaisesRegex(IsADirectoryError, 'must be a file'):
      convert.to_onnx(layer, self.path.parent)
    with mock.patch.dict(sys.modules, {'onnx': None}):
      with self.assertRaisesRegex(ImportError, r'rnnzoo\[onnx\]'):
        convert.to_onnx(layer, self.path)


if __name__ == '__main__':
  absltest.main()
