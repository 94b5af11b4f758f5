"""Forecasts of series: the next steps of each, as a distribution.

An `.npz` file holds y [N, T], N series of up to T steps; NaN is a step whose
value is missing. x [N, T, F], if it is there, is what is known beforehand of
each step, such as holidays and prices; lengths int [N] are the steps of each
series, all T without it.

The last `num_test_windows` times H steps of each series test, those before
validate, and all else trains, in windows of C + H steps that begin anywhere. A
window that begins before its series has missing steps there. With a season of m
steps, x gains the sine and cosine of the place in it.

Metrics of the test, all over its known steps:

  mase    mean absolute error over that of the forecast by the same place of the
          season before, one step for m = 1, within the steps before the window
  crps    twice the pinball loss, a mean over the quantiles .05 to .95
  mae, mse, and coverage_80, the share of steps between the quantiles .1 and .9

Dimensions: N series, T steps, F features, B windows, C steps of context, H of
horizon, m of season.

References:
  Hyndman and Koehler, Another look at measures of forecast accuracy, 2006.
"""

from collections.abc import Mapping
import pathlib
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import figures
from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import forecaster
from rnnzoo.tasks.series import heads
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays

# Series that the library aeon brings.
PACKAGED = ('airline', 'lynx', 'shampoo_sales', 'uschange')

_RULES: fields.Rules = {
    'source': fields.one_of(('files', *PACKAGED)),
    'path': fields.text(),
    'context': fields.integer(1, 10**5),
    'horizon': fields.integer(1, 10**4),
    'season': fields.integer(1, 10**5),
    'scaling': fields.one_of(('mean', 'standard')),
    'head': fields.one_of(heads.SIZES),
    'decoder': fields.one_of(('autoregressive', 'seq2seq')),
    'num_paths': fields.integer(2, 10**4),
    'steps_per_epoch': fields.integer(1, 10**6),
    'num_validation_windows': fields.integer(1, 1000),
    'num_test_windows': fields.integer(1, 1000),
}
# Forecasts in the figure.
_PICTURES = 4
_MEASURED = ('mase', 'crps', 'mae', 'mse')


class Series(NamedTuple):
  """Some series."""

  y: np.ndarray  # The values, float32 [N, T]; NaN where one is missing.
  x: np.ndarray  # Facts known beforehand, [N, T, F].
  lengths: np.ndarray  # The steps of each series, int [N].


class Forecasting(protocol.ConfigTask):
  """Forecasts of the next steps of series.

  Attributes:
    splits: 'train' is drawn on the device; 'validation' and 'test' have 'y'
      float32 [B, C + H], 'x' float32 [B, C + H, F], and 'naive_error' [B], by
      which `mase` divides.
  """

  rules = _RULES
  y_is_input = True
  calls_model = False
  metrics = tuple(
      protocol.Metric(name, higher_is_better=False, at_test=True, form='.4g')
      for name in _MEASURED
  )

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the series of a config as in `configs/base_forecasting.py`.

    Raises:
      ModuleNotFoundError: the extra 'timeseries' is not installed.
    """
    self._set_up(config)
    self.dataset, series = _read(self._data)
    data, horizon = self._data, self._data.horizon
    last = series.lengths - horizon  # The last origin: all of H is known.
    held = horizon * (data.num_validation_windows + data.num_test_windows)
    if (short := np.flatnonzero(last - held < 1)).size:
      raise ValueError(
          f'{self.dataset}: series {short[0]} has {series.lengths[short[0]]}'
          f' steps, too few for {held} steps of validation and test and'
          f' {horizon + 1} of training; a smaller config.data.horizon or fewer'
          ' windows would work'
      )
    before = np.arange(series.y.shape[1]) < (last - held)[:, None]
    self._scales = sequence_arrays.standardization(series.x, before)
    whole = self._completed(series.y, series.x, np.zeros(len(last), int))
    origins = {
        'test': [last - horizon * k for k in range(data.num_test_windows)]
    }
    last = last - horizon * data.num_test_windows
    origins['validation'] = [
        last - horizon * k for k in range(data.num_validation_windows)
    ]
    self.splits: Mapping[str, protocol.Split] = {
        'train': protocol.Generator(
            self._draws(whole, last - horizon * data.num_validation_windows),
            data.steps_per_epoch,
            source={'y': whole[0], 'x': whole[1]},
        ),
        **{
            name: self._windows(series, whole, origins[name])
            for name in ('validation', 'test')
        },
    }
    told = np.arange(series.y.shape[1]) < series.lengths[:, None]
    missing = np.isnan(series.y[told]).mean()
    print(
        f'data: {self.dataset}: {len(last)} series of {series.lengths.min()} to'
        f' {series.lengths.max()} steps, {missing:.1%} of them missing,'
        f' {series.x.shape[2]} column(s) of x',
        flush=True,
    )
    errors: Any = self.splits['test']
    if np.isnan(errors['naive_error']).any():
      print(
          'WARNING: data: some series are equal to themselves a season before,'
          ' in all steps before the test, perhaps by rounding to float32; mase'
          ' leaves them out',
          flush=True,
      )

  def describe(self):
    mean, deviation = self._scales
    return {'mean': mean.tolist(), 'deviation': deviation.tolist()}

  def _restore(self, described):
    self._scales = np.array(described['mean']), np.array(described['deviation'])

  def _completed(self, y, x, starts) -> tuple[np.ndarray, np.ndarray]:
    """Returns series with C missing steps before, and all features.

    Args:
      y: values, [N, T].
      x: what is known beforehand, [N, T', F], of the horizon as well perhaps.
      starts: the place in the season of each first step, int [N].
    """
    context, season = self._data.context, self._data.season
    places = starts[:, None] + np.arange(-context, x.shape[1])
    angles = 2 * np.pi * places / season
    before = ((0, 0), (context, 0))
    sequence_arrays.warn_of_rounding(x, *self._scales)
    x = np.pad((x - self._scales[0]) / self._scales[1], (*before, (0, 0)))
    if season > 1:
      x = np.concatenate(
          [x, *np.stack([np.sin(angles), np.cos(angles)])[..., None]], -1
      )
    y = np.pad(y, before, constant_values=np.nan)
    return y.astype(np.float32), x.astype(np.float32)

  def _draws(self, whole, last):
    """Returns the function of a key that draws windows with origins < last."""
    y, x = map(jnp.asarray, whole)
    ends = jnp.cumsum(jnp.asarray(last))
    steps = jnp.arange(self._data.context + self._data.horizon)

    def make_batch(key):
      number = jax.random.randint(key, (self.batch_size,), 0, ends[-1])
      row = jnp.searchsorted(ends, number, side='right')
      origin = number - jnp.where(row > 0, ends[row - 1], 0) + 1
      places = origin[:, None] + steps
      return {'y': y[row[:, None], places], 'x': x[row[:, None], places]}

    return make_batch

  def _windows(self, series, whole, origins) -> dict[str, np.ndarray]:
    """Returns the windows of all series at each of several origins [N]."""
    steps = np.arange(self._data.context + self._data.horizon)
    rows = np.arange(len(series.y))[:, None]
    parts = []
    for origin in origins:
      place = rows, origin[:, None] + steps
      error = self._naive_error(series.y, origin)
      parts.append((whole[0][place], whole[1][place], error))
    y, x, errors = map(np.concatenate, zip(*parts, strict=True))
    known = ~np.isnan(y[:, : self._data.context]).all(1)
    known &= ~np.isnan(y[:, self._data.context :]).all(1)
    if not known.any():
      raise ValueError(f'{self.dataset}: no window has known steps')
    if not known.all():
      print(
          f'WARNING: data: {np.sum(~known)} of {len(known)} windows have no'
          ' known step before or behind their origin, and are left out',
          flush=True,
      )
    return {'y': y[known], 'x': x[known], 'naive_error': errors[known]}

  def _naive_error(self, y: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the seasonal naive error of steps before the ends, [N]."""
    season = self._data.season
    past = np.where(np.arange(y.shape[1]) < ends[:, None], y, np.nan)
    changes = np.abs(past[:, season:] - past[:, :-season])
    known = ~np.isnan(changes)
    total = np.where(known, changes, 0).sum(1, dtype=np.float64)
    found = total / np.maximum(known.sum(1), 1)
    return np.where(found > 0, found, np.nan).astype(np.float32)

  def build_model(self, rngs) -> forecaster.Forecaster:
    features = len(self._scales[0]) + 2 * (self._data.season > 1)
    size = features + forecaster.OWN_FEATURES
    encoder = backbones.build(self._model, size, rngs)
    decoder = None
    if self._data.decoder == 'seq2seq':
      decoder = backbones.build(self._model, features + 1, rngs)
    return forecaster.Forecaster(
        encoder, decoder, self._data.head, self._data.horizon, rngs=rngs
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns the loss of each window, and its forecast.

    The loss is a mean over the known steps: in training, of an autoregressive
    model, those of the context as well.
    """
    y, x, horizon = examples['y'], examples['x'], self._data.horizon
    centre, scale = forecaster.units(y[:, :-horizon], self._data.scaling)
    losses = model.losses((y - centre) / scale, x, scale, rngs)
    known = ~jnp.isnan(y)[:, -losses.shape[1] :]
    if rngs is None:
      losses, known = losses[:, -horizon:], known[:, -horizon:]
    count = jnp.sum(known, axis=1)
    total = jnp.sum(jnp.where(known, losses, 0), axis=1)
    predictions = None
    if rngs is None:
      found = self.distribution(model, {'y': y[:, :-horizon], 'x': x})
      predictions = {'mean': found.mean, 'quantiles': found.quantiles}
    return protocol.Evaluation(
        total / jnp.maximum(count, 1),
        # A batch without any known step has a loss, too: zero.
        weights=jnp.maximum(count, 1e-6),
        predictions=predictions,
    )

  def measure(self, model, split, predictions) -> dict[str, Any]:
    """Returns the metrics of a split, and those of naive forecasts."""
    del model
    windows: Any = self.splits[split]
    past, y = np.split(windows['y'], [self._data.context], axis=1)
    error = windows['naive_error']
    found: dict[str, Any] = self._metrics(y, error, **predictions)
    seasons = {'naive': 1}
    if 1 < self._data.season <= past.shape[1]:
      seasons['seasonal_naive'] = self._data.season
    for name, season in seasons.items():
      means = _naive(past, season, self._data.horizon)
      points = np.repeat(means[..., None], len(heads.LEVELS), -1)
      of_naive = self._metrics(y, error, means, points)
      found[name] = {k: of_naive[k] for k in _MEASURED}
    return found

  def _metrics(self, y, naive_error, mean, quantiles) -> dict[str, float]:
    y = y.astype(np.float64)
    error = np.abs(mean - y)
    pinball = np.asarray(heads.pinball(quantiles, y))
    inside = (quantiles[..., 1] <= y) & (y <= quantiles[..., -2])

    def average(values):
      values = values[~np.isnan(values)]
      return float(np.mean(values)) if len(values) else float('nan')

    known = ~np.isnan(y)
    return {
        'mase': average((error / naive_error[:, None])[known]),
        'crps': average(2 * pinball[known]),
        'mae': average(error[known]),
        'mse': average(error[known] ** 2),
        'coverage_80': average(inside[known].astype(float)),
    }

  def report(self, results, best_model) -> protocol.Report:
    """Returns the coverage, and the metrics of naive forecasts."""
    tests = [result['test'] for result in results]
    numbers = {
        'coverage_80': float(np.mean([t['coverage_80'] for t in tests]))
    } | {
        f'{name}_mase': tests[0][name]['mase']
        for name in ('naive', 'seasonal_naive')
        if name in tests[0]
    }
    test: Any = self.splits['test']
    windows = {name: x[:_PICTURES] for name, x in test.items()}
    seed = results[0]['seed']
    past, ahead = np.split(windows['y'], [self._data.context], axis=1)
    found = nnx.jit(
        lambda model: self.distribution(model, {'y': past, 'x': windows['x']})
    )(best_model(seed))

    def draw(path, title):
      figures.plot_forecasts(
          path,
          f'{title}, test, seed {seed}',
          past,
          ahead,
          np.asarray(found.quantiles),
      )

    return protocol.Report(numbers, {'forecasts.png': draw})

  def check_inputs(self, inputs: Any) -> dict[str, np.ndarray]:
    """Returns inputs of `predict` as windows, 'y' [B, C] and 'x' [B, C + H, F].

    Args:
      inputs: y [B, T], the steps so far, NaN where one is missing; of more than
        C steps the last C count. Or a mapping with 'y', 'x' [B, T + H, F] where
        training had x, and 'start' int [B], the number in its series of the
        first step given, if it is not 0: the season counts from it.
    """
    if isinstance(inputs, Mapping) and 'lengths' in inputs:
      raise ValueError(
          "inputs of forecasts have no 'lengths'; give y [B, T] with NaN before"
          ' a series that is shorter'
      )
    names = ('y', 'start') + ('x',) * (len(self._scales[0]) > 0)
    given = array_checks.by_name(inputs, names, ('y',))
    y = _checked(array_checks.numbers(given['y'], 'y', ('B', 'T')), 'y')
    count, steps = y.shape
    horizon, context = self._data.horizon, self._data.context
    if np.isnan(y[:, -context:]).all(1).any():
      raise ValueError(
          f'y must have a known step in each row among the last {context},'
          ' which the model reads; NaN before a short series would work'
      )
    shape = count, steps + horizon, len(self._scales[0])
    x = given.get('x', None if shape[2] else np.zeros(shape))
    if x is None:
      raise ValueError(
          "inputs must have x, which the model was trained with; {'y': y, 'x':"
          f' x}} would work, with x {list(shape)}, of the horizon, too'
      )
    x = _checked(array_checks.numbers(x, 'x', shape), 'x')
    starts = given.get('start', np.zeros(count, int))
    starts = array_checks.integers(starts, 'start', count, 2**31 - 1, least=0)
    error = self._naive_error(y, np.full(count, steps))
    y, x = self._completed(y, x, starts)
    y, x = y[:, -context:], x[:, -context - horizon :]
    return {'y': y, 'x': x, 'naive_error': error}

  def examples(self, inputs, y):
    """Returns windows as in `splits`; y are steps of the horizon, [B, H]."""
    past = inputs['y']
    shape = len(past), self._data.horizon
    y = _checked(array_checks.numbers(y, 'y', shape), 'y')
    if np.isnan(y).all():
      raise ValueError('y must have a known step; all are NaN')
    return {**inputs, 'y': np.concatenate([past, y], axis=1)}

  def predict(self, model, inputs) -> jax.Array:
    """Returns the mean of the forecast, float32 [B, H]."""
    return self.distribution(model, inputs).mean

  def distribution(self, model, inputs) -> heads.Distribution:
    """Returns the forecast: means [B, H], and quantiles [B, H, 19].

    The random paths of an autoregressive model always have the same key.
    """
    y, x, data = jnp.asarray(inputs['y']), inputs['x'], self._data
    centre, scale = forecaster.units(y, data.scaling)
    past, key = (y - centre) / scale, jax.random.key(0)
    found = model.forecast(past, x, scale, key, data.num_paths)
    return found._replace(
        mean=found.mean * scale + centre,
        quantiles=found.quantiles * scale[..., None] + centre[..., None],
    )


def _naive(past: np.ndarray, season: int, horizon: int) -> np.ndarray:
  """Returns forecasts [B, H] that repeat the last season, of [B, C].

  A missing step is the one a season before, and if all are missing, the mean.
  """
  last = past[:, past.shape[1] - season :].astype(np.float64)
  for end in range(past.shape[1] - season, 0, -season):
    part = np.full_like(last, np.nan)
    part[:, max(season - end, 0) :] = past[:, max(end - season, 0) : end]
    last = np.where(np.isnan(last), part, last)
  last = np.where(np.isnan(last), np.nanmean(past, 1, keepdims=True), last)
  return last[:, np.arange(horizon) % season]


def _checked(values: np.ndarray, name: str) -> np.ndarray:
  """Returns y [B, T], NaN where missing, as float32, or x [B, T, F] as is."""
  is_y = values.ndim == 2
  columns = values[..., None] if is_y else values
  valid = np.ones(columns.shape[:2], bool)
  array_checks.finite(columns, valid, name, allow_nan=is_y)
  return values.astype(np.float32) if is_y else values


def _read(data: ml_collections.ConfigDict) -> tuple[str, Series]:
  """Returns the name of the series, and the series."""
  if data.source == 'files':
    if not data.path:
      raise ValueError(
          'config.data.path must be an .npz file with y [N, T], and maybe x and'
          ' lengths; see configs/base_forecasting.py'
      )
    path = fields.expand(data.path, 'config.data.path')
    return path.name, read(path)
  fields.check_unread(data, ('path',), 'source')
  settings.require('config.data.source', 'timeseries', ('aeon',))
  from aeon import datasets

  y = np.atleast_2d(getattr(datasets, f'load_{data.source}')())
  lengths = np.full(len(y), y.shape[1])
  return data.source, Series(
      y.astype(np.float32), np.zeros((*y.shape, 0)), lengths
  )


def read(path: pathlib.Path) -> Series:
  """Returns the series of an `.npz` file."""
  name = str(path)
  arrays = npz.load(path, ('y', 'x', 'lengths'))
  if 'y' not in arrays:
    raise ValueError(f'{name} must hold y [N, T], the values of series')
  y = array_checks.numbers(arrays['y'], f'{name}: y', ('N', 'T'))
  x = arrays.get('x', np.zeros((*y.shape, 0)))
  axes = (*y.shape, x.shape[2] if x.ndim == 3 else 'F')
  x = array_checks.numbers(x, f'{name}: x', axes)
  lengths = arrays.get('lengths', np.full(*y.shape))
  lengths = array_checks.integers(
      lengths, f'{name}: lengths', *y.shape, row='series'
  )
  y, x = _checked(y, f'{name}: y'), _checked(x, f'{name}: x')
  y = np.where(np.arange(y.shape[1]) < lengths[:, None], y, np.nan)
  return Series(y, x, lengths)
