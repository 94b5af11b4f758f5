"""Sequential MNIST: which digit is it, when the image comes piece by piece?

Three readings of an image of height x width pixels (28 x 28 for MNIST):

  row       T = height steps of width features;
  pixel     T = height * width steps of one pixel, row after row;
  permuted  the same pixels in one fixed random order, which takes the nearby
            structure away: everything that helps is far apart in time.

References:
  Le, Jaitly, Hinton, A simple way to initialize recurrent networks of rectified
  linear units, 2015 (pixel by pixel, and permuted).
"""

from collections.abc import Mapping
import difflib
import functools
import types
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

import rnnzoo
from rnnzoo import models
from rnnzoo.tasks import fields
from rnnzoo.tasks import mnist

SEQUENCES = ('row', 'pixel', 'permuted')


def _is_implementation(value: Any) -> bool:
  """Returns whether it is a name, names or None; the layer knows which."""
  names = value if isinstance(value, list | tuple) else (value,)
  return value is None or all(
      isinstance(name, str) and len(name) < 80 for name in names
  )


# Rules for `config.data` and `config.model`. The greatest sizes are far beyond
# what a device can hold, and still small enough for a sentence instead of a
# process that never comes back.
_DATA_RULES: Mapping[str, fields.Rule] = types.MappingProxyType(
    {
        'source': fields.one_of(mnist.SOURCES),
        'digits_batch_size': fields.integer(1),
        'manual_dir': fields.text(),
        'data_dir': fields.text(),
        'sequence': fields.one_of(SEQUENCES),
        'permutation_seed': fields.seed(),
        'validation_fraction': fields.number(0, 1, above=True, below=True),
        'split_seed': fields.seed(),
    }
)
_MODEL_RULES: Mapping[str, fields.Rule] = types.MappingProxyType(
    {
        'layer': fields.text(),
        'features': fields.integer(1, 2**16),
        'num_layers': fields.integer(1, 100),
        'dropout_rate': fields.number(0, 1, below=True),
        'share_dropout_over_time': fields.flag(),
        'norm': fields.one_of(('layer', 'batch'), optional=True),
        'residual': fields.flag(),
        'dtype': fields.text(optional=True),
        'implementation': fields.Rule(
            'a name, several names to try in turn, or None', _is_implementation
        ),
        'options': fields.section(),
        'last_layer_options': fields.section(),
    }
)

# Arguments that a layer has from `config.model` itself.
_OF_MODEL = ('dtype', 'features', 'implementation')

# Values of a layer's *_init options in a config, which holds no functions.
_INITIALIZERS: Mapping[str, jax.nn.initializers.Initializer] = (
    types.MappingProxyType(
        {
            'lecun_normal': jax.nn.initializers.lecun_normal(),
            'orthogonal': jax.nn.initializers.orthogonal(),
            'xavier_uniform': jax.nn.initializers.xavier_uniform(),
            'zeros': jax.nn.initializers.zeros,
        }
    )
)


class SequentialMnist:
  """Classifies images of digits that are read as sequences.

  Attributes:
    dataset: 'MNIST', or the name of what stands in for it.
    splits: 'train', 'validation', 'test', each with 'inputs' uint8 [N, T, in]
      and 'label' int32 [N].
    batch_size: `config.batch_size`, or less for digits.
    class_names: '0' to '9'.
  """

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data.

    Args:
      config: a config with `data` and `model`, as in `configs/base_smnist.py`.

    Raises:
      ValueError: a field has a value that does not exist.
      FileNotFoundError: data that the config names are missing.
      ConnectionError: the network went away in the middle of a download.
    """
    fields.check(config.data, _DATA_RULES, 'config.data')
    fields.check(config.model, _MODEL_RULES, 'config.model')
    find_layer(config.model.layer)  # Before the data, which take a while.
    self._model = config.model
    images = mnist.load(config.data)
    self._white = images.white
    self.dataset = images.name
    self.batch_size = config.batch_size
    if images.name == mnist.DIGITS_NAME:
      self.batch_size = min(self.batch_size, config.data.digits_batch_size)
      print(f'data: {images.name}, in batches of {self.batch_size}', flush=True)
    self.class_names = tuple(str(digit) for digit in range(10))
    train, validation = split_validation(
        len(images.train_labels),
        config.data.validation_fraction,
        config.data.split_seed,
    )
    inputs = to_sequences(
        images.train_images, config.data.sequence, config.data.permutation_seed
    )
    self.splits: Mapping[str, Mapping[str, jax.Array | np.ndarray]] = {
        'train': {'inputs': inputs[train], 'label': images.train_labels[train]},
        'validation': {
            'inputs': inputs[validation],
            'label': images.train_labels[validation],
        },
        'test': {
            'inputs': to_sequences(
                images.test_images,
                config.data.sequence,
                config.data.permutation_seed,
            ),
            'label': images.test_labels,
        },
    }

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the classifier that `config.model` describes.

    Raises:
      ValueError: the layer or one of its options does not exist.
    """
    model = self._model
    layer = find_layer(model.layer)
    dtype = None if model.dtype is None else _find_dtype(model.dtype)
    options = _layer_options(model, 'options')
    last = options | _layer_options(model, 'last_layer_options')
    factories = [functools.partial(layer, **options)] * (model.num_layers - 1)
    factories.append(functools.partial(layer, **last))
    try:
      backbone = rnnzoo.Stack(
          factories,
          self.splits['train']['inputs'].shape[-1],
          model.features,
          num_layers=model.num_layers,
          dropout_rate=model.dropout_rate,
          share_dropout_over_time=model.share_dropout_over_time,
          norm=model.norm,
          residual=model.residual,
          dtype=dtype,
          implementation=model.implementation,
          rngs=rngs,
      )
    except (ValueError, NotImplementedError):
      raise
    except Exception as error:
      # An option that the layer does not have, or not with such a value.
      raise ValueError(f'{model.layer} cannot be built: {error}') from error
    return models.SequenceClassifier(backbone, len(self.class_names), rngs=rngs)

  def evaluate(
      self,
      model: nnx.Module,
      examples: Mapping[str, jax.Array | np.ndarray],
      rngs: nnx.Rngs | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (losses [B] float32, predicted digits [B] int32) of a batch.

    Args:
      model: what `build_model` returned.
      examples: 'inputs' uint8 [B, T, in] and 'label' int32 [B].
      rngs: the source of dropout masks in training, None in evaluation.
    """
    inputs = examples['inputs'].astype(jnp.float32) / self._white
    logits = model(inputs, rngs=rngs).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, examples['label']
    )
    return losses, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def find_layer(name: str) -> type[rnnzoo.RecurrentLayer]:
  """Returns the layer class of that name.

  Raises:
    ValueError: there is none; the message says which there are.
  """
  if name in rnnzoo.LAYERS:
    return rnnzoo.LAYERS[name]
  lower = {known.lower(): known for known in rnnzoo.LAYERS}
  close = difflib.get_close_matches(name.lower(), lower, n=1)
  hint = f'did you mean {lower[close[0]]!r}? ' if close else ''
  raise ValueError(
      f'unknown layer {fields.shorten(name)}: {hint}known layers are'
      f' {", ".join(rnnzoo.LAYERS)}'
  )


def _find_dtype(name: str) -> jnp.dtype:
  """Returns the dtype of that name, which JAX must not replace silently."""
  try:
    dtype = jnp.dtype(name)
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'config.model.dtype is {fields.shorten(name)}, which is no dtype;'
        " 'bfloat16' is one"
    ) from error
  computed = jax.dtypes.canonicalize_dtype(dtype)
  if computed != dtype:
    raise ValueError(
        f'config.model.dtype is {name!r}, for which JAX takes {computed} unless'
        ' JAX_ENABLE_X64=1 is in the environment'
    )
  return dtype


def _layer_options(
    model: ml_collections.ConfigDict, field: str
) -> dict[str, Any]:
  """Returns the keyword arguments that a config has for its layer.

  Args:
    model: `config.model`.
    field: 'options' or 'last_layer_options'.
  """
  name = f'config.model.{field}.{model.layer}'
  options = model[field].get(model.layer, {})
  if not isinstance(options, Mapping | ml_collections.ConfigDict):
    raise ValueError(f'{name} must be a section with fields; got {options!r}')
  arguments = dict(options.items())
  fields.check_numbers(arguments, name)
  if elsewhere := [key for key in _OF_MODEL if key in arguments]:
    raise ValueError(
        f'{name}.{elsewhere[0]} would be ignored; config.model.{elsewhere[0]}'
        ' is for all layers'
    )
  for option, value in arguments.items():
    if option.endswith('_init'):
      rule = fields.one_of(_INITIALIZERS)
      fields.check(options, {option: rule}, name)
      arguments[option] = _INITIALIZERS[value]
  return arguments


def split_validation(
    num_examples: int, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (training indices, validation indices), which do not overlap.

  Args:
    num_examples: how many there are to split.
    fraction: how much of them validates, rounded to a whole example.
    seed: of `np.random.RandomState`, whose stream never changes, so that the
      split is the same on every machine.

  Raises:
    ValueError: one of the two would be empty.
  """
  num_validation = round(num_examples * fraction)
  if not 0 < num_validation < num_examples:
    raise ValueError(
        f'a validation_fraction of {fraction} leaves an empty split of'
        f' {num_examples} examples'
    )
  order = np.random.RandomState(seed).permutation(num_examples)
  return np.sort(order[num_validation:]), np.sort(order[:num_validation])


def permutation(num_pixels: int, seed: int) -> np.ndarray:
  """Returns the fixed order of the pixels, [num_pixels].

  It is `np.random.RandomState(seed).permutation(num_pixels)`; step t shows the
  pixel of that index. Papers seldom publish theirs, and accuracies differ by
  little between random ones.
  """
  return np.random.RandomState(seed).permutation(num_pixels)


def to_sequences(
    images: np.ndarray, sequence: str, permutation_seed: int
) -> np.ndarray:
  """Returns images [N, height, width] as sequences [N, T, in]."""
  if sequence == 'row':
    return images
  pixels = images.reshape(len(images), -1, 1)
  if sequence == 'permuted':
    pixels = pixels[:, permutation(pixels.shape[1], permutation_seed)]
  return pixels
