"""Data sets of TensorFlow Datasets, read without TensorFlow.

A source is named 'tfds:<name>', as TFDS names its sets: 'tfds:fashion_mnist',
'tfds:wmt16_translate/de-en'. TFDS's supervised keys say which features are
input and target. A copy that TFDS has prepared in the format array_record is
read; where there is none, TFDS downloads it if it can.
"""

from collections.abc import Mapping
import io
from typing import Any, NamedTuple

import numpy as np

from rnnzoo.tasks import fields

PREFIX = 'tfds:'


class Examples(NamedTuple):
  """The examples of a split."""

  inputs: list[Any]  # The inputs as TFDS gives them, images decoded.
  targets: list[Any]  # The targets as TFDS gives them.


class Set(NamedTuple):
  """A data set."""

  # 'train', and 'validation' and 'test' where there are such.
  splits: Mapping[str, Examples]
  input: Any  # TFDS's feature of the inputs.
  target: Any  # TFDS's feature of the targets.
  name: str  # The set's name with its version.


def is_source(source: str) -> bool:
  """Returns whether a source names a set of TFDS."""
  return source.startswith(PREFIX) and len(source) > len(PREFIX)


def read(source: str, data_dir: str) -> Set:
  """Returns the examples of a set that has inputs and targets.

  The source is 'tfds:<name>'.
  """
  # Both are slow to import, and seldom needed.
  import tensorflow_datasets as tfds

  name = source.removeprefix(PREFIX)
  # TFDS would make a folder of that name.
  name_of_field = 'config.data.data_dir'
  place = fields.expand_directory(data_dir, name_of_field) if data_dir else None
  try:
    builder = tfds.builder(name, data_dir=place, file_format='array_record')
    keys = builder.info.supervised_keys
    if not keys or len(keys) < 2 or not all(isinstance(k, str) for k in keys):
      raise ValueError(
          f'it has the supervised keys {keys}, but one for inputs and one for'
          ' targets are needed'
      )
    tfds.disable_progress_bar()
    builder.download_and_prepare()
    if 'train' not in builder.info.splits:
      raise ValueError(f'it has the splits {[*builder.info.splits]}, no train')
    kinds = [builder.info.features[key] for key in keys[:2]]
    images = [
        key
        for key, kind in zip(keys, kinds, strict=False)
        if isinstance(kind, tfds.features.Image)
    ]
    splits = {}
    for split in ('train', 'validation', 'test'):
      if split in builder.info.splits:
        examples = builder.as_data_source(
            split,
            decoders=dict.fromkeys(images, tfds.decode.SkipDecoding()),
        )
        rows = examples.__getitems__(range(len(examples)))
        for row in rows:
          # [height, width, channels], of gray images too.
          row.update({key: np.atleast_3d(_pixels(row[key])) for key in images})
        splits[split] = Examples(*([row[k] for row in rows] for k in keys[:2]))
  except MemoryError:
    raise
  except Exception as error:  # TFDS and its readers raise many kinds.
    # TFDS lists all the sets that it has.
    text = ' '.join(str(error).partition('Available datasets')[0].split())[:300]
    raise ValueError(
        f"config.data.source={source!r} cannot be read: {text}; 'tfds build"
        f" {name} --file_format=array_record' prepares a set, and"
        ' config.data.data_dir says where it is'
    ) from error
  return Set(splits, kinds[0], kinds[1], builder.info.full_name)


def _pixels(image: Any) -> np.ndarray:
  """Returns the pixels of an encoded image."""
  from PIL import Image  # Slow to import, and seldom needed.

  return np.asarray(Image.open(io.BytesIO(image)))
