"""Layers as linen modules: the same parameters give the same numbers."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import linen
from flax import nnx
import jax
import numpy as np

import rnnzoo
from rnnzoo import linen as rnnzoo_linen
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 4, 3, 4

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = rng.random((BATCH, TIME)) < 0.3

close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


class LinenTest(parameterized.TestCase):

  @parameterized.parameters(*rnnzoo.LAYERS, 'Stack', 'Bidirectional')
  def test_same_numbers(self, name):
    if name in ('Stack', 'Bidirectional'):
      cls = functools.partial(getattr(rnnzoo, name), rnnzoo.GRU)
      module = getattr(rnnzoo_linen, name)(
          rnnzoo.GRU, in_features=IN, features=FEATURES
      )
    else:
      cls = rnnzoo.LAYERS[name]
      module = getattr(rnnzoo_linen, name)(in_features=IN, features=FEATURES)
    layer = random_layers.make(cls, IN, FEATURES)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    # Metadata such as IRevRNN's bound travels in a box.
    variables = jax.tree.map(
        lambda box, value: linen.meta.replace_boxed(box, value),
        shapes,
        {'params': params},
        is_leaf=lambda leaf: isinstance(leaf, linen.meta.AxisMetadata),
    )
    self.assertEqual(
        jax.tree.map(np.shape, linen.meta.unbox(variables)),
        jax.tree.map(np.shape, {'params': params}),
    )

    @reference.jit
    def run(variables, layer):
      unroll = functools.partial(module.apply, nnx_method='unroll')
      got = unroll(variables, x, reset=reset)
      return got, layer.unroll(x, reset=reset)

    jax.tree.map(close, *run(variables, layer))

  def test_inside_a_linen_module(self):
    class Model(linen.Module):

      @linen.compact
      def __call__(self, x, train):
        rngs = nnx.Rngs(dropout=self.make_rng('dropout')) if train else None
        stack = rnnzoo_linen.Stack(
            rnnzoo.GRU,
            in_features=IN,
            features=FEATURES,
            num_layers=2,
            dropout_rate=0.5,
        )
        return linen.Dense(5)(stack(x, rngs=rngs))

    model = Model()
    variables = model.init(jax.random.key(0), x, train=False)
    y = model.apply(variables, x, train=False)
    z = model.apply(
        variables, x, train=True, rngs={'dropout': jax.random.key(1)}
    )
    self.assertEqual(y.shape, (BATCH, TIME, 5))
    self.assertGreater(np.abs(y - z).max(), 1e-3)


if __name__ == '__main__':
  absltest.main()
