"""Kernels on a GPU of a kind that nobody has run them on."""

import json
import os
import subprocess
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax.numpy as jnp

from pallas_kernels import devices
import rnnzoo
from rnnzoo.engines import first_use
from rnnzoo.inspect import card
from tests.testing import abstract_gpu

RIGHT = {'linear': '', 'diagonal': '', 'dense': 'Case(...): relative error 1'}


def process(stdout='', **options):
  """Stands in for the process that compares."""
  done = subprocess.CompletedProcess([], 0, stdout, '')
  return mock.patch.object(
      subprocess, 'run', **options or {'return_value': done}
  )


class UntriedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    first_use._answers.cache_clear()
    self.folder = self.create_tempdir().full_path
    for patch in (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=self.folder),
        mock.patch.object(devices, 'untried', return_value='NVIDIA Z9'),
        mock.patch.object(first_use.selection, 'warn_once'),
    ):
      self.enter_context(patch)
    self.warnings = first_use.selection.warn_once


class FirstUseTest(UntriedTest):

  def test_answers_are_kept(self):
    with process('a line\n' + json.dumps({'wrong': RIGHT})):
      self.assertEqual(first_use.doubt('linear'), '')
    self.assertIn('nobody has run', self.warnings.call_args.args[0])
    first_use._answers.cache_clear()
    with process(side_effect=AssertionError('asked again')):
      self.assertRegex(first_use.doubt('dense'), 'NVIDIA Z9.*relative error 1')
      self.assertEqual(first_use.doubt('diagonal'), '')

  @parameterized.parameters(
      ({'side_effect': subprocess.TimeoutExpired('python', 1)}, 'no answer'),
      ({'side_effect': OSError('no memory')}, 'without an answer'),
      ({}, 'without an answer'),
  )
  def test_no_answer(self, options, reason):
    with process('Segmentation fault', **options):
      for kind in RIGHT:
        self.assertRegex(first_use.doubt(kind), reason)
    self.assertEmpty(os.listdir(self.folder))  # The next process asks again.


class KernelsTest(UntriedTest):

  __test__ = abstract_gpu.RUNS

  def test_another_path_runs(self):
    layer = rnnzoo.MinGRU(3, 4, rngs=nnx.Rngs(0))
    with process('no answer'), abstract_gpu.device(self, 'NVIDIA H200'):
      text = abstract_gpu.lower(layer, jnp.ones((2, 5, 3)))
      self.assertNotIn('mosaic_gpu', text)
    self.assertRegex(self.warnings.call_args.args[0], 'Please report')

  @parameterized.parameters('linear', 'diagonal')
  def test_compares(self, kind):
    layer = 'MinGRU' if kind == 'linear' else 'IndRNN'
    case = card.Case(kind, layer, (2, 5, 8), 'float32')
    with abstract_gpu.interpreted(self):
      self.assertEqual(card.compare(case), '')
      with mock.patch.object(card, '_ERROR', 0.0):
        self.assertRegex(card.compare(case), 'relative error')


if __name__ == '__main__':
  absltest.main()
