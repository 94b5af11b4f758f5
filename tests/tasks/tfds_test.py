"""Sets of TFDS as sequences and as translation, prepared on disk."""

import io
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from PIL import Image
import tensorflow_datasets as tfds

from configs import base_sequences
from configs import base_translation
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.series import sequences
from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import translation

VERSION = '1.2.3'


def make_builder(name, directory, features, keys, splits):
  """Returns what writes a set: splits are lists of examples by name."""

  class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):

    def _info(self):
      return self.dataset_info_from_configs(
          features=tfds.features.FeaturesDict(features), supervised_keys=keys
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {split: enumerate(rows) for split, rows in splits.items()}

    def _generate_examples(self):
      raise NotImplementedError

  Made.url_infos = {}
  Made.name = name
  Made.VERSION = tfds.core.Version(VERSION)
  Made.pkg_dir_path = pathlib.Path(directory)
  tfds.disable_progress_bar()
  return Made(data_dir=directory, file_format='array_record')


def prepare(*args):
  """Writes a set, with the arguments of `make_builder`."""
  make_builder(*args).download_and_prepare()


def tensor(*shape):
  return tfds.features.Tensor(shape=shape, dtype=np.float32)


labels = tfds.features.ClassLabel


def png(pixels):
  encoded = io.BytesIO()
  Image.fromarray(pixels).save(encoded, 'PNG')
  encoded.seek(0)
  return encoded


class TfdsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.rng = np.random.default_rng(0)

  def sequences(self, name, **data):
    config = base_sequences.get_config()
    config.data.update(source=f'tfds:{name}', data_dir=self.directory, **data)
    config.data.update(validation_fraction=0.2, test_fraction=0.2)
    config.data.standardize = False
    return sequences.OwnSequences(config)

  def test_images(self):
    pixels = self.rng.integers(0, 256, (20, 4, 3, 3), np.uint8)
    rows = [
        {'image': png(image), 'label': index % 2}
        for index, image in enumerate(pixels)
    ]
    prepare(
        'made_images',
        self.directory,
        {
            'image': tfds.features.Image(shape=(4, 3, 3)),
            'label': labels(names=['zebra', 'ant']),
        },
        ('image', 'label'),
        {'train': rows[:15], 'test': rows[15:]},
    )
    task = self.sequences('made_images')
    self.assertEqual(task.dataset, f'made_images/{VERSION}')
    self.assertEqual(task.class_names, ('ant', 'zebra'))
    sizes = {name: len(split['inputs']) for name, split in task.splits.items()}
    self.assertEqual(sizes, {'train': 12, 'validation': 3, 'test': 5})
    test = task.splits['test']
    self.assertEqual(test['inputs'].shape, (5, 4, 9))
    # Shards are written in an order of their own.
    for x, y in zip(test['inputs'], test['y'], strict=True):
      (place,) = np.flatnonzero((pixels.reshape(20, 4, 9) == x).all((1, 2)))
      self.assertGreaterEqual(place, 15)
      self.assertEqual(task.class_names[y], ('zebra', 'ant')[place % 2])
    by_pixel = self.sequences('made_images', sequence='pixel')
    np.testing.assert_array_equal(
        by_pixel.splits['test']['inputs'], test['inputs'].reshape(5, 12, 3)
    )
    with self.assertRaisesRegex(ValueError, "kind must be 'classification'"):
      self.sequences('made_images', kind='regression')

  def test_ragged_features(self):
    make = lambda n: self.rng.standard_normal((n, 2)).astype(np.float32)
    rows = [{'steps': make(n), 'y': n % 3} for n in range(1, 31)]
    features = {'steps': tensor(None, 2), 'y': labels(num_classes=3)}
    splits = {'train': rows}
    prepare('made_steps', self.directory, features, ('steps', 'y'), splits)
    task = self.sequences('made_steps')
    self.assertEqual(task.class_names, ('0', '1', '2'))
    found = {}
    for split in task.splits.values():
      for x, length, y in zip(
          split['inputs'], split['lengths'], split['y'], strict=True
      ):
        np.testing.assert_array_equal(x[:length], rows[length - 1]['steps'])
        found[int(length)] = int(y)
    self.assertEqual(found, {n: n % 3 for n in range(1, 31)})

  def test_splits_with_other_columns(self):
    features = {'x': tensor(4, None), 'y': labels(num_classes=2)}
    make = lambda columns: [
        {'x': np.ones((4, columns), np.float32), 'y': n % 2} for n in range(20)
    ]
    splits = {'train': make(3), 'test': make(1)}
    prepare('made_columns', self.directory, features, ('x', 'y'), splits)
    message = "made_columns', 'test' must be like train, with 3 .* has 1 col"
    with self.assertRaisesRegex(ValueError, message):
      self.sequences('made_columns')

  def test_translation(self):
    rows = [{'de': f'{n} Häuser\nhier', 'en': f'{n} houses'} for n in range(60)]
    prepare(
        'made_lines',
        self.directory,
        tfds.features.Translation(['de', 'en']),
        ('de', 'en'),
        {'train': rows[:50], 'validation': rows[50:]},
    )
    name, splits = text_files.read_tfds('tfds:made_lines', self.directory)
    self.assertEqual(name, f'made_lines/{VERSION}')
    sizes = {name: len(sides[0]) for name, sides in splits.items()}
    self.assertEqual(sizes, {'train': 48, 'validation': 10, 'test': 2})
    lines = [
        pair for sides in splits.values() for pair in zip(*sides, strict=True)
    ]
    self.assertCountEqual(
        lines, [(f'{n} Häuser hier', f'{n} houses') for n in range(60)]
    )
    config = base_translation.get_config()
    config.data.update(source='tfds:made_lines', data_dir=self.directory)
    task = translation.Translation(config)
    self.assertEqual(task.metrics[0].name, 'bleu')
    self.assertEqual(task.splits['train']['source'].shape[0], 48)

  def test_sets_that_cannot_be_read(self):
    message = "'tfds:no_such_set' cannot be read: .* not found. ?; 'tfds build"
    with self.assertRaisesRegex(ValueError, message):
      tfds_sets.read('tfds:no_such_set', self.directory)
    splits = {'train': [{'x': np.ones(2, np.float32)}]}
    prepare('made_keyless', self.directory, {'x': tensor(2)}, None, splits)
    with self.assertRaisesRegex(ValueError, 'supervised keys None'):
      tfds_sets.read('tfds:made_keyless', self.directory)
    config = base_sequences.get_config()
    for config.data.source in ('tfds:', 'fashion_mnist'):
      with self.assertRaisesRegex(ValueError, "'files' or 'tfds:<name>'"):
        sequences.OwnSequences(config)


if __name__ == '__main__':
  absltest.main()
