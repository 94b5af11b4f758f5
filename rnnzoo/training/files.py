"""The files of a run directory: each whole or not there, none taken on trust.

A file is replaced in one move, so that a kill leaves the old file or the new
one. Files are checked when they are read, and an error names the file.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import pathlib
from typing import Any

from rnnzoo.tasks import fields

# One epoch's numbers by name; the columns of metrics.csv.
Row = Mapping[str, float | int]


class RunFileError(ValueError):
  """A file of a run is damaged, or another version wrote it."""


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
  """Adds the file's name to an error that comes without: "disk full", say."""
  try:
    yield
  except OSError as error:
    if error.filename is not None:
      raise
    raise OSError(
        error.errno, error.strerror or str(error), str(path)
    ) from error


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file that is there as a whole or not at all."""
  partial = path.with_name(path.name + '.part')
  if isinstance(content, str):
    content = content.encode()
  try:
    partial.write_bytes(content)
    os.replace(partial, path)
  except OSError as error:
    with contextlib.suppress(OSError):
      partial.unlink(missing_ok=True)
    raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: pathlib.Path, content: Any) -> None:
  """Writes a JSON file that is there as a whole or not at all."""
  write_atomically(path, json_text(content))


def json_text(content: Any) -> str:
  """Returns JSON, with null for NaN and infinities, which it does not know."""
  return json.dumps(_without_nan(content), indent=2, allow_nan=False) + '\n'


def _without_nan(content: Any) -> Any:
  """Returns content for JSON, with None for numbers that are not finite."""
  if isinstance(content, Mapping):
    return {key: _without_nan(value) for key, value in content.items()}
  if isinstance(content, list | tuple):
    return [_without_nan(value) for value in content]
  if isinstance(content, float) and not math.isfinite(content):
    return None
  return content


def digest(content: Any) -> str:
  """Returns a digest of content; a round trip by JSON does not change it."""
  # Keys that are numbers are sorted as the strings that they become.
  text = json.dumps(json.loads(json_text(content)), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a file's content with its digest at the end."""
  return {**content, 'digest': digest(content)}


def read_signed(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content that `signed` got, from a JSON file."""
  content = read_json(path)
  wanted = content.pop('digest', None)
  if digest(content) != wanted:
    raise RunFileError(
        f'{path} is damaged: it was changed; put back what the run wrote'
    )
  return content


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file, which is a dict."""
  try:
    return dict(json.loads(path.read_text(encoding='utf-8')))
  except (ValueError, TypeError, RecursionError) as error:
    raise RunFileError(
        f'{path} is damaged: it is not the JSON that was written ({error})'
    ) from error


def write_csv(
    path: pathlib.Path,
    dataset: str,
    history: Sequence[Mapping[str, Any]],
    earlier: Sequence[str] = (),
) -> None:
  """Writes one line an epoch, the data set's name in the first column.

  `earlier` are lines of such a file, which come first.
  """
  text = io.StringIO()
  writer = csv.DictWriter(text, ['dataset', *history[0]], lineterminator='\n')
  writer.writeheader()
  text.writelines(f'{line}\n' for line in earlier)
  for row in history:
    writer.writerow({'dataset': dataset, **row})
  write_atomically(path, text.getvalue())


def differences(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> str:
  """Returns where values by name differ; '' for nowhere."""
  found = [
      f'{key}: {fields.shorten(there.get(key))} there,'
      f' {fields.shorten(here.get(key))} here'
      for key in sorted(there.keys() | here.keys())
      if key not in ignored and there.get(key) != here.get(key)
  ]
  if len(found) > 3:
    found[3:] = [f'and {len(found) - 3} more']
  return '; '.join(found)


def make_directory(path: str, flag: str) -> pathlib.Path:
  """Returns a directory, made where it is not there.

  `flag` is the flag that named it.
  """
  directory = fields.expand_directory(path, flag)
  try:
    directory.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise OSError(
        f'{flag}={fields.shorten(path)} cannot be made:'
        f' {error.strerror or error}'
    ) from error
  return directory
