"""Tasks whose data are made: adding, copying, state tracking."""

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

from rnnzoo import models
from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.tasks.synthetic import languages

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

NAMES = ('adding', 'copying', 'selective_copying', 'state_tracking')

# Fields of small tasks, by task.
SMALL = {
    'adding': {'length': 7},
    'copying': {'delay': 3, 'num_symbols': 2},
    'selective_copying': {'length': 9, 'num_symbols': 3, 'num_tokens': 5},
    'state_tracking': {'max_length': 6, 'test_lengths': (4, 12)},
}


def config(name, **data):
  given = importlib.import_module(f'configs.base_{name}').get_config()
  given.data.update(num_validation=20, num_test=40, steps_per_epoch=3)
  given.data.update(SMALL[name])
  given.data.update(data)
  given.model.features = 4
  given.update(batch_size=16, num_epochs=2, eval_batch_size=25)
  return given


def make(name, **data):
  return tasks.TASKS[name](config(name, **data))


def batches(task, *seeds):
  make_batch = jax.jit(task.splits['train'].make_batch)
  made = [make_batch(jax.random.key(seed)) for seed in seeds]
  return jax.tree.map(np.asarray, made)


def both(task):
  """Returns examples made by JAX and by numpy, of the same kind."""
  (made,), test = batches(task, 0), task.splits['test']
  assert made.keys() == test.keys()
  for name, array in test.items():
    assert made[name].dtype == array.dtype, name
    assert made[name].ndim == array.ndim, name
  return made, test


def answer(logits):
  """Returns a model whose answers are the same for all sequences."""
  return lambda x, rngs=None: jnp.broadcast_to(
      jnp.asarray(logits), (len(x), *np.shape(logits))
  )


def looking(task, seen):
  """Returns a model that adds its inputs to the list `seen`."""

  def model(x, *, seq_lengths, rngs=None):
    del seq_lengths, rngs
    seen.append(np.asarray(x))
    return jnp.zeros((len(x), task.language.num_classes))

  return model


def evaluate(task, model, examples):
  return jax.jit(lambda examples: task.evaluate(model, examples))(examples)


class SplitsTest(parameterized.TestCase):

  @parameterized.parameters(*NAMES)
  def test_fixed_splits_depend_on_the_seed_of_the_data_alone(self, name):
    first, other, again = make(name), make(name, seed=1), config(name)
    again.seed, again.batch_size = 5, 3
    again = tasks.TASKS[name](again)
    for split in set(first.splits) - {'train'}:
      own = first.splits[split]
      equal = lambda task, split=split, own=own: [
          np.array_equal(array, task.splits[split][key])
          for key, array in own.items()
      ]
      self.assertTrue(all(equal(again)))
      self.assertFalse(all(equal(other)))

  @parameterized.parameters(*NAMES)
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_batches_depend_on_the_key(self, name):
    task = make(name)
    one, same, other = batches(task, 0, 0, 1)
    for key, array in one.items():
      np.testing.assert_array_equal(array, same[key])
      self.assertLen(array, 16)
    self.assertFalse(all(np.array_equal(one[k], other[k]) for k in one))

  @parameterized.parameters(
      ('adding', {'length': 1}, 'data.length must be an integer'),
      ('copying', {'delay': 0}, 'data.delay must be an integer'),
      ('copying', {'loss_steps': 'last'}, "one of 'all', 'recalled'"),
      ('selective_copying', {'num_symbols': 10}, 'be at most .*length, 9; got'),
      ('selective_copying', {'num_tokens': 2}, 'data.num_tokens'),
      ('selective_copying', {'curriculum': (4, 1)}, 'pairs of'),
      ('selective_copying', {'curriculum': ((2, 1),)}, 'lengths of at least'),
      ('state_tracking', {'input_noise': -0.1}, 'data.input_noise'),
      ('state_tracking', {'validation_noise': -0.1}, 'data.validation_noise'),
      (
          'state_tracking',
          {'clean_epochs': 2},
          'clean_epochs would be ign.*=0.0; .* got 2',
      ),
      ('state_tracking', {'language': 'A6'}, 'one of .*; got .A6.'),
      ('state_tracking', {'test_lengths': (8, 4)}, 'ascending'),
      ('state_tracking', {'test_lengths': ()}, 'ascending'),
      ('state_tracking', {'test_lengths': ('a', 2)}, 'ascending'),
      (
          'state_tracking',
          {'test_lengths': tuple(range(8, 20001, 8)), 'num_test': 10**4},
          'at most 1,073,741,824 tokens; got 250,100,000,000',
      ),
      (
          'state_tracking',
          {'language': 'modular_arithmetic', 'test_lengths': (4, 9)},
          "multiples of 2 for 'modular_arithmetic'; got 9",
      ),
      ('state_tracking', {'min_length': 7}, 'most 6 with a max_length of 6'),
      (
          'state_tracking',
          {'language': 'even_pairs', 'test_lengths': (1, 8)},
          "test_lengths has 1, but in strings of 'even_pairs'",
      ),
  )
  def test_bad_fields(self, name, data, message):
    given = config(name)
    with given.unlocked(), given.data.ignore_type():
      given.data.update(data)
    with self.assertRaisesRegex(ValueError, message):
      tasks.TASKS[name](given)


class AddingTest(parameterized.TestCase):

  @parameterized.parameters(2, 3, 8)
  @pytest.mark.slow
  def test_one_mark_in_each_half(self, length):
    for examples in both(make('adding', length=length)):
      values, marks = np.moveaxis(examples['inputs'], -1, 0)
      self.assertTrue((values >= 0).all() and (values < 1).all())
      self.assertTrue((marks[:, : length // 2].sum(1) == 1).all())
      self.assertTrue((marks[:, length // 2 :].sum(1) == 1).all())
      self.assertContainsSubset(set(marks.flat), {0.0, 1.0})
      # Every step can have a mark.
      self.assertTrue(marks.any(0).all())
      np.testing.assert_allclose(
          examples['sum'], (values * marks).sum(1), rtol=1e-6
      )

  def test_error_of_one(self):
    task = make('adding', num_test=10_000)
    result = evaluate(task, answer([1.0]), task.splits['test'])
    self.assertAlmostEqual(float(result.scores['mse'].mean()), 1 / 6, places=2)
    np.testing.assert_array_equal(result.losses, result.scores['mse'])
    found = task.predict(answer([1.0]), task.splits['test']['inputs'])
    np.testing.assert_array_equal(found, np.ones(10_000))


class CopyingTest(parameterized.TestCase):

  def test_sequences(self):
    # Two symbols, two blanks, the delimiter, two blanks.
    for examples in both(make('copying')):
      tokens = examples['tokens']
      self.assertEqual(tokens.shape[1], 3 + 2 * 2)
      np.testing.assert_array_equal(tokens[:, :2], examples['symbols'])
      after = np.broadcast_to([8, 8, 9, 8, 8], (len(tokens), 5))
      np.testing.assert_array_equal(tokens[:, 2:], after)
      self.assertContainsSubset(set(tokens[:, :2].flat), set(range(8)))

  def test_without_memory(self):
    # Sure of blanks, then all symbols alike: 10 log(8) / T of the literature.
    logits = np.full((220, 10), -1e9)
    logits[:-10, 8] = logits[-10:, :8] = 0.0
    for loss_steps, share in (('all', 10 / 220), ('recalled', 1)):
      sizes = {'delay': 200, 'num_symbols': 10}
      task = make('copying', loss_steps=loss_steps, **sizes)
      losses = evaluate(task, answer(logits), task.splits['test']).losses
      np.testing.assert_allclose(losses, share * math.log(8), rtol=1e-5)

  def test_answers_count_where_symbols_are_named_alone(self):
    task = make('copying')
    examples = {
        'tokens': task.splits['test']['tokens'][:3],
        'symbols': np.array([[0, 1], [0, 2], [3, 4]], np.uint8),
    }
    logits = np.zeros((7, 10))
    logits[5, 0] = logits[6, 1] = 1.0
    result = evaluate(task, answer(logits), examples)
    self.assertSequenceEqual(result.scores['accuracy'].tolist(), [1, 0.5, 0])
    self.assertSequenceEqual(result.scores['exact_match'].tolist(), [1, 0, 0])
    got = task.predict(answer(logits), examples['tokens'])
    self.assertSequenceEqual(got.tolist(), [[0, 1]] * 3)

  def test_selective(self):
    for examples in both(make('selective_copying')):
      tokens = examples['tokens']
      self.assertEqual(tokens.shape[1], 9 + 3)
      self.assertTrue((tokens[:, 9:] == 4).all())
      shown = [row[row > 0] for row in tokens[:, :9]]
      np.testing.assert_array_equal(shown, examples['symbols'])
      self.assertEqual(set(examples['symbols'].flat), {1, 2, 3})
      # Symbols can stand anywhere.
      self.assertTrue((tokens[:, :9] > 0).any(0).all())

  @pytest.mark.slow
  def test_a_curriculum(self):
    task = make('selective_copying', curriculum=((4, 2), (6, 1)))
    train = task.splits['train']
    lessons = (*train.lessons, (None, train.make_batch))
    for lesson, want in zip(lessons, ((4, 2), (6, 1), (9, None)), strict=True):
      tokens = np.asarray(lesson[1](jax.random.key(0))['tokens'])
      self.assertEqual((len(tokens[0]) - 3, lesson[0]), want)
      self.assertTrue(((tokens[:, : want[0]] > 0).sum(1) == 3).all())
    self.assertEqual(task.splits['test']['tokens'].shape[1], 9 + 3)

  @parameterized.parameters(('plain', 0), ('gated', 2), (None, 2))
  def test_blocks_of_a_language_model(self, mlp, conv_width):
    given = config('selective_copying')
    given.model.update(mlp=mlp, conv_width=conv_width)
    task = tasks.TASKS['selective_copying'](given)
    model = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
    self.assertIsInstance(model, models.LanguageModel)
    self.assertEqual(model.blocks[0].has_mlp, mlp is not None)
    self.assertEqual(model.blocks[0].has_convolution, conv_width > 0)


class StateTrackingTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_noise_while_training(self):
    task = make(
        'state_tracking', language='A5', input_noise=0.5, clean_epochs=2
    )
    train, key, seen = task.splits['train'], jax.random.key(0), []
    self.assertSequenceEqual([train.lesson(e) for e in (1, 2, 3)], [0, 0, 1])
    ((_, make_clean),) = train.lessons
    noisy_batch = train.make_batch(key)
    clean_batch = make_clean(key)
    self.assertEqual(noisy_batch.keys() - clean_batch.keys(), {'noise'})

    model = looking(task, seen)
    task.evaluate(model, noisy_batch)
    task.evaluate(model, clean_batch, nnx.Rngs(dropout=0))
    for seed in (0, 0, 1):
      task.evaluate(model, noisy_batch, nnx.Rngs(dropout=seed))
    clean, before, noisy, same, other = seen
    np.testing.assert_array_equal(np.unique(clean), [0, 1])
    np.testing.assert_array_equal(clean, before)
    np.testing.assert_array_equal(noisy, same)
    self.assertFalse(np.array_equal(noisy, other))
    self.assertAlmostEqual(np.std(noisy - clean), 0.5, delta=0.05)
    self.assertAlmostEqual(np.mean(noisy - clean), 0, delta=0.05)

  @pytest.mark.slow
  def test_noise_of_validation(self):
    plain = make('state_tracking', language='A5').splits['validation']
    task = make('state_tracking', language='A5', validation_noise=0.25)
    split, seen = task.splits['validation'], []
    self.assertEqual(split.keys() - plain.keys(), {'noise', 'noise_seed'})
    np.testing.assert_array_equal(split['tokens'], plain['tokens'])
    self.assertNotIn('noise', task.splits['test'])

    model = looking(task, seen)
    of = lambda rows: {name: array[rows] for name, array in split.items()}
    for rows in (slice(0, 4), slice(2, 4)):
      task.evaluate(model, of(rows))
    whole, part = seen
    # A string's noise does not depend on its batch.
    np.testing.assert_array_equal(whole[2:], part)
    noise = whole - np.eye(task.language.num_tokens)[split['tokens'][:4]]
    self.assertAlmostEqual(np.std(noise), 0.25, delta=0.02)
    self.assertFalse(np.allclose(noise[0], noise[1]))

  @parameterized.parameters(
      ('modular_arithmetic', 'last'),
      ('modular_arithmetic', 'every'),
      ('S3', 'every'),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_labels(self, language, label_steps):
    given = {'language': language, 'label_steps': label_steps, 'min_length': 3}
    task = make('state_tracking', **given)
    lengths = set()
    for made in batches(task, *range(8)):
      (length,) = set(made['length'])
      lengths.add(length)
      self.assertFalse(made['tokens'][:, length:].any())
      want = np.array(languages.prefix_labels(task.language, made['tokens']))
      want[:, length:] = languages.NO_LABEL
      if label_steps == 'last':
        want = want[:, length - 1]
      np.testing.assert_array_equal(made['label'], want)
    allowed = {4, 6} if language == 'modular_arithmetic' else {3, 4, 5, 6}
    self.assertContainsSubset(lengths, allowed)
    self.assertGreater(len(lengths), 1)
    self.assertEqual(set(task.splits['validation']['length']), allowed)

  @parameterized.product(
      language=('cycle_navigation', 'A5'), label_steps=('last', 'every')
  )
  def test_tests_are_balanced(self, language, label_steps):
    data = {'language': language, 'label_steps': label_steps, 'num_test': 62}
    task = make('state_tracking', **data)
    names = 'train', 'validation', 'test', 'length_4'
    self.assertCountEqual(task.splits, names)
    for name, length in (('test', 12), ('length_4', 4)):
      split = task.splits[name]
      self.assertEqual(split['tokens'].shape, (62, length))
      self.assertTrue((split['length'] == length).all())
      labels = split['label']
      labels = labels[:, -1] if label_steps == 'every' else labels
      counts = np.bincount(labels, minlength=task.language.num_classes)
      self.assertLessEqual(counts.max() - counts.min(), 1)

  @pytest.mark.slow
  def test_evaluation(self):
    given = {'language': 'modular_arithmetic'}
    last = make('state_tracking', **given)
    every = make('state_tracking', label_steps='every', **given)
    model = every.build_model(nnx.Rngs(0))
    examples = every.splits['validation']
    result = evaluate(every, model, examples)
    # Each string on its own, without the steps beyond its end.
    for i, length in enumerate(examples['length'][:6]):
      x = np.eye(9, dtype=np.float32)[examples['tokens'][i, :length]]
      logits, labels = np.asarray(model(x)), examples['label'][i, :length]
      valid = labels != languages.NO_LABEL
      shifted = np.log(np.sum(np.exp(logits), axis=1))[valid]
      losses = shifted - logits[valid, labels[valid]]
      hits = logits.argmax(-1) == labels
      np.testing.assert_allclose(result.losses[i], losses.mean(), rtol=1e-4)
      np.testing.assert_allclose(
          result.scores['step_accuracy'][i], hits[valid].mean(), rtol=1e-5
      )
      self.assertEqual(result.scores['accuracy'][i], hits[-1])
    same = np.testing.assert_array_equal
    same(every.predict(model, examples), result.predictions)
    model.every_step = False
    alone = evaluate(last, model, last.splits['validation'])
    same(alone.predictions, result.predictions)
    same(alone.scores['accuracy'], result.scores['accuracy'])

  def test_report(self):
    task = make('state_tracking', test_lengths=(4, 8, 12))
    results = []
    for seed, at_8 in ((3, 0.9), (4, 0.8)):
      one, eight = {'accuracy': 1.0}, {'accuracy': at_8}
      splits = {'length_4': one, 'length_8': eight}
      results.append({'seed': seed, 'test': {**one}, 'splits': splits})
    report = task.report(results, None)
    numbers = report.numbers['accuracy_over_length']
    self.assertSequenceEqual([*numbers], ['4', '8', '12'])
    self.assertAlmostEqual(numbers['8']['mean'], 0.85)
    self.assertSequenceEqual(numbers['8']['seeds'], [0.9, 0.8])
    self.assertEqual(report.numbers['solved_to'], 4)
    results[0]['splits']['length_4']['accuracy'] = 0.5
    self.assertIsNone(task.report(results, None).numbers['solved_to'])
    path = pathlib.Path(self.create_tempdir().full_path) / 'figure.png'
    report.files['accuracy_over_length.png'](path, 'title')
    self.assertGreater(path.stat().st_size, 1000)


class TrainingTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_state_tracking(self):
    workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    experiment = training.prepare(config('state_tracking'), str(workdir))
    report = training.train_and_evaluate(experiment)
    over_length = report['accuracy_over_length']
    parts = {'12': report['test'], '4': report['splits']['length_4']}
    for length, part in parts.items():
      self.assertEqual(over_length[length]['mean'], part['accuracy']['mean'])
    self.assertTrue((workdir / 'accuracy_over_length.png').exists())
    test = experiment.task.splits['test']
    inputs = {'tokens': test['tokens'], 'length': test['length']}
    hits = training.load(workdir).predict(inputs) == test['label']
    accuracy = report['test']['accuracy']['mean']
    self.assertAlmostEqual(np.mean(hits), accuracy, places=6)


if __name__ == '__main__':
  absltest.main()
