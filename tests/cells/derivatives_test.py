"""Derivatives that are written by hand, where gates saturate, in float32.

Each element of them is compared with float64 on its own: beside the largest
one, a derivative of 1e-15 could be anything. The float64 derivatives are JAX's
own, in forward mode, of the equations as papers have them.
"""

import functools
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.cells import slstm
from rnnzoo.engines.time import maps
from rnnzoo.layers import xlstm_parts

ROWS, TIME = 400, 3


def saturated(draw, *shape):
  """Sums that gates are made of: near 0, and far from it on either side."""
  sizes = draw.choice([-60.0, -30.0, -8.0, 0.0, 8.0, 30.0, 60.0], shape)
  return sizes + draw.standard_normal(shape)


def slstm_step(i, f, t, c, n, m):
  """c' / n', c', n' and m' of xLSTM's equations; t is tanh(z)."""
  l = -jnp.logaddexp(0, -f) + m
  new_m = jnp.maximum(i, l)
  new, old = jnp.exp(i - new_m), jnp.exp(l - new_m)
  new_c, new_n = old * c + new * t, old * n + new
  return new_c / jnp.where(n + new / old < 1, old, new_n), new_c, new_n, new_m


def slstm_inputs(draw):
  # All n are 1 or more, as they are behind a first step.
  n = np.exp(np.abs(draw.standard_normal(ROWS)))
  i, f, m = (saturated(draw, ROWS) for _ in range(3))
  t, mean = np.tanh(draw.standard_normal((2, ROWS)))
  return i, f, t, mean * n, n, m


def slstm_layer(implementation, i, f, t, c, n, m):
  """The same by a layer's path over two steps, of which the first is held."""
  gates = jnp.stack([i, f, jnp.arctanh(t), jnp.full_like(i, 50)])
  gates = jnp.broadcast_to(gates[:, None], (1, 2, 4, 1))
  carry = tuple(x[None, None] for x in (0 * c, c, n, m))
  final, _ = rnnzoo.unroll(
      rnnzoo.SLSTMCell(),
      {},
      gates,
      jnp.zeros((4, 1, 1, 1)),
      carry,
      mask=np.array([[False, True]]),
      implementation=implementation,
  )
  return tuple(x[0, 0] for x in final)


def with_sum(function):
  """One more output: cotangents of all come together, and none is lost."""

  def summed(*args):
    outputs = function(*args)
    return *outputs, outputs[0] + outputs[-1]

  return summed


def linear_steps(*args):
  a, b, h = args[:TIME], args[TIME:-1], args[-1]
  return [h := a[t] * h + b[t] for t in range(TIME)]


def linear_scan(solve, *args):
  a, b = jnp.stack(args[:TIME]), jnp.stack(args[TIME:-1])
  (h,) = maps.linear_scan(solve, False, a, (b,), (args[-1],))
  return tuple(h)


def linear_inputs(draw):
  # Positive: where terms cancel, no derivative has digits.
  sizes = 10.0 ** draw.choice([-12, -4, 0, 4], (2 * TIME + 1, ROWS))
  return tuple(sizes * draw.uniform(0.5, 2, sizes.shape))


def gelu(x):
  return (x * jax.scipy.special.erfc(-x * math.sqrt(0.5)) / 2,)


# (by hand, as papers have it, inputs); rows of inputs are independent.
CASES = {
    'SLSTM': (
        with_sum(functools.partial(slstm.mix, 1.0)),
        with_sum(slstm_step),
        slstm_inputs,
    ),
    'SLSTMScan': (
        with_sum(functools.partial(slstm_layer, 'scan')),
        with_sum(slstm_step),
        slstm_inputs,
    ),
    'GELU': (
        lambda x: (xlstm_parts.ACTIVATIONS['gelu'](x),),
        gelu,
        lambda draw: (saturated(draw, ROWS) / 5,),
    ),
    'LinearSteps': (
        functools.partial(linear_scan, maps.step_scan),
        linear_steps,
        linear_inputs,
    ),
    'LinearCompose': (
        functools.partial(linear_scan, maps.compose_scan),
        linear_steps,
        linear_inputs,
    ),
}


def jacobians(function, derive, inputs):
  """Returns [rows, outputs, inputs]."""
  flat = lambda x: jnp.stack(function(*x))
  return jax.jit(jax.vmap(derive(flat)))(jnp.stack(inputs, axis=1))


class DerivativesTest(parameterized.TestCase):

  @parameterized.named_parameters((k, *case) for k, case in CASES.items())
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_each_element(self, by_hand, paper, make):
    inputs = [np.float32(x) for x in make(np.random.default_rng(0))]
    with jax.enable_x64(True):
      want = jacobians(paper, jax.jacfwd, [np.float64(x) for x in inputs])
    for derive in (jax.jacfwd, jax.jacrev):
      got = jacobians(by_hand, derive, inputs)
      # exp of a difference of gates of 60 has 2e-5; sLSTM's end at exp(-70).
      np.testing.assert_allclose(got, want, rtol=5e-5, atol=1e-29)

  def test_second_derivatives(self):
    by_hand, paper, make = CASES['SLSTM']
    inputs = [np.float32(x) for x in make(np.random.default_rng(0))]
    twice = lambda f: jax.jacfwd(jax.jacrev(f))
    with jax.enable_x64(True):
      want = jacobians(paper, twice, [np.float64(x) for x in inputs])
    got = jacobians(by_hand, twice, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

  @pytest.mark.few(1)
  @parameterized.parameters('scan', 'associative_scan')
  def test_minlstm_hessian(self, implementation):
    sizes = 0.3, -0.7, 30, -30, 100, -100
    gates = np.array(list(itertools.product(sizes, repeat=3)), np.float32)

    def last_h(gates):
      carry, gates = (jnp.full((1, 1), 0.5),), gates.reshape(1, 1, 3, 1)
      return rnnzoo.unroll(
          rnnzoo.MinLSTMCell(),
          {},
          gates,
          None,
          carry,
          implementation=implementation,
      )[1].sum()

    got = jax.jit(jax.vmap(jax.jacfwd(jax.grad(last_h))))(gates)
    f, i, h = np.float64(gates.T)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    total = 2 + np.exp(-f) + np.exp(-i)
    slope = (1 + np.exp(-i)) * (1 + np.exp(-f)) / total**2
    difference = (np.exp(-f) - np.exp(-i)) / total
    past, less_f, less_i = 0.5 - h, sigmoid(-f), sigmoid(-i)
    by_ff = less_f * (difference * less_f - sigmoid(f)) * past
    by_fi = -less_f * less_i * difference * past
    by_ii = less_i * (difference * less_i + sigmoid(i)) * past
    want = slope * [
        [by_ff, by_fi, -less_f],
        [by_fi, by_ii, less_i],
        [-less_f, less_i, 0 * h],
    ]
    # Numbers below 1e-37 are 0 on a CPU.
    np.testing.assert_allclose(got, want.T, rtol=2e-5, atol=1e-37)


if __name__ == '__main__':
  absltest.main()
