"""Images of handwritten digits: MNIST, or a small stand-in that says so.

MNIST is read through TensorFlow Datasets (without TensorFlow). If no copy is
prepared yet, one is made from local IDX files or from a download. If there is
neither, scikit-learn's embedded digits stand in: 1,797 real images of 8 x 8
pixels, which are good enough to see that everything works and no substitute for
the result. `Images.name` tells the two apart everywhere.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import tempfile
import types

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.images import idx

DIGITS_NAME = 'scikit-learn digits (8 x 8), NOT MNIST'
SOURCES = ('auto', 'mnist', 'digits')
# The shape of an image, [height, width], by its greatest value.
SHAPES: Mapping[int, tuple[int, int]] = types.MappingProxyType(
    {255: (28, 28), 16: (8, 8)}
)
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
    checksums: Mapping[str, str] = idx.CHECKSUMS,
) -> Images:
  """Returns MNIST, or the stand-in where the config allows it.

  The data are `config.data`, and the checksums the MD5 sums of MNIST's files.

  Raises:
    FileNotFoundError: `manual_dir` or a file in it is missing, or `source` is
      'mnist' and there is no MNIST to be had.
    ConnectionError: the network went away in the middle of a download.
    ValueError: a checksum is wrong, `source` is unknown, a directory is a file,
      or `source` is 'digits' and a directory is named.
  """
  if data.source == 'digits':
    fields.check_unread(data, ('manual_dir', 'data_dir'), 'source')
    return load_digits()
  data_dir = tfds_sets.directory(data.data_dir)
  if data.manual_dir:
    manual_dir = fields.expand_directory(
        data.manual_dir, 'config.data.manual_dir'
    )
    # Even where a prepared copy makes the files needless: whoever names them
    # wants to hear that they are not there.
    idx.verify(manual_dir, checksums)
  if (data_dir / 'mnist' / '3.0.1' / 'dataset_info.json').is_file():
    print(f'data: MNIST, prepared in {data_dir}', flush=True)
    return _read_mnist(data_dir)
  if data.manual_dir:
    print(f'data: MNIST, from {data.manual_dir} to {data_dir}', flush=True)
    return _prepare_mnist(data_dir, manual_dir)
  if idx.reachable():
    print(f'data: MNIST, from {idx.URL} to {data_dir}', flush=True)
    with tempfile.TemporaryDirectory() as idx_dir:
      idx.download(idx_dir)
      idx.verify(idx_dir, checksums)
      return _prepare_mnist(data_dir, pathlib.Path(idx_dir))
  if data.source == 'mnist':
    raise FileNotFoundError(
        f'MNIST is not prepared in {data_dir} and cannot be downloaded from'
        ' here; pass the directory of its four IDX files as'
        ' --config.data.manual_dir'
    )
  print(
      f'WARNING: MNIST is not prepared in {data_dir} and cannot be downloaded'
      ' from here.\n'
      f'WARNING: this run trains on {DIGITS_NAME}.\n'
      'WARNING: for MNIST, pass the directory of its four IDX files as'
      ' --config.data.manual_dir.',
      flush=True,
  )
  return load_digits()


def _prepare_mnist(data_dir: pathlib.Path, idx_dir: pathlib.Path) -> Images:
  from rnnzoo.tasks.images import tfds_mnist  # Slow to import.

  tfds_mnist.prepare(data_dir, idx_dir)
  return _read_mnist(data_dir)


def _read_mnist(data_dir: pathlib.Path) -> Images:
  arrays = tfds_sets.read_images('mnist:3.0.1', data_dir, SHAPES[255])
  return Images('MNIST', *arrays, white=255)


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
