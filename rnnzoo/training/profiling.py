"""`train.py --profile`: where the time of a training step goes."""

from collections.abc import Iterable
import time
from typing import Any

import jax

from pallas_kernels import promotion
from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import pieces as pieces_lib
from rnnzoo.training import trace as trace_lib
from rnnzoo.training import visits

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
  trace = trace_lib.read(directory, trace_lib.scopes(compiled.as_text()))
  head = [
      f'experiment: {experiment.name}',
      f'device: {experiment.placement.text}',
      f'trace: {directory}',
      f'a step takes {seconds / num_steps * 1e3:.3f} ms without the profiler',
  ]
  if isinstance(examples, visits.Lesson):
    head.append('the steps are those of the first lesson; later ones differ')
  return '\n'.join([*head, *table(trace, num_steps)]) + '\n'


def table(trace: trace_lib.Trace, num_steps: int) -> list[str]:
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
  parts: dict[tuple[str, str], list[trace_lib.Operator]] = {}
  for row in trace.operators:
    parts.setdefault((row.part, row.direction), []).append(row)

  def line(first, second, rows: Iterable[trace_lib.Operator], name=''):
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
  piece = next(pieces_lib.Pieces(*given, train, key, 1).epoch(1))
  return piece.examples, piece.order, piece.num_steps
