"""Kernels for dense recurrences lower to CUDA without a GPU.

They cannot be interpreted, so only this and a GPU see them whole: every cell,
every way in which a head's units are spread over the GPU, and all options.
"""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import rnnzoo
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import random_layers

H200, B200 = 'NVIDIA H200', 'NVIDIA B200'
LAUNCH = re.compile(r'custom_call @mosaic_gpu')
aval = jax.ShapeDtypeStruct

heads = lambda n: {'num_heads': n}
case = functools.partial(comparison.Case, path='pallas')

# Heads of up to 64 units (of A-GRU in 16 bits 128) are one CTA's, those of up
# to 512 a cluster's, and larger ones are a cluster's or spread over the GPU.
LAYERS = comparison.table(
    case,
    """
    LSTM 3x13x8 reset mask
    GRU 1x1x40 float16 lengths time_major
    GRU 64x3x256 reset reverse num_heads=4
    SLSTM 3x5x15 bfloat16 mask time_major num_heads=3
    Elman 16x13x64 float16 mask activation=relu
    LSTM 3x13x64 reset stop_recurrent_gradient=True
    LSTM 16x5x512 bfloat16 reset mask peephole=True
    LSTM 16x5x256 bfloat16 reset lengths projection=64
    SLSTM 3x5x384 reset lengths use_bias=False
    AGRU 16x5x128 bfloat16 reset time_major
    LSTM 64x5x256 float16 lengths reverse time_major recurrent_gradient_clip=1.0
    AntisymmetricRNN 64x3x256 bfloat16 reset mask gated=True
    GRU 1x13x512 mask recurrent_gradient_clip=1.0
    AGRU 1x5x500 float16 reverse stop_recurrent_gradient=True
    Elman 16x5x512 bfloat16 reset lengths time_major
    SLSTM 3x1x1536 bfloat16 reset num_heads=2
    AGRU 3x3x768 reset lengths reverse recurrent_gradient_clip=1.0
    AntisymmetricRNN 1x5x1024 float16 time_major gated=True
    GRU 16x5x1024 bfloat16 mask time_major stop_recurrent_gradient=True
    LSTM 16x3x768
    CfC 16x13x64 bfloat16 reset mask
    CfC 3x5x512 reset lengths time_major timespans=True
    CfC 16x5x1024 bfloat16 reverse mode=pure timespans=True
    # Operands go straight to registers.
    LSTM 16x5x2048 bfloat16
    GRU 31x5x2000 float16 reset lengths reverse time_major
    LSTM 5x1x1544 bfloat16 reset mask
    # Without flags nothing at all comes back to h.
    LSTM 16x5x64 bfloat16 stop_recurrent_gradient=True
    """,
)


def named():
  """Yields names, the GPUs in turn, and the cases."""
  for i, each in enumerate(LAYERS):
    yield each.name, (H200, B200)[i % 2], each


class DenseLoweringTest(parameterized.TestCase):

  def lowers(self, f, *args, kernels=2):
    self.assertLen(LAUNCH.findall(abstract_gpu.lower(f, *args)), kernels)

  @parameterized.named_parameters(*named())
  @pytest.mark.slow
  @pytest.mark.few(3)
  def test_layer(self, kind, case):
    f, args = comparison.abstract_gradient(case)
    with abstract_gpu.device(self, kind):
      self.lowers(f, *args)

  @parameterized.parameters(
      (H200, heads(12), 768, 3),
      (H200, heads(2), 256, 3),
      # Those of a Blackwell GPU multiply otherwise.
      (B200, heads(12), 768, 2),
      # XLA's product of larger heads is as good.
      (H200, heads(3), 768, 2),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradient_of_small_heads(self, kind, options, features, kernels):
    half = functools.partial(case, rnnzoo.LSTM, options, dtype='bfloat16')
    for x64, rows in ((False, (16, 256)), (True, (9, 904))):
      given = half(sizes=(*rows, features), reset=True)
      f, args = comparison.abstract_gradient(given)
      with jax.enable_x64(x64), abstract_gpu.device(self, kind):
        self.lowers(f, *args, kernels=kernels)

  @parameterized.parameters((8, 64), (9, 911))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradient_of_few_or_odd_rows(self, batch, time):
    options = {'dtype': 'bfloat16', 'sizes': (batch, time, 128)}
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, heads(2), **options)
    )
    with abstract_gpu.device(self, H200):
      self.lowers(f, *args)

  @parameterized.parameters('Auto', 'Explicit')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradient_of_small_heads_under_a_mesh(self, kind):
    options = {'dtype': 'bfloat16', 'sizes': (32, 256, 128)}
    given = case(rnnzoo.LSTM, heads(2), **options)
    f, args = comparison.abstract_gradient(given)
    over_batch, rows = next(comparison.mapped_gradients(given))
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(abstract_gpu.mesh(H200, kind)):
        self.lowers(f, *args, kernels=3)
      self.lowers(over_batch, *rows, kernels=3)

  @pytest.mark.slow
  def test_in_pieces(self):
    # A step of 64 sequences publishes more than shared memory holds.
    f, args = comparison.abstract_gradient(
        case(rnnzoo.AGRU, sizes=(64, 3, 768), reset=True)
    )
    with abstract_gpu.device(self, H200):
      text = abstract_gpu.lower(f, *args)
      self.assertLen(LAUNCH.findall(text), 2)
      # Pieces of the same size call the same kernel.
      for name in ('forward', 'backward'):
        self.assertGreater(text.count(f'call @{name}('), 1)

  @pytest.mark.slow
  def test_gradients_that_are_not_finite(self):
    call = call_lib.Call(recurrent_gradient_clip=1.0, zero_not_finite=True)

    def loss(x_gates, kernel, carry):
      operands = call_lib.Operands(
          {}, (), x_gates, kernel, carry, None, None, None
      )
      _, (h,) = paths.run(
          rnnzoo.LSTMCell(), call_lib.Given(), operands, call, 'pallas'
      )
      return jnp.sum(h**2)

    carry = (aval((3, 64), jnp.float32),) * 2
    x_gates = aval((3, 5, 4, 64), jnp.bfloat16)
    kernel = aval((4, 1, 64, 64), jnp.bfloat16)
    with abstract_gpu.device(self, H200):
      self.lowers(jax.grad(loss, (0, 1, 2)), x_gates, kernel, carry)

  @parameterized.parameters(
      ('float32', 'bfloat16', 64, False),
      ('bfloat16', 'float32', 256, True),
      ('float16', 'float16', 768, False),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_unroll(self, x_dtype, kernel_dtype, features, reverse):
    """Several outputs in float32, whatever is multiplied."""
    cell = rnnzoo.LSTMCell()
    x_gates = aval((3, 5, 4, features), jnp.dtype(x_dtype))
    kernel = aval((4, 1, features, features), jnp.dtype(kernel_dtype))
    carry = (aval((3, features), jnp.float32),) * 2

    def loss(x_gates, kernel, carry, restart, reset):
      final, carries = rnnzoo.unroll_carries(
          cell,
          {},
          x_gates,
          kernel,
          carry,
          reset=reset,
          restart_carry=restart,
          reverse=reverse,
          implementation='pallas',
      )
      self.assertEqual({y.dtype for y in carries}, {jnp.dtype('float32')})
      return sum(jnp.sum(y**2) for y in (*final, *carries))

    f = jax.grad(loss, (0, 1, 2, 3))
    with abstract_gpu.device(self, H200):
      self.lowers(f, x_gates, kernel, carry, carry, aval((3, 5), bool))

  @parameterized.parameters(('GRU', 24), ('LSTM', 96), ('AGRU', 640))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_both_directions(self, name, features):
    both = functools.partial(rnnzoo.Bidirectional, rnnzoo.LAYERS[name])
    given = case(both, sizes=(9, 5, features), in_features=3)
    options = {'dtype': 'bfloat16', 'implementation': 'pallas'}
    call, state = random_layers.squares(comparison.abstract(given, **options))
    loss = lambda state, x, reset: call(state, x, reset=reset)
    args = state, aval((9, 5, 3), jnp.float32), aval((9, 5), bool)
    with abstract_gpu.device(self, H200):
      self.lowers(jax.grad(loss), *args)

  @parameterized.parameters(
      (rnnzoo.AGRU, 24), (rnnzoo.GRU, 96), (rnnzoo.LSTM, 768)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap(self, layer, features):
    options = {'dtype': 'bfloat16', 'sizes': (2, 3, features), 'reset': True}
    with abstract_gpu.device(self, H200):
      for f, args in comparison.mapped_gradients(case(layer, **options)):
        self.lowers(f, *args)

  @parameterized.parameters(('SLSTM', 32), ('AGRU', 768))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_checkpoint(self, name, features):
    given = case(rnnzoo.LAYERS[name], sizes=(2, 13, features))
    made = comparison.abstract(given, implementation='pallas')
    call, state = random_layers.pure(made)
    loss = lambda state, x: jnp.sum(jax.checkpoint(call)(state, x) ** 2)
    with abstract_gpu.device(self, B200):
      # The forward pass without the arrays of the adjoint, and with them.
      x = aval((2, 13, 4), jnp.float32)
      self.lowers(jax.grad(loss), state, x, kernels=3)

  @pytest.mark.slow
  def test_x64(self):
    # Literals of Python and indices are 64 bits wide then.
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      for layer, features in ((rnnzoo.SLSTM, 32), (rnnzoo.AGRU, 768)):
        f, args = comparison.abstract_gradient(
            case(layer, sizes=(2, 5, features), reset=True)
        )
        self.lowers(f, *args)

  @parameterized.parameters(
      ('GRU', 8, True, True),
      ('AGRU', 768, True, False),
      ('LSTM', 8, False, True),
      ('SLSTM', 16, False, True),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_shard_map(self, name, features, flags, check_vma):
    mesh = abstract_gpu.mesh(H200)
    given = case(rnnzoo.LAYERS[name], sizes=(4, 13, features))
    options = {'learn_initial_carry': True, 'implementation': 'pallas'}
    call, state = random_layers.pure(comparison.abstract(given, **options))
    sharded = jax.shard_map(
        lambda state, x, reset: call(state, x, reset=reset if flags else None),
        mesh=mesh,
        in_specs=(P(), P('data'), P('data')),
        out_specs=P('data'),
        check_vma=check_vma,
    )
    loss = lambda state, x, reset: jnp.sum(sharded(state, x, reset) ** 2)
    x, reset = aval((4, 13, 4), jnp.float32), aval((4, 13), bool)
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(mesh):
        self.lowers(jax.grad(loss, (0, 1)), state, x, reset)


class RefusalTest(parameterized.TestCase):

  def refuses(self, message, cell, x_gates, kernel):
    """'pallas' says why it cannot run, and another path takes over."""
    batch, time, _, features = x_gates.shape
    carry = (aval((batch, features), jnp.float32),) * len(cell.carry_names)

    def run(implementation):
      f = functools.partial(
          rnnzoo.unroll, cell, {}, implementation=implementation
      )
      return jax.eval_shape(f, x_gates, kernel, carry)

    with abstract_gpu.device(self, H200):
      if not abstract_gpu.RUNS:
        run('pallas')
      with self.assertRaisesRegex(
          NotImplementedError, f"{message}.*'scan' runs everywhere"
      ):
        run('pallas')
      _, h = run(('pallas', 'scan'))
      self.assertEqual(h.shape, (batch, time, features))

  @parameterized.parameters(('float32', 1024), ('bfloat16', 4096))
  def test_too_large_a_head(self, dtype, size):
    self.refuses(
        f'cannot hold a recurrent kernel of 1 heads of {size} units',
        rnnzoo.LSTMCell(),
        aval((1, 3, 4, size), jnp.dtype(dtype)),
        aval((4, 1, size, size), jnp.dtype(dtype)),
    )

  @parameterized.parameters('highest', 'float32')
  def test_highest_precision(self, precision):
    x_gates = aval((2, 3, 1, 16), jnp.float32)
    kernel = aval((1, 2, 8, 8), jnp.bfloat16)
    message = f"jax_default_matmul_precision is '{precision}'"
    with jax.default_matmul_precision(precision):
      self.refuses(message, rnnzoo.ElmanCell(), x_gates, kernel)

  def test_precision_of_two_bytes(self):
    # Products of bfloat16 are exact in any case.
    f, args = comparison.abstract_gradient(
        case(rnnzoo.Elman, dtype='bfloat16', sizes=(2, 3, 16))
    )
    with jax.default_matmul_precision('highest'):
      with abstract_gpu.device(self, H200):
        jax.eval_shape(f, *args)

  def test_too_many_elements(self):
    self.refuses(
        r'take fewer than 2\^31 elements of gates.*split the batch',
        rnnzoo.LSTMCell(),
        aval((64, 2**17, 4, 64), jnp.bfloat16),
        aval((4, 1, 64, 64), jnp.bfloat16),
    )


if __name__ == '__main__':
  absltest.main()
