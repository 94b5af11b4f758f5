"""TensorFlow Datasets' `mnist`, prepared and read without TensorFlow.

The stock builder extracts its archives with `tf.io.gfile`. This subclass keeps
name, version and features, but reads local IDX files, so that the copy it
writes is the copy that the stock builder would have written and can be read by
either. It lives in a module of its own because importing TFDS takes a while,
which only those who read MNIST should pay.
"""

from collections.abc import Mapping
import io
import os
import types
from typing import Any

import numpy as np
from PIL import Image
import tensorflow_datasets as tfds
from tensorflow_datasets.image_classification import mnist as tfds_mnist

from rnnzoo.tasks.images import idx


class MNIST(  # type: ignore[call-arg]  # TFDS comes without types.
    tfds_mnist.MNIST, skip_registration=True
):
  """The stock `mnist` dataset from local IDX files."""

  name = 'mnist'
  MANUAL_DOWNLOAD_INSTRUCTIONS = 'The four IDX files, still compressed.'
  # Nothing is downloaded. TFDS would look for a file of checksums beside this
  # one, with a package that it does not require.
  url_infos: Mapping[str, Any] = types.MappingProxyType({})

  def _split_generators(self, dl_manager):
    directory = dl_manager.manual_dir
    return {
        split: self._generate_examples(
            *check(
                idx.read(directory / f'{prefix}-images-idx3-ubyte.gz'),
                idx.read(directory / f'{prefix}-labels-idx1-ubyte.gz'),
                f'{directory}/{prefix}-*',
            )
        )
        for split, prefix in (('train', 'train'), ('test', 't10k'))
    }

  def _generate_examples(self, images, labels):
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
      # TFDS would encode an array with TensorFlow; bytes are stored as they
      # are.
      encoded = io.BytesIO()
      Image.fromarray(image).save(encoded, 'PNG')
      encoded.seek(0)
      yield index, {'image': encoded, 'label': int(label)}


def check(
    images: np.ndarray, labels: np.ndarray, source: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns both, or raises ValueError unless they are digits with labels.

  Args:
    images: pixels, uint8 [N, 28, 28].
    labels: ints [N] from 0 to 9.
    source: the place that they are from.
  """
  if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
    raise ValueError(
        f'{source} must hold images [N, 28, 28] and labels [N]; got'
        f' {images.shape} and {labels.shape}'
    )
  if images.dtype != np.uint8 or not len(labels):
    raise ValueError(
        f'{source} must hold images of bytes, one at least; got'
        f' {len(labels)} of {images.dtype}'
    )
  if labels.min() < 0 or labels.max() > 9:
    raise ValueError(
        f'{source} must hold labels from 0 to 9; got {labels.min()} to'
        f' {labels.max()}'
    )
  return images, labels


def prepare(data_dir: str | os.PathLike[str], idx_dir: str | os.PathLike[str]):
  """Writes TFDS's `mnist` under `data_dir` from the IDX files in `idx_dir`.

  Raises:
    ValueError: a file does not hold MNIST's images or labels.
    OSError: the copy cannot be written.
  """
  tfds.disable_progress_bar()
  try:
    builder = MNIST(data_dir=data_dir, file_format='array_record')
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=idx_dir)
    )
  except FileExistsError:
    # Another process wrote the copy meanwhile, whole: TFDS renames it at last.
    return
  except (ValueError, OSError, MemoryError):
    raise
  except Exception as error:  # TFDS and its writers raise many kinds.
    raise OSError(f'cannot prepare MNIST in {data_dir}: {error}') from error


def read(
    data_dir: str | os.PathLike[str], split: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (images [N, 28, 28] uint8, labels [N] int32) of a prepared split.

  Args:
    data_dir: the folder where `prepare`, or TFDS itself, wrote `mnist`.
    split: 'train' or 'test'.

  Raises:
    ValueError: the copy is damaged, or not in a format that can be read by
      index.
  """
  try:
    source = tfds.data_source(
        'mnist:3.0.1',
        split=split,
        data_dir=data_dir,
        decoders={'image': tfds.decode.SkipDecoding()},
    )
    examples = source.__getitems__(range(len(source)))
    images = np.stack(
        [np.asarray(Image.open(io.BytesIO(e['image']))) for e in examples]
    )
    labels = np.array([example['label'] for example in examples], np.int64)
    expected = source.dataset_info.splits[split].num_examples
    if len(labels) != expected:
      raise ValueError(f'{len(labels)} of {expected} images are there')
    check(images, labels, f'split {split!r}')
  except NotImplementedError as error:
    raise ValueError(
        f'the copy of mnist in {data_dir} is stored for TensorFlow readers'
        ' only; pass another directory as --config.data.data_dir'
    ) from error
  except MemoryError:
    raise
  except Exception as error:  # TFDS, its readers and PIL raise many kinds.
    raise ValueError(
        f'the copy of mnist in {data_dir}/mnist is damaged ({error}); delete'
        ' that directory, and it is prepared anew'
    ) from error
  return images, labels.astype(np.int32)
