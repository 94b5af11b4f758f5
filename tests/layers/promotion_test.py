"""Layers where JAX is told to refuse promotions that nobody asked for."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import linen
from rnnzoo import models
from tests.testing import abstract_gpu
from tests.testing import random_layers

BATCH, TIME, FEATURES = 2, 3, 4


class StrictDtypesTest(parameterized.TestCase):
  """`dtype` asks for a cast of x and the parameters, and for wide sums."""

  @parameterized.product(
      name=tuple(rnnzoo.LAYERS),
      way=(
          ('scan', jnp.float32),
          ('associative_scan', jnp.float32),
          (None, jnp.bfloat16),
      ),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_layers(self, name, way):
    implementation, param_dtype = way
    with jax.numpy_dtype_promotion('strict'):
      layer = rnnzoo.LAYERS[name](
          *(FEATURES, FEATURES),
          dtype=jnp.bfloat16,
          param_dtype=param_dtype,
          learn_initial_carry=True,
          implementation=implementation,
          rngs=nnx.Rngs(0),
      )
      graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
      x = jnp.ones((BATCH, TIME, FEATURES))
      reset = jnp.zeros((BATCH, TIME), bool)

      def loss(params, x):
        layer = nnx.merge(graphdef, params, rest)
        carry, y = layer.unroll(x, reset=reset, mask=~reset)
        carry, y = layer.step(carry, y[:, -1], reset=reset[:, 0])
        return y.astype(jnp.float32).sum()

      _, d_x = jax.eval_shape(jax.grad(loss, (0, 1)), params, x)
    self.assertEqual(d_x.dtype, jnp.float32)

  @parameterized.parameters('vanilla', 'cuda_fused')
  def test_flashrnn(self, backend):
    config = rnnzoo.FlashRNNConfig(backend=backend)
    run = functools.partial(rnnzoo.flashrnn, config=config)
    Wx = jnp.ones((2, 3, 4, 2, 4), jnp.bfloat16)
    with jax.numpy_dtype_promotion('strict'):
      states, _ = jax.eval_shape(
          run, Wx, jnp.ones((4, 2, 4, 4)), jnp.ones((4, 2, 4))
      )
    self.assertEqual(states.dtype, jnp.bfloat16)

  def test_linear_scan(self):
    for way, dtype in (('scan', 'bfloat16'), ('associative_scan', 'complex64')):
      a = jnp.ones((BATCH, TIME, FEATURES), dtype)
      run = functools.partial(rnnzoo.linear_scan, implementation=way)
      with jax.numpy_dtype_promotion('strict'):
        h = jax.eval_shape(run, a, a)
      self.assertEqual(h.dtype, dtype)

  @parameterized.product(
      make=(
          functools.partial(rnnzoo.Stack, rnnzoo.GRU, norm='layer'),
          functools.partial(rnnzoo.DenseStack, rnnzoo.GRU, norm='batch'),
          functools.partial(rnnzoo.SLSTMBlock, norm='layer'),
          functools.partial(rnnzoo.SLSTMBlock, norm='rms'),
      ),
      trains=(False, True),
  )
  @pytest.mark.few(4)
  def test_norms(self, make, trains):
    layer = make(FEATURES, FEATURES, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)

    def run(state, x):
      rngs = nnx.Rngs(0) if trains else None
      layer = nnx.merge(graphdef, state)
      carry, y = layer.unroll(x, seq_lengths=jnp.array([1, 3]), rngs=rngs)
      return layer.step(carry, y[:, -1, :FEATURES])[1]

    x = jnp.ones((BATCH, TIME, FEATURES))
    with jax.numpy_dtype_promotion('strict'):
      y = jax.eval_shape(run, state, x)
    self.assertEqual(y.dtype, jnp.bfloat16)

  @parameterized.parameters(None, jnp.float16, jnp.bfloat16)
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_language_model(self, dtype):
    layer = functools.partial(rnnzoo.MinGRU, dtype=dtype)
    options = {'dtype': jnp.bfloat16, 'rngs': nnx.Rngs(0)}
    model = models.LanguageModel(layer, 5, FEATURES, **options)
    with jax.numpy_dtype_promotion('strict'):
      logits = jax.eval_shape(model, jnp.ones((BATCH, TIME), jnp.int32))
    self.assertEqual(logits.dtype, jnp.float32)

  def test_beams(self):
    tokens = jnp.ones((BATCH, TIME), jnp.int32)
    options = {'max_length': 5, 'num_beams': 3, 'length_penalty': 0.5}
    with jax.numpy_dtype_promotion('strict'):
      decode = functools.partial(make_translator().decode, **options)
      found = jax.eval_shape(decode, tokens)
    self.assertEqual(found.tokens.shape, (BATCH, 5))


class NumpyScalarsTest(parameterized.TestCase):
  """A setting that is one of numpy's numbers asks for no dtype."""

  @parameterized.parameters(
      (rnnzoo.LSTM, 'forget_bias'),
      (rnnzoo.AntisymmetricRNN, 'epsilon'),
      (rnnzoo.IRevRNN, 'inner_scale'),
      (rnnzoo.IndRNN, 'max_abs'),
  )
  @pytest.mark.slow
  def test_layers(self, make, option):
    made = []
    for number in (0.5, np.float32(0.5)):
      options = {'param_dtype': jnp.bfloat16, option: number}
      layer = make(FEATURES, FEATURES, rngs=nnx.Rngs(0), **options)
      params = nnx.state(layer, nnx.Param)
      x = jax.ShapeDtypeStruct((BATCH, TIME, FEATURES), jnp.bfloat16)
      made.append((rnnzoo.constrain(params), jax.eval_shape(layer, x)))
    for want, got in zip(*map(jax.tree.leaves, made), strict=True):
      self.assertEqual(got.dtype, want.dtype)
      self.assertEqual(got.dtype, jnp.bfloat16)

  def test_dropout(self):
    options = {'dropout_rate': np.float32(0.5), 'param_dtype': jnp.bfloat16}
    make = functools.partial(rnnzoo.Stack, rnnzoo.GRU, FEATURES, FEATURES)
    stack = make(num_layers=2, rngs=nnx.Rngs(0), **options)
    x = jnp.ones((BATCH, TIME, FEATURES), jnp.bfloat16)
    run = lambda x: stack(x, rngs=nnx.Rngs(dropout=1))
    self.assertEqual(jax.eval_shape(run, x).dtype, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ScaledCell(rnnzoo.Cell):
  """A cell of somebody else, with parameters of fewer axes than its gates."""

  input_gates = 1
  recurrent_gates = 1
  carry_names = ('h',)
  param_names = ('scale',)

  def update(self, params, x_gates, h_gates, carry):
    return (params['scale'] * jnp.tanh(x_gates[0] + h_gates[0]),)


class Scaled(rnnzoo.RecurrentLayer):

  def __init__(self, in_features, features, *, rngs, **options):
    options['cell_params'] = {'scale': nnx.Param(jnp.ones(features))}
    super().__init__(ScaledCell(), in_features, features, rngs=rngs, **options)


def make_translator():
  encoder = rnnzoo.GRU(FEATURES, 8, rngs=nnx.Rngs(0))
  return random_layers.seq2seq(encoder, 8, attention_features=4)


class EqualRanksTest(parameterized.TestCase):
  """Arrays of fewer axes are broadcast, in functions that are traced later too.

  Derivatives, rows of `jax.vmap`, and paths for another platform are traced
  when the caller's settings are back.
  """

  def check(self, loss, *arguments):
    """Traces a function of floating-point arrays in all ways, under 'raise'."""
    with jax.numpy_rank_promotion('raise'):
      one = lambda *arguments: jax.tree.leaves(loss(*arguments))[0].sum()
      ways = (
          jax.jit(jax.grad(jax.jit(one))),
          lambda *given: jax.jvp(one, given, given),
          jax.vmap(jax.jit(jax.grad(one))),
      )
      rows = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
      for way, given in zip(ways, (arguments, arguments, rows), strict=True):
        jax.eval_shape(way, *given)

  @parameterized.product(
      name=(*rnnzoo.LAYERS, 'Scaled', 'SLSTMBlock', 'Bidirectional', 'Stack'),
      implementation=('associative_scan', 'scan'),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_layers(self, name, implementation):
    make = dict(
        rnnzoo.LAYERS,
        Scaled=Scaled,
        Stack=functools.partial(rnnzoo.Stack, rnnzoo.GRU, norm='layer'),
        Bidirectional=functools.partial(rnnzoo.Bidirectional, rnnzoo.LSTM),
        SLSTMBlock=rnnzoo.SLSTMBlock,
    )[name]
    options = {'implementation': implementation}
    if name in rnnzoo.LAYERS:
      options['learn_initial_carry'] = True
    with jax.numpy_rank_promotion('raise'):
      layer = make(FEATURES, FEATURES, rngs=nnx.Rngs(0), **options)
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    reset = jnp.zeros((BATCH, TIME), bool)

    def loss(params, x):
      layer = nnx.merge(graphdef, params, rest)
      carry, y = layer.unroll(
          x, reset=reset, mask=~reset, seq_lengths=jnp.array([1, 3])
      )
      if name == 'Bidirectional':
        return y
      return layer.step(carry, y[:, -1], reset=reset[:, 0])[1]

    self.check(loss, params, jnp.ones((BATCH, TIME, FEATURES)))

  @parameterized.parameters('AGRU', 'MinGRU', 'Scaled')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_kernels(self, name):
    # MinGRU has a kernel from five steps on.
    features, time = 64, 5
    make = dict(rnnzoo.LAYERS, Scaled=Scaled)[name]
    x = jnp.ones((8, time, features))
    reset = jnp.zeros((8, time), bool)

    def loss(params, x):
      layer = nnx.merge(graphdef, params)
      return layer(x, reset=reset, mask=~reset).sum()

    if not abstract_gpu.RUNS:
      return
    where = abstract_gpu.device(self, 'NVIDIA H200')
    with jax.numpy_rank_promotion('raise'), where:
      layer = make(features, features, rngs=nnx.Rngs(0))
      graphdef, params = nnx.split(layer)
      traced = jax.jit(jax.grad(loss)).trace(params, x)
      text = traced.lower(lowering_platforms=('cpu', 'cuda')).as_text()
    self.assertIn('mosaic_gpu', text)

  def test_kernels_beside_wide_integers(self):
    layer = rnnzoo.MinGRU(
        FEATURES, FEATURES, implementation='pallas', rngs=nnx.Rngs(0)
    )
    x = jnp.ones((BATCH, TIME, FEATURES))
    reset = jnp.zeros((BATCH, TIME), bool)
    loss = lambda x: layer(x, reset=reset, mask=~reset).sum()
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion('strict'),
        jax.numpy_rank_promotion('raise'),
        abstract_gpu.device(self, 'NVIDIA H200'),
    ):
      jax.eval_shape(jax.grad(loss), x)

  def test_functions(self):
    a = jnp.ones((BATCH, TIME, FEATURES))
    reset = jnp.zeros((BATCH, TIME), bool)
    self.check(functools.partial(rnnzoo.linear_scan, reset=reset), a, a)
    params = {'recurrent_bias': jnp.zeros(FEATURES)}
    self.check(
        lambda *given: rnnzoo.unroll(rnnzoo.GRUCell(), *given, reset=reset)[1],
        params,
        jnp.ones((BATCH, TIME, 3, FEATURES)),
        jnp.ones((3, 1, FEATURES, FEATURES)),
        (jnp.zeros((BATCH, FEATURES)),),
    )

  @pytest.mark.slow
  def test_doors(self):
    x = jnp.ones((TIME, BATCH, FEATURES))
    layer = linen.GRU(in_features=FEATURES, features=FEATURES)
    with jax.numpy_rank_promotion('raise'):
      variables = layer.init(jax.random.key(0), x)
      scanned = rnnzoo.ScannedRNN(FEATURES, FEATURES, rngs=nnx.Rngs(0))
      carry = scanned.initialize_carry(BATCH, FEATURES)
      scanned(carry, (x, jnp.zeros(x.shape[:2], bool)))
    self.check(layer.apply, variables, x)

  @pytest.mark.slow
  def test_verify(self):
    x = jnp.ones((BATCH, TIME, FEATURES))
    with jax.numpy_rank_promotion('raise'):
      rnnzoo.verify(rnnzoo.GRU(FEATURES, FEATURES, rngs=nnx.Rngs(0)), x)

  @pytest.mark.slow
  def test_models(self):
    tokens = jnp.ones((BATCH, TIME), jnp.int32)
    lengths = jnp.array([1, 3])
    rngs = nnx.Rngs(0)
    with jax.numpy_rank_promotion('raise'):
      model = models.LanguageModel(rnnzoo.MinGRU, 5, FEATURES, rngs=rngs)
      jax.eval_shape(model, tokens)
      model = models.SequenceClassifier(
          rnnzoo.GRU(FEATURES, 8, rngs=rngs), 3, rngs=rngs
      )
      x = jnp.ones((BATCH, TIME, FEATURES))
      mask = jnp.ones((BATCH, TIME), bool)
      model(x, seq_lengths=lengths, mask=mask)
      model = make_translator()
      jax.eval_shape(model, tokens, tokens, source_lengths=lengths)
      for num_beams in (1, 3):
        decode = functools.partial(
            model.decode, max_length=5, num_beams=num_beams
        )
        jax.eval_shape(decode, tokens, lengths)


if __name__ == '__main__':
  absltest.main()
