"""Trains the made-up task, and dies right after its first checkpoint.

  python -m tests.testing.killed_run WORKDIR

run_files_test.py runs it: no time is left for anything after the checkpoint.
"""

import os
import signal
import sys

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import checkpointing
from tests.testing import made_up_task


def main() -> None:
  save = checkpointing.Checkpoints.save

  def save_and_die(self, *args):
    save(self, *args)
    os.kill(os.getpid(), signal.SIGKILL)

  checkpointing.Checkpoints.save = save_and_die
  tasks.TASKS = {'sign': made_up_task.DescribedTask}
  config = made_up_task.base_config()
  config.update(
      task='sign', num_epochs=3, eval_batch_size=4, checkpoint_seconds=0.0
  )
  training.train_and_evaluate(training.prepare(config, sys.argv[1], 'sign'))


if __name__ == '__main__':
  main()
