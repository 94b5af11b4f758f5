"""`--profile`: where the time of training, or of decoding, goes.

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
    'embedding',
    'projection',
    'recurrence',
    'concatenation',
    'attention',
    'logits',
    'choice',
    'optimizer',
)
_MODULE = re.compile(r'^HloModule ([\w.-]+)', re.MULTILINE)
_INSTRUCTION = re.compile(r'^ *(?:ROOT )?%?([\w.-]+) = (.*)', re.MULTILINE)
_SCOPE = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
_OPERAND = re.compile(r'%([\w.-]+)')
_PART = re.compile(rf'\b({"|".join(PARTS)})\b')
# Their events last as long as the events of the operators inside.
_CONTROL = re.compile(r'(while|conditional|call)(\.\d+)*$')

# In a CUDA graph a profiler does not see whose kernel it is.
_NO_GRAPHS = {'xla_gpu_enable_command_buffer': ''}

# Steps of a trace; a profiler keeps a limited number of events.
NUM_STEPS = 5
# Operators in the table.
_LISTED = 20


class Operator(NamedTuple):
  """An operator of the compiled program, over all steps of a trace."""

  name: str  # Its HLO instruction or, on a GPU, its kernel.
  part: str  # The part of the model, one of `PARTS` or 'other'.
  direction: str  # 'forward' or 'backward'.
  runs: int  # The number of its runs.
  microseconds: float  # The sum of its times.


def read(
    directory: pathlib.Path, program_text: str
) -> tuple[list[Operator], float, float]:
  """Returns the operators of a directory's latest trace, the longest first.

  The directory is that of `jax.profiler.trace`; the text joins the compiled
  programs' `as_text()`.

  Returns:
    The operators; the microseconds from the start of the first to the end of
    the last; and the microseconds in which no operator ran.
  """
  traces = sorted(
      directory.rglob('*.trace.json.gz'), key=lambda path: path.stat().st_mtime
  )
  if not traces:
    raise ValueError(f'{directory} holds no *.trace.json.gz of a profiler')
  with gzip.open(traces[-1]) as file:
    events = list(_of_operators(json.load(file)['traceEvents']))
  if not events:
    raise ValueError(f'{traces[-1]} has no operator of a compiled program')
  _, *modules = _MODULE.split(program_text)
  scopes: dict[tuple[str, str], str] = {}
  for name, text in zip(modules[::2], modules[1::2], strict=True):
    for instruction, rest in _INSTRUCTION.findall(text):
      # One that XLA made without a scope is of the part that it reads.
      read = (scopes.get((name, x), '') for x in _OPERAND.findall(rest))
      found = _SCOPE.search(rest)
      scopes[name, instruction] = (
          found[1] if found else next(filter(None, read), '')
      )
  times = collections.defaultdict(list)
  for event in events:
    args = event.get('args', {})
    place = args.get('hlo_module', '').split('(')[0], args.get('hlo_op', '')
    scope = scopes.get(place, '')
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
  lowered = program.train_steps.lower(state, *given)
  compiled = lowered.compile()
  state = jax.block_until_ready(compiled(state, *given))
  start = time.monotonic()
  state = jax.block_until_ready(compiled(state, *given))
  seconds = time.monotonic() - start
  directory = experiment.workdir / 'profile'
  compiled = lowered.compile(compiler_options=_NO_GRAPHS)
  state = jax.block_until_ready(compiled(state, *given))
  with _trace(directory):
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


def _trace(directory: pathlib.Path) -> Any:
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # Frames of Python would fill the trace.
  return jax.profiler.trace(str(directory), profiler_options=options)


def of_decoding(
    task: Any, model: Any, directory: pathlib.Path, lines: Any = None
) -> str:
  """Returns a table of the operators that translate lines; writes their trace.

  Without lines it is those of the test.

  Raises:
    NotImplementedError: the task translates nothing.
    ValueError: the profiler wrote no trace, or one without operators.
    OSError: the trace cannot be written.
  """
  if not hasattr(task, 'decoding'):
    raise NotImplementedError(
        f'the task {type(task).__name__} decodes nothing that --profile could'
        ' time; train --profile times its training'
    )
  decoder, tokens = task.decoding(model, lines)
  decoder(tokens)  # Compiles, and shows how fast it is.
  speed, batches = decoder.speed(), decoder.batches
  decoder.programs.clear()
  decoder.compiler_options = _NO_GRAPHS
  decoder(tokens)
  with _trace(directory):
    decoder(tokens)
  text = '\n'.join(one.as_text() for one in decoder.programs.values())
  told = (
      f'{len(tokens)} lines in {batches} batches take'
      f' {speed["decoding_seconds"]:.3f} s without the profiler:'
      f' {speed["sentences_per_second"]:,.0f} sentences and'
      f' {speed["tokens_per_second"]:,.0f} tokens a second'
  )
  found = table(*read(directory, text), batches, 'batch')
  return '\n'.join([f'trace: {directory}', told, *found]) + '\n'


def table(
    operators: Sequence[Operator],
    span: float,
    gaps: float,
    num_steps: int,
    unit: str = 'step',
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
  title = (
      f'{"part":<14}{"":<10}{f"a {unit}":>10}{f"ms a {unit}":>12}{"share":>8}'
  )
  lines = [
      f'traced: {span / num_steps / 1e3:.3f} ms a {unit}, of which'
      f' {gaps / num_steps / 1e3:.3f} ms ({gaps / span:.0%}) without an'
      f' operator; {count / num_steps:.0f} operators a {unit}',
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
