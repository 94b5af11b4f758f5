"""Traces and lowers the programs of cases, here or in other processes.

Tracing and lowering are Python, which one thread at a time can run, and take
longer than XLA where kernels are lowered. A process hands on a program that is
lowered; it is compiled here, where no two searches for the fastest product
disturb each other.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import threading
import time
import traceback
from typing import Any, NamedTuple

import jax
from jax import export

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

# How many processes give way to threads that compile or time.
_NICE = 10

# Kernels are handed on as they are.
_CHECKS = [export.DisabledSafetyCheck.custom_call('mosaic_gpu_v2')]

# Facts of a case, for all of its rows.
Note = Callable[[cases.Case], dict[str, Any]]


def no_facts(case: cases.Case) -> dict[str, Any]:
  """A `Note` without any; other processes are sent its name."""
  del case
  return {}


class Way(NamedTuple):
  """A program of a case.

  Attributes:
    exact: whether it is the reference, in `Case.exact_dtype`.
  """

  implementation: str
  direction: str
  exact: bool = False


def function(problem: problems.Problem, way: Way) -> Callable[..., Any]:
  """Returns a function of the problem's arguments."""
  if not way.exact:
    return problem.function(way.implementation, way.direction)
  dtype = problem.case.exact_dtype
  run = problem.function(way.implementation, way.direction, dtype)
  widen = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
  return lambda *arguments: run(*widen(arguments))


def precision(way: Way) -> contextlib.AbstractContextManager[Any]:
  """Returns the context to trace and compile it in."""
  stack = contextlib.ExitStack()
  if way.exact:
    stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.default_matmul_precision('highest'))
  return stack


def _read(arguments: tuple[Any, ...], way: Way) -> tuple[Any, ...]:
  """Returns those arguments that a program reads.

  One that is handed on keeps all its arguments; forward has no use of weights.
  """
  return arguments[:1] if way.direction == cases.DIRECTIONS[0] else arguments


class Lowered(NamedTuple):
  """A program of leaves to leaves: not every structure can be handed on.

  Attributes:
    text: of `jax.export`.
    results: anything with the structure of the results.
    seconds: that it took.
  """

  text: bytearray
  results: Any
  seconds: float


def _lower(problem: problems.Problem, way: Way) -> Lowered:
  """Traces and lowers a program of a problem."""
  start = time.perf_counter()
  results: list[Any] = []
  leaves, structure = jax.tree.flatten(_read(problem.arguments, way))

  def called(leaves):
    read = jax.tree.unflatten(structure, leaves)
    run = function(problem, way)
    found, structure_of_results = jax.tree.flatten(run(*(*read, None)[:2]))
    numbers = list(range(len(found)))
    results.append(jax.tree.unflatten(structure_of_results, numbers))
    return found

  with precision(way):
    program = export.export(jax.jit(called), disabled_checks=_CHECKS)
    text = program(leaves).serialize()
  return Lowered(text, results[-1], time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case whose programs are lowered.

  Attributes:
    programs: each, or why it cannot be. Those of baselines are left out:
      cuDNN's calls cannot be handed on.
    arguments: shapes and dtypes.
    facts: of a `Note`.
  """

  case: cases.Case
  programs: Mapping[Way, Lowered | Exception]
  arguments: Any
  facts: dict[str, Any]

  def lower(self, way: Way, quick: bool) -> Callable[[], timing.Program]:
    """Returns the program's compilation, as `timing.lower` does."""
    if way.implementation in baselines.NAMES:
      return Here(problems.abstract(self.case)).lower(way, quick)
    found = self.programs[way]
    if isinstance(found, Exception):
      raise found
    structure = jax.tree.structure(found.results)
    # It says where the functions are that a kernel of another process calls.
    with contextlib.suppress(ImportError):
      importlib.import_module('jax.experimental.mosaic.gpu')

    def run(*arguments):
      call = export.deserialize(found.text).call
      leaves = call(jax.tree.leaves(_read(arguments, way)))
      return jax.tree.unflatten(structure, leaves)

    def finish() -> timing.Program:
      with precision(way):
        program = timing.lower(run, *self.arguments, quick=quick)()
      seconds = program.compile_s + found.seconds
      return dataclasses.replace(program, compile_s=seconds)

    return finish


@dataclasses.dataclass(frozen=True)
class Here:
  """Like `Prepared`; traces and lowers in this thread, when it is asked to."""

  problem: problems.Problem

  def lower(self, way: Way, quick: bool) -> Callable[[], timing.Program]:
    """Returns the program's compilation, as `timing.lower` does."""
    with precision(way):
      run = function(self.problem, way)
      return timing.lower(run, *self.problem.arguments, quick=quick)


def prepare(case: cases.Case, ways: list[Way], note: Note) -> Prepared:
  """Traces and lowers programs of a case for the device that is here."""
  problem = problems.abstract(case)
  programs: dict[Way, Any] = {}
  for way in ways:
    if way.implementation in baselines.NAMES:
      continue
    try:
      programs[way] = _lower(problem, way)
    except NotImplementedError as error:
      programs[way] = NotImplementedError(str(error))
    except Exception as error:
      traceback.print_exception(error)
      # Not every exception can be sent.
      programs[way] = RuntimeError(f'{type(error).__name__}: {error}')
  return Prepared(case, programs, problem.arguments, note(case))


@contextlib.contextmanager
def processes(count: int) -> Iterator[futures.Executor]:
  """Gives processes that run `prepare`."""
  # A process that is forked would have JAX's locks, and not their threads.
  context = multiprocessing.get_context('spawn')
  config: Any = jax.config  # Its attributes have no types.
  platforms = (config.jax_platforms,)
  pool = futures.ProcessPoolExecutor(count, context, _start, platforms)
  try:
    yield pool
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _start(platforms: str | None) -> None:
  """Begins a process, which sees the device and keeps none of its memory."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
  os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'platform'
  os.nice(_NICE)
  jax.config.update('jax_platforms', platforms)
  # The same jax reads a program: it is to be the one that would run here.
  jax.config.update('jax_export_ignore_forward_compatibility', True)


def _end_with_parent() -> None:
  """Ends the process when its parent is no more, as after a watchdog."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)
