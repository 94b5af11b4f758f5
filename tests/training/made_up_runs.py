"""Runs of made-up tasks, for tests: prepared, trained, killed, compared."""

import contextlib
import json
import pathlib
from unittest import mock

from absl.testing import parameterized

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from tests.testing import made_up_task


class RunsTestCase(parameterized.TestCase):
  """Runs of `TASKS`, each in a directory of `workdir`; 'run' by default."""

  TASKS = {'sign': made_up_task.SignTask}

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(tasks, 'TASKS', dict(self.TASKS)))

  def config(self, task, **fields):
    """Returns a config; 'model.dtype', say, names a field of a section."""
    config = made_up_task.base_config()
    config.update(task=task, num_epochs=3, eval_batch_size=4)
    config.checkpoint_seconds = 0.0
    config.update_from_flattened_dict(fields)
    return config

  def prepare(self, task, run='run', **fields):
    config = self.config(task, **fields)
    return training.prepare(config, str(self.workdir / run), task)

  def again(self, experiment, run, **fields):
    """Returns the experiment in another directory, compiled as it is."""
    config = experiment.config.copy_and_resolve_references()
    config.update(fields)
    data = run_data.of_task(experiment.task)
    path = run_directory.open_or_create(
        config, data, str(self.workdir / run), experiment.name
    )
    return experiment._replace(config=config, workdir=path)

  def train_killed(self, experiment, at=1, before=False):
    """Trains; a kill follows or precedes the checkpoint of that number."""
    save, count = seed_state.SeedState.save, 0

    def save_and_die(run, checkpoints):
      nonlocal count
      count += 1
      if not (before and count == at):
        save(run, checkpoints)
      if count == at:
        raise KeyboardInterrupt

    with mock.patch.object(seed_state.SeedState, 'save', save_and_die):
      with contextlib.suppress(KeyboardInterrupt):
        training.train_and_evaluate(experiment)
    self.assertEqual(count, at)

  def check_same(self, one, other, *names):
    """Files of two runs, these and the results, are the same bit by bit."""
    for name in names or ('seed_0/metrics.csv', 'seed_0/result.json'):
      contents = [
          (self.workdir / run / name).read_bytes() for run in (one, other)
      ]
      self.assertEqual(*contents, name)

  def result(self, run='run', seed=0):
    """Returns a seed's result.json."""
    return json.loads(
        (self.workdir / run / f'seed_{seed}/result.json').read_text()
    )
