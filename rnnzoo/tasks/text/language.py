"""Language: which token of a text comes next?

The tokens are characters, bytes, subwords or words. The text is a file that
`text_files.read` reads, cut into a part to train on, one to validate and one to
test, in this order; or a folder with a file for each. Training sees windows
that begin anywhere; validation and test are read in windows one after another,
each from an empty memory, and every token but the first of a part is predicted
once. The first tokens of a window are predicted from little context. Validation
has windows as long as in training; the test can have longer ones, which show a
model as it is used on a stream.

References:
  Karpathy, char-rnn, 2015: tiny Shakespeare, 90 / 5 / 5 %.
  Feng et al., Were RNNs all we needed?, 2024: the model and its recipe.
  Mikolov et al., Recurrent neural network based language model, 2010: words of
  Penn Treebank, the end of a line being one.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools
import pathlib
import platform
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rnnzoo import models
from rnnzoo import settings
from rnnzoo.models import language as language_model
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import tokens as tokens_lib

# A text is a constant of the compiled training step.
MAX_TOKENS = 2**27

# Tokens that a sample chooses in one program: the host waits once for them.
_TOGETHER = 32

# Words in the names of files of a folder, by part.
_PARTS = (('train',), ('valid', 'validation', 'val'), ('test',))
_FRACTIONS = {'validation_fraction': 0.05, 'test_fraction': 0.05}

_SAMPLE_RULES: fields.Rules = {
    'length': fields.integer(1, 10**6),
    'temperature': fields.number(0),
    'top_k': fields.optional(fields.integer(1)),
    'top_p': fields.optional(fields.number(0, 1, above=True)),
}
DATA_RULES: fields.Rules = {
    'path': fields.text(),
    'context': fields.integer(1, 2**20),
    'test_context': fields.optional(fields.integer(1, 2**20)),
    'steps_per_epoch': fields.integer(1),
    'validation_fraction': fields.number(0, 1, above=True, below=True),
    'test_fraction': fields.number(0, 1, above=True, below=True),
    'sample_length': _SAMPLE_RULES['length'],
    'sample_temperature': _SAMPLE_RULES['temperature'],
    'tokens': fields.one_of(tokens_lib.KINDS),
    'vocabulary_size': fields.optional(fields.integer(256, 10**7)),
}
_MODEL_RULES: fields.Rules = {
    'conv_width': fields.integer(0, 1000),
    'mlp': fields.optional(fields.one_of(language_model.MLPS)),
    'mlp_features': fields.optional(fields.integer(1, 2**18)),
    'is_tied': fields.flag(),
}


class Text(protocol.ConfigTask):
  """Predicts the next token of a text.

  Attributes:
    splits: 'validation' and 'test', each with 'tokens' int32 [N, T + 1] and
      'length' int32 [N], the number of targets of a window; 'train' is a
      `Generator` of 'tokens' [B, T + 1].
    metrics: bits a character for characters, perplexity for words, else bits a
      byte, which models of different tokens can be compared by.
    tokens: tokens of the text, a `tokens.Tokens`.
  """

  rules = DATA_RULES
  model_rules = _MODEL_RULES
  has_stream = True

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the text of a config as in `configs/base_text.py`.

    Raises:
      ModuleNotFoundError: the package for subwords is missing.
    """
    self._set_up(config)
    data, context = config.data, config.data.context
    self.dataset, texts = _read_parts(data, self._kind)
    self.tokens = tokens_lib.make(self._kind, texts, data.vocabulary_size)
    train, validation, test = parts = list(map(self.tokens.encode, texts))
    sizes = list(map(len, parts))
    if sizes[0] <= context or min(sizes) < 2 or max(sizes) > MAX_TOKENS:
      raise ValueError(
          f'{self.dataset} has {sum(sizes):,} tokens, of which {sizes[0]:,}'
          f' train, {sizes[1]:,} validate and {sizes[2]:,} test; training needs'
          f' more than config.data.context, {context:,}, the others two or'
          f' more, and none has more than {MAX_TOKENS:,}'
      )
    self.splits: Mapping[str, protocol.Split] = {
        'train': self._training(train),
        'validation': self._validation(validation),
        'test': self._test_windows(test),
    }

  def _training(self, tokens: np.ndarray) -> protocol.Generator:
    given = jnp.asarray(tokens), self.batch_size, self._data.context
    return protocol.Generator(
        functools.partial(random_windows, *given),
        self._data.steps_per_epoch,
        source={'tokens': tokens},
    )

  def _validation(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
    return windows(tokens, self._data.context)

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    super()._set_up(config)
    data = config.data
    self._kind = data.tokens
    if self._kind in ('characters', 'bytes'):
      fields.check_unread(data, {'vocabulary_size': None}, 'tokens')
    if self._kind in tokens_lib.SUBWORDS:
      part = f'config.data.tokens={self._kind!r}'
      settings.require(part, 'text', ('tokenizers',))
    main = {
        'characters': (protocol.BITS_PER_CHARACTER,),
        'words': (protocol.PERPLEXITY,),
    }
    bits = protocol.BITS_PER_BYTE, protocol.BYTES_PER_TOKEN
    self.metrics = main.get(self._kind, bits)

  def _test_windows(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
    context = self._data.context
    if self._data.test_context is not None:
      # No step is computed beyond the text.
      context = min(self._data.test_context, len(tokens) - 1)
    return windows(tokens, context)

  def describe(self):
    return dict(self.tokens.described)

  def _restore(self, described):
    self.tokens = tokens_lib.restore(self._kind, described)

  def build_model(self, rngs) -> models.LanguageModel:
    options = {name: self._model[name] for name in _MODEL_RULES}
    return backbones.build_language_model(
        self._model, len(self.tokens.pieces), rngs, **options
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns the mean cross entropy of each window, in nats a token.

    Examples have 'tokens' [B, T + 1], and 'length' [B] where windows may be
    shorter. Predictions are sums over each window, [B]: nats and bytes.
    """
    tokens = examples['tokens'].astype(jnp.int32)
    logits = model(tokens[:, :-1], rngs=rngs).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    )
    sizes = jnp.asarray(self.tokens.sizes)[tokens[:, 1:]]
    if 'length' not in examples:
      scores = {protocol.BYTES_PER_TOKEN.name: jnp.mean(sizes, axis=1)}
      return protocol.Evaluation(jnp.mean(losses, axis=1), scores)
    lengths = jnp.asarray(examples['length'])
    counts = jnp.arange(losses.shape[1]) < lengths[:, None]
    sums = [jnp.sum(jnp.where(counts, x, 0.0), axis=1) for x in (losses, sizes)]
    scores = {protocol.BYTES_PER_TOKEN.name: sums[1] / lengths}
    weights = lengths.astype(jnp.float32)
    return protocol.Evaluation(sums[0] / lengths, scores, weights, sums)

  def measure(self, model, split, predictions) -> dict[str, float]:
    """Returns the bits a byte, where they are no metric."""
    if protocol.BITS_PER_BYTE in self.metrics:
      return {}
    nats, size = (np.sum(x, dtype=np.float64) for x in predictions)
    return {'bits_per_byte': float(nats / size / np.log(2.0))}

  def read_text(self, text) -> protocol.Examples:
    tokens = self.tokens.encode(text)
    if len(tokens) < 2:
      raise ValueError(
          f'a text must have two tokens or more, of which the first is not'
          f' predicted; got {len(tokens)}'
      )
    return self._test_windows(tokens)

  def check_inputs(self, inputs):
    return array_checks.tokens(inputs, len(self.tokens.pieces))

  def logits(self, model, inputs) -> jax.Array:
    """Returns logits of the next token, [B, V], of tokens [B, T]."""
    return model(jnp.asarray(inputs, jnp.int32))[:, -1]

  def sample(self, model, prompt, key, **options):
    """Returns the prompt and then one token after another, whole characters.

    A prompt without tokens stands for a new line or, where the text has none,
    its first token. `length` counts tokens after the prompt, and temperature 0
    takes the most likely one; None is the config's. Bytes that are no UTF-8
    become U+FFFD.
    """
    options, start = self._options(**options), [self._start(prompt)]
    parts = self._generate(model, start, key[None], **options)
    return self._stream(prompt, parts)

  def sample_many(self, model, prompts, key, **options):
    rows, options = list(map(self._start, prompts)), self._options(**options)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(rows)))
    parts = list(self._generate(model, rows, keys, **options))
    texts = map(self.tokens.text, np.concatenate(parts).T)
    return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]

  def _options(
      self, length=None, temperature=None, top_k=None, top_p=None
  ) -> dict[str, Any]:
    """Returns options of a sample, with the config's in place of None."""
    given = {'length': length, 'temperature': temperature}
    given |= {'top_k': top_k, 'top_p': top_p}
    for name, value in given.items():
      rule = _SAMPLE_RULES[name]
      if value is None:
        given[name] = self._data.get(f'sample_{name}')
      elif not rule.allows(value):
        raise ValueError(
            f'{name} must be {rule.text}; got {fields.shorten(value)}'
        )
    return given

  def _start(self, prompt: str) -> np.ndarray:
    """Returns the tokens of a prompt, at least one."""
    tokens, pieces = self.tokens.encode(prompt), self.tokens.pieces
    first = pieces.index(b'\n') if b'\n' in pieces else 0
    return tokens if len(tokens) else np.array([first], np.int32)

  def _generate(
      self, model, rows, keys, *, length, temperature, top_k, top_p
  ) -> Iterator[np.ndarray]:
    """Yields the next tokens of texts, int32 [time, texts]."""
    graphdef, state = nnx.split(model)
    carry, logits = _after(model, rows)
    cuts = None
    if (top_k, top_p) != (None, None):
      cuts = top_k or len(self.tokens.pieces), float(top_p or 1.0)
    for first in range(0, length, _TOGETHER):
      carry, logits, tokens = _go_on(
          graphdef, state, carry, logits, keys, first, float(temperature), cuts
      )
      yield np.asarray(tokens)[: length - first]

  def _stream(self, prompt, parts) -> Iterator[str]:
    """Yields the text of a sample; a character waits for its last byte."""
    yield prompt
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    for token in itertools.chain.from_iterable(parts):
      if text := decoder.decode(self.tokens.pieces[token.item()]):
        yield text
    if text := decoder.decode(b'', final=True):
      yield text

  def report(self, results, best_model) -> protocol.Report:
    """Returns a sample of the first seed's best model, and its tokens."""
    seed = results[0]['seed']
    pieces = self.sample(best_model(seed), '', jax.random.key(seed))
    sample = ''.join(pieces)

    def write(path, _):
      text = f'{self.dataset}, seed {seed}:\n\n{sample}\n'
      path.write_text(text, encoding='utf-8')

    return protocol.Report(
        {'vocabulary_size': len(self.tokens.pieces), 'sample': sample},
        {'sample.txt': write},
    )


def _after(model: Any, rows: Sequence[np.ndarray]) -> tuple[Any, jax.Array]:
  """Returns carry and logits [texts, V] after texts, each of its own length.

  Texts of one length run together.
  """
  length = lambda place: len(rows[place])
  order, found = sorted(range(len(rows)), key=length), []
  for _, places in itertools.groupby(order, length):
    carry, logits = model.unroll(jnp.array([rows[place] for place in places]))
    found.append((carry, logits[:, -1]))
  back = np.argsort(order)
  return jax.tree.map(lambda *parts: jnp.concatenate(parts)[back], *found)


# Compiled once for all samples of a run: models of one config have one
# structure.
@functools.partial(jax.jit, static_argnames='graphdef')
def _go_on(graphdef, state, carry, logits, keys, first, temperature, cuts):
  """Chooses `_TOGETHER` tokens of each text, by their numbers in the sample."""

  def choose(logits, key):
    # The greatest is zero: divided by a small temperature, it would be
    # infinite.
    is_warm = temperature > 0
    scaled = (logits - jnp.max(logits)) / jnp.where(is_warm, temperature, 1)
    if cuts is not None:
      scaled = _cut(scaled, *cuts)
    random = jax.random.categorical(key, scaled)
    return jnp.where(is_warm, random, jnp.argmax(logits))

  def step(past, number):
    carry, logits = past
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    tokens = jax.vmap(choose)(logits, own)
    carry, logits = nnx.merge(graphdef, state).step(carry, tokens)
    return (carry, logits), tokens

  numbers = first + jnp.arange(_TOGETHER)
  (carry, logits), tokens = jax.lax.scan(step, (carry, logits), numbers)
  return carry, logits, tokens


def _cut(logits: jax.Array, top_k: Any, top_p: Any) -> jax.Array:
  """Returns logits [V] of which only the most likely are finite.

  They are `top_k` or, if these are fewer, as many as have the probability
  `top_p` together, the last of them included.
  """
  order = jnp.argsort(-logits)
  falling = jnp.where(jnp.arange(len(order)) < top_k, logits[order], -jnp.inf)
  shares = jax.nn.softmax(falling)
  before = jnp.cumsum(shares) - shares
  kept = jnp.where((before < top_p) | (top_p >= 1), falling, -jnp.inf)
  return jnp.zeros_like(logits).at[order].set(kept)


def read(path: str) -> tuple[str, str]:
  """Returns the name of a text, and the text.

  Args:
    path: path of a file that `text_files.read` reads; '' for the documentation
      of Python's own topics, which differs from one Python to the next: its
      name tells which Python.
  """
  if not path:
    from pydoc_data import topics

    text = '\n'.join(topics.topics[name] for name in sorted(topics.topics))
    return f"topics of Python {platform.python_version()}'s help", text
  text = text_files.read(path, 'config.data.path')
  if not text:
    raise ValueError(f'{path} has 0 characters; a text has one or more')
  return pathlib.Path(path).name, text


def _read_parts(
    data: ml_collections.ConfigDict, kind: str
) -> tuple[str, list[str]]:
  """Returns a text's name, and its parts: train, validation, test."""
  folder = fields.expand(data.path, 'config.data.path')
  if data.path and folder.is_dir():
    fields.check_unread(data, _FRACTIONS, 'path')
    files = [_file_of_part(folder, words) for words in _PARTS]
    return folder.name, [read(str(file))[1] for file in files]
  name, text = read(data.path)
  fractions = data.validation_fraction, data.test_fraction
  held_out = [round(len(text) * fraction) for fraction in fractions]
  cuts = [max(0, len(text) - sum(held_out)), len(text) - held_out[1]]
  if kind == 'words':  # No word is cut.
    cuts = [text.find('\n', cut) + 1 or cut for cut in cuts]
  return name, [text[: cuts[0]], text[slice(*cuts)], text[cuts[1] :]]


def _file_of_part(folder: pathlib.Path, words: Sequence[str]) -> pathlib.Path:
  """Returns the file of a folder whose name has one of these words."""
  is_one = lambda path: set(words) & set(re.split('[^a-z]', path.name.lower()))
  found = sorted(path for path in folder.iterdir() if is_one(path))
  if len(found) != 1:
    names = ', '.join(path.name for path in found[:3])
    raise ValueError(
        f'config.data.path={folder} must have one file with {words[0]!r} in its'
        f' name, as ptb.{words[0]}.txt; it has {names or "none"}'
    )
  return found[0]


def random_windows(
    tokens: jax.Array, batch_size: int, context: int, key: jax.Array
) -> dict[str, jax.Array]:
  """Returns windows 'tokens' [B, T + 1] of T = context, which begin anywhere.

  The text is [N], N > T.
  """
  starts = jax.random.randint(key, (batch_size,), 0, len(tokens) - context)
  return {'tokens': tokens[starts[:, None] + jnp.arange(context + 1)]}


def windows(tokens: np.ndarray, context: int) -> dict[str, np.ndarray]:
  """Returns all of a text in windows, each of which begins where one ends.

  They are 'tokens' int32 [windows, T + 1] of T = context, the last one padded
  with zeros, and 'length' int32 [windows], targets of each. A text [N], N >= 2,
  has N - 1 targets.
  """
  num_targets = len(tokens) - 1
  count = -(-num_targets // context)
  lengths = np.full(count, context, np.int32)
  lengths[-1] = num_targets - (count - 1) * context
  padded = np.zeros(count * context + 1, np.int32)
  padded[: len(tokens)] = tokens
  places = np.arange(count)[:, None] * context + np.arange(context + 1)
  return {'tokens': padded[places], 'length': lengths}
