"""Seq2Seq and decoding: padding, attention, teacher forcing, searches."""

import functools
import itertools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import models
from rnnzoo.models import decoding
from tests.testing import random_layers

NUM_TOKENS = 9


def make_model(
    attention=True, layer=rnnzoo.GRU, bidirectional=False, **options
):
  rngs = nnx.Rngs(3)
  encoder = layer(4, 6, rngs=rngs)
  if bidirectional:
    encoder = rnnzoo.Bidirectional(layer, 4, 5, rngs=rngs)
  options['attention_features'] = 7 if attention else None
  model = random_layers.seq2seq(encoder, 6, layer, **options)
  # Logits far from each other: searches that go wrong find something else.
  model.head.kernel[...] = 4.0 * model.head.kernel[...]
  return model


SOURCE = np.array([[5, 6, 7, 8, 2], [8, 4, 2, 0, 0], [7, 2, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 3, 2], np.int32)
TARGET = np.array([[1, 4, 5, 6], [1, 7, 8, 3], [1, 3, 3, 4]], np.int32)


class Seq2SeqTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  @pytest.mark.slow
  def test_padding_has_no_effect(self, attention):
    model = make_model(attention, bidirectional=attention)
    run = jax.jit(
        lambda source, lengths: model.unroll(
            model.encode(source, lengths), TARGET
        )
    )
    logits, weights = run(SOURCE, LENGTHS)
    self.assertEqual(logits.shape, (3, 4, NUM_TOKENS))
    padded = np.where(np.arange(5) < LENGTHS[:, None], SOURCE, 7)
    longer = np.pad(padded, ((0, 0), (0, 3)), constant_values=7)
    again = run(longer, LENGTHS)[0]
    np.testing.assert_allclose(again, logits, atol=1e-5)
    if not attention:
      return
    # Weights sum to 1 over valid steps.
    np.testing.assert_allclose(weights.sum(-1), np.ones((3, 4)), atol=1e-6)
    for row, length in enumerate(LENGTHS):
      np.testing.assert_array_equal(weights[row, :, length:], 0.0)
      self.assertTrue((weights[row, :, :length] > 0).all())

  @parameterized.parameters((False, rnnzoo.GRU), (True, rnnzoo.LSTM))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_steps_are_the_run_over_all(self, attention, layer):
    model = make_model(attention, layer)
    memory = model.encode(SOURCE, LENGTHS)
    logits = model.unroll(memory, TARGET).logits
    carry = model.initial_carry(memory)
    for time in range(TARGET.shape[1]):
      carry, found = model.step(memory, carry, TARGET[:, time])
      np.testing.assert_allclose(found, logits[:, time], atol=1e-5)

  @pytest.mark.slow
  def test_scheduled_teacher_forcing(self):
    model = make_model(attention=True)
    memory = model.encode(SOURCE, LENGTHS)
    run = lambda rate, seed=0: model.unroll(
        memory, TARGET, teacher_forcing=jnp.float32(rate), rngs=nnx.Rngs(seed)
    )
    forced = model.unroll(memory, TARGET).logits
    np.testing.assert_allclose(run(1.0).logits, forced, atol=1e-5)
    # Without any the model sees its own most likely tokens.
    logits = run(0.0).logits
    own = np.argmax(logits, axis=-1)
    shown = np.concatenate([TARGET[:, :1], own[:, :-1]], axis=1)
    np.testing.assert_allclose(
        model.unroll(memory, shown).logits, logits, atol=1e-5
    )
    self.assertFalse(np.allclose(forced, logits))
    with self.assertRaisesRegex(ValueError, 'needs random numbers'):
      model.unroll(memory, TARGET, teacher_forcing=0.5)

  @pytest.mark.slow
  def test_a_decoder_that_trains_otherwise_in_single_steps(self):
    for options, name in (
        ({'dropout_rate': 0.5}, 'Stack'),
        ({'norm': 'batch'}, 'BatchNorm'),
    ):
      model, rngs = make_model(True), nnx.Rngs(0)
      sizes = model.decoder.in_features, model.decoder.out_features
      model.decoder = rnnzoo.Stack(
          rnnzoo.GRU, *sizes, num_layers=2, rngs=rngs, **options
      )
      with self.assertRaisesRegex(ValueError, f'but its {name} does'):
        model(SOURCE, TARGET, rngs=nnx.Rngs(0))

  @pytest.mark.slow
  def test_dropout_is_that_of_rngs(self):
    model = make_model(dropout_rate=0.5)
    run = lambda rngs: model(SOURCE, TARGET, rngs=rngs)
    np.testing.assert_array_equal(run(nnx.Rngs(1)), run(nnx.Rngs(1)))
    self.assertFalse(np.allclose(run(nnx.Rngs(1)), run(nnx.Rngs(2))))
    self.assertFalse(np.allclose(run(nnx.Rngs(1)), run(None)))

  @pytest.mark.slow
  def test_greedy_is_argmax_step_by_step(self):
    model = make_model()
    found = jax.jit(lambda: model.decode(SOURCE, LENGTHS, max_length=8))()
    memories = jax.jit(model.encode)(SOURCE, LENGTHS)
    step = jax.jit(model.step)
    for row in range(3):
      memory = jax.tree.map(lambda x, row=row: x[row : row + 1], memories)
      carry, token = model.initial_carry(memory), decoding.START
      tokens, score = [], 0.0
      while len(tokens) < 8:
        carry, logits = step(memory, carry, np.array([token]))
        logits = np.array(jax.nn.log_softmax(logits[0]))
        logits[[decoding.PAD, decoding.START]] = -np.inf
        token = int(logits.argmax())
        score += logits[token]
        if token == decoding.END:
          break
        tokens.append(token)
      self.assertEqual(found.tokens[row, : len(tokens)].tolist(), tokens)
      self.assertEqual(int(found.lengths[row]), len(tokens))
      self.assertFalse(found.tokens[row, len(tokens) :].any())
      self.assertAlmostEqual(float(found.scores[row]), score, places=3)

  @parameterized.parameters(
      ('encoder', 'a GRU', 'encoder must be a layer or a stack'),
      (
          'decoder',
          functools.partial(rnnzoo.GRU, 5, 6),
          'more than 5 in_features',
      ),
      (
          'decoder',
          functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU, 9, 6),
          'must be a recurrent layer or a stack of these',
      ),
      (
          'decoder',
          functools.partial(rnnzoo.DenseStack, rnnzoo.GRU, 9, 6),
          'must be a recurrent layer or a stack of these.*DenseStack',
      ),
      ('dropout_rate', 1.5, r'dropout_rate must be .* from 0 below 1, got 1.5'),
      *(
          ('dtype', dtype, 'dtype must (be a floating-point|have 16 to 64)')
          for dtype in (int, 'int32', complex, 'float8_e4m3fn', 'foo', 3)
      ),
  )
  def test_errors(self, name, given, message):
    rngs = nnx.Rngs(0)
    options = {
        'encoder': rnnzoo.GRU(4, 5, rngs=rngs),
        'decoder': rnnzoo.GRU(9, 6, rngs=rngs),
    }
    # Not made where tests are collected.
    is_made_here = isinstance(given, functools.partial)
    options[name] = given(rngs=rngs) if is_made_here else given
    with self.assertRaisesRegex(ValueError, message):
      models.Seq2Seq(
          **options, num_source_tokens=4, num_target_tokens=4, rngs=rngs
      )

  @pytest.mark.slow
  def test_a_dense_encoder_of_both_directions(self):
    layer = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU)
    encoder = rnnzoo.DenseStack(layer, 4, 5, num_layers=2, rngs=nnx.Rngs(0))
    size = encoder.out_features
    model = random_layers.seq2seq(encoder, 6)
    x = model.source_embedding(SOURCE)
    y = np.asarray(encoder(x, seq_lengths=LENGTHS))
    last = y[np.arange(3), LENGTHS - 1]
    backward = np.zeros(size, bool)
    # [x, forward, backward, forward, backward]
    backward[9:14] = backward[19:24] = True
    want = np.where(backward, y[:, 0], last)
    np.testing.assert_allclose(
        model.encode(SOURCE, LENGTHS).context, want, rtol=1e-5, atol=1e-6
    )

  @pytest.mark.slow
  def test_lengths_without_a_sign_and_beyond_the_source_inside_jit(self):
    model, source = make_model(), jnp.ones((2, 5), jnp.int32)
    encode = jax.jit(lambda lengths: model.encode(source, lengths).context)
    want = encode(np.array([5, 0], np.int32))
    self.assertTrue(jnp.isfinite(want).all())
    for lengths in np.array([7, -1], np.int32), np.array([5, 0], np.uint8):
      np.testing.assert_array_equal(encode(lengths), want)

  def test_one_set_of_rules(self):
    model, ones = make_model(), np.ones((3, 4), np.int32)
    memory = jax.eval_shape(model.encode, SOURCE)
    language = models.LanguageModel(rnnzoo.GRU, 9, 6, rngs=nnx.Rngs(0))
    carry = language.initial_carry((3,))
    one_step = lambda x: x if isinstance(x, str) else x[:, 0]
    calls = {
        'tokens': (
            lambda x: model.step(memory, None, one_step(x)),
            lambda x: language.step(carry, one_step(x)),
            language,
        ),
        'source': (model.encode, lambda x: model.decode(x, max_length=3)),
        'target': (lambda x: model.unroll(memory, x),),
        'teacher_forcing': (
            lambda x: model.unroll(memory, ones, teacher_forcing=x),
        ),
        'num_beams': (
            lambda x: model.decode(SOURCE, max_length=3, num_beams=x),
        ),
        'length_penalty': (
            lambda x: model.decode(SOURCE, max_length=3, length_penalty=x),
        ),
    }
    nan, wrong = float('nan'), (ones * 11, ones * -4, 'foo')
    values = {
        'teacher_forcing': (nan, -1, 2, True, 'foo', np.float32(nan)),
        'num_beams': (True, 1.0, 0, 'foo'),
        'length_penalty': (nan, -1, True, 'foo'),
    }
    for name, functions in calls.items():
      for function, value in itertools.product(
          functions, values.get(name, wrong)
      ):
        with self.assertRaisesRegex(ValueError, f'^{name} must be '):
          function(value)

  def test_states_of_another_model_or_batch(self):
    models = make_model(), make_model(attention=False)
    memories = [jax.eval_shape(model.encode, SOURCE) for model in models]
    wide = jax.eval_shape(make_model(bidirectional=True).encode, SOURCE)
    tokens = TARGET[:, 0]
    for index, model in enumerate(models):
      memory, other = memories[index], memories[1 - index]
      carry = jax.eval_shape(model.initial_carry, memory)
      one = jax.eval_shape(
          lambda carry: jax.tree.map(lambda x: x[:1], carry), carry
      )
      uses = ('initial_carry',), ('step', carry, tokens), ('unroll', TARGET)
      wrong = None, 'a', carry, other, wide, memory._replace(context=3)
      for given, (use, *rest) in itertools.product(wrong, uses):
        with self.assertRaisesRegex(ValueError, '^memory must be as encode'):
          getattr(model, use)(given, *rest)
      for given in None, 'a', carry[::-1], carry[:1], one:
        with self.assertRaisesRegex(ValueError, '^carry must be a pair '):
          model.step(memory, given, tokens)
      with self.assertRaisesRegex(ValueError, r"source's .* \(3,\), got \(2,"):
        model.step(memory, carry, tokens[:2])


class MarkovTest(parameterized.TestCase):
  """Searches in a chain, of which every sequence can be scored."""

  def setUp(self):
    super().setUp()
    random = np.random.default_rng(1)
    self.table = random.normal(0.0, 2.0, (4, 6, 6)).astype(np.float32)

  def step(self, fixed, carry, tokens):
    logits = jnp.take_along_axis(fixed, tokens[:, None, None], axis=1)[:, 0]
    return carry + 1, logits

  def best(self, row, length, penalty):
    """Returns the best of all sequences by trying them."""
    table = np.array(jax.nn.log_softmax(self.table[row]))
    candidates = []
    for count in range(length):
      for tokens in itertools.product(range(3, 6), repeat=count):
        path = [decoding.START, *tokens, decoding.END]
        score = sum(table[a, b] for a, b in itertools.pairwise(path))
        candidates.append((score / (count + 1) ** penalty, tokens))
    return max(candidates)

  @parameterized.parameters(0.0, 1.0)
  @pytest.mark.slow
  def test_many_beams_find_the_best(self, penalty):
    options = {'num_beams': 200, 'length_penalty': penalty}
    found = decoding.beam_search(
        *(self.step, self.table, jnp.zeros(4), 4), max_length=4, **options
    )
    for row in range(4):
      score, tokens = self.best(row, 4, penalty)
      length = int(found.lengths[row])
      self.assertEqual(tuple(found.tokens[row, :length].tolist()), tokens)
      normalised = found.scores[row] / (length + 1) ** penalty
      self.assertAlmostEqual(float(normalised), float(score), places=4)

  @pytest.mark.slow
  def test_the_loop_stops_at_the_end(self):
    # A chain that ends at once: one step, whatever the greatest length.
    table = np.zeros((2, 6, 6), np.float32)
    table[:, :, decoding.END] = 9.0
    steps = []

    def step(fixed, carry, tokens):
      jax.debug.callback(lambda: steps.append(1))
      return self.step(fixed, carry, tokens)

    decoding.greedy(step, table, jnp.zeros(2), 2, max_length=50)
    jax.effects_barrier()
    self.assertLen(steps, 1)
    decoding.beam_search(
        step, table, jnp.zeros(2), 2, max_length=50, num_beams=3
    )
    jax.effects_barrier()
    self.assertLen(steps, 2)


if __name__ == '__main__':
  absltest.main()
