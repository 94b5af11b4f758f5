"""Public functions and models take no batch axis, one or several."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
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
  kernel = np.full((1, 1, 3, 3), 0.3, np.float32)
  options = {'reset': reset, 'mask': mask, 'restart_carry': (h0,)}
  return rnnzoo.unroll_carries(
      *(rnnzoo.ElmanCell(), {}, gates[..., None, :], kernel, (h0,)), **options
  )


def seq2seq(attention, source, lengths, target):
  make = random_layers.make
  encoder = make('GRU', 4, 6)
  if attention:
    encoder = make(rnnzoo.Bidirectional, rnnzoo.GRU, 4, 5)
  model = random_layers.seq2seq(encoder, 6, attention_features=attention)
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
    'no_steps': (linear_scan, (A[:, :0], B[:, :0], H, RESET[:, :0])),
    'Seq2Seq': (functools.partial(seq2seq, None), (SOURCE, LENGTHS, TARGET)),
    'Attention': (functools.partial(seq2seq, 5), (SOURCE, LENGTHS, TARGET)),
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
      chex.assert_trees_all_close(got, change(want), rtol=2e-5, atol=1e-6)

  @pytest.mark.slow
  def test_verify(self):
    layer = random_layers.make('GRU', FEATURES, 4)
    want = rnnzoo.verify(layer, X[0])
    self.assertEqual(rnnzoo.verify(layer, X[:1, None]), want)


if __name__ == '__main__':
  absltest.main()
