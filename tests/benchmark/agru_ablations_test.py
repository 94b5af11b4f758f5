"""The published ablations of the A-GRU are fields of its config."""

import ast
import functools
import pathlib

from absl.testing import absltest
from flax import nnx
import jax.numpy as jnp

from benchmarks import pivots
from configs import agru_smnist
import rnnzoo
from rnnzoo.command import sweep
from rnnzoo.training import files
from rnnzoo.training import seed_state


class AblationsTest(absltest.TestCase):

  def test_every_case_is_published_and_of_the_config(self):
    cases = sweep.read_cases(str(pivots.ROOT / 'benchmarks/agru_ablations.txt'))
    rows = pivots.load('benchmarks/agru_ablations.json')['rows']
    self.assertEqual(list(cases), [row['case'] for row in rows])
    config = agru_smnist.get_config()
    for case in cases.values():
      for flag in case.flags:
        name, value = flag.removeprefix('--config.').split('=')
        *folders, last = name.split('.')
        holder = functools.reduce(getattr, folders, config)
        self.assertIsInstance(ast.literal_eval(value), type(holder[last]))

  def test_epsilon_is_a_column(self):
    layer = rnnzoo.AGRU(2, 3, epsilon=0.25, rngs=nnx.Rngs(0))
    found = seed_state.learned_numbers(nnx.state(layer, nnx.Param))
    self.assertEqual(found, {'cell_params.epsilon': 0.25})
    self.assertEqual(seed_state.learned_numbers({'w': jnp.ones(1)}), {})
    path = pathlib.Path(self.create_tempdir().full_path) / 'metrics.csv'
    files.write_csv(path, 'digits', [{'epoch': 1, **found}])
    self.assertEqual(
        path.read_text(), 'dataset,epoch,cell_params.epsilon\ndigits,1,0.25\n'
    )


if __name__ == '__main__':
  absltest.main()
