"""Decoding: the likely sequence of tokens, in one compiled loop.

Both searches take a function of one step and run it in a `jax.lax.while_loop`,
which stops as soon as every sequence of the batch has ended.

Dimensions: B batch, K beams, V tokens of the vocabulary, L greatest length.

References:
  Wu et al., Google's neural machine translation system, 2016, section 7: beam
  search, scores divided by a power of the length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import devices
from rnnzoo import settings

Array = jax.Array

# The first tokens of every vocabulary: padding, the start of a sequence, its
# end, and any word that is not in the vocabulary.
PAD, START, END, UNKNOWN = range(4)

# (fixed, carry, tokens int32 [B]) -> (carry, logits [B, V]). `fixed` is all
# that the step reads and never changes, and like the carry holds arrays
# [B, ...].
Step = Callable[[Any, Any, Array], tuple[Any, Array]]


class Decoded(NamedTuple):
  """Decoded sequences.

  Attributes:
    tokens: int32 [B, L]; the end is not among them, and behind it is padding.
    lengths: int32 [B], the number of tokens before the end.
    scores: float32 [B], the log-likelihood of the tokens and, where it was
      reached, of the end.
  """

  tokens: Array
  lengths: Array
  scores: Array


def check(max_length: Any, num_beams: Any, length_penalty: Any) -> None:
  """Raises ValueError unless these are settings of a beam search."""
  settings.positive(max_length, 'max_length')
  settings.positive(num_beams, 'num_beams')
  settings.within(length_penalty, 'length_penalty', least=0)


def greedy(
    step: Step, fixed: Any, carry: Any, batch: int, *, max_length: int
) -> Decoded:
  """Takes the most likely token in every step.

  Args:
    step: step of the model.
    fixed: the step's first argument.
    carry: carry before the first step.
    batch: B.
    max_length: L, where a sequence ends if it has not before.
  """
  settings.positive(max_length, 'max_length')

  def proceed(state):
    time, carry, last, ended, tokens, scores = state
    carry, logits = step(fixed, carry, last)
    with jax.named_scope('choice'):
      log_probabilities = _log_probabilities(logits)
      token = jnp.argmax(log_probabilities, axis=-1).astype(jnp.int32)
      score = jnp.max(log_probabilities, axis=-1)
      scores = jnp.where(ended, scores, scores + score)
      ended = ended | (token == END)
      tokens = tokens.at[:, time].set(jnp.where(ended, PAD, token))
    return time + 1, carry, token, ended, tokens, scores

  def goes_on(state):
    return (state[0] < max_length) & ~jnp.all(state[3])

  *_, tokens, scores = jax.lax.while_loop(
      goes_on,
      proceed,
      _start(carry, (batch,), max_length, jnp.zeros(batch, jnp.float32)),
  )
  return Decoded(tokens, _lengths(tokens), scores)


def beam_search(
    step: Step,
    fixed: Any,
    carry: Any,
    batch: int,
    *,
    max_length: int,
    num_beams: int,
    length_penalty: float = 0.0,
) -> Decoded:
  """Keeps the K best beginnings in every step.

  A sequence that has ended stays among them. The search is over where no
  beginning can overtake the best ended sequence.

  Args:
    step: step of the model.
    fixed: the step's first argument.
    carry: carry before the first step.
    batch: B.
    max_length: L, where a sequence ends if it has not before.
    num_beams: K.
    length_penalty: sequences are compared by their score / length^penalty, the
      end counted; 0 compares log-likelihoods, which favours short ones. Not
      negative.
  """
  check(max_length, num_beams, length_penalty)
  repeat = lambda x: jnp.repeat(x, num_beams, axis=0)
  fixed, carry = jax.tree.map(repeat, (fixed, carry))
  rows = jnp.arange(batch)[:, None]

  def normalised(scores, lengths):
    lengths = jnp.asarray(lengths, scores.dtype)
    return scores / jnp.maximum(lengths, 1) ** length_penalty

  def proceed(state):
    time, carry, last, ended, tokens, lengths, scores = state
    carry, logits = step(fixed, carry, last.reshape(-1))
    with jax.named_scope('choice'):
      added = _log_probabilities(logits).reshape(batch, num_beams, -1)
      num_tokens = added.shape[-1]
      # An ended sequence has one continuation, padding, at no cost.
      stays = jnp.where(jnp.arange(num_tokens) == PAD, 0.0, -jnp.inf)
      added = jnp.where(ended[..., None], stays, added)
      totals = (scores[..., None] + added).reshape(batch, -1)
      scores, places = jax.lax.top_k(totals, num_beams)
      parents = places // num_tokens
      token = (places % num_tokens).astype(jnp.int32)
      was_ended = ended[rows, parents]
      ended = was_ended | (token == END)
      tokens = tokens[rows, parents]
      tokens = tokens.at[:, :, time].set(jnp.where(ended, PAD, token))
      lengths = lengths[rows, parents] + jnp.where(was_ended, 0, 1)
      flat = (rows * num_beams + parents).reshape(-1)
      carry = jax.tree.map(lambda x: x[flat], carry)
    return time + 1, carry, token, ended, tokens, lengths, scores

  def goes_on(state):
    time, _, _, ended, _, lengths, scores = state
    best = jnp.where(ended, normalised(scores, lengths), -jnp.inf)
    # Scores only fall, so this is the most that a beginning can still reach.
    bound = jnp.where(ended, -jnp.inf, normalised(scores, max_length))
    decided = jnp.max(best, axis=1) >= jnp.max(bound, axis=1)
    return (time < max_length) & ~jnp.all(decided)

  shape = batch, num_beams
  first = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
  counts = jnp.zeros(shape, jnp.int32), jnp.broadcast_to(first, shape)
  _, _, _, ended, tokens, lengths, scores = jax.lax.while_loop(
      goes_on,
      proceed,
      _start(carry, shape, max_length, *counts),
  )
  # A sequence that was cut off counts only where none has ended.
  ranks = normalised(scores, lengths)
  ranks = jnp.where(ended | ~jnp.any(ended, 1)[:, None], ranks, -jnp.inf)
  best = jnp.argmax(ranks, axis=1)
  tokens = tokens[rows[:, 0], best]
  return Decoded(tokens, _lengths(tokens), scores[rows[:, 0], best])


def _start(carry: Any, shape: tuple[int, ...], max_length: int, *counts: Array):
  """Returns the state of a search before its first step."""
  state = (
      carry,
      jnp.full(shape, START, jnp.int32),
      jnp.zeros(shape, bool),
      jnp.full((*shape, max_length), PAD, jnp.int32),
      *counts,
  )
  return jnp.zeros((), jnp.int32), *devices.alike(state)


def _log_probabilities(logits: Array) -> Array:
  """Returns log-probabilities [..., V] with no chance of padding and start."""
  logits = jax.nn.log_softmax(logits.astype(jnp.float32))
  places = jnp.arange(logits.shape[-1])
  return jnp.where((places == PAD) | (places == START), -jnp.inf, logits)


def _lengths(tokens: Array) -> Array:
  return jnp.sum(tokens != PAD, axis=-1).astype(jnp.int32)
