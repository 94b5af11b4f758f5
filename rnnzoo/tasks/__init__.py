"""Tasks: problems to learn. `rnnzoo.training` says how they are learnt.

To add one, write a file with a subclass of `Task` and name it in `TASKS`; a
config then chooses it with `config.task`. Tasks in which each example is in one
of several classes inherit `classification.Classification`.

A field, a file or an array that cannot be used raises a ValueError of one
sentence, which says what was given and what would work; a file that is missing
raises a FileNotFoundError. Docstrings of functions name further errors only.

A task of another project needs no change here. Its config calls `register`, or
its package has an entry point of the group 'rnnzoo.tasks':

    [project.entry-points."rnnzoo.tasks"]
    my_task = "my_package.my_task:MyTask"
"""

from collections.abc import Callable, Mapping
from importlib import metadata
import types

from rnnzoo import settings

settings.require(
    'rnnzoo.tasks',
    'train',
    ('ml_collections', 'optax', 'sklearn', 'matplotlib'),
)

import ml_collections

from rnnzoo.tasks import fields
from rnnzoo.tasks.images import cifar
from rnnzoo.tasks.images import smnist
from rnnzoo.tasks.motion import skeletons
from rnnzoo.tasks.protocol import BITS_PER_CHARACTER
from rnnzoo.tasks.protocol import Evaluation
from rnnzoo.tasks.protocol import Examples
from rnnzoo.tasks.protocol import Generator
from rnnzoo.tasks.protocol import LOSS
from rnnzoo.tasks.protocol import Metric
from rnnzoo.tasks.protocol import PERPLEXITY
from rnnzoo.tasks.protocol import Report
from rnnzoo.tasks.protocol import Split
from rnnzoo.tasks.protocol import Task
from rnnzoo.tasks.series import forecasting
from rnnzoo.tasks.series import lorenz
from rnnzoo.tasks.series import sequences
from rnnzoo.tasks.series import time_series
from rnnzoo.tasks.synthetic import adding
from rnnzoo.tasks.synthetic import copying
from rnnzoo.tasks.synthetic import state_tracking
from rnnzoo.tasks.text import language
from rnnzoo.tasks.text import text_stream
from rnnzoo.tasks.text import translation

__all__ = (
    'BITS_PER_CHARACTER',
    'LOSS',
    'PERPLEXITY',
    'TASKS',
    'Evaluation',
    'Examples',
    'Generator',
    'Metric',
    'Report',
    'Split',
    'Task',
    'find',
    'known',
    'register',
)

TASKS: Mapping[str, Callable[[ml_collections.ConfigDict], Task]] = (
    types.MappingProxyType(
        {
            'adding': adding.AddingProblem,
            'cifar': cifar.SequentialCifar,
            'copying': copying.CopyMemory,
            'forecasting': forecasting.Forecasting,
            'lorenz': lorenz.Lorenz,
            'selective_copying': copying.SelectiveCopying,
            'sequences': sequences.OwnSequences,
            'skeletons': skeletons.SkeletonActions,
            'smnist': smnist.SequentialMnist,
            'state_tracking': state_tracking.StateTracking,
            'text': language.Text,
            'text_stream': text_stream.TextStream,
            'time_series': time_series.TimeSeries,
            'translation': translation.Translation,
        }
    )
)

# Tasks of other projects, by name.
_REGISTERED: dict[str, Callable[[ml_collections.ConfigDict], Task]] = {}


def register(
    name: str, make: Callable[[ml_collections.ConfigDict], Task]
) -> None:
  """Makes a task of another project known as `config.task = name`.

  Args:
    name: the task's name. To register it again, as a config that is loaded
      twice does, replaces it.
    make: its class, or a function of a config that returns a task. A trained
      model of a function's task is loaded by way of its data.

  Raises:
    ValueError: the name is one of rnnzoo's own, or is no name.
    TypeError: `make` cannot be called.
  """
  if not isinstance(name, str) or not name.isidentifier():
    raise ValueError(f"a task's name must be an identifier; got {name!r}")
  if name in TASKS:
    raise ValueError(f'{name!r} is a task of rnnzoo; choose another name')
  if not callable(make):
    raise TypeError(
        f'a task must be a class or a function of a config; got {make!r}'
    )
  _REGISTERED[name] = make


def _entry_points() -> dict[str, metadata.EntryPoint]:
  return {one.name: one for one in metadata.entry_points(group='rnnzoo.tasks')}


def known() -> tuple[str, ...]:
  """Returns the names of all tasks, other projects' tasks included."""
  return tuple(dict.fromkeys([*TASKS, *_REGISTERED, *_entry_points()]))


def find(name: str) -> Callable[[ml_collections.ConfigDict], Task]:
  """Returns the class of a task, or the function that makes it.

  Args:
    name: a name in `known()`.

  Raises:
    ValueError: there is no such task, or its package cannot be imported.
  """
  if name in (ours := {**TASKS, **_REGISTERED}):
    return ours[name]
  points = _entry_points()
  if name not in points:
    raise ValueError(
        f'config.task must be one of {", ".join(known())}; got'
        f' {fields.shorten(name)}; a task of another project needs'
        ' rnnzoo.tasks.register or an entry point'
    )
  try:
    return points[name].load()
  except (ImportError, AttributeError) as error:
    raise ValueError(
        f'the task {name!r}, {points[name].value}, cannot be imported: {error}'
    ) from error
