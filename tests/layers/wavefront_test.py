"""Layers of a stack at the same time compute what they compute in turn."""

import contextlib
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api
from pallas_kernels import devices
import rnnzoo
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import choice
from rnnzoo.engines import paths
from rnnzoo.engines import selection
from rnnzoo.layers import levels as levels_lib
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import random_layers
from tests.testing import several_devices

H200 = 'NVIDIA H200'

IN_TURN = rnnzoo.Pallas(wavefront=False), 'scan'
CARRIES = rnnzoo.Pallas(keep='carries'), 'scan'


def make(layer, sizes, num_layers, **options):
  """Returns a stack with random parameters."""
  return random_layers.make(
      rnnzoo.Stack, layer, *sizes, num_layers=num_layers, **options
  )


def abstract(layer, sizes, num_layers, **options):
  """Returns a stack of types, in 16 bits."""
  options = {'dtype': 'bfloat16', 'num_layers': num_layers, **options}
  return nnx.eval_shape(
      lambda: rnnzoo.Stack(layer, *sizes, rngs=nnx.Rngs(0), **options)
  )


def by_scan(cell, operands, call, implementation):
  """In place of `paths.run_levels`, on any device."""
  del implementation
  return paths.scan(cell, call_lib.Biased(), call, operands)


@contextlib.contextmanager
def in_parts(parts, runs=by_scan):
  """Layers inside run at the same time, time in so many parts.

  Args:
    parts: the number.
    runs: in place of `paths.run_levels`.

  Yields:
    A mock of it.
  """
  with contextlib.ExitStack() as stack:
    patch = lambda *args: stack.enter_context(mock.patch.object(*args))
    patch(choice, 'parts_of_wavefront', lambda time, kernel: parts)
    patch(api, 'at_once', lambda *args, **options: True)
    patch(selection, 'is_kernel_first', lambda *args: True)
    if runs is by_scan:
      patch(devices, 'current', lambda: None)
    yield patch(levels_lib, '_run_levels', mock.Mock(side_effect=runs))


def results(stack, x, weights, carry=None, **options):
  """Returns carries, outputs and all gradients."""
  unroll, state = random_layers.pure(stack, 'unroll')

  def loss(state, x, carry):
    last, y = unroll(state, x, initial_carry=carry, **options)
    total = jnp.sum(y * weights)
    return total + sum(jnp.sum(jnp.sin(c)) for c in jax.tree.leaves(last)), y

  gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
  (_, y), gradients = jax.jit(gradient)(state, x, carry)
  return y, gradients


class WavefrontTest(parameterized.TestCase):

  def compare(self, got, want, tolerance=1e-5):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    comparison.assert_near(got, want, tolerance)

  def agrees(
      self,
      layer,
      sizes,
      num_layers,
      parts,
      runs=by_scan,
      steps=12,
      reset=False,
      mask=False,
      seq_lengths=False,
      carry=False,
      reverse=False,
      time_major=False,
      **options,
  ):
    call = {'reverse': reverse, 'time_major': time_major}
    stack = make(layer, sizes, num_layers, **options)
    rng = np.random.default_rng(0)
    batch = 3
    lead = (steps, batch) if time_major else (batch, steps)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), 'float32')
    x = normal(*lead, sizes[0])
    weights = normal(*lead, stack.out_features)
    if reset:
      call['reset'] = jnp.asarray(rng.random(lead) < 0.2)
    if mask:
      call['mask'] = jnp.asarray(rng.random(lead) < 0.8)
    if seq_lengths:
      call['seq_lengths'] = jnp.asarray([steps, 0, steps // 2])
    given = None
    if carry:
      given = jax.tree.map(
          lambda c: normal(*c.shape), stack.initial_carry((batch,))
      )
    want = results(stack, x, weights, given, **call)
    # Each call is a trace of its own.
    unroll = functools.partial(stack.unroll, initial_carry=given, **call)
    run = lambda: jax.jit(lambda: unroll(x))()
    outputs = run()
    with in_parts(parts, runs) as called:
      got = results(stack, x, weights, given, **call)
      called.assert_called()
      called.reset_mock()
      self.compare(run(), outputs)
      called.assert_called()
    self.compare(got, want)

  @parameterized.parameters(
      (rnnzoo.LSTM, (20, 16), 3, 2, 'reset seq_lengths', {}),
      # The last part is shorter.
      (rnnzoo.GRU, (8, 8), 2, 5, 'reverse reset', {}),
      (
          *(rnnzoo.GRU, (8, 8), 4, 2),
          'reverse time_major seq_lengths mask learn_initial_carry reset',
          {'use_bias': False},
      ),
      (rnnzoo.SLSTM, (8, 16), 4, 4, '', {'num_heads': 4, 'steps': 11}),
      # More layers than run at the same time, and parts of one step.
      (rnnzoo.Elman, (8, 8), 5, 6, 'reverse', {'steps': 6}),
      (rnnzoo.GRU, (8, 8), 2, 3, 'time_major mask residual', {'norm': 'layer'}),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_layers_in_turn(
      self, layer, sizes, num_layers, parts, flags, options
  ):
    options = dict.fromkeys(flags.split(), True) | options
    self.agrees(layer, sizes, num_layers, parts, **options)

  @parameterized.parameters('float32', 'bfloat16')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradients_in_16_bits(self, param_dtype):
    options = {'dtype': 'bfloat16', 'implementation': 'pallas'}
    stack = make(rnnzoo.LSTM, (8, 16), 2, param_dtype=param_dtype, **options)
    rng = np.random.default_rng(0)
    normal = lambda size: jnp.asarray(
        rng.standard_normal((2, 128, size)), 'bfloat16'
    )
    x = normal(8)
    # Gradients of parts of time cancel.
    sign = jnp.where(jnp.arange(128) < 64, 1, -1)[:, None]
    graphdef, state = nnx.split(stack)

    def gradient(dtype, path):
      def loss(state, x):
        levels = nnx.merge(graphdef, state)
        for level in levels.layers:
          level.dtype, level.implementation = jnp.dtype(dtype), path
        return jnp.sum((levels(x) * sign).astype('float32'))

      operands = state, x
      if dtype == 'float32':
        operands = jax.tree.map(lambda v: v.astype(dtype), operands)
      return jax.jit(jax.grad(loss))(*operands)

    exact = gradient('float32', 'scan')
    runs = jax.jit(
        paths.run_levels, static_argnames=('cell', 'call', 'implementation')
    )
    with dense_loops.imitated(self):
      in_turn = gradient('bfloat16', 'pallas')
      with in_parts(16, runs) as called:
        at_once = gradient('bfloat16', 'pallas')
      called.assert_called()
      for got, other, want in zip(
          *map(jax.tree.leaves, (at_once, in_turn, exact)), strict=True
      ):
        error = comparison.relative_error(got, want)
        most = 1.25 * comparison.relative_error(other, want)
        self.assertLess(error, most)

  @pytest.mark.exhaustive
  def test_derivatives(self):
    stack = make(rnnzoo.LSTM, (4, 8), 2)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2, 12, 4)), 'float32')
    mask = jnp.asarray(rng.random((2, 12)) < 0.8)
    run, state = random_layers.squares(stack, mask=mask)

    def derivatives():
      gradient = jax.vmap(jax.grad(run), (None, 0))
      tangent = lambda x: jax.jvp(lambda x: run(state, x), (x,), (x,))[1]
      return (
          gradient(state, x),
          jax.vmap(tangent)(x),
          jax.hessian(lambda s: run(state, s * x[0]))(1.0),
      )

    want = derivatives()
    with in_parts(2) as called:
      got = derivatives()
      called.assert_called()
    self.compare(got, want, 1e-4)

  def test_turns(self):
    stack = make(rnnzoo.LSTM, (4, 4), 5)
    with in_parts(4) as called:
      jax.eval_shape(stack, jnp.ones((2, 8, 4)))
    levels = [args.args[2].levels for args in called.call_args_list]
    # Three layers, then two.
    self.assertEqual(levels, [1, 2, 3, 3, 2, 1, 1, 2, 2, 2, 1])

  @parameterized.parameters(
      (rnnzoo.LSTM, {'num_heads': 2, 'reset': True, 'carry': True, 'parts': 2}),
      (rnnzoo.GRU, {'steps': 11}),
      (rnnzoo.AGRU, {'num_heads': 2, 'reset': True}),
      # Heads are padded to 8 units.
      (rnnzoo.LSTM, {'num_heads': 4, 'num_layers': 3}),
      (rnnzoo.GRU, {'time_major': True, 'mask': True, 'reverse': True}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_around_the_kernels(self, layer, options):
    with dense_loops.imitated(self):
      if not abstract_gpu.RUNS:
        devices.current()
      runs = jax.jit(
          paths.run_levels, static_argnames=('cell', 'call', 'implementation')
      )
      options = {'num_layers': 2, 'parts': 4, **options}
      with mock.patch.object(choice, '_STEPS_OF_WAVEFRONT', 10**6):
        self.agrees(
            layer, (6, 16), runs=runs, implementation='pallas', **options
        )

  @parameterized.parameters(
      # As many as fit at once.
      (4, rnnzoo.LSTM, (768, 768), 4, 16, 1024, {'num_heads': 12}),
      (3, rnnzoo.LSTM, (28, 128), 6, 32, 512, {}),
      (0, rnnzoo.LSTM, (768, 768), 4, 64, 1024, {'num_heads': 12}),
      # Not measured.
      (0, rnnzoo.LSTM, (768, 768), 2, 8, 512, {}),
      # Few steps; another path first; a single layer; no kernel of blocks.
      (0, rnnzoo.LSTM, (128, 128), 2, 32, 256, {}),
      (0, rnnzoo.LSTM, (64, 64), 2, 8, 512, {'implementation': 'scan'}),
      (0, rnnzoo.LSTM, (64, 64), 2, 8, 512, {'implementation': CARRIES}),
      (0, rnnzoo.LSTM, (64, 64), 2, 8, 512, {'implementation': IN_TURN}),
      (0, rnnzoo.LSTM, (64, 64), 1, 8, 512, {}),
      (0, rnnzoo.IndRNN, (64, 64), 2, 8, 512, {}),
      (0, rnnzoo.LSTM, (64, 64), 2, 0, 512, {}),
      (0, (rnnzoo.LSTM, rnnzoo.GRU), (64, 64), 2, 8, 512, {}),
  )
  @pytest.mark.few(2)
  def test_how_many(self, want, layer, sizes, depth, batch, time, options):
    stack = abstract(layer, sizes, depth, **options)
    x = jax.ShapeDtypeStruct((batch, time, sizes[0]), jnp.bfloat16)
    call = call_lib.Call()
    graphdef, state = nnx.split(stack)
    found = []

    def count(state, x):
      layers = nnx.merge(graphdef, state).layers
      found.append(levels_lib.count(layers, x, call, False))

    with abstract_gpu.device(self, H200):
      devices.current()
      if want:
        jax.eval_shape(count, state, x)
      else:
        with self.assertRaises(NotImplementedError):
          jax.eval_shape(count, state, x)
    if abstract_gpu.RUNS:
      self.assertEqual(found, [want] if want else [])

  @parameterized.parameters(
      (rnnzoo.LSTM, {}),
      (rnnzoo.AGRU, {'num_heads': 2, 'learn_initial_carry': True}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_lowers_for_a_gpu(self, layer, options):
    options = {'implementation': 'pallas', **options}
    stack = abstract(layer, (64, 128), 2, **options)
    call, state = random_layers.squares(stack)
    loss = lambda state, x, reset: call(state, x, reset=reset)
    x = jax.ShapeDtypeStruct((16, 390, 64), jnp.bfloat16)
    reset = jax.ShapeDtypeStruct((16, 390), bool)
    runs = mock.Mock(side_effect=levels_lib._run_levels)
    with abstract_gpu.device(self, H200):
      with mock.patch.object(levels_lib, '_run_levels', runs):
        text = abstract_gpu.lower(jax.grad(loss, (0, 1)), state, x, reset)
      self.assertEqual(runs.call_count, 5)
      self.assertIn('mosaic_gpu', text)

  @parameterized.parameters('Explicit', 'Auto')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_over_devices(self, kind):
    if not abstract_gpu.RUNS:
      return
    loss, state = random_layers.squares(abstract(rnnzoo.LSTM, (64, 128), 2))
    mesh = abstract_gpu.mesh(H200, kind)
    sharded = functools.partial(several_devices.sharded, mesh)
    state = jax.tree.map(lambda v: sharded(jax.P(), v.shape, v.dtype), state)
    x = sharded(jax.P('data'), (16, 512, 64), jnp.bfloat16)
    runs = mock.Mock(side_effect=levels_lib._run_levels)
    with jax.sharding.use_abstract_mesh(mesh):
      with mock.patch.object(levels_lib, '_run_levels', runs):
        jax.jit(jax.grad(loss)).trace(state, x)
    # XLA could not split arrays that hold one layer after the other.
    self.assertEqual(runs.call_count, 5 if kind == 'Explicit' else 0)

  @pytest.mark.slow
  def test_is_noted(self):
    if not abstract_gpu.RUNS:
      return
    stack = abstract(rnnzoo.LSTM, (64, 128), 2)
    x = jax.ShapeDtypeStruct((16, 512, 64), jnp.bfloat16)
    with abstract_gpu.device(self, H200):
      choices = rnnzoo.dryrun(stack, x)
      self.assertEqual(
          [(c.path, c.cell, c.shape, c.at_once) for c in choices.choices],
          [
              ('pallas', 'LSTMCell', (16, 512, 64), 2),
              ('pallas', 'LSTMCell', (16, 512, 128), 2),
          ],
      )
      self.assertIn("'pallas', 2 layers at the same time", str(choices))

  @pytest.mark.slow
  def test_in_turn_where_outputs_are_dropped(self):
    stack = make(rnnzoo.LSTM, (4, 4), 2, dropout_rate=0.5)
    x = jnp.ones((2, 8, 4))
    with in_parts(4) as called:
      stack(x, rngs=nnx.Rngs(dropout=0))
      called.assert_not_called()
      stack(x)
      called.assert_called()

  @pytest.mark.slow
  def test_errors_are_those_of_a_layer(self):
    stack = make(rnnzoo.LSTM, (4, 4), 2)
    with in_parts(4):
      with self.assertRaisesRegex(ValueError, 'in_features'):
        stack(jnp.ones((2, 8, 5)))
      x = jnp.ones((2, 8, 4))
      carry = stack.initial_carry((3,))
      with self.assertRaisesRegex(ValueError, 'initial_carry'):
        stack.unroll(x, initial_carry=carry)
      with self.assertRaisesRegex(ValueError, 'mask must be an array'):
        stack(x, mask='abc')
      stack.layers[1] = rnnzoo.LSTM(2, 4, rngs=nnx.Rngs(0))
      with self.assertRaisesRegex(ValueError, 'in_features = 2'):
        stack(x)
      stack.layers[1] = rnnzoo.LSTM(4, 4, rngs=nnx.Rngs(0))
      stack.layers[1].recurrent_kernel.set_value(jnp.ones((4, 2, 4, 4)))
      with self.assertRaisesRegex(ValueError, 'LSTM.recurrent_kernel must'):
        stack(x)

  def test_in_turn_where_a_subclass_hands_on_otherwise(self):
    class Reversed(rnnzoo.Stack):

      def _above(self, index, x, y, *others):
        return super()._above(index, x, y, *others)[:, ::-1]

    stack = Reversed(rnnzoo.LSTM, 4, 4, num_layers=2, rngs=nnx.Rngs(0))
    with in_parts(4) as called:
      stack(jnp.ones((2, 8, 4)))
    called.assert_not_called()

  @pytest.mark.slow
  def test_per_example_gradients(self):
    stack = abstract(rnnzoo.GRU, (32, 32), 2, implementation='pallas')
    each, state = random_layers.squares(stack)
    x = jax.ShapeDtypeStruct((3, 4, 384, 32), jnp.bfloat16)
    loss = lambda state, x: jnp.sum(jax.vmap(each, (None, 0))(state, x))
    with abstract_gpu.device(self, H200):
      text = abstract_gpu.lower(jax.grad(loss), state, x)
      self.assertIn('mosaic_gpu', text)


if __name__ == '__main__':
  absltest.main()
