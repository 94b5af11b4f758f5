"""GPU kernels lower to CUDA without a GPU, through the public functions.

Pallas's compiler runs up to the code that a GPU's own compiler takes: layouts,
shapes, primitives without a rule and the size of shared memory are checked.
"""

import dataclasses
import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import pallas_kernels
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import random_layers

H200, B200 = 'NVIDIA H200', 'NVIDIA B200'
KERNEL = re.compile(r'mosaic_gpu\w*')
aval = jax.ShapeDtypeStruct

case = functools.partial(comparison.Case, path='pallas')
LAYERS = comparison.table(
    case,
    """
MinGRU 2x40x256
MinGRU 2x4096x130 bfloat16 reset reverse candidate=positive
MinGRU 128x100x8 float16 time_major use_bias=False
MinLSTM 1x4096x8 bfloat16 lengths time_major candidate=positive
IndRNN 2x40x130 reset lengths reverse
IndRNN 2x1x7 float16 time_major activation=tanh
IRevRNN 2x13x8 float16 inner_steps=1 activation=tanh inner_activation=sigmoid
IRevRNN 2x40x130 bfloat16 reset reverse activation=sigmoid inner_activation=relu
GRU 2x13x8 lengths num_heads=8
SLSTM 2x13x8 reset reverse num_heads=8
LRU 2x4096x130 bfloat16 reset reverse
RGLRU 2x40x256 reset mask num_heads=2
RGLRU 2x4096x130 float16 lengths signed=True
HGRN 2x40x130 bfloat16 time_major
HGRN 2x4096x8 reset complex=True lower_bound=0.5
QRNN 2x40x256 reset lengths pooling=ifo
""",
)


def named():
  """Yields names, the GPUs in turn, and the cases."""
  for i, each in enumerate(LAYERS):
    yield each.name, (H200, B200)[i % 2], each


@dataclasses.dataclass(frozen=True)
class ConstantGate(rnnzoo.LinearCell):
  """A linear cell with quotients and sigmoids of constants."""

  input_gates = 1

  def coefficients(self, params, x_gates):
    (x,) = x_gates
    a = jax.nn.sigmoid(jnp.zeros_like(x))
    return a, x / jnp.full_like(x, 3.0)


@dataclasses.dataclass(frozen=True)
class ConstantFeedback(rnnzoo.Cell):
  """A cell that is not linear, likewise."""

  input_gates = 1
  recurrent_gates = 1
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    a = jax.nn.sigmoid(jnp.zeros_like(x_gates[0]))
    h = jnp.tanh(x_gates[0] + a * h_gates[0])
    return (h / jnp.full_like(h, 3.0) ** -2,)


class LoweringTest(parameterized.TestCase):

  def lowers(self, f, *args, kernels=2):
    text = abstract_gpu.lower(f, *args)
    self.assertGreaterEqual(len(KERNEL.findall(text)), kernels)
    return text

  @parameterized.named_parameters(*named())
  @pytest.mark.slow
  @pytest.mark.few(3)
  def test_layer(self, kind, case):
    f, args = comparison.abstract_gradient(case)
    with abstract_gpu.device(self, kind):
      self.lowers(f, *args)

  @parameterized.parameters(
      ('float32', (1, 8192, 8), True),
      ('bfloat16', (256, 100, 129), True),
      ('float16', (2, 40, 256), False),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_linear_scan(self, dtype, sizes, reverse):
    kind = B200 if reverse else H200
    a = aval(sizes, jnp.dtype(dtype))
    h0 = aval((sizes[0], sizes[2]), jnp.float32)
    reset = aval(sizes[:2], bool) if reverse else None

    def loss(a, b, h0, reset):
      h = rnnzoo.linear_scan(
          a, b, h0, reset=reset, reverse=reverse, implementation='pallas'
      )
      return jnp.sum(h.astype(jnp.float32) ** 2)

    with abstract_gpu.device(self, kind):
      self.lowers(jax.grad(loss, (0, 1, 2)), a, a, h0, reset)

  @parameterized.parameters(
      case(rnnzoo.MinGRU, sizes=(1, 4096, 8), reset=True),
      case(rnnzoo.IndRNN, sizes=(2, 13, 8), reset=True),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_transformations(self, case):
    with abstract_gpu.device(self, H200):
      for f, args in comparison.mapped_gradients(case):
        self.lowers(f, *args)

  @parameterized.parameters((2, True), (64, False))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap_of_segments(self, count, in_turn):
    # Many sequences fill a GPU without segments, and then all run at once.
    a = aval((count, 1, 1600, 8), jnp.float32)
    scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    loss = lambda a, b: jnp.sum(jax.vmap(scan)(a, b))
    with abstract_gpu.device(self, H200):
      text = self.lowers(jax.grad(loss, (0, 1)), a, a)
      self.assertEqual('stablehlo.while' in text, in_turn)

  @parameterized.parameters(ConstantGate(), ConstantFeedback())
  @pytest.mark.slow
  def test_constants(self, cell):
    # A constant is in the registers of no thread in particular.
    x = aval((2, 40, 1, 8), jnp.float32)
    kernel = None
    if isinstance(cell, ConstantFeedback):
      kernel = aval((1, 8, 1, 1), jnp.float32)

    def loss(x, kernel):
      h = pallas_kernels.recurrence(cell, {}, x, kernel, None)[1][0]
      return jnp.sum(h)

    with abstract_gpu.device(self, H200):
      self.lowers(jax.grad(loss), x, kernel)

  @pytest.mark.slow
  def test_x64(self):
    # Literals of Python and indices are 64 bits wide then.
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      for given in (
          case(rnnzoo.MinLSTM, sizes=(2, 4096, 8), reset=True),
          case(rnnzoo.MinGRU, dtype='bfloat16', sizes=(96, 200, 8), reset=True),
          case(rnnzoo.IRevRNN, sizes=(2, 40, 8), reset=True),
      ):
        f, args = comparison.abstract_gradient(given)
        self.lowers(f, *args)

  # The first in segments.
  @parameterized.parameters(('MinGRU', 4096, True), ('IndRNN', 13, False))
  @pytest.mark.slow
  def test_shard_map(self, name, time, check_vma):
    mesh = abstract_gpu.mesh(H200)
    made = comparison.abstract(
        case(rnnzoo.LAYERS[name]), implementation='pallas'
    )
    call, state = random_layers.pure(made)
    sharded = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(P(), P('data')),
        out_specs=P('data'),
        check_vma=check_vma,
    )
    loss = lambda state, x: jnp.sum(sharded(state, x) ** 2)
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(mesh):
        self.lowers(jax.grad(loss), state, aval((4, time, 4), jnp.float32))

  def test_shard_map_of_replicated_operands(self):
    # The gradients of those that all devices share are sums over devices.
    mesh = abstract_gpu.mesh(H200)
    sharded = jax.shard_map(
        lambda x, w, bias: pallas_kernels.recurrence(
            rnnzoo.MinGRUCell(), {}, x, None, None, input_kernel=w, bias=bias
        )[1][0],
        mesh=mesh,
        in_specs=(P('data'), P(), P()),
        out_specs=P('data'),
    )
    loss = lambda *args: jnp.sum(sharded(*args).astype(jnp.float32))
    args = (
        aval((8, 200, 72), jnp.bfloat16),
        aval((2, 72, 136), jnp.float32),
        aval((2, 136), jnp.float32),
    )
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(mesh):
        text = self.lowers(jax.grad(loss, (0, 1, 2)), *args)
        self.assertEqual(text.count('"stablehlo.all_reduce"'), 2)


class OtherDevicesTest(parameterized.TestCase):

  def test_float64(self):
    a = aval((2, 13, 8), jnp.float64)
    f = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      if not abstract_gpu.RUNS:
        jax.eval_shape(f, a, a)
      with self.assertRaisesRegex(NotImplementedError, r"got \['float64'\]"):
        jax.eval_shape(f, a, a)

  def test_older_gpu(self):
    kind = 'Tesla V100-SXM2-16GB'
    f, args = comparison.abstract_gradient(
        case(rnnzoo.MinGRU, sizes=(2, 13, 8))
    )
    with abstract_gpu.device(self, kind):
      if not abstract_gpu.RUNS:
        jax.eval_shape(f, *args)
      message = f"compute capability 8.0, .*'{kind}'.*'scan' runs everywhere"
      with self.assertRaisesRegex(NotImplementedError, message):
        jax.eval_shape(f, *args)


if __name__ == '__main__':
  absltest.main()
