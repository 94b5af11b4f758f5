"""The Lorenz system: its trajectories, and forecasts after every step."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest
import numpy as np

from configs import base_lorenz
from rnnzoo.tasks.series import lorenz


def load(**data):
  config = base_lorenz.get_config()
  sizes = {'num_train': 6, 'num_validation': 3, 'num_test': 4, 'length': 20}
  config.data.update({**sizes, **data})
  with contextlib.redirect_stdout(io.StringIO()):
    return lorenz.Lorenz(config)


def trajectories(*sizes):
  return lorenz.trajectories(np.random.RandomState(0), *sizes)


class LorenzTest(absltest.TestCase):

  def test_trajectories_solve_the_equations(self):
    paths = trajectories(3, 200, 1e-3)
    differences = (paths[:, 2:] - paths[:, :-2]) / 2e-3
    np.testing.assert_allclose(
        differences, lorenz.velocity(paths[:, 1:-1]), atol=0.02
    )
    # Fixed points do not move.
    wing = np.sqrt(8 / 3 * 27)
    found = lorenz.velocity(np.array([[0, 0, 0], [wing, wing, 27.0]]))
    np.testing.assert_allclose(found, np.zeros((2, 3)), atol=1e-12)

  def test_integration_is_of_fourth_order(self):
    paths = {}
    for inner in (1, 2, 16):
      with mock.patch.object(lorenz, '_GREATEST_STEP', 0.08 / inner):
        with mock.patch.object(lorenz, '_BURN_IN', 0.0):
          paths[inner] = trajectories(9, 2, 0.08)[:, 1]
    error = {i: np.abs(paths[i] - paths[16]).max() for i in (1, 2)}
    self.assertBetween(error[1] / error[2], 14, 40)  # 2^4, and a little.

  def test_trajectories_are_on_the_attractor(self):
    paths = trajectories(8, 400, 0.05)
    # The mean of z over the attractor is 23.5; both wings are visited.
    self.assertAlmostEqual(paths[..., 2].mean(), 23.5, delta=0.5)
    self.assertBetween((paths[..., 0] > 0).mean(), 0.35, 0.65)
    self.assertLess(np.abs(paths).max(), 50.0)

  def test_answers_are_later_inputs(self):
    task = load(horizon=4, standardize=False)
    for split in task.splits.values():
      np.testing.assert_array_equal(split['inputs'][:, 4:], split['y'][:, :-4])
    self.assertEqual(task.dataset, 'Lorenz, 0.2 units of time ahead')
    test = task.splits['test']
    self.assertAlmostEqual(
        task.persistence, np.mean((test['y'] - test['inputs']) ** 2), places=3
    )

  def test_no_field_allows_nan(self):
    task = load()
    restored = task.restore(base_lorenz.get_config(), task.describe())
    for one in (task, restored):
      with self.assertRaisesRegex(ValueError, r'column 0 is nan \(12 '):
        one.check_inputs(np.full((1, 4, 3), np.nan))

  def test_fields_are_refused_before_the_data(self):
    config = base_lorenz.get_config()
    config.model.label_smoothing = 0.1
    message = 'label_smoothing must be 0 for answers that are numbers'
    with mock.patch.object(lorenz, 'trajectories', side_effect=AssertionError):
      with self.assertRaisesRegex(ValueError, message):
        lorenz.Lorenz(config)
      with self.assertRaisesRegex(ValueError, 'config.data.horizon must be'):
        load(horizon=0)

  def test_noise_and_seeds(self):
    fields = {}, {'noise': 0.5}, {'data_seed': 1}
    first, again, other = (load(standardize=False, **own) for own in fields)
    y = lambda task: task.splits['test']['y']
    np.testing.assert_array_equal(y(first), y(again))
    self.assertGreater(np.abs(y(first) - y(other)).max(), 1.0)
    self.assertEmpty(first.summary['warnings'])
    noise = again.splits['test']['inputs'] - first.splits['test']['inputs']
    self.assertAlmostEqual(np.std(noise), 0.5, delta=0.1)


if __name__ == '__main__':
  absltest.main()
