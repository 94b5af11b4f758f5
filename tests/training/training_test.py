"""Training: optimisers, compiled steps, early stopping, checkpoints, reports.

The task here is made up and tiny; `train_test.py` runs the real program.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import pathlib
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
from rnnzoo.tasks import classification
from rnnzoo.tasks import protocol
from rnnzoo.training import feed
from rnnzoo.training import loop
from rnnzoo.training import optimization
from rnnzoo.training import records
from rnnzoo.training import report as report_lib
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from rnnzoo.training import step as step_lib
from tests.testing import made_up_task


@functools.cache
def make_program(learning_rate=1e-2):
  """Returns a task whose steps carry all there is to carry, and its program."""
  task = made_up_task.SignTask(num_layers=2, norm='batch', dropout_rate=0.2)
  optimizer = optax.adam(learning_rate)
  return task, step_lib.Program(task, optimizer, eval_batch_size=4)


SGD = {'name': 'sgd', 'weight_decay': 0.1}


class OptimizationTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = made_up_task.base_config().optimizer
    parts = lambda kernel, bias: {
        'kernel': jnp.array(kernel),
        'bias': jnp.array([bias]),
    }
    self.params = parts([1.0, -2.0, 3.0], 0.5)
    self.gradients = parts([3.0, 4.0, 0.0], 12.0)

  @parameterized.parameters(
      # As torch's Adam(weight_decay=...) after clip_grad_norm_. SGD shows what
      # Adam's first step would hide: that is the sign of the gradient.
      (SGD | {'clip_norm': 1.0}, [-3 / 13 - 0.1, -4 / 13 + 0.2, -0.3]),
      # One step of the learning rate against gradient plus decay.
      (SGD | {'name': 'adam', 'clip_norm': 1.0}, [-1.0, -1.0, -1.0]),
      (SGD | {'name': 'adamw'}, [-1.0 - 0.1, -1.0 + 0.2, -0.3]),
      (SGD, [-3.1, -3.8, -0.3], -12.05),
      (
          SGD | {'weight_decay_exclude': 'recurrent_kernel|bias'},
          [-3.1, -3.8, -0.3],
          -12.0,
      ),
      (
          {'name': 'sgd', 'clip_value': 3.5},
          [-3.0, -3.5, 0.0],
          -3.5,
      ),
      (
          SGD | {'name': 'adamw', 'rate_factors': (('bias', 0.5), ('', 2.0))},
          [-2.2, -1.6, -0.6],
          -0.525,
      ),
  )
  def test_first_update(self, fields, kernel, bias=None):
    self.config.update(learning_rate=1.0, clip_norm=0.0, weight_decay=0.0)
    self.config.update(fields)
    optimizer = optimization.make_optimizer(self.config, num_steps=100)
    state = optimizer.init(self.params)
    updates, _ = optimizer.update(self.gradients, state, self.params)
    rtol = 1e-4 if 'adam' in self.config.name else 1e-6
    np.testing.assert_allclose(updates['kernel'], kernel, rtol)
    if bias is not None:
      np.testing.assert_allclose(updates['bias'], [bias], rtol)

  @parameterized.parameters(
      ('cosine', 10, {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
      ('constant', 0, {0: 1.0, 110: 1.0}),
      ('step', 0, {9: 1.0, 10: 0.1, 19: 0.1, 20: 0.01, 29: 0.01}),
      ('step', 3, {9: 1.0, 10: 0.1, 19: 0.1, 20: 0.01, 29: 0.01}),
  )
  def test_schedules(self, name, warmup, expected):
    self.config.update(learning_rate=1.0, schedule=name, warmup_steps=warmup)
    self.config.update(step_factor=0.1, step_epochs=2)
    schedule = optimization.make_schedule(self.config, 110, steps_per_epoch=5)
    rates = list(map(schedule, expected))
    np.testing.assert_allclose(rates, [*expected.values()], 1e-6, atol=1e-7)

  # config_fuzz_test.py has values of every field.
  @parameterized.parameters(
      ({'name': 'lion'}, "'adam', 'adamw'"),
      ({'schedule': 'steps'}, "'constant', 'cosine', 'step'"),
      ({'rate_factors': (('a', -1.0),)}, 'must be pairs of a regular exp'),
  )
  def test_impossible(self, fields, message):
    self.config.update(fields)
    with self.assertRaisesRegex(ValueError, message):
      optimization.make_optimizer(self.config, num_steps=1)

  @parameterized.parameters(
      (
          {'plateau_floor': 0.2, 'plateau_min_delta': 0.1}
          | {'learning_rate': 0.5, 'plateau_patience': 0},
          [(2.0, 1.0), (1.95, 0.5), (1.8, 0.5), (1.75, 0.4), (1.0, 0.4)],
      ),
      # Two epochs without improvement are tolerated, the third halves. No
      # number is no improvement.
      (
          {'plateau_patience': 2},
          [(1.0, 1.0), (0.9, 1.0), (0.9, 1.0), (0.9, 1.0), (0.9, 0.5)]
          + [(float('nan'), 0.5), (0.8, 0.5), (0.9, 0.5)],
      ),
  )
  def test_plateau(self, fields, values_and_scales):
    self.config.update(plateau_factor=0.5, **fields)
    plateau = optimization.make_plateau(self.config)
    state = plateau.init(self.params)
    for value, scale in values_and_scales:
      state = optimization.update_plateau(plateau, state, value)
      self.assertAlmostEqual(float(state.scale), scale, places=6)

  def test_no_plateau(self):
    self.config.plateau_factor = 1.0
    self.assertIsNone(optimization.make_plateau(self.config))


class ProgramTest(parameterized.TestCase):

  def run_calls(self, calls, **options):
    task, program = make_program(**options)
    state = program.init(jax.random.key(0))
    order = program.shuffle(jax.random.key(1), 1)
    for num_steps in calls:
      state = program.train_steps(
          state, task.splits['train'], order, num_steps, 1.0, jax.random.key(2)
      )
    return task, program, state

  def test_every_epoch_sees_every_example(self):
    _, program = make_program()
    orders = [program.shuffle(jax.random.key(1), epoch) for epoch in (1, 2)]
    for order in orders:
      self.assertEqual(order.shape, (7, 8))
      self.assertCountEqual(order.reshape(-1)[:50], range(50))
      # The last batch is filled up with the first examples.
      np.testing.assert_array_equal(order[-1, 2:], order[0, :6])
    self.assertFalse(np.array_equal(*orders))

  def test_where_calls_end_makes_no_difference(self):
    *_, one = self.run_calls([7])
    *_, several = self.run_calls([1, 2, 4])
    chex.assert_trees_all_equal(one, several)
    self.assertEqual(one.step, 7)

  @parameterized.parameters('cpu', 'gpu')
  @pytest.mark.slow
  def test_an_epoch_in_any_number_of_calls(self, backend):
    task, program = make_program()
    key, done = jax.random.key(2), []
    order = program.shuffle(jax.random.key(1), 1)
    with mock.patch.object(jax, 'default_backend', return_value=backend):
      state = feed.run_epoch(
          program,
          program.init(jax.random.key(0)),
          [feed.Piece(task.splits['train'], order, program.steps_per_epoch)],
          1.0,
          key,
          done.append,
      )
    self.assertEqual(done, [7] if backend == 'gpu' else sorted(set(done)))
    self.assertEqual(done[-1], 7)
    *_, expected = self.run_calls([7])
    # The compiler knows the number of steps in one of them only.
    chex.assert_trees_all_close(state, expected, rtol=1e-5, atol=1e-6)

  @pytest.mark.slow
  def test_loss_is_that_of_the_epoch(self):
    *_, first = self.run_calls([7])
    *_, second = self.run_calls([7, 1])
    self.assertGreater(first.loss, 3.0)
    self.assertLess(second.loss, 1.5)

  @parameterized.parameters([()], [(3,)])
  @pytest.mark.slow
  def test_constraint_holds_before_the_first_step_and_after_each(self, calls):
    *_, state = self.run_calls(calls, learning_rate=10.0)
    layers = state.params['backbone']['layers']
    for level in (0, 1):
      most = jnp.abs(layers[level]['recurrent_kernel'][...]).max()
      self.assertBetween(most, 0.5 if calls else 0.0, 0.5)

  def test_dropconnect_needs_a_matrix(self):
    task = made_up_task.SignTask()
    with self.assertRaisesRegex(
        ValueError, 'config.model.dropconnect_rate=0.5: .* a recurrent matrix'
    ):
      step_lib.Program(task, optax.sgd(1.0), 4, dropconnect_rate=0.5)

  @pytest.mark.slow
  def test_evaluation_sees_every_example_once(self):
    task, program, state = self.run_calls([1])
    fresh = program.init(jax.random.key(0))
    same = jax.tree.map(np.array_equal, fresh.statistics, state.statistics)
    self.assertNotIn(True, jax.tree.leaves(same))
    given = state.params, state.statistics, task.splits['validation']
    evaluation, again = [
        program.evaluate(*given, predict=True) for _ in range(2)
    ]
    # Statistics move in training only.
    np.testing.assert_array_equal(evaluation.losses, again.losses)
    model = task.build_model(nnx.Rngs(0))
    nnx.update(model, state.params, state.statistics)
    # One batch of 11 instead of three of 4.
    expected = task.evaluate(model, task.splits['validation'])
    chex.assert_trees_all_close(evaluation, expected, rtol=1e-5)

  @pytest.mark.slow
  def test_gradient_norm(self):
    # Of one step, before it is clipped.
    task, program, state = self.run_calls([1])
    start = program.init(jax.random.key(0))
    order = program.shuffle(jax.random.key(1), 1)
    batch = {k: v[order[0]] for k, v in task.splits['train'].items()}

    def loss(params):
      model = nnx.merge(graphdef, params, start.statistics, copy=True)
      rngs = nnx.Rngs(dropout=jax.random.fold_in(jax.random.key(2), 0))
      return jnp.mean(task.evaluate(model, batch, rngs).losses)

    graphdef, _, _ = step_lib.split(task.build_model(nnx.Rngs(0)))
    want = optax.tree.norm(jax.grad(loss)(start.params))
    self.assertAlmostEqual(state.gradient_norm, want, places=4)


class StopperTest(parameterized.TestCase):

  @parameterized.parameters(
      ([3.0, 2.0, 2.5, 1.0, 1.0, 1.5, 1.2], 2, 0.0, 6),
      ([3.0, 2.0, 2.5, 1.0, 1.0, 1.5, 1.2], 3, 0.0, 7),
      ([3.0, 2.0, 2.5, 1.0, 1.0, 1.5, 1.2], 4, 0.0, None),
      ([1.0, 0.95, 0.9, 0.85], 1, 0.1, 2),
      ([1.0] * 100, 0, 0.0, None),
  )
  def test_stops_after_patience(self, values, patience, min_delta, wanted):
    config = made_up_task.base_config().early_stopping
    config.update(patience=patience, min_delta=min_delta)
    stopper, stops = seed_state.make_stopper(config), []
    for epoch, value in enumerate(values, 1):
      stopper = stopper.update(value)
      stops += [epoch] if stopper.should_stop else []
    self.assertEqual(stops[0] if stops else None, wanted)

  def test_patience_and_the_best_epoch_begin_after_lessons(self):
    config = made_up_task.base_config()
    config.early_stopping.patience = 2
    config.optimizer.update(plateau_factor=0.5, plateau_patience=0)
    task = made_up_task.SignTask()
    task.splits['train'] = protocol.Generator(None, 1, ((4, None),))
    plateau = optimization.make_plateau(config.optimizer)
    run = seed_state.SeedState(
        state=mock.Mock(tested=({}, {}), mean=None, step=-1, skipped=0),
        plateau=plateau.init({}),
        best=None,
        stopper=seed_state.make_stopper(config.early_stopping),
    )
    experiment = mock.Mock(config=config, plateau=plateau, task=task)
    scales = []
    # The fifth value, the first one after lessons, is worse than theirs.
    for value in (1.0, 2.0, 2.0, 2.0, 1.5, 1.5, 1.5):
      run.history.append({'train_loss': value, 'validation_loss': value})
      run.conclude(experiment)
      scales.append(float(run.plateau.scale))
      self.assertEqual(run.best_epoch, 5 if len(run.history) > 4 else 1)
      self.assertEqual(bool(run.stopped), len(run.history) == 7)
    self.assertEqual(scales, [1.0] * 5 + [0.5, 0.25])
    self.assertEqual(run.stopped, 'early stopping after epoch 7')


class TrainAndEvaluateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.config = made_up_task.base_config()
    self.config.update(
        task='sign', num_epochs=4, num_seeds=2, eval_batch_size=4
    )
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(
        mock.patch.object(tasks, 'TASKS', {'sign': made_up_task.SignTask})
    )

  def prepare(self, config=None, defaults=None, **fields):
    config = config or self.config
    return training.prepare(
        config, str(self.workdir), 'sign', defaults, **fields
    )

  def train(self):
    return training.train_and_evaluate(self.prepare())

  def result(self):
    path = self.workdir / 'seed_0/result.json'
    no_constant = mock.Mock(side_effect=ValueError)  # NaN is not JSON.
    return json.loads(path.read_text(), parse_constant=no_constant)

  @pytest.mark.slow
  def test_report(self):
    report = self.train()
    accuracies = [seed['test']['accuracy'] for seed in report['seeds']]
    self.assertLen(accuracies, 2)
    self.assertEqual(
        report['test']['accuracy'],
        {'mean': np.mean(accuracies), 'std': np.std(accuracies)},
    )
    self.assertEqual(np.sum(report['confusion_matrix']), 14)
    self.assertEqual((report['experiment'], report['changed']), ('sign', {}))
    stored = json.loads((self.workdir / 'report.json').read_text())
    self.assertEqual(stored, report)
    for name in ('curves.png', 'confusion_matrix.png'):
      content = (self.workdir / name).read_bytes()
      self.assertStartsWith(content, b'\x89PNG', msg=name)
    for seed in (0, 1):
      directory = self.workdir / f'seed_{seed}'
      lines = (directory / 'metrics.csv').read_text().splitlines()
      self.assertLen(lines, 1 + 4)
      self.assertStartsWith(lines[1], 'made up,1,')
      self.assertNotEmpty(list(directory.glob('events.*')))
    text = (self.workdir / 'seed_0/seconds.csv').read_text()
    head, *lines = (line.split(',') for line in text.splitlines())
    self.assertEqual(
        ' '.join(head),
        'dataset epoch seconds training validation compiled'
        ' sequences_per_second',
    )
    for row, line in enumerate(lines):
      # Seven steps of eight examples.
      self.assertEqual(line[1], str(row + 1))
      self.assertEqual(line[5], '0' if row else '1')
      self.assertAlmostEqual(
          float(line[6]) * float(line[3]) / 56, 1, delta=0.01
      )
    # A finished seed is not run again.
    with mock.patch.object(loop, 'run_seeds') as run_seeds:
      self.assertEqual(self.train(), report)
      run_seeds.assert_not_called()

  @pytest.mark.slow
  def test_metrics_are_those_of_the_best_epoch(self):
    self.config.update(num_seeds=1, monitor='validation_accuracy')
    self.config.optimizer.learning_rate = 0.05
    (seed,) = self.train()['seeds']
    history = self.result()['history']
    accuracies = [row['validation_accuracy'] for row in history]
    self.assertNotEqual(np.argmax(accuracies), np.argmin(accuracies))
    self.assertEqual(seed['best_epoch'], 1 + int(np.argmax(accuracies)))
    experiment = self.prepare()
    # Computed once more, by the model of this epoch.
    model = training.best_model(experiment, seed=0)
    row = history[seed['best_epoch'] - 1]
    names = 'loss', 'accuracy'
    validation = {name: row[f'validation_{name}'] for name in names}
    for split, given in (('validation', validation), ('test', seed['test'])):
      examples = experiment.task.splits[split]
      losses, _, _, predictions = experiment.task.evaluate(model, examples)
      labels = examples['label'].tolist()
      hits = [k for k, label in enumerate(labels) if predictions[k] == label]
      with self.subTest(split):
        self.assertEqual(given['accuracy'], len(hits) / len(labels))
        self.assertAlmostEqual(given['loss'], np.mean(losses), places=5)
    with self.assertRaisesRegex(FileNotFoundError, 'no checkpoint'):
      training.best_model(experiment, seed=5)

  @pytest.mark.slow
  def test_a_loss_that_is_not_finite(self):
    self.config.update(num_seeds=1, num_epochs=20)
    make_program = step_lib.Program

    def poisoned(*args):
      program = make_program(*args)
      train = program.train_steps

      def train_steps(*given):
        state = train(*given)
        nan = jnp.where(state.step > 14, jnp.nan, 1.0)
        params = jax.tree.map(lambda x: x * nan, state.params)
        return state._replace(params=params)

      program.train_steps = train_steps
      return program

    with mock.patch.object(step_lib, 'Program', poisoned):
      report = self.train()
    self.assertEqual(report['diverged'], [0])
    self.assertNotIn('NaN', (self.workdir / 'report.json').read_text())
    result = self.result()
    self.assertEqual(result['stopped'], 'the loss was not finite in epoch 3')
    self.assertTrue(result['diverged'])
    self.assertIsNone(result['history'][-1]['validation_loss'])
    # The last finite epoch is tested.
    self.assertLess(result['best_epoch'], 3)
    self.assertIsNotNone(report['test']['loss']['mean'])
    # The same once more from the files, which hold null.
    self.assertEqual(self.train(), report)

  def test_the_name_says_what_was_changed(self):
    defaults = self.config.copy_and_resolve_references()
    self.config.update(num_seeds=1, num_epochs=1)
    self.config.model.layer = 'LSTM'
    self.config.model.options.LSTM.num_heads = 2
    for given, name, changed in (
        (self.config, 'sign', {}),
        (
            defaults,
            'sign with num_epochs=1, model.layer=LSTM,'
            ' model.options.LSTM.num_heads=2',
            {'num_epochs': 1, 'num_seeds': 1, 'model.layer': 'LSTM'}
            | {'model.options.LSTM.num_heads': 2},
        ),
    ):
      experiment = self.prepare(defaults=given)
      self.assertEqual((experiment.name, experiment.changed), (name, changed))

  def test_a_field_that_nobody_reads(self):
    defaults = self.config.copy_and_resolve_references()
    self.config.unlock()
    self.config.num_epoch = 3
    with self.assertRaisesRegex(ValueError, "no field 'num_epoch'"):
      self.prepare(defaults=defaults)

  def test_options_of_a_layer_that_is_not_there(self):
    for field in ('options', 'last_layer_options'):
      config = self.config.copy_and_resolve_references()
      config.model[field].LSTM.num_heads = 2
      message = f"{field}.LSTM.num_heads would be ignored: .*layer is 'GRU'"
      with self.assertRaisesRegex(ValueError, message):
        self.prepare(config, self.config)
      # Those that the file has for several layers are nobody's mistake.
      training.prepare(config, str(self.workdir / field), 'sign', config)

  def test_more_than_the_device_can_hold(self):
    with mock.patch.object(os, 'sysconf', return_value=10):
      with self.assertRaisesRegex(ValueError, 'the device has 100; .*features'):
        self.prepare()

  def test_numbers_of_the_last_step_and_of_steps_that_were_not_skipped(self):
    self.config.optimizer.warmup_steps = 10
    self.config.optimizer.update(weight_decay=0.1, weight_decay_exclude='biass')
    with self.assertWarnsRegex(UserWarning, "'biass' excludes no parameter"):
      experiment = self.prepare()
    run = seed_state.begin(experiment, jax.random.key(0))
    evaluation = protocol.Evaluation(np.ones(2), {'accuracy': np.ones(2)})
    for done, skipped in ((7, 0), (14, 3), (21, 10)):
      run.state = run.state._replace(
          step=jnp.int32(done),
          gradient_norm=jnp.float32(2.0),
          skipped=jnp.int32(skipped),
      )
      run.add_row(experiment, evaluation)
    rates, norms = (
        [row[name] for row in run.history]
        for name in ('learning_rate', 'gradient_norm')
    )
    np.testing.assert_allclose(rates, np.array([6, 10, 10]) * 1e-4, rtol=1e-5)
    # No step but one was skipped in the last epoch: none is left.
    np.testing.assert_allclose(norms, [2 / 7, 2 / 4, 2.0])

  @pytest.mark.slow
  def test_training_stops_at_a_learning_rate(self):
    # At this learning rate the loss stands still.
    self.config.update(num_seeds=1, num_epochs=9)
    self.config.optimizer.update(
        learning_rate=1e-9, plateau_patience=1, stop_rate=5e-10, warmup_steps=1
    )
    (seed,) = self.train()['seeds']
    rates = [row['learning_rate'] for row in self.result()['history']]
    np.testing.assert_allclose(rates, [1e-9] * 3 + [5e-10] * 2, rtol=1e-6)
    self.assertEqual(seed['stopped'], 'learning rate below 5e-10 after epoch 5')

  def test_checkpoints_are_seconds_apart_and_samples_epochs(self):
    config = self.config
    config.sample_every = 2
    for seconds, saved in ((9.0, [1, 2, 3, 4]), (11.0, [4])):
      config.checkpoint_seconds = seconds
      one = mock.Mock()
      one.records.epoch.return_value = 10.0
      for epoch in range(1, 5):
        one.run.history = [None] * epoch
        one.run.stopped = 'all' if epoch == 4 else ''
        one.run.save.reset_mock()
        loop._record(mock.Mock(config=config), one, False)
        self.assertEqual(one.run.save.called, epoch in saved)
      sampled = [call.args[0] for call in one.records.sample.mock_calls]
      self.assertEqual(sampled, [2, 4])

  def test_a_loss_that_is_not_finite_is_told_once(self):
    with self.assertNoLogs():  # tensorboardX has a warning of its own.
      with records.Events(self.workdir, 'made up', 1) as written:
        written.write({'epoch': 1, 'train_loss': float('nan')})

  def test_numbers_of_a_task_are_printed(self):
    numbers = {'mse': 126.27, 'count': 3, 'no': None, 'text': 'a', 'is': True}
    self.assertEqual(
        report_lib.format_numbers(numbers), 'mse: 126.3\ncount: 3\n'
    )

  def test_another_config_or_data_set_is_refused(self):
    self.prepare()
    self.config.data.manual_dir = 'elsewhere'  # Says nothing about the result.
    self.prepare()
    for field, there, here in (('num_seeds', 2, 5), ('seed', 0, 1)):
      config = self.config.copy_and_resolve_references()
      config[field] = here
      message = f'another config .{field}: {there} there, {here} here'
      with self.assertRaisesRegex(ValueError, message):
        self.prepare(config)
    other = run_data.Data('B')
    with self.assertRaisesRegex(ValueError, "'made up' there, 'B' here"):
      run_directory.open_or_create(self.config, other, str(self.workdir), 'x')

  def test_a_test_may_have_fields_of_its_own(self):
    def open_as(config, mode, digest='a'):
      data = run_data.Data('A', digest=digest)
      given = config, data, str(self.workdir), 'x'
      with contextlib.redirect_stdout(io.StringIO()) as out:
        run_directory.open_or_create(*given, mode=mode)
      return out.getvalue()

    open_as(self.config, 'train')
    there = self.config.eval_batch_size
    self.config.eval_batch_size = there + 1
    message = f'{there} there, {there + 1} here.; pass another --workdir, or'
    with self.assertRaisesRegex(ValueError, f'eval_batch_size: {message}'):
      open_as(self.config, 'train')
    self.assertEqual(open_as(self.config, 'evaluate'), '')
    told = open_as(self.config, 'evaluate', 'b')
    self.assertIn('with other data (other numbers in its arrays)', told)
    # Fields by which the tests are others, and they alone.
    with self.config.unlocked():
      self.config.data.num_test = 5
    of_tests = {'eval_batch_size': (), 'data.num_test': ()}
    with mock.patch.object(run_directory, '_OF_TESTS', of_tests):
      self.assertIn('with other data', open_as(self.config, 'evaluate', 'b'))
    with self.config.unlocked():
      del self.config.data.num_test
    self.config.seed += 1
    message = rf'seed: .*\); take .* by rnnzoo evaluate {self.workdir}$'
    with self.assertRaisesRegex(ValueError, message):
      run_directory.check_same(self.workdir, self.config, mode='evaluate')
    self.assertIn('data.test_samplings', run_directory.of_tests('skeletons'))
    self.assertEqual(run_directory.of_tests('smnist'), ('eval_batch_size',))
    with self.assertRaisesRegex(ValueError, "mode must be .* got 'predict'"):
      self.prepare(mode='predict')

  def test_fields_of_tests_are_fields(self):
    for name, of in run_directory._OF_TESTS.items():
      for task in of or ('smnist', 'lorenz'):
        module = importlib.import_module(f'configs.base_{task}')
        config = module.get_config()
        self.assertIn(name, run_directory.flatten(config.to_dict()))

  def test_impossible_fields(self):  # config_fuzz_test.py has all of them.
    for name, value in (('task', 'mnist'), ('monitor', 'test_loss')):
      config = self.config.copy_and_resolve_references()
      config[name] = value
      with self.subTest(name), self.assertRaisesRegex(ValueError, name):
        self.prepare(config)


class EpochTimesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'seconds.csv'

  def run_epochs(self, done, *seconds_and_lessons, **options):
    """Returns the times of epochs behind those that are done."""
    times, lessons = records.EpochTimes(self.path, 'a, b', done, **options), []
    with mock.patch.object(records, 'time') as time:
      for epoch, (seconds, lesson) in enumerate(seconds_and_lessons, done + 1):
        time.monotonic.return_value = 0.0
        self.assertEqual(times.start(lesson), lesson not in lessons)
        lessons.append(lesson)
        for name in ('training', 'validation'):
          time.monotonic.return_value += seconds / 4
          times.lap(name)
        time.monotonic.return_value = seconds
        times.write(epoch)
        if epoch == 1:
          self.assertEqual(times.summary(), '')
    return times

  def test_resumed(self):
    self.run_epochs(0, (9.0, 0), (2.0, 0), (2.0, 0))
    # Epoch 3 was done, but is in no checkpoint.
    times = self.run_epochs(2, (4.0, 0), (4.0, 0), num_examples=8)
    self.assertEqual(
        self.path.read_text().splitlines()[1:],
        [
            '"a, b",1,9.0,2.25,2.25,1,0.0',
            '"a, b",2,2.0,0.5,0.5,0,0.0',
            '"a, b",3,4.0,1.0,1.0,1,8.0',
            '"a, b",4,4.0,1.0,1.0,0,8.0',
        ],
    )
    self.assertEqual(
        times.summary(),
        '4.000 s an epoch, of which 1.000 training and 1.000 validation (mean'
        ' of 1, without compilation), 8 sequences a second',
    )

  def test_each_lesson_is_compiled(self):
    epochs = (9.0, 0), (2.0, 0), (9.0, 1), (6.0, 1)
    times = self.run_epochs(0, *epochs, num_examples=8)
    self.assertEqual(
        times.summary(),
        '4.000 s an epoch, of which 1.000 training and 1.000 validation (mean'
        ' of 2, without compilation), 8 sequences a second',
    )


class ClassificationTest(absltest.TestCase):

  def test_confusion_metrics(self):
    metrics = classification.confusion_metrics(
        np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]), num_classes=3
    )
    self.assertAlmostEqual(metrics['precision'], (1 + 2 / 3 + 0) / 3)
    self.assertAlmostEqual(metrics['recall'], (0.5 + 1 + 0) / 3)
    self.assertAlmostEqual(metrics['f1'], (2 / 3 + 0.8 + 0) / 3)
    self.assertEqual(
        metrics['confusion_matrix'], [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
    )


if __name__ == '__main__':
  absltest.main()
