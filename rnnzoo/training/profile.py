"""`train.py --profile`: where the time of a training step goes.

JAX's profiler writes events in Chrome's JSON. An event of the compiled program
names its HLO instruction, and the program's text says from which part of the
model that instruction is: `jax.named_scope` in layers and models names the
parts.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import gzip
import json
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels import promotion
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import visits

# Scopes of layers, models and the training step; the innermost one counts.
PARTS = (
    'projection',
    'recurrence',
    'concatenation',
    'attention',
    'logits',
    'optimizer',
)
_INSTRUCTION = re.compile(r'%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"')
_PART = re.compile(rf'\b({"|".join(PARTS)})\b')
# Their events last as long as the events of the operators inside.
_CONTROL = re.compile(r'(while|conditional|call)(\.\d+)*$')

# Steps of a trace; a profiler keeps a limited number of events.
NUM_STEPS = 5
# Operators in the table.
_LISTED = 20


class Operator(NamedTuple):
  """An operator of the compiled program, over all steps of a trace.

  Attributes:
    name: its HLO instruction or, on a GPU, its kernel.
    part: the part of the model, one of `PARTS` or 'other'.
    direction: 'forward' or 'backward'.
    runs: the number of its runs.
    microseconds: the sum of its times.
  """

  name: str
  part: str
  direction: str
  runs: int
  microseconds: float


def read(
    directory: pathlib.Path, program_text: str
) -> tuple[list[Operator], float, float]:
  """Returns the operators of a directory's latest trace, the longest first.

  Args:
    directory: the folder that `jax.profiler.trace` wrote to.
    program_text: the compiled program, from `as_text()`.

  Returns:
    The operators; the microseconds from the start of the first to the end of
    the last; and the microseconds in which no operator ran.

  Raises:
    ValueError: there is no trace, or no operator in it.
  """
  found = sorted(
      directory.rglob('*.trace.json.gz'), key=lambda path: path.stat().st_mtime
  )
  if not found:
    raise ValueError(f'{directory} holds no *.trace.json.gz of a profiler')
  with gzip.open(found[-1]) as file:
    events = list(_of_operators(json.load(file)['traceEvents']))
  if not events:
    raise ValueError(f'{found[-1]} has no operator of a compiled program')
  scopes = dict(_INSTRUCTION.findall(program_text))
  times = collections.defaultdict(list)
  for event in events:
    scope = scopes.get(event.get('args', {}).get('hlo_op', ''), '')
    part = (['other'] + _PART.findall(scope))[-1]
    direction = 'backward' if 'transpose(' in scope else 'forward'
    times[event['name'], part, direction].append(event['dur'])
  operators = [Operator(*key, len(own), sum(own)) for key, own in times.items()]
  starts, ends = np.array(
      sorted((e['ts'], e['ts'] + e['dur']) for e in events)
  ).T
  ends = np.maximum.accumulate(ends)
  gaps = np.maximum(starts[1:] - ends[:-1], 0.0).sum()
  operators.sort(key=lambda row: -row.microseconds)
  return operators, float(ends[-1] - starts[0]), float(gaps)


def _of_operators(
    events: Sequence[Mapping[str, Any]],
) -> Iterator[Mapping[str, Any]]:
  """Yields the events of a GPU's kernels or, without one, of instructions."""
  named = [event for event in events if event.get('ph') == 'M']
  of_kind = lambda kind, start: [
      event
      for event in named
      if event['name'] == kind and event['args']['name'].startswith(start)
  ]
  devices = {event['pid'] for event in of_kind('process_name', '/device:')}
  threads = of_kind('thread_name', 'Stream')
  streams = {(e['pid'], e['tid']) for e in threads if e['pid'] in devices}
  for event in events:
    if event.get('ph') != 'X':
      continue
    instruction = event.get('args', {}).get('hlo_op')
    if streams:
      if (event['pid'], event['tid']) in streams:
        yield event
    elif instruction and not _CONTROL.match(instruction):
      yield event


@promotion.of_dtypes
@promotion.of_ranks
def profile(experiment: experiments.Experiment) -> str:
  """Returns a table of the operators of a few steps, and writes their trace.

  The steps are the first ones of the first seed, compiled before. Nothing of
  the run but its directory `profile` is touched.

  Args:
    experiment: the experiment from `prepare`.

  Raises:
    ValueError: the profiler wrote no trace, or one without operators.
    OSError: the trace cannot be written.
  """
  program, config = experiment.program, experiment.config
  keys = jax.random.split(jax.random.key(config.seed), 3)
  train = feeds.training_split(experiment)
  feed = feeds.Feed(
      program, experiment.placement, train, keys[1], 1, config.keep_data_on
  )
  examples, order, most = next(feed.epoch(1))
  num_steps = min(NUM_STEPS, most)
  given = examples, order, num_steps, 1.0, keys[2]
  state = program.init(keys[0])
  compiled = program.train_steps.lower(state, *given).compile()
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
  lines = [
      f'experiment: {experiment.name}',
      f'device: {experiment.placement.text}',
      f'trace: {directory}',
      f'a step takes {seconds / num_steps * 1e3:.3f} ms without the profiler',
  ]
  if isinstance(examples, visits.Lesson) and examples.index < len(
      train.lessons
  ):
    lines.append('the steps are those of the first lesson; later ones differ')
  lines += table(*read(directory, compiled.as_text()), num_steps)
  return '\n'.join(lines) + '\n'


def table(
    operators: Sequence[Operator], span: float, gaps: float, num_steps: int
) -> list[str]:
  """Returns the lines of a table of parts and one of operators; see `read`."""
  busy = sum(row.microseconds for row in operators)
  count = sum(row.runs for row in operators)

  def line(row: Operator, name: str = '') -> str:
    return (
        f'{row.part:<14}{row.direction:<10}{row.runs / num_steps:>10.1f}'
        f'{row.microseconds / num_steps / 1e3:>12.4f}'
        f'{row.microseconds / busy:>8.1%}  {name}'
    ).rstrip()

  parts = collections.defaultdict(list)
  for row in operators:
    parts[row.part, row.direction].append(row)
  sums = [
      Operator('', *key, sum(r.runs for r in rows), sum(r[-1] for r in rows))
      for key, rows in parts.items()
  ]
  title = f'{"part":<14}{"":<10}{"a step":>10}{"ms a step":>12}{"share":>8}'
  lines = [
      f'traced: {span / num_steps / 1e3:.3f} ms a step, of which'
      f' {gaps / num_steps / 1e3:.3f} ms ({gaps / span:.0%}) without an'
      f' operator; {count / num_steps:.0f} operators a step',
      '',
      title,
      *map(line, sorted(sums, key=lambda row: -row.microseconds)),
      '',
      f'{title}  operator',
      *(line(row, row.name[:60]) for row in operators[:_LISTED]),
  ]
  if len(operators) > _LISTED:
    lines.append(f'and {len(operators) - _LISTED} more operators')
  return lines
