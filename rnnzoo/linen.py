"""The layers of rnnzoo as flax.linen modules.

>>> import jax, jax.numpy as jnp
>>> from rnnzoo import linen
>>> layer = linen.GRU(features=8)
>>> variables = layer.init(jax.random.key(0), jnp.ones((2, 5, 3)))
>>> layer.apply(variables, jnp.ones((2, 5, 3))).shape
(2, 5, 8)
>>> carry, y = layer.apply(variables, jnp.ones((2, 5, 3)), method='unroll')
>>> y.shape
(2, 5, 8)

Methods, arguments and parameters are as in the layers of `rnnzoo`, without
`rngs`, which linen passes itself. `in_features` may be left out: the first
input sets it. `nn.remat(linen.GRU)(features=8)` and linen's other transforms
work.

Names of parameters are str, as linen has them: the level that is layers[0] of
an `rnnzoo.Stack` is params['layers']['0'] here. `nnx.restore_int_paths(params)`
returns them as that stack's state has them.

`apply(..., rngs={'dropout': key})` drops outputs in a `Stack`, and so does a
call with `rngs=nnx.Rngs(...)`; `step` does not.
`apply(..., mutable=['batch_stats'])` normalises by the batch and updates its
running averages; else norm='batch' uses these. Initialisers of
`linen.with_partitioning` and `linen.with_logical_partitioning` name the axes of
the array that they are asked for; the axes of gates and heads come before them.
`rnnzoo.constrain` does not see bounds (`max_abs`) here: they are metadata of
nnx parameters.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
from typing import Any, ClassVar

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo import settings
from rnnzoo.doors import scanned
from rnnzoo.engines import selection
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

Array = jax.Array
Initializer = initializers.Initializer
LayerFactory = sequence_layer.LayerFactory


def _boxed(variable: nnx.Variable) -> Any:
  """Returns a variable's value as linen stores it, perhaps in a box."""
  box = variable.get_metadata().get('linen_box')
  store: Any = box or nnx.bridge.ToLinen.metadata_fn
  return store(variable.get_value() if box else variable)


class _Bridge(nnx.bridge.ToLinen):
  """A layer whose parameters are drawn once, as linen's own modules do it.

  Lists of layers are stored with str as names, which linen's tools ask for; nnx
  has the numbers themselves.
  """

  metadata_fn: Any = _boxed

  @linen.nowrap
  def run(self, method: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a method of the layer, which trains where linen's `apply` does."""
    return self(*arguments, nnx_method=self._training(method), **options)

  @linen.nowrap
  def _training(self, method: Any) -> Callable[..., Any]:
    """Returns a function that calls a method of a layer.

    Args:
      method: its name, or a function of the layer.
    """

    def call(layer, *arguments, **options):
      function = method
      if isinstance(method, str):
        function = getattr(type(layer), method)
      for path, leaf in nnx.to_flat_state(nnx.state(layer)):
        if isinstance(leaf.get_value(), jax.ShapeDtypeStruct):
          collection = nnx.variable_name_from_type(type(leaf))
          raise ValueError(
              f'{type(layer).__name__}.{".".join(map(str, path))} has no value:'
              f' the variables lack its entry in {collection!r}. For running'
              " averages, linen.scan needs variable_axes={'batch_stats': 0}."
          )
      if 'rngs' not in inspect.signature(function).parameters:
        return function(layer, *arguments, **options)
      # make_rng falls back to a key for 'params', as in apply(..., rngs=key).
      draws = self.is_mutable_collection('params')
      keyed = self.has_rng('dropout') or self.has_rng('params') and not draws
      if options.get('rngs') is None and keyed:
        options['rngs'] = nnx.Rngs(dropout=self.make_rng('dropout'))
      drops = options.get('rngs') is not None
      updates = self.is_mutable_collection('batch_stats')
      updates &= not super(_Bridge, self).is_initializing()
      for _, part in nnx.iter_modules(layer) if drops != updates else ():
        if drops and isinstance(part, nnx.BatchNorm):
          part.use_running_average = True
        elif updates and isinstance(part, rnnzoo.Stack):
          part.deterministic, part.dropout_rate = False, 0.0
      made = function(layer, *arguments, **options)
      if updates:
        self._update_variables(layer)
      return made

    return call

  @linen.nowrap
  def is_initializing(self) -> bool:
    """Whether this call draws the parameters: the first one does."""
    may_draw = super().is_initializing() or self.is_mutable_collection('params')
    return may_draw and not self.variables.get('params')

  @property
  def variables(self) -> Mapping[str, Any]:
    stored = super().variables
    return {name: _numbered(tree) for name, tree in stored.items()}

  @linen.nowrap
  def put_variable(self, col: str, name: str, value: Any) -> None:
    super().put_variable(col, name, _named(value))


def _numbered(tree: Any) -> Any:
  """Returns a tree of variables with an int for each name that is a number."""
  if not isinstance(tree, Mapping):
    return tree
  number = lambda name: int(name) if str(name).isdecimal() else name
  return {number(name): _numbered(value) for name, value in tree.items()}


def _named(tree: Any) -> Any:
  """Returns a tree of variables with str as names."""
  if not isinstance(tree, Mapping):
    return tree
  return {str(name): _named(value) for name, value in tree.items()}


class SequenceModule(linen.Module):
  """A layer of `rnnzoo` that linen initialises and stores.

  A subclass has the layer's options as fields; None is the layer's default.
  """

  layer_class: ClassVar[type[sequence_layer.SequenceLayer]]

  def __call__(
      self, x: Array, *, nnx_method: str = '__call__', **options: Any
  ) -> Any:
    """Calls the layer, or another method of it, with options of that call."""
    return self._run(nnx_method, x, **options)

  def unroll(self, x: Array, **options: Any) -> tuple[Any, Array]:
    """Returns the final carry as well, as the layer's `unroll` does."""
    return self._run('unroll', x, **options)

  def step(self, carry: Any, x: Array, **options: Any) -> tuple[Any, Array]:
    """Takes one step, as the layer's `step` does, without dropout."""
    return self._run('step', carry, x, **options)

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns the carry that a sequence starts from, and restarts from."""
    return self._run('initial_carry', batch_shape)

  @linen.compact
  def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
    options_of_layer = self._options(method, arguments)
    made = _Bridge(
        lambda *, rngs: _make(self.layer_class, options_of_layer, made, rngs)
    )
    linen.share_scope(self, made)
    return made.run(method, *arguments, **options)

  def _options(self, method: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the arguments of the layer's constructor."""
    fields = dataclasses.fields(self)
    names = (f.name for f in fields if f.name not in ('parent', 'name'))
    options = {name: getattr(self, name) for name in names}
    for field in fields:
      if field.default is None and options.get(field.name) is None:
        options.pop(field.name, None)
    if 'in_features' not in options:
      if method == 'initial_carry':
        raise ValueError(
            f'{type(self).__name__}.initial_carry needs in_features=, since no'
            ' input says what it is.'
        )
      shape = getattr(arguments[-1], 'shape', ())
      if not shape:
        raise ValueError(
            f'{type(self).__name__} expects x as an array [..., in_features],'
            f' got {settings.a(type(arguments[-1]))}.'
        )
      options['in_features'] = shape[-1]
    return options


def _make(
    layer_class: type,
    options: Mapping[str, Any],
    made: _Bridge,
    rngs: nnx.Rngs,
) -> nnx.Module:
  """Returns a layer; without values if linen has them, and they follow."""
  with initializers.boxes_allowed():
    if made.is_initializing():
      return layer_class(**options, rngs=rngs)
    with nnx.use_eager_sharding(False):  # There may be no mesh.
      return nnx.eval_shape(lambda: layer_class(**options, rngs=nnx.Rngs(0)))


class Recurrent(SequenceModule):
  """Fields that all layers of one cell have."""

  features: int
  in_features: int | None = None
  use_bias: bool = True
  kernel_init: Initializer | None = None
  recurrent_kernel_init: Initializer | Sequence[Initializer] | None = None
  bias_init: Initializer | Sequence[Initializer] | None = None
  learn_initial_carry: bool = False
  recurrent_gradient_clip: float | None = None
  stop_recurrent_gradient: bool = False
  zoneout_rate: float | Sequence[float] = 0.0
  recurrent_dropout_rate: float = 0.0
  recurrent_dropout_per_step: bool = False
  dtype: jax.typing.DTypeLike | None = None
  param_dtype: jax.typing.DTypeLike = jnp.float32
  implementation: selection.Implementation = None
  time_axis_name: str | Sequence[str] | None = None


def _module(layer: type[sequence_layer.SequenceLayer]) -> Any:
  """Returns the linen class of a layer, with the layer's options as fields."""
  options = dict(inspect.signature(layer.__init__).parameters)
  names = [
      n for n in options if n not in ('self', 'rngs', 'options', 'unknown')
  ]
  base: Any = Recurrent
  defaults: dict[str, Any] = {'in_features': None}
  if issubclass(layer, rnnzoo.RecurrentLayer):
    common = {field.name for field in dataclasses.fields(Recurrent)}
    # A layer that names use_bias has a default of its own.
    common -= {'use_bias'} & set(names)
    names = [name for name in names if name not in common]
  else:
    base = SequenceModule
    first = ['layer', 'features', 'in_features']
    last = ['dtype', 'param_dtype', 'implementation']
    # A composed layer hands these on to the layers inside.
    defaults |= dict.fromkeys(last)
    names = list(dict.fromkeys([*first, *names, *last]))
    names = names[0 if 'layer' in options else 1 :]
  defaults |= {
      name: option.default
      for name, option in options.items()
      if name in names and option.default is not inspect.Parameter.empty
  }
  types = {n: options[n].annotation if n in options else Any for n in names}
  inside = '; options of the layers go into `layer`, by partial'
  return type(base)(
      layer.__name__,
      (base,),
      {
          '__module__': __name__,
          '__doc__': f'`rnnzoo.{layer.__name__}`{inside * ("layer" in names)}.',
          '__annotations__': types,
          'layer_class': layer,
          **{name: defaults[name] for name in names if name in defaults},
      },
  )


Elman = _module(rnnzoo.Elman)
LSTM = _module(rnnzoo.LSTM)
GRU = _module(rnnzoo.GRU)
SLSTM = _module(rnnzoo.SLSTM)
SLSTMBlock = _module(rnnzoo.SLSTMBlock)
AGRU = _module(rnnzoo.AGRU)
AntisymmetricRNN = _module(rnnzoo.AntisymmetricRNN)
IndRNN = _module(rnnzoo.IndRNN)
IRevRNN = _module(rnnzoo.IRevRNN)
MinGRU = _module(rnnzoo.MinGRU)
MinLSTM = _module(rnnzoo.MinLSTM)
LRU = _module(rnnzoo.LRU)
S5 = _module(rnnzoo.S5)
LinOSS = _module(rnnzoo.LinOSS)
RGLRU = _module(rnnzoo.RGLRU)
HGRN = _module(rnnzoo.HGRN)
QRNN = _module(rnnzoo.QRNN)
CfC = _module(rnnzoo.CfC)
GriffinBlock = _module(rnnzoo.GriffinBlock)
Stack = _module(rnnzoo.Stack)
DenseStack = _module(rnnzoo.DenseStack)
Bidirectional = _module(rnnzoo.Bidirectional)


class ScannedRNN(linen.Module):
  """The class of this name in purejaxrl and JaxMARL, with any layer inside.

      from rnnzoo.linen import ScannedRNN

  in place of that class is the whole port. Arguments, carry and resets are as
  in `rnnzoo.ScannedRNN`; the carry sets the features.

  >>> import jax, jax.numpy as jnp
  >>> from rnnzoo.linen import ScannedRNN
  >>> carry = ScannedRNN.initialize_carry(2, 8)         # [batch, hidden]
  >>> rollout = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))  # [time, batch, ...]
  >>> variables = ScannedRNN().init(jax.random.key(0), carry, rollout)
  >>> carry, y = ScannedRNN().apply(variables, carry, rollout)
  >>> y.shape
  (5, 2, 8)

  Attributes:
    layer: a layer class such as `rnnzoo.LSTM`, or any function with its
      signature. Give another than the default to `initialize_carry`, too.
  """

  layer: LayerFactory = rnnzoo.GRU

  @linen.compact
  def __call__(self, carry: Any, x: tuple[Array, Array]) -> tuple[Any, Array]:
    """Runs the layer over a part of a rollout, as `rnnzoo.ScannedRNN` does."""
    ins, _ = scanned.pair(x)
    options = {
        'in_features': ins.shape[-1],
        'features': scanned.width(carry),
        'layer': self.layer,
    }
    rnn = _Bridge(
        lambda *, rngs: _make(rnnzoo.ScannedRNN, options, rnn, rngs),
        name='rnn',
    )
    return rnn.run('__call__', carry, x)

  initialize_carry = staticmethod(rnnzoo.ScannedRNN.initialize_carry)
