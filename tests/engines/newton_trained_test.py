"""Newton's method over time takes few iterations for trained weights, too."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import datasets

import rnnzoo
from rnnzoo import models
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import newton_plan
from rnnzoo.engines import newton_windows
from rnnzoo.engines import scan
from tests.testing import reference

FEATURES, EPOCHS, BATCH = 32, 15, 64

LAYERS = {
    'Elman': {},
    'LSTM': {},
    'GRU': {},
    'SLSTM': {},
    'AGRU': {'gamma': 2.0},
    'AntisymmetricRNN': {'epsilon': 0.01},
    'IndRNN': {'activation': 'tanh'},
    'IRevRNN': {},
}


@functools.cache
def digits():
  """Returns images [N, 8, 8] from 0 to 1, and their labels [N]."""
  data = datasets.load_digits()
  return np.float32(data.images / 16), np.int32(data.target)


@functools.cache
def trained(name: str):
  """Returns a layer that learned to classify digits by their rows."""
  images, labels = digits()
  rngs = nnx.Rngs(0)
  layer = rnnzoo.LAYERS[name](
      images.shape[-1],
      FEATURES,
      implementation='scan',
      rngs=rngs,
      **LAYERS[name],
  )
  model = models.SequenceClassifier(layer, 10, rngs=rngs)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  optimizer = optax.adam(3e-3)

  def loss(params, x, y):
    logits = nnx.merge(graphdef, params, rest)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  @reference.jit
  def epoch(params, moments, order):
    def step(state, chosen):
      params, moments = state
      value, grads = jax.value_and_grad(loss)(
          params, jnp.asarray(images)[chosen], jnp.asarray(labels)[chosen]
      )
      updates, moments = optimizer.update(grads, moments)
      return (optax.apply_updates(params, updates), moments), value

    return jax.lax.scan(step, (params, moments), order)

  moments = optimizer.init(params)
  rng = np.random.default_rng(0)
  for _ in range(EPOCHS):
    order = rng.permutation(len(images))[: len(images) // BATCH * BATCH]
    (params, moments), values = epoch(
        params, moments, order.reshape(-1, BATCH)
    )
  print(name, values[0], values[-1])
  return nnx.merge(graphdef, params, rest).backbone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Rows of images, one image after the other.

  Attributes:
    layer: its name.
    time: number of rows.
    dtype: of everything.
    packed: whether the carry is reset where an image begins, and some steps are
      masked.
  """

  layer: str
  time: int
  dtype: str
  packed: bool

  def run(self):
    """Returns a layer's cell, its operands and its plan."""
    layer = trained(self.layer)
    images, _ = digits()
    size = images.shape[-1]
    count = -(-self.time // size)
    x = images[: 2 * count].reshape(2, count * size, size)[:, : self.time]
    operands = layer._operands(jnp.asarray(x, jnp.float32))
    operands = jax.tree.map(lambda a: jnp.asarray(a, self.dtype), operands)
    if self.packed:
      rng = np.random.default_rng(0)
      begins = np.arange(self.time) % size == 0
      lead = self.time, 2
      operands = operands._replace(
          reset=jnp.asarray(np.broadcast_to(begins[:, None], lead)),
          mask=jnp.asarray(rng.random(lead) < 0.9),
      )
    plan = newton_plan.make_plan(
        layer.cell,
        call_lib.Dense(),
        operands,
        call_lib.Call(),
        **dataclasses.asdict(rnnzoo.AssociativeScan()),
    )
    return plan, operands


def main():
  jax.config.update('jax_enable_x64', True)
  for name in LAYERS:
    for dtype in ('float64', 'float32'):
      for time in (37, 1000):
        for packed in (False,):
          plan, operands = Case(layer=name, time=time, dtype=dtype, packed=packed).run()
          u = functools.partial(newton_windows.unroll_with_report, plan)
          _, f, r = reference.jit(u)(operands)
          _, w = reference.jit(functools.partial(scan.carries, plan.steps))(operands)
          e = max(float(np.linalg.norm(a-b)/(np.linalg.norm(b)+1e-30)) for a,b in zip(f,w))
          print(f'{name:18s} {dtype} {time:5d} {packed!s:5s} it {int(r.iterations)} fb {bool(r.fell_back)} turn {int(r.in_turn)} sens {float(r.sensitivity):.1e} err {e:.1e}', flush=True)

if __name__ == '__main__':
  main()
