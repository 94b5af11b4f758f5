"""From `.skeleton` files to one array: damage, interruption, repetition."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_conversion
from rnnzoo.tasks.motion import ntu_motions
from tests.testing import skeleton_files


class ConversionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.source = pathlib.Path(self.create_tempdir().full_path)
    self.destination = pathlib.Path(self.create_tempdir().full_path) / 'out'
    self.recordings = ntu_motions.generate(2, 1)

  def write(self, stop, start=0, folder=''):
    """Writes recordings to a folder of the source, and returns their paths."""
    folder = self.source / folder
    indices = range(start, stop)
    return skeleton_files.write_files(folder, self.recordings, indices)

  def refuses(self, message, error=ValueError):
    with self.assertRaisesRegex(error, message):
      self.convert()

  def convert(self, **options):
    options = {'num_processes': 0} | options
    return ntu_conversion.convert(self.source, self.destination, **options)

  def assert_same(self, paths):
    """Asserts that the destination holds what the files were written from."""
    converted = ntu_arrays.read(self.destination)
    by_name = {
        name.text(): index for index, name in enumerate(self.recordings.names)
    }
    self.assertEqual(
        [name.text() for name in converted.names],
        sorted(path.stem for path in paths),
    )
    for index, name in enumerate(converted.names):
      want = self.recordings.frames[by_name[name.text()]]
      found = converted.frames[index]
      self.assertLen(found, len(want))
      # Which of two bodies is the main one, is not known before.
      flipped = want[:, ::-1]
      error = min(abs(found - want).max(), abs(found - flipped).max())
      self.assertLess(error, 1e-5)

  def test_converts_folders(self):
    paths = [
        *self.write(20, folder='nturgb+d_skeletons'),
        *self.write(40, 20, 'nturgb+d_skeletons120'),
    ]
    result = self.convert()
    self.assertEqual(result.num_converted, 40)
    self.assertEqual(result.num_read, 40)
    self.assertEmpty(result.skipped)
    self.assertEmpty(result.left_out)
    self.assert_same(paths)
    self.assertCountEqual(
        [path.name for path in self.destination.iterdir()],
        ['frames.npy', 'index.json', 'left_out.txt', 'skipped.txt'],
    )
    again = self.convert()
    self.assertEqual(again, result._replace(num_read=0))

  def test_files_with_names_of_any_bytes_are_listed(self):
    paths = self.write(3)
    os.symlink('nowhere', self.source / 'S009C001P001R001A001.skeleton')
    for name in (b'caf\xe9.skeleton', b'a\tb\nc.skeleton'):
      (self.source / os.fsdecode(name)).write_text('1\n')
    result = self.convert()
    self.assert_same(paths)
    self.assertCountEqual(
        dict(result.skipped),
        [
            'S009C001P001R001A001.skeleton',
            r'caf\xe9.skeleton',
            r'a\tb\nc.skeleton',
        ],
    )
    self.assertEqual(self.convert(), result._replace(num_read=0))

  def test_files_in_capitals(self):
    paths = self.write(3)
    for path, suffix in zip(paths, ('.SKELETON', '.Skeleton'), strict=False):
      path.rename(path.with_suffix(suffix))
    (self.source / 's001c001p001r001a001.SKELETON').write_text('1\n')
    result = self.convert()
    self.assert_same(paths)
    self.assertEqual(
        [name for name, _ in result.skipped], ['s001c001p001r001a001.SKELETON']
    )

  def test_damaged_files_are_listed(self):
    paths = self.write(9)
    texts = {path: path.read_text() for path in paths}
    cut, nan, zero, seven, binary = paths[:5]
    cut.write_text('\n'.join(texts[cut].splitlines()[:50]))
    lines = texts[nan].splitlines()
    nan.write_text('\n'.join([*lines[:9], f'nan {lines[9]}'.rsplit(' ', 1)[0]]))
    zero.write_text('1\n0\n')
    seven.write_text(texts[seven].replace('\n1\n', '\n7\n', 1))
    binary.write_bytes(bytes(range(256)))
    (self.source / 'other.skeleton').write_text('1\n')
    (self.source / 'notes.txt').write_text('no skeleton')
    result = self.convert()
    self.assertEqual(result.num_converted, 4)
    self.assert_same(paths[5:])
    reasons = dict(result.skipped)
    self.assertCountEqual(
        reasons, [*(path.name for path in paths[:5]), 'other.skeleton']
    )
    for path, reason in (
        (cut, 'ends after line'),
        (nan, 'nan'),
        (zero, 'none of 1 frames has a body'),
        (seven, 'must be from 0 to 6'),
        (binary, 'is no text'),
    ):
      self.assertIn(reason, reasons[path.name])
    lines = (self.destination / 'skipped.txt').read_text().splitlines()
    self.assertEqual(
        [tuple(x.split('\t')) for x in lines], list(result.skipped)
    )

  def test_starts_anew_after_an_interruption(self):
    paths = self.write(9)
    read = ntu_conversion._read

    def until_fifth(path):
      if path == paths[4]:
        raise KeyboardInterrupt
      return read(path)

    with mock.patch.object(ntu_conversion, '_read', until_fifth):
      with self.assertRaises(KeyboardInterrupt):
        self.convert()
    with self.assertRaisesRegex(FileNotFoundError, 'index.json'):
      ntu_arrays.read(self.destination)
    self.assertEqual(self.convert().num_read, 9)
    self.assert_same(paths)

  @pytest.mark.slow
  def test_several_processes(self):
    paths = self.write(20)
    result = self.convert(num_processes=2)
    self.assertEqual(result.num_read, 20)
    self.assert_same(paths)

  def test_other_files_need_another_folder(self):
    self.write(3)
    self.convert()
    self.write(4, 3)
    self.refuses('what other files were converted')

  def test_no_source(self):
    self.refuses('has no .skeleton file', FileNotFoundError)
    folder = self.source
    self.source = folder / 'none'
    self.refuses('none does not exist', FileNotFoundError)
    self.source.symlink_to('nowhere')
    self.refuses('is a link to nowhere', FileNotFoundError)
    self.source = folder / 'a.skeleton'
    self.source.write_text('')
    message = 'is a file; name the folder that it is in'
    self.refuses(message, NotADirectoryError)

  def test_nothing_to_convert(self):
    (self.source / 'a.skeleton').write_text('')
    self.refuses('none of 1 files .*skipped.txt')
    self.assertIn('a.skeleton', (self.destination / 'skipped.txt').read_text())

  def test_linked_folders(self):
    elsewhere = pathlib.Path(self.create_tempdir().full_path)
    paths = [
        *self.write(3, 0, 'z_here'),
        *self.write(6, 3, elsewhere / 'first'),
        *self.write(8, 6, elsewhere / 'first' / 'deeper'),
        *self.write(10, 8, elsewhere / 'other'),
    ]
    link = lambda name, to: (self.source / name).symlink_to(to)
    link('linked', elsewhere / 'first')
    (elsewhere / 'first' / 'deeper' / 'other').symlink_to(elsewhere / 'other')
    (elsewhere / 'first' / 'circle').symlink_to('..', True)
    result = self.convert()
    self.assert_same(paths)
    # All that the circle leads to besides was found on a shorter way, or is
    # found there first.
    self.assertCountEqual(
        [reason.split()[:5] for _, reason in result.skipped],
        [['is', 'the', 'same', 'folder', 'as']] * 2,
    )
    self.assertEqual(self.convert(), result._replace(num_read=0))

  def test_links_that_repeat_or_lead_nowhere(self):
    paths = self.write(3, folder='z_here')
    for name, to in (
        ('a_up', '.'),
        ('again', 'z_here'),
        ('own', 'own'),
        ('gone', 'nowhere'),
        ('text', __file__),
        (paths[0].with_suffix('.SKELETON').name, paths[0]),
    ):
      (self.source / name).symlink_to(to)
    result = self.convert()
    self.assert_same(paths)
    reasons = dict(result.skipped)
    self.assertLen(reasons, len(result.skipped))
    here = self.source / 'z_here'
    for name, reason in (
        ('a_up', f'is the same folder as {self.source}'),
        ('again', f'is the same folder as {here}'),
        ('gone', 'is a link to nothing: No such file'),
        ('own', 'is a link to nothing: Too many levels'),
    ):
      self.assertStartsWith(reasons.pop(name), reason)
    ((name, reason),) = reasons.items()
    self.assertIn(paths[0].stem, name)
    self.assertStartsWith(reason, 'is the same file as')

  def test_unreadable_folders(self):
    self.write(3, folder='a')
    self.write(5, 3, 'b')
    scandir = os.scandir

    def refuse(path):
      if pathlib.Path(path).name == 'b':
        raise PermissionError(13, 'Permission denied', str(path))
      return scandir(path)

    with mock.patch.object(os, 'scandir', refuse):
      with self.assertRaisesRegex(
          OSError, f'{self.source}/b cannot be read: Perm.* make it readable'
      ):
        self.convert()
    self.assertFalse(self.destination.exists())
    self.assertEqual(self.convert().num_converted, 5)

  def test_files_that_become_readable_are_no_longer_done(self):
    paths = self.write(3)
    access = lambda path, mode: path != paths[0]
    with mock.patch.object(os, 'access', access):
      self.convert()
      self.convert()
    self.refuses('what other files were converted')

  def test_names_with_other_digits(self):
    paths = self.write(2)
    second = self.source / paths[0].name.replace('S001', 'S٠٠١')
    second.write_bytes(paths[0].read_bytes())
    result = self.convert()
    self.assert_same(paths)
    ((name, reason),) = result.skipped
    self.assertEqual(name, second.name)
    self.assertIn('of the digits 0 to 9', reason)

  def test_one_conversion_at_a_time(self):
    self.write(3)
    read = ntu_conversion._read

    def meanwhile(path):
      with self.assertRaisesRegex(ValueError, 'in use by another conversion'):
        self.convert()
      return read(path)

    with mock.patch.object(ntu_conversion, '_read', meanwhile):
      result = self.convert()
    self.assertEqual(result.num_converted, 3)
    self.assertEqual(self.convert(), result._replace(num_read=0))

  def test_without_locks(self):
    self.write(3)
    with mock.patch.object(
        fcntl, 'flock', side_effect=OSError(95, 'not supported')
    ):
      with contextlib.redirect_stderr(io.StringIO()) as errors:
        self.assertEqual(self.convert().num_converted, 3)
    self.assertIn('cannot be locked (not supported)', errors.getvalue())

  def test_a_destination_that_cannot_be_made(self):
    paths = self.write(3)
    link = self.source / 'link'
    link.symlink_to('nowhere')
    for destination, message in (
        (paths[0], f'because {paths[0]} is a file; name a folder'),
        (paths[0] / 'a' / 'b', f'because {paths[0]} is a file; name a folder'),
        (link, f'because {link} is a link to nothing'),
    ):
      with self.assertRaisesRegex(NotADirectoryError, message):
        ntu_conversion.convert(self.source, destination, 0)
    with mock.patch.object(
        pathlib.Path, 'mkdir', side_effect=PermissionError(13, 'denied')
    ):
      with self.assertRaisesRegex(OSError, 'cannot be made: denied'):
        self.convert()

  def test_a_full_disk(self):
    self.write(3)
    with mock.patch.object(
        os, 'fsync', side_effect=OSError(errno.ENOSPC, 'No space left')
    ):
      with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = ntu_conversion.main(
            [str(self.source), str(self.destination), '--num_processes=0']
        )
    self.assertEqual(code, 1)
    self.assertIn('is full; make room and start the', errors.getvalue())
    self.assertEqual(self.convert().num_converted, 3)

  @parameterized.parameters(-1, True, '2')
  def test_wrong_numbers_of_processes(self, number):
    with self.assertRaisesRegex(
        ValueError, f'num_processes must be an integer from 0; got {number!r}'
    ):
      self.convert(num_processes=number)

  def test_two_files_of_one_name(self):
    for folder in 'ab':
      skeleton_files.write_files(self.source / folder, self.recordings, [0, 1])
    self.refuses('have one name, and so have 1 more pairs; leave one')
    for path in (self.source / 'b').iterdir():
      path.rename(path.with_suffix('.SKELETON'))
    self.refuses('have one name')

  def test_damaged_results(self):
    self.write(2)
    self.convert()
    index = self.destination / 'index.json'
    frames = self.destination / 'frames.npy'
    content = json.loads(index.read_text())
    npz = io.BytesIO()
    np.savez(npz, frames=np.ones(3))
    short = json.dumps(content | {'lengths': [1, 1]})
    for path, damaged, message in (
        (index, '{', 'index.json is damaged'),
        (index, json.dumps(content | {'lengths': [1]}), 'index.json is dam'),
        (index, json.dumps(content | {'names': [1, 2]}), 'index.json is dam'),
        (index, short, 'must hold float32'),
        (frames, npz.getvalue(), 'frames.npy is damaged: .*npz'),
        (frames, b'no array', 'frames.npy is damaged'),
    ):
      whole = path.read_bytes()
      path.write_bytes(damaged if path == frames else damaged.encode())
      with self.assertRaisesRegex(ValueError, message):
        ntu_arrays.read(self.destination)
      self.refuses('conversion that is not whole.* Remove .*index.json')
      path.write_bytes(whole)
    for path in (frames, self.destination / 'skipped.txt'):
      path.unlink()
      self.refuses('conversion that is not whole.* Remove .*index.json')
      index.unlink()
      self.assertEqual(self.convert().num_converted, 2)

  def test_program(self):
    paths = self.write(3)
    paths[0].write_text('')
    lines = paths[1].read_text().splitlines()
    lines[0] = str(int(lines[0]) + 1)
    paths[1].write_text('\n'.join([*lines, '0']))
    arguments = [str(self.source), str(self.destination), '--num_processes=0']
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(ntu_conversion.main(arguments), 0)
    self.assertIn('2 recordings with', out.getvalue())
    self.assertIn('3 files were read in', out.getvalue())
    self.assertIn(
        '1 files or links are skipped; the reasons are in', out.getvalue()
    )
    self.assertIn('1 files are converted in part', out.getvalue())
    self.assertEqual(
        (self.destination / 'left_out.txt').read_text(),
        f'{paths[1].name}\t1 of {lines[0]} frames, which show nobody\n',
    )
    with contextlib.redirect_stderr(io.StringIO()) as errors:
      self.assertEqual(ntu_conversion.main(['/nowhere', 'x']), 1)
    self.assertIn('error: the folder /nowhere does not', errors.getvalue())


class MotionsTest(absltest.TestCase):

  def test_bones_keep_their_lengths(self):
    recordings = ntu_motions.generate(2, 1)
    frames = np.concatenate(recordings.frames)[:, 0]
    shoulder_to_elbow = np.linalg.norm(frames[:, 8] - frames[:, 9], axis=-1)
    # 0.26 m for a person of size 1, with noise.
    self.assertBetween(shoulder_to_elbow.min(), 0.15, 0.3)
    self.assertBetween(shoulder_to_elbow.max(), 0.2, 0.4)

  def test_is_the_same_each_time(self):
    one = ntu_motions.generate.__wrapped__(2, 1)
    other = ntu_motions.generate.__wrapped__(2, 1)
    for frames, again in zip(one.frames, other.frames, strict=True):
      np.testing.assert_array_equal(frames, again)
    self.assertEqual(one.names, other.names)
    self.assertLen(set(one.names), 2 * 3 * len(ntu_motions.CLASS_NAMES))

  def test_second_body_is_there_where_it_takes_part(self):
    recordings = ntu_motions.generate(1, 1)
    for frames, name in zip(recordings.frames, recordings.names, strict=True):
      motion = ntu_motions.CLASS_NAMES[name.action - 1]
      self.assertEqual(frames[:, 1].any(), motion in ('approach', 'part'))


if __name__ == '__main__':
  absltest.main()
