"""Images of handwritten digits: MNIST, or a small stand-in that says so.

MNIST is read from its four IDX files, which are downloaded where they are not
there. If they cannot be had, scikit-learn's embedded digits stand in: 1,797
real images of 8 x 8 pixels, which are good enough to see that everything works
and no substitute for the result. `Images.name` tells the two apart everywhere.
"""

from collections.abc import Mapping
import dataclasses
import gzip
import hashlib
import http.client
import os
import pathlib
import types
import urllib.request

import ml_collections
import numpy as np

from rnnzoo.tasks import fields

URL = 'https://storage.googleapis.com/cvdf-datasets/mnist/'

# MD5 sums of the canonical files, as TFDS and torchvision have them too.
CHECKSUMS: Mapping[str, str] = types.MappingProxyType(
    {
        'train-images-idx3-ubyte.gz': 'f68b3c2dcbeaaa9fbdd348bbdeb94873',
        'train-labels-idx1-ubyte.gz': 'd53e105ee54ea40749a09fcbcd1e9432',
        't10k-images-idx3-ubyte.gz': '9fb629c4189551a2d022fa330f9573f3',
        't10k-labels-idx1-ubyte.gz': 'ec29112dd5afa0611ce80d1b7f02629c',
    }
)

# The largest has 9.9 MB.
_MOST_BYTES = 16 * 2**20
_TIMEOUT = 10.0  # Seconds without an answer.

DIGITS_NAME = 'scikit-learn digits (8 x 8), NOT MNIST'
SOURCES = ('auto', 'mnist', 'digits')
DIGITS_WHITE = 16

# scikit-learn defines no test split. This one is fixed: the first 360 images
# (20 %) in the order of `np.random.RandomState(0).permutation(1797)`, a stream
# that NumPy promises never to change.
_DIGITS_TEST = 360


@dataclasses.dataclass(frozen=True)
class Images:
  """Images with their labels, in the data set's own split."""

  name: str  # A name for people.
  # Pixels, uint8 [N, height, width] or, of CIFAR-10 and its stand-in, [N,
  # height, width, channels].
  train_images: np.ndarray
  train_labels: np.ndarray  # Classes, int32 [N].
  test_images: np.ndarray  # Pixels, in the same shape.
  test_labels: np.ndarray  # Classes, int32 [N].
  _: dataclasses.KW_ONLY
  white: int  # The greatest value that a pixel can have.
  class_names: tuple[str, ...] = tuple('0123456789')  # Names of classes.


def load(
    data: ml_collections.ConfigDict,
    checksums: Mapping[str, str] = CHECKSUMS,
) -> Images:
  """Returns MNIST, or the stand-in where the config allows it.

  The data are `config.data`, and the checksums the MD5 sums of MNIST's files.

  Raises:
    ConnectionError: MNIST must be downloaded, and cannot be.
  """
  if data.source == 'digits':
    fields.check_unread(data, ('manual_dir', 'data_dir'), 'source')
    return load_digits()
  if data.manual_dir:
    fields.check_unread(data, ('data_dir',), 'manual_dir')
    directory = fields.expand_directory(
        data.manual_dir, 'config.data.manual_dir'
    )
  else:
    directory = fields.expand_directory(
        data.data_dir or '~/.cache/rnnzoo/mnist', 'config.data.data_dir'
    )
    if not all((directory / name).is_file() for name in checksums):
      try:
        download(directory)
      except ConnectionError as error:
        if data.source == 'mnist':
          raise
        return stand_in(str(error), DIGITS_NAME)
  train, train_labels, test, test_labels = read_files(directory, checksums)
  print(f'data: MNIST, from {directory}', flush=True)
  labels = train_labels.astype(np.int32), test_labels.astype(np.int32)
  return Images('MNIST', train, labels[0], test, labels[1], white=255)


def stand_in(reason: str, name: str) -> Images:
  """Returns the digits under a name, with a warning that tells the reason."""
  print(f'WARNING: {reason}.', flush=True)
  print(f'WARNING: this run trains on {name}.', flush=True)
  return dataclasses.replace(load_digits(), name=name)


def load_digits() -> Images:
  """Returns scikit-learn's digits, which stand in for MNIST."""
  from sklearn import datasets  # Slow to import, and seldom needed.

  digits = datasets.load_digits()
  order = np.random.RandomState(0).permutation(len(digits.target))
  images = digits.images[order].astype(np.uint8)
  labels = digits.target[order].astype(np.int32)
  return Images(
      DIGITS_NAME,
      images[_DIGITS_TEST:],
      labels[_DIGITS_TEST:],
      images[:_DIGITS_TEST],
      labels[:_DIGITS_TEST],
      white=DIGITS_WHITE,
  )


def read_files(
    directory: pathlib.Path, checksums: Mapping[str, str] = CHECKSUMS
) -> list[np.ndarray]:
  """Returns the arrays of the four files, uint8, in the order of `CHECKSUMS`.

  An IDX file is two zero bytes, a type byte (8 for uint8), the number of axes,
  the length of each axis as a big-endian int32, and the data in C order. A file
  that has the right checksum is one.
  """
  missing = [name for name in checksums if not (directory / name).is_file()]
  if missing:
    raise FileNotFoundError(f'{directory} lacks {", ".join(missing)}')
  arrays = []
  for name, expected in checksums.items():
    check_sum(directory / name, expected, 'MNIST')
    content = gzip.decompress((directory / name).read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, '>i4', axes, 4)
    found = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    arrays.append(found.reshape(shape))
  return arrays


def check_sum(path: pathlib.Path, expected: str, name: str) -> None:
  """Raises ValueError unless a file has the MD5 sum of a data set's file."""
  with path.open('rb') as file:
    actual = hashlib.file_digest(file, 'md5').hexdigest()
  if actual != expected:
    raise ValueError(
        f'{path} has the MD5 sum {actual}, but {name} has {expected}; the file'
        ' is damaged or is another one'
    )


def download(directory: pathlib.Path) -> None:
  """Fetches each of the four files that `directory` lacks.

  Raises:
    ConnectionError: a file could not be fetched.
  """
  directory.mkdir(parents=True, exist_ok=True)
  for name in CHECKSUMS:
    path = directory / name
    if path.exists():
      continue
    partial = path.with_suffix(f'.{os.getpid()}.part')
    try:
      partial.write_bytes(_fetch(name))
    except (OSError, http.client.HTTPException) as error:
      raise ConnectionError(
          f'could not download {URL + name} ({error}); fetch the four files by'
          ' other means and pass their directory as --config.data.manual_dir'
      ) from error
    os.replace(partial, path)


def _fetch(name: str) -> bytes:
  """Returns a file from the network, or raises OSError if it is another."""
  with urllib.request.urlopen(URL + name, timeout=_TIMEOUT) as response:
    content = response.read(_MOST_BYTES)
  if hashlib.md5(content).hexdigest() != CHECKSUMS[name]:
    raise OSError('the answer is another file')
  return content
