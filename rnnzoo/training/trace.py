"""Reads a trace of JAX's profiler: which operators ran, how often, how long.

The profiler writes events in Chrome's JSON. An event of the compiled program
names its HLO instruction, and the compiled program's text says from which part
of the model that instruction is: `jax.named_scope` in layers and models names
the parts.
"""

from collections.abc import Iterator, Mapping, Sequence
import gzip
import json
import pathlib
import re
from typing import Any, NamedTuple

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
