"""docs/libraries.json: the table of features is true.

In our column a row that names a test has it; each other one is exercised here,
by the test of its key. Claims about flax, and about other libraries that are
installed, are tried too.
"""

import ast
import importlib.util
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import linen
from tests.testing import other_libraries

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = json.loads((ROOT / 'docs' / 'libraries.json').read_text('utf-8'))
ROWS = {row['key']: row for row in DATA['rows']}
X = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)


def gru(**options):
  return rnnzoo.GRU(3, 2, rngs=nnx.Rngs(0), **options)


def close(got, expected):
  np.testing.assert_allclose(got, expected, atol=1e-6)


class OurColumnTest(parameterized.TestCase):

  def test_every_claim_has_a_test(self):
    here = {name.removeprefix('test_') for name in dir(self)}
    for key, row in ROWS.items():
      with self.subTest(key):
        self.assertLen(row['cells'], len(DATA['libraries']))
        self.assertNotIn(row['cells'][0], ('no', ''))
        self.assertEqual(key in here, 'test' not in row)

  @parameterized.parameters(*(k for k, row in ROWS.items() if 'test' in row))
  def test_named_tests_exist(self, key):
    path, group, name = ROWS[key]['test'].split('::')
    tree = ast.parse((ROOT / path).read_text('utf-8'))
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == group
    )
    self.assertIn(name, [getattr(node, 'name', '') for node in found.body])

  def test_resets(self):
    layer, reset = gru(), np.zeros((2, 4), bool)
    reset[:, 2] = True
    close(layer(X, reset=reset)[:, 2:], layer(X[:, 2:]))

  def test_nan(self):
    bad = np.where(np.arange(4)[:, None] == 1, np.nan, X)
    y = gru()(bad, reset=np.tile(np.arange(4) == 2, (2, 1)))
    close(y[:, 2:], gru()(X[:, 2:]))

  def test_lengths(self):
    layer = gru()
    carry, y = layer.unroll(X, seq_lengths=np.array([2, 4]))
    close(carry[0][0], layer(X)[0, 1])
    close(y[0, 2:], 0)

  def test_mask(self):
    layer, mask = gru(), np.array([[True, False, True, True]] * 2)
    close(layer(X, mask=mask)[:, 2:], layer(X[:, [0, 2, 3]])[:, 1:])

  def test_given_carry(self):
    layer = gru()
    carry, _ = layer.unroll(X[:, :2])
    close(layer(X[:, 2:], initial_carry=carry), layer(X)[:, 2:])

  @pytest.mark.slow
  def test_learned_carry(self):
    graphdef, params = nnx.split(gru(learn_initial_carry=True))
    loss = lambda params: (nnx.merge(graphdef, params)(X) ** 2).sum()
    gradient = nnx.to_pure_dict(jax.grad(loss)(params))
    (carry,) = [v for k, v in gradient.items() if 'carry' in k]
    for leaf in jax.tree.leaves(carry):
      self.assertGreater(abs(leaf).min(), 0)

  def test_step(self):
    layer = gru()
    _, y = layer.step(layer.initial_carry((2,)), X[:, 0])
    close(y, layer(X)[:, 0])

  def test_bidirectional(self):
    layer = rnnzoo.Bidirectional(rnnzoo.GRU, 3, 4, rngs=nnx.Rngs(0))
    y = jax.eval_shape(layer, X)
    self.assertEqual(y.shape, (2, 4, 8))

  def test_stack(self):
    layer = rnnzoo.Stack(rnnzoo.GRU, 3, 2, num_layers=2, rngs=nnx.Rngs(0))
    carry, _ = jax.eval_shape(layer.unroll, X)
    self.assertLen(carry, 2)

  def test_heads(self):
    self.assertEqual(gru(num_heads=2).recurrent_kernel.shape, (3, 2, 1, 1))

  @pytest.mark.slow
  def test_parallel(self):
    by = lambda path: gru(implementation=path)(X)
    close(by('associative_scan'), by('scan'))

  def test_bfloat16(self):
    carry, y = jax.eval_shape(gru(dtype=jnp.bfloat16).unroll, X)
    self.assertEqual((carry[0].dtype, y.dtype), (jnp.float32, jnp.bfloat16))

  @pytest.mark.slow
  def test_forward_mode(self):
    layer, step = gru(), 1e-2
    _, tangent = jax.jvp(layer, (X,), (np.ones_like(X),))
    difference = (layer(X + step) - layer(X - step)) / (2 * step)
    np.testing.assert_allclose(tangent, difference, atol=1e-4)

  def test_nnx_and_linen(self):
    self.assertIsInstance(gru(), nnx.Module)
    variables = jax.eval_shape(linen.GRU(2).init, jax.random.key(0), X)
    self.assertIn('params', variables)


class OtherColumnsTest(parameterized.TestCase):

  @parameterized.parameters(
      name
      for name, (module, _) in other_libraries.LIBRARIES.items()
      if importlib.util.find_spec(module)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_claims(self, name):
    self.assertEqual(other_libraries.wrong(name), [])

  def test_every_library_is_tried_and_mistakes_are_found(self):
    tried = ['rnnzoo', *other_libraries.LIBRARIES]
    self.assertCountEqual(tried, DATA['libraries'])
    broken = {
        'flax.nnx.RNN': ('flax', lambda: {'step': lambda: (X, X + 1)}),
    }
    with mock.patch.dict(other_libraries.LIBRARIES, broken):
      found = ' '.join(other_libraries.wrong('flax.nnx.RNN'))
    self.assertIn("flax.nnx.RNN, step, 'the cell': AssertionError", found)
    self.assertIn("flax.nnx.RNN, lengths, 'yes': KeyError", found)


if __name__ == '__main__':
  absltest.main()
