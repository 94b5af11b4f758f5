"""Layers with maps of their own, against loops of their papers in numpy.

In float64, step by step. A step of the layer alone is compared as well. Other
paths and gradients are compared by layers_test, and kernels by
interpreted_test and linear_kernels_test.
"""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 6, 3, 4

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)
get = lambda variable: np.asarray(variable[...])


def gates(layer, x):
  """Returns W x + b, one array for each gate."""
  y = np.einsum('...i,gif->g...f', x, get(layer.kernel))
  return y if layer.bias is None else y + get(layer.bias)[:, None, None]


def before(h, start):
  """The carry before a step: zero where a sequence starts."""
  return np.where(start[:, None], 0, h)


def lru(layer, x, starts):
  own = {name: get(p) for name, p in layer.cell_params.items()}
  c, d = get(layer.readout.kernel), get(layer.readout.skip)
  a = np.exp(-np.exp(own['nu']) + 1j * np.exp(own['theta']))
  re, im = gates(layer, x)
  b = np.exp(own['gamma']) * (re + 1j * im)
  h = np.zeros_like(b[:, 0])
  for t in range(TIME):
    h = a * before(h, starts[:, t]) + b[:, t]
    yield (h @ (c[0] + 1j * c[1])).real + x[:, t] @ d


def rglru(layer, x, starts):
  w, b = get(layer.input_map.kernel), get(layer.input_map.bias)
  large = get(layer.cell_params['Lambda'])
  if layer.input_map.inputs is not None:
    x = x @ get(layer.input_map.inputs)
  dense = np.zeros((2, FEATURES, FEATURES))
  size = w.shape[-1]
  for n in range(w.shape[1]):
    at = slice(n * size, (n + 1) * size)
    dense[:, at, at] = w[:, n]
  h = np.zeros_like(x[:, 0])
  for t in range(TIME):
    r = sigmoid(x[:, t] @ dense[0] + b[0])
    i = sigmoid(x[:, t] @ dense[1] + b[1])
    a = np.exp(-8 * np.log1p(np.exp(large)) * r)
    a = 2 * a - 1 if layer.cell.signed else a
    gain = np.where(starts[:, t, None], 1, np.sqrt(1 - a**2))
    h = a * before(h, starts[:, t]) + gain * i * x[:, t]
    yield h


def hgrn(layer, x, starts):
  own = {name: get(p) for name, p in layer.cell_params.items()}
  gamma, theta = own.get('gamma', layer.cell.lower_bound), own.get('theta', 0)
  f, *i = gates(layer, x)
  forget = gamma + (1 - gamma) * sigmoid(f)
  b = (1 - forget) * sum(silu(x) * 1j**k for k, x in enumerate(i))
  h = np.zeros_like(b[:, 0])
  out = layer.readout
  for t in range(TIME):
    h = forget[:, t] * np.exp(1j * theta) * before(h, starts[:, t]) + b[:, t]
    y = np.concatenate([h.real, h.imag][: len(i)], axis=-1)
    y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5)
    y = y * get(out.scale) * silu(x[:, t] @ get(out.gate))
    yield y @ get(out.kernel)


def qrnn(layer, x, starts):
  z, f, *i = gates(layer, x)
  z, f = np.tanh(z), sigmoid(f)
  i = sigmoid(i[0]) if i else 1 - f
  h = np.zeros_like(z[:, 0])
  for t in range(TIME):
    h = f[:, t] * before(h, starts[:, t]) + i[:, t] * z[:, t]
    o = 1
    if layer.readout is not None:
      o = sigmoid(x[:, t] @ get(layer.readout.kernel) + get(layer.readout.bias))
    yield o * h


def cfc(layer, x, starts):
  own = {name: get(p) for name, p in layer.cell_params.items()}
  ts = np.ones((*x.shape[:2], 1))
  weights = layer
  if layer.cell.timespans:
    x, ts, weights = x[..., :-1], x[..., -1:], layer.input_map
  x_gates, R = gates(weights, x), get(layer.recurrent_kernel)[:, 0]
  h = np.zeros((BATCH, FEATURES))
  for t in range(TIME):
    h = before(h, starts[:, t])
    f1, *others = (x[:, t] + h @ r for x, r in zip(x_gates, R, strict=True))
    if layer.cell.mode == 'pure':
      decay = np.exp(-ts[:, t] * (np.abs(own['w']) + np.abs(f1)))
      h = own['A'] - own['A'] * decay * f1
    else:
      f2, a, b = others
      s = sigmoid(a * ts[:, t] + b)
      keep = 1 if layer.cell.mode == 'no_gate' else 1 - s
      h = np.tanh(f1) * keep + s * np.tanh(f2)
    yield h


CASES = (
    ('lru', lru, 'LRU', IN, {}),
    ('rglru', rglru, 'RGLRU', IN, {}),
    ('rglru_heads', rglru, 'RGLRU', FEATURES, {'num_heads': 2, 'signed': True}),
    ('hgrn', hgrn, 'HGRN', IN, {'lower_bound': 0.25, 'use_bias': True}),
    (
        *('hgrn_complex', hgrn, 'HGRN', IN),
        {'complex': True, 'lower_bound': np.linspace(0, 0.9, FEATURES)},
    ),
    ('qrnn', qrnn, 'QRNN', IN, {}),
    ('qrnn_f', qrnn, 'QRNN', IN, {'pooling': 'f'}),
    ('qrnn_ifo', qrnn, 'QRNN', IN, {'pooling': 'ifo'}),
    ('cfc', cfc, 'CfC', IN, {}),
    ('cfc_no_gate', cfc, 'CfC', IN, {'mode': 'no_gate', 'timespans': True}),
    ('cfc_pure', cfc, 'CfC', IN, {'mode': 'pure', 'timespans': True}),
)


class PapersTest(parameterized.TestCase):

  def test_parameters_of_16_bits_remember_as_long(self):
    options = {'param_dtype': 'bfloat16', 'rngs': nnx.Rngs(0)}
    hgrn = rnnzoo.HGRN(3, 4, lower_bound=[0.999] * 4, **options)
    np.testing.assert_array_less(hgrn.cell_params['gamma'][...], 1)
    lru = rnnzoo.LRU(3, 400, min_radius=0.999, **options)
    nu = np.float64(lru.cell_params['nu'][...])
    np.testing.assert_array_less(0.9989, np.exp(-np.exp(nu)))

  @parameterized.named_parameters(*CASES)
  @pytest.mark.few(5)
  def test_agrees(self, equations, name, in_features, options):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, TIME, in_features))
    reset = np.zeros((BATCH, TIME), bool)
    reset[0, 4] = True
    first = reset.copy()
    first[:, 0] = True
    with jax.enable_x64(True):
      layer = random_layers.make(
          *(name, in_features, FEATURES),
          **(options | {'param_dtype': jnp.float64}),
      )

      @reference.jit
      def run(layer, x, reset, first):
        carry, y = layer.unroll(x, reset=reset)
        at = lambda a, t: a[:, t]
        start, ys = layer.initial_carry((BATCH,)), []
        for t in range(TIME):
          start, y_t = layer.step(start, at(x, t), reset=at(first, t))
          ys.append(y_t)
        return y, jnp.stack(ys, axis=1), carry, start

      y, steps, carry, last = run(layer, x, reset, first)
    want = np.stack(list(equations(layer, x, first)), axis=1)
    np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(steps, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(carry, last, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


if __name__ == '__main__':
  absltest.main()
