"""Tasks on sequences: splits, statistics, losses, reports, a whole run."""

import contextlib
import io
import json
import pathlib

from absl import flags
from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import base_sequences
from rnnzoo import training
from rnnzoo.tasks.series import answers
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks
from rnnzoo.tasks.series import sequence_task
from rnnzoo.tasks.series import sequences
from rnnzoo.training import metrics
from rnnzoo.training import trained
from tests.testing import sequence_files

NOISE = np.random.RandomState(0).randn(240)


def quietly(make):
  with contextlib.redirect_stdout(io.StringIO()):
    return make()


def arrays(count, length, seed=0, **more):
  rng = np.random.RandomState(seed)
  x = rng.randn(count, length, 2).astype(np.float32)
  lengths = rng.randint(1, length + 1, count).astype(np.int32)
  lengths[0] = length
  given = {'x': x, 'lengths': lengths, 'y': np.arange(count) % 3, **more}
  return sequence_arrays.Sequences(**given)


def sums(x, seq_lengths=None, rngs=None):
  """A model of three outputs without parameters, which sees valid steps."""
  del rngs
  if seq_lengths is not None:
    x = jnp.where(
        (jnp.arange(x.shape[1]) < seq_lengths[:, None])[..., None], x, 0
    )
  return jnp.stack([x[..., 0].sum(1), x[..., 1].sum(1), x[:, 0, 0]], axis=-1)


class SplitTest(absltest.TestCase):

  def test_every_class_gives_its_share(self):
    groups = np.repeat([0, 1, 2, 3], [60, 30, 10, 1])
    rest, part = sequence_arrays.split_off(groups, 20, seed=1)
    np.testing.assert_array_equal(np.sort([*rest, *part]), np.arange(101))
    # A single example stays.
    np.testing.assert_array_equal(np.bincount(groups[part]), [12, 6, 2])
    again = sequence_arrays.split_off(groups, 20, seed=1)
    np.testing.assert_array_equal(part, again[1])
    other = sequence_arrays.split_off(groups, 20, seed=2)
    self.assertNotEqual(part.tolist(), other[1].tolist())

  def test_missing_splits(self):
    found = sequence_arrays.complete_splits(
        {'train': arrays(40, 3)}, {'test': 0.25, 'validation': 0.1}, 0, True
    )
    sizes = {name: len(split.x) for name, split in found.items()}
    self.assertEqual(sizes, {'train': 26, 'test': 10, 'validation': 4})

  def test_nothing_left(self):
    for fractions, sizes, enough in (
        ({'test': 0.1}, '3 .* into 0 and 3', 6),
        ({'test': 0.2, 'validation': 0.1}, '2 .* into 0 and 2', 6),
        ({'test': 0.5, 'validation': 0.4}, '1 .* into 1 and 0', 5),
    ):
      split = lambda count, shares=fractions: sequence_arrays.complete_splits(
          {'train': arrays(count, 3)}, shares, 0, True
      )
      with self.assertRaisesRegex(ValueError, f'^{sizes}, for both parts'):
        split(3)
      split(enough)


class StandardizationTest(absltest.TestCase):

  def deviation(self, x):
    valid = np.ones(x.shape[:-1], bool)
    return sequence_arrays.standardization(x, valid)[1]

  def test_padding_and_nan_do_not_count(self):
    x = np.array([[[1.0, 5], [3, 5], [9, 9]], [[np.nan, 5], [9, 9], [9, 9]]])
    valid = np.array([[True, True, False], [True, False, False]])
    mean, deviation = sequence_arrays.standardization(x, valid)
    np.testing.assert_allclose(mean, [2, 5])
    np.testing.assert_allclose(deviation, [1, 1])  # 5 is constant.

  def test_a_constant_but_for_rounding(self):
    for dtype in (np.float32, np.float64):
      epsilon = np.finfo(dtype).eps
      x = np.full((1, 1000, 2), 1, dtype)
      x[0, 5, 0] += epsilon  # Rounding: one of many, by its last digit.
      x[0, ::2, 1] += 8 * epsilon  # No rounding.
      np.testing.assert_allclose(self.deviation(x), [1, 4 * epsilon])
    # Deviations that float32 cannot hold.
    tiny = np.arange(6, dtype=np.float32).reshape(1, 6, 1) * np.float32(1e-40)
    for x in (np.full((1, 1000, 1), 0.1, np.float32), tiny):
      np.testing.assert_array_equal(self.deviation(x), [1])


class FarFromZeroTest(parameterized.TestCase):
  """Columns and answers whose changes float32 cannot hold."""

  def task(self, x, y=None, **data):
    """Returns the task, and its model loaded without the data."""
    path = pathlib.Path(self.create_tempdir().full_path) / 'mine.npz'
    y = np.arange(len(x)) % 2 if y is None else y
    np.savez(path, x=x, y=y)
    config = base_sequences.get_config()
    config.model.update(layer='MinGRU', features=3)
    config.data.update(path=str(path), **data)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      task = sequences.OwnSequences(config)
    self.assertNotIn('WARNING', printed.getvalue())
    restored = sequences.OwnSequences.restore(
        config, json.loads(json.dumps(task.describe()))
    )
    model = task.build_model(nnx.Rngs(0))
    return task, trained.Trained(model, config, 0, restored)

  @parameterized.parameters((np.int64(1.7e15), 1000), (48.1, 1e-6), (0, 1e38))
  def test_columns(self, far, step):
    x = far + NOISE.reshape(40, 6, 1).round(1).clip(-2, 2) * step
    task, loaded = self.task(x.astype(type(far)) if far else x)
    near, _ = self.task(NOISE.reshape(40, 6, 1).round(1).clip(-2, 2))
    for name, split in task.splits.items():
      expected = near.splits[name]['inputs']
      np.testing.assert_allclose(split['inputs'], expected, atol=1e-2)
    inputs = loaded.task.check_inputs(x)['inputs']
    self.assertAlmostEqual(np.std(inputs), 1, delta=0.1)
    if far:
      with self.assertWarnsRegex(UserWarning, 'column 0 of x is so far'):
        loaded.predict(np.float32(x))

  @parameterized.parameters((17 * 10**17 + 1, 10**6), (0.0, 8e16), (0.0, 1e-15))
  def test_answers(self, far, size):
    y = far + np.arange(40) * size
    x = NOISE.reshape(40, 6)
    task, loaded = self.task(x, y, kind='regression')
    model = lambda x, **_: jnp.zeros((len(x), 1))
    found = task.evaluate(model, task.splits['train'])
    found = jax.tree.map(np.asarray, found)
    values = metrics.of_examples(found, task.metrics)
    self.assertAlmostEqual(np.mean(found.losses), 1, places=5)
    deviation = task.summary['splits']['train']['answers'][0]['deviation']
    self.assertBetween(deviation / size, 11, 13)
    self.assertAlmostEqual(values['mse'] / deviation**2, 1, places=5)
    self.assertBetween(values['mae'] / deviation, 0.8, 1)
    predictions = loaded.predict(x[..., None])
    self.assertEqual(predictions.dtype, np.float64)
    self.assertLess(np.abs(predictions[:, 0] - y).max(), 100 * size)
    with self.assertRaisesRegex(NotImplementedError, 'no probabilities'):
      loaded.predict_proba(x[..., None])


class ChecksTest(absltest.TestCase):

  def summary(self, **splits):
    kind = answers.Classes(['a', 'b', 'c'])
    return sequence_checks.summarize(splits, kind, False)

  def test_numbers(self):
    train = arrays(6, 4)
    found = self.summary(train=train, test=arrays(3, 9, seed=1))
    splits = found['splits']
    self.assertEqual(splits['train']['classes'], {'a': 2, 'b': 2, 'c': 2})
    self.assertEqual(splits['test']['longest'], 9)
    mean = train.x[train.valid()][:, 1].mean()
    np.testing.assert_allclose(found['columns'][1]['mean'], mean, rtol=1e-5)
    self.assertEmpty(found['warnings'])
    text = '\n'.join(sequence_checks.lines('mine', found))
    self.assertIn('mine: 6 train, 3 test sequences of 1 to 9 (mean', text)
    self.assertIn('3 classes, in train: a 33.3%', text)

  def test_warnings(self):
    train, test = arrays(6, 4), arrays(6, 4, seed=1)
    train.x[..., 0] = 1e6 + train.x[..., 0]
    train.x[..., 1] = 7
    train.x[0, 0, 0] = np.nan
    train.y[:] = 1
    test.x[2], test.lengths[2] = train.x[3], train.lengths[3]
    text = ' '.join(self.summary(train=train, test=test)['warnings'])
    for words in (
        'constant in train: column 1',
        'column 0: so far from zero',
        '1 values of train are missing, in column 0',
        "'a' has no training example; it can never be right for 2 of test",
        '1 of 6 sequences of test are in train, too',
    ):
      self.assertIn(words, text)

  def test_warnings_about_numbers(self):
    y = np.stack([2**40 + np.arange(6), 1e6 + np.arange(6), range(6)], axis=1)
    train = arrays(6, 4, y=y.astype(np.float32))
    train.x[..., 0] *= np.float32(1e-40)
    kind = answers.Numbers(np.zeros(3), np.ones(3))
    found = sequence_checks.summarize({'train': train}, kind, False)
    text = '\n'.join(found['warnings'])
    self.assertIn('constant in train: column 0 (as', text)
    self.assertIn('constant in train: column 0 of y', text)
    self.assertIn('column 1 of y: so far from zero', text)
    self.assertNotIn('column 2', text)

  def test_many_classes_are_not_all_printed(self):
    kind = answers.Classes([f'class {i}' for i in range(30)])
    train = arrays(60, 3, y=np.arange(60) % 30)
    found = sequence_checks.summarize({'train': train}, kind, False)
    lines = sequence_checks.lines('mine', found)
    self.assertIn('30 classes, most and least of them in train', lines[1])
    self.assertLess(len(lines[1]), 250)


class SequenceTaskTest(parameterized.TestCase):

  def task(self, kind='classes', every_step=False, standardize=True, **model):
    config = base_sequences.get_config()
    config.model.update(layer='MinGRU', features=3)
    config.model.update(model)
    config.data.standardize = standardize
    if kind == 'classes':
      answer, shape, make = answers.Classes('abc'), (), np.int32
    else:
      answer = answers.Numbers([5.0, 0.0], [2.0, 1.0])
      shape, make = (2,), np.float32
    splits = {}
    for name, count, length in (('train', 8, 5), ('test', 4, 7)):
      axes = (count, length, *shape) if every_step else (count, *shape)
      y = np.random.RandomState(1).randint(0, 3, axes).astype(make)
      splits[name] = arrays(count, length, y=y)
    return quietly(
        lambda: sequence_task.SequenceTask(
            config, 'made up', splits, answer, every_step=every_step
        )
    )

  @parameterized.parameters(('classes', False), ('numbers', True))
  @pytest.mark.slow
  def test_a_batch_is_its_sequences_alone(self, kind, every_step):
    task = self.task(kind, every_step)
    model = lambda: task.build_model(nnx.Rngs(0))
    evaluate = jax.jit(lambda examples: task.evaluate(model(), examples))
    whole = evaluate(task.splits['test'])
    self.assertEqual(whole.losses.shape, (4,))
    self.assertCountEqual(
        whole.scores, ['accuracy'] if kind == 'classes' else ['mse', 'mae']
    )
    lengths = task.splits['test']['lengths']
    row = int(np.argmin(lengths))
    one = {k: v[row : row + 1] for k, v in task.splits['test'].items()}
    one['inputs'] = one['inputs'][:, : lengths[row]]
    if every_step:
      one['y'] = one['y'][:, : lengths[row]]
      np.testing.assert_array_equal(whole.weights, lengths)
    alone = evaluate(one)
    np.testing.assert_allclose(alone.losses[0], whole.losses[row], rtol=1e-5)
    for name, score in whole.scores.items():
      np.testing.assert_allclose(alone.scores[name][0], score[row], rtol=1e-5)

  def test_numbers_are_in_units_of_the_data(self):
    kind = answers.Numbers([5.0, 0.0], [2.0, 1.0])
    outputs = np.array([[0.5, 1.0]], np.float32)
    y = kind.given(np.array([[5.0, 0.0]]), np.ones(1, bool))
    found = kind.evaluate(outputs, y, 0.0)
    predictions = kind.in_units(found.predictions)
    np.testing.assert_allclose(predictions, [[6.0, 1.0]])
    np.testing.assert_allclose(found.losses, [(0.25 + 1) / 2])
    np.testing.assert_allclose(found.scores['mse'], [1.0])
    np.testing.assert_allclose(found.scores['mae'], [1.0])

  def test_standardize(self):
    plain, scaled = self.task(standardize=False), self.task()
    x, test = plain.splits['test']['inputs'], arrays(4, 7)
    mean, deviation = sequence_arrays.standardization(
        plain.splits['train']['inputs'], arrays(8, 5).valid()
    )
    by_hand = np.where(test.valid()[..., None], (x - mean) / deviation, 0)
    found = scaled.splits['test']['inputs']
    np.testing.assert_allclose(found, by_hand, atol=1e-6)
    # As a user's own program may trace it.
    traced = jax.jit(scaled.model_inputs)({'x': x})
    traced = np.where(test.valid()[..., None], traced, 0)
    np.testing.assert_allclose(traced, by_hand, atol=1e-5)
    # Spans of time, in the last column, stay.
    timed = self.task(layer='CfC', options={'CfC': {'timespans': True}})
    want = np.concatenate([found[..., :-1], x[..., -1:]], -1)
    np.testing.assert_array_equal(timed.splits['test']['inputs'], want)

  def test_missing_is_the_mean(self):
    task = self.task(standardize=False)
    task.splits['test']['inputs'][:, 0, 1] = np.nan
    make = lambda split: sequence_arrays.Sequences(*split.values())
    splits = {name: make(split) for name, split in task.splits.items()}
    given = base_sequences.get_config(), 'made up', splits, task.answers
    with_missing = quietly(lambda: sequence_task.SequenceTask(*given))
    found = with_missing.evaluate(sums, with_missing.splits['test'])
    self.assertTrue(np.isfinite(found.losses).all())
    self.assertEqual(with_missing.summary['splits']['test']['missing'], 4)

  def test_report(self):
    task = self.task(every_step=True)
    found = task.measure(None, 'test', np.zeros((4, 7), np.int32))
    lengths = task.splits['test']['lengths']
    self.assertEqual(np.sum(found['confusion_matrix']), lengths.sum())
    self.assertEqual(task.class_names, ('a', 'b', 'c'))
    results = [{'test': {'confusion_matrix': np.eye(3)}}] * 2
    found = task.report(results, None)
    self.assertEqual(found.numbers['confusion_matrix'][1], [0, 2, 0])
    self.assertIs(found.numbers['data'], task.summary)
    self.assertIn('confusion_matrix.png', found.files)

  def test_checked_inputs_of_a_trained_model(self):
    task = self.task()
    model = task.build_model(nnx.Rngs(0))
    loaded = trained.Trained(model, base_sequences.get_config(), 0, task)
    x = np.random.RandomState(0).randn(2, 9, 2)
    given = {'x': x, 'lengths': np.array([9, 4])}
    found = loaded.predict(given)
    self.assertEqual((found.shape, found.dtype), ((2,), np.int32))
    np.testing.assert_array_equal(jax.jit(loaded.predict)(given), found)
    b, t = jax.export.symbolic_shape('b, t')  # Sizes are left open.
    of_x = jax.ShapeDtypeStruct((b, t, 2), np.float32)
    of_lengths = jax.ShapeDtypeStruct((b,), np.int32)
    export = jax.export.export(jax.jit(loaded.predict))
    export({'x': of_x, 'lengths': of_lengths})
    share = loaded.predict_proba(given)
    np.testing.assert_allclose(share.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(share.argmax(-1), found)
    log_share = jax.nn.log_softmax(loaded.predict_logits(given))
    np.testing.assert_allclose(log_share, np.log(share), atol=1e-5)
    for ask in (loaded.predict, loaded.predict_proba):
      with self.assertRaisesRegex(ValueError, 'T, 2. as in training'):
        ask({'x': x[..., :1], 'lengths': [9, 4]})
      for way in (ask, jax.jit(ask)):
        with self.assertRaisesRegex(ValueError, 'must have lengths, since'):
          way(x)
    with self.assertRaisesRegex(NotImplementedError, 'no distributions'):
      loaded.predict_distribution(given)
    self.assertLess(len(repr(loaded).splitlines()), 10)

  @parameterized.parameters('classes', 'numbers')
  @pytest.mark.slow
  def test_scores_and_streams(self, kind):
    # A cell that reads whether a sequence starts.
    task = self.task(kind, every_step=kind == 'numbers', layer='RGLRU')
    config = base_sequences.get_config()
    config.eval_batch_size = 3  # The last batch is filled up.
    test = task.splits['test']
    model = task.build_model(nnx.Rngs(0))
    loaded = trained.Trained(model, config, 0, task)
    raw = arrays(4, 7)  # As `task` has it.
    given, y = {'x': raw.x, 'lengths': raw.lengths}, test['y']
    if kind == 'numbers':
      y = task.answers.in_units(y)
    names = np.array(['a', 'b', 'c'])
    found = loaded.score(given, names[y] if kind == 'classes' else y)
    by_hand = task.evaluate(model, test)
    weights = by_hand.weights
    self.assertAlmostEqual(
        found['loss'], np.average(by_hand.losses, weights=weights), places=5
    )
    self.assertIn('f1' if kind == 'classes' else 'mse', found)
    with self.assertRaisesRegex(ValueError, 'y must'):
      loaded.score(given, y[:2])
    if kind == 'classes':
      with self.assertRaisesRegex(ValueError, "classes a, b, c; got 'd'"):
        loaded.score(given, np.full(4, 'd'))
    normal = loaded.model(loaded.normalise(given), seq_lengths=given['lengths'])
    expected = loaded.predict({'x': raw.x, 'lengths': np.full(4, 7)})
    if kind == 'classes':
      np.testing.assert_array_equal(normal, loaded.predict_logits(given))
    else:
      normal = task.answers.in_units(normal)
      np.testing.assert_allclose(normal, loaded.predict(given), rtol=1e-6)
      expected = expected[:, -1]
    stream = loaded.stream()
    for begins in (False, True):
      if begins:
        stream.reset([True, True, False, False])
        stream.reset([False, False, True, True])
      for t in range(7):
        last = stream.step(raw.x[:, t])
      np.testing.assert_allclose(last, expected, atol=1e-6)
    for wrong in (raw.x[:2, 0], 3.0):
      with self.assertRaisesRegex(ValueError, 'x must'):
        stream.step(wrong)
    with self.assertRaisesRegex(ValueError, 'answers must be one of'):
      loaded.stream('answers')
    task.has_stream = False
    with self.assertRaisesRegex(NotImplementedError, 'whole inputs only'):
      loaded.stream()

  @parameterized.parameters('classes', 'numbers')
  def test_steps_without_answers(self, kind):
    task = self.task(kind, every_step=True)
    test = {**task.splits['test'], 'lengths': np.full(4, 7, np.int32)}
    far = np.full_like(test['y'], 2)
    outputs = np.random.RandomState(0).randn(4, 7, task.answers.out_features)
    steps = task.answers.evaluate(outputs, far, 0.0).losses
    far = far.copy()
    far[:, ::2] = sequence_arrays.NO_LABEL if kind == 'classes' else np.nan

    def losses(scale):
      model = lambda x, **_: scale * jnp.asarray(outputs, jnp.float32)
      return task.evaluate(model, {**test, 'y': far}).losses

    np.testing.assert_allclose(losses(1.0), steps[:, 1::2].mean(1), rtol=1e-5)
    self.assertTrue(np.isfinite(jax.jacobian(losses)(1.0)).all())
    split = sequence_arrays.Sequences(test['inputs'], test['lengths'], far)
    expected = np.arange(7) % 2 == np.ones((4, 1))
    np.testing.assert_array_equal(split.known(True), expected)


class InputsTest(parameterized.TestCase):

  X = np.ones((2, 3, 2))

  def check(self, inputs, allow_nan=False, has_field=True):
    task = object.__new__(sequence_task.SequenceTask)
    task._mean, task._deviation = np.zeros(2), np.ones(2)
    task._have_missing, task._are_ragged = allow_nan, False
    task._data = {'missing': 'refuse'} if has_field else {}
    return task.check_inputs(inputs)

  def test_takes(self):
    found = self.check(self.X.astype(np.int64).tolist())['inputs']
    self.assertEqual((found.shape, found.dtype), ((2, 3, 2), np.float32))
    x = self.X.copy()
    x[0, 1:] = np.nan  # Beyond a sequence's end anything may stand.
    found = self.check({'x': jnp.asarray(x), 'lengths': [1, 3]})
    np.testing.assert_array_equal(found['lengths'], [1, 3])
    np.testing.assert_array_equal(found['inputs'][0], [[1, 1], [0, 0], [0, 0]])
    self.assertEqual(found['lengths'].dtype, np.int32)
    found = self.check(x, allow_nan=True)['inputs']
    self.assertFalse(found[0, 1:].any())

  @parameterized.parameters(
      ({'x': X, 'seq_lengths': [1, 1]}, "_lengths'; did .* 'lengths'"),
      ({'lengths': [1, 1]}, "must be a dict of 'x'"),
      (X[..., :1], r'T, 2\] as in training, .*\[2, 3, 1\]'),
      ([X[0], X[0, :1]], 'several lengths; .*pad'),
      ({'x': X, 'lengths': [4, 1]}, '1 to 3, .* sequence 0 has 4'),
      (X * 1e300, r'is inf \(12 such values\)$'),
  )
  def test_refuses(self, inputs, message):
    with self.assertRaisesRegex(ValueError, message):
      self.check(inputs)

  def test_hints_at_a_field_that_is_there(self):
    for wrong, message in (
        (self.X * np.nan, r'column 0 is nan \(12 such values\)'),
        ({'x': self.X * np.nan, 'lengths': [1, 3]}, r'nan \(8 such values\)'),
    ):
      with self.assertRaisesRegex(ValueError, f"{message}; .*missing='zero'"):
        self.check(wrong)
      with self.assertRaisesRegex(ValueError, f'{message}$'):
        self.check(wrong, has_field=False)


class RunTest(absltest.TestCase):
  """The task 'sequences' from files to its report."""

  def setUp(self):
    super().setUp()
    flags.FLAGS.mark_as_parsed()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def config(self, **data) -> ml_collections.ConfigDict:
    config = base_sequences.get_config()
    config.model.update(layer='MinGRU', features=8)
    config.optimizer.learning_rate = 0.05
    config.update(num_epochs=12, batch_size=4)
    config.data.update(path=str(self.directory / 'mine.npz'), **data)
    return config

  @pytest.mark.slow
  def test_a_run(self):
    labels = np.where(np.arange(24) % 2, 'high', 'low')
    sequence_files.write_npz(self.directory / 'mine.npz', y=labels)
    workdir = self.directory / 'run'
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      experiment = training.prepare(self.config(), str(workdir), 'sequences')
      training.train_and_evaluate(experiment)
    told = 'mine.npz: 16 train, 4 validation, 4 test'
    self.assertIn(told, printed.getvalue())
    report = json.loads((workdir / 'report.json').read_text())
    self.assertEqual(report['dataset'], 'mine.npz')
    self.assertEqual(report['test']['accuracy']['mean'], 1.0)
    classes = report['data']['splits']['train']['classes']
    self.assertEqual(classes, {'high': 8, 'low': 8})
    loaded = quietly(lambda: training.load(workdir))
    arrays = sequence_files.arrays()
    given = {name: arrays[name][:2] for name in ('x', 'lengths')}
    np.testing.assert_array_equal(loaded.predict(given), [1, 0])

  def test_regression_at_every_step(self):
    x = sequence_files.arrays()['x']
    y = 100.0 + 10.0 * np.cumsum(x[..., 0], axis=1)
    sequence_files.write_npz(self.directory / 'mine.npz', y=y)
    config = self.config(kind='regression', every_step=True)
    task = quietly(lambda: sequences.OwnSequences(config))
    self.assertEqual(task.metrics[0].name, 'mse')
    deviation = np.ravel(task.answers.deviation)
    self.assertBetween(deviation, 5.0, 50.0)
    described = task.summary['splits']['train']['answers'][0]
    self.assertBetween(described['mean'], 50.0, 150.0)

  def test_bad_fields(self):
    for field, value in (('kind', 'a'), ('missing', 'mean'), ('path', '')):
      config = self.config()
      config.data[field] = value
      with self.assertRaisesRegex(ValueError, f'config.data.{field} must be'):
        sequences.OwnSequences(config)


if __name__ == '__main__':
  absltest.main()
