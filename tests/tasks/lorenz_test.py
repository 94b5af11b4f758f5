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


class LorenzTest(absltest.TestCase):

  def test_trajectories_solve_the_equations(self):
    rng = np.random.RandomState(0)
    paths = lorenz.trajectories(rng, 3, 200, 1e-3)
    differences = (paths[:, 2:] - paths[:, :-2]) / 2e-3
    np.testing.assert_allclose(
        differences, lorenz.velocity(paths[:, 1:-1]), atol=0.02
    )

  def test_integration_is_of_fourth_order(self):
    paths = {}
    for inner in (1, 2, 16):
      with mock.patch.object(lorenz, '_GREATEST_STEP', 0.08 / inner):
        with mock.patch.object(lorenz, '_BURN_IN', 0.0):
          rng = np.random.RandomState(0)
          paths[inner] = lorenz.trajectories(rng, 9, 2, 0.08)[:, 1]
    error = {i: np.abs(paths[i] - paths[16]).max() for i in (1, 2)}
    self.assertBetween(error[1] / error[2], 14, 40)  # 2^4, and a little.

  def test_trajectories_are_on_the_attractor(self):
    paths = lorenz.trajectories(np.random.RandomState(0), 8, 400, 0.05)
    # The mean of z over the attractor is 23.5; both wings are visited.
    self.assertAlmostEqual(paths[..., 2].mean(), 23.5, delta=0.5)
    self.assertBetween((paths[..., 0] > 0).mean(), 0.35, 0.65)
    self.assertLess(np.abs(paths).max(), 50.0)

  def test_fixed_points_do_not_move(self):
    wing = np.sqrt(8 / 3 * 27)
    np.testing.assert_allclose(
        lorenz.velocity(np.array([[0, 0, 0], [wing, wing, 27.0]])),
        np.zeros((2, 3)),
        atol=1e-12,
    )

  def test_answers_are_later_inputs(self):
    task = load(horizon=4)
    for split in task.splits.values():
      np.testing.assert_array_equal(split['x'][:, 4:], split['y'][:, :-4])
    self.assertEqual(task.dataset, 'Lorenz, 0.2 units of time ahead')
    test = task.splits['test']
    self.assertAlmostEqual(
        task.persistence, np.mean((test['y'] - test['x']) ** 2), places=3
    )

  def test_no_field_allows_nan(self):
    task = load()
    restored = task.restore(base_lorenz.get_config(), task.describe())
    for one in (task, restored):
      with self.assertRaisesRegex(ValueError, r'column 0 is nan \(12 '):
        one.check_inputs(np.full((1, 4, 3), np.nan))

  def test_labels_that_are_smoothed_are_refused_before_the_data(self):
    config = base_lorenz.get_config()
    config.model.label_smoothing = 0.1
    with mock.patch.object(lorenz, 'trajectories', side_effect=AssertionError):
      with self.assertRaisesRegex(
          ValueError, 'label_smoothing must be 0 for answers that are numbers'
      ):
        lorenz.Lorenz(config)

  def test_noise_is_in_inputs_alone(self):
    plain, noisy = load().splits['test'], load(noise=0.5).splits['test']
    np.testing.assert_array_equal(plain['y'], noisy['y'])
    self.assertAlmostEqual(np.std(noisy['x'] - plain['x']), 0.5, delta=0.1)

  def test_splits_and_seeds(self):
    first, again, other = load(), load(), load(data_seed=1)
    x = lambda task: task.splits['train']['x']
    np.testing.assert_array_equal(x(first), x(again))
    self.assertGreater(np.abs(x(first) - x(other)).max(), 1.0)
    self.assertEmpty(first.summary['warnings'])

  def test_more_than_memory_holds(self):
    with self.assertRaisesRegex(
        ValueError,
        'num_train, num_validation and num_test are 1,000,007 trajectories, of'
        r' length \+ horizon = 1,000,005 states: their 24,000,288,000,840 bytes'
        ' are more than 4,294,967,296. Either 178 trajectories of such a length'
        ' would do, or 178 states of so many$',
    ):
      load(num_train=10**6, length=10**6)
    with mock.patch.object(lorenz, '_MOST_BYTES', 24 * 13 * 25):
      load()  # 13 trajectories of 25 states.
      with self.assertRaisesRegex(ValueError, 'Either 12 .* or 25 states'):
        load(horizon=6)

  def test_blocks_of_trajectories(self):
    make = lambda: lorenz.trajectories(np.random.RandomState(0), 5, 9, 0.05)
    whole = make()
    with mock.patch.object(lorenz, '_BLOCK', 2):
      np.testing.assert_array_equal(whole, make())

  def test_a_long_integration_is_told(self):
    make = lambda: lorenz.trajectories(np.random.RandomState(0), 5, 9, 0.05)
    told = 'data: integrating 5 trajectories to 9 states, 5 step(s) each\n'
    for most, expected in ((1045, ''), (1044, told)):
      with (
          mock.patch.object(lorenz, '_MANY_STEPS', most),
          contextlib.redirect_stdout(io.StringIO()) as out,
      ):
        make()
      self.assertEqual(out.getvalue(), expected)

  def test_bad_fields(self):
    with self.assertRaisesRegex(ValueError, 'config.data.horizon must be'):
      load(horizon=0)


if __name__ == '__main__':
  absltest.main()
