"""Checks the words that a program is given before it measures anything.

This module defines no flags: each program has its own.
"""

from collections.abc import Sequence
import pathlib
import tempfile

from absl import app


def flags_alone(argv: Sequence[str]) -> None:
  """Refuses words that are no flags, beside the program's name."""
  if argv[1:]:
    raise app.UsageError(
        f'unknown argument {argv[1]!r}; options are --name=value'
    )


def writable(path: str | None) -> None:
  """Makes the folder of a file that will be written; None if none will be.

  A file that is there stays as it is.

  Raises:
    app.UsageError: no file of this name can be written.
  """
  if path is None:
    return
  file = pathlib.Path(path)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
      # Some programs write into a file that is there, others replace it.
      file.open('a', encoding='utf-8').close()
    tempfile.TemporaryFile(dir=file.parent).close()
  except OSError as error:
    raise app.UsageError(
        f'--output={path}: {error}; the name of a file in a folder that can be'
        ' written to would work'
    ) from error
