"""Layers against their papers' equations, written out unit by unit in numpy.

For the cells that neither torch nor flax has. Nothing of rnnzoo is used but the
parameters: each loop says for one sequence and one unit what a step does.
"""

import math

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo

TIME, IN, FEATURES = 6, 3, 4

sigmoid = lambda x: 1 / (1 + math.exp(-x))
relu = lambda x: max(x, 0.0)
positive = lambda x: x + 0.5 if x >= 0 else sigmoid(x)


class Weights:
  """A layer's parameters in float64, and the two sums that gates are made of.

  Attributes:
    R: [gates, from, to], block-diagonal where the layer has heads.
    own: the cell's own parameters.
  """

  def __init__(self, layer):
    self.W = np.asarray(layer.kernel[...])
    self.b = np.asarray(layer.bias[...])
    self.own = {k: np.asarray(v[...]) for k, v in layer.cell_params.items()}
    if layer.recurrent_kernel is not None:
      blocks = np.asarray(layer.recurrent_kernel[...])
      gates, heads, size, _ = blocks.shape
      self.R = np.zeros((gates, FEATURES, FEATURES))
      for n in range(heads):
        at = slice(n * size, (n + 1) * size)
        self.R[:, at, at] = blocks[:, n]

  def x(self, gate, j, x_t):
    """(W_gate x_t + b_gate)_j."""
    total = self.b[gate, j]
    for i in range(IN):
      total += self.W[gate, i, j] * x_t[i]
    return total

  def h(self, gate, j, h, matrix=None):
    """(R_gate h)_j."""
    matrix = self.R[gate] if matrix is None else matrix
    return sum(matrix[i, j] * h[i] for i in range(FEATURES))

  def antisymmetric(self, gate, gamma):
    """A with A h = (M - M^T - gamma I) h for the M of `h`."""
    W = self.R[gate]
    A = np.zeros_like(W)
    for i in range(FEATURES):
      for j in range(FEATURES):
        A[i, j] = W[i, j] - W[j, i] - (gamma if i == j else 0)
    return A


def slstm(w, x):
  h, c, n, m = (np.zeros(FEATURES) for _ in range(4))
  for x_t in x:
    new = np.zeros(FEATURES)
    for j in range(FEATURES):
      i, f, z, o = (w.x(g, j, x_t) + w.h(g, j, h) for g in range(4))
      log_f = -math.log1p(math.exp(-f)) + m[j]
      empty = n[j] == 0
      stabiliser = i if empty else max(i, log_f)
      i = math.exp(i - stabiliser)
      f = 0 if empty else math.exp(log_f - stabiliser)
      c[j] = f * c[j] + i * math.tanh(z)
      n[j] = max(f * n[j] + i, 1)
      m[j] = stabiliser
      new[j] = sigmoid(o) * c[j] / n[j]
    h = new
    yield h


def agru(w, x, gamma):
  A = w.antisymmetric(2, gamma)
  h = np.zeros(FEATURES)
  for x_t in x:
    units = range(FEATURES)
    r = [sigmoid(w.x(0, j, x_t) + w.h(0, j, h)) for j in units]
    z = [sigmoid(w.x(1, j, x_t) + w.h(1, j, h)) for j in units]
    rh = [r[j] * h[j] for j in units]
    d = [math.tanh(w.x(2, j, x_t) + w.h(2, j, rh, A)) for j in units]
    h = np.array([h[j] + w.own['epsilon'] * z[j] * d[j] for j in units])
    yield h


def antisymmetric(w, x, gamma, epsilon):
  A = w.antisymmetric(0, gamma)
  h = np.zeros(FEATURES)
  for x_t in x:
    h = np.array(
        [
            h[j] + epsilon * math.tanh(w.h(0, j, h, A) + w.x(0, j, x_t))
            for j in range(FEATURES)
        ]
    )
    yield h


def gated_antisymmetric(w, x, gamma, epsilon):
  A = w.antisymmetric(0, gamma)
  h = np.zeros(FEATURES)
  for x_t in x:
    new = np.zeros(FEATURES)
    for j in range(FEATURES):
      Ah = w.h(0, j, h, A)
      z = sigmoid(Ah + w.x(0, j, x_t))
      new[j] = h[j] + epsilon * z * math.tanh(Ah + w.x(1, j, x_t))
    h = new
    yield h


def indrnn(w, x, activation):
  h = np.zeros(FEATURES)
  for x_t in x:
    for j in range(FEATURES):
      h[j] = activation(w.x(0, j, x_t) + w.R[0, j, j] * h[j])
    yield h.copy()


def irevrnn(w, x, activation, inner_activation):
  a, b = w.own['a'], w.own['b']
  h, c = np.zeros(FEATURES), np.zeros(FEATURES)
  for x_t in x:
    for j in range(FEATURES):
      inner = w.R[0, j, j] * h[j]
      for a_i, b_i in zip(a[:, j], b[:, j], strict=True):
        c[j] = c[j] + a_i * inner_activation(inner)
        inner = inner + b_i * inner_activation(c[j])
      h[j] = activation(w.x(0, j, x_t) + inner)
    yield h.copy()


def mingru(w, x, g):
  h = np.zeros(FEATURES)
  for x_t in x:
    for j in range(FEATURES):
      z = sigmoid(w.x(0, j, x_t))
      h[j] = (1 - z) * h[j] + z * g(w.x(1, j, x_t))
    yield h.copy()


def minlstm(w, x, g):
  h = np.zeros(FEATURES)
  for x_t in x:
    for j in range(FEATURES):
      f, i = sigmoid(w.x(0, j, x_t)), sigmoid(w.x(1, j, x_t))
      candidate = g(w.x(2, j, x_t))
      h[j] = f / (f + i) * h[j] + i / (f + i) * candidate
    yield h.copy()


identity = lambda x: x
tanh, STEP = math.tanh, {'gamma': 0.3, 'epsilon': 0.7}
# A layer, and what sets its case apart: options, equations, their arguments.
CASES = {
    'SLSTM': ({'num_heads': 2}, slstm, ()),
    'AGRU': ({'gamma': 0.3}, agru, (0.3,)),
    'AntisymmetricRNN': (STEP, antisymmetric, (0.3, 0.7)),
    'AntisymmetricRNN_gated': (
        STEP | {'gated': True},
        *(gated_antisymmetric, (0.3, 0.7)),
    ),
    'IndRNN': ({}, indrnn, (relu,)),
    'IndRNN_tanh': ({'activation': 'tanh'}, indrnn, (tanh,)),
    'IRevRNN': ({'inner_steps': 3}, irevrnn, (relu, tanh)),
    'IRevRNN_tanh_sigmoid': (
        {'activation': 'tanh', 'inner_activation': 'sigmoid'},
        *(irevrnn, (tanh, sigmoid)),
    ),
    'IRevRNN_sigmoid_relu': (
        {'activation': 'sigmoid', 'inner_activation': 'relu'},
        *(irevrnn, (sigmoid, relu)),
    ),
    'MinGRU': ({}, mingru, (identity,)),
    'MinGRU_positive': ({'candidate': 'positive'}, mingru, (positive,)),
    'MinLSTM': ({}, minlstm, (identity,)),
    'MinLSTM_positive': ({'candidate': 'positive'}, minlstm, (positive,)),
}


class EquationsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (k, k.partition('_')[0], *case) for k, case in CASES.items()
  )
  @pytest.mark.few(2)
  def test_agrees(self, name, options, equations, arguments):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TIME, IN))
    with jax.enable_x64(True):
      make = lambda: rnnzoo.LAYERS[name](
          IN, FEATURES, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options
      )
      graphdef, state = nnx.split(nnx.eval_shape(make))
      # Every parameter random: zero biases hide differences.
      state = jax.tree.map(lambda p: 0.7 * rng.standard_normal(p.shape), state)
      layer = nnx.merge(graphdef, state)
      got = np.asarray(layer(x))
      want = np.array(list(equations(Weights(layer), x, *arguments)))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


if __name__ == '__main__':
  absltest.main()
