"""The configs that come with the project: in a checkout, and installed.

A checkout has them in configs/, a wheel in rnnzoo/configs/. Everywhere they
import each other as `configs`, a name that a wheel does not take for itself.
"""

import difflib
import importlib
import importlib.util
import pathlib
import sys
import types

import rnnzoo

_PACKAGE = pathlib.Path(rnnzoo.__file__).resolve().parent


def directory() -> pathlib.Path:
  """Returns the directory of the configs."""
  inside = _PACKAGE / 'configs'
  return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


def names() -> list[str]:
  """Returns the configs' names, those apart that others start from."""
  return sorted(
      path.stem
      for path in directory().glob('*.py')
      if path.stem != 'base' and not path.stem.startswith(('base_', '_'))
  )


def find(name: str) -> str:
  """Returns the path of a config's file.

  Args:
    name: a path; or the name of a config that comes with the project, with or
      without `configs/` and `.py`. A file of that path comes first. What is
      neither is returned as it is.
  """
  if pathlib.Path(name).is_file():
    return name
  known = name.removeprefix('configs/').removesuffix('.py')
  path = directory() / f'{known}.py'
  is_known = '/' not in known and path.is_file()
  return str(path) if is_known else name


def check(name: str) -> None:
  """Raises ValueError unless there is such a config; see `find`."""
  if pathlib.Path(find(name)).is_file():
    return
  if name in ('', '.'):
    raise ValueError('--config= names no file; `rnnzoo list` names the configs')
  known = pathlib.Path(name).name.removesuffix('.py')
  close = difflib.get_close_matches(known, names(), n=3)
  hint = f' (did you mean {" or ".join(close)}?)' if close else ''
  raise ValueError(
      f'there is no config file {name}{hint}; `rnnzoo list` names the configs'
  )


def make_importable() -> None:
  """Lets configs import each other as `configs`, and those of this directory.

  Nothing changes where Python finds a package of that name already.
  """
  if 'configs' in sys.modules or importlib.util.find_spec('configs'):
    return
  package = types.ModuleType('configs', 'The configs of rnnzoo.')
  here = pathlib.Path('configs').resolve()
  package.__path__ = [str(here), str(directory())]
  sys.modules['configs'] = package


def describe(name: str) -> tuple[str, str]:
  """Returns the task of a config, and the first line of its docstring.

  Args:
    name: one of `names()`; `make_importable` was called.
  """
  module = importlib.import_module(f'configs.{name}')
  title = (module.__doc__ or '').splitlines()[0]
  return module.get_config().task, title
