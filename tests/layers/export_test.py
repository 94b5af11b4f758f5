"""`jax.export` with a batch and a number of steps that are not known."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import models
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 5, 2, 4

# Sizes at which chunks of steps matter: fixed ones would be divided.
LARGE = 4096

COMPOSED = {
    'Stack': lambda: rnnzoo.Stack(
        *(rnnzoo.GRU, IN, FEATURES),
        num_layers=2,
        norm='batch',
        residual=True,
        rngs=nnx.Rngs(0),
    ),
    'Bidirectional': lambda: rnnzoo.Bidirectional(
        rnnzoo.MinGRU, IN, FEATURES, rngs=nnx.Rngs(0)
    ),
    'GriffinBlock': lambda: rnnzoo.GriffinBlock(IN, FEATURES, rngs=nnx.Rngs(0)),
    'SequenceClassifier': lambda: models.SequenceClassifier(
        random_layers.make('Elman', IN, FEATURES), 2, rngs=nnx.Rngs(0)
    ),
}


def symbolic(batch='b', time='t', in_features=IN):
  """Returns the types of x, reset, mask and seq_lengths."""
  b, t = export.symbolic_shape(f'{batch}, {time}')
  types = ((b, t, in_features), 'float32'), ((b, t), bool), ((b, t), bool)
  return [jax.ShapeDtypeStruct(*t) for t in (*types, ((b,), 'int32'))]


def gradients(layer):
  """Returns the state, and (state, x, ...) -> gradients and outputs."""
  graphdef, state = nnx.split(layer)

  def run(state, x, reset, mask, seq_lengths):
    flags = {'reset': reset, 'mask': mask}
    if isinstance(layer, models.SequenceClassifier):
      flags = {}

    def loss(state, x):
      made = nnx.merge(graphdef, state)
      y = made(x, seq_lengths=seq_lengths, **flags)
      return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(state, x)

  return state, run


def exported(layer, types):
  state, run = gradients(layer)
  of_state = jax.tree.map(lambda x: jax.typeof(x[...]), state)
  return export.export(jax.jit(run))(of_state, *types)


class ExportTestCase(parameterized.TestCase):

  def check(self, layer, types):
    """An exported program gives the numbers of a run with known sizes."""
    rng = np.random.default_rng(0)
    given = (
        rng.standard_normal((BATCH, TIME, IN)).astype(np.float32),
        rng.random((BATCH, TIME)) < 0.3,
        rng.random((BATCH, TIME)) < 0.8,
        np.array([5, 3, 0], np.int32),
    )
    state, run = gradients(layer)
    program = exported(layer, types)
    both = reference.jit(lambda *given: (program.call(*given), run(*given)))
    got, want = both(state, *given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      if b.dtype != jax.dtypes.float0:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class ExportTest(ExportTestCase):

  @pytest.mark.slow
  def test_layer(self):
    self.check(random_layers.make('AGRU', IN, FEATURES), symbolic())

  @pytest.mark.slow
  def test_known_time_is_parallel(self):
    path = {'implementation': 'associative_scan'}
    layer = random_layers.make('MinGRU', IN, FEATURES, **path)
    self.check(layer, symbolic(time=str(TIME)))
    with self.assertRaisesRegex(
        NotImplementedError, "number of steps that is known, got t.*'scan'"
    ):
      exported(layer, symbolic())

  @parameterized.parameters(('b', 't'), ('b', '4000'), ('4000', 't'))
  def test_large(self, batch, time):
    # Chunks and saved gates are chosen by sizes, and here by none.
    layer = nnx.eval_shape(lambda: rnnzoo.LSTM(2, LARGE, rngs=nnx.Rngs(0)))
    state, run = gradients(layer)
    jax.jit(run).trace(state, *symbolic(batch, time))

  def test_kernels_say_why_not(self):
    layer = random_layers.make('GRU', IN, FEATURES)
    layer.implementation = 'pallas'
    message = r'sizes that are known, got the symbolic shape \(b, t, 2\)'
    with self.assertRaisesRegex(NotImplementedError, message):
      exported(layer, symbolic())

  @pytest.mark.slow
  def test_functions(self):
    b, t = export.symbolic_shape('b, t')
    gru = random_layers.make('GRU', IN, FEATURES)
    types = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    scan = export.export(jax.jit(rnnzoo.linear_scan))
    a = np.full((BATCH, TIME, FEATURES), 0.5, np.float32)
    program = scan(types(b, t, FEATURES), types(b, t, FEATURES))
    np.testing.assert_allclose(
        program.call(a, a), rnnzoo.linear_scan(a, a), rtol=1e-6
    )
    step = lambda x: gru.step(gru.initial_carry(x.shape[:1]), x)[1]
    program = export.export(jax.jit(step))(types(b, IN))
    x = a[:, 0, :IN]
    np.testing.assert_allclose(program.call(x), step(x), rtol=1e-6)


@pytest.mark.slow
class EveryLayerTest(ExportTestCase):

  @parameterized.parameters(*rnnzoo.LAYERS, *COMPOSED)
  @pytest.mark.few(2)
  def test_every_layer(self, name):
    make = COMPOSED.get(name) or functools.partial(
        random_layers.make, name, IN, FEATURES, learn_initial_carry=True
    )
    self.check(make(), symbolic())


if __name__ == '__main__':
  absltest.main()
