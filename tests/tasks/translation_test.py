"""Translation: text and its errors, vocabularies, buckets, dates, a run."""

import importlib
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo import training
from rnnzoo.models import decoding
from rnnzoo.tasks import protocol
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import translation
from rnnzoo.tasks.text import translation_decoding
from rnnzoo.tasks.text import vocabularies

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

SOURCES = ['Ein Mann schläft.', 'Zwei Hunde', '', 'Ein Hund rennt, ein Mann']
TARGETS = ["A man's asleep.", 'Two dogs', 'Nothing', 'A dog runs, a man-child']


def make_config():
  base = importlib.import_module('configs.base_translation')
  config = base.get_config()
  config.data.update(num_dates=400, target_tokens='characters')
  config.data.update(output_length=12, num_buckets=2)
  config.model.update(features=8, embed_features=6, attention_features=5)
  config.update(batch_size=16, num_epochs=1)
  return config


def first(task, split):
  return protocol.buckets(task.splits[split])[0]


class TextTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def read(self, source, target):
    """Reads files of these contents; text_files_test.py has other forms."""
    paths = [self.directory / name for name in 'ab']
    for path, content in zip(paths, (source, target), strict=True):
      path.write_bytes(content)
    return text_files.read_parallel(*map(str, paths), ('a', 'b'))

  def test_files_that_are_no_translation(self):
    for target, message in (
        (b'one\n', 'b has 1 lines and .*a 2: line 2 of .*a has no trans'),
        (b'', 'b has no lines'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.read(b'eins\nzwei\n', target)
    with self.assertRaisesRegex(
        FileNotFoundError, "a must name a text .* no file 'x'"
    ):
      text_files.read_parallel('x', 'y', ('a', 'b'))

  def test_an_empty_line_beside_a_full_one(self):
    with self.assertLogs(level='WARNING') as told:
      found = self.read(b'eins\n\ndrei\n\n', b'one\n\n \nfour')
    self.assertEqual(found[0], ['eins', '', 'drei', ''])
    self.assertIn('a, line 4, is empty', told.output[0])
    self.assertIn('b, line 3, is empty', told.output[1])
    self.assertIn('so are 1 of 4 lines', told.output[1])

  def vocabulary(self, kind='words', lines=TARGETS, **options):
    options = {'lowercase': True, 'min_count': 1, 'size': 1000} | options
    return vocabularies.make_vocabulary(lines, kind, **options)

  @parameterized.parameters(*vocabularies.KINDS)
  def test_there_and_back(self, kind):
    vocabulary = self.vocabulary(kind)
    for line, tokens in zip(TARGETS, vocabulary.encode(TARGETS), strict=True):
      self.assertEqual(vocabulary.text(tokens), line.lower())
      self.assertEqual(vocabulary.words_of(tokens), vocabulary.words(line))
      self.assertNotIn(decoding.UNKNOWN, tokens)
    (tokens,) = vocabulary.encode(['[ </s>'])
    self.assertIn(decoding.UNKNOWN, tokens)
    self.assertNotIn(decoding.END, tokens)

  def test_words(self):
    vocabulary = self.vocabulary(lowercase=False, min_count=2)
    words = vocabulary.words("A man's x-ray, no?")
    self.assertEqual(words, ['A', 'man', "'s", *'x - ray , no ?'.split()])
    (tokens,) = vocabulary.encode(['A dog naps'])
    self.assertEqual(vocabulary.pieces(tokens), ['A', '<unk>', '<unk>'])
    # A word that is known without a mark is known with one.
    vocabulary = self.vocabulary(lines=['a/b c', 'a b /c'], min_count=2)
    (tokens,) = vocabulary.encode(['b/a'])
    self.assertEqual(vocabulary.text(tokens), 'b / a')

  @parameterized.parameters({'min_count': 10**6}, {'size': 4}, {'lines': ['']})
  def test_an_empty_vocabulary(self, **options):
    with self.assertRaisesRegex(ValueError, 'the vocabulary of words is empty'):
      self.vocabulary(**options)

  def test_subwords_keep_to_the_limits(self):
    lines = ['ab ab c', 'ab 語']
    for size, min_count, wanted in (
        (7, 1, '▁ab'),  # The most frequent characters.
        (1000, 3, '▁ab'),
        (1000, 1, '▁abc語'),
    ):
      vocabulary = self.vocabulary(
          'subwords', lines, size=size, min_count=min_count
      )
      self.assertLessEqual(len(vocabulary), size)
      known = ''.join(vocabulary.tokenizer.get_vocab())
      self.assertEqual(set('▁abc語') & set(known), set(wanted))
    vocabulary = self.vocabulary('subwords', lines, size=7)
    (tokens,) = vocabulary.encode(['a 語 b'])
    # No unknown token is lost in what is written and compared.
    self.assertEqual(vocabulary.text(tokens), 'a <unk> b')
    with self.assertRaisesRegex(ValueError, 'vocabulary of subwords is empty'):
      self.vocabulary('subwords', lines, min_count=100)

  def test_buckets_hold_every_pair_once(self):
    pairs = (
        [[5] * n for n in (1, 7, 3, 0, 2)],
        [[6] * n for n in (2, 2, 4, 1, 1)],
    )
    lengths = text_files.longest(pairs)
    self.assertEqual(lengths.tolist(), [2, 7, 4, 1, 2])
    cuts = text_files.boundaries(lengths, 3)
    self.assertEqual(cuts, [2])
    short, long = text_files.buckets(pairs, cuts)
    self.assertEqual(short['source_length'].tolist(), [2, 1, 3])
    self.assertEqual(short['target_length'].tolist(), [3, 2, 2])
    np.testing.assert_array_equal(
        short['target'], [[1, 6, 6, 2], [1, 6, 2, 0], [1, 6, 2, 0]]
    )
    np.testing.assert_array_equal(long['source'][1], [5, 5, 5, 2, 0, 0, 0, 0])
    # A length that training never saw belongs to the last one.
    (only,) = text_files.buckets(([[5] * 30], [[6]]), cuts)
    self.assertEqual(only['source'].shape, (1, 31))

  def test_dates(self):
    first, second = text_files.dates(3, (300, 40))
    self.assertEqual((first, second), tuple(text_files.dates(3, (300, 40))))
    self.assertEmpty(set(first[1]) & set(second[1]))
    known = dict(zip(*text_files.dates(0, (30000,))[0], strict=True))
    for text, date in (
        ('the third of march, nineteen ninety four', '1994-03-03'),
        ('july 22nd, 1911', '1911-07-22'),
        ('two thousand and five, may the twenty first', '2005-05-21'),
    ):
      self.assertEqual(known.get(text, date), date)
    for year, text in {
        1900: 'nineteen hundred',
        1907: 'nineteen oh seven',
        2000: 'two thousand',
        2008: 'two thousand and eight',
        2010: 'twenty ten',
        2090: 'twenty ninety',
    }.items():
      self.assertEqual(text_files._year(year), text)

  @parameterized.product(kind=vocabularies.KINDS, lowercase=(False, True))
  def test_bleu_of_the_references_is_100(self, kind, lowercase):
    lines = [
        'A man is asleep in a red chair .',
        'Two dogs run on 3.14 beaches , see http://x.org/a_b (or "there")',
        " -a  --b 'c' \uffed \uffedd \u2581e f\u2581g x\u00b2\xa0y",
        'Combined: a\u0301 \u0928\u092e\u0940, and last: \u038c\u03a3',
    ]
    made = self.vocabulary(kind, lines, lowercase=lowercase)
    for vocabulary in (made, vocabularies.restore(made.describe())):
      tokens = vocabulary.encode(lines)
      given = tokens, lines, vocabulary
      self.assertEqual(translation_decoding.exact_match(*given), 1.0)
      found = translation_decoding.bleu(*given)
      self.assertAlmostEqual(found['bleu'], 100.0)
      self.assertAlmostEqual(found['sacrebleu'], 100.0)
    self.assertIn('tok:none', found['bleu_signature'])
    self.assertIn('tok:13a', found['sacrebleu_signature'])
    case = 'case:lc' if lowercase else 'case:mixed'
    self.assertIn(case, found['sacrebleu_signature'])
    worse = [*tokens[:-1], tokens[-1][:-3]]
    found = translation_decoding.bleu(worse, lines, vocabulary)
    self.assertLess(found['bleu'], 99.0)


class TaskTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_padding_has_no_effect_on_the_loss(self):
    config = make_config()
    config.model.attention_features = 0
    task = translation.Translation(config)
    model = task.build_model(nnx.Rngs(0))
    short = {name: x[:7] for name, x in first(task, 'test').items()}
    evaluate = jax.jit(lambda batch: task.evaluate(model, batch)[::2])
    expected = evaluate(short)
    width = lambda name, x: ((0, 0), (0, 5)) if x.ndim == 2 else ((0, 0),)
    longer = {name: np.pad(x, width(name, x)) for name, x in short.items()}
    found = evaluate(longer)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(found[1], short['target_length'])

  @pytest.mark.slow
  def test_forcing_and_smoothing(self):
    config = make_config()
    config.model.update(teacher_forcing=0.5, init_std=0.01)
    config.model.label_smoothing = 0.1
    task = translation.Translation(config)
    model = task.build_model(nnx.Rngs(0))
    self.assertLess(float(jnp.std(model.head.kernel[...])), 0.012)
    self.assertFalse(model.head.bias[...].any())
    batch = {name: x[:3] for name, x in first(task, 'test').items()}
    losses = lambda seed: task.evaluate(model, batch, nnx.Rngs(seed)).losses
    self.assertTrue(np.isfinite(losses(0)).all())
    # Which tokens are the model's own is drawn.
    self.assertFalse(np.array_equal(losses(0), losses(1)))

  @parameterized.parameters(
      ({'source': 'files'}, 'data.train_source must name a text file in UTF-8'),
      ({'target_tokens': 'letters'}, 'target_tokens must be one of'),
      ({'num_beams': 0}, 'num_beams must be an integer from 1'),
  )
  def test_errors(self, data, message):
    config = make_config()
    config.data.update(data)
    error = FileNotFoundError if 'source' in data else ValueError
    with self.assertRaisesRegex(error, message):
      translation.Translation(config)

  @pytest.mark.exhaustive
  def test_learns_to_write_dates(self):
    config = make_config()
    config.data.update(num_dates=4000, num_beams=3)
    config.model.update(features=32, embed_features=16, attention_features=16)
    config.model.is_bidirectional = True
    config.update(num_epochs=8, batch_size=50)
    config.optimizer.learning_rate = 0.01
    workdir = self.create_tempdir().full_path
    report = training.train_and_evaluate(training.prepare(config, workdir))
    self.assertGreater(report['test']['exact_match']['mean'], 0.9)
    directory = pathlib.Path(workdir)
    self.assertIn('translation', (directory / 'translations.txt').read_text())
    trained = training.load(workdir)
    lines = ['march 3rd, 1994', '', '4 july 1976']
    found = list(trained.task.predict_lines(trained.model, lines))
    self.assertEqual(found, ['1994-03-03', '', '1976-07-04'])
    # One line or many, padded or not: the same.
    alone = trained.task.predict_lines(trained.model, lines[2:])
    self.assertEqual(list(alone), found[2:])
    batch = first(trained.task, 'test')
    tokens = trained.predict(batch['source'][:5])
    self.assertEqual(tokens.shape, (5, 12))
    given = jnp.asarray(batch['source']), jnp.asarray(batch['source_length'])
    decode = lambda count: trained.model.decode(
        *given, max_length=12, num_beams=count
    ).scores
    greedy, beam = (jax.jit(decode, static_argnums=0)(k) for k in (1, 3))
    self.assertGreater(np.min(beam - greedy), -1e-3)


if __name__ == '__main__':
  absltest.main()
