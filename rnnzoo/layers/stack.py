"""Layers in depth, with normalisation, dropout and sums between them."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.engines.time import devices as time_devices
from rnnzoo.layers import initializers
from rnnzoo.layers import levels as levels_lib
from rnnzoo.layers import recurrent
from rnnzoo.layers import regularisation
from rnnzoo.layers import sequence_layer

# flax's norms, wherever JAX is told to refuse promotions of dtypes.


Array = jax.Array


@promotion.of_dtypes
def normalize(norm: nnx.Module, x: Array, **options: Any) -> Array:
  """Returns norm(x, **options).

  flax takes statistics in float32 and promotes x of 16 bits to it, as its
  documentation promises; `jax_numpy_dtype_promotion='strict'` would refuse.

  Parameters that are sharded over the mesh axis of x's batch, to save memory,
  are gathered: JAX refuses their product with x on Explicit axes.
  """
  graphdef, state = nnx.split(norm)
  if not sharding.is_sharded(state):
    apply: Any = norm
    return apply(x, **options)
  whole = (None,) * (x.ndim - 1)
  positions = (*range(x.ndim - 1), -1), (*whole, -1)
  over = sharding.choose([x, state], positions, x.shape[-1])
  (gathered,) = sharding.place([state], positions[1:], over)
  own: Any = nnx.merge(graphdef, gathered)
  y = own(x, **options)
  if isinstance(norm, nnx.BatchNorm) and not options['use_running_average']:
    for name in ('mean', 'var'):
      average = getattr(norm, name)
      new = getattr(own, name)[...]
      average.set_value(sharding.as_sharded(new, average[...]))
  return y


LayerFactory = sequence_layer.LayerFactory

NORMS = (None, 'layer', 'batch')

# Those options of the layers that their normalisations share.
_NORM_OPTIONS = ('dtype', 'param_dtype')


class Stack(sequence_layer.SequenceLayer):
  """Several recurrent layers, each over the outputs of the one below.

  With all options, one level computes

      y = dropout(norm(layer(x))) [+ x]

  with dropout between levels only, and the sum where `residual` is set and the
  sizes agree. Where `norm_first` is set, the next level and the stack's output
  have norm of y = dropout(layer(x)) [+ x], and the sum goes on without it.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> stack = rnnzoo.Stack(
  ...     rnnzoo.GRU, 3, 8, num_layers=2, dropout_rate=0.1, rngs=nnx.Rngs(0)
  ... )
  >>> stack(jnp.ones((2, 5, 3)), rngs=nnx.Rngs(dropout=1)).shape
  (2, 5, 8)

  On a GPU layers that are alike run at once, over one part of time each, where
  a single layer leaves multiprocessors idle; see `rnnzoo.Pallas`.

  A call with `rngs` trains: it drops outputs and updates running averages. A
  call without evaluates. After `stack.train()` a call that drops outputs needs
  `rngs`; after `stack.eval()` no call uses them. The stack holds no random
  state, so a training step makes `rngs` from a key of its own. Split that key
  outside of the function that is differentiated:

  >>> def loss(stack, x, key):
  ...   return jnp.mean(stack(x, rngs=nnx.Rngs(dropout=key)) ** 2)
  >>> stack.train()
  >>> key = jax.random.key(0)
  >>> for _ in range(3):
  ...   key, step_key = jax.random.split(key)
  ...   value, grads = nnx.value_and_grad(loss)(
  ...       stack, jnp.ones((2, 5, 3)), step_key
  ...   )

  Attributes:
    layers: the layers, from the input up.
    norms: one normalisation for each layer, or empty.
    deterministic: False after `train()`, True after `eval()`; None, the
      default, leaves it to the `rngs` of each call.
  """

  deterministic: bool | None = None

  def __init__(
      self,
      layer: LayerFactory | Sequence[LayerFactory],
      in_features: int,
      features: int,
      *,
      num_layers: int = 1,
      dropout_rate: float = 0.0,
      share_dropout_over_time: bool = False,
      norm: str | None = None,
      norm_momentum: float | None = None,
      norm_first: bool = False,
      residual: bool = False,
      rngs: nnx.Rngs,
      **options,
  ):
    """Creates the layers.

    Args:
      layer: a layer class such as `rnnzoo.GRU`, or any function with its
        signature, for instance `functools.partial(rnnzoo.Bidirectional,
        rnnzoo.GRU)`; a sequence has one for each level.
      in_features: size of the input's last axis.
      features: `features` of every layer.
      num_layers: number of levels.
      dropout_rate: share of outputs zeroed between levels while training, that
        is, in calls with `rngs`.
      share_dropout_over_time: one dropout mask for all time steps.
      norm: 'layer' or 'batch' normalisation of each layer's output, or None.
        Batch normalisation takes its statistics over batch and time. It is the
        one part that holds state: `nnx.BatchNorm`'s running averages, updated
        in calls with `rngs` and used in calls without.
      norm_momentum: share of the old running averages that an update keeps,
        above 0 and below 1, for norm='batch'. None, the default, is 0.9, which
        torch calls momentum=0.1; with 0.99, flax's default, the averages stay
        near their start for the first hundreds of updates.
      norm_first: normalise what a level reads, and the stack's output, in place
        of each layer's output. The lowest level reads x itself.
      residual: add each level's input to its output where the sizes agree.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **options: passed to each layer.

    Raises:
      ValueError: an option is not valid.
    """
    settings.positive(num_layers, 'num_layers')
    settings.dropout_rate(dropout_rate)
    settings.choice(norm, NORMS, 'norm')
    momentum = settings.norm_momentum(norm_momentum, norm)
    settings.boolean(share_dropout_over_time, 'share_dropout_over_time')
    settings.boolean(residual, 'residual')
    settings.boolean(norm_first, 'norm_first')
    if norm_first and norm is None:
      raise ValueError(
          "norm_first=True needs a normalisation, got norm=None; norm='layer'"
          ' would work.'
      )
    initializers.check_rngs(rngs, 'params', required=True)
    layers: list[sequence_layer.SequenceLayer] = []
    norms: list[nnx.Module] = []
    size = in_features
    for factory in _factories(layer, num_layers):
      level = sequence_layer.make(factory, size, features, rngs, options)
      if layers and level.reads_timespans:
        raise ValueError(
            'timespans are the last feature of x, which only the lowest layer'
            ' of a stack sees; layers above it with timespans=False would work.'
        )
      layers.append(level)
      dtypes = {k: v for k, v in options.items() if k in _NORM_OPTIONS}
      # The fast variance, E[x^2] - E[x]^2, loses its digits where the mean is
      # large.
      given: Any = dict(dtypes, use_fast_variance=False, rngs=rngs)
      if norm == 'layer':
        norms.append(nnx.LayerNorm(level.out_features, **given))
      elif norm == 'batch':
        norms.append(
            nnx.BatchNorm(level.out_features, momentum=momentum, **given)
        )
      size = self._size_above(size, level)
    self.layers = nnx.List(layers)
    self.norms = nnx.List(norms)
    self.in_features = in_features
    self.out_features = size
    self.time_axis_name = layers[0].time_axis_name
    self.dropout_rate = float(dropout_rate)
    self.share_dropout_over_time = share_dropout_over_time
    self.residual = residual
    self.norm_first = norm_first

  @property
  def features(self) -> int:  # type: ignore[override]
    """`features` of every layer."""
    return self.layers[-1].features

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Returns a tuple of the layers' initial carries, from the input up."""
    return tuple(level.initial_carry(batch_shape) for level in self.layers)

  def unroll(
      self,
      x: Array,
      *,
      initial_carry: tuple[Any, ...] | None = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[tuple[Any, ...], Array]:
    """Runs the layers over a sequence and returns the final carries as well.

    The arguments and errors are as in `SequenceLayer.unroll`; a carry is a
    tuple of the layers' carries. Without `rngs` there is no dropout and batch
    normalisation uses its running averages, unless `train()` or `eval()` said
    otherwise.
    """
    settings.boolean(time_major, 'time_major')
    train = self._trains(rngs)
    if initial_carry is None:
      initial_carry = (None,) * len(self.layers)
    self._check_carry(initial_carry, 'initial_carry')
    given = x, initial_carry, reset, seq_lengths, mask
    if sharding.is_sharded(given) and self._is_by_rows(train):
      over_batch = self._over_batch(given, reverse, time_major)
      if over_batch is not None:
        return over_batch
    options = {'reverse': reverse, 'time_major': time_major, 'rngs': rngs}
    return self._run(given, train, **options)

  def _run(
      self, given, train: bool, rngs, **options
  ) -> tuple[tuple[Any, ...], Array]:
    """Runs the levels in turn.

    Args:
      given: x, initial_carry, reset, seq_lengths, mask; as in `unroll`.
      train: whether outputs are dropped and running averages updated.
      rngs: streams for dropout, as in `unroll`.
      **options: reverse and time_major, as in `unroll`.
    """
    x, initial_carry, reset, seq_lengths, mask = given
    time_major = options['time_major']
    time_axis = 0 if time_major else -2
    carries: list[Any] = []
    index, below = 0, x
    while index < len(self.layers):
      level = self.layers[index]
      wave = self._wave(index, x, given, train, options)
      if wave is not None:
        own, x = wave
        carries, index, below = carries + list(own), index + len(own), x
        continue
      carry, y = level.unroll(
          below,
          initial_carry=initial_carry[index],
          reset=reset,
          seq_lengths=seq_lengths,
          mask=mask,
          rngs=rngs if train else None,
          **options,
      )
      valid = _valid_steps(
          y, mask, seq_lengths, time_major, self.time_axis_name
      )
      x = self._above(index, x, y, valid, train, rngs, time_axis)
      below = self._below(index, x, valid, train)
      carries.append(carry)
      index += 1
    return tuple(carries), below

  def _wave(self, index: int, x: Array, given, train: bool, options):
    """Runs some levels from one on at once, where that is faster.

    Args:
      index: the level.
      x: its inputs.
      given: x, initial_carry, reset, seq_lengths, mask; as in `_run`.
      train: whether outputs are dropped and running averages updated.
      options: reverse and time_major.

    Returns:
      The final carries of these levels and the outputs of the last level, or
      None.
    """
    batch_norm = any(isinstance(norm, nnx.BatchNorm) for norm in self.norms)
    if train and (self._drops() or batch_norm) or not self._is_stepwise():
      return None
    if train and any(map(regularisation.drops, self.layers)):
      return None
    if index == len(self.layers) - 1:
      return None
    _, initial_carry, *flags = given
    try:
      return levels_lib.unroll(
          self.layers[index:],
          (x, initial_carry[index:], *flags),
          lambda i, x, y, valid: self._above(
              index + i, x, y, valid, False, None, None
          ),
          **options,
      )
    except NotImplementedError as error:
      selection.log_once(f'One layer after the other: {error}')
      return None

  def _is_by_rows(self, train: bool) -> bool:
    """Whether no sequence of the batch has an effect on another one."""
    return not (
        train
        and (self._drops() or any(map(regularisation.drops, self.layers)))
        or any(isinstance(norm, nnx.BatchNorm) for norm in self.norms)
        or any(not recurrent.is_plain(level) for level in self.layers)
    )

  def _over_batch(self, given, reverse: bool, time_major: bool):
    """Runs all levels, each device with its sequences.

    Returns:
      None where arrays are sharded over more than the batch, or the results.
    """
    x, initial_carry, reset, seq_lengths, mask = given
    lowest: Any = self.layers[0]
    lowest._check_input(x, '[..., time, in_features]')
    graphdef, state = nnx.split(self)
    lead = x.shape[:-1]
    time, batch = sequence_layer.time_and_batch(lead, time_major)
    levels: list[Any] = list(self.layers)
    for level, carry in zip(levels, initial_carry, strict=True):
      if carry is not None:
        level._check_carry(carry, batch, 'initial_carry')
    time_devices.check_names(self.time_axis_name, given)
    steps = time_devices.whole(time, self.time_axis_name)
    given = (
        x,
        initial_carry,
        checks.flags(reset, lead, 'reset'),
        checks.lengths(seq_lengths, batch, steps),
        checks.flags(mask, lead, 'mask'),
    )
    axes = sharding.axes_of_run(lead, time_major, linear=True)
    flags = axes.flags
    positions = axes.gates, axes.carry, flags, axes.lengths, flags
    # Features count as any number of parts, so that nothing is gathered.
    over = sharding.choose(given, positions, parts=0)
    if sharding.is_sharded(state) or any(over[-2:]) or not any(over):
      return None
    options = {'reverse': reverse, 'time_major': time_major, 'rngs': None}

    def part(split):
      state, *given = split
      return nnx.merge(graphdef, state)._run(given, False, **options)

    return sharding.spread(
        part,
        (state, *given),
        positions=(axes.whole, *positions),
        out_positions=(axes.carry, axes.steps),
        over=over,
    )

  def _is_stepwise(self) -> bool:
    """Whether each step that a level hands on depends on this step alone."""
    # A subclass of a user may do anything there.
    own = type(self)._above.__module__.startswith('rnnzoo.')
    return own and not self.norm_first

  def step(
      self, carry: tuple[Any, ...], x: Array, *, reset: Array | None = None
  ) -> tuple[tuple[Any, ...], Array]:
    # Documented in SequenceLayer.step; nothing is dropped.
    self._check_carry(carry, 'carry')
    carries: list[Any] = []
    below = x
    for index, level in enumerate(self.layers):
      new, y = level.step(carry[index], below, reset=reset)
      carries.append(new)
      x = self._above(index, x, y, None, False, None, None)
      below = self._below(index, x, None, False)
    return tuple(carries), below

  def set_view(self, deterministic: bool | None = None) -> None:
    """Takes part in `nnx.view`; None leaves the attribute as it is."""
    if deterministic is not None:
      self.deterministic = deterministic

  def _size_above(self, size: int, level: sequence_layer.SequenceLayer) -> int:
    """Returns how many features a level, with an input of `size`, hands on."""
    del size
    return level.out_features

  def _drops(self) -> bool:
    return self.dropout_rate > 0 and len(self.layers) > 1

  def _trains(self, rngs: nnx.Rngs | None) -> bool:
    """Whether this call drops outputs and updates running averages."""
    initializers.check_rngs(rngs, 'dropout' if self._drops() else None)
    if self.deterministic is None:
      return rngs is not None
    if not self.deterministic and rngs is None and self._drops():
      raise ValueError(
          f'After train(), this {type(self).__name__} needs random numbers for'
          ' dropout in each call: stack(x, rngs=nnx.Rngs(dropout=key)), with a'
          ' new key for each training step. After eval() it needs none.'
      )
    return not self.deterministic

  def _above(self, index, x, y, valid, train, rngs, time_axis) -> Array:
    """Returns a level's output: y normalised, dropped and added to x."""
    if self.norms and not self.norm_first:
      y = self._normalised(index, y, valid, train)
    is_last = index == len(self.layers) - 1
    if self.dropout_rate and train and not is_last:
      shared = (time_axis,) if self.share_dropout_over_time else ()
      dropout = nnx.Dropout(self.dropout_rate, broadcast_dims=shared)
      y = dropout(y, deterministic=False, rngs=rngs)
    if self.residual and x.shape == y.shape:
      y = y + x.astype(y.dtype)
    if valid is not None:
      y = jnp.where(valid[..., None], y, 0)
    return y

  def _below(self, index, x, valid, train) -> Array:
    """Returns a level's output as the next one reads it."""
    if not self.norm_first:
      return x
    x = self._normalised(index, x, valid, train)
    return x if valid is None else jnp.where(valid[..., None], x, 0)

  def _normalised(self, index, y, valid, train) -> Array:
    norm = self.norms[index]
    if not isinstance(norm, nnx.BatchNorm):
      return normalize(norm, y)
    stored = not train or bool(norm.use_running_average)
    return _batch_norm(norm, y, valid, use_running_average=stored)

  def _check_carry(self, carry, label: str) -> None:
    count = len(self.layers)
    if not isinstance(carry, (tuple, list)) or len(carry) != count:
      raise ValueError(
          f'{label} must be a tuple of {count} carries, one for each layer, as'
          f' initial_carry returns it; got {checks.describe(carry)}.'
      )


def _factories(layer: Any, num_layers: int) -> list[LayerFactory]:
  """Returns a factory for each level."""
  several = isinstance(layer, Sequence) and not isinstance(layer, str)
  factories = list(layer) if several else [layer] * num_layers
  settings.factories(factories, sequence_layer.SequenceLayer)
  if len(factories) != num_layers:
    raise ValueError(
        f'layer must be one factory or num_layers = {num_layers} of them, got'
        f' {len(factories)}; num_layers={len(factories)} would work.'
    )
  return factories


def _batch_norm(norm, y, valid, use_running_average) -> Array:
  """Normalises over batch and time; a batch without a valid step is no batch.

  Its statistics would be NaN, stay in the running averages and make gradients
  NaN.
  """
  if use_running_average or 0 in y.shape:
    return normalize(norm, y, use_running_average=True)
  if valid is None:
    return normalize(norm, y, use_running_average=False)
  before = norm.mean[...], norm.var[...]
  is_batch = jnp.any(valid)
  statistics = (valid | ~is_batch)[..., None]
  y = normalize(norm, y, use_running_average=False, mask=statistics)
  norm.mean[...] = jnp.where(is_batch, norm.mean[...], before[0])
  norm.var[...] = jnp.where(is_batch, norm.var[...], before[1])
  return y


@promotion.of_ranks
def _valid_steps(y, mask, seq_lengths, time_major, over) -> Array | None:
  """Returns bool [..., time], false in padding, or None without padding."""
  shape = y.shape[:-1]
  mask, seq_lengths = sharding.flags_as_sharded(
      mask, seq_lengths, y, time_major
  )
  if seq_lengths is None:
    return mask
  if time_major:
    steps = time_devices.steps(shape[0], over)
    steps = steps.reshape(-1, *(1,) * (len(shape) - 1))
    valid = steps < seq_lengths
  else:
    valid = time_devices.steps(shape[-1], over)
    valid = valid < seq_lengths[..., None]
  return valid if mask is None else mask & valid
