"""From `.skeleton` files to one array: damage, kills, repetition."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_conversion
from rnnzoo.tasks.motion import ntu_motions

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Converts a folder and is killed, as nothing can be caught, at a block.
KILLED = """
import os, signal, sys
from rnnzoo.tasks.motion import ntu_conversion

write = ntu_conversion._convert_block

def write_or_die(source, paths, block):
  if block.name == '24.npz':
    os.kill(os.getpid(), signal.SIGKILL)
  return write(source, paths, block)

ntu_conversion._convert_block = write_or_die
ntu_conversion.convert(*sys.argv[1:], num_processes=0, block_files=8)
"""


class ConversionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.source = pathlib.Path(self.create_tempdir().full_path)
    self.destination = pathlib.Path(self.create_tempdir().full_path) / 'out'
    self.recordings = ntu_motions.generate(2, 1)

  def convert(self, **options):
    options = {'num_processes': 0, 'block_files': 8} | options
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
      want = self.recordings.of(by_name[name.text()])
      found = converted.of(index)
      self.assertLen(found, len(want))
      # Which of two bodies is the main one, is not known before.
      flipped = want[:, ::-1]
      error = min(abs(found - want).max(), abs(found - flipped).max())
      self.assertLess(error, 1e-5)

  def test_converts_folders(self):
    paths = [
        *ntu_motions.write_files(
            self.source / 'nturgb+d_skeletons', self.recordings, range(20)
        ),
        *ntu_motions.write_files(
            self.source / 'nturgb+d_skeletons120',
            self.recordings,
            range(20, 40),
        ),
    ]
    result = self.convert()
    self.assertEqual(result.num_converted, 40)
    self.assertEqual(result.num_read, 40)
    self.assertEmpty(result.skipped)
    self.assert_same(paths)
    self.assertCountEqual(
        [path.name for path in self.destination.iterdir()],
        ['frames.npy', 'index.json', 'skipped.txt'],
    )
    again = self.convert()
    self.assertEqual(again, result._replace(num_read=0))

  def test_files_of_somebody_else_stay(self):
    ntu_motions.write_files(self.source, self.recordings, range(3))
    mine = self.destination / 'blocks' / 'mine' / 'notes.txt'
    mine.parent.mkdir(parents=True)
    mine.write_text('keep')
    self.convert()
    self.assertEqual(mine.read_text(), 'keep')
    self.assertLen(list((self.destination / 'blocks').iterdir()), 1)

  def test_files_with_names_of_any_bytes_are_listed(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(3))
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
    paths = ntu_motions.write_files(self.source, self.recordings, range(3))
    for path, suffix in zip(paths, ('.SKELETON', '.Skeleton'), strict=False):
      path.rename(path.with_suffix(suffix))
    (self.source / 's001c001p001r001a001.SKELETON').write_text('1\n')
    result = self.convert()
    self.assert_same(paths)
    self.assertEqual(
        [name for name, _ in result.skipped], ['s001c001p001r001a001.SKELETON']
    )

  def test_damaged_files_are_listed(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(9))
    texts = {path: path.read_text() for path in paths}
    cut, nan, zero, five, binary = paths[:5]
    cut.write_text('\n'.join(texts[cut].splitlines()[:50]))
    lines = texts[nan].splitlines()
    nan.write_text('\n'.join([*lines[:9], f'nan {lines[9]}'.rsplit(' ', 1)[0]]))
    zero.write_text('1\n0\n')
    five.write_text(texts[five].replace('\n1\n', '\n5\n', 1))
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
        (five, 'must be from 0 to 4'),
        (binary, 'is no text'),
    ):
      self.assertIn(reason, reasons[path.name])
    lines = (self.destination / 'skipped.txt').read_text().splitlines()
    self.assertEqual(
        [tuple(x.split('\t')) for x in lines], list(result.skipped)
    )

  def test_goes_on_after_an_interruption(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(40))
    convert_block = ntu_conversion._convert_block

    def until_24(source, files, block):
      if block.stem == '24':
        raise KeyboardInterrupt
      return convert_block(source, files, block)

    with mock.patch.object(ntu_conversion, '_convert_block', until_24):
      with self.assertRaises(KeyboardInterrupt):
        self.convert()
    result = self.convert()
    self.assertEqual((result.num_converted, result.num_read), (40, 16))
    self.assert_same(paths)

  @pytest.mark.slow
  def test_goes_on_after_a_kill(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(40))
    killed = subprocess.run(
        [sys.executable, '-c', KILLED, self.source, self.destination],
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
        check=False,
    )
    self.assertEqual(killed.returncode, -signal.SIGKILL)
    with self.assertRaisesRegex(FileNotFoundError, 'index.json'):
      ntu_arrays.read(self.destination)
    result = self.convert()
    self.assertEqual((result.num_converted, result.num_read), (40, 16))
    self.assert_same(paths)

  def test_a_cut_block_is_made_again(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(16))
    with mock.patch.object(
        ntu_conversion, '_join', side_effect=OSError('full')
    ):
      with self.assertRaisesRegex(OSError, 'full'):
        self.convert()
    block = next(self.destination.rglob('8.npz'))
    block.write_bytes(block.read_bytes()[:1000])
    self.assertEqual(self.convert().num_read, 8)
    self.assert_same(paths)

  @pytest.mark.slow
  def test_several_processes(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(20))
    result = self.convert(num_processes=2)
    self.assertEqual(result.num_read, 20)
    self.assert_same(paths)

  def test_other_files_need_another_folder(self):
    ntu_motions.write_files(self.source, self.recordings, range(3))
    self.convert()
    ntu_motions.write_files(self.source, self.recordings, range(3, 4))
    with self.assertRaisesRegex(ValueError, 'what other files were converted'):
      self.convert()

  def test_no_source(self):
    with self.assertRaisesRegex(FileNotFoundError, 'has no .skeleton file'):
      self.convert()
    self.source = self.source / 'none'
    with self.assertRaisesRegex(FileNotFoundError, 'does not exist'):
      self.convert()

  def test_nothing_to_convert(self):
    (self.source / 'a.skeleton').write_text('')
    with self.assertRaisesRegex(ValueError, 'none of 1 files .*skipped.txt'):
      self.convert()
    self.assertIn('a.skeleton', (self.destination / 'skipped.txt').read_text())

  def test_two_files_of_one_name(self):
    for folder in 'ab':
      ntu_motions.write_files(self.source / folder, self.recordings, [0, 1])
    with self.assertRaisesRegex(ValueError, 'have one name'):
      self.convert()
    for path in (self.source / 'b').iterdir():
      path.rename(path.with_suffix('.SKELETON'))
    with self.assertRaisesRegex(ValueError, 'have one name'):
      self.convert()

  def test_damaged_results(self):
    ntu_motions.write_files(self.source, self.recordings, range(2))
    self.convert()
    index = self.destination / 'index.json'
    content = json.loads(index.read_text())
    for damaged in (
        '{',
        '[]',
        json.dumps(content | {'lengths': [1]}),
        json.dumps(content | {'lengths': [1, 0]}),
        json.dumps(content | {'names': [1, 2]}),
    ):
      index.write_text(damaged)
      with self.assertRaisesRegex(ValueError, 'index.json is damaged'):
        ntu_arrays.read(self.destination)
    index.write_text(json.dumps(content | {'lengths': [1, 1]}))
    with self.assertRaisesRegex(ValueError, 'must hold float32'):
      ntu_arrays.read(self.destination)
    with (self.destination / 'frames.npy').open('wb') as file:
      np.savez(file, frames=np.ones(3))
    with self.assertRaisesRegex(ValueError, 'frames.npy is damaged: .*npz'):
      ntu_arrays.read(self.destination)
    (self.destination / 'frames.npy').write_bytes(b'no array')
    with self.assertRaisesRegex(ValueError, 'frames.npy is damaged'):
      ntu_arrays.read(self.destination)

  def test_program(self):
    paths = ntu_motions.write_files(self.source, self.recordings, range(3))
    paths[0].write_text('')
    arguments = [str(self.source), str(self.destination), '--num_processes=0']
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(ntu_conversion.main(arguments), 0)
    self.assertIn('2 recordings with', out.getvalue())
    self.assertIn('3 files were read in', out.getvalue())
    self.assertIn('1 files are skipped; the reasons are in', out.getvalue())
    with contextlib.redirect_stderr(io.StringIO()) as errors:
      self.assertEqual(ntu_conversion.main(['/nowhere', 'x']), 1)
    self.assertIn('error: the folder /nowhere does not', errors.getvalue())


class MotionsTest(absltest.TestCase):

  def test_bones_keep_their_lengths(self):
    recordings = ntu_motions.generate(2, 1)
    frames = recordings.frames[:, 0]
    shoulder_to_elbow = np.linalg.norm(frames[:, 8] - frames[:, 9], axis=-1)
    # 0.26 m for a person of size 1, with noise.
    self.assertBetween(shoulder_to_elbow.min(), 0.15, 0.3)
    self.assertBetween(shoulder_to_elbow.max(), 0.2, 0.4)

  def test_is_the_same_each_time(self):
    one = ntu_motions.generate.__wrapped__(2, 1)
    other = ntu_motions.generate.__wrapped__(2, 1)
    np.testing.assert_array_equal(one.frames, other.frames)
    self.assertEqual(one.names, other.names)
    self.assertLen(set(one.names), 2 * 3 * len(ntu_motions.CLASS_NAMES))

  def test_second_body_is_there_where_it_takes_part(self):
    recordings = ntu_motions.generate(1, 1)
    for index, name in enumerate(recordings.names):
      motion = ntu_motions.CLASS_NAMES[name.action - 1]
      self.assertEqual(
          recordings.of(index)[:, 1].any(), motion in ('approach', 'part')
      )


if __name__ == '__main__':
  absltest.main()
