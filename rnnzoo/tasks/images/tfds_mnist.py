"""TensorFlow Datasets' `mnist`, prepared without TensorFlow.

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

from PIL import Image
import tensorflow_datasets as tfds
from tensorflow_datasets.image_classification import mnist as tfds_mnist

from rnnzoo.tasks import tfds_sets
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
        split: self._generate_examples(f'{directory}/{prefix}-')
        for split, prefix in (('train', 'train'), ('test', 't10k'))
    }

  def _generate_examples(self, start):
    images = idx.read(f'{start}images-idx3-ubyte.gz')
    labels = idx.read(f'{start}labels-idx1-ubyte.gz')
    tfds_sets.check_images(images, labels, (28, 28), f'{start}*')
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
      # TFDS would encode an array with TensorFlow; bytes are stored as they
      # are.
      encoded = io.BytesIO()
      Image.fromarray(image).save(encoded, 'PNG')
      encoded.seek(0)
      yield index, {'image': encoded, 'label': int(label)}


def prepare(data_dir: str | os.PathLike[str], idx_dir: str | os.PathLike[str]):
  """Writes TFDS's `mnist` under `data_dir` from the IDX files in `idx_dir`."""
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
