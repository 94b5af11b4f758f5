"""How much a gradient on 'scan' leaves XLA's CPU backend to compile."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo

BATCH, TIME, FEATURES = 16, 200, 64


def compiled(layer):
  """Returns the compiled gradient of a layer."""
  graphdef, parameters, rest = nnx.split(layer, nnx.Param, ...)
  draw = np.random.default_rng(0).standard_normal
  x = jnp.asarray(draw((BATCH, TIME, FEATURES)), jnp.float32)

  def loss(parameters, x, rest):
    return (nnx.merge(graphdef, parameters, rest, copy=True)(x) ** 2).sum()

  gradient = jax.jit(jax.grad(loss, (0, 1)))
  arguments = parameters, x, rest
  return gradient.lower(*arguments).compile()


def fusions(program):
  return len(re.findall(r' fusion\(', program.as_text()))


class CompileTimeTest(parameterized.TestCase):

  @parameterized.parameters(
      ('LSTM', nnx.LSTMCell, 0.9), ('GRU', nnx.GRUCell, 1.3)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_fusions_beside_flax(self, name, cell, most):
    # Seconds depend on the machine. A kernel takes LLVM about the same time,
    # whatever is in it: 115 fusions (LSTM) took 2.5 times flax's 72.
    sizes = FEATURES, FEATURES
    ours = compiled(
        rnnzoo.LAYERS[name](*sizes, implementation='scan', rngs=nnx.Rngs(0))
    )
    peers = compiled(nnx.RNN(cell(*sizes, rngs=nnx.Rngs(0))))
    self.assertLess(fusions(ours), most * fusions(peers))
    self.assertEqual(ours.as_text().count(' while('), 2)

  def test_maps_are_composed_once(self):
    # A fusion that composes maps of earlier rounds anew had 351.
    a = jax.ShapeDtypeStruct((1, 200, 8), jnp.float32)
    scan = functools.partial(
        rnnzoo.linear_scan, implementation='associative_scan'
    )
    program = jax.jit(scan).lower(a, a).compile()
    self.assertLess(program.cost_analysis()['flops'], 60 * a.size)


if __name__ == '__main__':
  absltest.main()
