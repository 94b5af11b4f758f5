"""Samples of text that a model makes while it trains."""

from collections.abc import Iterator
import pathlib
import re
from typing import Any

from flax import nnx
import jax
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import files

# Steps of training, by which dropout's key is folded in, stay below this.
_STREAM = 2**31

_HEAD = re.compile(r'epoch (\d+), (\d+) characters\n')


class Samples:
  """The file samples.txt of one seed.

  Its first line names the data set. Each sample follows a line that says of
  which epoch it is, and how many characters it has.

  Args:
    path: the file; samples of an earlier process are kept.
    dataset: the name of the data set.
    done: how many epochs are done; samples of later ones are void.

  Raises:
    RunFileError: the file is not what was written there.
  """

  def __init__(self, path: pathlib.Path, dataset: str, done: int):
    self._path = path
    self._text = f'{dataset}\n'
    if path.exists():
      self._text += ''.join(
          _entry(epoch, text)
          for epoch, text in _read(path, self._text)
          if epoch <= done
      )

  def write(self, epoch: int, text: str) -> None:
    """Adds the sample of an epoch."""
    self._text += _entry(epoch, text)
    files.write_atomically(self._path, self._text)


def make(
    task: protocol.Task, parameters: tuple[Any, Any], key: jax.Array, epoch: int
) -> str:
  """Returns a sample of the model as it is after an epoch, without a prompt.

  Args:
    task: one that makes text.
    parameters: (parameters, statistics), whole on each device.
    key: of dropout in the seed's training; the sample is a function of it, of
      the parameters and of the epoch.
    epoch: which one.
  """
  abstract = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
  graphdef, _ = nnx.split(abstract)
  # On one device of this process: the other processes do not sample.
  here = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), parameters)
  model = nnx.merge(graphdef, *here)
  key = jax.random.fold_in(jax.random.fold_in(key, _STREAM), epoch)
  return ''.join(task.sample(model, '', key))


def are_made_by(task: protocol.Task) -> bool:
  """Returns whether a task makes text."""
  return type(task).sample is not protocol.Task.sample


def _entry(epoch: int, text: str) -> str:
  return f'\nepoch {epoch}, {len(text)} characters\n{text}\n'


def _read(path: pathlib.Path, first: str) -> Iterator[tuple[int, str]]:
  """Yields epochs and samples of a file.

  Raises:
    RunFileError: it is not what was written there.
  """
  # Without the reader's newlines: a sample may have '\r'.
  text = path.read_bytes().decode('utf-8', errors='replace')
  place = len(first) if text.startswith(first) else len(text) + 1
  while place != len(text):
    head = _HEAD.match(text, place + 1)
    if not head:
      raise files.RunFileError(
          f'{path} is damaged: it is not what was written there; delete it'
      )
    end = head.end() + int(head[2])
    yield int(head[1]), text[head.end() : end]
    place = end + 1
