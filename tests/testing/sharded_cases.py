"""Layers, alone and composed, whose batch is spread over several devices."""

import dataclasses
import functools
import itertools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from tests.testing import random_layers

TIME, IN = 3, 4

# Forms: how layers are composed.
FORMS = {
    'alone': lambda make: make,
    'two': lambda make: functools.partial(rnnzoo.Stack, make, num_layers=2),
    'three': lambda make: functools.partial(rnnzoo.Stack, make, num_layers=3),
    'bidirectional': lambda make: functools.partial(rnnzoo.Bidirectional, make),
    'two_bidirectional': lambda make: functools.partial(
        rnnzoo.Stack,
        functools.partial(rnnzoo.Bidirectional, make),
        num_layers=2,
    ),
}

# Paths that have no name but settings.
WITH_SETTINGS = {'pallas_carries': rnnzoo.Pallas(keep='carries')}

# Calls: what a layer is given besides x.
CALLS = ('plain', 'given', 'learned')


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer in a form.

  Attributes:
    layer: its name in `rnnzoo`.
    form: one of `FORMS`.
    call: 'plain' starts from zeros; 'given' starts from a carry and has resets;
      'learned' starts from a learned carry and has resets and a mask.
    implementation: the path, or one of `WITH_SETTINGS`.
  """

  layer: str
  form: str
  call: str
  implementation: str

  @property
  def name(self) -> str:
    return '-'.join(dataclasses.astuple(self))

  @property
  def is_kernel(self) -> bool:
    return self.implementation.startswith('pallas')

  @classmethod
  def named(cls, name: str) -> 'Case':
    """Returns the case with a `name`."""
    return cls(*name.split('-'))

  def problem(
      self, batch: int, features: int = 4, in_features: int = IN, **options: Any
  ):
    """Returns parameters, data with a leading batch axis, and their loss."""
    options['implementation'] = WITH_SETTINGS.get(
        self.implementation, self.implementation
    )
    if self.call == 'learned':
      options['learn_initial_carry'] = True
    make = FORMS[self.form](getattr(rnnzoo, self.layer))
    layer = random_layers.make(make, in_features, features, **options)
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    data = {'x': draw(batch, TIME, in_features)}
    if self.call == 'given':
      data['initial_carry'] = jax.tree.map(
          lambda c: np.asarray(c) + 0.3 * np.abs(draw(*c.shape)),
          layer.initial_carry((batch,)),
      )
    if self.call != 'plain':
      data['reset'] = rng.random((batch, TIME)) < 0.3
    if self.call == 'learned':
      data['mask'] = rng.random((batch, TIME)) < 0.7

    def loss(params, data):
      layer = nnx.merge(graphdef, params, rest)
      carry, y = layer.unroll(**data)
      return sum(jnp.sum(a**2) for a in jax.tree.leaves((carry, y)))

    return params, data, loss


def in_turn(layer: str) -> list[tuple[str, str]]:
  """Returns each form with one of the calls; each layer begins with another.

  Every pair of a layer and a form, of a layer and a call and of a form and a
  call is there, which takes a third of all combinations.
  """
  start = [*rnnzoo.LAYERS].index(layer)
  return list(
      zip(
          FORMS,
          itertools.islice(itertools.cycle(CALLS), start, None),
          strict=False,
      )
  )


def paths(layer: str) -> tuple[str, ...]:
  """Returns the paths without kernels."""
  linear = layer in (
      'MinGRU',
      'MinLSTM',
      'LRU',
      'S5',
      'LinOSS',
      'RGLRU',
      'HGRN',
      'QRNN',
  )
  return ('scan', 'associative_scan') if linear else ('scan',)
