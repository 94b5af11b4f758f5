"""Vocabularies: words, characters or subwords of a text, by `tokenizers`."""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any

from rnnzoo.models import decoding

# A word, the end of one after an apostrophe, or one other sign.
_WORD = r"'\w+|\w+|[^\w\s]"
KINDS = ('words', 'characters', 'subwords')
_SPECIAL = ('<pad>', '<s>', '</s>', '<unk>')
# Places where a line begins or words have, as a rule, no space between them;
# the newline is the place.
_CLOSE = re.compile(r"^ \n|\n[,.;:!?)'\]]|[([]\n|\w\n- \w|\w -\n\w")
# The first letter of a token of words that departs from this rule. It is no
# letter of a word, so no other token has it before more letters.
_MARK = '\uffed'


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Text to tokens and back."""

  tokenizer: Any  # A `tokenizers.Tokenizer`.
  kind: str  # A name in `KINDS`.
  lowercase: bool  # Whether case is dropped.

  def __len__(self) -> int:
    return self.tokenizer.get_vocab_size()

  def describe(self) -> dict[str, Any]:
    """Returns the argument of `restore`, which JSON can hold."""
    return {
        'tokenizer': self.tokenizer.to_str(),
        'kind': self.kind,
        'lowercase': self.lowercase,
    }

  def encode(self, lines: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of each line, without a start or an end."""
    if self.kind != 'words':
      return [found.ids for found in self.tokenizer.encode_batch(list(lines))]
    # A word that is known without its mark only is that one.
    known, unknown = self.tokenizer.get_vocab(), decoding.UNKNOWN
    return [
        [known.get(t, known.get(_unmarked(t), unknown)) for t in _marked(line)]
        for line in map(self.normalized, lines)
    ]

  def pieces(self, tokens: Iterable[int]) -> list[str]:
    """Returns each token as text, for people."""
    found = self._pieces(tokens)
    return list(map(_unmarked, found)) if self.kind == 'words' else found

  def text(self, tokens: Iterable[int]) -> str:
    """Returns the line, normalised, of which these are the tokens."""
    if self.kind == 'subwords':
      return self.tokenizer.decode(
          list(map(int, tokens)), skip_special_tokens=False
      )
    pieces = self._pieces(tokens)
    if self.kind == 'characters':
      return ''.join(pieces)
    words = list(map(_unmarked, pieces))
    parts = zip(pieces, words, _are_close(words), strict=True)
    return ''.join(
        word if is_close == (piece == word) else f' {word}'
        for piece, word, is_close in parts
    )

  def _pieces(self, tokens: Iterable[int]) -> list[str]:
    return [self.tokenizer.id_to_token(int(token)) for token in tokens]

  def normalized(self, line: str) -> str:
    """Returns a line in NFC and in the vocabulary's case."""
    return self.tokenizer.normalizer.normalize_str(line)

  def words(self, line: str) -> list[str]:
    """Returns the words of a line in the vocabulary's case, known or not."""
    return [word for word, _ in _split(self.normalized(line))]

  def words_of(self, tokens: Sequence[int]) -> list[str]:
    """Returns the words of tokens; '<unk>' is one."""
    if self.kind == 'words':
      return self.pieces(tokens)
    return self.words(self.text(tokens))


@functools.cache
def _splitter() -> Any:
  import tokenizers
  from tokenizers import pre_tokenizers

  pattern = tokenizers.Regex(_WORD)
  return pre_tokenizers.Split(pattern, 'removed', invert=True)


def _split(line: str) -> list[tuple[str, tuple[int, int]]]:
  """Returns the words of a normalised line, and where they start and end."""
  return _splitter().pre_tokenize_str(line)


def _are_close(words: Sequence[str]) -> list[bool]:
  """Returns whether each word, as a rule, has no space before it."""
  around = ['', '', *words, '']
  fours = zip(around, around[1:], around[2:], around[3:], strict=False)
  return [bool(_CLOSE.search(f'{a} {b}\n{c} {d}')) for a, b, c, d in fours]


def _marked(line: str) -> list[str]:
  """Returns a normalised line's words, with a mark where `_are_close` errs."""
  found = _split(line)
  words = [word for word, _ in found]
  starts = [start for _, (start, _) in found]
  ends = [*starts[:1], *(end for _, (_, end) in found[:-1])]
  parts = zip(words, starts, ends, _are_close(words), strict=True)
  return [
      word if is_close == (start == end) else _MARK + word
      for word, start, end, is_close in parts
  ]


def _unmarked(token: str) -> str:
  return token[1:] if token[0] == _MARK and len(token) > 1 else token


def make_vocabulary(
    lines: Sequence[str],
    kind: str,
    *,
    lowercase: bool,
    min_count: int,
    size: int,
) -> Vocabulary:
  """Returns the vocabulary of a text; the first tokens are `decoding`'s.

  The kind 'subwords' is of byte-pair encodings. Tokens that the text has
  `min_count` times are kept, the most frequent `size` of them.
  """
  import tokenizers
  from tokenizers import decoders
  from tokenizers import models
  from tokenizers import normalizers
  from tokenizers import pre_tokenizers
  from tokenizers import trainers

  unknown = _SPECIAL[decoding.UNKNOWN]
  options: dict[str, Any] = {
      'vocab_size': size,
      'min_frequency': min_count,
      'special_tokens': list(_SPECIAL),
      'show_progress': False,
  }
  forms: list[Any] = [normalizers.NFC()]
  if kind == 'subwords':  # There it stands for a space.
    forms.append(normalizers.Replace('\u2581', '_'))
  normalizer = normalizers.Sequence(
      [*forms, normalizers.Lowercase()] if lowercase else forms
  )
  if kind == 'subwords':
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = _alphabet(
        map(normalizer.normalize_str, lines), min_count, size - len(_SPECIAL)
    )
    trainer: Any = trainers.BpeTrainer(
        **options, initial_alphabet=alphabet, limit_alphabet=len(alphabet)
    )
  else:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token=unknown))
    if kind == 'characters':
      tokenizer.pre_tokenizer = pre_tokenizers.Split(
          tokenizers.Regex('.'), 'removed', invert=True
      )
    trainer = trainers.WordLevelTrainer(**options)
  tokenizer.normalizer = normalizer
  parts: Any = lines
  if kind == 'words':
    # Each word counts without its mark, too.
    parts = (
        [t for marked in _marked(line) for t in {marked, _unmarked(marked)}]
        for line in map(normalizer.normalize_str, lines)
    )
  tokenizer.train_from_iterator(parts, trainer)
  if tokenizer.get_vocab_size() <= len(_SPECIAL):
    raise ValueError(
        f'the vocabulary of {kind} is empty: the text has no token {min_count}'
        f' times, or config.data.vocabulary_size={size} has no room beside'
        f' {", ".join(_SPECIAL)}; choose a smaller config.data.min_count or a'
        ' larger config.data.vocabulary_size'
    )
  return _vocabulary(tokenizer, kind, lowercase)


def _alphabet(lines: Iterable[str], min_count: int, size: int) -> list[str]:
  """Returns the characters that subwords are made of, the most frequent.

  `BpeTrainer` alone keeps all characters, however many and however rare.
  """
  counts: collections.Counter[str] = collections.Counter()
  for line in lines:
    # Each line begins with a space, and Metaspace writes it so.
    counts.update(f' {line}'.replace(' ', '\u2581') if line else '')
  found = [c for c, count in counts.items() if count >= min_count]
  return sorted(found, key=lambda c: (-counts[c], c))[:size]


def restore(described: Mapping[str, Any]) -> Vocabulary:
  """Returns the vocabulary of which `Vocabulary.describe` returned this."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer.from_str(described['tokenizer'])
  return _vocabulary(tokenizer, described['kind'], described['lowercase'])


def _vocabulary(tokenizer: Any, kind: str, lowercase: bool) -> Vocabulary:
  # A text that has '</s>' in it has not ended there.
  tokenizer.encode_special_tokens = True
  return Vocabulary(tokenizer, kind, lowercase)
