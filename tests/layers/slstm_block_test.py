"""xLSTM's sLSTM block against a float64 loop over steps."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import rnnzoo
from rnnzoo.layers import xlstm_parts
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, FEATURES, HEADS, WIDTH = 3, 7, 6, 2, 4
LENGTHS = np.array([7, 3, 0], np.int32)

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, FEATURES)).astype(np.float32)
reset = rng.random((BATCH, TIME)) < 0.3
mask = rng.random((BATCH, TIME)) < 0.6
valid = np.arange(TIME) < LENGTHS[:, None]

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
equal = np.testing.assert_array_equal

XLSTM = {}
TIREX = {
    'conv_width': 0,
    'norm': 'rms',
    'mlp_activation': 'silu',
    'mlp_features': 5,
    'max_forget': 0.5,
    'min_normalizer': 0,
}
LAYER_ALONE = {'residual': False}
NO_MLP = {'mlp_features': 0, 'conv_width': 2}
VARIANTS = (XLSTM, TIREX, LAYER_ALONE, NO_MLP)


def make(**options):
  options = {'num_heads': HEADS} | options
  return random_layers.make(rnnzoo.SLSTMBlock, FEATURES, FEATURES, **options)


def carry_of(block, *batch_shape):
  """A random carry, with n >= 1."""
  rng = np.random.default_rng(1)
  draw = lambda c: rng.standard_normal(c.shape).astype(np.float32)
  h, c, n, m, *window = map(draw, block.initial_carry(batch_shape))
  return (h, c, 1 + n**2, m, *window)


def normed(values, scale, kind):
  centred = values if kind == 'rms' else values - values.mean(-1, keepdims=True)
  epsilon = 1e-6 if kind == 'rms' else 1e-5
  return (
      scale * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
  )


def loop(block, x, carry, reset, mask, options):
  """The block's equations in numpy, for one sequence."""
  p = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(block)))
  kind = options.get('norm', 'layer')
  size = FEATURES // HEADS
  width = options.get('conv_width', WIDTH)
  sigmoid = special.expit
  h, c, n, m = map(np.float64, carry[:4])
  past = list(np.float64(carry[4])) if width else []
  outputs = []
  for x_t, reset_t, mask_t in zip(np.float64(x), reset, mask, strict=True):
    if reset_t:
      h, c, n, m = (np.zeros(FEATURES),) * 4
      past = [np.zeros(FEATURES) for _ in past]
    if not mask_t:
      outputs.append(np.zeros(FEATURES))
      continue
    u = v = normed(x_t, p['norm']['scale'], kind) if 'norm' in p else x_t
    if width:
      seen = [*past, u]
      kernel = p['convolution']['kernel']
      v = p['convolution']['bias'] + (kernel * np.stack(seen)).sum(0)
      v, past = v * sigmoid(v), seen[1:]
    gates = []
    for gate, source in enumerate((v, v, u, u)):
      heads = [
          source[k * size :][:size] @ p['gates']['kernel'][gate, k]
          + h[k * size :][:size] @ p['recurrent_kernel'][gate, k]
          for k in range(HEADS)
      ]
      gates.append(np.concatenate(heads) + p['gates']['bias'][gate])
    i, f, z, o = gates
    if options.get('max_forget') is not None:
      f = np.minimum(f, options['max_forget'])
    l = np.log(sigmoid(f)) + m
    m = np.where(n == 0, i, np.maximum(i, l))
    keep = np.where(n == 0, 0, np.exp(l - m))
    c = keep * c + np.exp(i - m) * np.tanh(z)
    n = np.maximum(keep * n + np.exp(i - m), options.get('min_normalizer', 1))
    h = sigmoid(o) * c / n
    y = normed(h.reshape(HEADS, size), 1.0, 'layer').reshape(-1)
    y = y * p['head_norm']['scale']
    if 'norm' in p:
      y = x_t + y
    if 'mlp' in p:
      inner = normed(y, p['mlp']['norm']['scale'], kind)
      gate, up = np.split(inner @ p['mlp']['up']['kernel'], 2)
      if options.get('mlp_activation') == 'silu':
        gate = gate * sigmoid(gate)
      else:
        gate = gate * (1 + special.erf(gate / np.sqrt(2))) / 2
      y = y + (gate * up) @ p['mlp']['down']['kernel']
    outputs.append(y)
  return (h, c, n, m, *([np.stack(past)] if width else [])), np.stack(outputs)


def loops(block, x, carry, reset, mask, options):
  rows = [
      loop(block, x[b], [c[b] for c in carry], reset[b], mask[b], options)
      for b in range(len(x))
  ]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


class SLSTMBlockTest(parameterized.TestCase):

  @parameterized.parameters(*VARIANTS)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_equations(self, **options):
    block = make(**options)
    carry = carry_of(block, BATCH)

    @reference.jit
    def run(block, carry):
      return (
          block.unroll(x),
          block.unroll(x, initial_carry=carry, reset=reset, mask=mask),
          block.unroll(x, initial_carry=carry, seq_lengths=LENGTHS),
      )

    plain, masked, short = run(block, carry)
    empty = block.initial_carry((BATCH,))
    never, always = np.zeros_like(reset), np.ones_like(mask)
    jax.tree.map(close, plain, loops(block, x, empty, never, always, options))
    jax.tree.map(close, masked, loops(block, x, carry, reset, mask, options))
    jax.tree.map(close, short, loops(block, x, carry, never, valid, options))

  @parameterized.parameters(XLSTM, {'dtype': jnp.bfloat16})
  @pytest.mark.slow
  def test_step_is_unroll(self, **options):
    block = make(**options)
    carry = carry_of(block, BATCH)
    options = {'initial_carry': carry, 'reset': reset}
    want_carry, want = reference.jit(lambda block: block.unroll(x, **options))(
        block
    )
    step = reference.jit(
        lambda block, *args: block.step(*args[:2], reset=args[2])
    )
    for t in range(TIME):
      carry, y = step(block, carry, x[:, t], reset[:, t])
      tolerance = 0.05 if 'dtype' in options else 2e-5
      close(np.float32(y), np.float32(want[:, t]), atol=tolerance)
    jax.tree.map(close, carry, want_carry)

  @pytest.mark.slow
  def test_bfloat16_with_heads_of_4(self):
    # jax 0.10.2 has no product of these sizes on a CPU with float32 sums.
    make = functools.partial(
        random_layers.make, rnnzoo.SLSTMBlock, 8, 8, num_heads=2
    )
    x = np.ones((8, 6, 8), np.float32)
    grad = reference.jit(
        nnx.grad(lambda block, x: jnp.sum(block(x).astype(jnp.float32)))
    )
    found = grad(make(dtype=jnp.bfloat16), x)['gates']['kernel'][...]
    want = grad(make(), x)['gates']['kernel'][...]
    scale = np.abs(want).max()
    close(found / scale, want / scale, atol=0.1)

  @pytest.mark.slow
  def test_parts_of_a_sequence(self):
    block = make()
    run = reference.jit(
        lambda block, x, carry, reset, mask: block.unroll(
            x, initial_carry=carry, reset=reset, mask=mask
        )
    )
    whole, y = run(block, x, None, reset, mask)
    carry, parts = None, []
    # Parts shorter than the convolution, too.
    for start, stop in ((0, 1), (1, 3), (3, 7)):
      part = slice(start, stop)
      carry, y_part = run(
          block, x[:, part], carry, reset[:, part], mask[:, part]
      )
      parts.append(y_part)
    close(np.concatenate(parts, 1), y)
    jax.tree.map(close, carry, whole)

  @pytest.mark.slow
  def test_a_reset_hides_the_last_episode(self):
    block = make()
    resets = np.zeros((1, TIME), bool)
    resets[0, 3] = True
    run = reference.jit(lambda block, x: block.unroll(x, reset=resets))
    broken = x[:1].copy()
    broken[0, :3] = np.nan
    (carry, y), (fresh, y_fresh) = run(block, broken), run(block, x[:1])
    equal(y[0, 3:], y_fresh[0, 3:])
    jax.tree.map(equal, carry, fresh)
    grad = reference.jit(
        jax.grad(lambda x: jnp.sin(block(x, reset=resets))[:, 3:].sum())
    )(x[:1])
    equal(grad[0, :3], 0)
    self.assertGreater(np.abs(grad[0, 3:]).min(), 0)

  @pytest.mark.slow
  def test_padding_has_no_effect(self):
    unroll, state = random_layers.pure(make(), 'unroll')

    def loss(state, x):
      carry, y = unroll(state, x, mask=mask)
      return sum(jnp.sin(c).sum() for c in carry) + jnp.sin(y).sum(), y

    run = reference.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, y), grads = run(state, x)
    broken = np.where(mask[..., None], x, np.nan)
    (other, _), other_grads = run(state, broken)
    equal(value, other)
    equal(np.asarray(y)[~mask], 0)
    equal(np.asarray(grads[1])[~mask], 0)
    jax.tree.map(equal, grads[0], other_grads[0])

  @pytest.mark.slow
  def test_reverse_where_time_is_first(self):
    block = make()
    carry = carry_of(block, BATCH)
    # A boundary before step t is one after step t - 1.
    boundary = np.concatenate([reset[:, 1:], np.zeros((BATCH, 1), bool)], 1)
    # A reset at the first step of padding is no boundary.
    first = np.arange(TIME) == LENGTHS[:, None] - 1
    unbounded = np.where(first, False, boundary)
    swap = lambda a: np.swapaxes(a, 0, 1)

    @reference.jit
    def run(block):
      flipped = block.unroll(
          x[:, ::-1],
          initial_carry=carry,
          reset=(unbounded & valid)[:, ::-1],
          mask=(mask & valid)[:, ::-1],
      )
      return flipped, block.unroll(
          swap(x),
          initial_carry=carry,
          reset=swap(reset),
          mask=swap(mask),
          seq_lengths=LENGTHS,
          reverse=True,
          time_major=True,
      )

    (want_carry, want), (got_carry, got) = run(block)
    close(swap(got), want[:, ::-1])
    jax.tree.map(close, got_carry, want_carry)

  @pytest.mark.slow
  def test_gradients(self):
    with jax.enable_x64(True):
      block = make(param_dtype=jnp.float64)
      carry = jax.tree.map(np.float64, carry_of(block, BATCH))
      weights = np.random.default_rng(2).standard_normal(x.shape)
      unroll, state = random_layers.pure(block, 'unroll')

      @reference.jit
      def loss(state, x, carry):
        final, y = unroll(state, x, initial_carry=carry, reset=reset, mask=mask)
        return jnp.sum(weights * y) + sum(jnp.sin(c).sum() for c in final)

      arguments = (state, np.float64(x), carry)
      options = {'order': 1, 'modes': ['rev'], 'atol': 0, 'rtol': 1e-7}
      test_util.check_grads(loss, arguments, **options, eps=1e-6)

  @parameterized.parameters('associative_scan', 'scan')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_paths_and_transforms(self, implementation):
    block, other = make(), make(implementation=implementation)

    @reference.jit
    def run(block, other):
      one = lambda x, r: other.unroll(x, reset=r)
      got = one(x, reset), jax.vmap(one)(x, reset), one(x[0], reset[0])
      return block.unroll(x, reset=reset), got

    want, (whole, each, alone) = run(block, other)
    alone_want = jax.tree.map(lambda a: a[0], want)
    jax.tree.map(close, (whole, each, alone), (want, want, alone_want))

  def test_inside_other_layers(self):
    new = lambda cls, **options: nnx.eval_shape(
        lambda: cls(rnnzoo.SLSTMBlock, 8, 8, rngs=nnx.Rngs(0), **options)
    )
    shape = lambda *args: jax.eval_shape(lambda f, *a: f(*a), *args).shape
    ones = jnp.ones((2, 5, 8))
    self.assertEqual(shape(new(rnnzoo.Stack, num_layers=2), ones), (2, 5, 8))
    self.assertEqual(shape(new(rnnzoo.Bidirectional), ones), (2, 5, 16))
    carry = rnnzoo.ScannedRNN.initialize_carry(2, 8, rnnzoo.SLSTMBlock)
    options = {'layer': rnnzoo.SLSTMBlock}
    scanned = nnx.eval_shape(
        lambda: rnnzoo.ScannedRNN(8, 8, rngs=nnx.Rngs(0), **options)
    )
    run = lambda layer, carry, x: layer(carry, x)[1]
    rollout = jnp.ones((5, 2, 8)), jnp.zeros((5, 2))
    y = jax.eval_shape(run, scanned, carry, rollout)
    self.assertEqual(y.shape, (5, 2, 8))

  def test_start(self):
    options = {'num_heads': 2, 'block_index': 1, 'num_blocks': 2}
    block, same = (
        cls(8, 8, rngs=nnx.Rngs(0), **options)
        for cls in (rnnzoo.SLSTMBlock, rnnzoo.SLSTM)
    )
    equal(block.recurrent_kernel[...], 0)
    bias = block.gates.bias[...]
    equal(bias[jnp.array([0, 2, 3])], 0)
    equal(bias, same.bias[...])
    self.assertEqual(block.mlp.up.kernel.shape, (8, 128))
    # N(0, 2/(5 F)) and, of L = 2 blocks, N(0, 4/(L² F)), within five times the
    # rounding of so many draws.
    for layer, want in ((block.mlp.up, 0.4), (block.mlp.down, 1.0)):
      kernel = layer.kernel[...]
      spread = np.std(kernel) / np.sqrt(want / 8)
      self.assertAlmostEqual(spread, 1, delta=5 / np.sqrt(2 * kernel.size))

  @pytest.mark.slow
  def test_no_sequences_and_no_steps(self):
    block = make()
    run = reference.jit(lambda block, x: block.unroll(x))
    self.assertEqual(run(block, x[:0])[1].shape, (0, TIME, FEATURES))
    carry, y = run(block, x[:, :0])
    self.assertEqual(y.shape, (BATCH, 0, FEATURES))
    jax.tree.map(lambda c: equal(c, 0), carry)

  def test_errors(self):
    block = make()
    new = functools.partial(rnnzoo.SLSTMBlock, 8, rngs=nnx.Rngs(0))
    carry = block.initial_carry((BATCH,))
    cases = (
        (lambda: new(4), 'as many inputs as features.*nnx.Linear'),
        (lambda: new(8, num_heads=3), 'divisible by num_heads'),
        (lambda: new(8, conv_width=1), 'conv_width must be 0 or'),
        (lambda: new(8, conv_width='4'), 'conv_width must be 0 or'),
        (lambda: new(8, norm='batch'), 'norm must be one of'),
        (lambda: new(8, mlp_activation='relu'), 'mlp_activation must be'),
        (lambda: new(8, mlp_features=-1), 'mlp_features must be'),
        (lambda: new(8, mlp_features=8, residual=False), 'needs residual=True'),
        (lambda: new(8, min_normalizer=2), 'min_normalizer must be'),
        (lambda: new(8, block_index=1), 'block_index must be'),
        (lambda: block(x[..., :2]), 'SLSTMBlock expects x'),
        (lambda: block(x, initial_carry=carry[:4]), 'h, c, n, m, window'),
        (lambda: block.step(None, x[:, 0]), 'carry must be a tuple'),
        (
            lambda: block.step(carry, x[:, 0], reset=reset),
            'reset must be a bool array',
        ),
        (lambda: block(x, rngs=0), 'rngs must be'),
    )
    for call, message in cases:
      with self.assertRaisesRegex(ValueError, message):
        call()
    with self.assertRaisesRegex(TypeError, 'no argument'):
      new(8, hidden_size=3)


class LagsTest(parameterized.TestCase):

  def test_masks_and_resets(self):
    x = np.arange(1.0, 6).reshape(1, 5, 1)
    window = np.array([-2.0, -1.0]).reshape(1, 2, 1)
    reset = np.array([[0, 0, 0, 1, 0]], bool)
    mask = np.array([[1, 0, 1, 0, 1]], bool)
    for flags, want in (
        ((None, None), [[-1, 1, 2, 3, 4, 5], [-2, -1, 1, 2, 3, 4]]),
        ((reset, None), [[-1, 1, 2, 0, 4, 5], [-2, -1, 1, 0, 0, 4]]),
        ((None, mask), [[-1, 1, 1, 3, 3, 5], [-2, -1, -1, 1, 1, 3]]),
        ((reset, mask), [[-1, 1, 1, 0, 0, 5], [-2, -1, -1, 0, 0, 0]]),
    ):
      got = xlstm_parts.lags(x, window, *flags)
      equal(np.stack(got)[:, 0, :, 0], want)


class LeastNormalizerTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_acts_on_a_carry_below_it_only(self):
    free = random_layers.make('SLSTM', 3, 4, num_heads=2, min_normalizer=0)
    bound = random_layers.make('SLSTM', 3, 4, num_heads=2)
    run = reference.jit(
        lambda layer, carry: layer.unroll(x[..., :3], initial_carry=carry)
    )
    jax.tree.map(equal, run(free, None), run(bound, None))
    carry = [np.full((BATCH, 4), v, np.float32) for v in (0, 0.2, 0.1, 3.0)]
    gates = np.float32([-2, 9, 1, 0]).reshape(1, 1, 4, 1)
    x_gates = np.broadcast_to(gates, (BATCH, 1, 4, 4))
    kernel = np.zeros((4, 1, 4, 4), np.float32)
    for least in (0.0, 1.0):
      cell = rnnzoo.SLSTMCell(min_normalizer=least)
      final, _ = rnnzoo.unroll(cell, {}, x_gates, kernel, tuple(carry))
      # c' = 0.2 f' + e^-5 tanh(1), n' = 0.1 f' + e^-5 or 1; sigmoid(o) = 1/2.
      keep, admit = special.expit(9.0), np.exp(-5.0)
      n = max(0.1 * keep + admit, least)
      close(final[0], 0.5 * (0.2 * keep + admit * np.tanh(1)) / n)


if __name__ == '__main__':
  absltest.main()
