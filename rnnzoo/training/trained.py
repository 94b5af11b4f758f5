"""Trained models of a run, for users and for the modes of `train.py`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import copy
import dataclasses
import functools
import inspect
import numbers
import os
import pathlib
from typing import Any

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
from rnnzoo.training import streams


def best_model(experiment: experiments.Experiment, seed: int) -> nnx.Module:
  """Returns the model of a seed's best epoch so far.

  The experiment is the result of `prepare` for the run directory.

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


@dataclasses.dataclass(frozen=True, repr=False)
class Trained:
  """The model of the best epoch of one seed.

  Its methods take data in the units of the data set, and check them.

  Attributes:
    model: the model, which takes normalised inputs and no others, most by
      `trained.model(trained.normalise(x))`.
    config: the config of the run.
    seed: one of the run's seeds.
    task: the task that predicts; a restored one has no `splits`.
  """

  model: nnx.Module
  config: ml_collections.ConfigDict
  seed: int
  task: tasks.Task

  def __repr__(self) -> str:
    model, leaves = self.config.model, jax.tree.leaves(nnx.state(self.model))
    return (
        f'Trained({self.config.task}: {model.layer} {model.num_layers} x'
        f' {model.features}, seed {self.seed}, '
        f'{sum(leaf.size for leaf in leaves):,} numbers)\n'
        '  trained.predict(x): x in units of the data'
        + '\n  trained.model(trained.normalise(x)): normalised x for the module'
        * self.task.calls_model
    )

  def predict(self, inputs: Any) -> Any:
    """Returns predictions, by one compiled call for inputs of one shape.

    They are arrays of JAX, or of numpy in float64 where sequences are answered
    with numbers.

    Args:
      inputs: arrays [B, ...], as in the task's splits; the task's
        `check_inputs` says which. The values of traced ones are not checked.

    Raises:
      ValueError: the task cannot use these inputs.
      NotImplementedError: the task has no such thing; the message says so.
    """
    return self._answer('predict', inputs)

  def predict_logits(self, inputs: Any) -> jax.Array:
    """Returns logits of the classes, [B, ..., classes]; see `predict_proba`."""
    return self._answer('predict_logits', inputs)

  def predict_proba(self, inputs: Any) -> jax.Array:
    """Returns the probability of each class, float32 [B, ..., classes].

    Classes are in the order of `task.class_names`, where the task has names.
    The largest probability is the class that `predict` returns, whose inputs
    and errors it has.
    """
    return self._answer('predict_proba', inputs)

  def predict_distribution(self, inputs: Any) -> Any:
    """Returns the distribution of each number of a forecast.

    It is a NamedTuple: `mean` as of `predict`, whose inputs and errors it has,
    `quantiles` [..., 19], and their `levels` from .05 to .95. With the head
    'point' (config.data.head), all quantiles are the prediction.
    """
    return self._answer('predict_distribution', inputs)

  def normalise(self, inputs: Any) -> Any:
    """Returns inputs of `predict` as `model` takes them.

    Lengths are left out; they are the model's `seq_lengths`.

    Raises:
      NotImplementedError: the task's answers are no single call of the model.
    """
    if not self.task.calls_model:
      raise NotImplementedError(
          f'the task {type(self.task).__name__} answers by predict, not by one'
          ' call of its model'
      )
    return self.task.model_inputs(self._checked(inputs))

  def score(self, inputs: Any, y: Any) -> dict[str, float]:
    """Returns all metrics of the task by name, the main one first.

    Inputs and errors are those of `predict`; y are the true answers, as the
    data set has them: names or numbers of classes, or numbers in their units.

    Raises:
      ValueError: y does not fit the inputs, or has an unknown class.
    """
    if _is_traced((inputs, y)):
      raise NotImplementedError('score works outside of jax.jit alone')
    examples = dict(self.task.examples(self._checked(inputs), y))
    whole = self._evaluated(examples)
    tested = copy.copy(self.task)
    tested.splits = {'test': examples}
    measured = tested.measure(self.model, 'test', whole.predictions)
    values = metrics_lib.of_test(whole, measured, tested)
    return {m.name: values[m.name] for m in protocol.all_metrics(tested)}

  def stream(self, answers: str = 'predict') -> streams.Stream:
    """Returns an object that answers step by step, by the method of that name.

    Raises:
      ValueError: there is no such method.
      NotImplementedError: the task answers whole inputs only, or the model
        reads backwards as well.
    """
    settings.choice(answers, _METHODS, 'answers')
    if not self.task.has_stream:
      raise NotImplementedError(
          f'the task {type(self.task).__name__} has no stream: it answers whole'
          ' inputs only'
      )
    model: Any = self.model
    model.initial_carry((1,))  # Or it says why not.
    state = nnx.state(model)

    def step(carry, reset, x):
      name, inputs = _METHODS[answers], self._checked(x)
      carry, raw = self._compiled(name, state, inputs, (carry, reset))
      return carry, self._finished(answers, raw)

    return streams.Stream(step)

  def _answer(self, method: str, inputs: Any) -> Any:
    inputs = self._checked(inputs)
    name, state = _METHODS[method], nnx.state(self.model)
    return self._finished(method, self._compiled(name, state, inputs))

  def _finished(self, method: str, raw: Any) -> Any:
    """Returns the answers of a method, of the answers of the task."""
    if method == 'predict':
      return self.task.in_units(raw)
    if method == 'predict_proba':
      return jax.nn.softmax(raw.astype(jnp.float32), axis=-1)
    return raw

  @promotion.of_dtypes
  @promotion.of_ranks
  def _checked(self, inputs: Any) -> Any:
    """Returns inputs as the task takes them; traced ones as they are."""
    leaves = jax.tree.leaves(inputs)
    wrong = [leaf for leaf in leaves if isinstance(leaf, str | bytes)]
    if wrong or not leaves:
      raise ValueError(
          'inputs must be arrays, as in the splits of the task, got'
          f' {settings.a(type((wrong or [inputs])[0]))}'
      )
    if _is_traced(inputs):
      if not self.task.calls_model:
        raise NotImplementedError(
            f'the task {type(self.task).__name__} answers outside of jax.jit'
            ' alone'
        )
      self.task.check_inputs(jax.tree.map(_shown, inputs))
      return inputs
    return self.task.check_inputs(inputs)

  def predict_lines(self, lines: Iterable[str]) -> Iterator[str]:
    """Returns a line for each line; their ends do not matter.

    Raises:
      NotImplementedError: the task reads no text; the message says so.
      ValueError: something is no line, or not UTF-8; the message says which.
    """
    return iter(self.task.predict_lines(self.model, self.checked_lines(lines)))

  def checked_lines(self, lines: Iterable[str]) -> Iterator[str]:
    """Returns lines without their ends; raises as `predict_lines` does."""
    if isinstance(lines, str) or not isinstance(lines, Iterable):
      raise ValueError(
          f'lines must be several strings, got {fields.shorten(lines)};'
          " ['a line'] would work"
      )
    checked = (_text(line, f'line {n}') for n, line in enumerate(lines, 1))
    return (line.removesuffix('\n').removesuffix('\r') for line in checked)

  def sample(
      self,
      prompt: str = '',
      key: jax.Array | int | None = None,
      *,
      length: int | None = None,
      temperature: float | None = None,
      top_k: int | None = None,
      top_p: float | None = None,
  ) -> Iterator[str]:
    """Returns pieces of text, which go on from the prompt.

    Args:
      prompt: the beginning of the text.
      key: seeds all random choices, or a number that does; None for the run's
        seed.
      length: the number of tokens after the prompt; None for the number in the
        run's config.
      temperature: divisor of a sample's logits, 0 for the most likely token;
        None for the one in the run's config.
      top_k: how many of the most likely tokens may be chosen; None for all.
      top_p: probability from 0 to 1. The fewest tokens that have it together
        may be chosen; None for all.

    Raises:
      NotImplementedError: the task makes no text, or its samples lack one of
        the options; the message says so.
      ValueError: the prompt cannot be, or a number is out of its range.
    """
    options: dict[str, Any] = {'length': length, 'temperature': temperature}
    options |= {'top_k': top_k, 'top_p': top_p}
    key = self._for_samples([prompt], key, options)
    return iter(self.task.sample(self.model, prompt, key, **options))

  def sample_many(
      self,
      prompts: Sequence[str],
      key: jax.Array | int | None = None,
      **options: Any,
  ) -> list[str]:
    """Returns a text for each prompt, all made together.

    Each is, up to the rounding of a larger batch, that of `sample`, whose
    options and errors it has, with the key `jax.random.fold_in(key, number)`,
    prompts being numbered from 0.

    Raises:
      ValueError: prompts are no list of strings, or an empty one.
    """
    if not isinstance(prompts, list | tuple) or not prompts:
      raise ValueError(
          f'prompts must be a list of strings, got {fields.shorten(prompts)};'
          " ['The '] would work"
      )
    key = self._for_samples(prompts, key, options)
    return self.task.sample_many(self.model, prompts, key, **options)

  def _for_samples(
      self, prompts: Sequence[str], key: Any, options: dict[str, Any]
  ) -> jax.Array:
    """Checks prompts and options, of which None goes; returns the key."""
    for prompt in prompts:
      _text(prompt, 'prompt')
    key = self.seed if key is None else key
    is_number = getattr(getattr(key, 'dtype', None), 'kind', '') in ('i', 'u')
    if is_number and not key.ndim:
      key = key.item()
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 2**32:
      key = jax.random.key(key)
    if not isinstance(key, jax.Array):
      raise ValueError(
          'key must be a jax.random.key or a number from 0 to 2**32 - 1, got'
          f' {fields.shorten(key)}'
      )
    known = inspect.signature(self.task.sample).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    names = {'length', 'temperature', 'top_k', 'top_p'}
    for name, x in [*options.items()]:
      if x is None:
        del options[name]
      elif name not in (names if takes_all else known):
        raise NotImplementedError(
            f'samples of the task {type(self.task).__name__} have no {name}'
        )
      # A number of numpy or JAX is as good as one of Python.
      elif hasattr(x, 'item') and not x.ndim:
        options[name] = x.item()
    return key

  @promotion.of_dtypes
  @promotion.of_ranks
  def perplexity(self, text: str) -> dict[str, float]:
    """Returns how well the model predicts a text.

    It is read in windows of `config.data.test_context` tokens, as the test is.
    The first token has no prediction.

    Returns:
      'perplexity' a token; 'bits_per_byte' of UTF-8, whatever the tokens are;
      and 'num_tokens' and 'num_bytes' of what is predicted.

    Raises:
      NotImplementedError: the task predicts no text; the message says so.
      ValueError: the text has fewer than two tokens, or characters that the
        model does not know.
    """
    examples = self.task.read_text(_text(text, 'text'))
    found = self._evaluated(examples)
    weights = np.asarray(found.weights, np.float64)
    total = lambda means: float(np.sum(weights * means))
    num_tokens, nats = total(1.0), total(found.losses)
    num_bytes = total(found.scores['bytes_per_token'])
    return {
        'perplexity': float(np.exp(nats / num_tokens)),
        'bits_per_byte': nats / num_bytes / float(np.log(2.0)),
        'num_tokens': round(num_tokens),
        'num_bytes': round(num_bytes),
    }

  def _evaluated(self, examples: protocol.Examples) -> protocol.Evaluation:
    """Returns the results of all examples, as arrays of numpy."""
    size = protocol.num_examples(examples)
    batch = min(size, self.config.eval_batch_size)
    parts = []
    for first in range(0, size, batch):
      # All batches are equally long; what is too much is cut off.
      rows, rest = np.arange(first, first + batch) % size, slice(size - first)
      part = {name: np.asarray(x)[rows] for name, x in examples.items()}
      found = self._compiled('evaluate', nnx.state(self.model), part)
      cut = functools.partial(lambda rest, x: np.asarray(x)[rest], rest)
      parts.append(jax.tree.map(cut, found))
    return jax.tree.map(lambda *part: np.concatenate(part), *parts)

  @functools.cached_property
  def _compiled(self) -> Any:
    """Compiled (method of the task, state, inputs, memory) -> its answers.

    The memory, of (carry, reset), makes a step of time of the inputs: then the
    carry after it comes before the answers.
    """
    graphdef = nnx.graphdef(self.model)

    @promotion.of_dtypes
    @promotion.of_ranks
    @functools.partial(jax.jit, static_argnums=0)
    def run(name, state, inputs, memory=None):
      model: Any = nnx.merge(graphdef, state)
      if memory is not None:
        model = streams.Stepping(model, *memory)
      found = getattr(self.task, name)(model, inputs)
      if isinstance(found, protocol.Evaluation):
        found = found._replace(scores=dict(found.scores))
      if memory is None:
        return found
      if self.task.every_step:
        found = jax.tree.map(lambda x: x[:, 0] if x.ndim > 1 else x, found)
      return model.carry, found

    return run


# Methods of `Trained`, and the methods of a task that they call.
_METHODS: Mapping[str, str] = {
    'predict': 'predict',
    'predict_distribution': 'distribution',
    'predict_logits': 'logits',
    'predict_proba': 'logits',
}


def _is_traced(tree: Any) -> bool:
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _shown(x: Any) -> Any:
  """Returns ones for a traced array, whose values cannot be checked."""
  if not isinstance(x, jax.core.Tracer):
    return x
  # A size that an exported program leaves open is 1.
  shape = (n if isinstance(n, int) else 1 for n in x.shape)
  return np.ones(tuple(shape), x.dtype)


def _text(text: Any, name: str) -> str:
  """Returns a text, or raises ValueError for what is none."""
  if not isinstance(text, str):
    raise ValueError(f'{name} must be a string, got {settings.a(type(text))}')
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:
    # Bytes of another encoding, which some locales let through.
    raise ValueError(
        f'{name} is not UTF-8: its character {error.start + 1} is'
        f' {text[error.start]!a}'
    ) from error
  return text


def load(directory: str | os.PathLike[str], seed: int | None = None) -> Trained:
  """Returns a trained model of a run, finished or not.

  The data set is not read, and need not be there any more: training wrote the
  facts that the task needs to run.json. A task that cannot be restored is
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

  if run['described'] is not None and hasattr(make, 'restore'):
    try:
      task = make.restore(config, run['described'])
    except (KeyError, TypeError) as error:
      raise files.RunFileError(
          f'{path}/run.json is not what the task {config.task!r} needs now:'
          f' {type(error).__name__}: {error}; the task as it was in training'
          ' would read it'
      ) from error
    task.dataset = run['dataset']
  else:
    task = make(config)
    if task.dataset != run['dataset']:
      raise ValueError(
          f'the run in {path} was on {run["dataset"]!r}, but the data here are'
          f' {task.dataset!r}'
      )
    run_directory.check_data(path, run, run_data.of_task(task), goes_on=False)
  if seed is None:
    seed = config.seed
  elif isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
    raise ValueError(f'seed must be an integer or None, got {seed!r}')
  return Trained(restore_best(task, path, int(seed)), config, int(seed), task)


@promotion.of_dtypes
@promotion.of_ranks
def evaluate(
    experiment: experiments.Experiment, seed: int | None = None
) -> str:
  """Tests the best model of each seed once more; returns the last line.

  `seed` is the only seed that is tested; None for all.

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
