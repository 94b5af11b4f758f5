"""Translating lines with a trained model, and comparing with references.

References:
  Post, A call for clarity in reporting BLEU scores, 2018: sacrebleu.
"""

from collections.abc import Callable, Sequence
import time
from typing import Any

from flax import nnx
import jax
import numpy as np

from rnnzoo.models import decoding
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import vocabularies

# Sources that are decoded together are as long as a multiple of this, so that
# few programs are compiled.
_WIDTH = 8


class Decoder:
  """Translates any number of lines, by one compiled call a batch.

  Attributes:
    programs: the compiled programs, by (lines, steps of the source).
    compiler_options: XLA's, for programs that are compiled from now on.
    batches: how many batches were translated.
    seconds: how long these took, without compilation.
    lines: how many lines were translated.
    tokens: how many tokens the translations have.
  """

  def __init__(
      self,
      model: nnx.Module,
      decode: Callable[[Any, jax.Array, jax.Array], decoding.Decoded],
      batch_size: int,
  ):
    """Keeps (model, source int32 [B, S], lengths int32 [B]) -> targets."""
    self._graphdef, self._state = nnx.split(model)
    self._decode, self._batch_size = decode, batch_size
    self.programs: dict[tuple[int, int], jax.stages.Compiled] = {}
    self.compiler_options: dict[str, Any] = {}
    self.batches, self.seconds, self.lines, self.tokens = 0, 0.0, 0, 0

  def __call__(self, lines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens of each line's translation, in the lines' order.

    Tokens are without an end, and a line without tokens has a translation
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
      given = self._state, *text_files.pad(rows, width)
      program = self._program(*given)
      began = time.monotonic()
      decoded = program(*given)
      tokens, ends = np.asarray(decoded.tokens), np.asarray(decoded.lengths)
      self.batches += 1
      self.seconds += time.monotonic() - began
      for place, row, end in zip(places, tokens, ends, strict=False):
        found[place] = row[:end].tolist()
    self.lines += len(lines)
    self.tokens += sum(map(len, found))
    return found

  def speed(self) -> dict[str, float]:
    """Returns seconds, and lines and tokens a second."""
    seconds = max(self.seconds, 1e-9)
    return {
        'decoding_seconds': self.seconds,
        'sentences_per_second': self.lines / seconds,
        'tokens_per_second': self.tokens / seconds,
    }

  def _program(self, state, source, lengths) -> jax.stages.Compiled:
    if source.shape not in self.programs:

      def run(state, *given):
        return self._decode(nnx.merge(self._graphdef, state), *given)

      # A profile tells programs apart by their names.
      run.__name__ = 'decode_{}_{}'.format(*source.shape)
      lowered = jax.jit(run).lower(state, source, lengths)
      self.programs[source.shape] = lowered.compile(self.compiler_options)
    return self.programs[source.shape]


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
