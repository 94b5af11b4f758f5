"""One sentence on a config, or an override of it, that cannot be read."""

import difflib
import os
import re
import sysconfig
import traceback

from absl import flags

# Errors of Python and ml_collections, and the advice that takes their place.
_VALUES = (
    (
        r"invalid literal for int\(\) .*: 'None'",
        "it must be an integer, not 'None'; where None is its default, leave"
        ' the field out',
    ),
    (r'invalid literal for int\(\) .*: (.*)', r'it must be an integer, not \1'),
    (
        r'could not convert string to float: (.*)',
        r'it must be a number, not \1',
    ),
    (
        r"\('Non-boolean argument to boolean flag', (.*)\)",
        r'it must be true or false, not \1',
    ),
    (
        r'Failed to parse .* as a ConfigDict: (.*)',
        r'\1 Set the fields of a section one by one:'
        ' --config.<section>.<field>=<value>',
    ),
)


def _chain(error: BaseException) -> list[BaseException]:
  """Returns the error and those that it was raised for, the first one first."""
  errors = [error]
  while inner := errors[0].__cause__ or errors[0].__context__:
    errors.insert(0, inner)
  return errors


def _shorten(error: BaseException) -> str:
  """Returns an error's text; a field that is missing gets a near one named."""
  while error.args and isinstance(error.args[0], BaseException):
    error = error.args[0]
  # A KeyError's own text is in quotes.
  text = str(
      error.args[0] if isinstance(error, KeyError) and error.args else error
  )
  # ml_collections lists the whole config.
  text, *config = text.split(' Other fields present:')
  if config and (name := re.search(r'"(\w+)"', text)):
    known = re.findall(r'(\w+)\'?:', config[0])
    close = difflib.get_close_matches(name[1], known, n=1)
    text = repr(name[1]) + (f'. Did you mean {close[0]!r}?' if close else '')
  return text


def _hint(error: BaseException, place: str) -> str:
  """Returns how to import a module that lies beside a config, or ''."""
  if not isinstance(error, ModuleNotFoundError) or not error.name:
    return ''
  folder = os.path.dirname(place)
  beside = os.path.join(folder, error.name.partition('.')[0])
  if not os.path.isfile(f'{beside}.py') and not os.path.isdir(beside):
    return ''
  return f'; PYTHONPATH={folder} lets it import what lies beside it'


def _of_value(text: str) -> str:
  """Returns an error on the value of a flag, in words of a config."""
  for pattern, words in _VALUES:
    text = re.sub(pattern, words, text, flags=re.DOTALL)
  return text


def describe(error: Exception) -> str:
  """Says what is wrong with the command line, or with the config's file."""
  chain = _chain(error)
  libraries = tuple(
      os.path.realpath(path)
      for path in (*sysconfig.get_paths().values(), os.path.dirname(__file__))
  )
  for inner in chain:
    if isinstance(inner, SyntaxError) and os.path.isfile(inner.filename or ''):
      return (
          f'{inner.filename}, line {inner.lineno}, is not Python: {inner.msg}'
      )
    for frame in reversed(traceback.extract_tb(inner.__traceback__)):
      place = os.path.realpath(frame.filename)
      if os.path.isfile(place) and not place.startswith(libraries):
        return (
            f'the config cannot be read: {place}, line {frame.lineno}:'
            f' {type(inner).__name__}: {_shorten(inner)}{_hint(inner, place)}'
        )
  cause = chain[0]
  if isinstance(cause, SyntaxError) and 'null bytes' in str(cause):
    return (
        'the config file is not Python: it has null bytes, as text in UTF-16;'
        ' save it as UTF-8'
    )
  if str(error).startswith('Could not parse'):
    text = str(error).partition(': SyntaxError')[0]
    return f'an override must be --config.<field>=<value>: c{text[1:]}'
  if 'Error whilst parsing config file' in str(error) or (
      getattr(cause, 'name', None) == 'get_config'
  ):
    return (
        'the config file must have a function get_config() without arguments,'
        f' which returns a ConfigDict ({type(cause).__name__}: {cause})'
    )
  if isinstance(cause, (OSError, SyntaxError)):
    return f'the config cannot be read: {error}'
  if isinstance(cause, (TypeError, IndexError)) or (
      'does not support indexing' in str(cause)
  ):
    return (
        'the config has no field inside of a value, as'
        f' --config.model.layer.name would be: {_shorten(cause)}'
    )
  if isinstance(cause, (AttributeError, KeyError)):
    return (
        f'the config has no field {_shorten(cause)}'
        ' (configs/base.py explains the fields)'
    )
  if isinstance(error, flags.Error):
    return _of_value(str(error))
  return f'an override does not fit the config: {error}'
