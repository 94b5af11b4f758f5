"""Forecasts: heads, windows, metrics, trained models."""

import contextlib
import functools
import io
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import numpy as np
import pytest
from scipy import stats

from configs import base_forecasting
from rnnzoo.tasks.series import forecaster
from rnnzoo.tasks.series import forecasting
from rnnzoo.tasks.series import heads
from rnnzoo.training import trained

RANDOM = np.random.RandomState(0)


class HeadsTest(parameterized.TestCase):

  @parameterized.parameters('gaussian', 'student')
  def test_likelihoods_and_quantiles(self, head):
    outputs = RANDOM.randn(5, 2 * heads.SIZES[head]).astype(np.float32)
    parts = outputs.reshape(5, 2, -1)
    scale = np.logaddexp(0, parts[..., 1]) + 1e-4
    if head == 'gaussian':
      known = stats.norm(parts[..., 0], scale)
    else:
      freedom = 2 + np.logaddexp(0, parts[..., 2]) + 1e-4
      known = stats.t(freedom, parts[..., 0], scale)
    y = RANDOM.randn(5, 2)
    found = heads.losses(outputs, y, head)
    np.testing.assert_allclose(found, -known.logpdf(y), rtol=1e-4)
    quantiles = heads.distribution(outputs, head).quantiles
    expected = np.stack([known.ppf(p) for p in heads.LEVELS], -1)
    np.testing.assert_allclose(quantiles, expected, rtol=2e-4, atol=1e-4)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.vmap(lambda key: heads.sample(outputs, head, key))
    sampled = heads.of_samples(draw(keys)).quantiles
    error = np.abs(sampled - expected) / scale[..., None]
    self.assertLess(error.max(), 0.25)

  def test_pinball_is_half_the_crps(self):
    # Of a point it is the absolute error; of a distribution, an integral.
    y, point = RANDOM.randn(2, 4)
    found = heads.pinball(
        heads.distribution(point[:, None], 'point').quantiles, y[:, None]
    )
    np.testing.assert_allclose(2 * found[:, 0], abs(y - point), rtol=1e-5)
    outputs = np.zeros((1, 2), np.float32)
    quantiles = heads.distribution(outputs, 'gaussian').quantiles
    scale = np.log(2) + 1e-4
    of_normal = scale * (2 * stats.norm.pdf(0) - 1 / np.sqrt(np.pi))
    found = 2 * heads.pinball(quantiles, np.zeros((1, 1)))
    np.testing.assert_allclose(found, of_normal, rtol=0.1)

  def test_quantiles_are_in_order(self):
    outputs = RANDOM.randn(3, 19)
    found = heads.distribution(outputs, 'quantiles')
    self.assertTrue((np.diff(found.quantiles) >= 0).all())
    np.testing.assert_array_equal(found.mean, found.quantiles[..., 9])


def config(**data):
  made = base_forecasting.get_config()
  made.model.update(layer='GRU', features=4)
  made.batch_size = 64
  sizes = {'context': 6, 'horizon': 3, 'season': 4, 'num_paths': 20}
  made.data.update(source='files', **sizes, **data)
  return made


@functools.cache
def series() -> tuple[pathlib.Path, dict[str, np.ndarray]]:
  """Returns a file of two ragged series, and its arrays."""
  time = np.arange(40.0)
  y = np.stack([time, 100 + 10 * (time % 4)])
  y[0, 20] = np.nan
  x = RANDOM.randn(2, 40, 1)
  arrays = {'y': y, 'x': x, 'lengths': np.array([40, 31])}
  path = pathlib.Path(tempfile.mkdtemp()) / 'mine.npz'
  np.savez(path, **arrays)
  return path, arrays


def task(**data):
  return forecasting.Forecasting(config(path=str(series()[0]), **data))


class ForecastingTest(parameterized.TestCase):

  def test_windows(self):
    made, (_, arrays) = task(num_test_windows=2), series()
    test, validation = made.splits['test'], made.splits['validation']
    self.assertEqual(test['y'].shape, (4, 9))
    np.testing.assert_array_equal(test['y'][0], arrays['y'][0, 31:])
    np.testing.assert_array_equal(test['y'][3], arrays['y'][1, 19:28])
    np.testing.assert_array_equal(validation['y'][1], arrays['y'][1, 16:25])
    # In units of the steps that train: each series less three horizons.
    x = arrays['x'][..., 0]
    seen = np.append(x[0, :28], x[1, :19])
    by_hand = (x[0, 31:] - seen.mean()) / seen.std()
    np.testing.assert_allclose(test['x'][0, :, 0], by_hand, rtol=1e-4)
    angle = 2 * np.pi * np.arange(31, 40) / 4
    np.testing.assert_allclose(test['x'][0, :, 1], np.sin(angle), atol=1e-6)
    # By a season of four the first grows by 4, and the second repeats.
    np.testing.assert_allclose(test['naive_error'], [4, np.nan, 4, np.nan])
    drawn = made.splits['train'].make_batch(jax.random.key(0))
    is_first = np.nanmax(drawn['y'], 1) < 100
    self.assertBetween(is_first.mean(), 0.3, 0.8)
    last = drawn['y'][:, -1][is_first]
    self.assertEqual((np.nanmin(last), np.nanmax(last)), (3, 30))

  def test_naive_forecasts_and_metrics(self):
    made = task()
    y = made.splits['test']['y'][:, 6:]
    zero = {'mean': 0 * y, 'quantiles': np.zeros((*y.shape, 19))}
    found = made.measure(None, 'test', zero)
    self.assertAlmostEqual(found['mae'], y.mean(), places=4)
    self.assertAlmostEqual(found['crps'], y.mean(), places=4)
    self.assertAlmostEqual(found['mase'], np.mean(y[0] / 4), places=4)
    self.assertEqual(found['coverage_80'], 0)
    self.assertEqual(found['naive']['mae'], np.mean([1, 2, 3, 30, 20, 10]))
    self.assertEqual(found['seasonal_naive']['mae'], 2)
    past = np.array([[1, 2, 3, 4, np.nan, 6]])
    np.testing.assert_array_equal(
        forecasting._naive(past, 4, 5), [[3, 4, 1, 6, 3]]
    )

  @parameterized.product(
      decoder=('autoregressive', 'seq2seq'), head=('student', 'quantiles')
  )
  @pytest.mark.slow
  def test_a_trained_model(self, decoder, head):
    made = task(decoder=decoder, head=head)
    model = made.build_model(nnx.Rngs(0))
    restored = forecasting.Forecasting.restore(
        config(path='gone', decoder=decoder, head=head), made.describe()
    )
    loaded = trained.Trained(model, config(), 0, restored)
    _, arrays = series()
    given = {'y': arrays['y'][:1, :37], 'x': arrays['x'][:1]}
    found = loaded.predict_distribution(given)
    self.assertEqual(found.mean.shape, (1, 3))
    self.assertTrue((np.diff(found.quantiles) >= 0).all())
    np.testing.assert_array_equal(found.mean, loaded.predict(given))
    for call in (jax.jit(loaded.predict), lambda x: loaded.normalise(x)):
      with self.assertRaises(NotImplementedError):
        call(given)
    # Only the context counts, and where it stands.
    late = {'y': given['y'][:, 31:], 'x': given['x'][:, 31:], 'start': [31]}
    np.testing.assert_allclose(loaded.predict(late), found.mean, rtol=1e-5)
    scores = loaded.score(given, arrays['y'][:1, 37:])
    self.assertAlmostEqual(
        scores['mae'], abs(found.mean - np.array([37, 38, 39])).mean(), places=3
    )
    test = {k: v[:1] for k, v in made.splits['test'].items()}
    tested = made.evaluate(model, test)
    mean = tested.predictions['mean']
    np.testing.assert_allclose(mean, found.mean, rtol=1e-5)
    self.assertAlmostEqual(scores['loss'], tested.losses[0], places=4)
    if decoder == 'seq2seq':
      return
    y = np.append(given['y'], [np.nan] * 3)[None, 31:]
    losses = lambda y: model.losses(
        y, made.check_inputs(given)['x'], np.ones((1, 1))
    )
    changed = np.where(np.arange(9) == 8, 7.0, y)
    np.testing.assert_array_equal(losses(y)[:, :8], losses(changed)[:, :8])
    self.assertTrue(np.isfinite(losses(y)).all())

  def test_units(self):
    y = np.array([[1, -3, np.nan], [0, 0, 0]], np.float32)
    _, scale = forecaster.units(y, 'mean')
    np.testing.assert_array_equal(scale, [[2], [1]])
    centre, scale = forecaster.units(y, 'standard')
    np.testing.assert_array_equal((centre[0], scale[0]), ([-1], [2]))

  def test_errors(self):
    made, (_, arrays) = task(), series()
    y, x = arrays['y'][:, :5], arrays['x'][:, :8]
    for inputs, message in (
        (y, r'must have x, which .* \[2, 8, 1\], of the horizon'),
        ({'y': y, 'x': x, 'lengths': [5, 5]}, "have no 'lengths'"),
        ({'y': y[0], 'x': x}, r'y must be real numbers \[B, T\]'),
        ({'y': y * np.nan, 'x': x}, 'a known step in each row'),
        ({'y': y, 'x': x * np.nan}, 'x must be finite'),
        ({'y': y, 'x': x, 'start': [0.5]}, 'start must be integers'),
        ({'y': y, 'z': x}, "got 'z'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        made.check_inputs(inputs)
    path = pathlib.Path(self.create_tempdir().full_path) / 'mine.npz'
    for change, message in (
        ({'y': y[0]}, r'y must be real numbers \[N, T\]'),
        ({'lengths': np.array([1, 99])}, 'to 40; series 1 has 99'),
        ({'x': x}, r'numbers \[2, 40, 1\], .* \[2, 8, 1\]'),
        ({'lengths': np.array([40, 9])}, 'series 1 has 9 steps, too few for 6'),
    ):
      np.savez(path, **{**arrays, **change})
      with contextlib.redirect_stdout(io.StringIO()):
        with self.assertRaisesRegex(ValueError, message):
          forecasting.Forecasting(config(path=str(path)))
    y = np.where(np.arange(40) < 37, arrays['y'], np.nan)
    y[1] = 1.0  # Nothing to divide by.
    np.savez(path, y=y)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      made = forecasting.Forecasting(config(path=str(path)))
    self.assertIn('1 of 2 windows have no known', printed.getvalue())
    self.assertIn('mase leaves them out', printed.getvalue())
    self.assertEqual(made.splits['test']['y'].shape, (1, 9))
    found = made.check_inputs(y[1:, :4])  # There is no x; the season is one.
    self.assertEqual((found['y'].shape, found['x'].shape), ((1, 6), (1, 9, 2)))
    with self.assertRaisesRegex(ValueError, 'must be an .npz file with y'):
      forecasting.Forecasting(config())


if __name__ == '__main__':
  absltest.main()
