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

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields
from rnnzoo.tasks.images import cifar_files
from rnnzoo.tasks.images import smnist

SEQUENCES = ('row', 'pixel', 'permuted', 'noise_padded')


class SequentialCifar(smnist.SequentialImages):
  """Classifies color images that are read as sequences.

  Classes are 'airplane' to 'truck', or digits. `splits` have 'index' int32 [N]
  as well, which image of its split it is. The noise is not stored; in
  evaluation an image's noise never changes.
  """

  rules: fields.Rules = {
      **smnist.DATA_RULES,
      'source': fields.one_of(cifar_files.SOURCES),
      'sequence': fields.one_of(SEQUENCES),
      'num_steps': fields.integer(1, 10**6),
      'noise_seed': fields.seed(),
  }

  def _load(self):
    data = self._data
    if data.sequence != 'noise_padded':
      unread = {'num_steps': 1000, 'noise_seed': 0}
      fields.check_unread(data, unread, 'sequence')
    images = cifar_files.load(data)
    height = images.train_images.shape[1]
    if data.sequence == 'noise_padded' and data.num_steps < height:
      raise ValueError(
          f'config.data.num_steps must be at least {height}, the rows of an'
          f' image; got {data.num_steps}'
      )
    return images

  def _find_scaling(self, images):
    channels = np.split(
        images / np.float32(self._white), images.shape[-1], axis=-1
    )
    name = self._data.scaling
    pairs = [smnist.scaling(name, channel) for channel in channels]
    # A step has the channels of one pixel, or of a row's.
    repeats = self._features // len(pairs)
    shift, scale = np.tile(np.array(pairs, np.float32).T, repeats)
    return shift, scale

  def _examples(self, images, labels):
    index = np.arange(len(images), dtype=np.int32)
    return {**super()._examples(images, labels), 'index': index}

  def describe(self):
    return {**super().describe(), 'class_names': list(self.class_names)}

  def check_inputs(self, inputs: Any) -> Any:
    """Returns inputs of `predict`, 'inputs' uint8 [B, T, in] among them.

    Args:
      inputs: integers from 0, black, to 255, white (16 for a run on digits):
        images [B, height, width, channels], which the task reads as sequences
        itself, or sequences [B, T, in] as in `splits`. Or a dict of 'inputs',
        which are these, and 'index' int [B], by which an image gets its noise.
        Only config.data.sequence='noise_padded' needs the index.
    """
    takes_noise = self._data.sequence == 'noise_padded'
    needed = ('inputs', 'index') if takes_noise else ('inputs',)
    names = ('inputs', 'index', 'label')
    given = array_checks.by_name(inputs, names, needed)
    found = {'inputs': super().check_inputs(given['inputs'])}
    if takes_noise:
      found['index'] = array_checks.integers(
          given['index'],
          'index',
          len(found['inputs']),
          2**31 - 1,
          least=0,
          of=', by which an image gets its noise',
          row='image',
      )
    return found

  def _completed(self, x, inputs, rngs):
    if self._data.sequence != 'noise_padded':
      return x
    count, height, features = x.shape
    shape = (self._data.num_steps - height, features)
    if rngs is not None:
      noise = jax.random.normal(rngs.dropout(), (count, *shape))
    else:
      key = jax.random.key(self._data.noise_seed)
      # A function of the image, not of its batch.
      keys = jax.vmap(jax.random.fold_in, (None, 0))(key, inputs['index'])
      noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
    return jnp.concatenate([x, noise], axis=1)
