"""Samples of text while a model trains: when, where, and after a kill."""

from absl.testing import absltest
import jax
import numpy as np
import pytest

from rnnzoo import training
from tests.testing import made_up_task
from tests.training import made_up_runs


class TalkingTask(made_up_task.SignTask):
  """Makes a text of its parameters and its key, with ends of all kinds."""

  def sample(self, model, prompt, key):
    yield prompt
    yield '\r\nmade up\n'
    yield f'{float(model.head.kernel[...][0, 0]):.6f} ä'
    yield f' {int(jax.random.randint(key, (), 0, 10**9))}\n\n'


class SamplesTest(made_up_runs.RunsTestCase):
  TASKS = {'talk': TalkingTask, 'sign': made_up_task.SignTask}

  @pytest.mark.slow
  def test_of_every_epoch_and_after_a_kill(self):
    experiment = self.prepare('talk', 'whole', num_epochs=2, sample_every=1)
    training.train_and_evaluate(experiment)
    directory = self.workdir / 'whole/seed_0'
    found = {}
    for epoch in (1, 2):
      text = (directory / f'sample_{epoch}.txt').read_bytes().decode()
      self.assertStartsWith(text, 'made up\n\n\r\n')
      found[epoch] = text.removeprefix('made up\n\n')
    self.assertNotEqual(found[1], found[2])
    kernel = training.best_model(experiment, 0).head.kernel[...]
    history = self.result('whole')['history']
    best = np.argmin([row['validation_loss'] for row in history])
    if best == 1:
      self.assertIn(f'{float(kernel[0, 0]):.6f}', found[2])
    events = next(directory.glob('events.*')).read_bytes()
    self.assertIn(found[2].strip().encode(), events)

    # The sample of the second epoch is written, its checkpoint is not.
    killed = self.again(experiment, 'killed')
    self.train_killed(killed, at=2, before=True)
    self.assertTrue((self.workdir / 'killed/seed_0/sample_2.txt').exists())
    training.train_and_evaluate(killed)
    self.check_same('whole', 'killed')
    for epoch in (1, 2):
      self.check_same('whole', 'killed', f'seed_0/sample_{epoch}.txt')
    # They are no part of the training.
    training.train_and_evaluate(self.again(experiment, 'none', sample_every=0))
    self.assertFalse((self.workdir / 'none/seed_0/sample_1.txt').exists())
    self.check_same('none', 'killed', 'seed_0/metrics.csv')

  def test_a_task_without_text(self):
    with self.assertRaisesRegex(
        ValueError, "sample_every must be 0 for the task 'sign'.*got 1"
    ):
      self.prepare('sign', sample_every=1)


if __name__ == '__main__':
  absltest.main()
