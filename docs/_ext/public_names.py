"""The check that every public name has a docstring and a place in the docs.

A public name is one that a public module defines or imports from this project:
the names of `__all__` where there is one, else all that have no underscore. The
build warns of a name that no page documents, and `sphinx-build -W` fails.
"""

from collections.abc import Iterable, Mapping
import importlib
import inspect
import types

MODULES = (
    'rnnzoo',
    'rnnzoo.convert',
    'rnnzoo.linen',
    'rnnzoo.models',
    'rnnzoo.tasks',
    'rnnzoo.training',
    'pallas_kernels',
)
_OWNERS = ('rnnzoo', 'pallas_kernels')


def names_of(module: types.ModuleType) -> list[str]:
  """Returns the public names of a module, without the module's own name."""
  if hasattr(module, '__all__'):
    return list(module.__all__)
  found = []
  for name, thing in vars(module).items():
    owner = (getattr(thing, '__module__', '') or '').split('.')[0]
    is_ours = owner in _OWNERS and not inspect.ismodule(thing)
    is_constant = name.isupper()
    if not name.startswith('_') and (is_ours or is_constant):
      found.append(name)
  return found


def names() -> dict[str, object]:
  """Returns every public object by its full name."""
  found = {}
  for path in MODULES:
    module = importlib.import_module(path)
    for name in names_of(module):
      found[f'{path}.{name}'] = getattr(module, name)
  return found


def problems(
    public: Mapping[str, object], documented: Iterable[str]
) -> list[str]:
  """Returns a sentence for each name that is not documented.

  Args:
    public: objects by full name.
    documented: full names that have an entry on some page.
  """
  documented = set(documented)
  found = []
  for name, thing in public.items():
    if name not in documented:
      found.append(f'{name} is public, and no page documents it.')
    elif callable(thing) and not (thing.__doc__ or '').strip():
      found.append(f'{name} is public, and has no docstring.')
  return found


def setup(app):
  """Registers the check."""
  from sphinx.util import logging

  log = logging.getLogger(__name__)

  def check(app, env):
    del app
    documented = env.get_domain('py').objects
    for problem in problems(names(), documented):
      log.warning(problem, type='public_names')

  app.connect('env-check-consistency', check)
  return {'parallel_read_safe': True}
