"""Errors say what was given and what is right."""

import contextlib
import functools
import types
from unittest import mock
import warnings

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import devices
import rnnzoo
from rnnzoo.engines import selection
from rnnzoo.engines.time import plan as newton_plan

BATCH, TIME, IN, FEATURES = 2, 5, 3, 4

x = np.ones((BATCH, TIME, IN), np.float32)
h = np.ones((BATCH, FEATURES), np.float32)


def make(cls, *sizes, **options):
  in_features, features = sizes or (IN, FEATURES)
  return cls(in_features, features, rngs=nnx.Rngs(0), **options)


class ConstructorTest(parameterized.TestCase):

  @parameterized.parameters((IN, 2**31), (10**30, 4))
  def test_size_beyond_int32(self, *sizes):
    message = f'must be a positive int up to 2147483647, got {max(sizes)}'
    with self.assertRaisesRegex(ValueError, message):
      make(rnnzoo.IndRNN, *sizes)

  def test_carry_beyond_any_memory(self):
    for layer in (
        rnnzoo.GRU(IN, FEATURES, rngs=nnx.Rngs(0)),
        rnnzoo.SLSTMBlock(4, 4, num_heads=2, rngs=nnx.Rngs(0)),
    ):
      for shape in ((2**40, 2**40), (np.int64(2**40),) * 2, (2**70, 0)):
        with self.assertRaisesRegex(ValueError, 'at most 2\\^48 numbers'):
          layer.initial_carry(shape)

  def test_parameter_beyond_any_memory(self):
    message = r'kernel_init must have at most 2\^48 numbers'
    with self.assertRaisesRegex(ValueError, message):
      make(rnnzoo.MinGRU, 2**31 - 1, 2**31 - 1)

  @parameterized.parameters(
      ('GRU', {'num_heads': 3}, 'divisible by num_heads.*=4 and num_heads=3'),
      ('Elman', {'activation': 'silu'}, "'tanh', 'relu'.*got 'silu'"),
      ('MinGRU', {'num_heads': 2}, 'num_heads must be 1, got 2'),
      ('GRU', {'dtype': jnp.int32}, 'dtype must be a floating.* got int32'),
      ('GRU', {'bias_init': [jax.nn.initializers.zeros] * 2}, '3, .* got 2'),
      ('MinGRU', {'candidate': 'log'}, "'linear', 'positive'.*got 'log'"),
      ('GRU', {'recurrent_gradient_clip': 0.0}, 'number above 0, got 0.0'),
      ('LSTM', {'stop_recurrent_gradient': 1.0}, 'must be a bool, got 1.0'),
      (
          *('MinGRU', {'recurrent_gradient_clip': 1.0}),
          'MinGRUCell has no recurrent gates.* got recurrent_gradient_clip=1.0',
      ),
      ('MinGRU', {'max_abs': 0.5}, 'no recurrent kernel.*max_abs=0.5'),
      (
          *('MinGRU', {'recurrent_structure': jnp.negative}),
          'no recurrent kernel.* Leaving recurrent_structure out would work',
      ),
      (
          *('LSTM', {'forget_bias': 1.0, 'use_bias': False}),
          'forget_bias=1.0 needs use_bias=True',
      ),
      ('SLSTM', {'block_index': 2}, r'\[0, num_blocks\).*=2 and num_blocks=1'),
      ('IRevRNN', {'inner_steps': 2**31}, 'up to 1000'),
      (
          'S5',
          {'state_features': 10**5},
          'num_blocks must be at least 25 .*t 1:',
      ),
  )
  def test_option(self, layer, options, message):
    with self.assertRaisesRegex(ValueError, message):
      make(rnnzoo.LAYERS[layer], **options)

  @parameterized.parameters(
      ('IndRNN', 'num_heads'),
      ('AGRU', 'cell_params'),
      ('AntisymmetricRNN', 'recurrent_structure'),
      ('SLSTM', 'bias_init'),
      ('GRU', 'cell_params'),
      ('LRU', 'readout'),
      ('LRU', 'kernel_init'),
      ('S5', 'cell_params'),
      ('S5', 'bias_init'),
      ('QRNN', 'input_map'),
      ('LinOSS', 'readout'),
      ('RGLRU', 'input_map'),
      ('HGRN', 'readout'),
      ('CfC', 'input_map'),
      *((name, 'cell') for name in rnnzoo.LAYERS),
  )
  def test_option_that_the_layer_sets(self, layer, option):
    message = f"^{layer} sets '{option}' itself; leaving it out would work, or"
    with self.assertRaisesRegex(TypeError, message):
      make(rnnzoo.LAYERS[layer], **{option: 1})

  def test_cell_params_of_another_size(self):
    message = r"\['b'\] must be \[\.\.\., 4\].*\(7,\)"
    layer = functools.partial(rnnzoo.RecurrentLayer, rnnzoo.ElmanCell())
    with self.assertRaisesRegex(ValueError, message):
      make(layer, cell_params={'b': nnx.Param(jnp.zeros(7))})

  @parameterized.parameters('cuda', ((),), (('scan', 'cuda'),), (['cuda'],))
  def test_implementation(self, implementation):
    with self.assertRaisesRegex(
        ValueError,
        r"implementation must be None, one of \('scan', 'associative_scan',"
        r" 'pallas'\), an rnnzoo.AssociativeScan, rnnzoo.Scan or rnnzoo.Pallas"
        r' with settings, or a sequence of these, got .*(cuda|\(\))',
    ):
      make(rnnzoo.GRU, implementation=implementation)

  @parameterized.parameters('in_features', 'features', 'rngs', 'dtype')
  def test_option_of_a_factory_that_its_caller_sets(self, option):
    factory = functools.partial(rnnzoo.GRU, **{option: 4})
    for kind in (rnnzoo.Stack, rnnzoo.DenseStack, rnnzoo.Bidirectional):
      with self.assertRaisesRegex(ValueError, f'must not have {option} of its'):
        make(functools.partial(kind, factory), dtype=jnp.float32)


# (arguments, what the message matches), for every composition below.
CALLS = {
    'in_features': (
        {'x': np.ones((BATCH, TIME, 7), np.float32)},
        r'time, in_features\].*in_features = 3, got shape \(2, 5, 7\)',
    ),
    'integers': (
        {'x': np.ones((BATCH, TIME, IN), np.int32)},
        'x of real floating-point numbers, got int32',
    ),
    'none': (
        {'x': None},
        r'array of shape \[..., time, in_features\], .* got a NoneType',
    ),
    'no_values': (
        {'x': jax.ShapeDtypeStruct((BATCH, TIME, IN), np.float32)},
        'with all of its values, got a ShapeDtypeStruct',
    ),
    'reset_length': (
        {'reset': np.zeros((BATCH, TIME + 1), bool)},
        r'reset must be a bool array of shape \(2, 5\), .* shape \(2, 6\)',
    ),
    'reset_dtype': (
        {'reset': np.zeros((BATCH, TIME), np.float32)},
        r'reset must be a bool array of shape \(2, 5\), got float32',
    ),
    'float_lengths': (
        {'seq_lengths': np.ones(BATCH, np.float32)},
        r'seq_lengths must be an integer array of shape \(2,\), got float32',
    ),
    'lengths_shape': (
        {'seq_lengths': np.ones((BATCH, TIME), np.int32)},
        r'an integer array of shape \(2,\), got int32 of shape \(2, 5\)',
    ),
    'time_major': (
        {'time_major': True, 'reset': np.zeros((TIME, BATCH), bool)},
        r'reset must be a bool array of shape \(2, 5\), .* shape \(5, 2\)',
    ),
}


class CallTest(parameterized.TestCase):

  @parameterized.product(
      call=tuple(CALLS),
      composed=(
          rnnzoo.LSTM,
          functools.partial(rnnzoo.Stack, rnnzoo.LSTM),
          functools.partial(rnnzoo.Bidirectional, rnnzoo.LSTM),
      ),
  )
  @pytest.mark.few(5)
  def test_call(self, call, composed):
    arguments, message = CALLS[call]
    layer = make(composed)
    with self.assertRaisesRegex(ValueError, message):
      layer(**({'x': x} | arguments))

  @parameterized.parameters(
      (h, r'got one array of shape \(2, 4\)'),
      ((h,), r'got 1 of shapes \[\(2, 4\)\]'),
      ((h, h[:1]), r'got 2 of shapes \[\(2, 4\), \(1, 4\)\]'),
      ([h[:, :3], h], r'got 2 of shapes \[\(2, 3\), \(2, 4\)\]'),
  )
  def test_carry(self, carry, message):
    right = r'a tuple \(h, c\) of 2 arrays of shape \(2, 4\), .*'
    layer = make(rnnzoo.LSTM)
    with self.assertRaisesRegex(
        ValueError, '^initial_carry must be ' + right + message
    ):
      layer(x, initial_carry=carry)
    with self.assertRaisesRegex(ValueError, '^carry must be ' + right):
      layer.step(carry, x[:, 0])

  def test_step(self):
    layer = make(rnnzoo.GRU)
    with self.assertRaisesRegex(ValueError, r'in_features = 3.*\(2, 7\)'):
      layer.step((h,), np.ones((BATCH, 7), np.float32))
    with self.assertRaisesRegex(
        ValueError, r'reset .*\(2,\), got bool of shape \(3,\)'
    ):
      layer.step((h,), x[:, 0], reset=np.zeros(3, bool))
    stack = make(functools.partial(rnnzoo.Stack, rnnzoo.GRU), num_layers=2)
    for each, carry in ((layer, (h,)), (stack, ((h,), (h,)))):
      with self.assertRaisesRegex(ValueError, ' must be .* got|x as an array'):
        each.step(x[:, 0], carry)
      with self.assertRaisesRegex(ValueError, 'carry must be .*got a NoneType'):
        each.step(None, x[:, 0])

  def test_composed_carry(self):
    stack = make(functools.partial(rnnzoo.Stack, rnnzoo.GRU), num_layers=2)
    message = 'a tuple of 2 carries, one for each layer, as .*; got 1 of them'
    with self.assertRaisesRegex(ValueError, 'initial_carry must be ' + message):
      stack(x, initial_carry=((h,),))
    with self.assertRaisesRegex(ValueError, 'carry must be ' + message):
      stack.step(((h,),), x[:, 0])
    with self.assertRaisesRegex(ValueError, r'a tuple \(h,\) of 1 arrays'):
      stack(x, initial_carry=((h,), h))
    pair = make(functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU))
    with self.assertRaisesRegex(ValueError, r'a pair \(forward, backward\)'):
      pair(x, initial_carry=(h,))

  def test_bidirectional_step(self):
    pair = make(functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU))
    with self.assertRaisesRegex(NotImplementedError, 'needs the whole'):
      pair.step(((h,), (h,)), x[:, 0])


class ImplementationTest(parameterized.TestCase):

  @parameterized.parameters(
      ('AssociativeScan', 'jacobian', 'full', "one of .*'exact'.*got 'full'"),
      ('AssociativeScan', 'window', 0, 'must be a positive int .*got 0'),
      ('Scan', 'keep', 'all', "must be one of .*'gates'.* got 'all'"),
      ('Scan', 'chunk', 0, 'must be a positive int .*got 0'),
      ('Pallas', 'keep', None, r"one of \('carries', 'gates'\), got None"),
  )
  def test_settings(self, path, name, value, message):
    with self.assertRaisesRegex(ValueError, f'{name} .*{message}'):
      getattr(rnnzoo, path)(**{name: value})

  @parameterized.parameters(rnnzoo.AssociativeScan(window=2), rnnzoo.Scan())
  @pytest.mark.slow
  def test_settings_are_accepted_wherever_a_name_is(self, path):
    for name in ('GRU', 'MinGRU'):
      layer = make(rnnzoo.LAYERS[name], implementation=[rnnzoo.Pallas(), path])
      self.assertEqual(jax.eval_shape(layer, x).shape, (BATCH, TIME, FEATURES))
    h = rnnzoo.linear_scan(x, x, implementation=path)
    np.testing.assert_allclose(h, rnnzoo.linear_scan(x, x), rtol=1e-6)

  @parameterized.parameters(
      (lambda: make(rnnzoo.MinGRU), x, 'one pass, and there is nothing'),
      (lambda: make(rnnzoo.GRU), x[0, 0], r'shape \[..., time, in_features\]'),
      (lambda: make(rnnzoo.GRU), x[:, :0], 'one sequence and one step'),
      (lambda: rnnzoo.GRUCell(), x, 'must be a layer of one cell.*GRUCell'),
  )
  def test_verify(self, layer, x, message):
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.verify(layer(), x)

  @parameterized.parameters('GRU', 'MinGRU')
  def test_pallas(self, name):
    # Both what is missing and what works instead.
    layer = make(rnnzoo.LAYERS[name], implementation='pallas')
    message = "GPU kernels need .*implementation='scan' runs everywhere"
    with self.assertRaisesRegex(NotImplementedError, message):
      layer(x)
    with self.assertRaisesRegex(NotImplementedError, message):
      rnnzoo.linear_scan(x, x, implementation='pallas')

  @parameterized.parameters('H100', 'V100', 'size')
  @pytest.mark.slow
  def test_warns_once_where_a_gpu_has_no_kernel(self, why):
    selection.warn_once.cache_clear()
    kind = 'V100' if why == 'V100' else 'H100'
    device = types.SimpleNamespace(
        platform='gpu',
        device_kind=f'NVIDIA {kind}',
        compute_capability='7.0' if why == 'V100' else '9.0',
        core_count=132,
    )
    message = f"device here is 'NVIDIA {kind}'"
    kernels = contextlib.nullcontext()
    if why == 'H100':
      message = (
          r'jax 0.10.2 on Python 3.* 3.12 or newer, .*cuda13\]>=0.11,<0.13'
      )
      kernels = mock.patch.object(jax, '__version_info__', (0, 10, 2))
      version = mock.patch.object(jax, '__version__', '0.10.2')
    else:
      version = mock.patch.object(jax, '__version_info__', (0, 11, 2))
    if why == 'size':
      message = 'too many features'
      error = NotImplementedError(message)
      kernels = mock.patch.object(
          pallas_kernels, 'linear_scan', side_effect=error
      )
    found = mock.patch.object(devices, 'default_device', lambda: device)
    with found, kernels, version:
      with self.assertWarnsRegex(
          UserWarning, message + ".*'associative_scan' is tried instead"
      ) as told:
        rnnzoo.linear_scan(x, x)
      self.assertEqual(told.filename, __file__)
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        rnnzoo.linear_scan(x, x)

  @parameterized.parameters(*rnnzoo.LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_silent_on_a_cpu(self, name):
    layer = make(rnnzoo.LAYERS[name])
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      y = jax.eval_shape(layer, x)
      rnnzoo.linear_scan(x, x, implementation=('pallas', 'scan'))
    self.assertEqual(y.shape, (BATCH, TIME, FEATURES))

  def test_none_of_a_sequence(self):
    exact = rnnzoo.AssociativeScan(jacobian='exact')
    layer = make(rnnzoo.GRU, implementation=('pallas', exact))
    with (
        mock.patch.object(newton_plan, 'BYTES', 0),
        self.assertRaisesRegex(NotImplementedError, "'exact' needs"),
    ):
      layer(x)

  def test_falls_back_and_logs_once(self):
    selection.log_once.cache_clear()
    exact = rnnzoo.AssociativeScan(jacobian='exact')
    layer = make(rnnzoo.GRU, implementation=['pallas', exact, 'scan'])
    self.enter_context(mock.patch.object(newton_plan, 'BYTES', 0))
    level = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    self.addCleanup(logging.set_verbosity, level)
    with self.assertLogs(level='INFO') as logs:
      y = layer(x)
      layer(x)
    passed_over = [line for line in logs.output if 'passed over' in line]
    self.assertLen(passed_over, 2)
    self.assertRegex(passed_over[0], "'pallas'.*GPU kernels need")
    self.assertRegex(passed_over[1], "jacobian='exact'.* needs")
    layer.implementation = 'scan'
    np.testing.assert_array_equal(y, layer(x))


class FunctionsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('x_gates', h, r'with 3 input gates for GRUCell, got shape \(2, 4\)'),
      ('x_gates', np.ones((2, 5, 2, 4), np.float32), r'got shape \(2, 5, 2, 4'),
      ('recurrent_kernel', None, 'with 3 recurrent gates .* got None'),
      ('recurrent_kernel', np.ones((3, 1, 2, 2)), r'= 4, got shape \(3, 1, 2'),
      ('carry', h, r'carry must be a tuple \(h,\) .* got one array of shape'),
      ('restart_carry', (h, h), 'restart_carry must be .* got 2 of'),
      ('reset', np.zeros((5, 2), bool), r'reset .*\(2, 5\), .*\(5, 2\)'),
      ('implementation', 'cuda', "must be None, one of .* got 'cuda'"),
      ('params', {}, "'recurrent_bias'.* missing"),
  )
  def test_unroll(self, name, value, message):
    arguments = {
        'params': {'recurrent_bias': jnp.zeros(FEATURES)},
        'x_gates': jnp.ones((BATCH, TIME, 3, FEATURES)),
        'recurrent_kernel': jnp.ones((3, 1, FEATURES, FEATURES)),
        'carry': (h,),
    }
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.unroll(rnnzoo.GRUCell(), **(arguments | {name: value}))

  @parameterized.parameters(
      (np.ones((2, 1, 4, 4)), None, 'has no recurrent gates.* None'),
      (None, 1.0, 'MinGRUCell has no recurrent g'),
  )
  def test_unroll_linear_cell(self, kernel, clip, message):
    gates = jnp.ones((BATCH, TIME, 2, FEATURES))
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.unroll(
          *(rnnzoo.MinGRUCell(), {}, gates, kernel, (h,)),
          recurrent_gradient_clip=clip,
      )

  @parameterized.parameters(
      ({'b': x[:1]}, r'a the same .* got shapes \(1, 5, 3\) and \(2, 5, 3\)'),
      ({'a': h[0], 'b': h[0]}, r'\[..., time, features\], .* got .*\(4,\)'),
      ({'h0': x}, r'h0 .* = \(2, 3\), got \(2, 5, 3\)'),
      ({'reset': np.zeros((5, 2), bool)}, r'\(2, 5\), .*\(5, 2\)'),
      ({'a': x > 0}, '^a must be numbers, got bool'),
      ({'h0': 1j * x[:, 0]}, 'h0 must be real where a and b are, .* complex b'),
  )
  def test_linear_scan(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.linear_scan(**({'a': x, 'b': x} | arguments))


if __name__ == '__main__':
  absltest.main()
