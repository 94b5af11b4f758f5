"""`train.py --profile`: where the time of a training step goes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import gzip
import json
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax

from pallas_kernels import promotion
from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import visits

# Reads a trace of JAX's profiler: which operators ran, how often, how long.
#
# The profiler writes events in Chrome's JSON. An event of the compiled program
# names its HLO instruction, and the compiled program's text says from which
# part of the model that instruction is: `jax.named_scope` in layers and models
# names the parts.


# Scopes of layers, models and the training step; the innermost one counts.
PARTS = (
    'projection',
    'recurrence',
    'concatenation',
    'attention',
    'logits',
    'optimizer',
)
OTHER = 'other'

_INSTRUCTION = re.compile(r'%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"')
_PART = re.compile(rf'\b({"|".join(PARTS)})\b')
# Their events last as long as those of the operators inside of them.
_CONTROL = re.compile(r'(while|conditional|call)(\.\d+)*$')


class Operator(NamedTuple):
  """An operator of the compiled program, over all steps of a trace.

  Attributes:
    name: of its HLO instruction or, on a GPU, of its kernel.
    part: of the model, one of `PARTS` or 'other'.
    direction: 'forward' or 'backward'.
    runs: how often it ran.
    microseconds: how long in all.
  """

  name: str
  part: str
  direction: str
  runs: int
  microseconds: float


class Trace(NamedTuple):
  """The operators of a trace.

  Attributes:
    operators: the longest first.
    span: microseconds from the start of the first to the end of the last.
    gaps: microseconds of the span in which no operator ran.
    is_device: whether these are kernels that the host launched on a device.
  """

  operators: list[Operator]
  span: float
  gaps: float
  is_device: bool


def scopes(program_text: str) -> dict[str, str]:
  """Returns the path of each instruction in the traced program.

  Args:
    program_text: `as_text()` of what `jax.jit(...).lower(...).compile()` gave.
  """
  return {
      match[1]: match[2]
      for line in program_text.splitlines()
      if (match := _INSTRUCTION.search(line))
  }


def read(directory: pathlib.Path, paths: Mapping[str, str]) -> Trace:
  """Returns the operators of the latest trace in a directory.

  Args:
    directory: that `jax.profiler.trace` wrote to.
    paths: of `scopes`.

  Raises:
    ValueError: there is no trace, or no operator in it.
  """
  found = sorted(
      directory.rglob('*.trace.json.gz'), key=lambda path: path.stat().st_mtime
  )
  if not found:
    raise ValueError(f'{directory} holds no *.trace.json.gz of a profiler')
  with gzip.open(found[-1]) as file:
    events = json.load(file)['traceEvents']
  streams = _streams(events)
  operators = list(_operators(events, streams))
  if not operators:
    raise ValueError(f'{found[-1]} has no operator of a compiled program')
  counts: dict[tuple[str, str], list[float]] = {}
  for event in operators:
    instruction = event.get('args', {}).get('hlo_op', '')
    counts.setdefault((event['name'], instruction), []).append(event['dur'])
  rows = [
      Operator(
          name, *_place(paths.get(instruction, '')), len(times), sum(times)
      )
      for (name, instruction), times in counts.items()
  ]
  span, gaps = _gaps(operators)
  return Trace(
      sorted(rows, key=lambda row: -row.microseconds), span, gaps, bool(streams)
  )


def _streams(events: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
  """Returns process and thread of each stream of a GPU."""
  named = [event for event in events if event.get('ph') == 'M']
  devices = {
      event['pid']
      for event in named
      if event['name'] == 'process_name'
      and event['args']['name'].startswith('/device:')
  }
  return {
      (event['pid'], event['tid'])
      for event in named
      if event['name'] == 'thread_name'
      and event['pid'] in devices
      and event['args']['name'].startswith('Stream')
  }


def _operators(
    events: Sequence[Mapping[str, Any]], streams: set[tuple[int, int]]
) -> Iterator[Mapping[str, Any]]:
  """Yields the events of kernels or, without a GPU, of instructions."""
  for event in events:
    if event.get('ph') != 'X':
      continue
    if streams:
      if (event['pid'], event['tid']) in streams:
        yield event
    elif 'hlo_op' in event.get('args', {}) and not _CONTROL.match(
        event['args']['hlo_op']
    ):
      yield event


def _place(path: str) -> tuple[str, str]:
  """Returns part and direction of an instruction of that path."""
  parts = _PART.findall(path)
  direction = 'backward' if 'transpose(' in path else 'forward'
  return parts[-1] if parts else OTHER, direction


def _gaps(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
  """Returns the span of events, and how much of it none of them covers."""
  begins = sorted((event['ts'], event['ts'] + event['dur']) for event in events)
  first, end = begins[0][0], begins[0][0]
  gaps = 0.0
  for begin, stop in begins:
    gaps += max(begin - end, 0.0)
    end = max(end, stop)
  return end - first, gaps


# Steps of a trace; a profiler keeps a limited number of events.
NUM_STEPS = 5
# Operators that are listed.
_LISTED = 20


@promotion.of_dtypes
@promotion.of_ranks
def profile(experiment: experiments.Experiment) -> str:
  """Returns a table of the operators of a few steps, and writes their trace.

  The steps are the first ones of the first seed, compiled before. Nothing of
  the run but its directory `profile` is touched.

  Args:
    experiment: what `prepare` returned.

  Raises:
    ValueError: the profiler wrote no trace, or one without operators.
    OSError: the trace cannot be written.
  """
  program, config = experiment.program, experiment.config
  keys = jax.random.split(jax.random.key(config.seed), 3)
  examples, order, most = _batches(experiment, keys[1])
  num_steps = min(NUM_STEPS, most)
  given = examples, order, num_steps, 1.0, keys[2]
  state = program.init(keys[0])
  compiled = program.train_steps.lower(state, *given).compile()  # type: ignore[attr-defined]
  state = jax.block_until_ready(compiled(state, *given))
  start = time.monotonic()
  state = jax.block_until_ready(compiled(state, *given))
  seconds = time.monotonic() - start
  directory = experiment.workdir / 'profile'
  options = jax.profiler.ProfileOptions()
  # Frames of Python would fill the trace.
  options.python_tracer_level = 0
  with jax.profiler.trace(str(directory), profiler_options=options):
    jax.block_until_ready(compiled(state, *given))
  trace = read(directory, scopes(compiled.as_text()))
  head = [
      f'experiment: {experiment.name}',
      f'device: {experiment.placement.text}',
      f'trace: {directory}',
      f'a step takes {seconds / num_steps * 1e3:.3f} ms without the profiler',
  ]
  if isinstance(examples, visits.Lesson):
    head.append('the steps are those of the first lesson; later ones differ')
  return '\n'.join([*head, *table(trace, num_steps)]) + '\n'


def table(trace: Trace, num_steps: int) -> list[str]:
  """Returns the lines of a table of parts and one of operators.

  Args:
    trace: of some steps.
    num_steps: how many.
  """
  step = lambda value: value / num_steps
  busy = sum(row.microseconds for row in trace.operators)
  count = sum(row.runs for row in trace.operators)
  word = 'launches' if trace.is_device else 'operators'
  lines = [
      f'traced: {step(trace.span) / 1e3:.3f} ms a step, of which'
      f' {step(trace.gaps) / 1e3:.3f} ms ({trace.gaps / trace.span:.0%})'
      f' without an operator; {step(count):.0f} {word} a step',
      '',
  ]
  parts: dict[tuple[str, str], list[Operator]] = {}
  for row in trace.operators:
    parts.setdefault((row.part, row.direction), []).append(row)

  def line(first, second, rows: Iterable[Operator], name=''):
    rows = list(rows)
    times = sum(row.microseconds for row in rows)
    runs = sum(row.runs for row in rows)
    return (
        f'{first:<14}{second:<10}{step(runs):>10.1f}{step(times) / 1e3:>12.4f}'
        f'{times / busy:>8.1%}  {name}'
    ).rstrip()

  title = f'{"part":<14}{"":<10}{"a step":>10}{"ms a step":>12}{"share":>8}'
  lines.append(title)
  by_time = sorted(
      parts.items(), key=lambda item: -sum(r.microseconds for r in item[1])
  )
  lines += [line(*key, rows) for key, rows in by_time]
  lines += ['', f'{title}  operator']
  lines += [
      line(row.part, row.direction, [row], row.name[:60])
      for row in trace.operators[:_LISTED]
  ]
  if len(trace.operators) > _LISTED:
    lines.append(f'and {len(trace.operators) - _LISTED} more operators')
  return lines


def _batches(
    experiment: experiments.Experiment, key: jax.Array
) -> tuple[Any, Any, int]:
  """Returns examples and order of the first steps, and how many these are."""
  config, placement = experiment.config, experiment.placement
  train, steps = experiment.task.splits['train'], experiment.steps_per_epoch
  given = experiment.program, placement
  if isinstance(train, protocol.Generator) or config.keep_data_on == 'device':
    if placement.mesh is None:
      train = experiment.program.load(train)
    return *feeds.Feed(*given, train, key, 1).epoch(1), steps
  piece = next(feeds.Pieces(*given, train, key, 1).epoch(1))
  return piece.examples, piece.order, piece.num_steps
