"""Files of NTU RGB+D: names, splits, the parser, and damaged files."""

import codecs
import os
import pathlib
import random

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_motions
from tests.testing import skeleton_files

JOINT = '0.1 -0.2 3.5 256 212 960 540 0 0 0 1 2'
BODY = ['72057594037944738 0 1 1 1 1 0 0.01 -0.2 2', '25', *[JOINT] * 25]
# Two frames: in the first one body, in the second none.
LINES = ['2', '1', *BODY, '0']


class NamesTest(parameterized.TestCase):

  def test_parses_what_it_writes(self):
    name = ntu_files.parse_name('S018C003P106R002A120.skeleton')
    self.assertEqual(name, (18, 3, 106, 2, 120))
    self.assertEqual(name.text(), 'S018C003P106R002A120')

  def test_rejects(self):
    for name in (
        'S001C002P003R002',
        'S001C002P003R002A000',
        'S001C002P003R002A0012',
        'S٠٠١C002P003R002A013',
    ):
      with self.assertRaisesRegex(ValueError, 'S001C002P003R002A013.skeleton'):
        ntu_files.parse_name(name)

  def test_protocols(self):
    subjects = ntu_files.TRAINING_SUBJECTS
    self.assertLen(subjects, 53)
    self.assertLen([subject for subject in subjects if subject <= 40], 20)
    self.assertContainsSubset(subjects, range(1, 107))
    names = [
        ntu_files.parse_name(name)
        for name in (
            'S001C001P001R001A001',
            'S002C002P003R001A060',
            'S031C003P103R002A120',
            'S032C001P106R002A120',
        )
    ]
    for protocol, trains in (
        ('cross_subject', [True, False, True, False]),
        ('cross_view', [False, True, True, False]),
        ('cross_setup', [False, True, False, True]),
    ):
      mask = ntu_files.training_mask(names, protocol)
      self.assertEqual(mask.tolist(), trains)

  def test_missing_list(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'missing.txt'
    with self.assertRaisesRegex(FileNotFoundError, 'missing.txt'):
      ntu_files.read_missing(path)
    names = ['S001C002P005R002A008', 'S017C003P020R001A059']
    path.write_text('2 of these:\n\n{}\n{}.skeleton'.format(*names))
    self.assertEqual(ntu_files.read_missing(path), {*names})
    path.write_text('S٠٠١C002P005R002A008', encoding='utf-8')
    with self.assertRaisesRegex(ValueError, 'no name like'):
      ntu_files.read_missing(path)


class ReadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'a.skeleton'

  def refuses(self, lines, message):
    self.path.write_text('\n'.join(lines))
    with self.assertRaisesRegex(ValueError, f'{self.path}.*{message}'):
      ntu_files.read(self.path)

  @parameterized.product(end=('\n', '\r\n'), mark=(b'', codecs.BOM_UTF8))
  def test_reads(self, end, mark):
    # Nothing after z is read, and several bodies may have one id.
    lines = ['2', '6', *BODY * 6, '0', '', ' ']
    lines[5] = '0 1 2 -inf nan x 0 0 0 0 0 0'
    self.path.write_bytes(mark + end.join(lines).encode())
    first, second = ntu_files.read(self.path)
    joints, *others = first.values()
    self.assertEqual(joints, [0.1, -0.2, 3.5, 0, 1, 2] + [0.1, -0.2, 3.5] * 23)
    self.assertEqual(others, [[0.1, -0.2, 3.5] * 25] * 5)
    self.assertEmpty(second)

  @parameterized.parameters(
      (1, '0', 'the number of frames must be from 1'),
      (1, '9' * 5000, 'the number of frames must be from 1'),
      (2, '7', "the number of bodies must be from 0 to 6; got '7'"),
      (3, '1 2 3', 'the number of joints must be from 25 to 25'),
      (4, '20', "the number of joints must be from 25 to 25; got '20'"),
      (10, '1 2 3', 'it ends early'),
      (
          10,
          JOINT.replace('-0.2', 'nan'),
          'a body .* 1000 metres',
      ),
      (
          10,
          JOINT.replace('3.5', '1e30'),
          'a body .* 1000 metres',
      ),
      (10, JOINT.replace('3.5', 'x'), "could not convert .* 'x'"),
  )
  def test_rejects_a_line(self, number, text, message):
    lines = [*LINES[: number - 1], text, *LINES[number:]]
    self.refuses(lines, f'no whole .skeleton file: {message}')

  def test_rejects(self):
    self.refuses([], 'it ends early')
    self.refuses([*LINES, JOINT], 'more follows the last of 2 frames')
    absent = ['1', *BODY[:2], *['0 -0 0.0' + 9 * ' 1'] * 25]
    self.refuses(['2', *absent * 2], 'none of 2 frames has a body')
    self.refuses(['2', '\xff'], 'is no text in ASCII; unpack')

  def test_rejects_what_is_no_file(self):
    os.mkfifo(self.path)
    for path, message in (
        (self.path.parent, 'is no regular file'),
        (self.path, 'a.skeleton is no regular file'),
        (None, 'path must be a string or'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        ntu_files.read(path)
    with self.assertRaises(FileNotFoundError):
      ntu_files.read(self.path.with_name('b.skeleton'))

  def test_damaged_in_any_way(self):
    recording = ntu_motions.generate(1).frames[60]
    whole = skeleton_files.file_text(recording[:2]).encode()
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
      content = bytearray(whole)
      for _ in range(rng.choice((0, 1, 3))):
        content[rng.randrange(len(content))] = rng.randrange(256)
      end = rng.choice((len(content), rng.randrange(len(content))))
      self.path.write_bytes(content[:end])
      try:
        for bodies in ntu_files.read(self.path):
          self.assertTrue(np.isfinite(list(bodies.values())).all())
      except ValueError as error:
        refused += 1
        self.assertIn(str(self.path), str(error))
        self.assertNotIn('\n', str(error))
    self.assertGreater(refused, 300)


if __name__ == '__main__':
  absltest.main()
