"""The UEA archive: aeon's own data, conversion, splits, errors."""

import contextlib
import io
import pathlib
from unittest import mock

from absl.testing import absltest
import numpy as np
import pytest

from configs import base_time_series
from rnnzoo.tasks.series import time_series
from tests.testing import sequence_files


def load(**data):
  config = base_time_series.get_config()
  config.data.update(data)
  with contextlib.redirect_stdout(io.StringIO()):
    return time_series.TimeSeries(config)


class TimeSeriesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def mine(self, **data):
    """Returns the task of the data set 'Mine' in the directory."""
    given = {'name': 'Mine', 'manual_dir': str(self.directory), **data}
    return load(**given)

  def refuses(self, message, error=ValueError, **data):
    with self.assertRaisesRegex(error, message):
      self.mine(**data)

  def same(self, one, other):
    for name, split in one.splits.items():
      for key, array in split.items():
        np.testing.assert_array_equal(array, other.splits[name][key])

  def test_japanese_vowels(self):
    task = load()
    self.assertEqual(task.dataset, 'JapaneseVowels')
    sizes = {name: len(split['inputs']) for name, split in task.splits.items()}
    self.assertEqual(sizes, {'train': 230, 'validation': 40, 'test': 370})
    lengths = task.splits['test']['lengths']
    self.assertEqual((lengths.min(), lengths.max()), (7, 29))
    self.assertEqual(task.splits['test']['inputs'].shape[2], 12)
    self.assertLen(task.answers.names, 9)
    # 30 training sequences of each speaker, 4 or 5 of which validate.
    counts = np.bincount(task.splits['validation']['y'])
    self.assertBetween(counts.min(), 4, 5)
    # Nothing but padding is zero in all columns.
    x = np.abs(task.splits['test']['inputs']).sum(-1)
    np.testing.assert_array_equal((x > 0).sum(1), lengths)

  def test_converted_arrays_are_the_same(self):
    time_series.convert('BasicMotions', self.directory)
    uncovered = load(name='BasicMotions')
    with mock.patch.object(time_series, '_load', side_effect=AssertionError):
      converted = load(name='BasicMotions', manual_dir=str(self.directory))
    self.assertEqual(uncovered.answers.names, converted.answers.names)
    self.same(uncovered, converted)

  def test_pooled(self):
    self.write('Mine', 'train')
    self.write('Mine', 'test', x=np.ones((24, 9, 2)))  # Of another length.
    shapes = lambda **data: {
        name: split['inputs'].shape[:2]
        for name, split in self.mine(**data).splits.items()
    }
    self.assertEqual(shapes()['test'], (24, 9))
    expected = {'train': (34, 9), 'validation': (7, 9), 'test': (7, 9)}
    self.assertEqual(shapes(split='pooled'), expected)

  def write(self, name, split, columns=2, **more):
    """Writes one .npz file, with as many columns."""
    x = np.random.default_rng(0).standard_normal((24, 6, columns))
    path = self.directory / name / f'{split}.npz'
    return sequence_files.write_npz(path, **{'x': x, **more})

  def test_splits_with_other_columns(self):
    train = self.write('Mine', 'train', 3)
    test = self.write('Mine', 'test', 1)
    for split in ('archive', 'pooled'):
      self.refuses(
          f'^{test} must be like {train}, with 3 columns .* has 1 c',
          split=split,
      )

  def write_text(self, split, head, rows):
    """Writes a .ts file."""
    path = self.directory / 'Mine' / f'Mine_{split}.ts'
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        '@problemName Mine\n@timeStamps false\n@missing false\n'
        f'@univariate false\n{head}@equalLength true\n@seriesLength 2\n'
        f'@classLabel true a b\n@data\n{rows}'.rstrip() + '\n'
    )
    return path

  def test_splits_with_other_labels(self):
    train = self.write('Mine', 'train')
    test = self.write('Mine', 'test', y=np.array(['a', 'b'] * 12))
    message = f'^{test} must be like {train}, with .*numbers.* has .*text'
    self.refuses(message)
    self.write('Mine', 'test', y=2 + np.arange(24) % 2)
    message = '^test: y has the classes 2, 3, but the classes 0, 1 in train'
    self.refuses(message)
    # One that is in both is enough; a warning tells of the other.
    self.write('Mine', 'test', y=1 + np.arange(24) % 2)
    task = self.mine()
    self.assertIn("the class '2' has no training", task.summary['warnings'][0])

  def test_a_missing_file_is_named(self):
    self.write('Mine', 'test')
    self.refuses('Mine/train.npz does not exist', FileNotFoundError)

  def test_a_name_that_is_none(self):
    message = 'japanesevowels train cannot be read: .*; config.data.name must'
    for directory in ('', str(self.directory)):
      self.refuses(message, name='japanesevowels', manual_dir=directory)

  @pytest.mark.slow
  def test_text_files(self):
    good = '\n'.join(f'1,{i}:3,4:{"ab"[i % 2]}' for i in range(8))
    for split in ('TRAIN', 'TEST'):
      self.write_text(split, '@dimension 2\n', good)
    self.assertEqual(self.mine().splits['test']['inputs'].shape, (8, 2, 2))
    # aeon raises an OSError for the first, and returns nothing for the other.
    for rows in ('1,2:3,4:a\n1,2:b', ''):
      self.write_text('TEST', '@dimension 2\n', rows)
      self.refuses('Mine test cannot be read')

  def test_without_aeon(self):
    with mock.patch.dict('sys.modules', {'aeon': None}):
      with self.assertRaisesRegex(ModuleNotFoundError, 'rnnzoo.timeseries'):
        load()


if __name__ == '__main__':
  absltest.main()
