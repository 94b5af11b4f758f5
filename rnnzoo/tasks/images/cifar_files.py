"""CIFAR-10: 60,000 color images of 32 x 32 pixels in 10 classes.

It is read from the archive that its authors publish, `cifar-10-binary.tar.gz`.
A record of the archive's files is a byte with the label and 3,072 bytes: all
red values row by row, all green ones, all blue ones.

References:
  Krizhevsky, Learning multiple layers of features from tiny images, 2009.
"""

import dataclasses
import os
import pathlib
import tarfile
from typing import Any

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.images import idx
from rnnzoo.tasks.images import mnist

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
  idx.check_sum(path, checksum, NAME)
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
