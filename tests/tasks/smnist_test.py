"""The data of sequential MNIST, its task, and every config that uses it."""

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import pathlib
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import base_smnist
from rnnzoo.tasks.images import mnist
from rnnzoo.tasks.images import smnist
from rnnzoo.tasks.series import sequence_arrays

PIXELS = (np.arange(3 * 64) % 16).astype(np.uint8).reshape(3, 8, 8)


def digits_config(**data) -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.data.update({'source': 'digits', **data})
  return config


def idx_bytes(array: np.ndarray) -> bytes:
  header = bytes([0, 0, 8, array.ndim])
  sizes = np.array(array.shape, '>i4').tobytes()
  return gzip.compress(header + sizes + array.tobytes())


def write_idx_files(directory: pathlib.Path) -> dict[str, str]:
  """Writes a made-up MNIST of 6 + 4 images and returns its checksums."""
  rng = np.random.RandomState(0)
  checksums = {}
  for prefix, size in (('train', 6), ('t10k', 4)):
    images = rng.randint(0, 256, (size, 28, 28)).astype(np.uint8)
    images[:, 0, 0] = np.arange(size)  # Tells which image it is.
    labels = (np.arange(size) % 10).astype(np.uint8)
    for name, array in (('images-idx3', images), ('labels-idx1', labels)):
      content = idx_bytes(array)
      path = directory / f'{prefix}-{name}-ubyte.gz'
      path.write_bytes(content)
      checksums[path.name] = hashlib.md5(content).hexdigest()
  return checksums


class IdxTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def test_a_download_is_bounded(self):

    class Endless(http.server.BaseHTTPRequestHandler):

      def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
          while True:
            self.wfile.write(bytes(2**16))
        except OSError:
          pass  # It was left.

      def log_message(self, *unused_arguments):
        pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    self.addCleanup(server.server_close)
    self.addCleanup(server.shutdown)
    url = f'http://127.0.0.1:{server.server_port}/'
    with mock.patch.object(mnist, 'URL', url):
      with self.assertRaisesRegex(ConnectionError, 'answer is another file'):
        mnist.download(self.directory)
    self.assertEmpty(list(self.directory.glob('*.gz')))

  def test_checks_sums(self):
    checksums = write_idx_files(self.directory)
    path = self.directory / 't10k-labels-idx1-ubyte.gz'
    path.write_bytes(path.read_bytes() + b'x')
    with self.assertRaisesRegex(ValueError, 't10k-labels.* MD5 sum'):
      mnist.read_files(self.directory, checksums)
    path.unlink()
    with self.assertRaisesRegex(FileNotFoundError, 'lacks t10k-labels'):
      mnist.read_files(self.directory, checksums)

  def test_a_failed_download_says_what_to_do(self):
    with mock.patch.object(mnist, 'URL', 'http://127.0.0.1:9/'):
      with self.assertRaisesRegex(ConnectionError, 'manual_dir'):
        mnist.download(self.directory)


class MnistTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.idx_dir = pathlib.Path(self.create_tempdir().full_path)
    self.checksums = write_idx_files(self.idx_dir)
    self.data = base_smnist.get_config().data
    self.data.manual_dir = str(self.idx_dir)

  def load(self, **options) -> mnist.Images:
    with mock.patch.object(mnist, 'URL', 'http://127.0.0.1:9/'):
      return mnist.load(self.data, **options)

  def test_reads_and_keeps_what_it_downloads(self):
    read = lambda name, start: np.frombuffer(
        gzip.decompress((self.idx_dir / name).read_bytes())[start:], np.uint8
    )
    images = self.load(checksums=self.checksums)
    self.assertEqual((images.name, images.white), ('MNIST', 255))
    pixels = read('train-images-idx3-ubyte.gz', 16).reshape(6, 28, 28)
    np.testing.assert_array_equal(images.train_images, pixels)
    np.testing.assert_array_equal(images.train_labels, np.arange(6))
    self.assertEqual(images.test_images.shape, (4, 28, 28))
    np.testing.assert_array_equal(images.test_labels, np.arange(4))
    self.assertEqual(images.test_labels.dtype, np.int32)
    contents = {p.name: p.read_bytes() for p in self.idx_dir.iterdir()}
    fetch = lambda name: contents[name]
    self.data.manual_dir = ''
    self.data.data_dir = self.create_tempdir().full_path
    with mock.patch.object(mnist, '_fetch', fetch):
      mnist.load(self.data, self.checksums)
    again = self.load(checksums=self.checksums)
    np.testing.assert_array_equal(again.train_images, pixels)

  def test_stand_in_says_so(self):
    place = self.create_tempdir().full_path
    self.data.update(manual_dir='', data_dir=place)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      images = self.load()
    self.assertEqual(images.name, 'scikit-learn digits (8 x 8), NOT MNIST')
    self.assertIn(
        f'WARNING: this run trains on {images.name}', output.getvalue()
    )
    self.assertLen(images.train_labels, 1437)
    self.assertLen(images.test_labels, 360)
    self.assertEqual(images.train_images.shape[1:], (8, 8))
    self.assertLessEqual(images.train_images.max(), images.white)

  @parameterized.parameters(
      ({}, ValueError, 'MD5 sum'),
      ({'manual_dir': '/nowhere'}, FileNotFoundError, 'lacks train-images'),
      (
          {'source': 'mnist', 'manual_dir': '', 'data_dir': ''},
          ConnectionError,
          'could not download',
      ),
  )
  def test_no_reason_for_a_stand_in(self, data, error, message):
    self.data.update(data)
    home = {'HOME': self.create_tempdir().full_path}
    with (
        mock.patch.dict('os.environ', home),
        self.assertRaisesRegex(error, message),
    ):
      self.load()


class SequentialMnistTest(parameterized.TestCase):

  def test_permutation_depends_on_its_seed_alone(self):
    # Against NumPy's promise, not against our own function.
    np.testing.assert_array_equal(
        smnist.permutation(12, seed=5),
        [7, 5, 2, 9, 11, 4, 8, 1, 0, 10, 6, 3],
    )
    self.assertEqual(
        hashlib.sha256(
            smnist.permutation(784, seed=0).astype('<i8').tobytes()
        ).hexdigest(),
        'fe62e3fef305ce16e55f08cd0056a8b237e12af6c9523ff3fb35395f6ec55222',
    )
    inputs = {
        seed: smnist.SequentialMnist(
            digits_config(sequence='permuted', permutation_seed=seed)
        ).splits
        for seed in (0, 5)
    }
    pixels = smnist.SequentialMnist(digits_config(sequence='pixel')).splits
    for seed, splits in inputs.items():
      order = np.random.RandomState(seed).permutation(64)
      for name in ('train', 'validation', 'test'):
        np.testing.assert_array_equal(
            splits[name]['inputs'], pixels[name]['inputs'][:, order]
        )

  def test_split_is_fixed_and_does_not_overlap(self):
    alike = np.zeros(60000, bool)
    train, validation = sequence_arrays.split_off(alike, 9000, seed=0)
    other = sequence_arrays.split_off(alike, 9000, seed=1)[1]
    self.assertFalse(np.array_equal(validation, other))
    self.assertCountEqual(np.concatenate([train, validation]), range(60000))
    self.assertEqual(
        hashlib.sha256(validation.astype('<i8').tobytes()).hexdigest(),
        '51f663eb1a4a00c0b57d1b83bc32d181ddf3c81b4333b9dc78b3c77263c6aa21',
    )

  def test_an_empty_split_is_an_error(self):
    for fraction, message in (
        (1e-4, 'into 0 and 1437'),
        (0.9999, '1437 and 0'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        smnist.SequentialMnist(digits_config(validation_fraction=fraction))

  def test_sequences(self):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(smnist.to_sequences(images, 'row', 0), images)
    pixels = smnist.to_sequences(images, 'pixel', 0)
    self.assertEqual(pixels.shape, (2, 12, 1))
    np.testing.assert_array_equal(pixels[1, :, 0], np.arange(12, 24))
    permuted = smnist.to_sequences(images, 'permuted', 5)
    np.testing.assert_array_equal(permuted[0, :, 0], smnist.permutation(12, 5))
    reversed_ = smnist.to_sequences(images, 'bit_reversed', 0)
    np.testing.assert_array_equal(
        reversed_[0, :, 0], [0, 8, 4, 2, 10, 6, 1, 9, 5, 3, 11, 7]
    )

  def test_splits_hold_every_image_once(self):
    config = digits_config()
    task = smnist.SequentialMnist(config)
    images = np.concatenate([s['inputs'] for s in task.splits.values()])
    self.assertLen(images, 1797)
    self.assertLen(np.unique(images, axis=0), 1797)
    self.assertEqual(images.dtype, np.uint8)
    self.assertLen(task.splits['validation']['label'], 216)
    # Few images have smaller batches, unless the config says a size.
    self.assertEqual(task.batch_size, 32)
    config.batch_size = 16
    self.assertEqual(smnist.SequentialMnist(config).batch_size, 16)

  def test_losses_and_predictions(self):
    config = digits_config()
    config.model.update(features=4, label_smoothing=0.2)
    task = smnist.SequentialMnist(config)
    model = task.build_model(nnx.Rngs(0))
    examples = {k: v[:5] for k, v in task.splits['test'].items()}
    losses, scores, _, predictions = task.evaluate(model, examples)
    logits = model(examples['inputs'] / np.float32(16))
    log_p = jax.nn.log_softmax(logits)
    hard = -log_p[np.arange(5), examples['label']]
    np.testing.assert_allclose(losses, hard, rtol=1e-5)
    np.testing.assert_array_equal(predictions, logits.argmax(-1))
    np.testing.assert_array_equal(
        scores['accuracy'], predictions == examples['label']
    )
    np.testing.assert_array_equal(
        task.predict(model, examples['inputs']), predictions
    )
    # Smoothed labels are for training.
    losses = task.evaluate(model, examples, nnx.Rngs(0)).losses
    np.testing.assert_allclose(
        losses, 0.8 * hard - 0.2 * log_p.mean(-1), rtol=1e-5
    )

  @parameterized.parameters('row', 'pixel', 'permuted')
  def test_inputs(self, sequence):
    config = digits_config(sequence=sequence)
    task = smnist.SequentialMnist(config)
    described = json.loads(json.dumps(task.describe()))
    images = smnist.SequentialMnist(digits_config()).splits['test']['inputs']
    want = task.splits['test']['inputs'][:3]
    for restored in (task, task.restore(config, described)):
      for given in (want, images[:3]):
        found = restored.check_inputs(given)
        np.testing.assert_array_equal(found, want)
        self.assertEqual(found.dtype, np.uint8)

  @parameterized.parameters(
      (PIXELS / 16, r'got float64 of shape \[3, 8, 8\]'),
      (jnp.ones((3, 8, 8), jnp.bfloat16), 'got float32'),
      (PIXELS > 9, 'got bool'),
      (PIXELS.astype(complex), 'got complex128'),
      (np.int16(PIXELS) - 5, 'got -5 to 10'),
      (np.int16(PIXELS) + 2, 'got 2 to 17'),
      (PIXELS[0], r'shape \[8, 8\]'),
      (PIXELS[..., None], r'8, 8\] or \[B, 64, 1\].*\[3, 8, 8, 1\]'),
      (PIXELS[:0], r'shape \[0, 8, 8\]$'),
      ({'inputs': PIXELS}, 'got object'),
  )
  def test_inputs_that_are_refused(self, given, message):
    task = smnist.SequentialMnist(digits_config(sequence='pixel'))
    rule = '^inputs must be integers from 0, black, to 16, white'
    with self.assertRaisesRegex(ValueError, f'{rule}.*{message}'):
      task.check_inputs(given)

  def test_scalings(self):
    tasks = {
        name: smnist.SequentialMnist(digits_config(scaling=name))
        for name in ('minmax', 'standard', 'symmetric')
    }
    pixels = tasks['minmax'].splits['train']['inputs'] / 16
    identity = lambda x, rngs: x
    for name, want in (
        ('minmax', pixels),
        ('symmetric', 2 * (pixels - 0.5)),
        ('standard', (pixels - pixels.mean()) / pixels.std()),
    ):
      inputs = tasks[name].splits['train']['inputs']
      np.testing.assert_allclose(
          tasks[name].logits(identity, inputs), want, atol=1e-5, err_msg=name
      )

  def test_initial_values(self):
    config = digits_config()
    config.model.update(layer='LSTM', features=32, num_layers=2)
    config.model.options.LSTM = {
        'kernel_init': 'normal',
        'recurrent_kernel_init': 'xavier_uniform_fused',
    }
    config.model.last_layer_options.LSTM = {'kernel_init': 'zeros'}
    model = smnist.SequentialMnist(config).build_model(nnx.Rngs(0))
    layer, last = model.backbone.layers
    self.assertBetween(layer.kernel[...].std(), 0.008, 0.012)
    self.assertFalse(last.kernel[...].any())
    limit = (6 / (32 + 4 * 32)) ** 0.5
    for kernel in (layer.recurrent_kernel, last.recurrent_kernel):
      greatest = abs(kernel[...]).max()
      self.assertBetween(greatest, 0.97 * limit, limit)

  # tests/training/config_fuzz_test.py has values of every field.
  @parameterized.parameters(
      ({'layer': 'Gruu'}, "did you mean 'GRU'.*Elman, LSTM, GRU"),
      ({'features': 0}, 'features must be an integer from 1'),
      ({'options': {'GRU': {'gamma': 1.0}}}, "argument 'gamma'"),
      ({'options': {'GRU': {'kernel_init': 'he'}}}, 'kernel_init'),
      ({'dtype': '>f2'}, 'dtype that JAX computes in.*got .>f2'),
      ({'dtype': 'float64'}, 'JAX_ENABLE_X64=1'),
      ({'implementation': 'cuda'}, 'implementation'),
      (
          {'options': {'GRU': {'dtype': 'bfloat16'}}},
          'GRU.dtype would be ignored: config.model.dtype is',
      ),
      (
          {'options': {'GRU': {'rngs': 3}}},
          'config.model.options.GRU.rngs would be ignored: the task sets it',
      ),
  )
  def test_impossible_model(self, model, message):
    config = digits_config()
    config.model.update(model)
    with self.assertRaisesRegex(ValueError, message):
      smnist.SequentialMnist(config).build_model(nnx.Rngs(0))

  def test_impossible_data(self):
    for name, value in (('source', 'cifar'), ('sequence', 'rows')):
      with self.assertRaisesRegex(ValueError, f'{name} must be one of'):
        smnist.SequentialMnist(digits_config(**{name: value}))


if __name__ == '__main__':
  absltest.main()
