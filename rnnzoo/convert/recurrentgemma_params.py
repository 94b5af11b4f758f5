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
  parts = _parts(layer)
  entries = weights_lib.Entries(params, 'mapping params', prefix)
  weights_lib.fill(layer, parts, entries)


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
  found = weights_lib.arrays(layer, _parts(layer))
  return {prefix + name: value for name, value in found.items()}


def _parts(layer: Any) -> list[weights_lib.Part]:
  """Returns a layer's parameters, and their names there."""
  unit, start = _unit(layer)
  at = ('recurrence',) if start else ()
  _, heads, size, _ = unit.input_map.kernel.shape
  part, of_gates = weights_lib.Part, lambda *given: np.stack(given)
  names = lambda name: [f'{start}{gate}/{name}' for gate in _GATES]
  parts = [
      part((*at, 'cell_params', 'Lambda'), [f'{start}a_param']),
      part((*at, 'input_map', 'kernel'), names('w'), of_gates, tuple),
      part(
          (*at, 'input_map', 'bias'),
          names('b'),
          lambda *given: np.stack(given).reshape(2, -1),
          lambda bias: bias.reshape(2, heads, size),
      ),
  ]
  if start:
    for name, theirs in (('kernel', 'w'), ('bias', 'b')):
      parts.append(part(('convolution', name), [f'conv_1d/{theirs}']))
      parts += [part((own, name), [f'{own}/{name}']) for own in _LINEAR]
  return parts


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
