"""Checks the words that a program is given before it measures anything.

This module defines no flags: each program has its own.
"""

from collections.abc import Sequence
import pathlib
import tempfile

from absl import app


def flags_alone(argv: Sequence[str]) -> None:
  """Refuses words of a command line that are no flags.

  Args:
    argv: the program's name, and what its flags have left.

  Raises:
    app.UsageError: something is left.
  """
  if argv[1:]:
    raise app.UsageError(
        f'unknown argument {argv[1]!r}; options are --name=value'
    )


def writable(path: str | None) -> None:
  """Makes the folder of a file that will be written.

  A file that is there stays as it is.

  Args:
    path: the file's name; None if none will be written.

  Raises:
    app.UsageError: no file of this name can be written.
  """
  if path is None:
    return
  file = pathlib.Path(path)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
      raise IsADirectoryError(f'{path!r} is a directory')
    # Some programs write into a file that is there, others replace it.
    if file.is_file():
      file.open('a', encoding='utf-8').close()
    elif file.exists():
      raise OSError(f'{path!r} is no regular file')
    tempfile.TemporaryFile(dir=file.parent).close()
  except OSError as error:
    raise app.UsageError(
        f'--output={path}: {error}; the name of a file in a folder that can be'
        ' written to would work'
    ) from error
