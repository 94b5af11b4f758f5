"""Sequential CIFAR-10: its archive, readings of images, noise."""

import contextlib
import hashlib
import io
import pathlib
import tarfile

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import base_cifar
from rnnzoo.tasks.images import cifar

NAMES = [f'data_batch_{i}.bin' for i in range(1, 6)] + ['test_batch.bin']


def make_config(**data) -> ml_collections.ConfigDict:
  config = base_cifar.get_config()
  config.data.update({'source': 'digits'} | data)
  return config


def make_task(**data) -> cifar.SequentialCifar:
  with contextlib.redirect_stdout(io.StringIO()):
    return cifar.SequentialCifar(make_config(**data))


def write_archive(path, contents) -> str:
  """Writes a .tar.gz file and returns its MD5 sum."""
  with tarfile.open(path, 'w:gz') as archive:
    for name, content in contents.items():
      info = tarfile.TarInfo(f'cifar-10-batches-bin/{name}')
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return hashlib.md5(path.read_bytes()).hexdigest()


class FilesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.directory / 'cifar-10-binary.tar.gz'
    records = np.random.RandomState(0).randint(0, 256, (6, 2, 3073))
    records[:, :, 0] %= 10
    self.records = records.astype(np.uint8)
    self.contents = {
        name: self.records[index].tobytes() for index, name in enumerate(NAMES)
    }
    self.contents['readme.html'] = b'CIFAR-10'

  def test_reads(self):
    checksum = write_archive(self.path, self.contents)
    data = make_config(source='auto', manual_dir=str(self.directory)).data
    with contextlib.redirect_stdout(io.StringIO()) as out:
      images = cifar.load(data, checksum)
    self.assertIn('data: CIFAR-10, from', out.getvalue())
    self.assertEqual(images.train_images.shape, (10, 32, 32, 3))
    self.assertEqual(images.test_images.shape, (2, 32, 32, 3))
    # The third image: green of row 5, column 7.
    record = self.records[1, 0]
    place = 1 + 1024 + 5 * 32 + 7
    self.assertEqual(images.train_images[2, 5, 7, 1], record[place])
    self.assertEqual(images.train_labels[2], record[0])
    np.testing.assert_array_equal(images.test_labels, self.records[5, :, 0])

  def test_another_archive(self):
    write_archive(self.path, self.contents)
    with self.assertRaisesRegex(ValueError, 'has the MD5 sum'):
      cifar.read_archive(self.path)

  @pytest.mark.slow
  def test_not_there(self):
    data = make_config(source='cifar10').data
    with self.assertRaisesRegex(FileNotFoundError, 'config.data.manual_dir'):
      cifar.load(data)
    data.source = 'auto'
    with contextlib.redirect_stdout(io.StringIO()) as out:
      images = cifar.load(data)
    name = 'scikit-learn digits (8 x 8), NOT CIFAR-10'
    self.assertIn(f'WARNING: this run trains on {name}', out.getvalue())
    self.assertEqual(images.name, name)
    self.assertEqual(make_task().dataset, name)
    self.assertEqual(images.train_images.shape, (1437, 8, 8, 1))
    data.manual_dir = str(self.directory / 'nowhere')
    with self.assertRaisesRegex(FileNotFoundError, 'does not exist; it is at'):
      cifar.load(data)


class TaskTest(parameterized.TestCase):

  @parameterized.parameters(
      ('row', (8, 8)),
      ('pixel', (64, 1)),
      ('permuted', (64, 1)),
      ('noise_padded', (8, 8)),
  )
  def test_readings(self, sequence, shape):
    task = make_task(sequence=sequence)
    pixel = make_task(sequence='pixel').splits['test']['inputs']
    inputs = task.splits['test']['inputs']
    self.assertEqual(inputs.shape[1:], shape)
    if sequence == 'permuted':
      self.assertTrue((inputs != pixel).any())
      inputs, pixel = np.sort(inputs, 1), np.sort(pixel, 1)
    np.testing.assert_array_equal(inputs.ravel(), pixel.ravel())

  def test_channels(self):
    images = np.arange(2 * 4 * 5 * 3).reshape(2, 4, 5, 3)
    read = lambda **data: make_task(**data)._examples(images, [0, 0])['inputs']
    np.testing.assert_array_equal(read()[1, 7], images[1, 1, 2])
    rows = read(sequence='row')
    np.testing.assert_array_equal(rows[1, 2, 3:6], images[1, 2, 1])
    # Each is scaled.
    images = np.random.RandomState(0).rand(9, 4, 4, 3).astype(np.float32)
    images *= [0.1, 1.0, 2.0]
    task = make_task(sequence='pixel', scaling='standard')
    task._white, task._image = 1, images.shape[1:]
    shift, scale = task._find_scaling(images)
    scaled = (images - shift) / scale
    np.testing.assert_allclose(scaled.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std((0, 1, 2)), 1, atol=1e-5)
    shift, _ = make_task(sequence='row', scaling='symmetric')._find_scaling(
        images
    )
    np.testing.assert_array_equal(shift, 0.5)

  def inputs_of(self, task, examples, seed=None):
    @jax.jit
    def run(examples):
      rngs = None if seed is None else nnx.Rngs(dropout=seed)
      return task.logits(lambda x, rngs: x, examples, rngs)

    return run(examples)

  def test_noise(self):
    task = make_task(sequence='noise_padded', num_steps=100)
    batch = {name: x[:4] for name, x in task.splits['test'].items()}
    x = self.inputs_of(task, batch)
    self.assertEqual(x.shape, (4, 100, 8))
    want = (batch['inputs'] / 16 - task._shift) / task._scale
    np.testing.assert_allclose(x[:, :8], want, atol=1e-5)
    noise = np.asarray(x[:, 8:])
    self.assertBetween(noise.mean(), -0.1, 0.1)
    self.assertBetween(noise.std(), 0.95, 1.05)
    # It is the image's, whatever the batch; and other images have others.
    other = {name: array[[2, 0]] for name, array in batch.items()}
    np.testing.assert_array_equal(
        self.inputs_of(task, other), x[np.array([2, 0])]
    )
    self.assertGreater(abs(noise[0] - noise[1]).max(), 1.0)
    # Training draws its own.
    drawn = self.inputs_of(task, batch, seed=0)
    np.testing.assert_array_equal(drawn[:, :8], x[:, :8])
    self.assertGreater(abs(drawn[:, 8:] - noise).max(), 1.0)

  def test_evaluates(self):
    task = make_task(sequence='row')
    batch = {name: x[:4] for name, x in task.splits['test'].items()}
    model = lambda x, rngs=None: jnp.pad(x[:, -1], ((0, 0), (0, 2)))
    result = task.evaluate(model, batch)
    hits = result.predictions == batch['label']
    np.testing.assert_array_equal(result.scores['accuracy'], hits)
    for given in (batch, batch['inputs']):
      found = task.predict(model, given)
      np.testing.assert_array_equal(found, result.predictions)

  @parameterized.parameters('row', 'pixel', 'permuted', 'noise_padded')
  def test_inputs(self, sequence):
    task = make_task(sequence=sequence)
    batch = {name: x[:4] for name, x in task.splits['test'].items()}
    images = make_task(sequence='row').splits['test']['inputs'][:4, ..., None]
    noise = sequence == 'noise_padded'
    want = {k: batch[k] for k in ('inputs', 'index')[: 1 + noise]}
    given = [batch, batch | {'inputs': images.astype(np.int64)}]
    x = np.zeros((4, 32, 32, 3), np.uint8)
    wrong = [
        (batch | {'indices': batch['index']}, "no keys but .* got 'indices'"),
        (batch | {'inputs': x}, r'\[B, 8, 8, 1\] or .*32, 32, 3'),
    ]
    if noise:
      before = batch | {'index': np.arange(4) - 1}
      wrong += [
          (images, "a dict of 'inputs' and 'index'.*got 'inputs'"),
          (before, 'index must be from 0 .* image 0 has -1'),
      ]
    else:
      given += [images, jnp.asarray(images), batch['inputs']]
    for inputs, message in wrong:
      with self.assertRaisesRegex(ValueError, message):
        task.check_inputs(inputs)
    for inputs in given:
      found = task.check_inputs(inputs)
      self.assertEqual(found.keys(), want.keys())
      for name, x in want.items():
        np.testing.assert_array_equal(found[name], x)
        self.assertEqual(found[name].dtype, x.dtype)

  @parameterized.parameters(
      ({'sequence': 'rows'}, "'noise_padded'"),
      ({'sequence': 'noise_padded', 'num_steps': 7}, 'at least 8'),
      ({'source': 'mnist'}, "'auto', 'cifar10', 'digits'"),
  )
  def test_impossible_data(self, data, message):
    with self.assertRaisesRegex(ValueError, message):
      make_task(**data)


if __name__ == '__main__':
  absltest.main()
