"""Sequential CIFAR-10: classifies an image that comes piece by piece.

Four readings of an image of height x width pixels (32 x 32) with 3 channels:

  row            T = height steps of 3 width features;
  pixel          T = height * width steps of 3 features, row after row;
  permuted       these pixels in one fixed random order;
  noise_padded   the rows, and after them Gaussian noise up to T = 1000 steps,
                 over which the image has to be kept.

References:
  Chang, Chen, Haber, Chi, AntisymmetricRNN: a dynamical system view on
  recurrent neural networks, 2019, sections 5.2 and 5.3.
"""

from collections.abc import Mapping
import math
import types
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import array_inputs
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.images import cifar_files
from rnnzoo.tasks.images import image_inputs
from rnnzoo.tasks.images import smnist

SEQUENCES = ('row', 'pixel', 'permuted', 'noise_padded')

_DATA_RULES: Mapping[str, fields.Rule] = types.MappingProxyType(
    {
        'source': fields.one_of(cifar_files.SOURCES),
        'digits_batch_size': fields.integer(1),
        'manual_dir': fields.text(),
        'data_dir': fields.text(),
        'sequence': fields.one_of(SEQUENCES),
        'num_steps': fields.integer(1, 10**6),
        'noise_seed': fields.seed(),
        'scaling': fields.one_of(smnist.SCALINGS),
        'permutation_seed': fields.seed(),
        'validation_fraction': fields.number(0, 1, above=True, below=True),
        'split_seed': fields.seed(),
    }
)


class SequentialCifar(protocol.Classification):
  """Classifies color images that are read as sequences.

  Attributes:
    dataset: 'CIFAR-10', or the name of its stand-in.
    splits: 'train', 'validation', 'test', each with 'inputs' uint8 [N, T, in],
      'index' int32 [N], which image of its split it is, and 'label' int32 [N].
      The noise is not stored.
    batch_size: `config.batch_size`, or less for digits.
    class_names: 'airplane' to 'truck', or '0' to '9'.
  """

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data.

    Args:
      config: a config with `data` and `model`, as in `configs/base_cifar.py`.

    Raises:
      ValueError: a field has a value that does not exist, or data are damaged.
      FileNotFoundError: data that the config names are missing.
    """
    data = config.data
    self._set_up(config)
    if data.sequence != 'permuted':
      fields.check_unread(data, {'permutation_seed': 0}, 'sequence')
    if data.sequence != 'noise_padded':
      unread = {'num_steps': 1000, 'noise_seed': 0}
      fields.check_unread(data, unread, 'sequence')
    images = cifar_files.load(data)
    self.dataset = images.name
    self.batch_size = config.batch_size
    self.class_names = cifar_files.CLASS_NAMES
    if images.name == cifar_files.DIGITS_NAME:
      self.class_names = tuple(map(str, range(10)))
      self.batch_size = min(self.batch_size, data.digits_batch_size)
      print(f'data: {images.name}, in batches of {self.batch_size}', flush=True)
    self._white = images.white
    train, validation = smnist.split_validation(
        len(images.train_labels), data.validation_fraction, data.split_seed
    )
    pixels = images.train_images[train]
    self._image = pixels.shape[1:]
    shift, scale = _scaling(data.scaling, pixels / np.float32(images.white))
    # The features of a step: one pixel's channels, or a row's.
    repeats = pixels.shape[2] if self._reads_rows() else 1
    self._shift, self._scale = np.tile(shift, repeats), np.tile(scale, repeats)
    self.splits: Mapping[str, protocol.Examples] = {
        'train': self._examples(pixels, images.train_labels[train]),
        'validation': self._examples(
            images.train_images[validation], images.train_labels[validation]
        ),
        'test': self._examples(images.test_images, images.test_labels),
    }
    height = pixels.shape[1]
    if data.sequence == 'noise_padded' and data.num_steps < height:
      raise ValueError(
          f'config.data.num_steps must be at least {height}, the rows of an'
          f' image; got {data.num_steps}'
      )

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    fields.check(config.data, _DATA_RULES, 'config.data')
    backbones.check(config.model)
    fields.check(config.model, protocol.RULES, 'config.model')
    self._model, self._data = config.model, config.data
    self.label_smoothing = config.model.label_smoothing

  def describe(self):
    return {
        'class_names': list(self.class_names),
        'image': list(self._image),
        'white': self._white,
        'shift': self._shift.tolist(),
        'scale': self._scale.tolist(),
    }

  @classmethod
  def restore(cls, config, described):
    task = cls.__new__(cls)
    task._set_up(config)
    task.class_names = tuple(described['class_names'])
    task._white = described['white']
    task._image = tuple(described.get('image', cifar_files.SHAPES[task._white]))
    task._shift = np.array(described['shift'], np.float32)
    task._scale = np.array(described['scale'], np.float32)
    return task

  def _reads_rows(self) -> bool:
    return self._data.sequence in ('row', 'noise_padded')

  def _sequences(self, images) -> np.ndarray:
    count, height, width, channels = images.shape
    if self._reads_rows():
      inputs = images.reshape(count, height, width * channels)
    else:
      inputs = images.reshape(count, height * width, channels)
    if self._data.sequence == 'permuted':
      order = smnist.permutation(inputs.shape[1], self._data.permutation_seed)
      inputs = inputs[:, order]
    return inputs

  def _examples(self, images, labels) -> protocol.Examples:
    index = np.arange(len(images), dtype=np.int32)
    return {
        'inputs': self._sequences(images),
        'index': index,
        'label': labels,
    }

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    backbone = backbones.build(self._model, len(self._shift), rngs)
    return models.SequenceClassifier(backbone, len(self.class_names), rngs=rngs)

  def evaluate(
      self,
      model: nnx.Module,
      examples: protocol.Examples,
      rngs: nnx.Rngs | None = None,
  ) -> protocol.Evaluation:
    """Returns cross entropies, hits and predicted classes of a batch.

    In evaluation, without `rngs`, an image's noise never changes.
    """
    logits = self._logits(model, examples, rngs)
    smoothing = self.label_smoothing if rngs is not None else 0.0
    return protocol.evaluation(logits, examples['label'], smoothing)

  def check_inputs(self, inputs: Any) -> Any:
    """Returns inputs of `predict`, 'inputs' uint8 [B, T, in] among them.

    Args:
      inputs: integers from 0, black, to 255, white (16 for a run on digits):
        images [B, height, width, channels], which the task reads as sequences
        itself, or sequences [B, T, in] as in `splits`. Or a dict of 'inputs',
        which are these, and 'index' int [B], by which an image gets its noise.
        Only config.data.sequence='noise_padded' needs the index.

    Raises:
      ValueError: the inputs are anything else, such as floats from 0 to 1.
    """
    takes_noise = self._data.sequence == 'noise_padded'
    if takes_noise or isinstance(inputs, Mapping):
      names = ('inputs', 'index') if takes_noise else ('inputs',)
      array_inputs.check(inputs, names)
    pixels, index = inputs, None
    if isinstance(inputs, Mapping):
      for name in inputs:
        if name not in ('inputs', 'index', 'label'):
          raise ValueError(
              f"inputs must have no keys but 'inputs' and 'index'; got {name!r}"
          )
      pixels, index = inputs['inputs'], inputs.get('index')
    features = len(self._shift)
    steps = math.prod(self._image) // features, features
    pixels = image_inputs.check(pixels, self._image, steps, self._white)
    if pixels.shape[1:] != steps:
      pixels = self._sequences(pixels)
    if not takes_noise:
      return {'inputs': pixels}
    if np.ma.isMaskedArray(index):
      raise ValueError(
          'index must be integers, got a masked array; np.ma.getdata(index)'
          ' takes the mask away'
      )
    index = np.asarray(index)
    if index.dtype.kind not in 'iu' or index.shape != (len(pixels),):
      raise ValueError(
          f'index must be integers [B], here [{len(pixels)}], by which an image'
          f' gets its noise; got {index.dtype} of shape {list(index.shape)}'
      )
    if index.min() < 0 or index.max() >= 2**31:
      raise ValueError(
          f'index must be integers from 0, below 2^31; got {index.min()} to'
          f' {index.max()}'
      )
    return {'inputs': pixels, 'index': index.astype(np.int32)}

  def predict(self, model: nnx.Module, inputs: Any) -> jax.Array:
    """Returns classes, int32 [B], of sequences [B, T, in] as in `splits`.

    Args:
      model: a trained model.
      inputs: the sequences, or a dict of 'inputs' and 'index'.
    """
    if not isinstance(inputs, Mapping):
      inputs = {'inputs': inputs}
    logits = self._logits(model, inputs)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def _logits(self, model, examples, rngs=None) -> jax.Array:
    x = examples['inputs'].astype(jnp.float32) / self._white
    x = (x - self._shift) / self._scale
    if self._data.sequence == 'noise_padded':
      count, height, features = x.shape
      shape = (self._data.num_steps - height, features)
      if rngs is not None:
        noise = jax.random.normal(rngs.dropout(), (count, *shape))
      else:
        key = jax.random.key(self._data.noise_seed)
        # A function of the image, not of its batch.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, examples['index'])
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
      x = jnp.concatenate([x, noise], axis=1)
    return model(x, rngs=rngs)


def _scaling(name: str, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns (shift, scale) of each channel: x becomes (x - shift) / scale.

  Args:
    name: a name in `smnist.SCALINGS`.
    images: the training split, from 0 to 1, [N, height, width, channels].
  """
  channels = np.split(images, images.shape[-1], axis=-1)
  pairs = [smnist.scaling(name, channel) for channel in channels]
  shift, scale = np.array(pairs, np.float32).T
  return shift, scale
