"""Translating lines with a trained model, and comparing with references.

References:
  Post, A call for clarity in reporting BLEU scores, 2018: sacrebleu.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import models
from rnnzoo.models import decoding
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import vocabularies

# Sources that are decoded together are as long as a multiple of this, so that
# few programs are compiled.
_WIDTH = 8


class Decoder:
  """Translates tokens of any number of lines, by one compiled call a batch."""

  def __init__(
      self,
      model: nnx.Module,
      decode: Callable[[Any, jax.Array, jax.Array], decoding.Decoded],
      batch_size: int,
  ):
    """Compiles nothing yet.

    Args:
      model: a trained model.
      decode: (model, source int32 [B, S], lengths int32 [B]) -> targets.
      batch_size: lines of a call, at most.
    """
    graphdef, self._state = nnx.split(model)
    self._batch_size = batch_size
    self._decode = jax.jit(
        lambda state, source, lengths: decode(
            nnx.merge(graphdef, state), source, lengths
        )
    )

  def __call__(self, lines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens of each line's translation, in the lines' order.

    Args:
      lines: tokens without an end. A line without tokens has a translation
        without tokens.
    """
    order = [place for place, line in enumerate(lines) if line]
    order.sort(key=lambda place: len(lines[place]))
    found: list[list[int]] = [[] for _ in lines]
    for start in range(0, len(order), self._batch_size):
      places = order[start : start + self._batch_size]
      rows = [[*lines[place], decoding.END] for place in places]
      # Batches have few sizes, so that few programs are compiled.
      size = min(1 << (len(rows) - 1).bit_length(), self._batch_size)
      rows += [[decoding.END]] * (size - len(rows))
      width = -(-max(map(len, rows)) // _WIDTH) * _WIDTH
      lengths = np.array(list(map(len, rows)), np.int32)
      decoded = self._decode(self._state, text_files.pad(rows, width), lengths)
      tokens, ends = np.asarray(decoded.tokens), np.asarray(decoded.lengths)
      for place, row, end in zip(places, tokens, ends, strict=False):
        found[place] = row[:end].tolist()
    return found


def attention_weights(
    model: models.Seq2Seq, source: Sequence[int], target: Sequence[int]
) -> np.ndarray:
  """Returns the weights of one pair, [target and end, source and end].

  Args:
    model: a model with attention.
    source: tokens without an end.
    target: tokens without start and end.
  """
  memory = model.encode(jnp.array([[*source, decoding.END]], jnp.int32))
  tokens = jnp.array([[decoding.START, *target]], jnp.int32)
  weights = model.unroll(memory, tokens).weights
  return np.asarray(weights[0], np.float32)  # type: ignore[index]


def exact_match(
    found: Sequence[Sequence[int]],
    references: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
) -> float:
  """Returns the share of translations whose words are the reference's."""
  hits = [
      vocabulary.words_of(tokens) == vocabulary.words(line)
      for tokens, line in zip(found, references, strict=True)
  ]
  return float(np.mean(hits))


def bleu(
    found: Sequence[Sequence[int]],
    references: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
) -> dict[str, float | str]:
  """Returns BLEU in two ways, 0 to 100, and sacrebleu's signature of each.

  'bleu' is over the words of the vocabulary, with '<unk>' in translations;
  'sacrebleu' is over lines, by sacrebleu's default but for the case. Both are
  in the vocabulary's case, and in NFC.

  Args:
    found: tokens of each translation.
    references: the lines that they are compared with.
    vocabulary: the target's vocabulary.
  """
  import sacrebleu  # Slow to import, and needed once, at the end.

  words = [' '.join(vocabulary.words_of(tokens)) for tokens in found]
  wanted = [' '.join(vocabulary.words(line)) for line in references]
  texts = [vocabulary.text(tokens) for tokens in found]
  normalized = list(map(vocabulary.normalized, references))
  results: dict[str, float | str] = {}
  scorer_of = functools.partial(
      sacrebleu.BLEU, force=True, lowercase=vocabulary.lowercase
  )
  of_words, of_lines = scorer_of(tokenize='none'), scorer_of()
  for name, scorer, lines, lines_wanted in (
      ('bleu', of_words, words, wanted),
      ('sacrebleu', of_lines, texts, normalized),
  ):
    results[name] = scorer.corpus_score(lines, [lines_wanted]).score
    results[f'{name}_signature'] = str(scorer.get_signature())
  return results
