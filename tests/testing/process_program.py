"""Runs train.py on the made-up task, for tests of several processes.

Its `main` takes the command line of KILL FLAG... from sys.argv, in a process of
tests/testing/forked_program.py.

KILL is the epoch at whose start this process is killed, or 0. The task is
changed by the environment: OTHER_DATA=1 gives this process data of its own.
"""

import os
import runpy
import signal
import sys

from rnnzoo import tasks
from rnnzoo.training import feed
from tests.testing import made_up_task


class Task(made_up_task.SignTask):
  """The made-up task with all that a step can carry."""

  def __init__(self, config):
    super().__init__(config, num_layers=2, norm='batch', dropout_rate=0.2)
    self.batch_size = config.batch_size
    if os.environ.get('OTHER_DATA'):
      self.splits['train']['inputs'][3] += 1.0


def main() -> None:
  tasks.TASKS = {'sign': Task}
  kill = int(sys.argv[1])
  epoch = feed.Feed.epoch

  def epoch_or_die(self, number):
    if number == kill:
      os.kill(os.getpid(), signal.SIGKILL)
    return epoch(self, number)

  feed.Feed.epoch = epoch_or_die
  sys.argv = [
      'train.py',
      '--config=configs/base_smnist.py',
      '--config.task=sign',
      '--config.batch_size=8',
      '--config.eval_batch_size=4',
      '--config.num_epochs=3',
      '--config.checkpoint_seconds=0',
      *sys.argv[2:],
  ]
  runpy.run_path('train.py', run_name='__main__')
