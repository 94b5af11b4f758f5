"""Slots of ring buffers: shared memory holds them, and the kernels lower."""

import pathlib
import runpy
import types
from unittest import mock

from absl import flags
from absl.testing import absltest
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tiled import choice
from pallas_kernels.tiled import tuning
from tests.testing import tiled_loops

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(**values):
  """Returns the program's functions by name."""
  holder = lambda name, default, *_, **__: types.SimpleNamespace(
      value=values.get(name, default)
  )
  kinds = 'string', 'list', 'integer', 'float', 'multi_string'
  names = [f'DEFINE_{kind}' for kind in kinds]
  with mock.patch.multiple(flags, **dict.fromkeys(names, holder)):
    return runpy.run_path(str(ROOT / 'benchmarks/tiled_stages.py'))


class TiledStagesTest(absltest.TestCase):

  # Before jax 0.11 there are no kernels to tune.
  __test__ = jax.__version_info__ >= (0, 11)

  def setUp(self):
    super().setUp()
    if not self.__test__:
      self.skipTest('needs jax >= 0.11')

  def test_configs_fit(self):
    program = load()
    before = tuning._MOST_STAGES, choice.WORK
    shape = 'LSTM', 128, 1024, 768
    stages = {}
    for most in (6, 8, 14):
      with program['variant'](most), program['gpu']():
        taken = program['configs'](shape, 'forward+backward')
      stages[most] = [config.stages for config in taken]
      for adjoint, config in enumerate(taken):
        size = program['shared_bytes']('LSTM', config, bool(adjoint))
        self.assertLessEqual(size, program['SHARED_BYTES'])
    self.assertEqual(stages[6], [6, 6])
    self.assertEqual(stages[8], [8, 8])
    self.assertEqual(stages[14][1], 14)
    self.assertEqual((tuning._MOST_STAGES, choice.WORK), before)

  def test_errors(self):
    exact = {'a': jnp.ones(4), 'b': jnp.ones(2)}
    found = load()['errors']({'a': jnp.full(4, 1.5), 'c': 1}, exact)
    self.assertEqual(found, {'a': 0.5})

  @pytest.mark.exhaustive
  def test_projected_or_not(self):
    program = load(stages=['6'], projected=['no', 'yes'])
    for layer in ('LSTM', 'GRU'):
      with tiled_loops.forward_plans() as plans:
        own = list(program['programs']((layer, 1024, 8, 512)))
      taken = [each.row['projected'] for each in own]
      self.assertEqual(taken, ['no', 'yes'] * 2)
      self.assertEqual([plan.depth for plan in plans], [0, 512] * 2)
      self.assertEqual([each.finish for each in own], [1] * 2 + [2] * 2)

  @pytest.mark.slow
  def test_features_of_x(self):
    program = load(stages=['6'], projected=['yes'])
    with tiled_loops.forward_plans() as plans:
      own = list(program['programs'](('LSTM', 1024, 8, 512, 128)))
    self.assertEqual([plan.depth for plan in plans], [128] * 2)
    self.assertIn('1024x8x512 of 128 ', program['line'](own[0].row))

  @pytest.mark.exhaustive
  def test_tiles(self):
    program = load(stages=['6'], tiles=['2x2', '4x2', '3x2'])
    with tiled_loops.forward_plans() as plans:
      own = list(program['programs'](('GRU', 2048, 8, 768)))
    warpgroups = [plan.config.warpgroups for plan in plans]
    self.assertEqual(warpgroups, [2, 3] * 2)
    self.assertIn('2x2', program['line'](own[0].row))

  @pytest.mark.slow
  def test_kernels_lower(self):
    program = load(stages=['6', '10'])
    own = list(program['programs'](('LSTM', 128, 8, 768)))
    self.assertEqual([each.finish for each in own], [1, 1, 2, 2])
    self.assertEqual([each.row['most_stages'] for each in own], [6, 10] * 2)
    for each in own:
      self.assertIn('LSTM', program['line'](each.row))


if __name__ == '__main__':
  absltest.main()
