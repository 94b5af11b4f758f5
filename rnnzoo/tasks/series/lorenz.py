"""Lorenz forecasting: the state of a chaotic system a few steps ahead.

    dx/dt = 10 (y - x),  dy/dt = x (28 - z) - y,  dz/dt = x y - 8/3 z

The model sees (x, y, z) of a trajectory, step by step, and after each step
predicts the state `horizon` steps later. Trajectories are integrated by the
classical Runge-Kutta method in float64, from random points, and begin when they
are on the attractor. Two that are close come apart by e in about 1.1 units of
time, so a horizon beyond a few such units cannot be predicted.

References:
  Lorenz, Deterministic nonperiodic flow, 1963, eqs. 25 - 27.
"""

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import answers
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_task

# Greatest step of the integration, in units of time.
_GREATEST_STEP = 0.01
# Units of time after which a trajectory is on the attractor.
_BURN_IN = 10.0

_RULES: fields.Rules = {
    'standardize': fields.flag(),
    'num_train': fields.integer(1, 10**6),
    'num_validation': fields.integer(1, 10**6),
    'num_test': fields.integer(1, 10**6),
    'length': fields.integer(1, 10**6),
    'interval': fields.number(0, 1, above=True),
    'horizon': fields.integer(1, 10**4),
    'noise': fields.number(0),
    'data_seed': fields.seed(),
}


class Lorenz(sequence_task.SequenceTask):
  """Forecasts of the Lorenz system, after every step.

  Attributes:
    persistence: the mean squared error on the test of a forecast by which
      nothing changes.
  """

  rules = _RULES
  kind = 'regression'

  def __init__(self, config: ml_collections.ConfigDict):
    """Makes the data of a config as in `configs/base_lorenz.py`."""
    self._set_up(config)
    data = config.data
    sizes = (data.num_train, data.num_validation, data.num_test)
    count, length = sum(sizes), data.length + data.horizon
    rng = np.random.RandomState(data.data_seed)
    paths = trajectories(rng, count, length, data.interval)
    seen = paths[:, : data.length]
    if data.noise:
      seen = seen + data.noise * rng.standard_normal(seen.shape)
    whole = sequence_arrays.Sequences(
        seen.astype(np.float32),
        np.full(len(seen), data.length, np.int32),
        paths[:, data.horizon :].astype(np.float32),
    )
    parts = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    splits = {
        name: whole.rows(part)
        for name, part in zip(sequence_arrays.SPLITS, parts, strict=True)
    }
    statistics = np.zeros(3), np.ones(3)
    if data.standardize:
      train = splits['train']
      statistics = sequence_arrays.standardization(train.y, train.valid())
    test = splits['test']
    self.persistence = float(np.mean((test.y - test.x) ** 2))
    ahead = data.horizon * data.interval
    super().__init__(
        config,
        f'Lorenz, {ahead:g} units of time ahead',
        splits,
        answers.Numbers(*statistics),
        every_step=True,
    )

  def report(self, results, best_model) -> protocol.Report:
    """Returns the summary of the data, and the error of persistence."""
    found = super().report(results, best_model)
    return found._replace(
        numbers={**found.numbers, 'persistence_mse': self.persistence}
    )


def trajectories(
    rng: np.random.RandomState, count: int, length: int, interval: float
) -> np.ndarray:
  """Returns states on the attractor, float64 [count, length, 3].

  `rng` draws the points where trajectories start; `interval` is in units of
  time.
  """
  inner = int(np.ceil(interval / _GREATEST_STEP))
  found = np.empty((count, length, 3))
  state = np.array([0.0, 0.0, 25.0]) + rng.standard_normal((count, 3))
  for _ in range(round(_BURN_IN / _GREATEST_STEP)):
    state = _runge_kutta(state, _GREATEST_STEP)
  for step in range(length):
    found[:, step] = state
    for _ in range(inner):
      state = _runge_kutta(state, interval / inner)
  return found


def velocity(state: np.ndarray) -> np.ndarray:
  """Returns d state / dt, of states [..., 3]."""
  x, y, z = np.moveaxis(state, -1, 0)
  return np.stack(
      [10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z], axis=-1
  )


def _runge_kutta(state: np.ndarray, step: float) -> np.ndarray:
  """Returns the states a step later."""
  k1 = velocity(state)
  k2 = velocity(state + step / 2 * k1)
  k3 = velocity(state + step / 2 * k2)
  k4 = velocity(state + step * k3)
  return state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
