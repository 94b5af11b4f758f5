"""The UEA archive: aeon's own data, conversion, splits, errors."""

import contextlib
import importlib
import io
import pathlib
from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax
import numpy as np
import pytest

from configs import base_time_series
from rnnzoo.tasks.series import time_series
from rnnzoo.tasks.series import uea
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

  def test_japanese_vowels(self):
    task = load()
    self.assertEqual(task.dataset, 'JapaneseVowels')
    sizes = {name: len(split['x']) for name, split in task.splits.items()}
    self.assertEqual(sizes, {'train': 230, 'validation': 40, 'test': 370})
    lengths = task.splits['test']['lengths']
    self.assertEqual((lengths.min(), lengths.max()), (7, 29))
    self.assertEqual(task.splits['test']['x'].shape[2], 12)
    self.assertLen(task.answers.names, 9)
    # 30 training sequences of each speaker, 4 or 5 of which validate.
    counts = np.bincount(task.splits['validation']['y'])
    self.assertBetween(counts.min(), 4, 5)
    # Nothing but padding is zero in all columns.
    x = np.abs(task.splits['test']['x']).sum(-1)
    np.testing.assert_array_equal((x > 0).sum(1), lengths)
    shapes = jax.eval_shape(
        lambda examples: task.evaluate(task.build_model(nnx.Rngs(0)), examples),
        task.splits['test'],
    )
    self.assertEqual(shapes.losses.shape, (370,))

  def test_converted_arrays_are_the_same(self):
    uea.convert('BasicMotions', self.directory)
    uncovered = load(name='BasicMotions')
    with mock.patch.object(uea, '_load', side_effect=AssertionError):
      converted = load(name='BasicMotions', manual_dir=str(self.directory))
    self.assertEqual(uncovered.answers.names, converted.answers.names)
    for name, split in uncovered.splits.items():
      for key, array in split.items():
        np.testing.assert_array_equal(array, converted.splits[name][key])

  def test_pooled(self):
    sequence_files.write_archive(self.directory, 'Mine')
    task = load(name='Mine', manual_dir=str(self.directory), split='pooled')
    sizes = {name: len(split['x']) for name, split in task.splits.items()}
    self.assertEqual(sizes, {'train': 34, 'validation': 7, 'test': 7})

  def test_no_such_data_set(self):
    with self.assertRaisesRegex(ValueError, "'Moreworms' is no data set"):
      load(name='Moreworms', manual_dir=str(self.directory))

  def test_a_damaged_file_is_named(self):
    folder = self.directory / 'BasicMotions'
    folder.mkdir()
    head = (
        '@problemName X\n@timeStamps false\n@missing false\n@univariate false\n'
        '@dimension 2\n@equalLength true\n@seriesLength 2\n'
        '@classLabel true a b\n@data\n'
    )
    train, test = (
        folder / f'BasicMotions_{split}.ts' for split in ('TRAIN', 'TEST')
    )
    # aeon raises an OSError for the first, and returns nothing for the others.
    for content, message in (
        (head + '1,2:3,4:a\n1,2:b\n', 'BasicMotions_TRAIN.ts cannot be read'),
        (head, 'its train file has no series'),
        ('', 'its train file has no series'),
    ):
      train.write_text(content)
      test.write_text(content)
      with self.assertRaisesRegex(ValueError, message):
        load(name='BasicMotions', manual_dir=str(self.directory))

  def test_no_network(self):
    datasets = importlib.import_module('aeon.datasets')
    error = ValueError('Could not download files for EigenWorms')
    with mock.patch.object(datasets, 'load_classification', side_effect=error):
      with self.assertRaisesRegex(ConnectionError, 'EigenWorms does not come'):
        load(name='EigenWorms')

  def test_without_aeon(self):
    with mock.patch.dict('sys.modules', {'aeon': None}):
      with self.assertRaisesRegex(ModuleNotFoundError, 'rnnzoo.timeseries'):
        load()

  def test_synthetic_classes_can_be_told_apart(self):
    sequences = time_series.synthetic(20, 400, 6)['train']
    self.assertEqual(sequences.x.shape, (20, 400, 6))
    guessed = sequences.x[:, -1, :5].argmax(-1)
    self.assertGreater((guessed == sequences.y).mean(), 0.6)

  @pytest.mark.slow
  def test_synthetic_has_the_size_of_eigenworms(self):
    task = load(name='synthetic_eigenworms', split='pooled')
    shapes = [split['x'].shape for split in task.splits.values()]
    self.assertEqual(sum(shape[0] for shape in shapes), 259)
    self.assertEqual({shape[1:] for shape in shapes}, {(17984, 6)})


if __name__ == '__main__':
  absltest.main()
