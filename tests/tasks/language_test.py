"""Texts: windows, tokens, folders, samples, and a text that can be learnt."""

import importlib
import math
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.tasks import protocol
from rnnzoo.tasks.text import language
from rnnzoo.tasks.text import tokens as tokens_lib
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import run_data

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))


class LanguageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.directory / 'text.txt'
    self.path.write_text('abcdefg\n' * 40)
    base = importlib.import_module('configs.base_text')
    self.config = base.get_config()
    self.config.data.update(path=str(self.path), context=16)
    self.config.data.update(steps_per_epoch=40, sample_length=20)
    self.config.data.sample_temperature = 0.0
    self.config.model.update(layer='MinGRU', features=16, num_layers=1)
    self.config.update(batch_size=8, num_epochs=2)
    self.config.optimizer.learning_rate = 0.01

  def test_windows_predict_every_character_once(self):
    tokens = np.arange(1, 22)
    found = language.windows(tokens, 8)
    np.testing.assert_array_equal(found['length'], [8, 8, 4])
    targets = [
        row[1 : 1 + length]
        for row, length in zip(found['tokens'], found['length'], strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(targets), tokens[1:])
    np.testing.assert_array_equal(found['tokens'][:, 0], [1, 9, 17])

  def test_windows_of_the_test_can_have_another_length(self):
    shapes = lambda: {
        name: language.Text(self.config).splits[name]['tokens'].shape
        for name in ('validation', 'test')
    }
    self.assertEqual(shapes(), {'validation': (1, 17), 'test': (1, 17)})
    self.config.data.test_context = 5
    self.assertEqual(shapes(), {'validation': (1, 17), 'test': (3, 6)})
    # Longer than the text to test on, which has 16 characters.
    self.config.data.test_context = 2**20
    self.assertEqual(shapes(), {'validation': (1, 17), 'test': (1, 16)})
    self.path.write_text('abcdefg\n' * 200)
    self.config.data.test_context = 40
    self.assertEqual(shapes(), {'validation': (5, 17), 'test': (2, 41)})

  def test_a_run_is_bound_to_its_text(self):
    task, digests = language.Text(self.config), []
    tokens = task.splits['train'].source['tokens']
    for text in ('abcdefg\n', 'abcdegf\n'):  # The same up to validation.
      self.path.write_text(10 * text + 30 * 'abcdefg\n')
      task_of_text = language.Text(self.config)
      digests.append(run_data.of_task(task_of_text).digest)
    self.assertNotEqual(*digests)
    self.assertLen(tokens, 40 * 8 - 2 * 16)

  def test_random_windows_are_of_the_text(self):
    tokens = jnp.arange(10)
    found = language.random_windows(tokens, 200, 4, jax.random.key(0))
    starts = np.asarray(found['tokens'][:, 0])
    np.testing.assert_array_equal(
        found['tokens'], starts[:, None] + np.arange(5)
    )
    self.assertEqual(set(starts.tolist()), set(range(6)))

  def test_a_folder_of_parts(self):
    (self.directory / 'ptb').mkdir()
    texts = {'train': ' a b\n' * 20, 'valid': ' a c \n' * 2, 'test': ' b\n' * 3}
    for name, text in texts.items():
      (self.directory / f'ptb/ptb.{name}.txt').write_text(text)
    self.config.data.update(path=str(self.directory / 'ptb'), tokens='words')
    task = language.Text(self.config)
    self.assertEqual(task.dataset, 'ptb')
    self.assertEqual(task.metrics[0].name, 'perplexity')
    self.assertLen(task.splits['train'].source['tokens'], 60)
    self.assertEqual(task.splits['validation']['length'].tolist(), [5])
    self.assertEqual(task.splits['test']['length'].tolist(), [5])
    self.assertIn(0, task.splits['validation']['tokens'])  # 'c' is unknown.
    (self.directory / 'ptb/ptb.char.train.txt').write_text('a')
    for data, message in (
        ({}, "one file with 'train' .* it has p"),
        ({'path': str(self.directory)}, "'train' in its name.*has none"),
        ({'test_fraction': 0.1}, 'test_fraction would be ignored'),
    ):
      self.config.data.update(data)
      with self.assertRaisesRegex(ValueError, message):
        language.Text(self.config)

  def test_a_text_of_words_is_cut_between_them(self):
    self.path.write_text('one two\n' * 40)
    self.config.data.tokens = 'words'
    task = language.Text(self.config)
    self.assertEqual(task.tokens.pieces, [b' <unk>', b'\n', b' one', b' two'])
    self.assertNotIn(0, task.splits['train'].source['tokens'])
    self.assertEqual(task.splits['test']['tokens'][0].tolist()[:3], [2, 3, 1])

  @pytest.mark.slow
  def test_bits_of_any_tokens(self):
    """Every token is as likely as any other: all is known."""
    self.path.write_text('ab\u00e4\n' * 200)
    for kind, name, per_token in (
        ('characters', 'bits_per_character', 1.25),
        ('bytes', 'bits_per_byte', 1.0),
        ('bpe', 'bits_per_byte', None),
    ):
      self.config.data.tokens = kind
      task = language.Text(self.config)
      self.assertEqual(task.metrics[0].name, name)
      num_tokens = len(task.tokens.pieces)
      uniform = lambda x, rngs, v=num_tokens: jnp.zeros((*x.shape, v))
      found = task.evaluate(uniform, task.splits['test'])
      found = jax.tree.map(np.asarray, found)
      means = metrics_lib.of_examples(found, protocol.all_metrics(task))
      bits = math.log2(num_tokens)
      self.assertAlmostEqual(means['loss'] / math.log(2), bits, places=5)
      tokens = task.tokens.encode('ab\u00e4\n' * 10)[1:]
      sizes = task.tokens.sizes[tokens]
      self.assertEqual(np.sum(found.weights), len(tokens))
      means |= task.measure(None, 'test', found.predictions)
      expected = bits * len(tokens) / sizes.sum()
      self.assertAlmostEqual(means['bits_per_byte'], expected, places=5)
      self.assertAlmostEqual(sizes.mean(), per_token or sizes.mean(), delta=0.1)

  def test_a_character_waits_for_its_last_byte(self):
    task = language.Text(self.config)
    task.tokens = tokens_lib.make('bytes', [], None)
    content = 'a\u00e4\U0001f600'.encode() + b'\xffb\xe4'
    parts = [np.array([[byte]]) for byte in content]
    pieces = list(task._stream('x', parts))
    self.assertEqual(pieces, [*'xa\u00e4\U0001f600\ufffdb\ufffd'])
    self.assertEqual('x' + task.tokens.text(content), ''.join(pieces))

  def test_choices_that_are_cut(self):
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    for top_k, top_p, kept in (
        (4, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 3]),
        (4, 0.65, [1, 3]),
        (4, 0.75, [1, 2, 3]),
        (2, 0.5, [1]),
        (4, 1e-6, [1]),
    ):
      found = language._cut(logits, top_k, top_p)
      self.assertEqual(np.flatnonzero(np.isfinite(found)).tolist(), kept)
      np.testing.assert_array_equal(
          found[np.array(kept)], logits[np.array(kept)]
      )

  @pytest.mark.slow
  def test_many_samples_are_as_each_alone(self):
    task = language.Text(self.config)
    model, key = task.build_model(nnx.Rngs(0)), jax.random.key(1)
    prompts = ['abc', '', 'd', 'efg']
    options = {'length': 40, 'temperature': 1.5, 'top_k': 5, 'top_p': 0.9}
    found = task.sample_many(model, prompts, key, **options)
    alone = tasks.Task.sample_many(task, model, prompts, key, **options)
    self.assertEqual(found, alone)
    self.assertLen(set(found), 4)
    likely = {'temperature': 2.0, 'top_k': 1}, {'temperature': 0.0}
    first, second = (task.sample_many(model, ['a'], key, **o) for o in likely)
    self.assertEqual(first, second)

  @pytest.mark.exhaustive
  def test_learns_and_samples(self):
    workdir = str(self.directory / 'run')
    report = training.train_and_evaluate(training.prepare(self.config, workdir))
    result = report['test']
    bits = result['bits_per_character']['mean']
    self.assertAlmostEqual(bits, result['loss']['mean'] / math.log(2), places=5)
    self.assertLess(bits, 0.5)
    trained = training.load(workdir)
    pieces = trained.task.sample(trained.model, 'efg', jax.random.key(0))
    self.assertEqual(''.join(pieces), 'efg\nabcdefg\nabcdefg\nabc')
    self.assertIn('abcdefg', (self.directory / 'run/sample.txt').read_text())
    tokens = trained.task.tokens.encode('abc')[None]
    (place,) = trained.predict(tokens)
    self.assertEqual(trained.task.tokens.text([int(place)]), 'd')
    stream = trained.stream('predict_proba')
    for t in (2, 0, 1, 2):
      found = stream.step(tokens[:, t])
      if t == 2:
        stream.reset([True])
    want = trained.predict_proba(tokens)
    np.testing.assert_allclose(found, want.reshape(found.shape), rtol=1e-4)
    with self.assertRaisesRegex(ValueError, "'!z' is not in the text"):
      trained.task.sample(trained.model, 'z!', jax.random.key(0))

  @pytest.mark.slow
  def test_lengths_and_temperatures_of_samples(self):
    task = language.Text(self.config)
    model = task.build_model(nnx.Rngs(0))

    def sample(**options):
      return ''.join(task.sample(model, 'a', jax.random.key(0), **options))

    before = self.config.to_json()
    best = sample()
    self.assertLen(best, 21)
    self.assertEqual(sample(length=5), best[:6])
    self.assertEqual(sample(length=45)[:21], best)
    programs = language._go_on._cache_size()
    warm = sample(temperature=2)
    self.assertNotEqual(warm, best)
    # So small that logits divided by it would be infinite.
    self.assertEqual(sample(temperature=1e-37), best)
    self.assertEqual(language._go_on._cache_size(), programs)
    self.assertEqual(self.config.to_json(), before)
    self.config.data.sample_temperature = 2.0
    self.assertEqual(sample(), warm)
    for name, values in {
        'length': (0, -1, 2**40, 2.0, math.nan, True),
        'temperature': (-0.1, math.nan, math.inf, 1e39, 1e-60, '1'),
        'top_k': (0, 1.0),
        'top_p': (0.0, 1.1),
    }.items():
      for value in values:
        with self.assertRaisesRegex(ValueError, f'^{name} must be .*; got '):
          sample(**{name: value})

  @parameterized.parameters(
      ({'path': 'none.txt'}, FileNotFoundError, "there is no file 'none.txt'"),
      ({'context': 288}, ValueError, 'has 320 tokens, of which 288 train'),
      ({'test_context': 0}, ValueError, 'data.test_context must be an integer'),
      ({'test_fraction': 1.0}, ValueError, 'test_fraction must be'),
      ({'tokens': 'letters'}, ValueError, 'data.tokens must be one of'),
      ({'vocabulary_size': 999}, ValueError, 'ze would be ignored'),
      ({'tokens': 'bpe', 'vocabulary_size': 9}, ValueError, 'teger from 256'),
      ({'sample_temperature': -1.0}, ValueError, 'sample_temperature must be'),
  )
  def test_errors(self, data, error, message):
    self.config.data.update(data)
    with self.assertRaisesRegex(error, message):
      language.Text(self.config)

  @parameterized.parameters(
      ({'norm': 'layer'}, 'config.model.norm would be ignored by a lang'),
      ({'residual': True}, 'config.model.residual would be ignored'),
      ({'dense': True}, 'config.model.dense would be ignored by a lang'),
      ({'norm_momentum': 0.5}, "needs config.model.norm='batch'"),
      ({'mlp': 'wide'}, 'config.model.mlp must be'),
      ({'mlp_features': 0}, 'config.model.mlp_features must be'),
      ({'mlp': None, 'mlp_features': 5}, 'mlp_features=5 needs an mlp'),
      ({'layer': 'MinGru'}, "did you mean 'MinGRU'"),
  )
  def test_models_that_cannot_be(self, model, message):
    self.config.model.update(model)
    with self.assertRaisesRegex(ValueError, message):
      task = language.Text(self.config)
      jax.eval_shape(lambda: task.build_model(nnx.Rngs(0)))

  def test_the_embedded_text_names_its_python(self):
    self.path.write_bytes(b'')  # text_files_test.py has other wrong ones.
    with self.assertRaisesRegex(ValueError, 'has 0 characters'):
      language.Text(self.config)
    name, text = language.read('')
    version = '.'.join(map(str, sys.version_info[:3]))
    self.assertEqual(name, f"topics of Python {version}'s help")
    self.assertGreater(len(text), 300_000)


if __name__ == '__main__':
  absltest.main()
