"""Public functions and models take no batch axis, one or several."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import numpy as np
import pytest

import rnnzoo
from rnnzoo import models
from tests.testing import random_layers

ROWS, TIME, FEATURES, TOKENS = 6, 5, 3, 9

_rng = np.random.default_rng(0)
draw = lambda *shape: _rng.standard_normal(shape).astype(np.float32)
A, B, X = (draw(ROWS, TIME, FEATURES) for _ in range(3))
H = draw(ROWS, FEATURES)
RESET = _rng.random((ROWS, TIME)) < 0.3
MASK = _rng.random((ROWS, TIME)) < 0.7
LENGTHS = np.array([5, 1, 3, 2, 4, 0], np.int32)
SOURCE = _rng.integers(4, TOKENS, (ROWS, TIME), np.int32)
TARGET = _rng.integers(4, TOKENS, (ROWS, 3), np.int32)


def linear_scan(a, b, h0, reset):
  return rnnzoo.linear_scan(a, b, h0, reset=reset)


def unroll(gates, h0, reset, mask):
  cell, kernel = rnnzoo.ElmanCell(), np.full((1, 1, 3, 3), 0.3, np.float32)
  return rnnzoo.unroll_carries(
      cell,
      {},
      gates[..., None, :],
      kernel,
      (h0,),
      reset=reset,
      mask=mask,
      restart_carry=(h0,),
  )


def make_seq2seq(attention):
  make = random_layers.make
  encoder = make('GRU', 4, 6)
  if attention:
    encoder = make(rnnzoo.Bidirectional, rnnzoo.GRU, 4, 5)
  return models.Seq2Seq(
      encoder,
      make('GRU', 3 + encoder.out_features, 6),
      num_source_tokens=TOKENS,
      num_target_tokens=TOKENS,
      attention_features=attention,
      rngs=nnx.Rngs(0),
  )


def seq2seq(attention, source, lengths, target):
  model = make_seq2seq(attention)
  memory = model.encode(source, lengths)
  # Of random numbers that choose nothing: every step is the model's own.
  chosen = model.unroll(
      memory, target, teacher_forcing=0.0, rngs=nnx.Rngs(dropout=0)
  )
  state, logits = model.step(
      memory, model.initial_carry(memory), target[..., 0]
  )
  decoded = model.decode(source, lengths, max_length=4, num_beams=2)
  given = model(source, target, source_lengths=lengths)
  return given, chosen, state, logits, decoded


def language_model(tokens):
  make = lambda *sizes, rngs: random_layers.make('GRU', *sizes)
  return models.LanguageModel(make, TOKENS, 6, rngs=nnx.Rngs(0))(tokens)


def classifier(x, lengths):
  layer = random_layers.make('GRU', FEATURES, 6)
  model = models.SequenceClassifier(layer, 2, rngs=nnx.Rngs(0))
  return model(x, seq_lengths=lengths)


CASES = {
    'unroll': (unroll, (X, H, RESET, MASK)),
    'linear_scan': (linear_scan, (A, B, H, RESET)),
    'linear_scan_of_no_steps': (
        linear_scan,
        (A[:, :0], B[:, :0], H, RESET[:, :0]),
    ),
    'Seq2Seq': (
        lambda *given: seq2seq(None, *given),
        (SOURCE, LENGTHS, TARGET),
    ),
    'Seq2SeqAttention': (
        lambda *given: seq2seq(5, *given),
        (SOURCE, LENGTHS, TARGET),
    ),
    'LanguageModel': (language_model, (SOURCE,)),
    'Classifier': (classifier, (X, LENGTHS)),
}


class LeadingAxesTest(parameterized.TestCase):

  @parameterized.named_parameters((k, *case) for k, case in CASES.items())
  @pytest.mark.few(3)
  @pytest.mark.slow
  def test_functions_and_models(self, function, given):
    run = jax.jit(function)
    cut = lambda tree: jax.tree.map(lambda x: x[1], tree)
    split = lambda tree: jax.tree.map(
        lambda x: np.reshape(x, (2, 3, *x.shape[1:])), tree
    )
    want = run(*given)
    for change in (cut, split):
      got = run(*change(given))
      self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
      jax.tree.map(
          lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
          got,
          change(want),
      )

  @pytest.mark.slow
  def test_verify(self):
    layer = random_layers.make('GRU', FEATURES, 4)
    want = rnnzoo.verify(layer, X[0])
    self.assertEqual(rnnzoo.verify(layer, X[:1, None]), want)


if __name__ == '__main__':
  absltest.main()
