"""Human activity recognition: the archive's text files."""

import contextlib
import io
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from configs import base_har
from rnnzoo.tasks.series import har
from tests.testing import sequence_files

TRAIN, TEST = 'train/Inertial Signals/', 'test/Inertial Signals/'


class HarTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.folder = self.directory / 'UCI HAR Dataset'
    sequence_files.write_har(self.directory)

  def load(self, directory, **data):
    config = base_har.get_config()
    config.data.update(manual_dir=str(directory), standardize=False, **data)
    with contextlib.redirect_stdout(io.StringIO()):
      return har.HumanActivity(config)

  def test_text_files(self):
    task = self.load(self.folder)
    self.assertEqual(task.dataset, 'UCI HAR')
    self.assertEqual(task.answers.names, ('walking', 'walking_upstairs'))
    self.assertEqual(task.splits['test']['inputs'].shape, (8, 4, 9))
    for split in task.splits.values():
      np.testing.assert_array_equal(
          np.round(split['inputs'][:, 0, 5]), split['y'] + 1
      )

  def test_people_who_validate_do_not_train(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    task = self.load(sequence_files.write_har(directory, windows=16))
    x, people = har.read(directory, 'train')
    found = {}
    for name in ('train', 'validation'):
      rows = {row.tobytes() for row in task.splits[name]['inputs']}
      found[name] = {
          person
          for person, row in zip(people, x.x, strict=True)
          if row.astype(np.float32).tobytes() in rows
      }
    self.assertLen(found['validation'], 1)
    self.assertEmpty(found['train'] & found['validation'])

  @parameterized.parameters(
      ('train/y_train.txt', '1\nwalking\n', 'no table of numbers'),
      ('train/subject_train.txt', '1\n2\n', '8 activities and 2 people'),
      (f'{TEST}body_gyro_y_test.txt', '1 2\n3 4\n', r'\(2, 2\), \(8, 4\)'),
      ('train/y_train.txt', '7\n' * 8, 'y must be from 1 to 6; row 0 has 7'),
      ('train/subject_train.txt', '3\n' * 8, '1 training examples cannot'),
      (
          f'{TRAIN}body_acc_x_train.txt',
          '1 2 3 4\n' * 7 + '1 1e60 3 4\n',
          'train: x must be finite .* 7, step 1, column 0 is inf',
      ),
  )
  def test_damaged(self, name, content, message):
    (self.folder / name).write_text(content)
    with self.assertRaisesRegex(ValueError, message) as caught:
      self.load(self.directory)
    # Neither a field that this task does not have, nor numpy's arguments.
    self.assertNotRegex(str(caught.exception), 'config.data.missing|usecols')

  def test_people_of_the_test_who_trained(self):
    people = (self.folder / 'train/subject_train.txt').read_text().split()
    (self.folder / 'test/subject_test.txt').write_text(f'{people[0]}\n' * 8)
    with self.assertWarnsRegex(UserWarning, rf'people \[{people[0]}\] are in'):
      self.load(self.directory)

  def test_somebody_is_left_to_train_on(self):
    with self.assertRaisesRegex(ValueError, 'cannot be split into 4 and 0'):
      self.load(self.directory, validation_fraction=0.99)
    task = self.load(self.directory, validation_fraction=0.75)
    self.assertLen(task.splits['train']['inputs'], 2)

  def test_a_file_is_missing(self):
    with self.assertRaisesRegex(FileNotFoundError, 'manual_dir must hold the'):
      self.load('')
    (self.folder / TRAIN / 'body_acc_z_train.txt').unlink()
    with self.assertRaisesRegex(FileNotFoundError, 'body_acc_z_train.txt'):
      self.load(self.directory)


if __name__ == '__main__':
  absltest.main()
