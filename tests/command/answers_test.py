"""`rnnzoo predict` with files: what they hold, and what becomes of them."""

import contextlib
import functools
import io
import pathlib
from unittest import mock

from absl.testing import absltest
from flax import nnx
import numpy as np

from configs import base_sequences
from rnnzoo.command import answers
from rnnzoo.command import program
from rnnzoo.tasks.series import sequences
from rnnzoo.training import trained
from tests.testing import sequence_files


@functools.cache
def loaded(directory, **data) -> trained.Trained:
  """Returns a model of two columns that was not trained."""
  path = pathlib.Path(directory) / 'data.npz'
  arrays = sequence_files.arrays()
  if 'kind' in data:
    arrays['y'] = np.cumsum(arrays['x'][..., 0], axis=1)
  np.savez(path, **arrays)
  config = base_sequences.get_config()
  config.model.update(layer='MinGRU', features=3)
  config.data.update(path=str(path), **data)
  with contextlib.redirect_stdout(io.StringIO()):
    task = sequences.OwnSequences(config)
  return trained.Trained(task.build_model(nnx.Rngs(0)), config, 0, task)


class AnswersTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.model = loaded(str(self.directory))
    self.arrays = sequence_files.arrays()

  def run_predict(self, *words):
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(program, '_load', lambda _: self.model):
      with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
          program.main(['predict', 'run', *words])
        except SystemExit as error:
          return error.code, err.getvalue()
    return 0, out.getvalue()

  def write(self, name, **arrays):
    np.savez(self.directory / name, **arrays)
    return f'--input={self.directory / name}'

  def test_classes(self):
    given = {name: self.arrays[name][:3] for name in ('x', 'lengths')}
    code, out = self.run_predict(self.write('new.npz', **given), '--proba')
    self.assertEqual(code, 0)
    head, *rows = out.splitlines()
    self.assertEqual(head, 'sequence,prediction,p(0),p(1)')
    found = np.array([row.split(',') for row in rows], float)
    np.testing.assert_array_equal(found[:, 1], self.model.predict(given))
    share = self.model.predict_proba(given)
    np.testing.assert_allclose(found[:, 2:], share, rtol=1e-6)
    # The same sequences as CSV.
    lines = ['a,sequence,b'] + [
        f'{a!r},{k},{b!r}'
        for k, (x, n) in enumerate(zip(*given.values(), strict=True))
        for a, b in x[:n].tolist()
    ]
    text = self.directory / 'new.csv'
    text.write_text('\n'.join(lines) + '\n', encoding='utf-8-sig')
    _, again = self.run_predict(f'--input={text}', '--proba')
    same = [row.split(',') for row in again.splitlines()[1:]]
    np.testing.assert_allclose(np.array(same, float), found, rtol=1e-5)

  def test_numbers_at_every_step(self):
    self.model = loaded(str(self.directory), kind='regression', every_step=True)
    given = {name: self.arrays[name][:3] for name in ('x', 'lengths')}
    output = self.directory / 'answers.csv'
    words = self.write('new.npz', **given), f'--output={output}'
    self.assertEqual(self.run_predict(*words), (0, ''))
    found = np.loadtxt(output, delimiter=',', skiprows=1)
    self.assertLen(found, given['lengths'].sum())
    sequence, step = found[:, :2].astype(int).T
    expected = np.asarray(self.model.predict(given))[sequence, step, 0]
    np.testing.assert_allclose(found[:, 2], expected, rtol=1e-6)

  def test_errors(self):
    text = self.directory / 'bad.csv'
    for content, message in (
        ('', 'a line of names, and lines of numbers'),
        ('a,b\n1,x\n', "line 2: .*'x'"),
        ('a,b\n1\n', 'line 2: there are 1 entries under 2 names'),
    ):
      text.write_text(content, encoding='utf-8')
      with self.assertRaisesRegex(ValueError, message):
        answers.read(text)
    good = self.write(
        'new.npz', x=self.arrays['x'], lengths=self.arrays['lengths']
    )
    for words, message in (
        ((f'--input={self.directory}/none.npz',), 'does not exist'),
        (('--input=mine.txt',), 'must be an .npz or .csv file'),
        ((good, '--output=mine.txt'), 'must end in .csv, got'),
        ((good, '--output=/nowhere/mine.csv'), 'No such file'),
        (('--proba',), 'are for the arrays of --input'),
    ):
      code, err = self.run_predict(*words)
      self.assertEqual(code, 2)
      self.assertRegex(err, message)


if __name__ == '__main__':
  absltest.main()
