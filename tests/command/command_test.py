"""The console script: its commands, its sentences, what it writes."""

import contextlib
import importlib
import importlib.util
import io
import math
import os
import pathlib
import subprocess
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

import rnnzoo
from rnnzoo import settings
from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.command import comparison
from rnnzoo.command import program
from rnnzoo.command import sweep
from rnnzoo.tasks import backbones
from rnnzoo.training import command_line
from rnnzoo.training import files
from tests.testing import finished_run

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The config of another project, with a layer of its own.
OWN_CONFIG = """
import rnnzoo
from configs import gru_smnist

class Own(rnnzoo.GRU):
  '''A layer of another project.'''

rnnzoo.register(Own)

def get_config():
  config = gru_smnist.get_config()
  config.model.update(layer='Own', num_layers=1)
  config.model.options.Own = {'num_heads': 1}
  return config
"""


class Own(rnnzoo.GRU):
  """A layer of another project."""


def run(*words):
  """Returns the exit code and what was printed."""
  out, err = io.StringIO(), io.StringIO()
  code = 0
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      program.main(words)
    except SystemExit as error:
      code = error.code
  return code, out.getvalue(), err.getvalue()


def execute(*command, **options):
  """Returns the end of a program."""
  options = {'cwd': ROOT, 'check': False} | options
  return subprocess.run(command, capture_output=True, text=True, **options)


def write_run(directory, accuracies, dataset='digits', metric='accuracy'):
  """Writes what a finished run leaves behind."""
  history = [
      {'epoch': epoch, f'validation_{metric}': 0.1 * epoch} for epoch in (1, 2)
  ]
  tests = [{metric: value, 'loss': 1.0} for value in accuracies]
  more = {'higher_is_better': metric == 'accuracy'}
  finished_run.write(directory, 'gru_smnist', dataset, tests, history, **more)
  return str(directory)


class ProgramTest(absltest.TestCase):

  def test_lists_configs_by_task(self):
    code, out, _ = run('list')
    self.assertEqual(code, 0)
    self.assertIn('smnist:\n', out)
    self.assertRegex(out, r'gru_smnist +GRU on row-wise MNIST')
    self.assertNotIn('base', out)
    self.assertIn('layers: Elman, LSTM', out)

  def test_version(self):
    code, out, _ = run('--version')
    self.assertEqual(code, 0)
    self.assertIn(f'rnnzoo {rnnzoo.__version__}', out)

  def test_an_interrupted_command(self):
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with mock.patch.object(program, 'COMMANDS', {'sample': interrupt}):
      self.assertEqual(run('sample', 'x'), (130, '', ''))

  def test_help_of_train(self):
    code, out, _ = run('train', '--help')
    self.assertEqual(code, 0)
    self.assertIn('usage: rnnzoo train CONFIG', out)

  @pytest.mark.slow
  def test_a_reader_that_has_enough(self):
    done = execute('bash', '-c', f'{sys.executable} -m rnnzoo list | head -1')
    self.assertLen(done.stdout.splitlines(), 1)
    self.assertEqual(done.stderr, '')

  def test_a_closed_output(self):
    with mock.patch.object(sys, 'stdout', None):
      program.main(['list'])

  def test_unknown_command(self):
    code, _, err = run('trian')
    self.assertEqual(code, 2)
    self.assertIn("invalid choice: 'trian'", err)

  @pytest.mark.slow
  def test_without_its_packages(self):
    script = """
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: name != 'optax' and find(name, *rest)
from rnnzoo import __main__
__main__.main()
"""
    ended = execute(sys.executable, '-c', script, 'list')
    self.assertEqual(ended.returncode, 2)
    self.assertEqual(
        ended.stderr,
        "rnnzoo: rnnzoo.tasks needs optax: pip install 'rnnzoo[train]'\n",
    )

  def test_a_directory_without_a_run(self):
    path = self.create_tempdir().full_path
    for command in ('evaluate', 'predict', 'sample'):
      code, _, err = run(command, path)
      self.assertEqual(code, 2)
      self.assertEqual(
          err, f'rnnzoo: {path} holds no run: it has no config.json\n'
      )

  def test_the_home_of_nobody(self):
    out = f'--output={self.create_tempdir().full_path}'
    for words in (
        ('evaluate', '~nobody-here/a'),
        ('predict', '~nobody-here/a'),
        ('compare', '~nobody-here/a', out),
        (
            'sweep',
            'gru_smnist',
            '--workdir=~nobody-here/a',
            '--grid=config.a=1',
        ),
    ):
      code, _, err = run(*words)
      self.assertEqual(code, 2)
      flag = '--workdir=' if words[0] == 'sweep' else ''
      self.assertStartsWith(
          err,
          f'rnnzoo: {flag}~nobody-here/a begins with the home directory of'
          ' nobody',
      )

  @pytest.mark.slow
  def test_sweep_evaluate_compare_load(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / 'own.py').write_text(OWN_CONFIG)
    (directory / 'cases.txt').write_text(
        'gru\nown own.py --config.model.options.Own.num_heads=2'
    )
    # From elsewhere, as an installed program.
    sweep_words = (
        'sweep gru_smnist --workdir=sweeps --cases=cases.txt --parallel=2'
        ' --grid=config.model.features=4 --config.data.source=digits'
        ' --config.num_epochs=1'
    )
    done = execute(
        *(sys.executable, '-m', 'rnnzoo', *sweep_words.split()),
        cwd=directory,
        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('| gru,features=4 |', done.stdout)
    self.assertIn('seeds 1, epochs 1.', done.stdout)
    self.assertTrue((directory / 'sweeps/comparison.png').exists())
    with contextlib.chdir(directory):
      code, out, err = run('evaluate', 'sweeps/gru,features=4')
      self.assertEqual(code, 0, err)
      report = files.read_json(directory / 'sweeps/gru,features=4/report.json')
      accuracy = report['test']['accuracy']['mean']
      self.assertEndsWith(out, f'test accuracy: {accuracy:.4f}\n')
      _, out, _ = run('compare', 'sweeps')
    self.assertEqual(
        out[: out.index('written')].split(),
        done.stdout[done.stdout.index('|') :].split(),
    )
    own = directory / 'sweeps/own,features=4'
    with mock.patch.dict(rnnzoo._LAYERS):
      with self.assertRaisesRegex(ValueError, "unknown layer 'Own'"):
        training.load(own)
      rnnzoo.register(Own)
      loaded = training.load(own)
    self.assertEqual(loaded.model.backbone.layers[0].num_heads, 2)
    found = loaded.predict(np.zeros((2, 8, 8), np.uint8))
    self.assertEqual(found.shape, (2,))


class ConfigsTest(absltest.TestCase):

  def test_finds_by_name_and_by_path(self):
    path = str(ROOT / 'configs/gru_smnist.py')
    with contextlib.chdir(self.create_tempdir().full_path):
      for name in ('gru_smnist', 'configs/gru_smnist.py', 'gru_smnist.py'):
        self.assertEqual(command_line.find_config(name), path)
      # A file that is there comes first.
      pathlib.Path('gru_smnist').write_text('')
      self.assertEqual(command_line.find_config('gru_smnist'), 'gru_smnist')
      self.assertEqual(
          command_line.find_config('other/gru_smnist'), 'other/gru_smnist'
      )

  def test_configs_import_each_other_where_python_does_not_find_them(self):
    modules = {k: v for k, v in sys.modules.items() if 'configs' not in k}
    path = [p for p in sys.path if not os.path.isdir(f'{p or "."}/configs')]
    with mock.patch.dict(sys.modules, modules, clear=True):
      with mock.patch.object(sys, 'path', path):
        with mock.patch.object(importlib.util, 'find_spec', lambda _: None):
          command_line.make_importable()
        module = importlib.import_module('configs.gru_smnist')
        self.assertEqual(module.get_config().task, 'smnist')

  def test_extras_say_what_to_install(self):
    with self.assertRaisesRegex(
        ModuleNotFoundError, r"x needs no_such_package: pip install 'rnnzoo\[t"
    ):
      settings.require('x', 'train', ('jax', 'no_such_package'))


class RegisterTest(parameterized.TestCase):

  @mock.patch.dict(rnnzoo._LAYERS)
  def test_layers(self):
    with self.assertRaisesRegex(TypeError, 'subclass of rnnzoo.Recurrent'):
      rnnzoo.register('GRU')
    with self.assertRaisesRegex(ValueError, "'GRU' is a layer of rnnzoo"):
      rnnzoo.register(type('GRU', (rnnzoo.LSTM,), {}))
    with self.assertRaisesRegex(ValueError, 'needs rnnzoo.register'):
      backbones.find_layer('Own')
    rnnzoo.register(Own)
    self.assertIs(backbones.find_layer('Own'), Own)

  def test_register(self):
    make = lambda config: None
    tasks.register('made_up', make)
    self.addCleanup(tasks._REGISTERED.clear)
    self.assertIs(tasks.find('made_up'), make)
    self.assertIn('made_up', tasks.known())

  def test_entry_point(self):
    point = mock.Mock(value='package:Task')
    point.name = 'theirs'
    point.load.side_effect = ImportError('no package')
    with mock.patch.object(
        tasks,
        'metadata',
        types.SimpleNamespace(entry_points=lambda **_: [point]),
    ):
      self.assertIn('theirs', tasks.known())
      with self.assertRaisesRegex(ValueError, 'package:Task, cannot be import'):
        tasks.find('theirs')

  @parameterized.parameters(
      ('smnist', print, ValueError, 'is a task of rnnzoo'),
      ('no name', print, ValueError, 'must be an identifier'),
      ('mine', 3, TypeError, 'must be a class or a function'),
  )
  def test_errors(self, name, make, error, message):
    with self.assertRaisesRegex(error, message):
      tasks.register(name, make)
    with self.assertRaisesRegex(ValueError, 'config.task must be one of'):
      tasks.find('mine')


class ComparisonTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def test_table(self):
    values = [0.5, 0.75, 0.7]
    one = write_run(self.directory / 'one', values)
    two = write_run(self.directory / 'two', [0.25], 'MNIST')
    text = comparison.compare([one, two], str(self.directory / 'out'))
    # The quantile of Student's t with two degrees of freedom.
    half = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)
    mean, std = np.mean(values), np.std(values)
    self.assertIn(
        '| run | seeds | accuracy | 95 % interval | loss |\n'
        '| --- | --- | --- | --- | --- |\n'
        f'| one | 3 | {mean:.4f} ± {std:.4f} | {mean - half:.4f} to'
        f' {mean + half:.4f} | 1.0000 ± 0.0000 |\n'
        '| two | 1 | 0.2500 ± 0.0000 | – | 1.0000 ± 0.0000 |',
        text,
    )
    self.assertIn('experiment gru_smnist, parameters 1,234, epochs 2.', text)
    self.assertIn('These runs are of different data. No test is made.', text)
    out = self.directory / 'out'
    self.assertEqual((out / 'comparison.md').read_text(), text)
    starts = {'png': b'\x89PNG', 'svg': b'<?xml', 'pdf': b'%PDF'}
    for end, start in starts.items():
      self.assertStartsWith((out / f'comparison.{end}').read_bytes(), start)
    row, *_, last = (out / 'comparison.csv').read_text().splitlines()[1:]
    self.assertStartsWith(row, 'one,accuracy,3,')
    numbers = mean, std, mean - half, mean + half, 0.5, 0.75
    np.testing.assert_allclose(
        list(map(float, row.split(',')[3:])), numbers, rtol=1e-6
    )
    self.assertEqual(last, 'two,loss,1,1.0,0.0,,,1.0,1.0')

  def compare(self, metric='accuracy', **runs):
    """Returns the text on runs with these values, without a figure."""
    paths = [
        write_run(self.directory / metric / name, values, metric=metric)
        for name, values in runs.items()
    ]
    with mock.patch.object(comparison, 'plot'):
      return comparison.compare(paths, str(self.directory / 'out'))

  def test_paired_tests(self):
    text = self.compare(
        best=[0.3, 0.5, 0.4, 0.6],
        near=[0.29, 0.45, 0.41, 0.55],
        far=[0.1, 0.25, 0.21, 0.36],
        shifted=[0.2, 0.4, 0.3, 0.5],
        short=[0.2],
        diverged=[0.2, None],
    )
    self.assertIn(
        'Paired t-tests on test accuracy, two-sided, over the seeds that both'
        ' runs have, against best, which has the highest mean. The p-values'
        " have Holm's correction for 2 tests.",
        text,
    )
    # Student's t with three degrees of freedom in closed form. The smaller
    # p-value is doubled.
    for name, t, factor in (('near', 0.05 / 0.03, 1), ('far', 14.9466, 2)):
      angle = math.atan(t / math.sqrt(3))
      p = 1 - (2 * angle + math.sin(2 * angle)) / math.pi
      self.assertIn(f'\n{name}: p = {factor * p:.3g}; pairs: 4.', text)
    for name, reason, pairs in (
        ('shifted', 'all differences are equal', 4),
        ('short', 'it takes two pairs', 1),
        ('diverged', 'a seed has no finite value', 2),
    ):
      self.assertIn(f'{name}: no p-value, since {reason}; pairs: {pairs}', text)

  def test_the_best(self):
    text = self.compare('mse', low=[0.1, 0.15], high=[0.3, 0.2])
    self.assertIn('against low, which has the lowest mean', text)

  def test_the_folder_of_a_sweep(self):
    folder = self.directory / 'sweep'
    begin, end = 'optimizer.rate=0.1,features=', ',optimizer.decay=0'
    for number in (16, 8):
      write_run(folder / f'{begin}{number}{end}', [0.5])
    for name in ('features=32', 'comparisons'):
      (folder / name).mkdir()
    (folder / 'features=32/config.json').touch()
    (folder / 'features=8.log').write_text('')
    code, out, err = run('compare', str(folder), f'--output={folder}')
    self.assertEqual(code, 0, err)
    self.assertRegex(out, rf'\| {begin}8{end} \|.*\n\| {begin}16{end} \|')
    self.assertEqual(
        err, f'left out, since not finished: {folder}/features=32\n'
    )
    # Names that are alike without their middle have numbers.
    drawn = (folder / 'comparison.svg').read_text()
    self.assertIn('<!-- 2: optimizer.ra…zer.decay=0 -->', drawn)

  def test_every_change_is_found(self):
    one = pathlib.Path(write_run(self.directory / 'one', [0.5]))
    other = pathlib.Path(write_run(self.directory / 'other', [0.5]))
    names = 'report.json', 'run.json', 'config.json', 'seed_0/result.json'
    for name in names:
      path, text = one / name, (one / name).read_text()
      changed = [text.replace('s', 't', 1), text[: len(text) // 2], None]
      # Whole, but of another run; the reports are alike but for their seeds.
      changed += [(other / name).read_text()] * (name != 'report.json')
      for content in changed:
        path.unlink() if content is None else path.write_text(content)
        errors = files.RunFileError, FileNotFoundError
        with self.assertRaisesRegex(errors, str(one)):
          comparison.read(one)
      path.write_text(text)
    report = files.read_signed(one / 'report.json')
    report['seeds'][0]['test']['accuracy'] = 0.75
    files.write_json(one / 'report.json', files.signed(report))
    with self.assertRaisesRegex(files.RunFileError, 'not the report of the'):
      comparison.read(one)

  def test_runs_of_one_name(self):
    runs = [write_run(self.directory / x / 'run', [0.5]) for x in 'ab']
    text = comparison.compare(runs, str(self.directory / 'out'))
    self.assertIn('a/run |', text)
    self.assertIn('b/run |', text)

  def test_a_name_is_no_formula(self):
    names = '$^$', 'a|b', '_&%#{~'
    runs = [write_run(self.directory / name, [0.5]) for name in names]
    text = comparison.compare(runs, str(self.directory / 'out'))
    self.assertIn(r'| a\|b |', text)
    tex = (self.directory / 'out/comparison.tex').read_text().splitlines()
    rows = [line.partition(' & ')[0] for line in tex if line.endswith(r'\\')]
    want = r'\$$\wedge$\$', 'a$|$b', r'\_\&\%\#\{$\sim$'
    self.assertSequenceEqual(rows, ['run', *want])
    (self.directory / 'again').symlink_to(self.directory / 'a|b')
    with self.assertRaisesRegex(files.RunFileError, 'must be named once'):
      comparison.compare([*runs, str(self.directory / 'again')], 'out')
    self.assertTrue((self.directory / 'out/comparison.png').exists())

  def test_a_seed_without_a_number(self):
    one = write_run(self.directory / 'one', [0.5, None])
    self.assertIn('| none ± none | – |', comparison.compare([one], one))

  def test_what_cannot_be_compared(self):
    one = write_run(self.directory / 'one', [0.5])
    two = write_run(self.directory / 'two', [0.5], metric='bleu')
    (self.directory / 'three').mkdir()
    six = write_run(self.directory / 'six', [0.5])
    path = pathlib.Path(six, 'seed_0/result.json')
    path.write_text('{"history": []}')
    seven = write_run(self.directory / 'seven', [0.5])
    pathlib.Path(seven, 'seed_0/result.json').write_text('{')
    eight = write_run(self.directory / 'eight', [0.5])
    pathlib.Path(eight, 'seed_0/result.json').unlink()
    for runs, message in (
        ([eight], 'No such file .*eight/seed_0/result.json'),
        ([six], 'six/seed_0/result.json is damaged'),
        ([one, two], 'one main metric; these have accuracy .one., bleu .two.'),
        ([str(self.directory / 'three')], 'three holds no finished run'),
        ([seven], 'seven/seed_0/result.json is damaged'),
    ):
      code, _, err = run('compare', *runs, f'--output={self.directory}')
      self.assertEqual(code, 2)
      self.assertRegex(err, f'rnnzoo: .*{message}')
      self.assertLen(err.splitlines(), 1)


class SweepTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def sweep(self, *words, code=lambda *_: 0):
    """Returns `run` of a sweep whose runs end with a code."""
    patched = mock.patch.object(comparison, 'plot')
    with patched, mock.patch.object(sweep, '_run', code):
      return run('sweep', 'gru_smnist', f'--workdir={self.directory}', *words)

  def test_combinations(self):
    runs = sweep.combinations(
        ['config.model.features=4,8', 'config.optimizer.learning_rate=1e-3'],
        {
            'a': sweep.Case(['--config.seed=1'], 'gru_smnist'),
            'b': sweep.Case([]),
        },
    )
    self.assertSequenceEqual(
        list(runs),
        [
            f'{case},features={features},learning_rate=1e-3'
            for case in 'ab'
            for features in (4, 8)
        ],
    )
    self.assertEqual(
        runs['a,features=8,learning_rate=1e-3'],
        sweep.Case(
            [
                '--config.seed=1',
                '--config.model.features=8',
                '--config.optimizer.learning_rate=1e-3',
            ],
            'gru_smnist',
        ),
    )

  @parameterized.parameters(
      ([], 'needs something to vary'),
      (['model.features=4'], 'must be a field and its values'),
      (['config.model.features=4,,8'], 'must be a field and its values'),
      (['config.model.features=4,4'], "would have the name 'features=4'"),
      (['config.a=4', 'config.a=8'], 'has the field config.a twice'),
      (['config.data.path=a/b,a_b'], "would have the name 'path=a_b'"),
  )
  def test_grids_that_cannot_be(self, grids, message):
    with self.assertRaisesRegex(ValueError, message):
      sweep.combinations(grids, {'': sweep.Case([])})

  def test_cases(self):
    path = self.directory / 'cases.txt'
    path.write_text(
        '# Some.\n\nplain\ngamma --config.a=1 "--config.b=x y"\n'
        'other gru_smnist\nlast lstm_a5 --config.a=1'
    )
    self.assertEqual(
        sweep.read_cases(str(path)),
        {
            'plain': sweep.Case([]),
            'gamma': sweep.Case(['--config.a=1', '--config.b=x y']),
            'other': sweep.Case([], 'gru_smnist'),
            'last': sweep.Case(['--config.a=1'], 'lstm_a5'),
        },
    )
    for text, message in (
        ('plain\nplain', 'line 2: a case begins with a name of its own'),
        ('a/b', 'line 1: a case begins'),
        ('a "b', 'line 1: No closing quotation'),
        ('a --workdir=b', 'line 1: a case cannot have a --workdir'),
        ('# nothing', 'has no cases'),
    ):
      path.write_text(text)
      with self.assertRaisesRegex(ValueError, message):
        sweep.read_cases(str(path))

  def test_tuples_are_one_value(self):
    runs = sweep.combinations(
        ['config.data.lengths=(1,2),(1,3)'], {'': sweep.Case([])}
    )
    self.assertSequenceEqual(
        [flag for (flag,), _ in runs.values()],
        ['--config.data.lengths=(1,2)', '--config.data.lengths=(1,3)'],
    )
    grid = 'config.data.curriculum=(),((32,16),(128,10)),[[8, 1]]'
    runs = sweep.combinations([grid], {'': sweep.Case([])}).values()
    self.assertSequenceEqual(
        [case.flags[0].partition('=')[2] for case in runs],
        ['()', '((32,16),(128,10))', '[[8, 1]]'],
    )

  def test_a_config_that_is_not_there(self):
    words = f'--workdir={self.directory}', '--grid=config.seed=1,2'
    code, _, err = run('sweep', 'gru_smnits', *words)
    self.assertEqual(code, 2)
    self.assertIn("no config file gru_smnits (did you mean 'gru_smnist'", err)

  def test_failed_runs_are_named(self):
    directory = self.directory
    for name in ('features=4', 'features=8'):
      write_run(directory / name, [0.5])
    codes = iter([0, 2])
    grid = '--grid=config.model.features=4,8'
    code, out, err = self.sweep(grid, code=lambda *_: next(codes))
    self.assertEqual(code, 3)
    self.assertIn('| features=4 |', out)
    self.assertNotIn('| features=8 |', out)
    self.assertIn('features=8 failed', err)


if __name__ == '__main__':
  absltest.main()
