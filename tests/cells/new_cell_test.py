"""A new cell, as docs/own_cell.md adds one, through the whole suite untouched.

The cell and the layer below are all that a new cell takes, besides its entry in
`rnnzoo.LAYERS`: every path and derivative comes from `update`.
"""

import dataclasses
import types

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import rnnzoo
from tests.layers import layers_test
from tests.testing import abstract_gpu
from tests.testing import random_layers


@dataclasses.dataclass(frozen=True)
class CIFGCell(rnnzoo.Cell):
  """An LSTM with coupled gates, i = 1 - f; order f, g, o; carry (h, c)."""

  input_gates = 3
  recurrent_gates = 3
  carry_names = ('h', 'c')

  def update(self, params, x_gates, h_gates, carry):
    del params
    _, c = carry
    f, g, o = (x + h for x, h in zip(x_gates, h_gates, strict=True))
    f = jax.nn.sigmoid(f)
    c = f * c + (1 - f) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


class CIFG(rnnzoo.RecurrentLayer):
  """Coupled input and forget gate LSTM."""

  def __init__(self, in_features, features, *, rngs, **options):
    super().__init__(CIFGCell(), in_features, features, rngs=rngs, **options)


@dataclasses.dataclass(frozen=True)
class LeakyCell(rnnzoo.LinearCell):
  """h' = a h + x, with a = sigmoid(params['decay']): linear, with a parameter.

  Being linear it gets the associative scan for nothing.
  """

  input_gates = 1

  def coefficients(self, params, x_gates):
    return jax.nn.sigmoid(params['decay']), x_gates[0]


class Leaky(rnnzoo.RecurrentLayer):
  """Leaky integrator with a learned time constant for each unit."""

  def __init__(self, in_features, features, *, rngs, **options):
    decay = nnx.Param(jnp.zeros(features, options.get('param_dtype')))
    super().__init__(
        LeakyCell(),
        in_features,
        features,
        cell_params={'decay': decay},
        rngs=rngs,
        **options,
    )


NEW = {'CIFG': CIFG, 'Leaky': Leaky}
LAYERS = types.MappingProxyType({**rnnzoo.LAYERS, **NEW})


def new_cases():
  """The suite's cases for the new layers; layers_test.py has the others."""
  every = layers_test.cases(NEW)
  newton = layers_test.cases(NEW, newton=True)
  at_once = f'{layers_test.ROUNDED}_associative_scan_float64'
  return [*every, *(c for c in newton if c['testcase_name'].endswith(at_once))]


class NewCellTest(layers_test.CrossProduct):

  @parameterized.named_parameters(*new_cases())
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, **case):
    self.check(**case)

  @parameterized.product(
      name=sorted(LAYERS), kind=('NVIDIA H200', 'NVIDIA B200')
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_becomes_a_kernel(self, name, kind):
    layer = LAYERS[name](16, 32, rngs=nnx.Rngs(0), implementation='pallas')
    reset = jnp.ones((4, 5), bool)
    loss, state = random_layers.squares(layer, reset=reset)
    with abstract_gpu.device(self, kind):
      gradient = jax.grad(loss, (0, 1))
      text = abstract_gpu.lower(gradient, state, jnp.ones((4, 5, 16)))
      self.assertIn('mosaic_gpu', text)

  def test_has_cases_of_the_paths_in_xla(self):
    names = {case['testcase_name'] for case in new_cases()}
    for name in (
        'CIFG_one_step_scan_float64',
        'CIFG_num_heads_2_reset_mask_reverse_scan_bfloat16',
        'CIFG_reset_mask_reverse_associative_scan_float64',
        'Leaky_reset_mask_reverse_associative_scan_float32',
    ):
      self.assertIn(name, names)


if __name__ == '__main__':
  absltest.main()
