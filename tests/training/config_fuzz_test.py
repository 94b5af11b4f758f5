"""Every field of a config with values that it was never meant to have.

A value is refused with a sentence that names its field, or it is one that
training can run with. Nothing is refused otherwise, and nothing is accepted
that would be silently taken for something else.
"""

import contextlib
import functools
import inspect
import io
import math
from unittest import mock

from absl.testing import absltest
from flax import nnx
import ml_collections
import pytest

import rnnzoo
from rnnzoo import training
from rnnzoo.tasks import fields
from rnnzoo.tasks.images import mnist
from rnnzoo.tasks.images import smnist
from rnnzoo.training import run_directory
from tests.testing import made_up_task

NUMBERS = (-1, 0, 1, 3, 2**31 - 1, 2**31, 2**32, 10**30, 10**400, -(10**5000))
NUMBERS += (math.nan, math.inf, -math.inf, -0.5, -0.0, 0.5, 1.0, 1 - 1e-12)
NUMBERS += (1e-40, 1e-400, 1e39, 1e300)
TEXTS = ('', 'None', 'nan', 'no', '0.1', 'x' * 10_000, 'a\0b', '\ud800')
TEXTS += ('(', 'a{99999999999999}', '../../..')
VALUES = (None, True, False, *NUMBERS, *TEXTS)
VALUES += ((), (1, 2), [0.5], {}, {'a': 1}, b'bytes', 1j, len)

# Options that a layer has from the rest of the config, or sets itself.
SET_ELSEWHERE = ('cell', 'dtype', 'features', 'implementation', 'in_features')
SET_ELSEWHERE += ('rngs',)

# Fields whose accepted values say where to look for data.
PATHS = ('data.data_dir', 'data.manual_dir')

_load_digits = functools.cache(mnist.load_digits)


def base() -> ml_collections.ConfigDict:
  config = made_up_task.base_config()
  config.data.source = 'digits'
  config.model.features = 2
  return config


def set_field(
    config: ml_collections.ConfigDict, name: str, value: object
) -> None:
  """Sets a field to a value of whatever type, as a config's file can."""
  *sections, last = name.split('.')
  for section in sections:
    config = config[section]
  with config.unlocked():
    if last in config:
      del config[last]
    config[last] = value


def get_field(config: ml_collections.ConfigDict, name: str) -> object:
  for part in name.split('.'):
    config = config[part]
  return config


def all_fields() -> list[str]:
  """Returns the names of all fields, and of the sections that hold them."""
  names = set(run_directory.flatten(run_directory.as_json(base())))
  sections = {name.rsplit('.', 1)[0] for name in names if '.' in name}
  options = {'model.options', 'model.last_layer_options'}
  return sorted(names | sections | options)


class FuzzTestCase(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(mnist, 'load_digits', _load_digits))
    # Nothing is written, and nothing is compiled.
    self.enter_context(
        mock.patch.object(run_directory, 'open_or_create', return_value=None)
    )

  def check(self, name: str, value: object) -> None:
    config = base()
    set_field(config, name, value)
    with self.subTest(f'{name}={fields.shorten(value)}'):
      try:
        with contextlib.redirect_stdout(io.StringIO()):
          training.prepare(config, '')
      except (ValueError, OSError) as error:
        text = str(error)
        self.assertNotEmpty(text)
        self.assertLess(len(text), 700)
        if name not in PATHS and 'what JSON can' not in text:
          self.assertIn(name.split('.')[-1], text)
      else:
        self.check_accepted(name, value)

  def check_accepted(self, name: str, value: object) -> None:
    default = get_field(base(), name)
    if isinstance(default, bool) or isinstance(value, bool):
      self.assertIs(type(value), type(default))
    elif isinstance(default, float):
      self.assertIsInstance(value, (int, float))
      self.assertTrue(math.isfinite(value))
      self.assertGreaterEqual(value, 0)
    elif isinstance(default, int):
      self.assertIs(type(value), int)
      self.assertGreaterEqual(value, 0)
      self.assertLess(value, 2**32)
    elif isinstance(default, tuple):
      self.assertEqual(value, ())
    elif default is not None:
      # Sections are accepted with the fields that they must have.
      self.assertIsInstance(value, (dict, str))


class ConfigFuzzTest(FuzzTestCase):

  def test_numbers_outside_of_their_range(self):
    for name, values in {
        'optimizer.learning_rate': (math.nan, math.inf, -1.0, 0.0, 1e39, 1e-46),
        'optimizer.b1': (math.nan, -0.1, 1.0, 1 - 1e-12),
        'optimizer.b2': (math.inf, -0.1, 1.0, 2.0),
        'optimizer.weight_decay': (math.nan, math.inf, -1.0),
        'optimizer.clip_norm': (math.nan, math.inf, -1.0, 1e-60),
        'optimizer.clip_value': (math.nan, math.inf, -1.0),
        'optimizer.plateau_factor': (math.nan, 0.0, 1.5),
        'optimizer.plateau_floor': (math.nan, -1.0, 1.0),
        'optimizer.plateau_min_delta': (math.nan, math.inf, -1.0, 1e-60),
        'optimizer.stop_rate': (math.nan, -1.0),
        'optimizer.step_factor': (math.nan, 0.0, 1.5),
        'optimizer.step_epochs': (0, -1, 10**30),
        'model.label_smoothing': (math.nan, -0.1, 1.0, 1 - 1e-12),
        'early_stopping.min_delta': (math.nan, math.inf, -1.0),
        'checkpoint_seconds': (math.nan, math.inf, -1.0),
        'model.dropout_rate': (math.nan, -0.1, 1.0, 1 - 1e-12),
        'seed': (-1, 2**32),
        'data.permutation_seed': (-1, 2**32),
        'data.split_seed': (-1, 2**32),
        'data.digits_batch_size': (0, -1),
        'num_epochs': (0, 10**9, 10**30),
        'num_seeds': (0, -1),
        'eval_batch_size': (0, -1),
        'batch_size': (0, 10**30),
        'model.features': (0, 10**9),
    }.items():
      for value in values:
        config = base()
        set_field(config, name, value)
        with self.subTest(f'{name}={value}'):
          with self.assertRaisesRegex(ValueError, f'config.{name} must be'):
            training.prepare(config, '')

  def test_the_last_seed(self):
    config = base()
    config.update(seed=2**32 - 2, num_seeds=3)
    with self.assertRaisesRegex(ValueError, 'below 2\\^32; got 4294967296'):
      training.prepare(config, '')


class EveryConfigFuzzTest(FuzzTestCase):

  def check_some(self, *parts):
    """Checks eighths of all values of all fields, by their numbers."""
    for index, name in enumerate(all_fields()):
      for part in parts:
        # Those that are accepted are traced, which takes a while.
        for value in VALUES[(part + index) % 8 :: 8]:
          self.check(name, value)

  @pytest.mark.slow
  def test_an_eighth_of_the_values_of_every_field(self):
    self.check_some(0)

  @pytest.mark.exhaustive
  def test_all_other_values_of_every_field(self):
    self.check_some(*range(1, 8))


class OptionsFuzzTest(absltest.TestCase):
  """Options of layers: refused by name, or read."""

  def check(self, values, with_shared):
    # Of __init__: the signature of the class is that of nnx's metaclass.
    names = lambda kind: {*inspect.signature(kind.__init__).parameters}
    shared = names(rnnzoo.RecurrentLayer)
    self.assertIn('use_bias', shared)
    for layer in rnnzoo.LAYERS:
      config = base()
      config.model.update(layer=layer, features=4)
      with contextlib.redirect_stdout(io.StringIO()):
        task = smnist.SequentialMnist(config)
      options = names(rnnzoo.LAYERS[layer])
      options |= shared if layer in with_shared else set()
      for option in sorted(options - {'self', 'options', 'unknown'}):
        for value in values:
          with self.subTest(f'{layer}.{option}={fields.shorten(value)}'):
            try:
              config.model.options[layer] = {option: value}
              nnx.eval_shape(task.build_model, nnx.Rngs(0))
            except (ValueError, NotImplementedError) as error:
              self.assertIn(option, str(error))
            else:
              self.assertNotIn(option, SET_ELSEWHERE)
              self.assertNotEqual(value, {'a': 1})

  @pytest.mark.slow
  def test_a_value_that_no_option_has(self):
    self.check(({'a': 1},), with_shared=rnnzoo.LAYERS)

  @pytest.mark.exhaustive
  def test_every_value(self):
    self.check(VALUES, with_shared=('GRU',))


if __name__ == '__main__':
  absltest.main()
