"""Trained models of a run, for users and for the modes of `train.py`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import inspect
import itertools
import numbers
import os
import pathlib
from typing import Any
import warnings

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from pallas_kernels import promotion
from rnnzoo import settings
from rnnzoo import tasks
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import processes
from rnnzoo.training import report
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from rnnzoo.training import step


def best_model(experiment: experiments.Experiment, seed: int) -> nnx.Module:
  """Returns the model of a seed's best epoch so far.

  Args:
    experiment: the result of `prepare` for the run directory.
    seed: one of its seeds.

  Raises:
    FileNotFoundError: the seed has no checkpoint.
  """
  return restore_best(experiment.task, experiment.workdir, seed)


def restore_best(
    task: protocol.Task, workdir: pathlib.Path, seed: int
) -> nnx.Module:
  """Returns the best model so far, by the task and directory of a run."""
  graphdef, *state = step.abstract(task)
  best = run_directory.restore_best(workdir, seed, tuple(state))
  return nnx.merge(graphdef, *best)


def evaluate_best(
    experiment: experiments.Experiment, best: Any, test: Any
) -> dict[str, Any]:
  """Returns the results of 'test', and of all splits that are further ones.

  `best` are parameters and statistics, `test` is from `Program.load`.
  """
  program, task = experiment.program, experiment.task
  model = nnx.merge(step.abstract(task)[0], *best, copy=True)
  tests = {}
  for name, split in task.splits.items():
    if name not in ('train', 'validation'):
      # One at a time: they may be long.
      loaded = test if name == 'test' else program.load(split)
      evaluation = program.evaluate(best[0], best[1], loaded, predict=True)
      measured = task.measure(model, name, evaluation.predictions)
      tests[name] = metrics_lib.of_test(evaluation, measured, task)
  return tests


@dataclasses.dataclass(frozen=True)
class Trained:
  """The model of the best epoch of one seed.

  Attributes:
    model: the model.
    config: the config of the run.
    seed: one of the run's seeds.
    task: the task that predicts. `task.splits` shows examples of inputs; where
      the task was restored, its data are read when first asked for.
  """

  model: nnx.Module
  config: ml_collections.ConfigDict
  seed: int
  task: tasks.Task

  def predict(self, inputs: Any) -> Any:
    """Returns predictions, by one compiled call for inputs of one shape.

    They are arrays of JAX, or of numpy in float64 where they are numbers that
    float32 cannot tell apart.

    Args:
      inputs: arrays [B, ...], as in the task's splits; the task's
        `check_inputs` says which; of traced ones it sees names and shapes.

    Raises:
      ValueError: the task cannot use these inputs.
      NotImplementedError: the task has no such thing; the message says so.
    """
    return self.task.in_units(self._answers('predict', inputs))

  def predict_logits(self, inputs: Any) -> jax.Array:
    """Returns logits of the classes, [B, ..., classes]; see `predict_proba`."""
    return self._answers('logits', inputs)

  def predict_proba(self, inputs: Any) -> jax.Array:
    """Returns the probability of each class, float32 [B, ..., classes].

    Classes are in the order of `task.class_names`, where the task has names.
    The largest probability is the class that `predict` returns.

    Args:
      inputs: as of `predict`, whose errors it raises, too.

    Raises:
      NotImplementedError: the answers of the task are no classes.
    """
    logits = self.predict_logits(inputs).astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1)

  @promotion.of_dtypes
  @promotion.of_ranks
  def _answers(self, name: str, inputs: Any) -> Any:
    """Returns the result of a method of the task, for checked inputs."""
    leaves = jax.tree.leaves(inputs)
    wrong = [leaf for leaf in leaves if isinstance(leaf, str | bytes)]
    if wrong or not leaves:
      raise ValueError(
          'inputs must be arrays, as in the splits of the task, got'
          f' {settings.a(type((wrong or [inputs])[0]))}'
      )
    is_traced = lambda leaf: isinstance(leaf, jax.core.Tracer)
    if any(map(is_traced, leaves)):
      # Only names and shapes are known. 1 may be a length, 1/2 a share.
      half = lambda x: 0.5 if jnp.issubdtype(x.dtype, jnp.inexact) else 1
      full = lambda x: np.full(x.shape, half(x), x.dtype)
      known = lambda x: full(x) if is_traced(x) else x
      with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        self.task.check_inputs(jax.tree.map(known, inputs))
    else:
      inputs = self.task.check_inputs(inputs)
    return self._compiled(name, nnx.state(self.model), inputs)

  def predict_lines(self, lines: Iterable[str]) -> Iterator[str]:
    """Returns a line for each line; their ends do not matter.

    Raises:
      NotImplementedError: the task reads no text; the message says so.
      ValueError: something is no line, or not UTF-8; the message says which.
    """
    if isinstance(lines, str) or not isinstance(lines, Iterable):
      one = isinstance(lines, str)
      raise ValueError(
          'lines must be several strings, got'
          f' {"one" if one else settings.a(type(lines))};'
          f' {[lines[:20] if one else "a line"]!r} would work'
      )
    ended = itertools.starmap(_without_end, enumerate(lines, 1))
    return iter(self.task.predict_lines(self.model, ended))

  def sample(
      self,
      prompt: str = '',
      key: jax.Array | None = None,
      *,
      length: int | None = None,
      temperature: float | None = None,
  ) -> Iterator[str]:
    """Returns pieces of text, which go on from the prompt.

    Args:
      prompt: the beginning of the text.
      key: seeds all random choices; None for one made of the seed.
      length: the number of characters after the prompt; None for the number in
        the run's config.
      temperature: divisor of a sample's logits, 0 for the most likely
        character; None for the one in the run's config.

    Raises:
      NotImplementedError: the task makes no text, or its samples have no length
        or temperature; the message says so.
      ValueError: the prompt cannot be, the key is none, or a number is out of
        its range.
    """
    if not isinstance(prompt, str):
      raise ValueError(
          f'prompt must be a string, got {settings.a(type(prompt))}'
      )
    key = jax.random.key(self.seed) if key is None else key
    try:
      jax.eval_shape(jax.random.fold_in, key, 0)
    except (TypeError, ValueError) as error:
      raise ValueError(
          f'key must be one key of JAX, got {fields.shorten(key)};'
          ' jax.random.key(0) would work'
      ) from error
    known = inspect.signature(self.task.sample).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    given: dict[str, Any] = {'length': length, 'temperature': temperature}
    options = {name: x for name, x in given.items() if x is not None}
    for name, x in options.items():
      if name not in known and not takes_all:
        raise NotImplementedError(
            f'samples of the task {type(self.task).__name__} have no {name}'
        )
      # A number of numpy or JAX is as good as one of Python.
      if hasattr(x, 'item') and not x.ndim:
        options[name] = x.item()
    return iter(self.task.sample(self.model, prompt, key, **options))

  @functools.cached_property
  def _compiled(self):
    graphdef = nnx.graphdef(self.model)

    def run(name, state, inputs):
      return getattr(self.task, name)(nnx.merge(graphdef, state), inputs)

    return jax.jit(run, static_argnums=0)


def _without_end(number: int, line: Any) -> str:
  """Returns a line without its end, or raises ValueError."""
  if not isinstance(line, str):
    raise ValueError(
        f'line {number} must be a string, got {settings.a(type(line))}'
    )
  try:
    line.encode('utf-8')
  except UnicodeEncodeError as error:
    # Bytes of another encoding, which some locales let through.
    raise ValueError(
        f'line {number} is not UTF-8: its character {error.start + 1} is'
        f' {line[error.start]!a}'
    ) from error
  return line.removesuffix('\n').removesuffix('\r')


def load(directory: str | os.PathLike[str], seed: int | None = None) -> Trained:
  """Returns a trained model of a run, finished or not.

  The data set is not read, and need not be there any more: training wrote the
  facts that the task needs to task.json. A task that cannot be restored is
  loaded by way of its data.

  Nothing is written, so the run may go on meanwhile.

  Args:
    directory: the run directory.
    seed: one of its seeds; None for the first.

  Raises:
    FileNotFoundError: there is no run, or the seed has no checkpoint.
    ValueError: `seed` is no integer, or the run had another task or, where the
      data are read, other data than there are here.
    RunFileError: a file is damaged.
  """
  path = fields.expand(directory)
  config, run = run_directory.read(path)
  fields.check(config, {'task': fields.text()}, 'config')
  # `tasks.register` also takes functions, which have no `restore`.
  make: Any = tasks.find(config.task)

  def read() -> tasks.Task:
    task = make(config)
    if task.dataset != run['dataset']:
      raise ValueError(
          f'the run in {path} was on {run["dataset"]!r}, but the data here are'
          f' {task.dataset!r}'
      )
    run_directory.check_data(path, run, run_data.of_task(task))
    return task

  if 'task.json' in run['files'] and hasattr(make, 'restore'):
    described = path / 'task.json'
    try:
      task = make.restore(config, files.read_json(described, dict))
    except (KeyError, TypeError) as error:
      raise files.RunFileError(
          f'{described} is not what the task {config.task!r} needs now:'
          f' {type(error).__name__}: {error}; the task as it was in training'
          ' would read it'
      ) from error
    task.dataset, task.splits = run['dataset'], _Splits(lambda: read().splits)
  else:
    task = read()
  if seed is None:
    seed = config.seed
  elif isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
    raise ValueError(f'seed must be an integer or None, got {seed!r}')
  return Trained(restore_best(task, path, int(seed)), config, int(seed), task)


class _Splits(Mapping):
  """The splits of a restored task, read when they are first asked for."""

  def __init__(self, read: Callable[[], Mapping[str, protocol.Split]]):
    self._read = functools.cache(read)

  def __getitem__(self, name: str) -> protocol.Split:
    return self._read()[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._read())

  def __len__(self) -> int:
    return len(self._read())


@promotion.of_dtypes
@promotion.of_ranks
def evaluate(
    experiment: experiments.Experiment, seed: int | None = None
) -> str:
  """Tests the best model of each seed once more; returns the last line.

  Args:
    experiment: the result of `prepare`, with the data set.
    seed: the only seed that is tested; None for all.

  Raises:
    FileNotFoundError: a seed has no checkpoint.
  """
  config, task = experiment.config, experiment.task
  metrics, tests = protocol.all_metrics(task), []
  test = experiment.program.load(task.splits['test'])
  seeds: Iterable[int] = range(config.seed, config.seed + config.num_seeds)
  if seed is not None:
    seeds = [seed]
  for seed in seeds:
    model = best_model(experiment, seed)
    best = experiment.placement.replicate(step.split(model)[1:])
    results = evaluate_best(experiment, best, test)
    for name, values in results.items():
      numbers = ', '.join(f'{m.name} {m.text(values[m.name])}' for m in metrics)
      processes.say(f'seed {seed}: {name} {numbers}')
    tests.append(results['test'])
  summary = {'test': report.summary(tests, metrics)}
  return report.main_result(summary, metrics)
