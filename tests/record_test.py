"""The record: public names, signatures, state paths, configs, conversions.

Users hold checkpoints, configs and code that rely on them. A change of the
record is deliberate: it comes with a migration and a line in CHANGELOG.md, and

    python tests/record_test.py --write

writes the new one.
"""

import functools
import hashlib
import importlib
import inspect
import json
import pathlib
import re
import sys

from absl.testing import absltest
from flax import nnx
import numpy as np
import pytest

import pallas_kernels
import rnnzoo
from rnnzoo import convert
from rnnzoo import linen
from rnnzoo import models

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / 'tests' / 'testing' / 'record.json'


def signature(thing) -> str:
  """Returns parameters and their defaults, without types."""
  function = thing.__init__ if inspect.isclass(thing) else thing
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return ''
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  text = ', '.join(map(str, plain))
  return re.sub(r' at 0x\w+', '', text)


def names():
  """Returns the signature of every public name."""
  found = {}
  for module in (rnnzoo, pallas_kernels, convert, linen, models):
    for name, thing in vars(module).items():
      owner = getattr(thing, '__module__', '') or ''
      ours = owner.split('.')[0] in ('rnnzoo', 'pallas_kernels')
      if name.startswith('_') or not ours or inspect.ismodule(thing):
        continue
      label = f'{module.__name__}.{name}'
      found[label] = signature(thing)
      if inspect.isclass(thing):
        for method, function in inspect.getmembers(thing, callable):
          where = getattr(function, '__module__', '') or ''
          if not method.startswith('_') and where.startswith('rnnzoo'):
            found[f'{label}.{method}'] = signature(function)
  return found


def states():
  """Returns path, shape and dtype of every variable of every layer."""
  forms = {
      'plain': lambda cls: functools.partial(cls, 3, 4),
      'learned': lambda cls: functools.partial(
          cls, 3, 4, learn_initial_carry=True, use_bias=False
      ),
      'stack': lambda cls: functools.partial(
          rnnzoo.Stack, cls, 3, 4, num_layers=2, norm='batch'
      ),
      'dense': lambda cls: functools.partial(
          rnnzoo.DenseStack, cls, 3, 4, num_layers=2, norm='batch'
      ),
      'both': lambda cls: functools.partial(rnnzoo.Bidirectional, cls, 3, 4),
      'classifier': lambda cls: lambda rngs: models.SequenceClassifier(
          cls(3, 4, rngs=rngs), 5, rngs=rngs
      ),
  }
  found = {}
  for (name, cls), (form, make) in (
      (layer, form) for layer in rnnzoo.LAYERS.items() for form in forms.items()
  ):
    create = functools.partial(lambda f: f(rngs=nnx.Rngs(0)), make(cls))
    layer = nnx.eval_shape(create)
    for path, leaf in nnx.to_flat_state(nnx.state(layer)):
      value = leaf.get_value()
      dotted = '.'.join(map(str, path))
      found[f'{name} {form} {dotted}'] = (
          f'{type(leaf).__name__} {value.dtype}{list(value.shape)}'
      )
  return found


def configs():
  """Returns every field of every config."""
  found = {}
  for path in sorted((ROOT / 'configs').glob('*.py')):
    config = importlib.import_module(f'configs.{path.stem}').get_config()

    def add(prefix, fields):
      for name, value in fields.items():
        if hasattr(value, 'items'):
          add(f'{prefix}.{name}', value)
        else:
          found[f'{prefix}.{name}'] = repr(value)

    add(path.stem, config)
  return found


def conversions():
  """Returns digests of layers that hold another library's weights."""
  found = {}
  for name, gates in (('LSTM', 4), ('GRU', 3), ('Elman', 1)):
    rng = np.random.default_rng(0)
    shapes = {
        'weight_ih_l0': (gates * 4, 3),
        'weight_hh_l0': (gates * 4, 4),
        'bias_ih_l0': (gates * 4,),
        'bias_hh_l0': (gates * 4,),
    }
    weights = {
        k: rng.standard_normal(shape).astype(np.float32)
        for k, shape in shapes.items()
    }
    layer = rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0))
    convert.from_torch(layer, weights)
    found[f'torch {name}'] = _digest(layer)
  for name, cell in (('LSTM', 'LSTMCell'), ('GRU', 'GRUCell')):
    layer = rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0))
    made = getattr(nnx, cell)(3, 4, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(nnx.state(made, nnx.Param)):
      leaf.set_value(rng.standard_normal(leaf.shape).astype(np.float32))
    nnx.update(made, nnx.state(made, nnx.Param))
    convert.from_flax(layer, made)
    found[f'flax {name}'] = _digest(layer)
  return found


def _digest(layer) -> str:
  digest = hashlib.sha256()
  for path, leaf in sorted(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
    digest.update('.'.join(map(str, path)).encode())
    digest.update(np.asarray(leaf[...], np.float32).tobytes())
  return digest.hexdigest()[:16]


PARTS = {
    'names': names,
    'states': states,
    'configs': configs,
    'conversions': conversions,
}


class RecordTest(absltest.TestCase):

  @pytest.mark.slow
  def test_nothing_has_changed(self):
    record = json.loads(RECORD.read_text(encoding='utf-8'))
    for part, make in PARTS.items():
      now = make()
      for name in sorted(now.keys() | record[part].keys()):
        with self.subTest(f'{part}: {name}'):
          self.assertEqual(now.get(name), record[part].get(name))


if __name__ == '__main__':
  if sys.argv[1:] == ['--write']:
    made = {part: now() for part, now in PARTS.items()}
    RECORD.write_text(json.dumps(made, indent=1) + '\n', encoding='utf-8')
  else:
    absltest.main()
