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
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.time import path as newton_path
from rnnzoo.engines.time import plan as newton_plan
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


# Trained on images of 8 rows, these do not stay contractive over hundreds of
# images with no reset: A-GRU is chaotic there, and in float32 a rounding in
# each step of an LSTM or sLSTM grows beyond what is accepted, and IRevRNN
# overflows. Then the steps run in turn.
EXPANDING = {('AGRU', 'float64')} | {
    (name, 'float32') for name in ('AGRU', 'LSTM', 'SLSTM', 'IRevRNN')
}


@functools.cache
def digits():
  """Returns images [N, 8, 8] from 0 to 1, and their labels [N]."""
  data = datasets.load_digits()
  return np.float32(data.images / 16), np.int32(data.target)


@functools.cache
def trained(name: str):
  """Returns a layer that learned to classify digits by their rows."""
  images, labels = map(jnp.asarray, digits())
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

  def loss(params, chosen):
    logits = nnx.merge(graphdef, params, rest)(images[chosen])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels[chosen]
    ).mean()

  @reference.jit
  def train(params, order):
    def step(state, chosen):
      params, moments = state
      value, grads = jax.value_and_grad(loss)(params, chosen)
      updates, moments = optimizer.update(grads, moments)
      return (optax.apply_updates(params, updates), moments), value

    return jax.lax.scan(step, (params, optimizer.init(params)), order)

  rng = np.random.default_rng(0)
  batches = len(images) // BATCH
  order = [rng.permutation(len(images)) for _ in range(EPOCHS)]
  order = np.stack([x[: batches * BATCH] for x in order]).reshape(-1, BATCH)
  (params, _), losses = train(params, order)
  assert np.mean(losses[-batches:]) < 0.9 * losses[0], 'It learned nothing.'
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

  def problem(self):
    """Returns the plan and the operands."""
    layer = trained(self.layer)
    images, _ = digits()
    size = images.shape[-1]
    count = -(-self.time // size)
    x = images[: 2 * count].reshape(2, count * size, size)[:, : self.time]
    operands = layer._operands(jnp.asarray(x))
    operands = jax.tree.map(lambda a: jnp.asarray(a, self.dtype), operands)
    if self.packed:
      begins = np.arange(self.time) % size == 0
      lead = self.time, 2
      mask = np.random.default_rng(0).random(lead) < 0.9
      operands = operands._replace(
          reset=jnp.asarray(np.broadcast_to(begins[:, None], lead)),
          mask=jnp.asarray(mask),
      )
    plan = newton_plan.make_plan(
        layer.cell,
        call_lib.Dense(),
        operands,
        call_lib.Call(),
        **dataclasses.asdict(rnnzoo.AssociativeScan()),
    )
    return plan, operands


def gradients(unroll, operands):
  """Returns the gradients of a sum over all results, by all operands."""

  def loss(operands):
    final, (h,) = unroll(operands)
    return sum(jnp.sum(jnp.sin(x)) for x in (h, *final))

  return reference.jit(jax.grad(loss, allow_int=True))(operands)


class NewtonTrainedTest(parameterized.TestCase):

  def assert_close(self, found, wanted, limit):
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
      if a.dtype != jax.dtypes.float0:
        error = np.linalg.norm(np.asarray(a - b))
        self.assertLessEqual(error, limit * np.linalg.norm(b) + 1e-30)

  @parameterized.product(
      name=list(LAYERS),
      # (steps, whether there are resets and a mask, dtype)
      kind=[
          (1, False, 'float64'),
          (37, False, 'float64'),
          (37, True, 'float32'),
          (37, False, 'float32'),
          (1000, False, 'float64'),
          (1000, False, 'float32'),
          (1000, True, 'float64'),
          (1000, True, 'float32'),
      ],
  )
  @pytest.mark.exhaustive
  def test_is_scan_everywhere(self, name, kind):
    self.check(name, *kind)

  @parameterized.product(
      name=list(LAYERS),
      kind=[(37, False, 'float32'), (1000, False, 'float64')],
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_is_scan(self, name, kind):
    self.check(name, *kind)

  def check(self, name, time, packed, dtype):
    self.enter_context(jax.enable_x64(dtype == 'float64'))
    plan, operands = Case(
        layer=name, time=time, dtype=dtype, packed=packed
    ).problem()
    unroll = functools.partial(newton_path.unroll_with_report, plan)
    _, found, report = reference.jit(unroll)(operands)
    in_turn = functools.partial(scan_loop.carries, plan.steps)
    _, wanted = reference.jit(in_turn)(operands)
    if time == 1000 and not packed and (name, dtype) in EXPANDING:
      self.assertTrue(report.fell_back)
      jax.tree.map(np.testing.assert_array_equal, found, wanted)
      return
    self.assertFalse(report.fell_back)
    self.assertLessEqual(report.iterations, 8)
    limit = 1e-10 if dtype == 'float64' else 1e-6 * max(2, 0.2 * time**0.5)
    # In float32 both round in each step, which adds up like a random walk.
    self.assert_close(found, wanted, limit)
    found = gradients(functools.partial(newton_path.unroll, plan), operands)
    in_turn = functools.partial(scan_loop.unroll, plan.steps)
    wanted = gradients(in_turn, operands)
    # A derivative is as inexact as the trajectory that it is taken at.
    limit = max(limit, float(report.sensitivity))
    if dtype == 'float64':
      self.assert_close(found, wanted, limit)
      return
    # Weights may amplify that. The error may then be 4 times the error of
    # 'scan', both beside float64.
    with jax.enable_x64(True):
      wide = jax.tree.map(
          lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
          operands,
      )
      exact = gradients(in_turn, wide)
    leaves = map(jax.tree.leaves, (found, wanted, exact))
    for a, b, c in zip(*leaves, strict=True):
      if a.dtype != jax.dtypes.float0:
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        own = np.linalg.norm(b - c)
        bound = max(own, max(limit, 1e-5) * np.linalg.norm(c))
        self.assertLessEqual(np.linalg.norm(a - c), 4 * bound + 1e-30)


if __name__ == '__main__':
  absltest.main()
