"""Rows of a JSON file from run directories: several runs are one row."""

import json
import pathlib
import runpy
import types
from unittest import mock

from absl import flags
from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def write_run(directory, seed, accuracy, **run):
  """Writes what `collect_runs` reads of a finished run of one seed."""
  test = {'accuracy': accuracy, 'loss': 1 - accuracy}
  model = {'layer': 'GRU', 'features': 8}
  of_seed = {'seed': seed, 'num_epochs': 2, 'num_parameters': 9}
  files = {
      'config': {'seed': seed, 'model': model, 'data': {}},
      'report': {
          'experiment': 'gru_smnist with num_epochs=2',
          'changed': {'num_epochs': 2, 'seed': seed},
          'dataset': 'MNIST',
          'test': {k: {'mean': value, 'std': 0.0} for k, value in test.items()},
          'seeds': [of_seed | {'test': test}],
      },
      'run': {'device': 'cpu', 'jax': '1', 'flax': '2'} | run,
  }
  directory.mkdir()
  for name, content in files.items():
    (directory / f'{name}.json').write_text(json.dumps(content))


class CollectRunsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.runs = pathlib.Path(self.create_tempdir().full_path)
    self.output = self.runs / 'rows.json'
    holder = lambda *_, **__: types.SimpleNamespace(value=None)
    # Other programs of these tests define flags of the same names.
    with mock.patch.object(flags, 'DEFINE_string', holder):
      self.program = runpy.run_path(str(ROOT / 'benchmarks/collect_runs.py'))

  def collect(self, *names):
    main = self.program['main']
    values = {'_COMMIT': 'abc', '_OUTPUT': str(self.output)}
    told = {k: types.SimpleNamespace(value=v) for k, v in values.items()}
    with mock.patch.dict(main.__globals__, told):
      main(['', *(str(self.runs / name) for name in names)])
    return json.loads(self.output.read_text())

  def test_runs_of_one_experiment_are_one_row(self):
    write_run(self.runs / 'b', 1, 0.75)
    write_run(self.runs / 'a', 0, 0.25)
    (row,) = self.collect('b', 'a')
    self.assertEqual(row['experiment'], 'gru_smnist with num_epochs=2')
    self.assertEqual(row['accuracy'], {'mean': 0.5, 'std': 0.25})
    self.assertEqual(row['others'], {'loss': 0.5})
    self.assertEqual([seed['seed'] for seed in row['seeds']], [0, 1])
    self.assertEqual([seed['accuracy'] for seed in row['seeds']], [0.25, 0.75])
    self.assertIsNone(row['tokens_per_second'])

  def test_a_later_call_replaces_the_row(self):
    write_run(self.runs / 'a', 0, 0.25)
    write_run(self.runs / 'b', 1, 0.75)
    self.collect('a')
    (row,) = self.collect('b')
    self.assertEqual(row['accuracy'], {'mean': 0.75, 'std': 0.0})

  def test_runs_that_do_not_belong_together_are_refused(self):
    write_run(self.runs / 'a', 0, 0.25)
    write_run(self.runs / 'same', 0, 0.75)
    write_run(self.runs / 'elsewhere', 1, 0.75, device='gpu')
    with self.assertRaisesRegex(ValueError, 'have the same seed'):
      self.collect('a', 'same')
    with self.assertRaisesRegex(ValueError, "differ in 'device'"):
      self.collect('a', 'elsewhere')
    self.assertFalse(self.output.exists())


if __name__ == '__main__':
  absltest.main()
