"""Cuts of linear and diagonal kernels: rows, warpgroups, segments, stages.

A cut changes speed, never results beyond rounding. The rule has three costs:

* Bytes in flight. Too many slow a kernel down; too few leave the memory idle.
* Waiting. It takes hundreds of cycles a block, so blocks must be large enough
  to hide it.
* Occupancy. If sequences times tiles of features are fewer than the
  multiprocessors, time is cut into segments, which several CTAs run; where they
  are more, a multiprocessor has several.

The numbers are the fastest ones on an H200. The measurements behind them are in
benchmarks/tuning_streaming_h200.json.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from pallas_kernels import devices
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import handoffs

Config = blocks.Config
Stream = blocks.Stream

# Ways to keep ever more steps of a tile in flight: (rows, warpgroups, stages)
# of a forward kernel and of an adjoint.
_FORWARD = (
    (16, 1, 3),
    (8, 4, 2),
    (8, 4, 3),
    (16, 4, 2),
    (16, 4, 3),
    (32, 4, 2),
)
_ADJOINT = (
    (8, 1, 3),
    (8, 2, 2),
    (8, 2, 3),
    (8, 4, 2),
    (8, 4, 3),
    (16, 4, 2),
    (16, 4, 3),
)

# The same of complex arrays, which several warpgroups help little: each thread
# copies for itself.
_COMPLEX_FORWARD = ((16, 1, 4), (16, 2, 4))
_COMPLEX_ADJOINT = ((16, 1, 2), (16, 2, 2))

# Bytes of each stream in flight on the whole device where it is fastest.
_FORWARD_IN_FLIGHT = 3 * 2**20
_ADJOINT_IN_FLIGHT = 2 * 2**20
_COMPLEX_IN_FLIGHT = (8 * 2**20, 4 * 2**20)

# Bytes of a multiprocessor's shared memory that the rings leave: the hand-off
# between warpgroups takes 2 KiB.
_OTHERS = 11 * 1024

# Fewest segments of a forward kernel and of an adjoint, and their fewest steps:
# below that a kernel without segments is faster.
_FEWEST_SEGMENTS = (6, 4)
_SEGMENT_STEPS = 256

# Each CTA polls the maps of all segments of a wave, or of groups of them; a
# complex map has twice the words. More complex segments than a group are whole
# groups.
_MAX_SEGMENTS, _MAX_COMPLEX_SEGMENTS = 32, 64

# Stages of a segment, and waves between the two reads of a block. The hand-off
# costs as much for few rows as for many, so blocks are as large as fit.
_SEGMENT_STAGES, _AHEAD = 4, 2
_COMPLEX_STAGES, _COMPLEX_AHEAD = 3, 1

# Rows of a block of a segment, which are unrolled.
_MAX_ROWS = 64

# Bytes that a CTA of a diagonal recurrence has in flight.
_DIAGONAL_IN_FLIGHT = 48 * 1024

# Operations in an unrolled block: more rows were faster up to there.
_UNROLLED = 2600


def linear(
    layout: blocks.Layout,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: devices.Target,
    adjoint: bool = False,
) -> Config:
  """Chooses the cut of a linear recurrence.

  Args:
    layout: the layout of all streams.
    inputs: the streams that are read.
    outputs: the streams that are written.
    target: the device.
    adjoint: whether it is for the backward pass.
  """
  tiles, by_thread = _tiles(layout), _by_thread(inputs, target)
  size = max(s.dtype.itemsize for s in inputs)
  # CTAs wait for each other, so all have to be on the device at once.
  most = min(target.cores // tiles, layout.time // _SEGMENT_STEPS)
  segments = min(most, _MAX_SEGMENTS) // 2 * 2
  if inputs[0].is_complex:
    segments = min(most, _MAX_COMPLEX_SEGMENTS)
    multiple = handoffs.GROUP if segments > handoffs.GROUP else 2
    segments = segments // multiple * multiple
  if segments >= _FEWEST_SEGMENTS[adjoint] and not target.interpret:
    stages, ahead = _SEGMENT_STAGES, _AHEAD
    if inputs[0].is_complex:
      stages, ahead = _COMPLEX_STAGES, _COMPLEX_AHEAD
    config = Config(
        rows=0,
        warpgroups=1,
        segments=segments,
        stages=stages,
        ahead=ahead,
        by_thread=by_thread,
    )
    rows = _segment_rows(config, inputs, outputs, target)
    config = dataclasses.replace(config, rows=rows)
    steps = -(-layout.time // segments)
    return _fit(config, steps, inputs, outputs, tiles * segments, target)
  config = _cut(tiles, size, inputs, outputs, target, adjoint)
  return _fit(config, layout.time, inputs, outputs, tiles, target)


def _cut(
    tiles: int,
    size: int,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: devices.Target,
    adjoint: bool,
) -> Config:
  """Returns the cut of a sequence without segments."""
  cuts: Sequence[tuple[int, int, int]] = _ADJOINT if adjoint else _FORWARD
  in_flight = _ADJOINT_IN_FLIGHT if adjoint else _FORWARD_IN_FLIGHT
  if inputs[0].is_complex:
    cuts = _COMPLEX_ADJOINT if adjoint else _COMPLEX_FORWARD
    in_flight = _COMPLEX_IN_FLIGHT[adjoint]
  wanted = in_flight / (tiles * size * blocks.LANES)
  every = [
      Config(
          rows=rows,
          warpgroups=groups,
          segments=1,
          stages=stages,
          by_thread=_by_thread(inputs, target),
      )
      for rows, groups, stages in cuts
  ]
  budget = _budget(tiles, target)
  size_of = lambda c: blocks.shared_bytes(inputs, outputs, c)
  configs = [c for c in every if size_of(c) <= budget] or every[:1]
  steps = lambda c: c.rows * c.warpgroups * c.stages
  if tiles > target.cores:
    # Several CTAs share a multiprocessor.
    most = [c for c in configs if steps(c) <= wanted]
    return most[-1] if most else configs[0]
  enough = [c for c in configs if steps(c) >= 0.9 * wanted]
  return enough[0] if enough else configs[-1]


def _segment_rows(
    config: Config,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: devices.Target,
) -> int:
  """Returns as many rows of a block as fit, a multiple of 8."""
  row = dataclasses.replace(config, rows=1)
  most = _budget(1, target) // blocks.shared_bytes(inputs, outputs, row)
  return max(8, min(most // 8 * 8, _MAX_ROWS))


def diagonal(
    layout: blocks.Layout,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: devices.Target,
    operations: int,
) -> Config:
  """Chooses the cut of a diagonal recurrence.

  Args:
    layout: the layout of all streams.
    inputs: the streams that are read.
    outputs: the streams that are written.
    target: the device.
    operations: about the number of operations of a step; blocks are unrolled.
  """
  rows = max(2, min(16, _UNROLLED // max(1, operations)))
  rows = 1 << (rows.bit_length() - 1)
  block = rows * blocks.LANES * sum(s.dtype.itemsize for s in inputs)
  stages = max(2, min(6, _DIAGONAL_IN_FLIGHT // block))
  config = Config(
      rows=rows,
      warpgroups=1,
      segments=1,
      stages=stages,
      by_thread=_by_thread(inputs, target),
  )
  return _fit(config, layout.time, inputs, outputs, _tiles(layout), target)


def _budget(ctas: int, target: devices.Target) -> int:
  """Returns the bytes of shared memory that a CTA may use."""
  return (target.shared - _OTHERS) // (2 if ctas > target.cores else 1)


def _by_thread(inputs: Sequence[Stream], target: devices.Target) -> bool:
  """Returns whether threads copy blocks, which TMA cannot."""
  return inputs[0].is_complex or not target.has_tma


def _tiles(layout: blocks.Layout) -> int:
  return layout.batch * layout.padded // blocks.LANES


def _fit(
    config: Config,
    steps: int,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    ctas: int,
    target: devices.Target,
) -> Config:
  """Returns the largest cut up to `config` that fits segments of `steps`."""
  budget = _budget(ctas, target)
  for smaller in _smaller(config, steps):
    if blocks.shared_bytes(inputs, outputs, smaller) <= budget:
      return smaller
  raise NotImplementedError(
      f'A GPU kernel cannot hold {len(inputs)} streams in and'
      f' {len(outputs)} out in shared memory.'
  )


def _smaller(config: Config, steps: int) -> Iterable[Config]:
  """Yields cuts with ever smaller blocks, fit for few steps."""
  rows, warpgroups = config.rows, config.warpgroups
  while rows > 8 and steps < warpgroups * rows:
    rows //= 2
  while warpgroups > 1 and steps < warpgroups * rows:
    warpgroups //= 2
  while True:
    waves = -(-steps // (warpgroups * rows))
    # As few rows as that many waves need.
    fewest = max(2, -(-steps // (warpgroups * waves)))
    # With one stage nothing is in flight while a block is computed.
    for stages in range(min(config.stages, waves), min(2, waves) - 1, -1):
      ahead = min(config.ahead, stages - 1)
      yield dataclasses.replace(
          config,
          rows=fewest,
          warpgroups=warpgroups,
          stages=stages,
          ahead=ahead,
      )
    if warpgroups == 1 and rows == 2:
      break
    if warpgroups > 1:
      warpgroups //= 2
    else:
      rows = max(2, rows // 2)
  yield dataclasses.replace(config, rows=2, warpgroups=1, stages=1, ahead=0)
