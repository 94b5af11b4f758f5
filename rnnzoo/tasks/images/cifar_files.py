"""CIFAR-10: 60,000 color images of 32 x 32 pixels in 10 classes.

It is read from the archive that its authors publish, `cifar-10-binary.tar.gz`,
or from a copy that TensorFlow Datasets has prepared (read without TensorFlow).
A record of the archive's files is a byte with the label and 3,072 bytes: all
red values row by row, all green ones, all blue ones.

References:
  Krizhevsky, Learning multiple layers of features from tiny images, 2009.
"""

from collections.abc import Mapping
import dataclasses
import os
import pathlib
import tarfile
import types
import zlib

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.images import idx
from rnnzoo.tasks.images import mnist

NAME = 'CIFAR-10'
SOURCES = ('auto', 'cifar10', 'digits')
DIGITS_NAME = 'scikit-learn digits (8 x 8), NOT CIFAR-10'
# The shape of an image, [height, width, channels], by its greatest value.
SHAPES: Mapping[int, tuple[int, int, int]] = types.MappingProxyType(
    {255: (32, 32, 3), 16: (8, 8, 1)}
)

URL = 'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'
ARCHIVE = 'cifar-10-binary.tar.gz'
CHECKSUM = 'c32a1d4ab5d03f1284b67883e8d87530'  # MD5, as its authors give it.

CLASS_NAMES = (
    *('airplane', 'automobile', 'bird', 'cat', 'deer'),
    *('dog', 'frog', 'horse', 'ship', 'truck'),
)

_TRAIN = tuple(f'data_batch_{i}.bin' for i in range(1, 6))
_TEST = ('test_batch.bin',)
_RECORD = 1 + 3 * 32 * 32
_VERSION = '3.0.2'  # The version of TFDS's copy.


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
    fields.check_unread(data, ('manual_dir', 'data_dir'), 'source')
    return _digits()
  if data.manual_dir:
    fields.check_unread(data, ('data_dir',), 'manual_dir')
    name = 'config.data.manual_dir'
    path = fields.expand_directory(data.manual_dir, name) / ARCHIVE
    print(f'data: {NAME}, from {path}', flush=True)
    return read_archive(path, checksum)
  data_dir = tfds_sets.directory(data.data_dir)
  if (data_dir / 'cifar10' / _VERSION / 'dataset_info.json').is_file():
    print(f'data: {NAME}, prepared in {data_dir}', flush=True)
    return _read_prepared(data_dir)
  where = (
      f'CIFAR-10 is not prepared by TFDS in {data_dir}; download {URL} and pass'
      ' its directory as --config.data.manual_dir'
  )
  if data.source == 'cifar10':
    raise FileNotFoundError(where)
  print(f'WARNING: {where}.', flush=True)
  print(f'WARNING: this run trains on {DIGITS_NAME}.', flush=True)
  return _digits()


def read_archive(
    path: str | os.PathLike[str], checksum: str = CHECKSUM
) -> mnist.Images:
  """Returns CIFAR-10 from its archive, which stays as it is."""
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist; it is at {URL}')
  idx.check_sum(path, checksum, NAME)
  contents = {}
  try:
    with tarfile.open(path, 'r:gz') as archive:
      for member in archive:
        name = pathlib.PurePosixPath(member.name).name
        if member.isfile() and name in (*_TRAIN, *_TEST):
          contents[name] = archive.extractfile(member).read()  # type: ignore[union-attr]
  except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
    raise ValueError(f'{path} is not a whole archive: {error}') from error
  if missing := [name for name in (*_TRAIN, *_TEST) if name not in contents]:
    raise ValueError(f'{path} lacks {", ".join(missing)}')
  found = [
      _records(contents[name], f'{path}, {name}') for name in (*_TRAIN, *_TEST)
  ]
  arrays = [*map(np.concatenate, zip(*found[:-1], strict=True)), *found[-1]]
  return mnist.Images(NAME, *arrays, white=255, class_names=CLASS_NAMES)


def _records(content: bytes, source: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (images [N, 32, 32, 3], labels int32 [N]) of a file."""
  if not content or len(content) % _RECORD:
    raise ValueError(
        f'{source} must hold records of {_RECORD:,} bytes; it has'
        f' {len(content):,} bytes'
    )
  records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
  labels = records[:, 0].astype(np.int32)
  if labels.max() > 9:
    raise ValueError(
        f'{source} must hold labels from 0 to 9; got {labels.max()}'
    )
  images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  return np.ascontiguousarray(images), labels


def _read_prepared(data_dir: pathlib.Path) -> mnist.Images:
  """Returns CIFAR-10 from a copy that TFDS has prepared."""
  name = f'cifar10:{_VERSION}'
  arrays = tfds_sets.read_images(name, data_dir, SHAPES[255])
  return mnist.Images(NAME, *arrays, white=255, class_names=CLASS_NAMES)


def _digits() -> mnist.Images:
  """Returns scikit-learn's digits, with an axis of one channel."""
  digits = mnist.load_digits()
  return dataclasses.replace(
      digits,
      name=DIGITS_NAME,
      train_images=digits.train_images[..., np.newaxis],
      test_images=digits.test_images[..., np.newaxis],
  )
