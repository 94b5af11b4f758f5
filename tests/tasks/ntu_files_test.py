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


def replaced(lines, index, text):
  return [*lines[:index], text, *lines[index + 1 :]]


class NamesTest(parameterized.TestCase):

  def test_parses_what_it_writes(self):
    name = ntu_files.parse_name('S018C003P106R002A120.skeleton')
    self.assertEqual(name, (18, 3, 106, 2, 120))
    self.assertEqual(name.text(), 'S018C003P106R002A120')

  @parameterized.parameters(
      'S001C002P003R002',
      'S001C002P003R002A000',
      'S001C002P003R002A0012',
      'S٠٠١C002P003R002A013',
  )
  def test_rejects(self, name):
    with self.assertRaisesRegex(ValueError, 'S001C002P003R002A013.skeleton'):
      ntu_files.parse_name(name)


class SplitsTest(parameterized.TestCase):

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
    with self.assertRaisesRegex(FileNotFoundError, 'none.txt'):
      ntu_files.read_missing(directory / 'none.txt')


class ReadTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'a.skeleton'

  def write(self, content):
    if isinstance(content, list):
      content = '\n'.join(content)
    if isinstance(content, str):
      content = content.encode()
    self.path.write_bytes(content)

  @parameterized.product(end=('\n', '\r\n'), mark=(b'', codecs.BOM_UTF8))
  def test_reads(self, end, mark):
    self.write(mark + end.join([*LINES, '', ' ']).encode())
    first, second = ntu_files.read(self.path)
    self.assertEqual(list(first.values()), [[0.1, -0.2, 3.5] * 25])
    self.assertEmpty(second)

  def test_other_fields_and_ids_may_be_any(self):
    # Infinities beside positions are not read, and six bodies have one id.
    body = replaced(BODY, 3, '0 1 2 -inf nan x 0 0 0 0 0 0')
    self.write(['1', '6', *BODY * 5, *body])
    *_, last = bodies = ntu_files.read(self.path)[0].values()
    self.assertLen(bodies, 6)
    self.assertEqual(last[3:6], [0, 1, 2])

  @parameterized.named_parameters(
      ('empty', '', 'ends after line 0, where the number of frames'),
      ('binary', b'2\n\xff\xfe', 'is no text in ASCII; unpack'),
      ('no_frames', ['0'], 'line 1: the number of frames must be from 1'),
      (
          'seven_bodies',
          ['1', '7', *BODY * 7],
          "line 2: the number of bodies must be from 0 to 6; got '7'",
      ),
      (
          'absent',
          ['2', *['1', *BODY[:2], *['0 -0 0.0' + 9 * ' 1'] * 25] * 2],
          'none of 2 frames has a body',
      ),
      (
          'joints',
          replaced(LINES, 3, '20'),
          'line 4: .* must be from 25 to 25; got',
      ),
      ('body', replaced(LINES, 2, '1 2 3'), 'line 3: a body must have 10'),
      ('joint', replaced(LINES, 9, '1 2 3'), 'line 10: a joint must have 12'),
      (
          'nan',
          replaced(LINES, 9, JOINT.replace('-0.2', 'nan')),
          'line 10: x, y, z .* got 0.1 nan 3.5',
      ),
      ('far', replaced(LINES, 9, JOINT.replace('3.5', '1e30')), 'line 10'),
      (
          'underscore',
          replaced(LINES, 9, JOINT.replace('-0.2', '-0_2')),
          'line 10: x, y, z .* got 0.1 -0_2 3.5',
      ),
      ('cut', LINES[:20], 'ends after line 20, where a joint must'),
      ('long', [*LINES, JOINT], 'line 30: ends the last of 2 frames; more'),
      ('many', ['9' * 5000], 'line 1: the number of frames'),
  )
  def test_rejects(self, content, message):
    self.write(content)
    with self.assertRaisesRegex(ValueError, f'{self.path}.*{message}'):
      ntu_files.read(self.path)

  def test_rejects_what_is_no_file(self):
    with self.assertRaisesRegex(ValueError, 'is no regular file'):
      ntu_files.read(self.path.parent)
    os.mkfifo(self.path)
    with self.assertRaisesRegex(ValueError, 'a.skeleton is no regular file'):
      ntu_files.read(self.path)
    with self.assertRaises(FileNotFoundError):
      ntu_files.read(self.path.with_name('b.skeleton'))
    with self.assertRaisesRegex(ValueError, 'path must be a string or'):
      ntu_files.read(None)

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
