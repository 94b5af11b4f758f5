"""Tasks with metrics, weights, splits and training data of their own."""

import functools
import json
import math
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import loop
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import placement as placements
from rnnzoo.training import step as step_lib
from rnnzoo.training import visits as visits_lib
from tests.testing import made_up_data
from tests.training import made_up_runs


class RunTest(made_up_runs.RunsTestCase):
  TASKS = {
      kind: functools.partial(made_up_data.SumTask, kind=kind)
      for kind in ('generator', 'lessons', 'buckets')
  }

  @parameterized.parameters('generator', 'buckets')
  @pytest.mark.slow
  def test_run(self, kind):
    experiment = self.prepare(kind, monitor='validation_root')
    self.assertEqual(experiment.steps_per_epoch, 7 if kind[0] == 'g' else 9)
    report = training.train_and_evaluate(experiment)
    result, history = self.result(), self.result()['history']
    self.assertEqual(
        ' '.join(history[0]),
        'epoch learning_rate train_loss train_squared_error train_root'
        ' gradient_norm validation_loss validation_squared_error'
        ' validation_root',
    )
    # Once more, by the model of the best epoch, and by formulas of their own.
    roots = [row['validation_root'] for row in history]
    self.assertEqual(result['best_epoch'], 1 + int(np.argmin(roots)))
    model = training.best_model(experiment, seed=0)
    for name in ('test', 'test_40'):
      split = experiment.task.splits[name]
      errors = (np.asarray(model(split['x']))[:, 0] - split['y']) ** 2
      want = np.average(errors, weights=1 + abs(split['y']))
      got = result['test'] if name == 'test' else result['splits'][name]
      self.assertAlmostEqual(got['squared_error'], want, places=5)
      self.assertAlmostEqual(got['loss'], want / 2, places=5)
      self.assertAlmostEqual(got['root'], want**0.5, places=5)
      self.assertIn('first', got)
    errors, weights = [], []
    for split in experiment.task.splits['validation']:
      predictions = np.asarray(model(split['x']))[:, 0]
      errors.append((predictions - split['y']) ** 2)
      weights.append(1 + abs(split['y']))
    want = np.average(np.concatenate(errors), weights=np.concatenate(weights))
    self.assertAlmostEqual(
        history[result['best_epoch'] - 1]['validation_squared_error'],
        want,
        places=5,
    )
    self.check_report(report, self.workdir / 'run')
    if kind == 'generator':  # pieces_test.py kills one with buckets.
      killed = self.again(experiment, 'killed')
      self.train_killed(killed)
      training.train_and_evaluate(killed)
      self.check_same('run', 'killed')
      self.check_same('run', 'killed', 'report.json')

  def check_report(self, report, directory):
    stored = json.loads((directory / 'report.json').read_text())
    self.assertEqual(stored, report)
    self.assertFalse(report['higher_is_better'])
    self.assertSequenceEqual(
        [*report['splits']['test_40']],
        ['squared_error', 'root', 'within', 'loss'],
    )
    text = (directory / 'report.txt').read_text()
    self.assertIn('test squared_error ', text)
    self.assertIn('test_40, mean +- std of 1 seed(s):', text)
    self.assertEqual(
        (directory / 'ones.txt').read_text(),
        f'{report["experiment"]}, made up sums: {report["of_ones"]}',
    )
    self.assertTrue((directory / 'curves.png').exists())

  @pytest.mark.slow
  def test_fields_that_the_task_cannot_have(self):
    smooth = "must be 0 for the task 'generator', which smooth"
    cases = [
        ('model.label_smoothing', 0.1, smooth),
        ('model.pooling', 'mean', "must be 'last' for"),
    ]
    # 'within' is there at the test only.
    for name in ('validation_within', 'validation_accuracy', 'root'):
      cases.append(('monitor', name, 'must be .*validation_root'))
    for name, value, message in cases:
      with self.assertRaisesRegex(ValueError, f'{name} {message}'):
        self.prepare('generator', **{name: value})
    more = (*made_up_data.SumTask.metrics, tasks.Metric('speed'))
    with mock.patch.object(made_up_data.SumTask, 'metrics', more):
      with self.assertRaisesRegex(ValueError, "must give the score 'speed'"):
        self.prepare('generator')
    one_loss = lambda *unused: jnp.zeros(())
    with mock.patch.object(made_up_data.SumTask, 'evaluate', one_loss):
      with self.assertRaisesRegex(ValueError, 'must return a tasks.Evaluation'):
        self.prepare('generator')
    task = made_up_data.SumTask()
    del task.splits['validation']
    with mock.patch.object(tasks, 'TASKS', {'sum': lambda config: task}):
      with self.assertRaisesRegex(ValueError, 'splits must have train, valid'):
        self.prepare('sum')

  def test_batches_of_a_generator_depend_on_seed_and_step(self):
    seen = []
    split = tasks.Generator(lambda key: {'key': key}, 3)
    visits = visits_lib.Visits(split, 4, placements.ONE_DEVICE)
    for seed in (0, 1):
      for step in (0, 1, 3):
        batch = visits.visit(
            lambda batch: batch['key'],
            visits_lib.Lesson(0),
            jax.random.key(seed),
            step,
        )
        seen.append(tuple(jax.random.key_data(batch).tolist()))
    self.assertLen(set(seen), 6)

  def test_prepare_traces_all_lessons(self):
    task = made_up_data.SumTask(kind='lessons')
    train = task.splits['train']
    bad = lambda key: {'x': jnp.zeros((4, 3, 2)), 'y': jnp.zeros(4)}
    task.splits['train'] = train._replace(lessons=((2, bad),))
    with mock.patch.object(tasks, 'TASKS', {'sum': lambda config: task}):
      with self.assertRaisesRegex(ValueError, 'in_features = 1'):
        self.prepare('sum')

  @pytest.mark.slow
  def test_lessons_alone_are_warned_of(self):
    experiment = self.prepare('lessons')
    told = []
    with mock.patch.object(loop.processes, 'say', told.append):
      with mock.patch.object(loop, 'run_seeds', side_effect=StopIteration):
        with self.assertRaises(StopIteration):
          training.train_and_evaluate(experiment)
    self.assertIn('WARNING: all 3 epochs are lessons', told[-1])

  def test_lessons_come_first(self):
    lessons = ((2, lambda key: {'x': 0}), (1, lambda key: {'x': 1}))
    split = tasks.Generator(lambda key: {'x': 2}, 3, lessons)
    visits = visits_lib.Visits(split, 4, placements.ONE_DEVICE)
    key = jax.random.key(0)
    seen = []
    for epoch in range(1, 6):
      lesson = visits_lib.Lesson(split.lesson(epoch))
      visit = jax.jit(
          lambda lesson: visits.visit(lambda b: b['x'], lesson, key, 7)
      )
      seen.append(int(visit(lesson)))
    self.assertSequenceEqual(seen, [0, 0, 1, 2, 2])


class VisitsTest(absltest.TestCase):

  @pytest.mark.slow
  def test_every_example_of_every_bucket_once_an_epoch(self):
    buckets = [
        {'x': jnp.arange(10 * k, 10 * k + n).repeat(k).reshape(n, k)}
        for k, n in ((1, 4), (2, 7), (3, 2))
    ]
    visits = visits_lib.Visits(buckets, 2, placements.ONE_DEVICE)
    self.assertEqual(visits.steps_per_epoch, 2 + 4 + 1)
    orders = [visits.order(jax.random.key(0), epoch) for epoch in (1, 2)]
    seen = []
    for order in orders:
      seen.append(
          [
              visits.visit(lambda batch: batch['x'][:, 0], buckets, order, s)
              for s in range(7)
          ]
      )
      # One example of the second is seen twice: 7 are 4 batches of 2.
      flat = np.concatenate(seen[-1]).tolist()
      self.assertLen(flat, 14)
      self.assertCountEqual(
          set(flat), [*range(10, 14), *range(20, 27), *range(30, 32)]
      )
    self.assertFalse(np.array_equal(*seen))
    self.assertFalse(np.array_equal(orders[0].bucket, orders[1].bucket))


class WeightedStepTest(absltest.TestCase):

  @pytest.mark.slow
  def test_the_weighted_mean_is_minimised(self):
    task = made_up_data.SumTask()
    program = step_lib.Program(task, optax.sgd(0.1), 4)
    key = jax.random.key(3)
    start = program.init(jax.random.key(0))
    graphdef, _, _ = step_lib.split(task.build_model(nnx.Rngs(0)))
    batch = task.splits['train'].make_batch(jax.random.fold_in(key, 0))

    def loss(params):
      model = nnx.merge(graphdef, params, start.statistics)
      evaluation = task.evaluate(model, batch)
      weights = evaluation.weights / evaluation.weights.sum()
      return jnp.sum(weights * evaluation.losses)

    value, gradients = jax.value_and_grad(loss)(start.params)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, start.params, gradients)
    state = program.train_steps(start, visits_lib.Lesson(0), key, 1, 1.0, key)
    chex.assert_trees_all_close(state.params, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.loss, value, rtol=1e-5)
    np.testing.assert_allclose(
        state.scores['squared_error'], 2 * value, rtol=1e-5
    )


class MetricsTest(absltest.TestCase):

  def test_derived(self):
    metrics = (tasks.PERPLEXITY, tasks.BITS_PER_CHARACTER)
    values = metrics_lib.of_means({'loss': math.log(8.0)}, metrics)
    self.assertAlmostEqual(values['perplexity'], 8.0)
    self.assertAlmostEqual(values['bits_per_character'], 3.0)
    values = metrics_lib.of_means({'loss': 1e6}, metrics)
    self.assertEqual(values['perplexity'], math.inf)

  def test_direction(self):
    metrics = (tasks.Metric('bleu', greatest=100.0), tasks.PERPLEXITY)
    for name, value, want in (('bleu', 30.0, 70.0), ('perplexity', 5.0, 5.0)):
      got = metrics_lib.monitored(f'validation_{name}', value, metrics)
      self.assertEqual(got, want)


if __name__ == '__main__':
  absltest.main()
