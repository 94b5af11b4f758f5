"""Initialisers that the layers use, beside `jax.nn.initializers`."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
from typing import Any

from flax import nnx
from flax.core import meta
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import promotion
from rnnzoo import settings

Initializer = jax.nn.initializers.Initializer

lecun_normal = jax.nn.initializers.lecun_normal()
xavier_uniform = jax.nn.initializers.xavier_uniform()
zeros = jax.nn.initializers.zeros

# N(0, 1 / fan_in), not truncated.
fan_in_normal = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


def orthogonal(key, shape, dtype=jnp.float32, out_sharding=None):
  """Orthogonal; drawn in float32 or wider, since 16 bits have no QR."""
  wide = promotion.wide(dtype)
  init = jax.nn.initializers.orthogonal()
  return init(key, shape, wide, out_sharding).astype(dtype)


@dataclasses.dataclass(frozen=True)
class XavierUniformFused:
  """Xavier's uniform distribution with the fans of all gates' one matrix.

  torch has one matrix [gates * features, in_features], whose fans are larger
  than one gate's. `draw` fills in the number of gates.

  Attributes:
    gates: how many there are.
  """

  gates: int = 1

  def __call__(self, key, shape, dtype=jnp.float32, out_sharding=None):
    """Returns the matrix of one gate, [in_features, features]."""
    if len(shape) != 2:
      raise ValueError(
          'xavier_uniform_fused is for matrices, which have two axes; got the'
          f' shape {shape}.'
      )
    limit = (6.0 / (shape[0] + self.gates * shape[1])) ** 0.5
    return uniform(-limit, limit)(key, shape, dtype, out_sharding)


def uniform(low: float, high: float) -> Initializer:
  """Returns an initialiser U(low, high)."""

  def init(key, shape, dtype=None, out_sharding=None):
    del out_sharding
    return jax.random.uniform(key, shape, dtype, low, high)

  return init


def chrono(steps: int) -> Initializer:
  """Returns an initialiser log U(1, steps - 1) of forget gates.

  A gate of σ(log u) forgets one part in 1 + u a step.
  """

  def init(key, shape, dtype=jnp.float32, out_sharding=None):
    del out_sharding
    u = jax.random.uniform(key, shape, jnp.float32, 1.0, steps - 1.0)
    return jnp.log(u).astype(dtype)

  return init


def changed(
    init: Initializer, change: Callable[[jax.Array, jax.Array], jax.Array]
) -> Initializer:
  """Returns an initialiser with other values and the metadata of `init`.

  Args:
    init: an initialiser, perhaps of `nnx.with_partitioning` or a like function.
    change: takes the key and the values of `init` and returns the new ones.
  """

  def changed_init(key, shape, dtype=None, out_sharding=None):
    del out_sharding
    value, box = _unboxed(init(key, shape, dtype))
    return box(change(key, value) if hasattr(value, 'dtype') else value)

  return changed_init


def shifted(init: Initializer, offset: float) -> Initializer:
  """Returns an initialiser that adds `offset` to the values of `init`."""
  return changed(init, lambda key, value: value + float(offset))


_BOXES = contextvars.ContextVar('boxes', default=False)


@contextlib.contextmanager
def boxes_allowed() -> Iterator[None]:
  """Lets initialisers return boxes of linen, which become metadata."""
  token = _BOXES.set(True)
  try:
    yield
  finally:
    _BOXES.reset(token)


def _unboxed(value: Any) -> tuple[Any, Callable[[Any], Any]]:
  """Returns an initialiser's array, and a function that adds its metadata."""
  if isinstance(value, nnx.VariableMetadata):
    note = value
    return value.raw_value, lambda new: dataclasses.replace(note, raw_value=new)
  if isinstance(value, meta.AxisMetadata):
    return jax.tree.leaves(value)[0], value.replace_boxed
  return value, lambda new: new


def check_rngs(rngs: Any, stream: str | None, required: bool = False) -> None:
  """Raises ValueError unless `rngs` gives keys of a stream.

  Args:
    rngs: the caller's.
    stream: name of the stream that keys are taken from; None if none are.
    required: whether None is an error.
  """
  if rngs is None and not required:
    return
  if not isinstance(rngs, nnx.Rngs):
    example = f'nnx.Rngs({rngs!r})' if isinstance(rngs, int) else 'nnx.Rngs(0)'
    raise ValueError(
        'rngs must be an nnx.Rngs, which gives a new key each time, got'
        f' {type(rngs).__name__}; rngs={example} would work.'
    )
  if stream and stream not in rngs and 'default' not in rngs:
    raise ValueError(
        f'rngs must have a stream {stream!r} or a default one, got an nnx.Rngs'
        f' with {sorted(rngs)}; nnx.Rngs({stream}=0) would work.'
    )


def draw(
    name: str,
    init: Initializer | Sequence[Initializer],
    next_key: Callable[[], jax.Array],
    gates: int,
    shape: tuple[int, ...],
    dtype: Any,
    heads: int | None = None,
) -> nnx.Param:
  """Draws a parameter gate by gate.

  Metadata of `nnx.with_partitioning` and `nnx.with_metadata` is kept, and of
  linen's functions where `boxes_allowed`. A sharding names the axes of the
  array that the initialiser is asked for; the axes of gates and heads come
  before them and are not sharded.

  Args:
    name: name of the argument that `init` is.
    init: one initialiser, or one for each gate.
    next_key: returns a new random key.
    gates: number of gates.
    shape: the argument of an initialiser.
    dtype: dtype of the parameters.
    heads: number of heads, each drawn on its own; None for no such axis.

  Returns:
    The parameter, [gates, *shape] or [gates, heads, *shape].

  Raises:
    ValueError: there are several initialisers, but not one for each gate; or
      they differ in metadata; or one is no function, or does not return an
      array of this shape and dtype; or no machine could hold the parameter.
  """
  if isinstance(init, XavierUniformFused):
    init = dataclasses.replace(init, gates=gates)
  several = isinstance(init, Sequence) and not isinstance(init, str)
  inits = list(init) if several else [init] * gates  # type: ignore[arg-type]
  if len(inits) != gates:
    raise ValueError(
        f'{name}: an initialiser must be one, or {gates}, one for each gate;'
        f' got {len(inits)}.'
    )
  for f in inits:
    if not callable(f):
      raise ValueError(
          f'{name} must be a function (key, shape, dtype) -> array, such as'
          f' jax.nn.initializers.normal(), got {f!r}.'
      )

  whole = (gates, *(() if heads is None else (heads,)), *shape)
  settings.numbers_of(whole, f'The parameter of {name}')
  notes: list[Any] = []

  def checked(f, key):
    try:
      value = f(key, shape, dtype)
    except TypeError as error:
      raise ValueError(
          f'{name} must be a function (key, shape, dtype) -> array; called like'
          f' this, it raises: {error}'
      ) from error
    if isinstance(value, meta.AxisMetadata) and not _BOXES.get():
      raise ValueError(
          f"{name} returns flax.linen's {type(value).__name__}, which layers of"
          ' rnnzoo.linen take; nnx.with_partitioning would work here.'
      )
    value, box = _unboxed(value)
    if isinstance(box(None), (nnx.VariableMetadata, meta.AxisMetadata)):
      notes.append(box(None))
    given = getattr(value, 'shape', None), getattr(value, 'dtype', None)
    if given != (shape, jnp.dtype(dtype)):
      raise ValueError(
          f'{name} must return an array of shape {shape} and dtype'
          f' {jnp.dtype(dtype)}, got shape {given[0]} and dtype {given[1]}.'
      )
    return value

  if heads is None:
    value = jnp.stack([checked(f, next_key()) for f in inits])
  else:
    each_head = lambda f: jax.vmap(lambda key: checked(f, key))
    keys = [jax.random.split(next_key(), heads) for _ in inits]
    value = jnp.stack(
        [each_head(f)(key) for f, key in zip(inits, keys, strict=True)]
    )
  return _with_metadata(name, value, notes, value.ndim - len(shape))


def _with_metadata(
    name: str, value: jax.Array, notes: list[Any], added: int
) -> nnx.Param:
  """Returns a parameter with its gates' metadata, for `added` axes before."""
  if not notes:
    return nnx.Param(value)
  kinds = [jax.tree.structure(note) for note in notes]
  alike = all(note == notes[0] for note in notes) and len(set(kinds)) == 1
  if len(notes) != len(value) or not alike:
    raise ValueError(
        f'{name}: the initialisers of all gates must have the same metadata.'
    )
  if isinstance(notes[0], meta.AxisMetadata):
    box = notes[0]
    for _ in range(added):
      box = box.add_axis(0, {meta.PARTITION_NAME: None})
    return nnx.Param(value, linen_box=box.replace_boxed)
  metadata = dict(notes[0].metadata)
  if metadata.get('out_sharding'):
    whole = (None,) * added
    metadata['out_sharding'] = (*whole, *metadata['out_sharding'])
  return nnx.Param(
      dataclasses.replace(notes[0], raw_value=value, metadata=metadata)
  )


# Bounds on parameters, kept by a projection after each update.


def constrain(params: Any) -> Any:
  """Clips every bounded parameter into its bound; call it after each update.

  A parameter is bounded when its `nnx.Param` has the metadata `max_abs`, as the
  recurrent kernels of `IndRNN` and `IRevRNN` have, |u| <= max_abs, and the
  inner weights a and b of `IRevRNN`. They start within the bound; only this
  call keeps them there. train.py makes it itself.

  >>> import optax, rnnzoo
  >>> layer = rnnzoo.IndRNN(3, 8, max_abs=0.5, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)
  >>> x = jnp.ones((2, 5, 3))
  >>> gradient = nnx.grad(lambda layer, x: -layer(x).sum())(layer, x)
  >>> _ = optimizer.update(layer, gradient)
  >>> bool(jnp.max(layer.recurrent_kernel[...]) <= 0.5)
  False
  >>> nnx.update(layer, rnnzoo.constrain(nnx.state(layer, nnx.Param)))
  >>> bool(jnp.max(layer.recurrent_kernel[...]) <= 0.5)
  True

  Args:
    params: any pytree of nnx variables, such as `nnx.state(model, nnx.Param)`.

  Returns:
    A tree with the structure of the argument.

  Raises:
    ValueError: there is no nnx variable in the tree.
  """

  def clip(variable):
    bound = getattr(variable, 'max_abs', None)
    if bound is None:
      return variable
    value = variable[...]
    bound = _below(bound, value.dtype)
    return variable.replace(jnp.clip(value, -bound, bound))

  is_variable = lambda x: isinstance(x, nnx.Variable)
  leaves = jax.tree.leaves(params, is_leaf=is_variable)
  if isinstance(params, nnx.State) and not leaves:
    return params
  if isinstance(params, nnx.Module) or not any(map(is_variable, leaves)):
    raise ValueError(
        'constrain needs nnx variables, which carry the bounds; pass'
        ' nnx.state(model, nnx.Param), neither the model nor a tree of arrays.'
    )
  return jax.tree.map(clip, params, is_leaf=is_variable)


def _below(bound: float, dtype: Any) -> np.ndarray:
  """Returns the greatest number of a dtype that is no greater than `bound`.

  Rounded to the nearest, 1.007 would be 1.0078 in bfloat16.
  """
  nearest = np.asarray(bound, dtype)
  # In float64, which holds both as they are.
  if np.float64(nearest) > np.float64(bound):
    nearest = np.nextafter(nearest, np.zeros_like(nearest))
  return nearest


# DropConnect on recurrent matrices: training drops entries of R itself.
#
# The mask is drawn once a call, outside the time loop, so every path and kernel
# runs as without it.
#
# References: Wan et al., Regularization of neural networks using DropConnect,
# 2013. Merity, Keskar, Socher, Regularizing and optimizing LSTM language
# models, 2018: DropConnect on an LSTM's R.


def dropconnect(params: Any, rate: float, key: jax.Array) -> Any:
  """Drops a share of the entries of every recurrent matrix.

  Entries are zeroed with probability `rate`, all remaining ones are divided by
  1 - rate. All sequences of a batch and all steps share one mask, and gradients
  reach the entries that stay. Recurrences of single units, as in `IndRNN`, have
  no matrix and are left alone.

  >>> from flax import nnx
  >>> import rnnzoo
  >>> layer = rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0))
  >>> structure, params = nnx.split(layer, nnx.Param)
  >>> def loss(params, x, key):
  ...   layer = nnx.merge(structure, rnnzoo.dropconnect(params, 0.5, key))
  ...   return jnp.mean(layer(x) ** 2)
  >>> gradients = jax.grad(loss)(params, jnp.ones((2, 5, 3)), jax.random.key(1))

  Args:
    params: the state of a model, such as `nnx.state(model, nnx.Param)`.
    rate: the share that is dropped, in [0, 1).
    key: key of the masks.

  Returns:
    A state with the structure of the argument.

  Raises:
    ValueError: the rate is not in [0, 1), there is no recurrent matrix,
      `params` is a model, or `key` is none.
  """
  settings.dropout_rate(rate, 'rate')
  rate = float(rate)  # A numpy scalar would widen bfloat16; 0 is an int.
  if isinstance(params, nnx.Module):
    raise ValueError(
        'params must be the state of a model, as nnx.state(model, nnx.Param);'
        f' got {settings.a(type(params))} itself'
    )
  leaves, structure = jax.tree.flatten_with_path(params)
  count = sum(_is_matrix(path, leaf) for path, leaf in leaves)
  if not count:
    raise ValueError(
        'dropconnect needs a recurrent matrix, such as an LSTM has; there is'
        ' none in this state.'
    )
  try:
    keys = iter(jax.random.split(key, count))
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'key must be one key of JAX, got {key!r:.80}; jax.random.key(0) would'
        ' work.'
    ) from error
  values = []
  for path, leaf in leaves:
    if _is_matrix(path, leaf):
      kept = jax.random.bernoulli(next(keys), 1 - rate, leaf.shape)
      leaf = jnp.where(kept, leaf / (1 - rate), 0)
    values.append(leaf)
  return jax.tree.unflatten(structure, values)


def _is_matrix(path: Any, leaf: jax.Array) -> bool:
  names = [getattr(entry, 'key', None) for entry in path]
  return 'recurrent_kernel' in names and leaf.shape[-1] > 1
