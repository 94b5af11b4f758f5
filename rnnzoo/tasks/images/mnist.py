"""Images of handwritten digits: MNIST, or a small stand-in that says so.

MNIST is read from its four IDX files, which are downloaded where they are not
there. If they cannot be had, scikit-learn's embedded digits stand in: 1,797
real images of 8 x 8 pixels, which are good enough to see that everything works
and no substitute for the result. `Images.name` tells the two apart everywhere.
"""

from collections.abc import Mapping
import dataclasses

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.images import idx

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
    checksums: Mapping[str, str] = idx.CHECKSUMS,
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
        idx.download(directory)
      except ConnectionError as error:
        if data.source == 'mnist':
          raise
        return stand_in(str(error), DIGITS_NAME)
  train, train_labels, test, test_labels = idx.read(directory, checksums)
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
