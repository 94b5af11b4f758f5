"""Stacks, layers in both directions, and the classifier on top of them."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import models
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 5, 4, 4
LENGTHS = np.array([5, 2, 0], np.int32)

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
valid = np.arange(TIME) < LENGTHS[:, None]
reset = rng.random((BATCH, TIME)) < 0.3

close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
equal = np.testing.assert_array_equal


def make(layer=rnnzoo.GRU, **options):
  return random_layers.make(rnnzoo.Stack, layer, IN, FEATURES, **options)


def fresh(cls=rnnzoo.Stack, layer=rnnzoo.GRU, **options):
  """A stack, or a layer in both directions, with parameters of its own."""
  return cls(layer, IN, FEATURES, rngs=nnx.Rngs(0), **options)


def two_ways():
  return fresh(rnnzoo.Bidirectional)


def carry_of(module, *batch_shape):
  """A random carry with the structure of the module's own."""
  # The same in whatever order the tests run.
  rng = np.random.default_rng(1)
  draw = lambda c: rng.standard_normal(c.shape).astype(np.float32)
  return jax.tree.map(draw, module.initial_carry(batch_shape))


def every_step(layer, num_tokens=None):
  """Returns a model that answers after every step, and what it reads."""
  options = {'every_step': True, 'num_tokens': num_tokens}
  model = models.SequenceModel(layer, 2, **options, rngs=nnx.Rngs(0))
  tokens = np.random.default_rng(0).integers(0, num_tokens or 1, x.shape[:2])
  return model, jnp.asarray(tokens if num_tokens else x)


def _pieces(begins):
  """Yields (row, start, stop) of the pieces that begin where flags are set."""
  for row, flags in enumerate(begins):
    starts = np.flatnonzero(flags)
    for start, stop in zip(starts, [*starts[1:], len(flags)], strict=True):
      yield row, int(start), int(stop)


class StackTest(parameterized.TestCase):

  def test_is_one_layer_over_another(self):
    stack = make(rnnzoo.LSTM, num_layers=2)
    carry = carry_of(stack, BATCH)

    @reference.jit
    def run(stack, carry):
      options = {'reset': reset, 'seq_lengths': LENGTHS}
      got = stack.unroll(x, initial_carry=carry, **options)
      first, y = stack.layers[0].unroll(x, initial_carry=carry[0], **options)
      second, y = stack.layers[1].unroll(y, initial_carry=carry[1], **options)
      return got, ((first, second), y)

    jax.tree.map(equal, *run(stack, carry))

  @parameterized.parameters('layer', 'batch')
  def test_norm_of_a_large_mean(self, norm):
    (normalize,) = fresh(norm=norm).norms
    wide = 3e3 + np.random.default_rng(0).standard_normal((64, 64, FEATURES))
    x = wide.astype(np.float32)
    axes = -1 if norm == 'layer' else (0, 1)
    exact = x.astype(np.float64)
    exact = exact - exact.mean(axes, keepdims=True)
    exact /= np.sqrt((exact**2).mean(axes, keepdims=True) + normalize.epsilon)
    np.testing.assert_allclose(normalize(x), exact, atol=0.01)

  def test_one_factory_for_each_level(self):
    factories = [
        rnnzoo.LSTM,
        functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU),
        functools.partial(rnnzoo.SLSTM, num_heads=1),
    ]
    stack = make(factories, num_layers=3)
    kinds = [type(level) for level in stack.layers]
    self.assertEqual(kinds, [rnnzoo.LSTM, rnnzoo.Bidirectional, rnnzoo.SLSTM])
    self.assertEqual(stack.layers[2].in_features, 2 * FEATURES)
    self.assertEqual(stack.out_features, FEATURES)
    shapes = jax.tree.map(jnp.shape, stack.initial_carry((7,)))
    self.assertEqual(
        jax.tree.map(len, shapes, is_leaf=lambda c: c and type(c[0]) is int),
        ((2, 2), ((2,), (2,)), (2, 2, 2, 2)),
    )

  @parameterized.parameters(
      {'cls': rnnzoo.DenseStack, 'norm': 'layer'},
      {'norm': 'batch', 'num_layers': 1},
      {'norm': 'layer', 'residual': True},
      {'norm': 'batch', 'residual': True, 'norm_first': True},
  )
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_steps_are_an_unroll(self, cls=rnnzoo.Stack, num_layers=2, **options):
    options['num_layers'] = num_layers
    stack = random_layers.make(cls, rnnzoo.GRU, IN, FEATURES, **options)
    carry = carry_of(stack, BATCH)

    @reference.jit
    def run(stack, carry):
      want = stack.unroll(x, initial_carry=carry, reset=reset)
      outputs = []
      for t in range(TIME):
        carry, y = stack.step(carry, x[:, t], reset=reset[:, t])
        outputs.append(y)
      return (carry, jnp.stack(outputs, axis=1)), want

    jax.tree.map(close, *run(stack, carry))

  @parameterized.parameters(
      (rnnzoo.Stack, True, {'norm': 'layer', 'residual': True}),
      (rnnzoo.DenseStack, True, {'norm': 'layer'}),
      (rnnzoo.Stack, False, {'norm': 'batch', 'norm_first': True}),
      (rnnzoo.DenseStack, False, {}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_padding(self, cls, time_major, options):
    stack = random_layers.make(
        cls, rnnzoo.GRU, IN, FEATURES, num_layers=2, **options
    )
    swap = (lambda a: a.swapaxes(0, 1)) if time_major else lambda a: a

    @reference.jit
    def run(stack, x):
      def loss(x):
        final, y = stack.unroll(
            swap(x), seq_lengths=LENGTHS, time_major=time_major
        )
        return jnp.sum(y**2), (final, swap(y))

      gradient, (final, y) = jax.grad(loss, has_aux=True)(x)
      return gradient, final, y, stack.unroll(x[1, : LENGTHS[1]])

    bad = np.where(valid[..., None], x, np.nan)
    gradient, final, y, (short, outputs) = run(stack, bad)
    close(y[1, : LENGTHS[1]], outputs)
    equal(np.asarray(y)[~valid], 0)
    jax.tree.map(lambda a, b: close(a[1], b), final, short)
    equal(np.asarray(gradient)[~valid], 0)
    self.assertTrue(np.isfinite(gradient).all())

  def test_residual_where_sizes_agree(self):
    plain = random_layers.make(rnnzoo.Stack, rnnzoo.GRU, 3, 4, num_layers=2)
    residual = random_layers.make(
        rnnzoo.Stack, rnnzoo.GRU, 3, 4, num_layers=2, residual=True
    )
    below = plain.layers[0](x[..., :3])
    want = below + plain.layers[1](below)
    close(residual(x[..., :3]), want)


class DropoutTest(parameterized.TestCase):

  def test_needs_rngs(self):
    stack = make(num_layers=2, dropout_rate=0.5)
    want = make(num_layers=2)(x)
    equal(stack(x), want)
    dropped = stack(x, rngs=nnx.Rngs(dropout=0))
    self.assertGreater(np.abs(dropped - want).max(), 1e-3)
    equal(stack(x, rngs=nnx.Rngs(dropout=0)), dropped)

  def test_none_above_the_last(self):
    stack = make(num_layers=1, dropout_rate=0.5)
    equal(stack(x, rngs=nnx.Rngs(dropout=0)), stack(x))

  @parameterized.product(shared=(False, True), time_major=(False, True))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_masks(self, shared, time_major):
    # The upper layer passes its input on, nearly: h' = x + 0 h for x >= 0.
    stack = random_layers.make(
        rnnzoo.Stack,
        rnnzoo.IndRNN,
        32,
        32,
        num_layers=2,
        dropout_rate=0.25,
        share_dropout_over_time=shared,
    )
    for layer in stack.layers:
      layer.kernel[...] = jnp.eye(32)[None]
      layer.bias[...] = jnp.zeros((1, 32))
      layer.recurrent_kernel[...] = jnp.zeros((1, 32, 1, 1))
    shape = (TIME, 20, 32) if time_major else (20, TIME, 32)
    y = stack(jnp.ones(shape), rngs=nnx.Rngs(dropout=0), time_major=time_major)
    y = np.asarray(y.swapaxes(0, 1) if time_major else y)
    self.assertSetEqual(set(np.unique(y)), {0, np.float32(1 / 0.75)})
    self.assertBetween(np.mean(y == 0), 0.2, 0.3)
    is_same = (y == y[:, :1]).all()
    self.assertEqual(is_same, shared)
    self.assertFalse((y == y[:1]).all())  # One mask for each sequence.


class ModesTest(parameterized.TestCase):
  """`train()` and `eval()` of flax.nnx."""

  def fresh(self, **options):
    options = {'num_layers': 2, 'dropout_rate': 0.5, 'norm': 'batch'} | options
    return fresh(**options)

  def mean(self, stack):
    return np.asarray(stack.norms[0].mean[...])

  @parameterized.parameters(False, True)
  def test_train_needs_rngs(self, inside):
    stack = self.fresh()
    model = stack
    if inside:
      model = models.SequenceClassifier(stack, 3, rngs=nnx.Rngs(0))
    model.train()
    with self.assertRaisesRegex(
        ValueError, r'stack\(x, rngs=nnx.Rngs\(dropout=key\)\)'
    ):
      model(x)
    model(x, rngs=nnx.Rngs(dropout=0))
    self.assertGreater(np.abs(self.mean(stack)).max(), 0)

  def test_eval_ignores_rngs(self):
    stack = self.fresh()
    want = stack(x)
    stack.train()
    stack.eval()
    equal(stack(x, rngs=nnx.Rngs(dropout=0)), want)
    equal(self.mean(stack), 0)

  def test_train_without_dropout(self):
    # Nothing random: the call is complete, and says to train.
    stack = self.fresh(dropout_rate=0.0)
    stack.train()
    stack(x)
    self.assertGreater(np.abs(self.mean(stack)).max(), 0)

  def test_views(self):
    stack = self.fresh()
    want = stack(x)
    view = nnx.view(stack, deterministic=True, use_running_average=True)
    equal(view(x, rngs=nnx.Rngs(0)), want)
    self.assertIsNone(stack.deterministic)

  def test_same_paths_and_static_part(self):
    stack, told = self.fresh(), self.fresh()
    told.eval()
    paths = lambda s: [path for path, _ in nnx.to_flat_state(nnx.state(s))]
    self.assertEqual(paths(stack), paths(told))
    self.assertEqual(nnx.graphdef(stack), nnx.graphdef(self.fresh()))
    told.train()
    graphdef, state = nnx.split(told)
    with self.assertRaisesRegex(ValueError, 'After train'):
      nnx.merge(graphdef, state)(x)

  @parameterized.parameters('int', 'key')
  def test_rngs_are_rngs(self, kind):
    rngs = {'int': 0, 'key': jax.random.key(0)}[kind]
    with self.assertRaisesRegex(ValueError, 'rngs must be an nnx.Rngs'):
      self.fresh()(x, rngs=rngs)
    with self.assertRaisesRegex(ValueError, r'nnx.Rngs\(0\) would work'):
      rnnzoo.Stack(rnnzoo.GRU, IN, FEATURES, rngs=rngs)


class NormTest(parameterized.TestCase):

  def statistics(self, stack):
    return stack.norms[0].mean[...], stack.norms[0].var[...]

  def fresh(self, **options):
    return fresh(norm='batch', **options)

  def test_batch_statistics_leave_padding_out(self):
    stack = self.fresh()
    h = np.asarray(stack.layers[0](x, seq_lengths=LENGTHS))[valid]
    y = np.asarray(stack(x, seq_lengths=LENGTHS, rngs=nnx.Rngs(0)))
    want = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5)
    np.testing.assert_allclose(y[valid], want, rtol=1e-4, atol=1e-4)
    equal(y[~valid], 0)
    mean, var = self.statistics(stack)
    np.testing.assert_allclose(mean, 0.1 * h.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(var, 0.9 + 0.1 * h.var(0), rtol=1e-4)

  def test_first(self):
    stack = fresh(num_layers=2, norm='layer', norm_first=True, residual=True)
    lowest, second = stack.layers
    first, last = stack.norms
    below = lowest(x) + x  # As large as the output.
    want = last(second(first(below)) + below)
    np.testing.assert_allclose(stack(x), want, rtol=1e-5, atol=1e-5)
    with self.assertRaisesRegex(ValueError, "norm='layer' would work"):
      fresh(norm_first=True)

  @parameterized.parameters(0.5, np.float32(0.75))
  def test_momentum_of_running_averages(self, momentum):
    stack = self.fresh(norm_momentum=momentum)
    h = np.asarray(stack.layers[0](x)).reshape(-1, FEATURES)
    stack(x, rngs=nnx.Rngs(0))
    mean, var = self.statistics(stack)
    new = 1 - momentum
    np.testing.assert_allclose(mean, new * h.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(var, momentum + new * h.var(0), rtol=1e-4)

  @parameterized.parameters(0, 1, -0.1, 1.5, True, 'much', 1 - 1e-9, np.nan)
  def test_momentum_is_refused(self, momentum):
    with self.assertRaisesRegex(
        ValueError, 'norm_momentum must be above 0 and below 1, got.*0.9 would'
    ):
      self.fresh(norm_momentum=momentum)

  @parameterized.parameters(None, 'layer')
  def test_momentum_without_averages_is_refused(self, norm):
    with self.assertRaisesRegex(
        ValueError, f"norm_momentum=0.9 needs norm='batch'.*norm={norm!r}"
    ):
      fresh(norm=norm, norm_momentum=0.9)

  def test_batch_without_rngs_changes_nothing(self):
    stack = self.fresh()
    y = stack(x)
    equal(self.statistics(stack), (np.zeros(FEATURES), np.ones(FEATURES)))
    close(y, stack.layers[0](x) / np.sqrt(np.float32(1 + 1e-5)))

  @parameterized.parameters(((2, 3), True), ((0, 3), False))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_batch_without_a_valid_step_has_finite_gradients(self, lead, padded):
    stack = self.fresh(num_layers=2)
    lengths = jnp.zeros(lead[:1], int) if padded else None

    def loss(stack, x):
      carry, y = stack.unroll(x, seq_lengths=lengths, rngs=nnx.Rngs(1))
      return sum(jnp.sum(z) for z in jax.tree.leaves((carry, y)))

    grad = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    gradients = grad(stack, jnp.ones((*lead, IN)))
    for gradient in jax.tree.leaves(gradients):
      equal(gradient, 0)
    for norm in stack.norms:
      equal(norm.mean[...], 0)
      equal(norm.var[...], 1)


class BidirectionalTest(parameterized.TestCase):

  @parameterized.product(reverse=(False, True))
  @pytest.mark.slow
  def test_is_two_layers(self, reverse):
    pair = random_layers.make(rnnzoo.Bidirectional, rnnzoo.LSTM, IN, FEATURES)
    carry = carry_of(pair, BATCH)

    @reference.jit
    def run(pair, carry):
      options = {'reset': reset, 'seq_lengths': LENGTHS}
      got = pair.unroll(x, initial_carry=carry, reverse=reverse, **options)
      first, y = pair.forward.unroll(
          x, initial_carry=carry[0], reverse=reverse, **options
      )
      second, z = pair.backward.unroll(
          x, initial_carry=carry[1], reverse=not reverse, **options
      )
      return got, ((first, second), jnp.concatenate([y, z], axis=-1))

    jax.tree.map(equal, *run(pair, carry))

  def test_in_a_stack(self):
    stack = make(
        functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU), num_layers=2
    )
    self.assertEqual(stack.out_features, 2 * FEATURES)
    self.assertEqual(stack.features, FEATURES)
    self.assertEqual(stack.layers[1].features, FEATURES)
    self.assertEqual(stack.layers[1].in_features, 2 * FEATURES)
    want = stack.layers[1](stack.layers[0](x))
    close(stack(x), want)
    with self.assertRaises(NotImplementedError):
      stack.step(stack.initial_carry((BATCH,)), x[:, 0])


class SequenceClassifierTest(parameterized.TestCase):

  def test_refuses_a_backward_half_that_saw_one_step(self):
    both = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU)
    below = fresh(layer=[both, rnnzoo.GRU], num_layers=2)
    for backbone in (two_ways(), below):
      with self.assertRaisesRegex(ValueError, "pooling='mean' would work"):
        models.SequenceClassifier(backbone, num_classes=7, rngs=nnx.Rngs(0))

  @pytest.mark.slow
  def test_reads_the_last_valid_output(self):
    backbone = make(num_layers=2)
    model = models.SequenceClassifier(backbone, num_classes=7, rngs=nnx.Rngs(0))
    lengths = np.array([5, 2, 1], np.int32)

    @jax.jit
    def run(x):
      y = backbone(x)
      last = model.head(y[np.arange(BATCH), lengths - 1])
      return (
          (model(x, seq_lengths=lengths), model(x), model(x[0])),
          (last, model.head(y[:, -1]), model.head(y[0, -1])),
      )

    found, want = run(x)
    jax.tree.map(close, found, want)
    self.assertEqual(want[0].shape, (BATCH, 7))


class SequenceModelTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_a_mask_leaves_steps_out(self):
    model = models.SequenceModel(
        rnnzoo.GRU(2, 3, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    mask = np.array(
        [[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]], bool
    )
    holes = jnp.where(mask[..., None], x, jnp.nan)

    @jax.jit
    def run():
      kept = [model(x[row, :4][mask[row, :4]]) for row in range(3)]
      none = model(holes, mask=np.zeros((3, 6), bool))
      return model(holes, mask=mask, seq_lengths=jnp.full(3, 4)), kept, none

    y, kept, none = run()
    np.testing.assert_allclose(y, kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(none, [model.head.bias[...]] * 3)

  def test_means_of_outputs(self):
    rngs, gru = nnx.Rngs(0), rnnzoo.GRU(2, 3, rngs=nnx.Rngs(0))
    model = models.SequenceModel(gru, 2, pooling='mean', rngs=rngs)
    x = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    lengths, mask = np.array([6, 4, 0]), np.ones((3, 6), bool)
    mask[0, 3] = False
    reset = np.zeros((3, 6), bool)
    reset[0, 2] = reset[1, 5] = True  # The second one is after the end.
    valid = mask & (np.arange(6) < lengths[:, None])
    holes = np.where(valid[..., None], x, np.nan)
    holes[0, :2] = np.nan  # Before a reset.
    valid[0, :2] = False

    @jax.jit
    def run():
      y = gru(holes, reset=reset, seq_lengths=lengths, mask=mask)
      pick = jnp.where(valid[..., None], y, 0)
      mean = jnp.sum(pick, 1) / jnp.maximum(valid.sum(1), 1)[:, None]
      found = model(holes, reset=reset, seq_lengths=lengths, mask=mask)
      return found, model.head(mean)

    close(*run())
    with self.assertRaisesRegex(NotImplementedError, "pooling='last' would"):
      model.step(gru.initial_carry((3,)), x[:, 0])
    both = rnnzoo.Bidirectional(rnnzoo.GRU, 2, 3, rngs=rngs)
    answers = models.SequenceModel(both, 2, pooling='mean', rngs=rngs)(x)
    self.assertEqual(answers.shape, (3, 2))

  def test_answers_after_every_step(self):
    backbone = two_ways()
    model, _ = every_step(backbone)
    lengths = np.array([5, 2, 1], np.int32)
    found, want = jax.jit(
        lambda x: (
            model(x, seq_lengths=lengths),
            model.head(backbone(x, seq_lengths=lengths)),
        )
    )(x)
    close(found, want)
    self.assertEqual(want.shape, (*x.shape[:2], 2))

  @parameterized.parameters(None, 4)
  @pytest.mark.slow
  def test_steps(self, num_tokens):
    layer = make(num_layers=2, learn_initial_carry=True)
    model, given = every_step(layer, num_tokens)

    @jax.jit
    def run(given):
      carry, answers = model.initial_carry((BATCH,)), []
      for t in range(given.shape[1]):
        carry, y = model.step(carry, given[:, t], reset=reset[:, t])
        answers.append(y)
      first = model.step(None, given[:, 0])[1]
      return (first, jnp.stack(answers, 1)), model(given, reset=reset)

    (first, answers), want = run(given)
    close(answers, want)
    close(first, answers[:, 0])
    with self.assertRaisesRegex(ValueError, 'must be .* got'):
      model.step(given[:, 0], model.initial_carry((BATCH,)))
    with self.assertRaises(ValueError):
      model.step(model.initial_carry(()), given[:, 0])

  @parameterized.parameters(
      ('Stack', 6), ('Bidirectional', None), ('SLSTMBlock', None)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_reset_runs_pieces_separately(self, backbone, num_tokens):
    # A learned start, so that a restart is no carry of zeros.
    stack = {'num_layers': 2, 'norm': 'layer', 'learn_initial_carry': True}
    layers = {
        'Stack': functools.partial(rnnzoo.Stack, rnnzoo.LSTM, **stack),
        'Bidirectional': functools.partial(rnnzoo.Bidirectional, rnnzoo.MinGRU),
        'SLSTMBlock': functools.partial(rnnzoo.SLSTMBlock, num_heads=2),
    }
    layer = random_layers.make(layers[backbone], IN, FEATURES)
    model, given = every_step(layer, num_tokens)
    begins = np.zeros((BATCH, TIME), bool)
    begins[:, 0] = begins[0, 2] = begins[1, 1:4] = True

    @reference.jit
    def run(model, given):
      pieces = [model(given[r, i:j]) for r, i, j in _pieces(begins)]
      return model(given, reset=begins), pieces

    answers, pieces = run(model, given)
    for (row, start, stop), piece in zip(_pieces(begins), pieces, strict=True):
      close(answers[row, start:stop], piece, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(rnnzoo.GRU, rnnzoo.MinGRU)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_reset_before_an_answer_at_the_end(self, layer):
    model = models.SequenceClassifier(
        make(layer, num_layers=2), 7, rngs=nnx.Rngs(0)
    )
    begins = np.zeros((BATCH, TIME), bool)
    begins[0, 1] = begins[0, 3] = begins[1, 1] = begins[1, 4] = True
    lengths = np.array([5, 3, 0], np.int32)
    # A reset acts where a step is missing too.
    mask = np.ones((BATCH, TIME), bool)
    mask[0, 3] = mask[1, 0] = mask[1, 4] = False

    @jax.jit
    def run(x):
      call = functools.partial(model, x, reset=begins)
      steps = x[0, 3:], x[1, 1:3], x[0, 4:], x[1, 1:4], x[2]
      return (
          call(seq_lengths=lengths),
          call(mask=mask),
          call(mask=mask, seq_lengths=lengths),
          [model(part) for part in steps],
      )

    # Of the steps since the last reset that is in the sequence.
    short, masked, both, (end, pair, last, three, whole) = run(jnp.asarray(x))
    for found, want in (
        (short, (end, pair, model.head.bias[...])),
        (masked, (last, three, whole)),
        (both[:2], (last, pair)),
    ):
      close(found, want)

  def test_refuses_resets_of_another_shape(self):
    model, given = every_step(make(), 6)
    for wrong, message in (
        (reset[:, 1:], r'reset .*\(3, 5\), got bool of shape \(3, 4\)'),
        (reset.T, r'reset .*\(3, 5\), got bool of shape \(5, 3\)'),
        (reset[0], r'reset .*\(3, 5\), got bool of shape \(5,\)'),
        (reset.astype(int), 'reset must be a bool array .* got int32'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        model(given, reset=wrong)
    carry = model.initial_carry((BATCH,))
    with self.assertRaisesRegex(
        ValueError, r'reset .*\(3,\), got bool of shape \(3, 5\)'
    ):
      model.step(carry, given[:, 0], reset=reset)
    with self.assertRaisesRegex(ValueError, 'reset must be a bool array'):
      model.step(None, given[:, 0], reset=reset[0])

  def test_steps_of_models(self):
    gru = rnnzoo.GRU(IN, FEATURES, rngs=nnx.Rngs(0))
    model = models.SequenceClassifier(gru, 2, rngs=nnx.Rngs(0))
    carry = model.initial_carry((BATCH,))
    for t in range(3):  # The answer is of the steps so far.
      carry, y = model.step(carry, x[:, t])
      close(y, model(x[:, : t + 1]))
    model, _ = every_step(two_ways())
    message = 'the backward layer of its backbone needs the whole'
    with self.assertRaisesRegex(NotImplementedError, message):
      model.initial_carry((BATCH,))
    with self.assertRaisesRegex(NotImplementedError, message):
      model.step(None, x[:, 0])

  def test_reads_tokens_and_refuses_others(self):
    backbone = rnnzoo.GRU(IN, FEATURES, rngs=nnx.Rngs(0))
    model = models.SequenceModel(backbone, 2, num_tokens=4, rngs=nnx.Rngs(0))
    tokens = np.array([[0, 3, 1], [2, 2, 0]])
    vectors = model.embedding.embedding[tokens]
    want = model.head(backbone(vectors)[:, -1])
    close(model(tokens), want)
    with self.assertRaisesRegex(ValueError, 'tokens must be integers'):
      model(x)
    for tokens in ([[0, 4]], [[-1, 0]]):
      with self.assertRaisesRegex(ValueError, 'tokens must be from 0 to 3'):
        model(np.array(tokens))


if __name__ == '__main__':
  absltest.main()
