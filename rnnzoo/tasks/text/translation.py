"""Translation: a line of text into another, by an encoder and a decoder.

The lines are of files in pairs, or dates as people write them, to be written as
ISO 8601 does. Losses are cross entropies in nats a token of the target, its end
counted. At the end the test is decoded, and compared with its references.

References:
  Cho et al., Learning phrase representations using RNN encoder-decoder, 2014.
  Bahdanau et al., Neural machine translation by jointly learning to align and
  translate, 2015.
"""

from collections.abc import Mapping
import functools
import itertools
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import optax

import rnnzoo
from rnnzoo import models
from rnnzoo import settings
from rnnzoo.models import decoding
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import translation_decoding
from rnnzoo.tasks.text import vocabularies

BLEU = protocol.Metric('bleu', greatest=100.0, form='.2f', at_test=True)
EXACT_MATCH = protocol.Metric('exact_match', at_test=True)

# Test lines in the report.
_EXAMPLES = 20

_SPLITS = ('train', 'validation', 'test')
_SIDES = ('source', 'target')
_DATA_RULES: fields.Rules = {
    'source': fields.Rule(
        "'dates', 'files' or 'tfds:<name>'",
        lambda value: value in ('dates', 'files')
        or (isinstance(value, str) and tfds_sets.is_source(value)),
    ),
    'data_dir': fields.text(),
    **{f'{part}_{side}': fields.text() for part in _SPLITS for side in _SIDES},
    'num_dates': fields.integer(1, text_files.NUM_DAYS - 2000),
    'dates_seed': fields.seed(),
    'source_tokens': fields.one_of(vocabularies.KINDS),
    'target_tokens': fields.one_of(vocabularies.KINDS),
    'lowercase': fields.flag(),
    'min_count': fields.integer(1),
    'vocabulary_size': fields.integer(5, 10**7),
    'num_buckets': fields.integer(1, 20),
    'output_length': fields.integer(1, 10**4),
    'num_beams': fields.integer(1, 1000),
    'length_penalty': fields.number(0),
    'decode_batch_size': fields.integer(1, 10**5),
}
_MODEL_RULES: fields.Rules = {
    'embed_features': fields.integer(1, 2**16),
    'attention_features': fields.integer(0, 2**16),
    'is_bidirectional': fields.flag(),
    'init_std': fields.number(0),
    'teacher_forcing': fields.number(0, 1),
    'label_smoothing': fields.number(0, 1, below=True),
    'norm': fields.optional(fields.one_of(('layer',))),
}


class Translation(protocol.ConfigTask):
  """Translates lines of text.

  Attributes:
    splits: 'train', 'validation' and 'test', each as `files.buckets`
      has it, or where there is one bucket, that.
    metrics: exact match first for dates, BLEU for text.
    source_vocabulary: vocabulary of the source lines to train on.
    target_vocabulary: vocabulary of the target lines to train on.
  """

  rules = _DATA_RULES
  model_rules = _MODEL_RULES
  calls_model = False

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the text, and makes vocabularies from the part to train on.

    The config is as in `configs/base_translation.py`.

    Raises:
      ModuleNotFoundError: a package is missing.
    """
    self._set_up(config)
    data = config.data
    is_text = data.source != 'dates'
    self.metrics = (BLEU if is_text else EXACT_MATCH, protocol.PERPLEXITY)
    self.dataset, self._lines = _read(data)
    sources, targets = self._lines['train']
    make = functools.partial(
        vocabularies.make_vocabulary,
        lowercase=data.lowercase,
        min_count=data.min_count,
        size=data.vocabulary_size,
    )
    self.source_vocabulary = make(sources, data.source_tokens)
    self.target_vocabulary = make(targets, data.target_tokens)
    pairs = {
        name: (
            self.source_vocabulary.encode(sources),
            self.target_vocabulary.encode(targets),
        )
        for name, (sources, targets) in self._lines.items()
    }
    longest = text_files.longest(pairs['train'])
    cuts = text_files.boundaries(longest, data.num_buckets)
    parts = {k: text_files.buckets(part, cuts) for k, part in pairs.items()}
    # One bucket is not a list of buckets: several seeds can train at once.
    self.splits: Mapping[str, protocol.Split] = {
        name: part if len(part) > 1 else part[0] for name, part in parts.items()
    }

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    settings.require('task translation', 'text', ('tokenizers', 'sacrebleu'))
    super()._set_up(config)
    if config.model.dense:
      raise ValueError(
          'config.model.dense must be False for a translation, whose decoder'
          ' starts from one h; config.model.residual=True would work'
      )

  def describe(self):
    return {
        'source_vocabulary': self.source_vocabulary.describe(),
        'target_vocabulary': self.target_vocabulary.describe(),
    }

  def _restore(self, described):
    restored = vocabularies.restore
    self.source_vocabulary = restored(described['source_vocabulary'])
    self.target_vocabulary = restored(described['target_vocabulary'])

  def build_model(self, rngs) -> models.Seq2Seq:
    model = self._model
    encoder = backbones.build(
        model,
        model.embed_features,
        rngs,
        _bidirectional_stack if model.is_bidirectional else rnnzoo.Stack,
    )
    decoder = backbones.build(
        model,
        model.embed_features + encoder.out_features,
        rngs,
        _stack_without_dropout,
    )
    built = models.Seq2Seq(
        encoder,
        decoder,
        num_source_tokens=len(self.source_vocabulary),
        num_target_tokens=len(self.target_vocabulary),
        attention_features=model.attention_features or None,
        dropout_rate=model.dropout_rate,
        dtype=backbones.find_dtype(model),
        rngs=rngs,
    )
    if model.init_std:
      _draw(built, model.init_std, rngs)
    return built

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns the mean cross entropy of each target, in nats a token.

    Examples are of one bucket. In training `rngs` is the source of dropout
    masks and of the choice between the target's own tokens and the model's;
    evaluation sees the target's own.
    """
    target = jnp.asarray(examples['target'])
    logits = model(
        jnp.asarray(examples['source']),
        target[:, :-1],
        source_lengths=jnp.asarray(examples['source_length']),
        teacher_forcing=1.0 if rngs is None else self._model.teacher_forcing,
        rngs=rngs,
    ).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, target[:, 1:]
    )
    if rngs is not None and self.label_smoothing:
      # All tokens count alike.
      uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
      losses += self.label_smoothing * (uniform - losses)
    lengths = jnp.asarray(examples['target_length'])
    counts = jnp.arange(losses.shape[1]) < lengths[:, None]
    means = jnp.sum(jnp.where(counts, losses, 0.0), axis=1) / lengths
    return protocol.Evaluation(means, weights=lengths.astype(jnp.float32))

  def check_inputs(self, inputs):
    return array_checks.tokens(inputs, len(self.source_vocabulary))

  def predict(self, model, inputs) -> jax.Array:
    """Returns the tokens of the translations, int32 [B, output_length].

    Inputs are tokens int32 [B, S], as in the splits' 'source'.
    """
    source = jnp.asarray(inputs, jnp.int32)
    lengths = jnp.sum(source != decoding.PAD, axis=1)
    return self._decode(self._data.num_beams, model, source, lengths).tokens

  def predict_lines(self, model, lines):
    """Returns a translation for each line.

    `config.data.decode_batch_size` lines are read before the first is
    translated.
    """
    decode = self._decoder(model, self._data.num_beams)
    lines = iter(lines)
    while batch := list(itertools.islice(lines, self._data.decode_batch_size)):
      found = decode(self.source_vocabulary.encode(batch))
      yield from map(self.target_vocabulary.text, found)

  def measure(self, model, split, predictions) -> dict[str, Any]:
    """Returns exact match and, for text, `translation_decoding.bleu`.

    If `config.data` asks for beams, greedy decoding's numbers are there as
    well.
    """
    del predictions
    sources, targets = self._lines[split]
    tokens = self.source_vocabulary.encode(sources)
    beams = self._data.num_beams
    decode = self._decoder(model, beams)
    results = self._compare(decode(tokens), targets)
    results |= {'num_beams': beams, 'decoding': decode.speed()}
    if beams > 1:
      greedy = self._compare(self._decoder(model, 1)(tokens), targets)
      results |= {f'greedy_{name}': value for name, value in greedy.items()}
    return results

  def report(self, results, best_model) -> protocol.Report:
    """Returns translations of the first seed's best model."""
    seed = results[0]['seed']
    model = best_model(seed)
    sources, targets = (lines[:_EXAMPLES] for lines in self._lines['test'])
    tokens = self.source_vocabulary.encode(sources)
    found = self._decoder(model, self._data.num_beams)(tokens)
    texts = list(map(self.target_vocabulary.text, found))
    examples = [
        {'source': source, 'target': target, 'translation': text}
        for source, target, text in zip(sources, targets, texts, strict=True)
    ]
    numbers = {
        'num_source_tokens': len(self.source_vocabulary),
        'num_target_tokens': len(self.target_vocabulary),
        'examples': examples,
    }

    def write(path, title):
      parts = [
          f'source       {one["source"]}\ntarget       {one["target"]}\n'
          f'translation  {one["translation"]}\n'
          for one in examples
      ]
      path.write_text('\n'.join([f'{title}\n', *parts]), encoding='utf-8')

    return protocol.Report(numbers, {'translations.txt': write})

  def _decode(self, num_beams, model, source, lengths) -> decoding.Decoded:
    return model.decode(
        source,
        lengths,
        max_length=self._data.output_length,
        num_beams=num_beams,
        length_penalty=self._data.length_penalty,
    )

  def _decoder(self, model, num_beams) -> translation_decoding.Decoder:
    decode = functools.partial(self._decode, num_beams)
    size = self._data.decode_batch_size
    return translation_decoding.Decoder(model, decode, size)

  def decoding(self, model, lines=None):
    """Returns (a decoder, tokens of lines), for `profile.of_decoding`.

    Without lines they are the test's sources.
    """
    lines = self._lines['test'][0] if lines is None else list(lines)
    tokens = self.source_vocabulary.encode(lines)
    return self._decoder(model, self._data.num_beams), tokens

  def _compare(self, found, targets) -> dict[str, Any]:
    """Returns the metrics of translations."""
    given = found, targets, self.target_vocabulary
    exact = {'exact_match': translation_decoding.exact_match(*given)}
    is_text = BLEU in self.metrics
    return exact | (translation_decoding.bleu(*given) if is_text else {})


def _bidirectional_stack(factories, *args, **options) -> rnnzoo.Stack:
  """Returns a stack of which each layer runs in both directions."""
  both = [functools.partial(rnnzoo.Bidirectional, make) for make in factories]
  return rnnzoo.Stack(both, *args, **options)


def _stack_without_dropout(*args, **options) -> rnnzoo.Stack:
  """Returns a stack that drops nothing in training, as in single steps."""
  return rnnzoo.Stack(*args, **options | {'dropout_rate': 0.0})


def _read(
    data: ml_collections.ConfigDict,
) -> tuple[str, dict[str, tuple[list[str], list[str]]]]:
  """Returns the name of the data, and pairs of lines by split."""
  if not tfds_sets.is_source(data.source):
    fields.check_unread(data, ('data_dir',), 'source')
  if data.source == 'dates':
    parts = text_files.dates(data.dates_seed, (data.num_dates, 1000, 1000))
    dataset = f'{data.num_dates} made-up dates, seed {data.dates_seed}'
    return dataset, dict(zip(_SPLITS, parts, strict=True))
  if data.source != 'files':
    return text_files.read_tfds(data.source, data.data_dir)
  lines = {
      name: text_files.read_parallel(
          data[f'{name}_source'],
          data[f'{name}_target'],
          [f'config.data.{name}_{side}' for side in _SIDES],
      )
      for name in _SPLITS
  }
  names = (pathlib.PurePath(data[f'train_{side}']).name for side in _SIDES)
  return ' to '.join(names), lines


def _draw(model: nnx.Module, std: float, rngs: nnx.Rngs) -> None:
  """Draws all weights anew from N(0, std^2), and sets biases to zero."""
  for path, param in nnx.iter_graph(model):
    if isinstance(param, nnx.Param):
      if 'bias' in path:
        param[...] = jnp.zeros(param.shape, param.dtype)
      elif 'scale' not in path:
        normal = jax.random.normal(rngs.params(), param.shape, param.dtype)
        param[...] = std * normal
