"""Backbones: the recurrent layers that `config.model` describes.

Every task whose model has a stack of layers checks `config.model` with `check`
and makes the stack with `build`.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections

import rnnzoo
from rnnzoo import models
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer
from rnnzoo.tasks import fields


def _is_implementation(value: Any) -> bool:
  """Returns whether it is a name, names or None; the layer knows which."""
  names = value if isinstance(value, list | tuple) else (value,)
  return value is None or all(
      isinstance(name, str) and len(name) < 80 for name in names
  )


# Rules for `config.model`. The greatest sizes are far beyond a device's memory,
# and still so small that a user gets a sentence, not a process that never
# returns.
RULES: fields.Rules = {
    'layer': fields.text(),
    'features': fields.integer(1, 2**16),
    'num_layers': fields.integer(1, 100),
    'dropout_rate': fields.number(0, 1, below=True),
    'dropconnect_rate': fields.number(0, 1, below=True),
    'share_dropout_over_time': fields.flag(),
    'norm': fields.optional(fields.one_of(('layer', 'batch'))),
    'norm_momentum': fields.optional(
        fields.number(0, 1, above=True, below=True)
    ),
    'norm_first': fields.flag(),
    'residual': fields.flag(),
    'dense': fields.flag(),
    'dtype': fields.optional(fields.text()),
    'implementation': fields.Rule(
        'a name, several names to try in turn, or None', _is_implementation
    ),
    'options': fields.section(),
    'last_layer_options': fields.section(),
}

_OF_TASK = 'the task sets it; without it the layer can be built'
# Arguments that no options may have, and their source.
_NO_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(('cell', 'in_features', 'rngs'), _OF_TASK),
    **{
        name: f'config.model.{name} is for all layers'
        for name in ('dtype', 'features', 'implementation')
    },
}

# Values of a layer's *_init options in a config, which holds no functions.
_INITIALIZERS: Mapping[str, jax.nn.initializers.Initializer] = {
    'lecun_normal': jax.nn.initializers.lecun_normal(),
    'normal': jax.nn.initializers.normal(),
    'orthogonal': jax.nn.initializers.orthogonal(),
    'xavier_uniform': jax.nn.initializers.xavier_uniform(),
    'xavier_uniform_fused': initializers.XavierUniformFused(),
    'zeros': jax.nn.initializers.zeros,
}


def check(model: ml_collections.ConfigDict) -> None:
  """Raises ValueError for fields of all layers that cannot be.

  A task calls it before it reads data, which takes a while.
  """
  fields.check(model, RULES, 'config.model')
  find_layer(model.layer)
  if model.norm != 'batch' and model.norm_momentum is not None:
    raise ValueError(
        f'config.model.norm_momentum={model.norm_momentum} needs'
        f" config.model.norm='batch', and that is {model.norm!r};"
        ' --config.model.norm_momentum=None would work'
    )
  if model.norm_first and (model.norm is None or model.dense):
    raise ValueError(
        'config.model.norm_first=True needs a config.model.norm, and'
        ' config.model.dense=False; --config.model.norm_first=False would work'
    )
  if model.dense and model.residual:
    raise ValueError(
        'a stack is dense or residual, not both; config.model.dense or'
        ' config.model.residual must be False'
    )


def build(
    model: ml_collections.ConfigDict,
    in_features: int,
    rngs: nnx.Rngs,
    stack: Callable[..., sequence_layer.SequenceLayer] | None = None,
    have_timespans: bool = False,
) -> sequence_layer.SequenceLayer:
  """Returns a stack of layers.

  A warning tells, once, of dropout that it has no place for.

  Args:
    model: `config.model`, as in `configs/base.py`, checked by `check`.
    in_features: the features of its inputs.
    rngs: the source of parameters.
    stack: function with `rnnzoo.Stack`'s arguments that makes it; None for
      `Stack`, or for `rnnzoo.DenseStack` where `config.model.dense` is set.
    have_timespans: whether the last feature may be the time between steps.
  """
  layer = find_layer(model.layer)
  options = _layer_options(model, 'options')
  last = options | _layer_options(model, 'last_layer_options')
  factories = [functools.partial(layer, **options)] * (model.num_layers - 1)
  factories.append(functools.partial(layer, **last))
  if stack is None and model.dropout_rate and model.num_layers == 1:
    _warn_once(
        f'config.model.dropout_rate={model.dropout_rate} has no effect: dropout'
        ' stands between layers, and config.model.num_layers is 1.'
    )
  if stack is None and model.dense:
    stack = rnnzoo.DenseStack
  else:
    stack = functools.partial(stack or rnnzoo.Stack, residual=model.residual)
    if model.norm_first:
      stack = functools.partial(stack, norm_first=True)
  with _one_sentence(model):
    made: Any = stack(
        factories,
        in_features,
        model.features,
        num_layers=model.num_layers,
        dropout_rate=model.dropout_rate,
        share_dropout_over_time=model.share_dropout_over_time,
        norm=model.norm,
        norm_momentum=model.norm_momentum,
        dtype=find_dtype(model),
        implementation=model.implementation,
        rngs=rngs,
    )
  levels = getattr(made, 'layers', ())  # A language model has blocks.
  reads = any(level.reads_timespans for level in levels)
  if reads and not have_timespans:
    raise ValueError(
        f'{model.layer} reads the time between steps from the last feature, and'
        ' this task has something else there;'
        f' config.model.options.{model.layer}.timespans=False would work'
    )
  return made


@functools.cache
def _warn_once(message: str) -> None:
  """Logs a message the first time; models are built many times in a run."""
  logging.warning('%s', message)


def build_language_model(
    model: ml_collections.ConfigDict,
    num_tokens: int,
    rngs: nnx.Rngs,
    make: Callable[..., models.LanguageModel] = models.LanguageModel,
    **options: Any,
) -> models.LanguageModel:
  """Returns a language model whose blocks have the layer of `config.model`.

  Args:
    model: `config.model`, checked by `check`; each of its `num_layers` is a
      block.
    num_tokens: the number of tokens in the vocabulary.
    rngs: the source of parameters.
    make: the model's class, or a function with its arguments.
    **options: more of these arguments.
  """
  names = 'norm', 'norm_momentum', 'norm_first', 'residual', 'dense'
  unused = {name: model[name] for name in (*names, 'share_dropout_over_time')}
  unused['last_layer_options'] = _layer_options(model, 'last_layer_options')
  for field, given in unused.items():
    if given:
      raise ValueError(
          f'config.model.{field} would be ignored by a language model, whose'
          f' blocks have norms and residuals of their own; got {given!r}'
      )
  layer = functools.partial(
      find_layer(model.layer),
      dtype=find_dtype(model),
      implementation=model.implementation,
      **_layer_options(model, 'options'),
  )
  with _one_sentence(model):
    return make(
        layer,
        num_tokens,
        model.features,
        num_blocks=model.num_layers,
        dropout_rate=model.dropout_rate,
        dtype=find_dtype(model),
        rngs=rngs,
        **options,
    )


@contextlib.contextmanager
def _one_sentence(model: ml_collections.ConfigDict) -> Iterator[None]:
  """Says in a sentence that a layer cannot be built with its options."""
  try:
    yield
  except (ValueError, NotImplementedError, MemoryError):
    raise
  except Exception as error:
    # An option that the layer does not have, or not with such a value.
    raise ValueError(f'{model.layer} cannot be built: {error}') from error


def find_layer(name: str) -> sequence_layer.LayerFactory:
  """Returns the layer class of that name."""
  known: dict[str, Any] = {**rnnzoo.LAYERS, 'GriffinBlock': rnnzoo.GriffinBlock}
  if name in known:
    return known[name]
  hint = fields.did_you_mean(name, known)
  raise ValueError(
      f'unknown layer {fields.shorten(name)}: {hint and f"{hint} "}known'
      f' layers are {", ".join(known)}; a layer of another project'
      ' needs rnnzoo.register'
  )


def find_dtype(model: ml_collections.ConfigDict) -> jnp.dtype | None:
  """Returns the dtype to compute in, None for the parameters' dtype."""
  if model.dtype is None:
    return None
  try:
    dtype = jnp.dtype(model.dtype)
    is_computed = jax.dtypes.canonicalize_dtype(dtype) == dtype
  except (TypeError, ValueError):
    is_computed = False
  if not is_computed or not dtype.isnative:  # '>f2', say.
    raise ValueError(
        "config.model.dtype must be a dtype that JAX computes in, as 'bfloat16'"
        " is, and 'float64' with JAX_ENABLE_X64=1 in the environment; got"
        f' {fields.shorten(model.dtype)}'
    )
  return dtype


def _layer_options(
    model: ml_collections.ConfigDict, field: str
) -> dict[str, Any]:
  """Returns the arguments of a layer in 'options' or 'last_layer_options'."""
  name = f'config.model.{field}.{model.layer}'
  options = model[field].get(model.layer, {})
  if not isinstance(options, Mapping | ml_collections.ConfigDict):
    raise ValueError(f'{name} must be a section with fields; got {options!r}')
  arguments = dict(options.items())
  for option, value in arguments.items():
    if option in _NO_OPTIONS:
      raise ValueError(
          f'{name}.{option} would be ignored: {_NO_OPTIONS[option]}'
      )
    if option.endswith('_init'):
      fields.check(options, {option: fields.one_of(_INITIALIZERS)}, name)
      arguments[option] = _INITIALIZERS[value]
  return arguments
