"""Every layer on every path, forward and every gradient, against float64.

The suite iterates over `rnnzoo.LAYERS`, so a new layer is covered by its entry
there. What is compared is in comparison.py.
"""

import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pytest

import rnnzoo
from rnnzoo.engines.scan import loop as scan_loop
from tests.testing import comparison

# Largest ||out - ref|| / ||ref|| over outputs and gradients. Operands of a
# product are rounded once, to a relative error u / 2 at most: u = 2^-52, 2^-23,
# 2^-8. A result passes through T <= 7 steps of about ten roundings each, which
# add up like a random walk and are damped by the gates: some 10 u. In bfloat16
# only inputs, weights and the operand h are rounded to 8 bits, state and sums
# being float32, and weights and inputs are rounded before the reference sees
# them: 2 u. Gradients round dgates as well: 4 u.
TOLERANCE = {
    'float64': (1e-12, 1e-12),
    'float32': (1e-6, 2e-6),
    'bfloat16': (8e-3, 1.6e-2),
}

# (time, reset, mask, reverse). Chunks are three steps long, so that 7 has a
# remainder and 6 has none.
SEQUENCES = {
    'one_step': (1, False, False, False),
    'reset': (7, True, False, False),
    'mask': (6, False, True, False),
    'reset_mask_reverse': (7, True, True, True),
}

# All of them are right in float64; the one that has it all is tried rounded.
ROUNDED = 'reset_mask_reverse'

# Options that give a layer other equations.
OPTIONS = {
    'LSTM': [{'peephole': True}],
    'AntisymmetricRNN': [{'gated': True}],
    'AGRU': [{'learn_epsilon': False, 'gamma': 2.0}],
    'MinGRU': [{'candidate': 'positive'}],
    'MinLSTM': [{'candidate': 'positive'}],
    'IndRNN': [{'activation': 'tanh'}],
    'RGLRU': [{'signed': True, 'num_heads': 2}],
    'HGRN': [{'complex': True, 'lower_bound': 0.25}],
    'QRNN': [{'pooling': 'ifo'}],
    'CfC': [
        {'mode': 'no_gate', 'timespans': True, 'num_heads': 2},
        {'mode': 'pure', 'timespans': True},
    ],
    'IRevRNN': [{'activation': 'sigmoid', 'inner_activation': 'relu'}],
}


@functools.cache
def _abstract(cls, options):
  return comparison.abstract(comparison.Case(cls, dict(options)))


def abstract(cls, **options):
  return _abstract(cls, tuple(options.items()))


def variants(layers):
  """Yields (name, options) for each layer, with heads where it has them."""
  for name, layer in layers.items():
    yield name, {}
    made = abstract(layer)
    kernel = made.recurrent_kernel
    if kernel is not None and kernel.shape[-1] > 1:
      heads = 1 if made.num_heads > 1 else 2
      yield name, {'num_heads': heads}
    for options in OPTIONS.get(name, ()):
      yield name, options


def cases(layers, newton=False):
  """Yields the suite's cases for a mapping such as `rnnzoo.LAYERS`.

  Args:
    layers: by name.
    newton: for cells that are not linear, cases of 'associative_scan' alone.
  """
  for name, options in variants(layers):
    layer = layers[name]
    linear = isinstance(abstract(layer, **options).cell, rnnzoo.LinearCell)
    paths = [] if newton else ['scan']
    if linear != newton:
      paths.append('associative_scan')
    tag = '_'.join(f'{k}_{v}' for k, v in options.items())
    for sequence, path, dtype in itertools.product(SEQUENCES, paths, TOLERANCE):
      if dtype != 'float64' and sequence != ROUNDED:
        continue
      parts = (name, tag, sequence, path, dtype)
      yield {
          'testcase_name': '_'.join(filter(None, parts)),
          'layer': layer,
          'options': options,
          'sequence': sequence,
          'path': path,
          'dtype': dtype,
      }


class CrossProduct(comparison.ComparisonTestCase):
  """The suite for any layers: a subclass parameterizes `check` by `cases`."""

  def check(self, layer, options, sequence, path, dtype):
    time, reset, mask, reverse = SEQUENCES[sequence]
    case = comparison.Case(
        layer,
        options,
        path,
        dtype,
        sizes=(3, time, 8),
        reset=reset,
        mask=mask,
        reverse=reverse,
    )
    with (
        jax.enable_x64(True),
        mock.patch.object(scan_loop, 'chunk_length', lambda *_: 3),
    ):
      self.compare(case, TOLERANCE[dtype])


# The sequence that has it all; float32 lies between the two dtypes. Options do
# not change what is rounded.
QUICK = [
    case
    for case in cases(rnnzoo.LAYERS)
    if case['sequence'] == ROUNDED
    and (
        case['dtype'] == 'float64'
        or (case['dtype'] == 'bfloat16' and not case['options'])
    )
]


def is_quick(case):
  # SLSTM and IRevRNN compile longest.
  long = case['options'] or case['layer'] in (rnnzoo.SLSTM, rnnzoo.IRevRNN)
  return case['dtype'] == 'float64' and not long


# Newton's method takes longer to compile: once a layer by default.
NEWTON = {
    quick: [
        case
        for case in cases(rnnzoo.LAYERS, newton=True)
        if case['sequence'] == ROUNDED and is_quick(case) == quick
    ]
    for quick in (True, False)
}


class LayersTest(CrossProduct):

  @parameterized.named_parameters(*QUICK)
  @pytest.mark.few(13)
  def test_agrees_with_reference(self, **case):
    self.check(**case)


@pytest.mark.exhaustive
class AllLayersTest(CrossProduct):

  @parameterized.named_parameters(
      *(case for case in cases(rnnzoo.LAYERS) if case not in QUICK)
  )
  def test_agrees_with_reference(self, **case):
    self.check(**case)


class NewtonTest(CrossProduct):

  @parameterized.named_parameters(*NEWTON[True])
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, **case):
    self.check(**case)


@pytest.mark.exhaustive
class AllNewtonTest(CrossProduct):

  @parameterized.named_parameters(*NEWTON[False])
  def test_agrees_with_reference(self, **case):
    self.check(**case)


if __name__ == '__main__':
  absltest.main()
