"""Weights of recurrentgemma's RG-LRU and recurrent block, in flax.linen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.cells import griffin_block
from rnnzoo.cells import rglru
from rnnzoo.convert import weights as weights_lib

# In the order of our gates.
_GATES = ('a_gate', 'input_gate')
_LINEAR = ('linear_x', 'linear_y', 'linear_out')


def from_recurrentgemma(
    layer: griffin_block.GriffinBlock | rglru.RGLRU,
    params: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills a `GriffinBlock` with a `RecurrentBlock`, an `RGLRU` with its like.

  Args:
    layer: layer with biases, of as many inputs as features if it is an `RGLRU`;
      it is changed in place.
    params: the module's `params`, nested mappings.
    prefix: the module's name ended by '/', as in
      'blocks.0/recurrent_block/'; other modules are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or
      recurrentgemma has no such layer.
  """
  unit, start = _unit(layer)
  entries = weights_lib.Entries(params, 'mapping params', prefix)
  take = lambda name, shape: entries.take(name, shape, layer)
  _, heads, size, _ = unit.input_map.kernel.shape
  kernel = [take(f'{start}{g}/w', (heads, size, size)) for g in _GATES]
  bias = [take(f'{start}{g}/b', (heads, size)).reshape(-1) for g in _GATES]
  state: dict[str, Any] = {
      'cell_params': {'Lambda': take(f'{start}a_param', (heads * size,))},
      'input_map': {'kernel': np.stack(kernel), 'bias': np.stack(bias)},
  }
  if start:
    state = {'recurrence': state}
    for ours, theirs, name in _names():
      shape = getattr(getattr(layer, ours), name).shape
      state.setdefault(ours, {})[name] = take(theirs, shape)
  entries.finish()
  weights_lib.update(layer, state)


def to_recurrentgemma(
    layer: griffin_block.GriffinBlock | rglru.RGLRU, *, prefix: str = ''
) -> dict[str, np.ndarray]:
  """Returns a layer's weights by recurrentgemma's names, joined by '/'.

  `flax.traverse_util.unflatten_dict(result, sep='/')` nests them.

  Args:
    layer: layer to read, as in `from_recurrentgemma`.
    prefix: the start of the names, as there.

  Raises:
    ValueError: recurrentgemma has no such layer.
  """
  weights_lib.check_prefix(prefix)
  unit, start = _unit(layer)
  read = lambda p: weights_lib.numbers(p, 'A parameter')
  result = {f'{start}a_param': read(unit.cell_params['Lambda'])}
  kernel, bias = read(unit.input_map.kernel), read(unit.input_map.bias)
  for gate, name in enumerate(_GATES):
    result[f'{start}{name}/w'] = kernel[gate]
    result[f'{start}{name}/b'] = bias[gate].reshape(kernel.shape[1:3])
  for ours, theirs, name in _names() if start else ():
    result[theirs] = read(getattr(getattr(layer, ours), name))
  return {prefix + name: value for name, value in result.items()}


def _names():
  """Yields a block's part, the name there and the parameter's name here."""
  yield 'convolution', 'conv_1d/w', 'kernel'
  yield 'convolution', 'conv_1d/b', 'bias'
  for part in _LINEAR:
    for name in ('kernel', 'bias'):
      yield part, f'{part}/{name}', name


def _unit(layer: Any) -> tuple[Any, str]:
  """Returns the RG-LRU and the start of its names, or raises ValueError."""
  is_block = isinstance(layer, griffin_block.GriffinBlock)
  unit: Any = layer.recurrence if is_block else layer
  if (
      not isinstance(unit, rglru.RGLRU)
      or unit.input_map.bias is None
      or unit.input_map.inputs is not None
      or unit.cell != rglru.RGLRUCell()
      or unit.learned_carry
  ):
    raise ValueError(
        'recurrentgemma has a GriffinBlock, and an RGLRU with as many inputs as'
        ' features, with biases, and without signed=True and a learned carry;'
        f' got {settings.a(type(layer))}.'
    )
  return unit, 'rg_lru/' if is_block else ''
