"""Characters: which one comes next in a text?

The text is any file that `text_files.read` reads, cut into a part to train on,
one to validate and one to test, in this order. Training sees windows that begin
anywhere; validation and test are read in windows one after another, each from
an empty memory, and every character but the first of a part is predicted once.
The first characters of a window are predicted from little context. Validation
has windows as long as in training; the test can have longer ones, which show a
model as it is used on a stream.

References:
  Karpathy, char-rnn, 2015: tiny Shakespeare, 90 / 5 / 5 %.
  Feng et al., Were RNNs all we needed?, 2024: the model and its recipe.
"""

from collections.abc import Mapping
import functools
import pathlib
import platform

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rnnzoo import models
from rnnzoo.models import language as language_model
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks import token_inputs
from rnnzoo.tasks.text import files as text_files

# A text is a constant of the compiled training step.
MAX_CHARACTERS = 2**26

# Characters that a sample chooses in one program: the host waits once for them.
_TOGETHER = 32

_DATA_RULES: Mapping[str, fields.Rule] = {
    'path': fields.text(),
    'context': fields.integer(1, 2**20),
    'test_context': fields.integer(1, 2**20, optional=True),
    'steps_per_epoch': fields.integer(1),
    'validation_fraction': fields.number(0, 1, above=True, below=True),
    'test_fraction': fields.number(0, 1, above=True, below=True),
    'sample_length': fields.integer(1, 10**6),
    'sample_temperature': fields.number(0),
}
_MODEL_RULES: Mapping[str, fields.Rule] = {
    'conv_width': fields.integer(0, 1000),
    'mlp': fields.one_of(language_model.MLPS, optional=True),
    'mlp_features': fields.integer(1, 2**18, optional=True),
    'is_tied': fields.flag(),
}


class Characters(protocol.Task):
  """Predicts the next character of a text.

  Attributes:
    dataset: the name of the text.
    splits: 'validation' and 'test', each with 'tokens' int32 [N, T + 1] and
      'length' int32 [N], the number of targets of a window; 'train' is a
      `Generator` of 'tokens' [B, T + 1].
    batch_size: `config.batch_size`.
    vocabulary: all characters of the text, in the order of their code points;
      a token is a place in it.
  """

  metrics = (protocol.BITS_PER_CHARACTER,)
  has_stream = True

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the text of a config as in `configs/base_characters.py`.

    Raises:
      ValueError: a field has a value that cannot be, or the text is no text, or
        too short.
      FileNotFoundError: there is no such file.
    """
    self._set_up(config)
    self.batch_size = config.batch_size
    self.dataset, text = read(config.data.path)
    self.vocabulary = ''.join(sorted(set(text)))
    tokens = encode(text, self.vocabulary)
    data, context = config.data, config.data.context
    fractions = data.validation_fraction, data.test_fraction
    held_out = [round(len(tokens) * fraction) for fraction in fractions]
    sizes = [len(tokens) - sum(held_out), *held_out]
    if sizes[0] <= context or min(held_out) < 2:
      raise ValueError(
          f'{self.dataset} has {len(tokens):,} characters, of which'
          f' {sizes[0]:,} train, {sizes[1]:,} validate and {sizes[2]:,} test;'
          f' training needs more than config.data.context, {context:,}, and the'
          ' others two or more'
      )
    train, validation, test = np.split(tokens, np.cumsum(sizes)[:2])
    test_context = context
    if data.test_context is not None:
      # No step is computed beyond the text.
      test_context = min(data.test_context, len(test) - 1)
    self.splits: Mapping[str, protocol.Split] = {
        'train': protocol.Generator(
            functools.partial(
                random_windows, jnp.asarray(train), self.batch_size, context
            ),
            data.steps_per_epoch,
            source={'tokens': train},
        ),
        'validation': windows(validation, context),
        'test': windows(test, test_context),
    }

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    fields.check(config.data, _DATA_RULES, 'config.data')
    backbones.check(config.model)
    fields.check(config.model, _MODEL_RULES, 'config.model')
    self._model, self._data = config.model, config.data

  def describe(self):
    return {'vocabulary': self.vocabulary}

  @classmethod
  def restore(cls, config, described):
    task = cls.__new__(cls)
    task._set_up(config)
    task.vocabulary = described['vocabulary']
    return task

  def build_model(self, rngs) -> models.LanguageModel:
    options = {name: self._model[name] for name in _MODEL_RULES}
    return backbones.build_language_model(
        self._model, len(self.vocabulary), rngs, **options
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns the mean cross entropy of each window, in nats a character.

    Examples have 'tokens' [B, T + 1], and 'length' [B] where windows may be
    shorter.
    """
    tokens = examples['tokens'].astype(jnp.int32)
    logits = model(tokens[:, :-1], rngs=rngs).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    )
    if 'length' not in examples:
      return protocol.Evaluation(jnp.mean(losses, axis=1))
    lengths = jnp.asarray(examples['length'])
    counts = jnp.arange(losses.shape[1]) < lengths[:, None]
    means = jnp.sum(jnp.where(counts, losses, 0.0), axis=1) / lengths
    return protocol.Evaluation(means, weights=lengths.astype(jnp.float32))

  def check_inputs(self, inputs):
    return token_inputs.check(inputs, len(self.vocabulary))

  def predict(self, model, inputs) -> jax.Array:
    """Returns the most likely next token, int32 [B], of tokens [B, T]."""
    logits = model(jnp.asarray(inputs, jnp.int32))[:, -1]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def sample(self, model, prompt, key, *, length=None, temperature=None):
    """Returns the prompt and then one character after another.

    A prompt '' stands for a new line or, where the text has none, its first
    character by code point. `length` counts characters after the prompt, and
    temperature 0 takes the most likely one; None is the config's.

    Raises:
      ValueError: the prompt has characters that the text has not, or another
        argument is out of its range.
    """
    given = {'length': length, 'temperature': temperature}
    for name, value in given.items():
      rule = _DATA_RULES[f'sample_{name}']
      if value is None:
        given[name] = self._data[f'sample_{name}']
      elif not rule.allows(value):
        raise ValueError(
            f'{name} must be {rule.text}; got {fields.shorten(value)}'
        )
    start = '\n' if '\n' in self.vocabulary else self.vocabulary[0]
    tokens = jnp.asarray(encode(prompt or start, self.vocabulary), jnp.int32)
    return self._sample(model, prompt, tokens, key, **given)

  def _sample(self, model, prompt, tokens, key, length, temperature):
    graphdef, state = nnx.split(model)
    yield prompt
    carry, logits = model.unroll(tokens)
    logits = logits[-1]
    for first in range(0, length, _TOGETHER):
      carry, logits, tokens = _go_on(
          graphdef, state, carry, logits, key, first, float(temperature)
      )
      for token in np.asarray(tokens)[: length - first]:
        yield self.vocabulary[token]

  def report(self, results, best_model) -> protocol.Report:
    """Returns a sample of the first seed's best model, and the vocabulary."""
    seed = results[0]['seed']
    pieces = self.sample(best_model(seed), '', jax.random.key(seed))
    sample = ''.join(pieces)

    def write(path, _):
      text = f'{self.dataset}, seed {seed}:\n\n{sample}\n'
      path.write_text(text, encoding='utf-8')

    return protocol.Report(
        {'num_characters': len(self.vocabulary), 'sample': sample},
        {'sample.txt': write},
    )


# Compiled once for all samples of a run: models of one config have one
# structure.
@functools.partial(jax.jit, static_argnames='graphdef')
def _go_on(graphdef, state, carry, logits, key, first, temperature):
  """Chooses `_TOGETHER` characters, each by its number in the sample."""

  def choose(logits, number):
    # The greatest is zero: divided by a small temperature, it would be
    # infinite.
    is_warm = temperature > 0
    scaled = (logits - jnp.max(logits)) / jnp.where(is_warm, temperature, 1)
    random = jax.random.categorical(jax.random.fold_in(key, number), scaled)
    return jnp.where(is_warm, random, jnp.argmax(logits))

  def step(past, number):
    carry, logits = past
    token = choose(logits, number)
    carry, logits = nnx.merge(graphdef, state).step(carry, token)
    return (carry, logits), token

  numbers = first + jnp.arange(_TOGETHER)
  (carry, logits), tokens = jax.lax.scan(step, (carry, logits), numbers)
  return carry, logits, tokens


def read(path: str) -> tuple[str, str]:
  """Returns the name of a text, and the text.

  Args:
    path: path of a file that `text_files.read` reads; '' for the documentation
      of Python's own topics, which differs from one Python to the next: its
      name tells which Python.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is no text, or too large, or empty.
  """
  if not path:
    from pydoc_data import topics

    text = '\n'.join(topics.topics[name] for name in sorted(topics.topics))
    return f"topics of Python {platform.python_version()}'s help", text
  text = text_files.read(path, 'config.data.path', 4 * MAX_CHARACTERS)
  if not 0 < len(text) <= MAX_CHARACTERS:
    raise ValueError(
        f'{path} has {len(text):,} characters; a text has from 1 to'
        f' {MAX_CHARACTERS:,}'
    )
  return pathlib.Path(path).name, text


def encode(text: str, vocabulary: str) -> np.ndarray:
  """Returns the tokens of a text, int32 [N].

  Raises:
    ValueError: a character is not in the vocabulary.
  """
  if unknown := sorted(set(text) - set(vocabulary)):
    raise ValueError(
        f'{fields.shorten("".join(unknown))} is not in the text that the model'
        ' was trained on'
    )
  places = {character: place for place, character in enumerate(vocabulary)}
  return np.array([places[character] for character in text], np.int32)


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
