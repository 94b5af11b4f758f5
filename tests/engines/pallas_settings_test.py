"""`rnnzoo.Pallas`: memory against time, with loops in place of kernels."""

import contextlib
import functools
import math
import re

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import projection
import rnnzoo
from rnnzoo.engines import choice as choice_lib
from rnnzoo.engines import selection
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import random_layers
from tests.testing import reference
from tests.testing import streaming_loops

BATCH, TIME, IN, FEATURES = 3, 7, 5, 16
GATES = rnnzoo.Pallas(keep='gates')
CARRIES = rnnzoo.Pallas(keep='carries')


@contextlib.contextmanager
def on_gpu(test):
  """Runs loops instead of kernels, on a jax that has these."""
  if not abstract_gpu.RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield
    return
  with streaming_loops.instead(), dense_loops.instead():
    yield


def loss_of(make, path, **call):
  """Returns a loss of (state, x), and the state, of a layer on a path."""
  layer = make(implementation=path, rngs=nnx.Rngs(0))
  unroll, state = random_layers.pure(layer, 'unroll')

  def loss(state, x):
    results = unroll(state, x, **call)
    return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results))

  return loss, comparison.randomize(state, 1, np.float32)


def inputs(*lead, dtype=np.float32):
  x = np.random.default_rng(0).normal(size=(*lead, IN))
  return jnp.asarray(x, dtype)


def kept(make, path, x):
  """Returns the bytes that a layer keeps for its backward pass."""
  loss, state = loss_of(make, path)

  def run(*args):
    total, pull = jax.vjp(loss, *args)
    pull(total)
    return pull

  arrays = jax.tree.leaves(jax.eval_shape(run, state, x))
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


class SameFunctionTest(parameterized.TestCase):

  def check(self, make, x=None, over=lambda f: f, first=GATES, **call):
    """Fails unless results and gradients are equal."""
    x = inputs(BATCH, TIME) if x is None else x
    with on_gpu(self):
      want, got = (
          reference.jit(over(jax.value_and_grad(loss, (0, 1))))(state, x)
          for loss, state in (
              loss_of(make, path, **call) for path in (first, CARRIES)
          )
      )
      chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(*rnnzoo.LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_layer(self, name):
    rng = np.random.default_rng(1)
    self.check(
        functools.partial(
            # Not a multiple of 8: features are padded.
            *(rnnzoo.LAYERS[name], IN, 12),
            learn_initial_carry=name != 'IRevRNN',
        ),
        first='pallas',
        reset=jnp.asarray(rng.random((BATCH, TIME)) < 0.3),
        seq_lengths=jnp.asarray([TIME, 3, 0]),
        reverse=True,
    )

  @pytest.mark.slow
  def test_both_directions_in_one_kernel(self):
    make = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU, IN, FEATURES)
    with on_gpu(self), choice_lib.noted() as choices:
      loss, state = loss_of(make, CARRIES)
      jax.eval_shape(loss, state, inputs(BATCH, TIME))
      self.assertEqual([choice.path for choice in choices], ['pallas'])
    self.check(make)

  @pytest.mark.slow
  def test_block_whose_time_is_first(self):
    make = functools.partial(rnnzoo.SLSTMBlock, IN, IN, num_heads=1)
    self.check(make, x=inputs(TIME, BATCH), time_major=True)

  @parameterized.parameters(rnnzoo.LSTM, rnnzoo.IndRNN)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap(self, layer):
    make = functools.partial(layer, IN, FEATURES)
    over = functools.partial(jax.vmap, in_axes=(None, 0))
    self.check(make, inputs(2, BATCH, TIME), over)

  @pytest.mark.slow
  def test_gates_that_are_given(self):
    cell, params = rnnzoo.GRUCell(), {'recurrent_bias': jnp.zeros(FEATURES)}
    x_gates = jnp.ones((BATCH, TIME, 3, FEATURES))
    kernel = jnp.ones((3, 1, FEATURES, FEATURES)) / FEATURES
    carry = (jnp.zeros((BATCH, FEATURES)),)
    run = lambda path: lambda *args: rnnzoo.unroll(
        cell, params, *args, carry, implementation=path
    )[1].sum()
    with on_gpu(self):
      want, got = (
          jax.grad(run(path), (0, 1))(x_gates, kernel)
          for path in ('pallas', CARRIES)
      )
      jax.tree.map(np.testing.assert_array_equal, got, want)


class KeptTest(parameterized.TestCase):

  @parameterized.parameters(
      (rnnzoo.GRU, 3), (rnnzoo.IndRNN, 1), (rnnzoo.MinLSTM, 3)
  )
  @pytest.mark.slow
  def test_gates_are_not_kept(self, layer, gates):
    x = inputs(BATCH, TIME)
    make = functools.partial(layer, IN, FEATURES)
    with on_gpu(self):
      less = kept(make, GATES, x) - kept(make, CARRIES, x)
      self.assertEqual(kept(make, 'pallas', x), kept(make, GATES, x))
      self.assertGreaterEqual(less, 4 * BATCH * TIME * gates * FEATURES)

  def test_in_a_sequence_of_paths(self):
    if not abstract_gpu.RUNS:
      return  # 'scan' runs.
    x = inputs(BATCH, TIME)
    make = functools.partial(rnnzoo.LSTM, IN, FEATURES)
    with on_gpu(self):
      less = kept(make, (GATES, 'scan'), x) - kept(make, (CARRIES, 'scan'), x)
      self.assertGreaterEqual(less, 4 * BATCH * TIME * 4 * FEATURES)

  @parameterized.parameters((GATES, 1), (CARRIES, 2))
  def test_the_product_is_not_merged_with_the_first(self, path, products):
    x = inputs(BATCH, TIME)
    with on_gpu(self):
      loss, state = loss_of(functools.partial(rnnzoo.LSTM, IN, FEATURES), path)
      text = jax.jit(jax.grad(loss, (0, 1))).lower(state, x).as_text()
      found = re.findall(
          rf'dot_general.*-> tensor<{BATCH}x{TIME}x{4 * FEATURES}xf32>', text
      )
      self.assertLen(found, products)
      waits = re.findall(r':\d+ = stablehlo.optimization_barrier', text)
      self.assertLen(waits, products - 1)

  def test_a_product_waits_for_the_cotangents(self):
    product = projection.Product(jnp.ones((2, 3, 4)), jnp.ones((5, 3)))
    jaxpr = jax.make_jaxpr(projection.form_again)(product, jnp.ones(6))
    (barrier,) = (
        e for e in jaxpr.eqns if e.primitive.name == 'optimization_barrier'
    )
    shapes = [v.aval.shape for v in barrier.invars]
    self.assertEqual(shapes, [(2, 3, 4), (5, 3), (6,)])


class KernelsTest(parameterized.TestCase):
  """Programs for a GPU that is not there."""

  def lowered(self, path, layer, dtype=jnp.float32, sizes=(BATCH, 64)):
    make = lambda **options: layer(IN, 128, dtype=dtype, **options)
    loss, state = loss_of(make, path)
    x = jax.ShapeDtypeStruct((*sizes, IN), dtype)
    with abstract_gpu.device(self, 'NVIDIA H200'):
      return abstract_gpu.lower(jax.grad(loss, (0, 1)), state, x)

  @parameterized.product(
      layer=(rnnzoo.LSTM, rnnzoo.GRU, rnnzoo.MinGRU, rnnzoo.IndRNN),
      path=(GATES, CARRIES),
      dtype=(jnp.float32, jnp.bfloat16),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_only_the_forward_pass_reads_w(self, layer, path, dtype):
    # XLA would read it for the backward pass and for an optimiser in one
    # kernel, and that waits for the sum of W's gradient over the devices.
    if not abstract_gpu.RUNS:
      return
    text = self.lowered(path, layer, dtype)
    (name,) = set(re.findall(rf'(%arg\d+): tensor<\dx{IN}x128xf32>', text))
    main, *_ = text[text.index('@main') :].split('func.func')
    uses = [x for x in main.split('\n')[1:] if re.search(rf'{name}\b', x)]
    early = [line for line in uses if 'optimization_barrier' not in line]
    self.assertLen(early, 1)

  @pytest.mark.slow
  def test_export(self):
    if not abstract_gpu.RUNS:
      return
    make = functools.partial(rnnzoo.LSTM, IN, FEATURES)
    loss, state = loss_of(make, (CARRIES, 'scan'))
    x = inputs(BATCH, TIME)
    with abstract_gpu.device(self, 'NVIDIA H200'):
      exported = jax.export.export(
          jax.jit(jax.grad(loss)), platforms=('cpu', 'cuda')
      )(state, x)
    want = jax.grad(loss_of(make, 'scan')[0])(state, x)
    got = exported.call(state, x)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


class NamesTest(parameterized.TestCase):

  def test_has_the_name_of_its_path(self):
    self.assertEqual(selection.name_of(CARRIES), 'pallas')
    self.assertTrue(selection.is_kernel_first((CARRIES, 'scan')))
    self.assertEqual(rnnzoo.Pallas(), GATES)

  @parameterized.parameters(*rnnzoo.LAYERS)
  @pytest.mark.few(2)
  def test_other_paths_run_on_a_cpu(self, name):
    make = lambda path: rnnzoo.LAYERS[name](
        IN, 8, implementation=path, rngs=nnx.Rngs(0)
    )
    x = inputs(BATCH, TIME)
    with choice_lib.noted() as choices:
      y = jax.eval_shape(make((CARRIES, 'scan')), x)
    self.assertEqual(y.shape, (BATCH, TIME, 8))
    (choice,) = choices
    self.assertEqual(choice.path, 'scan')
    ((path, reason),) = choice.passed_over
    self.assertEqual(path, str(CARRIES))
    self.assertIn('GPU kernels need', reason)
    with self.assertRaisesRegex(NotImplementedError, "'scan' runs everywhere"):
      jax.eval_shape(make(CARRIES), x)


if __name__ == '__main__':
  absltest.main()
