"""GPU kernels lower to CUDA without a GPU, through the public functions.

Pallas's compiler runs up to the code that a GPU's own compiler takes: layouts,
shapes, primitives without a rule and the size of shared memory are checked.
"""

import dataclasses
import functools
import re
import warnings

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pallas_kernels
import rnnzoo
from tests.testing import abstract_gpu

H200, B200 = 'NVIDIA H200', 'NVIDIA B200'
KERNEL = re.compile(r'mosaic_gpu\w*')
aval = jax.ShapeDtypeStruct

# (layer, options, dtype, (batch, time, features), further options).
POSITIVE, TANH = {'candidate': 'positive'}, {'activation': 'tanh'}
LAYERS = (
    ('MinGRU', {}, 'float32', (2, 40, 256), ''),
    ('MinGRU', POSITIVE, 'bfloat16', (2, 4096, 130), 'reset reverse'),
    ('MinGRU', {'use_bias': False}, 'float16', (128, 100, 8), 'time_major'),
    ('MinLSTM', {}, 'bfloat16', (2, 40, 256), 'reset lengths'),
    ('MinLSTM', POSITIVE, 'float32', (1, 4096, 8), 'lengths time_major'),
    ('MinLSTM', {}, 'float16', (512, 100, 512), 'reverse'),
    ('IndRNN', {}, 'float32', (2, 40, 130), 'reset lengths reverse'),
    ('IndRNN', TANH, 'bfloat16', (2, 4096, 256), ''),
    ('IndRNN', TANH, 'float16', (2, 1, 7), 'time_major'),
    ('IRevRNN', {}, 'float32', (2, 40, 256), 'lengths'),
    ('IRevRNN', {}, 'bfloat16', (2, 40, 130), 'reset reverse time_major'),
    ('IRevRNN', {'inner_steps': 1}, 'float16', (2, 13, 8), ''),
    ('LSTM', {'num_heads': 8}, 'bfloat16', (2, 13, 8), 'reset'),
    ('GRU', {'num_heads': 8}, 'float32', (2, 13, 8), 'lengths'),
    ('SLSTM', {'num_heads': 8}, 'float32', (2, 13, 8), 'reset reverse'),
)


def named():
  """Yields the cases with names, and the GPUs in turn."""
  for i, (layer, options, dtype, sizes, flags) in enumerate(LAYERS):
    size = 'x'.join(map(str, sizes))
    values = (str(value) for value in options.values())
    parts = (layer, *values, dtype, size, *flags.split())
    kind = (H200, B200)[i % 2]
    yield '_'.join(parts), kind, layer, options, dtype, sizes, flags


def gradient(layer, options, dtype, sizes, flags=''):
  """Returns a function with a layer's gradients, and its arguments' shapes."""
  batch, time, features = sizes
  make = lambda: rnnzoo.LAYERS[layer](
      4,
      features,
      **options,
      implementation='pallas',
      learn_initial_carry=True,
      dtype=jnp.dtype(dtype),
      rngs=nnx.Rngs(0),
  )
  graphdef, state = nnx.split(nnx.eval_shape(make))
  lead = (batch, time)
  if 'time_major' in flags:
    lead = lead[::-1]
  x = aval((*lead, 4), jnp.dtype(dtype))
  reset = aval(lead, bool) if 'reset' in flags else None
  mask = aval(lead, bool) if 'mask' in flags else None
  lengths = aval((batch,), jnp.int32) if 'lengths' in flags else None

  def loss(state, x, reset, lengths, mask):
    final, y = nnx.merge(graphdef, state).unroll(
        x,
        reset=reset,
        mask=mask,
        seq_lengths=lengths,
        reverse='reverse' in flags,
        time_major='time_major' in flags,
    )
    return sum(jnp.sum(v.astype(jnp.float32) ** 2) for v in (y, *final))

  return jax.grad(loss, (0, 1)), (state, x, reset, lengths, mask)


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
  def test_layer(self, kind, layer, options, dtype, sizes, flags):
    f, args = gradient(layer, options, dtype, sizes, flags)
    with abstract_gpu.device(self, kind):
      self.lowers(f, *args)

  @parameterized.parameters(
      ('float32', (2, 40, 256), False),
      ('float32', (1, 8192, 8), True),
      ('float32', (256, 100, 129), False),
      ('bfloat16', (2, 40, 256), True),
      ('bfloat16', (1, 8192, 8), False),
      ('bfloat16', (256, 100, 129), True),
      ('float16', (1, 8192, 8), True),
      ('float16', (256, 100, 129), False),
  )
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
      ('MinGRU', (2, 13, 8)), ('MinGRU', (1, 4096, 8)), ('IndRNN', (2, 13, 8))
  )
  def test_transformations(self, name, sizes):
    f, (state, x, *rest) = gradient(name, {}, 'float32', sizes, 'reset')
    many = lambda tree: jax.tree.map(
        lambda v: aval((3, *v.shape), v.dtype), tree
    )
    with abstract_gpu.device(self, H200):
      over_batch = jax.vmap(f, (None, 0, None, None, None))
      self.lowers(over_batch, state, many(x), *rest)
      over_parameters = jax.vmap(f, (0, None, None, None, None))
      self.lowers(over_parameters, many(state), x, *rest)

  @parameterized.parameters(
      (H200, (96, 200, 72), '', True),
      (H200, (96, 200, 72), 'vmap', False),
      (H200, (96, 140, 72), '', False),
      (H200, (4, 200, 72), '', False),
      (B200, (96, 200, 72), '', False),
  )
  def test_projected(self, kind, sizes, how, together):
    # One kernel where that is faster, and where there is one.
    f, (state, x, *rest) = gradient('MinGRU', {}, 'bfloat16', sizes, 'reset')
    if how == 'vmap':
      f = jax.vmap(f, (None, 0, None, None, None))
      x = aval((2, *x.shape), x.dtype)
    with abstract_gpu.device(self, kind):
      text = self.lowers(f, state, x, *rest)
      self.assertEqual('projected_linear' in text, together)

  @parameterized.parameters((2, True), (64, False))
  def test_vmap_of_segments(self, count, in_turn):
    # Many sequences fill a GPU without segments, and then all run at once.
    a = aval((count, 1, 1600, 8), jnp.float32)
    scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    loss = lambda a, b: jnp.sum(jax.vmap(scan)(a, b))
    with abstract_gpu.device(self, H200):
      text = self.lowers(jax.grad(loss, (0, 1)), a, a)
      self.assertEqual('stablehlo.while' in text, in_turn)

  @parameterized.parameters(ConstantGate(), ConstantFeedback())
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

  @parameterized.parameters('MinGRU', 'IRevRNN')
  def test_checkpoint(self, name):
    make = lambda: rnnzoo.LAYERS[name](
        4, 8, implementation='pallas', rngs=nnx.Rngs(0)
    )
    graphdef, state = nnx.split(nnx.eval_shape(make))

    @jax.checkpoint
    def layer(state, x):
      return nnx.merge(graphdef, state)(x)

    loss = lambda state, x: jnp.sum(layer(state, x) ** 2)
    with abstract_gpu.device(self, B200):
      self.lowers(jax.grad(loss), state, aval((2, 13, 4), jnp.float32))

  def test_x64(self):
    # Literals of Python and indices are 64 bits wide then.
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      for name, dtype, sizes in (
          ('MinLSTM', 'float32', (2, 4096, 8)),
          ('MinGRU', 'bfloat16', (96, 200, 8)),
          ('IRevRNN', 'float32', (2, 40, 8)),
      ):
        f, args = gradient(name, {}, dtype, sizes, 'reset')
        self.lowers(f, *args)

  @parameterized.product(
      # The second in segments.
      cell=(('MinGRU', 13), ('MinGRU', 4096), ('IndRNN', 13)),
      check_vma=(True, False),
  )
  def test_shard_map(self, cell, check_vma):
    name, time = cell
    mesh = abstract_gpu.mesh(H200)
    make = lambda: rnnzoo.LAYERS[name](
        4, 8, implementation='pallas', rngs=nnx.Rngs(0)
    )
    graphdef, state = nnx.split(nnx.eval_shape(make))
    sharded = jax.shard_map(
        lambda state, x: nnx.merge(graphdef, state)(x),
        mesh=mesh,
        in_specs=(P(), P('data')),
        out_specs=P('data'),
        check_vma=check_vma,
    )
    loss = lambda state, x: jnp.sum(sharded(state, x) ** 2)
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(mesh):
        self.lowers(jax.grad(loss), state, aval((4, time, 4), jnp.float32))

  @parameterized.parameters(4, 96)
  def test_shard_map_of_replicated_operands(self, batch):
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
        aval((2 * batch, 200, 72), jnp.bfloat16),
        aval((2, 72, 136), jnp.float32),
        aval((2, 136), jnp.float32),
    )
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(mesh):
        text = self.lowers(jax.grad(loss, (0, 1, 2)), *args)
        self.assertEqual('projected_linear' in text, batch == 96)
        self.assertEqual(text.count('"stablehlo.all_reduce"'), 2)

  @parameterized.parameters('IndRNN', 'MinGRU', 'MinLSTM')
  def test_under_a_mesh(self, name):
    f, args = gradient(name, {}, 'float32', (2, 13, 8), '')
    with abstract_gpu.device(self, H200):
      with jax.sharding.use_abstract_mesh(abstract_gpu.mesh(H200, 'Explicit')):
        self.lowers(f, *args)


class OtherDevicesTest(parameterized.TestCase):

  def test_float64(self):
    a = aval((2, 13, 8), jnp.float64)
    f = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      if not abstract_gpu.RUNS:
        jax.eval_shape(f, a, a)
      with self.assertRaisesRegex(NotImplementedError, r"got \['float64'\]"):
        jax.eval_shape(f, a, a)

  @parameterized.parameters('NVIDIA A100', 'NVIDIA A100-SXM4-80GB')
  def test_older_gpu(self, kind):
    f, args = gradient('MinGRU', {}, 'float32', (2, 13, 8))
    with abstract_gpu.device(self, kind):
      if not abstract_gpu.RUNS:
        jax.eval_shape(f, *args)
      message = f"compute capability 9.0 .*'{kind}'.*'scan' runs everywhere"
      with self.assertRaisesRegex(NotImplementedError, message):
        jax.eval_shape(f, *args)

  @parameterized.parameters('NVIDIA H100 80GB HBM3', 'NVIDIA GH200 480GB')
  def test_other_hopper(self, kind):
    f, args = gradient('MinGRU', {}, 'float32', (2, 13, 8))
    with abstract_gpu.device(self, kind):
      self.assertIn('mosaic_gpu', abstract_gpu.lower(f, *args))

  @parameterized.parameters('MinGRU', 'IndRNN')
  def test_falls_back_without_a_warning(self, name):
    layer = rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0))
    with warnings.catch_warnings(), self.assertNoLogs(level='WARNING'):
      warnings.simplefilter('error')
      y = layer(jnp.ones((2, 5, 3)))
    self.assertEqual(y.shape, (2, 5, 4))


if __name__ == '__main__':
  absltest.main()
