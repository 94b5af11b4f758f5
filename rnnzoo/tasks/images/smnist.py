"""Sequential MNIST: which digit is it, when the image comes piece by piece?

Four readings of an image of height x width pixels (28 x 28 for MNIST):

  row       T = height steps of width features;
  pixel     T = height * width steps of one pixel, row after row;
  permuted  these pixels in one fixed random order, which takes the nearby
            structure away: everything that helps is far apart in time;
  bit_reversed  these pixels in the order of their indices' reversed bits, which
            S4 and S5 call permuted: pixels far apart in time are neighbours.

References:
  Le, Jaitly, Hinton, A simple way to initialize recurrent networks of rectified
  linear units, 2015 (pixel by pixel, and permuted).
"""

import abc
from collections.abc import Mapping
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import classification
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.images import mnist
from rnnzoo.tasks.series import sequence_arrays

SEQUENCES = ('row', 'pixel', 'permuted', 'bit_reversed')
SCALINGS = ('minmax', 'standard', 'symmetric')
# Sequences whose steps are rows. The others' steps are pixels.
ROWS = ('row', 'noise_padded')

# Rules for `config.data`, but for the sources and sequences of a task.
DATA_RULES: fields.Rules = {
    'digits_batch_size': fields.integer(1),
    'manual_dir': fields.text(),
    'scaling': fields.one_of(SCALINGS),
    'permutation_seed': fields.seed(),
    'validation_fraction': fields.number(0, 1, above=True, below=True),
    'split_seed': fields.seed(),
}


class SequentialImages(protocol.ConfigTask, classification.Classification):
  """Classifies images that are read as sequences.

  Attributes:
    splits: 'train', 'validation', 'test', each with 'inputs' uint8 [N, T, in]
      and 'label' int32 [N].
    batch_size: `config.batch_size`, or less for digits.
  """

  model_rules = classification.RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `base_smnist.py` or `base_cifar.py`.

    Raises:
      ConnectionError: MNIST must be downloaded, and cannot be.
    """
    self._set_up(config)  # Before the data, which take a while.
    data = config.data
    if data.sequence != 'permuted':
      fields.check_unread(data, {'permutation_seed': 0}, 'sequence')
    images = self._load()
    self.dataset = images.name
    self.class_names = images.class_names
    if images.white == mnist.DIGITS_WHITE:
      self.batch_size = min(self.batch_size, data.digits_batch_size)
      print(f'data: {images.name}, in batches of {self.batch_size}', flush=True)
    self._white = images.white
    self._image = images.train_images.shape[1:]
    alike = np.zeros(len(images.train_labels), bool)
    size = round(len(alike) * data.validation_fraction)
    train, validation = sequence_arrays.split_off(alike, size, data.split_seed)
    pixels, labels = images.train_images, images.train_labels
    self._shift, self._scale = self._find_scaling(pixels[train])
    self.splits: Mapping[str, protocol.Examples] = {
        'train': self._examples(pixels[train], labels[train]),
        'validation': self._examples(pixels[validation], labels[validation]),
        'test': self._examples(images.test_images, images.test_labels),
    }

  @abc.abstractmethod
  def _load(self) -> mnist.Images:
    """Returns the images that the config names."""

  @abc.abstractmethod
  def _find_scaling(self, images: np.ndarray) -> tuple[Any, Any]:
    """Returns (shift, scale) of the pixels of the training split."""

  def _examples(self, images, labels) -> dict[str, np.ndarray]:
    return {'inputs': self._sequences(images), 'label': labels}

  def _sequences(self, images: np.ndarray) -> np.ndarray:
    data = self._data
    return to_sequences(images, data.sequence, data.permutation_seed)

  @property
  def _features(self) -> int:
    """The features of a step: the channels of a pixel, or of a row's pixels."""
    return math.prod(self._image[1 if self._data.sequence in ROWS else 2 :])

  def describe(self):
    return {
        'image': list(self._image),
        'white': self._white,
        'shift': np.asarray(self._shift).tolist(),
        'scale': np.asarray(self._scale).tolist(),
    }

  def _restore(self, described):
    self.class_names = tuple(described.get('class_names', '0123456789'))
    self._white = described['white']
    self._image = tuple(described['image'])
    self._shift, self._scale = described['shift'], described['scale']

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    backbone = backbones.build(self._model, self._features, rngs)
    classes = len(self.class_names)
    return models.SequenceClassifier(
        backbone, classes, pooling=self.pooling, rngs=rngs
    )

  def evaluate(
      self,
      model: nnx.Module,
      examples: protocol.Examples,
      rngs: nnx.Rngs | None = None,
  ) -> protocol.Evaluation:
    """Returns cross entropies, hits and predicted classes of a batch."""
    logits = self.logits(model, examples, rngs)
    smoothing = self.label_smoothing if rngs is not None else 0.0
    return classification.evaluation(logits, examples['label'], smoothing)

  def check_inputs(self, inputs: Any) -> Any:
    """Returns inputs of `predict`, uint8 [B, T, in].

    Args:
      inputs: integers from 0, black, to 255, white (16 for a run on digits):
        images [B, height, width], which the task reads as sequences itself, or
        sequences [B, T, in] as in `splits`.
    """
    steps = math.prod(self._image) // self._features, self._features
    are_steps = np.shape(inputs)[1:] == steps
    # Floats from 0 to 1 would pass for images that are nearly black.
    pixels = array_checks.numbers(
        inputs,
        'inputs',
        ('B', *(steps if are_steps else self._image)),
        kinds='iu',
        noun=f'integers from 0, black, to {self._white}, white,',
        why=f' or [B, {steps[0]}, {steps[1]}]',
    )
    if pixels.min() < 0 or pixels.max() > self._white:
      raise ValueError(
          f'inputs must be integers from 0, black, to {self._white}, white; got'
          f' {pixels.min()} to {pixels.max()}'
      )
    pixels = pixels.astype(np.uint8)
    return pixels if are_steps else self._sequences(pixels)

  def logits(self, model, inputs, rngs=None) -> jax.Array:
    """Returns logits [B, classes] of sequences [B, T, in] as in `splits`."""
    return model(self.model_inputs(inputs, rngs), rngs=rngs)

  def model_inputs(self, inputs, rngs=None) -> jax.Array:
    """Returns scaled pixels, float32 [B, T, in]."""
    if not isinstance(inputs, Mapping):
      inputs = {'inputs': inputs}
    x = jnp.asarray(inputs['inputs'], jnp.float32) / self._white
    x = (x - np.float32(self._shift)) / np.float32(self._scale)
    return self._completed(x, inputs, rngs)

  def _completed(self, x, inputs, rngs):
    """Returns the sequences that a model sees, of scaled pixels."""
    del inputs, rngs
    return x


class SequentialMnist(SequentialImages):
  """Classifies images of digits, '0' to '9', of MNIST or its stand-in."""

  rules: fields.Rules = {
      **DATA_RULES,
      'data_dir': fields.text(),
      'source': fields.one_of(mnist.SOURCES),
      'sequence': fields.one_of(SEQUENCES),
  }

  def _load(self):
    return mnist.load(self._data)

  def _find_scaling(self, images):
    pixels = self._sequences(images) / self._white
    return scaling(self._data.scaling, pixels)


def scaling(name: str, pixels: np.ndarray) -> tuple[float, float]:
  """Returns (shift, scale): a pixel becomes (pixel - shift) / scale.

  The name is in `SCALINGS`; pixels, of the training split, are from 0 to 1.
  """
  if name == 'minmax':
    return 0.0, 1.0
  if name == 'symmetric':
    return 0.5, 0.5
  mean, deviation = float(np.mean(pixels)), float(np.std(pixels))
  if not deviation:
    raise ValueError(
        "config.data.scaling must not be 'standard' for images whose pixels are"
        f' all {mean:g}'
    )
  return mean, deviation


def permutation(num_pixels: int, seed: int) -> np.ndarray:
  """Returns the fixed order of the pixels, [num_pixels].

  It is `np.random.RandomState(seed).permutation(num_pixels)`; step t shows the
  pixel of that index. Papers seldom publish theirs, and accuracies differ by
  little between random ones.
  """
  return np.random.RandomState(seed).permutation(num_pixels)


def bit_reversal(num_pixels: int) -> np.ndarray:
  """Returns the indices of pixels, ordered by their reversed bits."""
  bits = (num_pixels - 1).bit_length()
  order = [int(f'{i:0{bits}b}'[::-1], 2) for i in range(2**bits)]
  return np.array([i for i in order if i < num_pixels])


def to_sequences(
    images: np.ndarray, sequence: str, permutation_seed: int
) -> np.ndarray:
  """Returns images [N, height, width, ...] as sequences [N, T, in]."""
  count, height, width = images.shape[:3]
  if sequence in ROWS:
    return images.reshape(count, height, -1)
  pixels = images.reshape(count, height * width, -1)
  if sequence == 'permuted':
    pixels = pixels[:, permutation(pixels.shape[1], permutation_seed)]
  elif sequence == 'bit_reversed':
    pixels = pixels[:, bit_reversal(pixels.shape[1])]
  return pixels
