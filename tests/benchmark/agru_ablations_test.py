"""The published ablations of the A-GRU: fields, and the table."""

import ast
import functools
import pathlib
from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax.numpy as jnp
import pytest

from benchmarks import agru_ablations
from benchmarks import pivots
from configs import agru_smnist
import rnnzoo
from rnnzoo.command import comparison
from rnnzoo.command import sweep
from rnnzoo.training import files
from rnnzoo.training import seed_state
from tests.testing import finished_run


def write_run(directory, has_epsilon):
  """Writes what a finished run of two seeds leaves behind."""
  rows = [
      {
          'epoch': epoch,
          'train_loss': 1.0 / epoch,
          'validation_loss': validation,
          'validation_accuracy': 0.5,
      }
      for epoch, validation in ((1, 0.75), (2, 0.8))
  ]
  if has_epsilon:
    rows[-1]['backbone.layers.0.cell_params.epsilon'] = 0.9
  tests = [{'accuracy': 0.5 + seed / 4, 'loss': 1.0} for seed in (0, 1)]
  finished_run.write(directory, 'agru_smnist', 'digits', tests, rows)


class AblationsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def test_every_case_is_published_and_of_the_config(self):
    cases = sweep.read_cases(agru_ablations.CASES)
    rows = pivots.load('benchmarks/agru_ablations.json')['rows']
    self.assertEqual(list(cases), [row['case'] for row in rows])
    config = agru_smnist.get_config()
    for case in cases.values():
      for flag in case.flags:
        name, value = flag.removeprefix('--config.').split('=')
        *folders, last = name.split('.')
        holder = functools.reduce(getattr, folders, config)
        self.assertIsInstance(ast.literal_eval(value), type(holder[last]))

  @pytest.mark.slow
  def test_table(self):
    lines = pathlib.Path(agru_ablations.CASES).read_text().splitlines()
    cases = self.directory / 'cases.txt'
    cases.write_text(f'baseline\n{lines[-1]}\n')

    def run(config, workdir, flags, parallel):
      del config, parallel
      write_run(workdir, '--config.model.options.AGRU.epsilon=0.5' not in flags)
      self.assertIn('--config.num_seeds=3', flags)
      self.assertIn('--config.num_epochs=2', flags)
      return 0

    with (
        mock.patch.object(sweep, '_run', run),
        mock.patch.object(comparison, 'plot'),
    ):
      words = [f'--workdir={self.directory}', f'--cases={cases}']
      code = agru_ablations.main([*words, '--config.num_epochs=2'])
    self.assertEqual(code, 0)
    # The gap: 0.75, the least validation loss, less 0.5.
    self.assertEqual(
        (self.directory / 'ablations.md').read_text().splitlines()[2:],
        [
            '| baseline | 98.70 | 0.0496 | 0.829 | 62.50 ± 12.50 | 0.2500 |'
            ' 0.900 |',
            '| frozen_epsilon_0.5_gamma_0.1 | 98.78 | 0.0487 | 0.500 |'
            ' 62.50 ± 12.50 | 0.2500 | 0.500 |',
            '',
            'Data: digits.',
        ],
    )

  def test_epsilon_is_a_column(self):
    layer = rnnzoo.AGRU(2, 3, epsilon=0.25, rngs=nnx.Rngs(0))
    found = seed_state.learned_numbers(nnx.state(layer, nnx.Param))
    self.assertEqual(found, {'cell_params.epsilon': 0.25})
    self.assertEqual(seed_state.learned_numbers({'w': jnp.ones(1)}), {})
    path = self.directory / 'metrics.csv'
    files.write_csv(path, 'digits', [{'epoch': 1, **found}])
    self.assertEqual(
        path.read_text(), 'dataset,epoch,cell_params.epsilon\ndigits,1,0.25\n'
    )


if __name__ == '__main__':
  absltest.main()
