"""The training program as its users meet it: processes, kills, exit codes."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

from absl.testing import absltest
import chex
import numpy as np
import orbax.checkpoint as ocp

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIGITS = 'scikit-learn digits (8 x 8), NOT MNIST'

# 39 steps an epoch, BatchNorm and dropout: everything that a step carries.
TINY = (
    '--config=configs/indrnn_smnist.py',
    '--config.data.source=digits',
    '--config.model.features=8',
    '--config.model.dropout_rate=0.1',
    '--config.num_epochs=3',
    '--config.num_seeds=2',
    '--config.checkpoint_seconds=0',
)

# Runs the program and kills it, as nothing can be caught, in mid-epoch.
KILLED = """
import os, runpy, signal, sys
from rnnzoo.training import progress

def update(self, step):
  if step >= 39 + 15:
    os.kill(os.getpid(), signal.SIGKILL)

progress.Progress.update = update
runpy.run_path('train.py', run_name='__main__')
"""


def start(*arguments: str, code: str | None = None) -> subprocess.Popen:
  script = ['train.py'] if code is None else ['-c', code]
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}',
  }
  return subprocess.Popen(
      [sys.executable, *script, *arguments],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


class ResumeTest(absltest.TestCase):

  def test_killed_and_resumed_equals_uninterrupted(self):
    workdirs = {
        name: pathlib.Path(self.create_tempdir().full_path) / 'run'
        for name in ('whole', 'killed')
    }
    whole = start(*TINY, f'--workdir={workdirs["whole"]}')
    killed = start(*TINY, f'--workdir={workdirs["killed"]}', code=KILLED)
    killed.communicate()
    self.assertEqual(killed.returncode, -signal.SIGKILL)
    self.assertFalse((workdirs['killed'] / 'seed_0/result.json').exists())
    lines = (workdirs['killed'] / 'seed_0/metrics.csv').read_text()
    self.assertLen(lines.splitlines(), 2)  # The head, and one epoch.

    resumed = start(*TINY, f'--workdir={workdirs["killed"]}')
    outputs = [process.communicate() for process in (whole, resumed)]
    for process, (_, errors) in zip((whole, resumed), outputs, strict=True):
      self.assertEqual(process.returncode, 0, msg=errors)
    self.assertIn('seed 0: resumed after epoch 1\n', outputs[1][0])
    for name in (
        'config.json',
        'report.json',
        'report.txt',
        'seed_0/metrics.csv',
        'seed_0/result.json',
        'seed_1/metrics.csv',
    ):
      self.assertEqual(
          *((path / name).read_bytes() for path in workdirs.values()), msg=name
      )
    for item in ('state', 'best'):
      chex.assert_trees_all_equal(
          *(
              ocp.StandardCheckpointer().restore(
                  path / 'seed_0/checkpoints/3' / item
              )
              for path in workdirs.values()
          )
      )
    self.check_output(workdirs['whole'], outputs[0][0])

  def check_output(self, workdir: pathlib.Path, output: str) -> None:
    """What a run prints and writes."""
    lines = output.splitlines()
    self.assertIn(DIGITS, lines[0])
    report = json.loads((workdir / 'report.json').read_text())
    accuracies = [seed['test']['accuracy'] for seed in report['seeds']]
    self.assertRegex(lines[-1], r'^test accuracy: [01]\.\d{4}$')
    self.assertEqual(lines[-1], f'test accuracy: {np.mean(accuracies):.4f}')
    for name in (
        'report.json',
        'report.txt',
        'run.json',
        'seed_0/metrics.csv',
        'seed_0/result.json',
    ):
      self.assertIn(DIGITS, (workdir / name).read_text(), msg=name)
    events = next((workdir / 'seed_0').glob('events.*')).read_bytes()
    self.assertIn(DIGITS.encode(), events)


class ErrorsTest(absltest.TestCase):

  def test_one_sentence_and_exit_code_2(self):
    config = '--config=configs/gru_smnist.py'
    cases = (
        ((), 'pass --config=.*agru_smnist'),
        (('--config=configs/none.py',), 'no config file configs/none.py'),
        ((config, '--config.epochs=3'), "no field 'epochs'. Did you mean"),
        ((config, '--config.num_epochs=many'), "num_epochs=many.*'many'"),
        ((config, '--epochs=3'), "flag 'epochs'"),
        ((config, 'epochs=3'), "unknown argument 'epochs=3'"),
        ((config, '--config.model.layer=GRUU'), "unknown layer 'GRUU'.*AGRU"),
        (
            (config, '--config.data.manual_dir=/no/where'),
            'directory /no/where does not exist',
        ),
    )
    processes = [start(*arguments) for arguments, _ in cases]
    for process, (arguments, message) in zip(processes, cases, strict=True):
      with self.subTest(' '.join(arguments)):
        output, errors = process.communicate()
        self.assertEqual(process.returncode, 2)
        self.assertEqual(output, '')
        sentences = errors.splitlines()
        self.assertLen(sentences, 1)
        self.assertStartsWith(sentences[0], 'train.py: ')
        self.assertIsNotNone(re.search(message, sentences[0]), msg=errors)


if __name__ == '__main__':
  absltest.main()
