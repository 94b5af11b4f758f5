"""Tokens of a text: its characters, bytes, subwords or words.

A token is a place in a list of pieces, which are bytes of UTF-8. Pieces of a
text's tokens, joined, are the text. Only words lose something: other spaces
than one before each word, and words that are not in the vocabulary.

References:
  Sennrich et al., Neural machine translation of rare words with subword units,
  2016: 'bpe', here over bytes.
  Kudo, Subword regularization, 2018: 'unigram', here over bytes.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import io
import itertools
import json
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import fields

SUBWORDS = ('bpe', 'unigram')
KINDS = ('characters', 'bytes', *SUBWORDS, 'words')
# Subwords at most, where the config names no number.
_NUM_SUBWORDS = 8192
# Lines that are cut into subwords at once.
_LINES = 10_000
_UNKNOWN, _END = '<unk>', '<eos>'


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Text to tokens and back.

  Attributes:
    kind: a name in `KINDS`.
    described: the argument of `restore`, which JSON can hold.
    pieces: the UTF-8 of each token; one may end within a character.
    tokenizer: a `tokenizers.Tokenizer` of subwords; else None.
  """

  kind: str
  described: Mapping[str, str]
  pieces: tuple[bytes, ...]
  tokenizer: Any = None

  def __len__(self) -> int:
    return len(self.pieces)

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """The number of bytes of each token, float32 [tokens]."""
    return np.array(list(map(len, self.pieces)), np.float32)

  @functools.cached_property
  def _places(self) -> dict[str, int]:
    names = _names(self.kind, self.described['vocabulary'])
    return {name: place for place, name in enumerate(names)}

  def encode(self, text: str) -> np.ndarray:
    """Returns the tokens of a text, int32 [N].

    Raises:
      ValueError: a character is not in the vocabulary.
    """
    if self.kind == 'bytes':
      return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    if self.kind in SUBWORDS:
      return np.fromiter(self._subwords(text), np.int32)
    places = self._places
    if self.kind == 'words':
      found = (places.get(word, places[_UNKNOWN]) for word in _words(text))
      return np.fromiter(found, np.int32)
    if unknown := sorted(set(text) - set(places)):
      raise ValueError(
          f'{fields.shorten("".join(unknown))} is not in the text that the'
          ' model was trained on'
      )
    return np.fromiter(map(places.__getitem__, text), np.int32, len(text))

  def _subwords(self, text: str) -> Iterator[int]:
    lines = io.StringIO(text, newline='\n')
    while batch := list(itertools.islice(lines, _LINES)):
      for found in self.tokenizer.encode_batch_fast(batch):
        yield from found.ids

  def text(self, tokens: Iterable[int]) -> str:
    """Returns the text of tokens; U+FFFD stands for bytes that are none."""
    content = b''.join(self.pieces[token] for token in tokens)
    return content.decode(errors='replace')


def make(kind: str, texts: Sequence[str], size: int | None) -> Tokens:
  """Returns the tokens of a text.

  Args:
    kind: a name in `KINDS`.
    texts: the part to train on, which has all subwords and words, and the other
      parts, whose characters are tokens as well.
    size: the most subwords or words, the most frequent; None for 8,192 subwords
      or all words.

  Raises:
    ValueError: the text has no subwords.
    ModuleNotFoundError: the package for subwords is missing.
  """
  if kind == 'bytes':
    return restore(kind, {})
  if kind in SUBWORDS:
    trained = _train(kind, texts[0], size or _NUM_SUBWORDS)
    return restore(kind, {'tokenizer': trained})
  if kind == 'words':
    counts = collections.Counter(_words(texts[0]))
    del counts[_UNKNOWN]
    words = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = ' '.join([_UNKNOWN, *words][:size])
  else:
    vocabulary = ''.join(sorted(set().union(*texts)))
  return restore(kind, {'vocabulary': vocabulary})


def restore(kind: str, described: Mapping[str, str]) -> Tokens:
  """Returns the tokens of a kind of which `Tokens.described` is this."""
  if kind == 'bytes':
    return Tokens(kind, described, tuple(bytes([i]) for i in range(256)))
  if kind in SUBWORDS:
    settings.require(f'config.data.tokens={kind!r}', 'text', ('tokenizers',))
    import tokenizers
    from tokenizers import pre_tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(described['tokenizer'])
    # A sign stands for each byte, in order; for many, that of its number.
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [ord(sign) for sign in signs if ord(sign) < 256]
    others = sorted(set(range(256)) - set(own))
    byte_of = dict(zip(signs, own + others, strict=True))
    size = tokenizer.get_vocab_size()
    names: list[Any] = list(map(tokenizer.id_to_token, range(size)))
    pieces = tuple(bytes(byte_of[sign] for sign in name) for name in names)
    return Tokens(kind, described, pieces, tokenizer)
  texts = _names(kind, described['vocabulary'])
  if kind == 'words':
    texts = ['\n' if word == _END else f' {word}' for word in texts]
  return Tokens(kind, described, tuple(text.encode() for text in texts))


def _names(kind: str, vocabulary: str) -> Sequence[str]:
  return vocabulary.split(' ') if kind == 'words' else vocabulary


def _words(text: str) -> Iterator[str]:
  """Yields the words of a text, and the end of each line that has one."""
  for line in io.StringIO(text, newline='\n'):
    yield from line.replace('\n', f' {_END}').split()


def _train(kind: str, text: str, size: int) -> str:
  """Returns the JSON of a tokenizer of subwords, equal for an equal text."""
  settings.require(f'config.data.tokens={kind!r}', 'text', ('tokenizers',))
  import tokenizers
  from tokenizers import models
  from tokenizers import pre_tokenizers
  from tokenizers import trainers

  if not text:
    raise ValueError('the part of the text to train on is empty')
  options: dict[str, Any] = {
      'vocab_size': size,
      'initial_alphabet': pre_tokenizers.ByteLevel.alphabet(),
      'show_progress': False,
  }
  trainer: Any = trainers.BpeTrainer(**options)
  if kind == 'unigram':
    trainer = trainers.UnigramTrainer(**options)
  model = models.BPE() if kind == 'bpe' else models.Unigram()
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.train_from_iterator(io.StringIO(text, newline='\n'), trainer)
  if kind == 'unigram':
    pieces = json.loads(tokenizer.to_str())['model']['vocab']
    # `tokenizers` gives bytes that the text lacks the least score and up to
    # 0.0256 more, in random order; sums differ by rounding.
    least = min(score for _, score in pieces)
    is_rare = lambda name, score: len(name) == 1 and score < least + 0.03
    scores = {n: round(least if is_rare(n, s) else s, 6) for n, s in pieces}
    ordered = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
    tokenizer.model = models.Unigram(ordered)
  return tokenizer.to_str()
