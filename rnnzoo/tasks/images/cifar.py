"""Sequential CIFAR-10: classifies an image that comes piece by piece.

Four readings of an image of height x width pixels (32 x 32) with 3 channels:

  row            T = height steps of 3 width features;
  pixel          T = height * width steps of 3 features, row after row;
  permuted       these pixels in one fixed random order;
  noise_padded   the rows, and after them Gaussian noise up to T = 1000 steps,
                 over which the image has to be kept.

It is read from the archive that its authors publish. A record of its files is a
byte with the label and 3,072 bytes: all red values row by row, all green ones,
all blue ones.

References:
  Krizhevsky, Learning multiple layers of features from tiny images, 2009.
  Chang, Chen, Haber, Chi, AntisymmetricRNN: a dynamical system view on
  recurrent neural networks, 2019, sections 5.2 and 5.3.
"""

import dataclasses
import os
import pathlib
import tarfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields
from rnnzoo.tasks.images import mnist
from rnnzoo.tasks.images import smnist

NAME = 'CIFAR-10'
SOURCES = ('auto', 'cifar10', 'digits')
DIGITS_NAME = 'scikit-learn digits (8 x 8), NOT CIFAR-10'

URL = 'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'
ARCHIVE = 'cifar-10-binary.tar.gz'
CHECKSUM = 'c32a1d4ab5d03f1284b67883e8d87530'  # MD5, as its authors give it.

CLASS_NAMES = (
    *('airplane', 'automobile', 'bird', 'cat', 'deer'),
    *('dog', 'frog', 'horse', 'ship', 'truck'),
)

_TRAIN = tuple(f'data_batch_{i}.bin' for i in range(1, 6))
_TEST = 'test_batch.bin'
_RECORD = 1 + 3 * 32 * 32

SEQUENCES = ('row', 'pixel', 'permuted', 'noise_padded')


class SequentialCifar(smnist.SequentialImages):
  """Classifies color images that are read as sequences.

  Classes are 'airplane' to 'truck', or digits. `splits` have 'index' int32 [N]
  as well, which image of its split it is. The noise is not stored; in
  evaluation an image's noise never changes.
  """

  rules: fields.Rules = {
      **smnist.DATA_RULES,
      'source': fields.one_of(SOURCES),
      'sequence': fields.one_of(SEQUENCES),
      'num_steps': fields.integer(1, 10**6),
      'noise_seed': fields.seed(),
  }

  def _load(self):
    data = self._data
    if data.sequence != 'noise_padded':
      unread = {'num_steps': 1000, 'noise_seed': 0}
      fields.check_unread(data, unread, 'sequence')
    images = load(data)
    height = images.train_images.shape[1]
    if data.sequence == 'noise_padded' and data.num_steps < height:
      raise ValueError(
          f'config.data.num_steps must be at least {height}, the rows of an'
          f' image; got {data.num_steps}'
      )
    return images

  def _find_scaling(self, images):
    channels = np.split(
        images / np.float32(self._white), images.shape[-1], axis=-1
    )
    name = self._data.scaling
    pairs = [smnist.scaling(name, channel) for channel in channels]
    # A step has the channels of one pixel, or of a row's.
    repeats = self._features // len(pairs)
    shift, scale = np.tile(np.array(pairs, np.float32).T, repeats)
    return shift, scale

  def _examples(self, images, labels):
    index = np.arange(len(images), dtype=np.int32)
    return {**super()._examples(images, labels), 'index': index}

  def describe(self):
    return {**super().describe(), 'class_names': list(self.class_names)}

  def check_inputs(self, inputs: Any) -> Any:
    """Returns inputs of `predict`, 'inputs' uint8 [B, T, in] among them.

    Args:
      inputs: integers from 0, black, to 255, white (16 for a run on digits):
        images [B, height, width, channels], which the task reads as sequences
        itself, or sequences [B, T, in] as in `splits`. Or a dict of 'inputs',
        which are these, and 'index' int [B], by which an image gets its noise.
        Only config.data.sequence='noise_padded' needs the index.
    """
    takes_noise = self._data.sequence == 'noise_padded'
    needed = ('inputs', 'index') if takes_noise else ('inputs',)
    names = ('inputs', 'index', 'label')
    given = array_checks.by_name(inputs, names, needed)
    found = {'inputs': super().check_inputs(given['inputs'])}
    if takes_noise:
      found['index'] = array_checks.integers(
          given['index'],
          'index',
          len(found['inputs']),
          2**31 - 1,
          least=0,
          of=', by which an image gets its noise',
          row='image',
      )
    return found

  def _completed(self, x, inputs, rngs):
    if self._data.sequence != 'noise_padded':
      return x
    count, height, features = x.shape
    shape = (self._data.num_steps - height, features)
    if rngs is not None:
      noise = jax.random.normal(rngs.dropout(), (count, *shape))
    else:
      key = jax.random.key(self._data.noise_seed)
      # A function of the image, not of its batch.
      keys = jax.vmap(jax.random.fold_in, (None, 0))(key, inputs['index'])
      noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
    return jnp.concatenate([x, noise], axis=1)


def load(
    data: ml_collections.ConfigDict, checksum: str = CHECKSUM
) -> mnist.Images:
  """Returns CIFAR-10, or scikit-learn's digits where the config allows them.

  The data are `config.data`, and the checksum is the archive's MD5 sum.

  Returns:
    Images uint8 [N, height, width, channels], with 3 channels for CIFAR-10 and
    one for digits.
  """
  if data.source == 'digits':
    fields.check_unread(data, ('manual_dir',), 'source')
    return _with_channel(
        dataclasses.replace(mnist.load_digits(), name=DIGITS_NAME)
    )
  if data.manual_dir:
    name = 'config.data.manual_dir'
    path = fields.expand_directory(data.manual_dir, name) / ARCHIVE
    print(f'data: {NAME}, from {path}', flush=True)
    return read_archive(path, checksum)
  where = (
      f'config.data.manual_dir must be the directory of {ARCHIVE}, which is at'
      f' {URL}'
  )
  if data.source == 'cifar10':
    raise FileNotFoundError(where)
  return _with_channel(mnist.stand_in(where, DIGITS_NAME))


def read_archive(
    path: str | os.PathLike[str], checksum: str = CHECKSUM
) -> mnist.Images:
  """Returns CIFAR-10 from its archive, which stays as it is."""
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist; it is at {URL}')
  mnist.check_sum(path, checksum, NAME)
  parts = []
  with tarfile.open(path, 'r:gz') as archive:
    members = {pathlib.PurePosixPath(m.name).name: m for m in archive}
    for name in (*_TRAIN, _TEST):
      content: Any = archive.extractfile(members[name])
      part = np.frombuffer(content.read(), np.uint8)
      parts.append(part.reshape(-1, _RECORD))
  records, count = np.concatenate(parts), sum(map(len, parts[:-1]))
  labels = records[:, 0].astype(np.int32)
  images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  images = np.ascontiguousarray(images)
  arrays = images[:count], labels[:count], images[count:], labels[count:]
  return mnist.Images(NAME, *arrays, white=255, class_names=CLASS_NAMES)


def _with_channel(digits: mnist.Images) -> mnist.Images:
  return dataclasses.replace(
      digits,
      train_images=digits.train_images[..., np.newaxis],
      test_images=digits.test_images[..., np.newaxis],
  )
