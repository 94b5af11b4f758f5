"""Initialisers that the layers use, beside those of `jax.nn.initializers`."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
from typing import Any

from flax import nnx
from flax.core import meta
import jax
import jax.numpy as jnp

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
  than those of one gate. `draw` fills in the number of gates.

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
    name: of the argument that `init` is.
    init: one initialiser, or one for each gate.
    next_key: returns a new random key.
    gates: number of gates.
    shape: the argument of an initialiser.
    dtype: of the parameters.
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
  if not notes:
    return nnx.Param(value)
  kinds = [jax.tree.structure(note) for note in notes]
  alike = all(note == notes[0] for note in notes) and len(set(kinds)) == 1
  if len(notes) != gates or not alike:
    raise ValueError(
        f'{name}: the initialisers of all gates must have the same metadata.'
    )
  if isinstance(notes[0], meta.AxisMetadata):
    box = notes[0]
    for _ in range(value.ndim - len(shape)):
      box = box.add_axis(0, {meta.PARTITION_NAME: None})
    return nnx.Param(value, linen_box=box.replace_boxed)
  metadata = dict(notes[0].metadata)
  if metadata.get('out_sharding'):
    whole = (None,) * (value.ndim - len(shape))
    metadata['out_sharding'] = (*whole, *metadata['out_sharding'])
  return nnx.Param(
      dataclasses.replace(notes[0], raw_value=value, metadata=metadata)
  )
