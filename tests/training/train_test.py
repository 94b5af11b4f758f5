"""The training program as its users meet it: processes, kills, exit codes."""

from collections.abc import Sequence
import json
import os
import pathlib
import signal
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import chex
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.testing import forked_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
Run = forked_program.Run
DIGITS = 'scikit-learn digits (8 x 8), NOT MNIST'

# 39 steps an epoch, BatchNorm and dropout: everything that a step carries.
TINY = (
    '--config=configs/indrnn_smnist.py',
    '--config.data.source=digits',
    '--config.model.features=8',
    '--config.model.dropout_rate=0.1',
    '--config.num_epochs=2',
    '--config.num_seeds=2',
    '--config.checkpoint_seconds=0',
)

# Runs the program and kills it, as nothing can be caught, in mid-epoch.
KILLED = """
import os, runpy, signal, sys
from rnnzoo.training import records

def update(self, step):
  if step >= 39 + 15:
    os.kill(os.getpid(), signal.SIGKILL)

records.Progress.update = update
runpy.run_path('train.py', run_name='__main__')
"""

# Runs the program where no file can be longer than a few bytes.
LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
runpy.run_path('train.py', run_name='__main__')
"""

# Runs the program, with a signal, as Ctrl-C, when a module is imported.
INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
  def find_spec(self, name, path, target=None):
    if name == {module!r}:
      os.kill(os.getpid(), {number})

# A process that a shell started in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
runpy.run_path('train.py', run_name='__main__')
"""


@pytest.mark.slow
class ResumeTest(absltest.TestCase):

  def test_killed_and_resumed_equals_uninterrupted(self):
    workdirs = [
        pathlib.Path(self.create_tempdir().full_path) / 'run' for _ in range(2)
    ]
    whole, other = ([*TINY, f'--workdir={path}'] for path in workdirs)
    ((whole, killed, resumed),) = zip(
        *forked_program.run([Run(whole)], [Run(other, KILLED)], [Run(other)]),
        strict=True,
    )
    self.assertEqual(killed.code, -signal.SIGKILL)
    self.assertEqual((whole.code, resumed.code), (0, 0), (whole, resumed))
    self.assertIn('seed 0: resumed after epoch 1\n', resumed.output)
    names = 'config.json', 'report.json', 'report.txt', 'seed_0/result.json'
    for name in (*names, 'seed_0/metrics.csv', 'seed_1/metrics.csv'):
      self.assertEqual(*((p / name).read_bytes() for p in workdirs), msg=name)
    for item in ('state', 'best'):
      chex.assert_trees_all_equal(
          *(
              ocp.StandardCheckpointer().restore(
                  path / 'seed_0/checkpoints/2' / item
              )
              for path in workdirs
          )
      )
    self.check_output(workdirs[0], whole.output)

  def check_output(self, workdir: pathlib.Path, output: str) -> None:
    """The output and the files of a run."""
    lines = output.splitlines()
    self.assertIn(DIGITS, lines[0])
    text = (workdir / 'report.json').read_text()
    self.assertIn(DIGITS, text)
    accuracies = [
        seed['test']['accuracy'] for seed in json.loads(text)['seeds']
    ]
    self.assertEqual(lines[-1], f'test accuracy: {np.mean(accuracies):.4f}')
    events = next((workdir / 'seed_0').glob('events.*')).read_bytes()
    self.assertIn(DIGITS.encode(), events)


class OutcomeTest(absltest.TestCase):

  def check_interrupted(self, *modules: str) -> None:
    """Ctrl-C while a module is imported, each of which is at another moment.

    The last one gets SIGTERM, as a cluster sends it.
    """
    numbers = dict.fromkeys(modules, 2) | {modules[-1]: 15}
    workdirs = {name: self.create_tempdir().full_path for name in modules}
    path = f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'
    processes = {
        name: subprocess.Popen(
            [
                *(sys.executable, '-c'),
                INTERRUPTED.format(module=name, number=numbers[name]),
                *(*TINY, '--config.num_epochs=1', f'--workdir={workdir}'),
            ],
            cwd=ROOT,
            env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, workdir in workdirs.items()
    }
    for name, process in processes.items():
      with self.subTest(name):
        _, errors = process.communicate()
        code = 128 + numbers[name]
        self.assertEqual(process.returncode, code, msg=errors)
        self.assertNotIn('Traceback', errors)
        self.assertRegex(
            errors.splitlines()[-1],
            '^train.py: interrupted; to go on: python'
            f' .*--workdir={workdirs[name]}$',
        )

  @pytest.mark.slow
  def test_interrupted(self):
    self.check_interrupted('absl.flags', 'orbax.checkpoint')

  @pytest.mark.exhaustive
  def test_interrupted_at_more_moments(self):
    self.check_interrupted(
        'jax',
        'ml_collections',
        'rnnzoo.training',
        'sklearn.metrics',
        'rnnzoo.tasks.images.smnist',
        'tensorboardX.summary',
        'sklearn.datasets',
        'matplotlib.figure',
    )

  @pytest.mark.slow
  def test_diverged_and_a_full_disk(self):
    diverged, full = (
        pathlib.Path(self.create_tempdir().full_path) / 'run' for _ in range(2)
    )
    # LSTM's options are not in this config, and None is not its norm.
    flags = (
        '--config=configs/indrnn_smnist.py',
        '--config.data.source=digits',
        '--config.num_epochs=3',
        '--config.model.layer=LSTM',
        '--config.model.features=8',
        '--config.model.norm=None',
        '--config.model.norm_momentum=None',
        '--config.model.implementation=None',
        '--config.model.options.LSTM.num_heads=2',
        '--config.optimizer.name=sgd',
        '--config.optimizer.learning_rate=1e38',
        '--config.optimizer.clip_norm=0',
        f'--workdir={diverged}',
    )
    # No file can be longer than this, which is what checkpoints need.
    limited = Run([*TINY, f'--workdir={full}'], LIMITED.format(size=3000))
    (one,), (other,) = forked_program.run([Run(flags)], [limited])
    self.check_diverged(diverged, one)
    self.assertEqual(other.code, 2, msg=other.errors)
    self.assertNotIn('Traceback', other.errors)
    # Python may warn later, of coroutines that the checkpoint had begun.
    told = [x for x in other.errors.splitlines() if x.startswith('train.py: ')]
    self.assertRegex(
        told[-1],
        r'^train.py: cannot write the checkpoint of epoch 1 to .*seed_0',
    )

  def check_diverged(
      self, workdir: pathlib.Path, end: forked_program.End
  ) -> None:
    self.assertEqual(end.code, 3, msg=end.errors)
    self.assertRegex(end.output.splitlines()[-1], r'^test accuracy: 0\.\d{4}$')
    self.assertRegex(
        end.errors.splitlines()[-1],
        r'^train.py: the loss of seed 0 was not finite; .*learning_rate',
    )
    no_constant = mock.Mock(side_effect=ValueError)
    report = json.loads(
        (workdir / 'report.json').read_text(), parse_constant=no_constant
    )
    self.assertEqual(report['diverged'], [0])
    self.assertStartsWith(
        report['experiment'],
        'indrnn_smnist with num_epochs=3, model.layer=LSTM',
    )
    self.assertIsNone(report['changed']['model.norm'])
    config = json.loads((workdir / 'config.json').read_text())
    self.assertEqual(config['model']['options']['LSTM'], {'num_heads': 2})
    self.assertIsNone(config['model']['norm'])


@pytest.mark.slow
class ErrorsTest(absltest.TestCase):

  def config_files(self) -> list[tuple[Sequence[str], str]]:
    """Returns arguments that name a config file of no config, and messages."""
    directory = pathlib.Path(self.create_tempdir().full_path)
    base = 'from configs import base_smnist\n'
    begin = 'def get_config():\n  '
    config = f'{base}{begin}config = base_smnist.get_config()\n  config.'
    cases = {
        'syntax': ('def get_config(:\n', 'SyntaxError: .*syntax.py, line 1'),
        'raises': (f'{begin}1 / 0\n', 'raises.py, line 2., .*: ZeroDiv'),
        'handled': (
            f'{begin}try:\n    1 / 0\n  except ZeroDivisionError:\n'
            '    raise ValueError("mine")\n',
            'handled.py, line 5., .*: ValueError: mine',
        ),
        'file': ('open("/no/where")\n', "'/no/where'"),
        'beside': ('import typo\n', "beside.py, line 1., .*No module .*'typo'"),
        'argument': ('def get_config(x):\n  pass\n', 'TypeError: get_config'),
        'none': (f'{begin}pass\n', 'ConfigDict; got a NoneType'),
        'typo': (
            f'{config}num_epoch = 3\n',
            'typo.py, line 4., .*num_epoch',
        ),
        'type': (
            f'{config}num_epochs = "3"\n',
            'type.py, line 4., .*: TypeError',
        ),
    }
    for name, (text, _) in cases.items():
      (directory / f'{name}.py').write_text(text)
    flags = {name: [f'--config={directory}/{name}.py'] for name in cases}
    runs = [(flags[name], message) for name, (_, message) in cases.items()]
    for name in ('syntax', 'raises', 'type'):
      # One error of each place: parsed, run, a field.
      runs.append(([*flags[name], '--config.num_epochs=3'], cases[name][1]))
    return runs

  def check(self, end: forked_program.End, message: str) -> None:
    """One sentence on stderr, exit code 2, and nothing on stdout."""
    self.assertEqual(end.code, 2, msg=end.errors)
    self.assertEqual(end.output, '')
    sentences = end.errors.splitlines()
    self.assertLen(sentences, 1, msg=end.errors)
    self.assertStartsWith(sentences[0], 'train.py: ')
    self.assertRegex(sentences[0], message)

  def test_one_sentence_and_exit_code_2(self):
    given = '--config=configs/gru_smnist.py'
    # What follows the flag --config, and what is told.
    cases = {
        '--config.epochs=3': 'cannot be read: .*epochs',
        '--config.num_epochs=many': "num_epochs=many: .*'many'",
        '--config.optimizer.learning_rate=x': "learning_rate=x: .*'x'",
        '--epochs=3': "flag 'epochs'",
        'epochs=3': "unknown argument 'epochs=3'",
        '--config.model.layer=GRUU': "unknown layer 'GRUU'.*AGRU",
        '--config.optimizer=3': 'optimizer=3: .*not a dict',
        '--config.a b=3': "<field>=<value>, cannot be read: .*'a b'",
        given: '--config is given 2 times; pass it once',
        '--seed=9': "flag 'seed'",
        '--flagfile=/no/where': 'flagfile.*/no/where',
        '--config.model.options.GRUU.a=3': 'cannot be read: .*GRUU',
        '--config.data.manual_dir=/no/where': '/no/where lacks train-images-',
    }
    runs = [((given, flag), message) for flag, message in cases.items()]
    runs += [
        ((), 'pass --config=.*agru_smnist'),
        (('--config=configs/none.py',), 'no config file configs/none.py'),
        (('--config=',), '--config= names no file'),
        ((given, '--profile', '--mode=evaluate'), 'with --mode=train'),
        (('--config.num_epochs=3', given), 'before a value for --config'),
        ((given, '--distributed'), '--distributed finds no cluster that'),
        *self.config_files(),
    ]
    ends = forked_program.run(*([Run(arguments)] for arguments, _ in runs))
    for (arguments, message), (end,) in zip(runs, ends, strict=True):
      with self.subTest(' '.join(arguments)):
        self.check(end, message)


if __name__ == '__main__':
  absltest.main()
