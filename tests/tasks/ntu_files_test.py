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
from rnnzoo.tasks.motion import ntu_splits
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
      'a.skeleton',
      '',
      'S001C002P003R002A0012',
      'S٠٠١C002P003R002A013',
      'S001C002P003R002A０13',
  )
  def test_rejects(self, name):
    with self.assertRaisesRegex(ValueError, 'S001C002P003R002A013.skeleton'):
      ntu_files.parse_name(name)


class SplitsTest(parameterized.TestCase):

  def test_subjects(self):
    subjects = ntu_splits.TRAINING_SUBJECTS
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
    answers = [ntu_splits.is_training(name, p) for p in ntu_splits.PROTOCOLS]
    self.assertEqual(answers, [subject, view, setup])

  def test_protocols_of_data_sets(self):
    ntu_splits.check_protocol('ntu60', 'cross_view')
    ntu_splits.check_protocol('ntu120', 'cross_setup')
    with self.assertRaisesRegex(ValueError, "has 'cross_subject' and 'cross_v"):
      ntu_splits.check_protocol('ntu60', 'cross_setup')
    with self.assertRaisesRegex(ValueError, "no 'cross_view'"):
      ntu_splits.check_protocol('ntu120', 'cross_view')
    name = ntu_files.parse_name('S001C001P001R001A001')
    with self.assertRaisesRegex(ValueError, 'one of .*cross_subject'):
      ntu_splits.is_training(name, 'random')
    for names, counts in (
        ([name, name], '0 of 2 recordings to train and 2 to test'),
        ([name._replace(camera=2)], '1 of 1 recordings to train and 0 to test'),
        ([], '0 of 0 recordings'),
    ):
      with self.assertRaisesRegex(
          ValueError, f'config.data.protocol=cross_view takes {counts}'
      ):
        ntu_splits.training_mask(names, 'cross_view')

  def test_missing_list(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    path = directory / 'missing.txt'
    path.write_text(
        '2 of these:\n\nS001C002P005R002A008\nS017C003P020R001A059.skeleton'
    )
    self.assertEqual(
        ntu_splits.read_missing(path),
        {'S001C002P005R002A008', 'S017C003P020R001A059'},
    )
    path.write_text('S٠٠١C002P005R002A008', encoding='utf-8')
    with self.assertRaisesRegex(ValueError, 'no name like'):
      ntu_splits.read_missing(path)
    path.write_text('nothing')
    with self.assertRaisesRegex(ValueError, 'no name like'):
      ntu_splits.read_missing(path)
    with self.assertRaisesRegex(FileNotFoundError, 'is no file'):
      ntu_splits.read_missing(directory / 'none.txt')


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
    recording = ntu_files.read(self.path)
    self.assertEqual(recording.num_frames, 2)
    (body,) = recording.bodies
    np.testing.assert_array_equal(body.frames, [0])
    np.testing.assert_allclose(body.joints[0], [[0.1, -0.2, 3.5]] * 25)
    self.assertEqual(ntu_files.arrange(recording).shape, (1, 2, 25, 3))

  def test_infinities_beside_positions_are_not_read(self):
    self.write(replaced(LINES, 5, '0 1 2 -inf nan x 0 0 0 0 0 0'))
    joints = ntu_files.read(self.path).bodies[0].joints
    np.testing.assert_allclose(joints[0, 1], [0, 1, 2])

  @parameterized.named_parameters(
      ('empty', '', 'ends after line 0, where the number of frames'),
      ('binary', b'2\n\xff\xfe', 'line 2: is no text in ASCII; unpack'),
      ('zeros', bytes(100), 'line 1: the number of frames'),
      ('no_frames', ['0'], 'line 1: the number of frames must be from 1'),
      ('frames', ['two', *LINES[1:]], "line 1: .* got 'two'"),
      ('no_bodies', ['2', '0', '0'], 'none of 2 frames has a body'),
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
          'ids',
          [
              '1001',
              *(
                  x
                  for n in range(1001)
                  for x in ('1', str(n) + BODY[0][17:], *BODY[1:])
              ),
          ],
          'at most 1,000 ids; it has more in frame 1000',
      ),
      ('negative', replaced(LINES, 1, '-1'), "line 2: .* got '-1'"),
      ('joints', replaced(LINES, 3, '20'), 'line 4: .* must be 25; got'),
      ('body', replaced(LINES, 2, '1 2 3'), 'line 3: a body must have 10'),
      ('joint', replaced(LINES, 9, '1 2 3'), 'line 10: a joint must have 12'),
      (
          'nan',
          replaced(LINES, 9, JOINT.replace('-0.2', 'nan')),
          'line 10: x, y, z .* got 0.1 nan 3.5',
      ),
      ('far', replaced(LINES, 9, JOINT.replace('3.5', '1e30')), 'line 10'),
      ('word', replaced(LINES, 9, JOINT.replace('3.5', 'x')), 'line 10'),
      (
          'underscore',
          replaced(LINES, 9, JOINT.replace('-0.2', '-0_2')),
          'line 10: x, y, z .* got 0.1 -0_2 3.5',
      ),
      ('cut', LINES[:20], 'ends after line 20, where a joint, 12 fields,'),
      ('cut_frame', LINES[:-1], 'where the number of bodies, must follow'),
      ('long', [*LINES, JOINT], 'line 31: comes after the last of 2 frames'),
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
    for path in (None, 3, b'a.skeleton', 5000 * 'a'):
      with self.assertRaisesRegex(ValueError, 'path must be a string or'):
        ntu_files.read(path)

  def test_several_bodies_of_one_id(self):
    self.write(['1', '6', *BODY * 6])
    self.assertLen(ntu_files.read(self.path).bodies, 6)

  @parameterized.parameters(
      'exchanged',
      'new ids too',
      'exchanged in a gap',
      'one id, any order',
      'jumps beside the other',
  )
  def test_ids_that_change_persons(self, how):
    rng = np.random.RandomState(0)
    walk = np.cumsum(rng.uniform(0, 0.04, (30, 1, 3)), axis=0)
    persons = np.zeros((30, 2, 25, 3))
    persons[:, 0] = rng.rand(25, 3) + walk + (0, 0, 3)
    persons[:, 1] = 0.5 * rng.rand(25, 3) + (2, 0, 3)
    if how == 'jumps beside the other':
      to = persons[15, 1].mean(0) - persons[15, 0].mean(0) + (0.3, 0, 0)
      persons[15:, 0] += to
    lines = ['30']
    for frame, bodies in enumerate(persons.round(4)):
      ids, order = ['1', '2'], [0, 1]
      if how == 'one id, any order':
        ids, order = ['7', '7'], rng.permutation(2)
      elif how == 'jumps beside the other':
        order = [1, 0]
      elif frame >= 15:
        ids = ['3', '1'] if how == 'new ids too' else ['2', '1']
      if how == 'exchanged in a gap' and frame in (14, 15):
        order = [1] if frame == 15 else []
        bodies *= bool(order)
      persons[frame] = bodies
      lines.append(str(len(order)))
      for n in order:
        lines += [f'{ids[n]} 0 1 1 1 1 0 0 0 2', '25']
        lines += [' '.join(map(str, x)) + 9 * ' 0' for x in bodies[n]]
      persons[frame, [n for n in (0, 1) if n not in order]] = 0
    self.write(lines)
    frames = ntu_files.arrange(ntu_files.read(self.path))
    shown = persons[persons.any(axis=(1, 2, 3))]
    np.testing.assert_allclose(frames, shown, atol=1e-6)

  def test_a_body_that_lingers_beside_its_new_id(self):
    rng = np.random.RandomState(0)
    walk = np.cumsum(rng.uniform(0, 0.01, (30, 1, 3)), axis=0)
    joints = (rng.rand(25, 3) + walk).astype(np.float32)
    old = ntu_files.Body(np.arange(17), joints[np.minimum(np.arange(17), 15)])
    new = ntu_files.Body(np.arange(15, 30), joints[15:])
    for bodies in ((old, new), (new, old)):
      recording = ntu_files.Recording(30, bodies)
      frames = ntu_files.arrange(recording)
      np.testing.assert_array_equal(frames[:, 0], joints)
      self.assertFalse(frames[:, 1].any())
      self.assertEqual(ntu_files.left_out(recording), '')

  def test_main_body_is_the_one_that_varies_most(self):
    rng = np.random.RandomState(0)
    bodies = [
        ntu_files.Body(
            np.array([1, 3]), scale * rng.randn(2, 25, 3).astype(np.float32)
        )
        for scale in (0.1, 3.0, 0.2)
    ]
    bodies[2] = bodies[2]._replace(frames=np.array([0, 3]))
    frames = ntu_files.arrange(ntu_files.Recording(5, tuple(bodies)))
    self.assertEqual(frames.shape, (3, 2, 25, 3))
    np.testing.assert_array_equal(frames[1:, 0], bodies[1].joints)
    np.testing.assert_array_equal(frames[[0, 2], 1], bodies[2].joints)
    self.assertFalse(frames[0, 0].any() or frames[1, 1].any())

  def test_absent_bodies_are_in_no_frame(self):
    still = np.full((9, 25, 3), 3.6, np.float32)
    moves = still + np.linspace(0, 0.5, 9, dtype=np.float32)[:, None, None]
    still[::2] = 0
    still[:, :, 0] *= -1
    moves[:4] = 0
    bodies = tuple(ntu_files.Body(np.arange(9), x) for x in (still, moves))
    recording = ntu_files.Recording(11, bodies)
    self.assertEqual(
        ntu_files.left_out(recording), '4 of 11 frames, which show nobody'
    )
    frames = ntu_files.arrange(recording)
    shown = [1, 3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(frames[:, 0], moves[shown])
    np.testing.assert_array_equal(frames[:, 1], still[shown])

  def test_persons_that_get_new_ids(self):
    rng = np.random.RandomState(0)
    # Three walk side by side, 0.7 m apart, the third as the least active.
    walk = np.cumsum(rng.uniform(0, 0.02, (60, 1, 3)), axis=0)
    place = lambda person: [[[0.7 * person, 0, 3]]]
    size = lambda person: rng.rand(1, 25, 3) * (1, 0.8, 0.3)[person]
    persons = [(size(n) + place(n) + walk).astype(np.float32) for n in range(3)]
    cut = lambda person, *frames: ntu_files.Body(
        np.array(frames), persons[person][list(frames)]
    )
    bodies = (
        cut(0, *range(20)),
        cut(1, *range(20), *range(50, 55)),  # It gets its first id again.
        cut(1, *range(23, 50)),
        cut(0, *range(23, 60)),
        cut(2, *range(23, 60)),
    )
    recording = ntu_files.Recording(60, bodies)
    frames = ntu_files.arrange(recording)
    gone = '3 of 60 frames, which show nobody; '
    self.assertEqual(ntu_files.left_out(recording), gone + '1 of 3 persons')
    shown = [*range(20), *range(23, 60)]
    np.testing.assert_array_equal(frames[:, 0], persons[0][shown])
    np.testing.assert_array_equal(frames[:-5, 1], persons[1][shown[:-5]])
    self.assertFalse(frames[-5:, 1].any())
    recording = ntu_files.Recording(60, (*bodies[:2], bodies[-1]))
    self.assertEqual(
        ntu_files.left_out(recording),
        gone
        + '32 of 60 frames, which show neither main person; 1 of 3 persons',
    )
    self.assertLen(ntu_files.arrange(recording), 25)

  def test_damaged_in_any_way(self):
    recordings = ntu_motions.generate(1, 1)
    whole = skeleton_files.file_text(recordings.of(30)[:2]).encode()
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
      content = bytearray(whole)
      for _ in range(rng.choice((0, 1, 3))):
        content[rng.randrange(len(content))] = rng.randrange(256)
      end = rng.choice((len(content), rng.randrange(len(content))))
      self.path.write_bytes(content[:end])
      try:
        recording = ntu_files.read(self.path)
        for body in recording.bodies:
          self.assertTrue(np.isfinite(body.joints).all())
      except ValueError as error:
        refused += 1
        self.assertIn(str(self.path), str(error))
        self.assertNotIn('\n', str(error))
    self.assertGreater(refused, 300)


if __name__ == '__main__':
  absltest.main()
