"""Parameters as a safetensors file, which any framework reads.

pip install safetensors      # or rnnzoo[safetensors]
"""

import importlib
import os
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.convert import weights as weights_lib

# The version of the names in a file; another one is refused.
VERSION = 1

# A file's names of dtypes, and numpy's names.
_DTYPES = {
    'BOOL': 'bool',
    'C64': 'complex64',
    'BF16': 'bfloat16',
    **{f'F{bits}': f'float{bits}' for bits in (16, 32, 64)},
    **{f'I{bits}': f'int{bits}' for bits in (8, 16, 32, 64)},
    **{f'U{bits}': f'uint{bits}' for bits in (8, 16, 32, 64)},
}


def save_safetensors(module: nnx.Module, path: str | os.PathLike[str]) -> None:
  """Writes a module's parameters, by name, to a safetensors file.

      convert.save_safetensors(model, 'model.safetensors')

  A name is the way to a parameter, joined by dots, as in 'layers.0.kernel';
  random state is left out, running averages are not. The file's metadata has
  'format': 'rnnzoo', 'version': '1' and, in 'equations', the cells and sums of
  the layers, which parameters do not show.

  Args:
    module: a layer, or any `nnx.Module`, for instance a trained model.
    path: the file, which is replaced as a whole.

  Raises:
    ImportError: the package safetensors is missing.
    ValueError: `module` is no `nnx.Module`, has no parameters or two with one
      name, or one is no array of a dtype that can be read again.
    OSError: the file cannot be written.
  """
  settings.require('rnnzoo.convert', 'safetensors', ['safetensors'])
  files: Any = importlib.import_module('safetensors.flax')
  library: Any = importlib.import_module('safetensors')
  arrays = {
      name: _saved(leaf.get_value(), name)
      for name, leaf in _named(module).items()
  }
  metadata = {'format': 'rnnzoo', 'version': str(VERSION)}
  metadata['equations'] = '\n'.join(_equations(module))
  try:
    with weights_lib.replaced(path) as partial:
      files.save_file(arrays, partial, metadata=metadata)
  except library.SafetensorError as error:
    raise OSError(f'{path} cannot be written: {error}.') from error


def load_safetensors(module: nnx.Module, path: str | os.PathLike[str]) -> None:
  """Reads a file of `save_safetensors` into a module of equal structure.

  The module is changed in place, and only if every parameter was found.

  Args:
    module: module to fill, as in `save_safetensors`.
    path: the file.

  Raises:
    ImportError: the package safetensors is missing.
    ValueError: the file has another format or version, or an entry is missing,
      left over or of another shape or dtype, or the file's module has other
      equations, for instance another activation.
    OSError: the file cannot be read.
  """
  settings.require('rnnzoo.convert', 'safetensors', ['safetensors'])
  files: Any = importlib.import_module('safetensors.flax')
  library: Any = importlib.import_module('safetensors')
  if os.path.isdir(path):
    raise IsADirectoryError(f'{path} must be a safetensors file, got a folder.')
  try:
    with library.safe_open(os.fspath(path), framework='np') as opened:
      metadata = opened.metadata() or {}
      # The arrays themselves may come in a narrower dtype: without x64, JAX
      # rounds float64.
      stored: set[Any] = {
          (name, _described(opened, name)) for name in opened.keys()
      }
  except library.SafetensorError as error:
    raise ValueError(f'{path} is no safetensors file: {error}.') from error
  found = metadata.get('format'), metadata.get('version')
  if found != ('rnnzoo', str(VERSION)):
    raise ValueError(
        f"{path} must have format 'rnnzoo' and version '{VERSION}' in its"
        f' metadata, got {found[0]!r} and {found[1]!r}.'
        ' safetensors.flax.load_file reads the arrays of any file.'
    )
  named = _named(module)
  own_lines = _equations(module)
  # Files of earlier versions do not have them.
  lines = metadata.get('equations', '\n'.join(own_lines)).splitlines()
  stored |= {*lines}
  kinds = ((name, _kind(x.get_value(), name)) for name, x in named.items())
  own: set[Any] = {*kinds, *own_lines}
  if stored != own:
    raise ValueError(
        f'{path} is of another module than this {type(module).__name__}: the'
        f' file has {sorted(stored - own, key=str)}, and the module has'
        f' {sorted(own - stored, key=str)} instead.'
    )
  arrays = files.load_file(path)
  checks.known(arrays, str(path))
  for path_of, variable in nnx.iter_graph(module):
    name = '.'.join(map(str, path_of))
    random = isinstance(variable, nnx.RngState)
    if isinstance(variable, nnx.Variable) and not random and name in named:
      array, own = arrays[name], variable.get_value()
      variable.set_value(weights_lib.placed(array, array.dtype, own))


def _equations(module: nnx.Module) -> list[str]:
  """Returns the static parts of layers that change their results."""
  lines = []
  for path, part in nnx.iter_modules(module):
    for name in ('cell', 'recurrent_structure', 'residual', 'activation'):
      value = getattr(part, name, None)
      is_function = name == 'recurrent_structure' and callable(value)
      if value and (is_function or isinstance(value, (cell.Cell, str, bool))):
        text = re.sub(' at 0x[0-9a-f]+', '', repr(value))
        lines.append(f'{".".join(map(str, (*path, name)))} = {text}')
  return lines


def _named(module: Any) -> dict[str, Any]:
  """Returns a module's variables by name, random state apart."""
  if not isinstance(module, nnx.Module):
    raise ValueError(
        f'module must be an nnx.Module, got {settings.a(type(module))}.'
    )
  checks.known(nnx.state(module), 'module')
  named: dict[str, Any] = {}
  paths: dict[str, tuple[Any, ...]] = {}
  for path, leaf in nnx.to_flat_state(nnx.state(module)):
    if isinstance(leaf, nnx.RngState):
      continue
    name = '.'.join(map(str, path))
    if name in named:
      raise ValueError(
          f'The {type(module).__name__} has two parameters of the name {name!r}'
          f' in a file, at the paths {paths[name]} and {path}; another name of'
          ' one of their parts would work.'
      )
    named[name], paths[name] = leaf, path
  if not named:
    raise ValueError(f'The {type(module).__name__} has no parameters.')
  return named


def _saved(value: Any, name: str) -> jax.Array:
  """Returns the array to save, or raises ValueError."""
  if isinstance(value, jax.ShapeDtypeStruct):
    raise ValueError(
        f'{name} has a shape but no values; nnx.update(module, state) fills a'
        ' module that nnx.eval_shape made.'
    )
  _, dtype = _kind(value, name)
  if dtype not in _DTYPES.values():
    raise ValueError(
        f'{name} must have one of the dtypes {sorted(_DTYPES.values())}, which'
        f' can be read again, got {dtype}.'
    )
  return jnp.asarray(value)


def _kind(value: Any, name: str) -> tuple[tuple[int, ...], str]:
  """Returns the shape and dtype of the array that JAX makes of a value."""
  if not isinstance(value, jax.ShapeDtypeStruct):
    value = checks.array(value, name)
  return value.shape, str(value.dtype)


def _described(opened: Any, name: str) -> tuple[tuple[int, ...], str]:
  """Returns the shape and the dtype of an entry of an open file."""
  entry = opened.get_slice(name)
  dtype = entry.get_dtype()
  return tuple(entry.get_shape()), _DTYPES.get(dtype, dtype)
