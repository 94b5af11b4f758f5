"""One sentence on a config, or an override of it, that cannot be read."""

import os
import sysconfig
import traceback

from absl import flags


def describe(error: Exception) -> str:
  """Says where the fault is, and quotes the library that found it."""
  causes: list[BaseException] = [error]
  while inner := causes[0].__cause__ or causes[0].__context__:
    causes.insert(0, inner)
  libraries = tuple(
      os.path.realpath(path)
      for path in (*sysconfig.get_paths().values(), os.path.dirname(__file__))
  )
  for inner in causes:
    for frame in reversed(traceback.extract_tb(inner.__traceback__)):
      place = os.path.realpath(frame.filename)
      if os.path.isfile(place) and not place.startswith(libraries):
        return (
            f'the config cannot be read: {place}, line {frame.lineno}:'
            f' {_quoted(inner)}'
        )
  if isinstance(error, flags.Error):
    return (
        f'{_quoted(error)}; a field is set by --config.<field>=<value>, with'
        " the type that it has in the config's file"
    )
  quotes = dict.fromkeys(map(_quoted, (error, causes[0])))
  return (
      'the config, or an override --config.<field>=<value>, cannot be read'
      f' (configs/base.py explains the fields): {", from ".join(quotes)}'
  )


def _quoted(error: BaseException) -> str:
  """Returns an error's type and text, on one line."""
  # ml_collections lists the whole config behind its sentence.
  text = ' '.join(str(error).partition(' Other fields present:')[0].split())
  return f'{type(error).__name__}: {text}'
