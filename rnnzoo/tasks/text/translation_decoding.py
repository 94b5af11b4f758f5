"""Translating lines with a trained model, and comparing with references.

References:
  Post, A call for clarity in reporting BLEU scores, 2018: sacrebleu.
"""

from collections.abc import Callable, Sequence
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


def decoder(
    model: nnx.Module,
    decode: Callable[[Any, jax.Array, jax.Array], decoding.Decoded],
    batch_size: int,
) -> Callable[[Sequence[Sequence[int]]], list[list[int]]]:
  """Returns what translates any number of lines, by one compiled call a batch.

  It takes tokens without an end, and returns the tokens of each line's
  translation, in the lines' order. A line without tokens has a translation
  without tokens.

  Args:
    model: a trained model.
    decode: (model, source int32 [B, S], lengths int32 [B]) -> targets.
    batch_size: lines of a call, at most.
  """
  graphdef, state = nnx.split(model)
  compiled = jax.jit(
      lambda state, *given: decode(nnx.merge(graphdef, state), *given)
  )

  def translate(lines):
    order = [place for place, line in enumerate(lines) if line]
    order.sort(key=lambda place: len(lines[place]))
    found: list[list[int]] = [[] for _ in lines]
    for start in range(0, len(order), batch_size):
      places = order[start : start + batch_size]
      rows = [[*lines[place], decoding.END] for place in places]
      # Batches have few sizes, so that few programs are compiled.
      size = min(1 << (len(rows) - 1).bit_length(), batch_size)
      rows += [[decoding.END]] * (size - len(rows))
      width = -(-max(map(len, rows)) // _WIDTH) * _WIDTH
      lengths = np.array(list(map(len, rows)), np.int32)
      decoded = compiled(state, text_files.pad(rows, width), lengths)
      tokens, ends = np.asarray(decoded.tokens), np.asarray(decoded.lengths)
      for place, row, end in zip(places, tokens, ends, strict=False):
        found[place] = row[:end].tolist()
    return found

  return translate


def attention_weights(
    model: models.Seq2Seq, source: Sequence[int], target: Sequence[int]
) -> np.ndarray:
  """Returns the weights of one pair, [target and end, source and end].

  The tokens are without start and end, and the model has attention.
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
  in the case of the target's vocabulary, and in NFC.
  """
  import sacrebleu  # Slow to import, and needed once, at the end.

  joined = lambda words_of, lines: [' '.join(words_of(line)) for line in lines]
  results: dict[str, float | str] = {}
  for name, tokenize, lines, wanted in (
      (
          'bleu',
          'none',
          joined(vocabulary.words_of, found),
          joined(vocabulary.words, references),
      ),
      (
          'sacrebleu',
          None,
          list(map(vocabulary.text, found)),
          list(map(vocabulary.normalized, references)),
      ),
  ):
    scorer = sacrebleu.BLEU(
        force=True, lowercase=vocabulary.lowercase, tokenize=tokenize
    )
    score = scorer.corpus_score(lines, [wanted]).score
    results |= {name: score, f'{name}_signature': str(scorer.get_signature())}
  return results
