"""From `.skeleton` files to one array: damage, interruption, repetition."""

import contextlib
import errno
import io
import json
import os
import pathlib
from unittest import mock

from absl.testing import absltest
import numpy as np
import pytest

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_conversion
from rnnzoo.tasks.motion import ntu_motions
from tests.testing import skeleton_files


class ConversionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.source = pathlib.Path(self.create_tempdir().full_path)
    self.destination = pathlib.Path(self.create_tempdir().full_path) / 'out'
    self.recordings = ntu_motions.generate(2)

  def write(self, stop, start=0, folder=''):
    """Writes recordings to a folder of the source, and returns their paths."""
    return skeleton_files.write_files(
        self.source / folder, self.recordings, range(start, stop)
    )

  def refuses(self, message, error=ValueError):
    with self.assertRaisesRegex(error, message):
      self.convert()

  def convert(self, processes=1):
    return ntu_conversion.convert(self.source, self.destination, processes)

  def assert_same(self, paths):
    """Asserts that the destination holds what the files were written from."""
    converted = ntu_arrays.read(self.destination)
    stems = [name.text() for name in converted.names]
    self.assertEqual(stems, sorted(path.stem for path in paths))
    for name, found in zip(converted.names, converted.frames, strict=True):
      want = self.recordings.frames[self.recordings.names.index(name)]
      self.assertLen(found, len(want))
      # Which of two bodies is the main one, is not known before.
      errors = [abs(found - x).max() for x in (want, want[:, ::-1])]
      self.assertLess(min(errors), 1e-5)

  def link(self, name, to):
    (self.source / name).symlink_to(to)

  def run_program(self, code, *messages, name='.'):
    """Runs the program, which ends with this code and prints this."""
    source = str(self.source / name)
    with contextlib.redirect_stdout(io.StringIO()) as out:
      with contextlib.redirect_stderr(out):
        found = ntu_conversion.main(
            [source, str(self.destination), '--num_processes=1']
        )
    self.assertEqual(found, code)
    for message in messages:
      self.assertRegex(out.getvalue(), message)

  def test_converts_folders(self):
    paths = [
        *self.write(20, folder='nturgb+d_skeletons'),
        *self.write(40, 20, 'nturgb+d_skeletons120'),
    ]
    for index, suffix in ((0, '.SKELETON'), (30, '.Skeleton')):
      paths[index].rename(paths[index].with_suffix(suffix))
    result = self.convert()
    num_frames = sum(map(len, self.recordings.frames[:40]))
    self.assertEqual(result, (40, num_frames, (), ()))
    self.assert_same(paths)
    self.assertCountEqual(
        [path.name for path in self.destination.iterdir()],
        ['frames.npy', 'index.json', 'left_out.txt', 'skipped.txt'],
    )
    self.refuses('out holds a conversion; name another folder')

  def test_files_that_are_not_converted_are_listed(self):
    paths = self.write(9)
    cut, more = paths[:2]
    cut.write_text('1\n1\n')
    lines = more.read_text().splitlines()
    number = int(lines[0]) + 1
    more.write_text('\n'.join([str(number), *lines[1:], '0']))
    self.link('S009C001P001R001A001.skeleton', 'nowhere')
    no_name = 'is not named like'
    reasons = {
        cut.name: 'it ends early',
        'S009C001P001R001A001.skeleton': 'No such file',
        's001c001p001r001a001.SKELETON': no_name,
        'S٠٠١C001P001R001A009.skeleton': 'of the digits 0 to 9',
    }
    for name in [*reasons][2:]:
      (self.source / name).write_text('1\n')
    # A name in other bytes than UTF-8.
    name = os.fsdecode(b'caf\xe9.skeleton')
    (self.source / name).write_text('1\n')
    reasons[name] = no_name
    (self.source / 'notes.txt').write_text('no skeleton')
    self.run_program(
        0,
        '8 recordings with .* frames are in ',
        '1 files are converted in part, see left_out.txt',
        '5 files are skipped, see skipped.txt',
    )
    self.assert_same(paths[1:])
    (self.destination / 'index.json').unlink()
    result = self.convert()
    self.assertCountEqual(dict(result.skipped), reasons)
    for name, reason in result.skipped:
      self.assertIn(reasons[name], reason)
    text = f'1 of {number} frames, which show nobody'
    self.assertEqual(result.left_out, ((more.name, text),))
    listed = os.fsdecode((self.destination / 'skipped.txt').read_bytes())
    self.assertEqual(listed, ''.join(f'{x}\t{y}\n' for x, y in result.skipped))

  def test_starts_anew_after_an_interruption(self):
    paths = self.write(9)
    read = ntu_conversion._read

    def until_fifth(path):
      if path == paths[4]:
        raise KeyboardInterrupt
      return read(path)

    full = OSError(errno.ENOSPC, 'No space left')
    for place, name, value, code, message in (
        (ntu_conversion, '_read', until_fifth, 130, 'start the conversion'),
        (os, 'fsync', mock.Mock(side_effect=full), 1, 'error: .*No space'),
    ):
      with mock.patch.object(place, name, value):
        self.run_program(code, message)
      with self.assertRaisesRegex(FileNotFoundError, 'index.json'):
        ntu_arrays.read(self.destination)
    self.convert()
    self.assert_same(paths)

  @pytest.mark.slow
  def test_several_processes(self):
    paths = self.write(20)
    self.convert(2)
    self.assert_same(paths)

  def test_no_source(self):
    self.refuses('has no .skeleton file', FileNotFoundError)
    self.link('a.skeleton', 'nowhere')
    self.refuses('none of 1 files .*skipped.txt')
    self.assertIn('a.skeleton', (self.destination / 'skipped.txt').read_text())
    for name in ('none', 'a.skeleton'):
      self.run_program(1, f'error: .*{name} is no folder; name', name=name)

  def test_a_destination_below_a_file(self):
    paths = self.write(3)
    self.destination = paths[0] / 'a' / 'b'
    self.refuses(f'is below {paths[0]}, which is a file')

  def test_two_files_of_one_name(self):
    self.write(2, folder='a')
    path, _ = self.write(2, folder='b')
    self.refuses('have one name; a recording')
    path.rename(path.with_suffix('.SKELETON'))
    self.refuses('have one name; a recording')

  def test_damaged_results(self):
    self.write(2)
    self.convert()
    index = self.destination / 'index.json'
    frames = self.destination / 'frames.npy'
    content = json.loads(index.read_text())
    twice = [content['names'][0]] * 2
    changed = lambda **fields: json.dumps(content | fields).encode()
    array = np.load(frames)
    start, second = content['lengths'][0], content['names'][1]

    def edited(place, value):
      other = array.copy()
      other[place] = value
      return frames.read_bytes()[: -array.nbytes] + other.tobytes()

    nan = edited((start + 9, 1, 7, 2), np.nan)
    far = edited((start, 0, 0, 0), -2e5)
    nobody = edited(start + 2, 0)
    for path, damaged, message in (
        (index, b'{', 'Expecting property name'),
        (index, changed(lengths=[1]), 'index.json does not list recordings'),
        (index, changed(names=twice), 'index.json does not list recordings'),
        (index, changed(names=['A', 'B']), "'A' is not named like"),
        (index, changed(lengths=[1, 1]), 'frames.npy must hold float32'),
        (frames, b'no array', 'magic string'),
        (frames, frames.read_bytes()[:999], 'mmap length'),
        (frames, nan, f'{second} .* frame 9, body 1, joint 7, .* z=nan'),
        (frames, far, f'{second} .* frame 0, body 0, joint 0, .* x=-200000'),
        (frames, nobody, f'{second} shows nobody in its frame 2'),
        (frames, None, 'No such file .*frames.npy'),
    ):
      whole = path.read_bytes()
      path.unlink()
      if damaged is not None:
        path.write_bytes(damaged)
      with self.assertRaisesRegex(
          ValueError, f'is damaged: .*{message}.* remove its index.json and con'
      ):
        ntu_arrays.read(self.destination)
      path.write_bytes(whole)
    index.unlink()
    self.assertEqual(self.convert().num_converted, 2)


class MotionsTest(absltest.TestCase):

  def test_motions(self):
    one, other = [ntu_motions.generate.__wrapped__(2) for _ in range(2)]
    self.assertEqual(one.names, other.names)
    self.assertLen(set(one.names), 2 * 2 * 3 * len(ntu_motions.CLASS_NAMES))
    for index, frames in enumerate(one.frames):
      np.testing.assert_array_equal(frames, other.frames[index])
      # The second body is there where it takes part.
      motion = ntu_motions.CLASS_NAMES[one.names[index].action - 1]
      self.assertEqual(frames[:, 1].any(), motion in ('approach', 'part'))
    # Bones keep their lengths: from shoulder to elbow it is 0.26 m for a person
    # of size 1, with noise.
    ends = np.concatenate(one.frames)[:, 0, 8:10]
    lengths = np.linalg.norm(ends[:, 0] - ends[:, 1], axis=-1)
    self.assertBetween(lengths.min(), 0.15, 0.3)
    self.assertBetween(lengths.max(), 0.2, 0.4)


if __name__ == '__main__':
  absltest.main()
