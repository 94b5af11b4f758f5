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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import io
import itertools
import json
from typing import Any

import numpy as np

from rnnzoo.tasks import fields

SUBWORDS = ('bpe', 'unigram')
KINDS = ('characters', 'bytes', *SUBWORDS, 'words')
# Subwords at most, where the config names no number.
_NUM_SUBWORDS = 8192
_UNKNOWN, _END = '<unk>', '<eos>'


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Text to tokens and back."""

  # The argument of `restore`, which JSON can hold.
  described: Mapping[str, str]
  # The UTF-8 of each token; one may end within a character.
  pieces: Sequence[bytes]
  find: Callable[[str], Iterable[int]]  # Function from a text to its tokens.
  free: bytes = b''  # A piece that counts no byte.

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """The number of bytes of each token, float32 [tokens]."""
    sizes = [0 if p == self.free else len(p) for p in self.pieces]
    return np.array(sizes, np.float32)

  def encode(self, text: str) -> np.ndarray:
    """Returns the tokens of a text, int32 [N]."""
    return np.fromiter(self.find(text), np.int32)

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
  """
  if kind == 'bytes':
    return restore(kind, {})
  if kind in SUBWORDS:
    trained = _train(kind, texts[0], size or _NUM_SUBWORDS)
    return restore(kind, {'tokenizer': trained})
  if kind == 'characters':
    return restore(kind, {'vocabulary': ''.join(sorted(set().union(*texts)))})
  counts = collections.Counter(_words(texts[0]))
  del counts[_UNKNOWN]
  words = sorted(counts, key=lambda word: (-counts[word], word))
  return restore(kind, {'vocabulary': ' '.join([_UNKNOWN, *words][:size])})


def restore(kind: str, described: Mapping[str, str]) -> Tokens:
  """Returns the tokens of a kind of which `Tokens.described` is this."""
  if kind == 'bytes':
    pieces = [bytes([number]) for number in range(256)]
    return Tokens(described, pieces, str.encode)
  if kind in SUBWORDS:
    return _restore_subwords(described)
  names: Any = described['vocabulary']
  if kind == 'words':
    names = names.split(' ')
  places = {name: place for place, name in enumerate(names)}
  if kind == 'characters':
    pieces = [name.encode() for name in names]
    return Tokens(described, pieces, functools.partial(_characters, places))
  pieces = [b'\n' if name == _END else f' {name}'.encode() for name in names]
  find = lambda text: (places.get(word, 0) for word in _words(text))
  # Each word counts a space, so the end of its line is counted by the first.
  return Tokens(described, pieces, find, free=b'\n')


def _characters(places: Mapping[str, int], text: str) -> Iterator[int]:
  if unknown := sorted(set(text) - places.keys()):
    raise ValueError(
        f'{fields.shorten("".join(unknown))} is not in the text that the model'
        ' was trained on'
    )
  return map(places.__getitem__, text)


def _lines(text: str) -> Iterator[str]:
  return io.StringIO(text, newline='\n')


def _words(text: str) -> Iterator[str]:
  """Yields the words of a text, and the end of each line that has one."""
  for line in _lines(text):
    yield from line.replace('\n', f' {_END}').split()


def _restore_subwords(described: Mapping[str, str]) -> Tokens:
  import tokenizers
  from tokenizers import pre_tokenizers

  tokenizer = tokenizers.Tokenizer.from_str(described['tokenizer'])
  # A sign stands for each byte, in order; for many, that of its number.
  signs = sorted(pre_tokenizers.ByteLevel.alphabet())
  own = [ord(sign) for sign in signs if ord(sign) < 256]
  others = sorted(set(range(256)) - set(own))
  byte_of = dict(zip(signs, own + others, strict=True))
  names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
  pieces = [bytes(byte_of[sign] for sign in name) for name, _ in names]

  def find(text):
    lines = _lines(text)
    while batch := list(itertools.islice(lines, 10_000)):
      for found in tokenizer.encode_batch_fast(batch):
        yield from found.ids

  return Tokens(described, pieces, find)


def _train(kind: str, text: str, size: int) -> str:
  """Returns the JSON of a tokenizer of subwords, equal for an equal text."""
  import tokenizers
  from tokenizers import models
  from tokenizers import pre_tokenizers
  from tokenizers import trainers

  if not text:
    raise ValueError('the part of the text to train on is empty')
  is_bpe = kind == 'bpe'
  make_trainer: Any = trainers.BpeTrainer if is_bpe else trainers.UnigramTrainer
  trainer = make_trainer(
      vocab_size=size,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
  )
  tokenizer = tokenizers.Tokenizer(models.BPE() if is_bpe else models.Unigram())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.train_from_iterator(_lines(text), trainer)
  if not is_bpe:
    pieces = json.loads(tokenizer.to_str())['model']['vocab']
    # `tokenizers` gives bytes that the text lacks the least score and up to
    # 0.0256 more, in random order; sums differ by rounding.
    least = min(score for _, score in pieces)
    is_rare = lambda name, score: len(name) == 1 and score < least + 0.03
    scores = {n: round(least if is_rare(n, s) else s, 6) for n, s in pieces}
    ordered = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
    tokenizer.model = models.Unigram(ordered)
  return tokenizer.to_str()
