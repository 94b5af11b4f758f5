"""One cell's weights with named axes, between layers and other libraries.

Where each array belongs to one parameter, a library's file lists `Part`s, and
`fill` and `arrays` do the rest. Where it does not, the file arranges its arrays
as `Weights` and back, for `store` and `read`. `Entries` finds arrays by name
and says where they are wrong.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple
import uuid

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.layers import bidirectional
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack

# Cells that other libraries define with these equations.
COMMON_CELLS = (elman.ElmanCell, gru.GRUCell, lstm.LSTMCell)


@dataclasses.dataclass(frozen=True)
class Weights:
  """A cell's weights; gates in the order of our cell.

  Attributes:
    kernel: W, [gates, in, features], or None where W is not converted.
    recurrent_kernel: R, [gates, heads, head_dim (from), head_dim (to)].
    bias: [gates, features]; all but a GRU's b_hn.
    recurrent_bias: a GRU's b_hn, [features]; None for other cells.
    projection: an LSTM's P, [features, projection], or None.
  """

  kernel: Any
  recurrent_kernel: Any
  bias: Any
  recurrent_bias: Any = None
  projection: Any = None


class Entries:
  """Arrays by name, each of which must be taken once.

  Attributes:
    all: all that was given.
    left: the entries that are not taken yet, by names without the prefix.
  """

  def __init__(self, given: Any, label: str, prefix: str = ''):
    """Raises ValueError unless `given` maps names to arrays.

    Args:
      given: a mapping, which may hold mappings: their names are joined by '/'.
      label: its name in errors, 'state_dict' for instance.
      prefix: the start of the names; others are passed over.
    """
    if not isinstance(given, Mapping):
      has = hasattr(given, 'state_dict')
      hint = ' Its state_dict() would work.' * has
      raise ValueError(
          f'{label} must be a mapping from names to arrays, got'
          f' {settings.a(type(given))}.{hint}'
      )
    check_prefix(prefix)
    self._label, self._prefix = label, prefix
    self.all = _flatten(given, label)
    self.left = {
        name.removeprefix(prefix): self.all[name]
        for name in sorted(self.all)
        if name.startswith(prefix)
    }

  def take(
      self, name: str, shape: tuple[int, ...], layer: Any, hint: str = ''
  ) -> np.ndarray:
    """Removes and returns one array.

    Args:
      name: without the prefix.
      shape: the one it must have.
      layer: the layer that gets it; its param_dtype must hold the values.
      hint: a sentence for the error where the entry is missing.
    """
    full = self._prefix + name
    if name not in self.left:
      longer = [
          x for x in sorted(self.all) if x.endswith((f'.{name}', f'/{name}'))
      ]
      if longer and not hint:
        hint = f' prefix={longer[0].removesuffix(name)!r} would find it.'
      raise ValueError(
          f'The {self._label} has no entry {full!r}, which should have'
          f' shape {shape}; it has {sorted(self.all)}.{hint}'
      )
    return checked(self.left.pop(name), shape, layer, full)

  def finish(self) -> None:
    """Raises ValueError if entries are left."""
    if self.left:
      raise ValueError(
          f'The {self._label} has entries that the layer has no place for:'
          f' {sorted(self._prefix + name for name in self.left)}.'
      )


def check_prefix(prefix: Any) -> None:
  """Raises ValueError unless it is a str."""
  if not isinstance(prefix, str):
    raise ValueError(f'prefix must be a str, got {prefix!r}.')


def _flatten(given: Mapping, label: str) -> dict[str, Any]:
  flat = {}
  for name, value in given.items():
    if not isinstance(name, str):
      raise ValueError(f'{label} must have str as names, got {name!r}.')
    if isinstance(value, Mapping):
      inner = _flatten(value, label)
      flat.update({f'{name}/{key}': array for key, array in inner.items()})
    else:
      flat[name] = value
  return flat


def checked(
    value: Any, shape: tuple[int, ...], layer: Any, name: str
) -> np.ndarray:
  """Returns an array of another library, or raises ValueError.

  Args:
    value: the array or tensor.
    shape: the one it must have.
    layer: the layer that gets it; its param_dtype must hold the values.
    name: its name in errors.

  Returns:
    The numbers in float64, whose sums and products keep digits that a file's
    narrow dtype would lose.
  """
  array = to_numpy(value, name)
  if array.shape != shape:
    raise ValueError(
        f'{name} must have shape {shape} for {settings.a(type(layer))} with'
        f' in_features = {layer.in_features} and features ='
        f' {layer.out_features}, got {array.shape}.'
    )
  array = array.astype(np.float64)
  fits(array, layer, name)
  return array


def fits(array: np.ndarray, layer: Any, name: str) -> None:
  """Raises ValueError unless a layer's param_dtype holds these numbers."""
  with np.errstate(over='ignore'):  # An error instead of the warning.
    stored = array.astype(layer.param_dtype)
  if np.any(np.isfinite(array) & np.isinf(stored)):
    raise ValueError(
        f'{name} is too large for param_dtype={jnp.dtype(layer.param_dtype)} of'
        f' the {type(layer).__name__}, where it would become infinite.'
    )


def to_numpy(value: Any, name: str) -> np.ndarray:
  """Returns an array or a torch tensor as a numpy array of real numbers."""
  if isinstance(value, np.ma.MaskedArray):
    raise ValueError(
        f'{name} must be an array without a mask, which would be ignored.'
    )
  if isinstance(value, nnx.Variable):
    value = value.get_value()
  if hasattr(value, 'detach'):
    value = value.detach().cpu()
    if str(value.dtype) == 'torch.bfloat16':  # numpy has no such type
      value = value.float()
  checks.known(value, name)
  try:
    value = np.asarray(value)
  except ValueError as error:  # A ragged list.
    raise ValueError(f'{name} must be an array: {error}') from error
  checks.number(value, name)
  return value


def check_layer(
    layer: Any,
    cells: tuple[type, ...] = COMMON_CELLS,
    heads: bool = False,
    with_bias: str = '',
    projected: bool = False,
) -> None:
  """Raises ValueError for a layer that the library does not have.

  Args:
    layer: the layer.
    cells: the cells that it has.
    heads: whether it has heads.
    with_bias: its name, where its cells always have biases.
    projected: whether it has LSTMs with a projection.
  """
  # A subclass of a cell may have other equations.
  is_layer = isinstance(layer, recurrent.RecurrentLayer)
  if not is_layer or type(layer.cell) not in cells:
    names = [cell.__name__.removesuffix('Cell') for cell in cells]
    listed = ', '.join(names[:-1]) + ' and ' + names[-1]
    got = type(layer).__name__
    if is_layer and type(layer.cell).__name__ != f'{got}Cell':
      got += f' of {type(layer.cell).__name__}'
    if isinstance(layer, type):
      got = f'the class {layer.__name__}, not an instance of it'
    raise ValueError(
        f'Weights can be converted for {listed} layers, from and to torch also'
        ' for Bidirectional and Stack of them, to keras for Bidirectional; got'
        f' {got}.'
    )
  is_projected = isinstance(layer.readout, readouts.Projection)
  if layer.readout is not None and not (projected and is_projected):
    raise ValueError(
        'Only torch has a readout, the projection of an LSTM; this'
        f' {type(layer).__name__} has {settings.a(type(layer.readout))}.'
    )
  check_structure(layer)
  if layer.num_heads != 1 and not heads:
    raise ValueError(
        'Weights can be converted for layers with num_heads=1, got'
        f' num_heads={layer.num_heads}.'
    )
  if with_bias and layer.bias is None:
    raise ValueError(f'{with_bias} has biases; the layer has use_bias=False.')


def check_structure(layer: recurrent.RecurrentLayer) -> None:
  """Raises ValueError for a layer whose R is a function of its parameter."""
  if layer.recurrent_structure is not None:
    raise ValueError(
        'Other libraries use R as it is stored, and the'
        f' {type(layer).__name__} has recurrent_structure='
        f'{layer.recurrent_structure!r}.'
    )


def check_alike(layers: Sequence[recurrent.RecurrentLayer], library: str):
  """Raises ValueError unless layers of one module of a library are alike."""
  of_module: dict[str, list[Any]] = {
      'cell': [layer.cell for layer in layers],
      'use_bias': [layer.bias is not None for layer in layers],
      'number of features': [layer.state_features for layer in layers],
      'number of outputs': [layer.out_features for layer in layers],
  }
  for name, values in of_module.items():
    kinds = list(dict.fromkeys(values))
    if len(kinds) > 1:
      raise ValueError(
          f'{library} has one {name} in all levels and directions of a module,'
          f' got {kinds[0]} and {kinds[1]}.'
      )


def store(layer: recurrent.RecurrentLayer, weights: Weights) -> None:
  """Puts weights into a layer."""
  state: dict[str, Any] = {'recurrent_kernel': weights.recurrent_kernel}
  if weights.kernel is not None:
    state['kernel'] = weights.kernel
  if layer.bias is not None:
    state['bias'] = weights.bias
  if weights.recurrent_bias is not None:
    state['cell_params'] = {'recurrent_bias': weights.recurrent_bias}
  if weights.projection is not None:
    state['readout'] = {'kernel': weights.projection}
  update(layer, state)


def update(layer: Any, state: Mapping[str, Any]) -> None:
  """Puts arrays into a layer, in its param_dtype and on its devices."""
  own = nnx.to_pure_dict(nnx.state(layer))
  if 'learned_carry' in own:  # Other libraries begin with zeros.
    zeros = lambda x: np.zeros(np.shape(x))
    state = {
        **state,
        'learned_carry': jax.tree.map(zeros, own['learned_carry']),
    }

  def put(path, value):
    old = functools.reduce(lambda node, key: node[key.key], path, own)
    return placed(value, layer.param_dtype, old)

  nnx.update(layer, jax.tree.map_with_path(put, state))


class Part(NamedTuple):
  """A parameter of a layer, and the arrays that another library has for it.

  Attributes:
    path: path of the parameter in the layer.
    names: names of the arrays.
    ours: the arrays -> the parameter.
    theirs: the parameter -> the arrays.
  """

  path: tuple[str, ...]
  names: Sequence[str]
  ours: Callable[..., Any] = lambda x: x
  theirs: Callable[[Any], Any] = lambda x: [x]


def fill(layer: Any, parts: Sequence[Part], entries: Entries) -> None:
  """Puts all entries into a layer."""
  own, state = dict(nnx.to_flat_state(nnx.state(layer))), {}
  for part in parts:
    like = part.theirs(np.zeros(own[part.path].shape, bool))
    given = [
        entries.take(name, x.shape, layer)
        for name, x in zip(part.names, like, strict=True)
    ]
    state[part.path] = part.ours(*given)
  entries.finish()
  update(layer, traverse_util.unflatten_dict(state))


def arrays(layer: Any, parts: Sequence[Part]) -> dict[str, np.ndarray]:
  """Returns a layer's parameters as another library's arrays by name."""
  own = dict(nnx.to_flat_state(nnx.state(layer)))
  label = f'A parameter of the {type(layer).__name__}'
  found: dict[str, np.ndarray] = {}
  for part in parts:
    made = part.theirs(numbers(own[part.path], label))
    found.update(zip(part.names, made, strict=True))
  return found


def placed(value: Any, dtype: Any, old: Any) -> jax.Array:
  """Returns an array in place of another one, with the sharding of that one.

  If the old array was put on no devices, by a sharding or by
  `jax.device_put`, the result is not either.
  """
  with np.errstate(over='ignore'):
    value = np.asarray(value).astype(dtype)
  is_array = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer)
  if is_array and old.committed:
    return jax.device_put(value, old.sharding)
  return jnp.asarray(value)


def check_state(layer: recurrent.RecurrentLayer, library: str) -> None:
  """Raises ValueError for a layer that evaluates as no other library does."""
  if layer.zoneout_rate is not None:
    raise ValueError(
        f'zoneout_rate={layer.zoneout_rate} mixes states in evaluation too, for'
        f' which {library} has no place; a layer without it would work.'
    )
  if layer.learned_carry:
    raise ValueError(
        f'{library} has no learned initial carry, and the'
        f' {type(layer).__name__} has learn_initial_carry=True.'
    )


def read(
    layer: recurrent.RecurrentLayer, library: str, *, has_biases: bool = False
) -> Weights:
  """Returns a layer's weights, or raises ValueError if it has others, too.

  Args:
    layer: layer for which `check_layer` was called.
    library: its name, for errors.
    has_biases: whether its cells have all biases, whatever the layer has.
  """
  check_state(layer, library)
  label = f'A parameter of the {type(layer).__name__}'
  parameters = {
      'kernel': layer.kernel,
      'recurrent_kernel': layer.recurrent_kernel,
      'bias': layer.bias,
      'recurrent_bias': layer.cell_params.get('recurrent_bias'),
      'projection': getattr(layer.readout, 'kernel', None),
  }
  found = {
      name: None if parameter is None else numbers(parameter, label)
      for name, parameter in parameters.items()
  }
  is_bare = found['bias'] is None and not has_biases
  if is_bare and np.any(found['recurrent_bias']):
    raise ValueError(
        f'A GRU without biases has no b_hn in {library} either, and the GRU has'
        " cell_params['recurrent_bias'] other than zero."
    )
  return Weights(**found)


def numbers(parameter: Any, label: str) -> np.ndarray:
  """Returns a parameter's numbers in float32 or wider, or raises ValueError."""
  checks.known(parameter.get_value(), label)
  checks.parameter(parameter.get_value(), None, label)
  dtype = jnp.promote_types(parameter.dtype, np.float32)
  return np.asarray(parameter[...], dtype)


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]):
  """Gives a path to write to; the file there then replaces `path` as a whole.

  Raises:
    OSError: `path` is a folder, or is in none that exists.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise IsADirectoryError(f'{path} must be a file, got a folder.')
  if not path.parent.is_dir():
    raise FileNotFoundError(
        f'{path} must be in a folder that exists; there is no {path.parent}.'
    )
  # Several processes may write one file.
  partial = path.with_name(f'.{uuid.uuid4().hex}.partial')
  try:
    yield partial
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def parts(layer: sequence_layer.SequenceLayer):
  """Yields (layer of one direction, its level, whether it runs backward)."""
  levels = list(layer.layers) if isinstance(layer, stack.Stack) else [layer]
  for index, level in enumerate(levels):
    if isinstance(level, bidirectional.Bidirectional):
      yield level.forward, index, False
      yield level.backward, index, True
    else:
      yield level, index, False


def split_gates(columns: np.ndarray, gates: int) -> np.ndarray:
  """[from, gates * to] -> [gates, from, to]."""
  rows = columns.shape[0]
  return columns.reshape(rows, gates, -1).swapaxes(0, 1)


def join_gates(kernel: np.ndarray) -> np.ndarray:
  """[gates, from, to] -> [from, gates * to]."""
  return np.concatenate(list(kernel), axis=-1)
