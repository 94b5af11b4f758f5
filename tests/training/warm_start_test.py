"""Going on: from another run's weights, with other rates, to more epochs."""

import contextlib
import io
import json
import pathlib
import shutil
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import base_sequences
from rnnzoo import training
from rnnzoo.training import files
from rnnzoo.training import optimization
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from rnnzoo.training import step as step_lib
from rnnzoo.training import warm_start
from tests.testing import made_up_task
from tests.training import made_up_runs

FILES = 'metrics.csv', 'result.json'
RUNS = 'run', 'whole'


def make_task(config=None):
  return made_up_task.SignTask(config, num_layers=2, norm='batch')


def quiet(function, *given, **options):
  """Returns what a function prints."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    function(*given, **options)
  return out.getvalue()


class SelectTest(absltest.TestCase):

  def select(self, exclude=''):
    shapes = {"[0]['a'].value": 2, "[0]['b'].value": 3, "[1]['c'].value": 4}
    here = {name: jnp.zeros(size) for name, size in shapes.items()}
    there = {name: np.ones(size, 'f2') for name, size in shapes.items()}
    there |= {"[0]['b'].value": np.ones((3, 1)), "[0]['d'].value": np.ones(1)}
    there["[1]['c'].value"] = there.pop("[1]['c'].value")
    return warm_start._select(here, there, exclude, 'it')

  def test_what_fits_is_taken_and_the_rest_is_told(self):
    found, other = self.select(), self.select("c'.$")
    self.assertEqual([*found.arrays], ["[0]['a'].value", "[1]['c'].value"])
    unused = "not used of there: ['b'], ['d']"
    self.assertEqual(
        found.text,
        "6 numbers taken of it; new here: ['b'] (3,), there (3, 1); " + unused,
    )
    self.assertEqual([*other.arrays], ["[0]['a'].value"])
    unused += ", ['c']"
    self.assertEndsWith(other.text, f"there (3, 1), ['c']; {unused}")
    self.assertNotEqual(found.digest, other.digest)
    with self.assertRaisesRegex(ValueError, r"exclude='x' .* are \['a'\], "):
      self.select('x')
    with self.assertRaisesRegex(ValueError, 'no path and shape are the same'):
      self.select('a|c')


class PretrainingTest(absltest.TestCase):

  @pytest.mark.slow
  def test_pretraining_helps_where_labels_are_few(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    rng, found = np.random.default_rng(0), {}
    for name, count in (('many', 600), ('few', 20)):
      for split, size in (('train', count), ('validation', 60), ('test', 200)):
        x = rng.normal(size=(size, 8, 2))
        y = (x.sum(1) > 0) @ [1, 2]  # Four classes.
        (folder / name).mkdir(exist_ok=True)
        np.savez(folder / name / f'{split}.npz', x=x, y=y)
    for name, source in (('many', ''), ('few', ''), ('few', 'many')):
      config = base_sequences.get_config()
      config.data.path = str(folder / name)
      config.update(batch_size=10, num_epochs=12, num_seeds=1)
      config.model.update(layer='MinGRU', features=16)
      if source:
        config.init_from = str(folder / f'run_{source}')
      workdir = folder / f'run_{name}{source}'
      run = lambda c=config, w=workdir: training.prepare(c, str(w))
      quiet(lambda run=run: training.train_and_evaluate(run()))
      report = json.loads((workdir / 'seed_0' / 'result.json').read_text())
      found[name + source] = report['test']['accuracy']
    self.assertGreater(found['fewmany'], found['few'] + 0.1, found)


class WarmStartTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': make_task}

  def test_impossible(self):
    for name, value, message in (
        ('init_exclude', '(', 'must be a regular expression'),
        ('init_exclude', 'b', 'would be ignored without config.init_from'),
        ('init_from', 'no/where', "no/where'?: no/where holds no run"),
    ):
      with self.assertRaisesRegex(ValueError, f'config.{name}.*{message}'):
        self.prepare('sign', **{name: value})

  @pytest.mark.slow
  def test_each_seed_begins_with_its_source(self):
    source = self.prepare('sign', 'source', num_seeds=2)
    path = str(source.workdir)
    fields = {'init_from': path, 'num_seeds': 3, 'num_epochs': 2}
    with self.assertRaisesRegex(ValueError, 'from=.* no checkpoint of seed 0'):
      self.prepare('sign', **fields)
    states = {}
    for seed in (0, 1):
      states[seed] = seed_state.begin(source, jax.random.key(100 + seed))
      with run_directory.checkpoints(source.workdir, seed) as checkpoints:
        states[seed].save(checkpoints)
    fields |= {'init_exclude': 'head', 'model.dtype': 'bfloat16'}
    experiment = self.prepare('sign', **fields)
    self.assertIs(experiment.taken[0], experiment.taken[2])
    self.assertLen(experiment.taken[1].arrays, 14)
    arrays = experiment.taken[1].arrays
    fresh, began = (
        seed_state.begin(experiment, jax.random.key(3), taken)
        for taken in (None, arrays)
    )
    parts = zip(began.best, states[1].best, fresh.best, strict=True)
    for one, other, new in parts:
      chex.assert_trees_all_equal(one['backbone'], other['backbone'])
      chex.assert_trees_all_equal(one.get('head'), new.get('head'))
    chex.assert_trees_all_equal(began.best[0], began.state.params)
    out = quiet(self.train_killed, experiment, before=True)
    self.assertRegex(out, r'\nseed 0: \d+ numbers taken of seed 0 of .*/source')

    # Killed before its first checkpoint; then the source trains on.
    shutil.copytree(path, path + '_old')
    states[1].history.append({})
    states[1].best = states[0].best
    with run_directory.checkpoints(source.workdir, 1) as checkpoints:
      states[1].save(checkpoints)
    with self.assertRaisesRegex(ValueError, 'other weights than seed 1 of'):
      self.prepare('sign', **fields)
    shutil.rmtree(path)
    shutil.move(path + '_old', path)
    second = self.prepare('sign', **fields)
    quiet(self.train_killed, second, at=5)
    # Now each seed has a checkpoint, and the source may go.
    shutil.move(path, path + '_old')
    experiment = self.prepare('sign', **fields)
    self.assertEmpty(experiment.taken)
    report = training.train_and_evaluate(experiment)
    self.assertEqual({s['init_from'] for s in report['seeds']}, {path})
    shutil.move(path + '_old', path)
    training.train_and_evaluate(self.again(second, 'whole'))
    for seed in (0, 1, 2):
      names = f'seed_{seed}/metrics.csv', f'seed_{seed}/result.json'
      self.check_same('run', 'whole', *names)
    # All seeds in one call.
    at_once = self.again(second, 'at_once', seeds_at_once=3)
    training.train_and_evaluate(at_once)
    for seed in (0, 1, 2):
      rows = (self.result(run, seed)['history'] for run in ('run', 'at_once'))
      for one, other in zip(*rows, strict=True):
        self.assertAlmostEqual(one['train_loss'], other['train_loss'], places=3)


class RateFactorsTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': make_task}

  def test_refused(self):
    for factors, message in {
        (('heads', 0.1),): r"'heads' is found in no path, .* \['backbone'\]",
        (('a', 1), ('head', 0)): "'head' is found in no path, or where an ear",
        (('', 0),): 'freezes all parameters',
    }.items():
      with self.assertRaisesRegex(ValueError, f'rate_factors.*{message}'):
        self.prepare('sign', **{'optimizer.rate_factors': factors})

  @parameterized.parameters(
      ({'name': 'adamw'}, 'float32'),
      ({'name': 'sgd'}, 'float16'),
  )
  @pytest.mark.slow
  def test_frozen_parameters_do_not_change_by_a_bit(self, fields, dtype):
    config = self.config('sign', **{'model.dtype': dtype})
    config.optimizer.update(fields, weight_decay=0.1, clip_norm=0.01)
    config.optimizer.rate_factors = (('backbone', 0.0),)
    task = made_up_task.SignTask(num_layers=2, norm='batch', dtype=dtype)
    program = step_lib.Program(
        task,
        optimization.make_optimizer(config.optimizer, 100),
        4,
        loss_scale=optimization.make_loss_scale(config),
        rate_factors=config.optimizer.rate_factors,
    )
    key = jax.random.key(0)
    state, order = program.init(key), program.shuffle(key, 1)
    # A bit that adding zero would change.
    state.params['backbone']['layers'][0]['bias'][...] *= -0.0
    bits = lambda params, part='backbone': jax.tree.map(
        lambda x: np.asarray(x).tobytes(), params[part]
    )
    frozen, head = bits(state.params), bits(state.params, 'head')
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    two, orders, scales, keys = stack((state, order, 1.0, key))
    split = task.splits['train']
    two = program.at_once.train_steps(two, split, orders, 6, scales, keys)
    one = program.train_steps(state, split, order, 6, 1.0, key)
    for after in (one.params, jax.tree.map(lambda x: x[1], two.params)):
      self.assertEqual(bits(after), frozen)
      self.assertNotEqual(bits(after, 'head'), head)
    if dtype == 'float32':
      # The norm that clips has the head's gradient alone.
      found = jax.tree_util.tree_leaves_with_path(one.optimizer)
      moments = [x for p, x in found if 'backbone' in jax.tree_util.keystr(p)]
      self.assertEqual({bool(x.any()) for x in moments}, {False})
      # Clipped by a norm that is no number, they stay numbers.
      one.params['head']['bias'][...] *= np.nan
      one = program.train_steps(one, split, order, 2, 1.0, key)
      self.assertEqual(bits(one.params), frozen)


class EpochsTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': make_task}

  def open(self, **fields):
    return run_directory.open_or_create(
        self.config('sign', **fields),
        run_data.Data('made up'),
        str(self.workdir / 'run'),
        'sign',
    )

  def write_result(self, stopped, num_epochs=3, seed=0):
    path = self.workdir / f'run/seed_{seed}'
    (path / f'checkpoints/{num_epochs}').mkdir(parents=True, exist_ok=True)
    (path / f'checkpoints/{num_epochs}/manifest.json').touch()
    content = {'stopped': stopped, 'num_epochs': num_epochs}
    content |= run_directory.owner(self.workdir / 'run', seed)
    files.write_json(path / 'result.json', files.signed(content))

  def test_refused(self):
    cosine = {'optimizer.schedule': 'cosine'}
    self.open(**cosine)
    with self.assertRaisesRegex(ValueError, "3 there, 9 here; by .* 'cosine'"):
      self.open(num_epochs=9, **cosine)
    shutil.rmtree(self.workdir / 'run')
    self.open()
    self.write_result('all 3 epochs')
    (self.workdir / 'run/report.json').touch()
    before = sorted(self.workdir.rglob('*'))
    cannot = 'cannot go on to config.num_epochs='
    with self.assertRaisesRegex(ValueError, f'{cannot}2: .* up to 3 epochs'):
      self.open(num_epochs=2)
    self.write_result('early stopping after epoch 2', 2)
    with self.assertRaisesRegex(ValueError, f'{cannot}9: training has ended'):
      self.open(num_epochs=9)
    self.write_result('all 3 epochs')
    with mock.patch.object(run_directory, 'last_epoch', return_value=0):
      with self.assertRaisesRegex(ValueError, f'{cannot}9: .* no checkpoint'):
        self.open(num_epochs=9)
    shutil.rmtree(self.workdir / 'run/seed_0/checkpoints/2')
    self.assertContainsSubset(sorted(self.workdir.rglob('*')), before)
    self.assertIn('num_epochs is 9, not 3', quiet(self.open, num_epochs=9))
    config, _ = run_directory.read(self.workdir / 'run')
    self.assertEqual(config.num_epochs, 9)
    for name in ('report.json', 'seed_0/result.json'):
      self.assertFalse((self.workdir / 'run' / name).exists())

  @pytest.mark.slow
  def test_equals_a_run_of_so_many_from_the_start(self):
    # Of eight epochs seed 5 has 6, and seed 6 all.
    fields = {'num_seeds': 2, 'seed': 5, 'early_stopping.patience': 2}
    fields |= {'num_epochs': 6, 'optimizer.learning_rate': 0.03}
    few = self.prepare('sign', 'few', **fields)
    whole = self.again(few, 'whole', num_epochs=8)
    report = training.train_and_evaluate(whole)
    ends = [seed['stopped'].split()[0] for seed in report['seeds']]
    self.assertEqual(ends, ['early', 'all'])
    names = [f'seed_{s}/{n}' for s in (5, 6) for n in FILES]
    names.append('report.json')
    # Seed 6 has one of its epochs.
    killed = self.again(few, 'run')
    quiet(self.train_killed, killed, at=7)
    training.train_and_evaluate(self.again(few, 'run', num_epochs=8))
    self.check_same('run', 'whole', *names, 'report.txt')
    # All seeds are done, and the change is killed before each of its files.
    training.train_and_evaluate(few)
    self.assertEqual(self.result('few', 6)['stopped'], 'all 6 epochs')
    unlink, write = pathlib.Path.unlink, files.write_json
    for count in range(6):
      shutil.rmtree(self.workdir / 'run')
      shutil.copytree(self.workdir / 'few', self.workdir / 'run')
      left = iter(range(count))

      def die(function, *given, left=left, **options):
        if next(left, None) is None:
          raise KeyboardInterrupt
        return function(*given, **options)

      with (
          mock.patch.object(
              pathlib.Path, 'unlink', lambda *x, **y: die(unlink, *x, **y)
          ),
          mock.patch.object(files, 'write_json', lambda *x: die(write, *x)),
          contextlib.suppress(KeyboardInterrupt),
      ):
        self.again(few, 'run', num_epochs=8)
      if count in (1, 5):
        # By the old number, nothing is lost.
        again = self.again(few, 'run')
        training.train_and_evaluate(again)
        self.check_same('run', 'few', *names)
    training.train_and_evaluate(self.again(few, 'run', num_epochs=8))
    self.check_same('run', 'whole', *names, 'report.txt', 'config.json')
    paths = (self.workdir / f'{run}/seed_6/checkpoints/8' for run in RUNS)
    restore = ocp.StandardCheckpointer().restore
    states = ((restore(p / 'state'), restore(p / 'best')) for p in paths)
    chex.assert_trees_all_equal(*states)


if __name__ == '__main__':
  absltest.main()
