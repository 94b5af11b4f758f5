"""Official splits of NTU RGB+D, and the list of recordings to leave out."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from rnnzoo.tasks.motion import ntu_files


class SplitsTest(parameterized.TestCase):

  def test_subjects(self):
    subjects = ntu_files.TRAINING_SUBJECTS
    self.assertLen(subjects, 53)
    self.assertLen([subject for subject in subjects if subject <= 40], 20)
    self.assertContainsSubset(subjects, range(1, 107))

  @parameterized.parameters(
      ('S001C001P001R001A001', True, False, False),
      ('S002C002P003R001A060', False, True, True),
      ('S031C003P103R002A120', True, True, False),
      ('S032C001P106R002A120', False, False, True),
  )
  def test_by_name(self, name, subject, view, setup):
    name = ntu_files.parse_name(name)
    answers = [ntu_files.is_training(name, p) for p in ntu_files.PROTOCOLS]
    self.assertEqual(answers, [subject, view, setup])

  def test_protocols_of_data_sets(self):
    ntu_files.check_protocol('ntu60', 'cross_view')
    with self.assertRaisesRegex(ValueError, "has 'cross_subject' and 'cross_v"):
      ntu_files.check_protocol('ntu60', 'cross_setup')
    name = ntu_files.parse_name('S001C001P001R001A001')
    for names, counts in (
        ([name, name], '0 of 2 recordings to train and 2 to test'),
        ([name._replace(camera=2)], '1 of 1 recordings to train and 0 to test'),
        ([], '0 of 0 recordings'),
    ):
      with self.assertRaisesRegex(
          ValueError, f'config.data.protocol=cross_view takes {counts}'
      ):
        ntu_files.training_mask(names, 'cross_view')

  def test_missing_list(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    path = directory / 'missing.txt'
    path.write_text(
        '2 of these:\n\nS001C002P005R002A008\nS017C003P020R001A059.skeleton'
    )
    self.assertEqual(
        ntu_files.read_missing(path),
        {'S001C002P005R002A008', 'S017C003P020R001A059'},
    )
    path.write_text('S٠٠١C002P005R002A008', encoding='utf-8')
    with self.assertRaisesRegex(ValueError, 'no name like'):
      ntu_files.read_missing(path)
    with self.assertRaisesRegex(FileNotFoundError, 'is no file'):
      ntu_files.read_missing(directory / 'none.txt')


if __name__ == '__main__':
  absltest.main()
