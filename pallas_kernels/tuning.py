"""How kernels cut their work: heuristics from shapes, and what was measured.

A configuration changes speed, never results beyond rounding. The measurements
behind the numbers here are in benchmarks/linear_h200.json.
"""

from collections.abc import Sequence

from pallas_kernels import targets
from pallas_kernels.mosaic_gpu import streams as streams_lib

Config = streams_lib.Config
Stream = streams_lib.Stream

# Shared memory that the rings of one multiprocessor may take, in bytes.
_SHARED = 220 * 1024

# Below this many tiles of batch and features, time is cut into segments.
_FEW_TILES = 40

# Fewer steps than these are not worth a segment.
_SEGMENT_STEPS = 128

# What a warpgroup has in flight from device memory, in bytes and in blocks.
_IN_FLIGHT = 64 * 1024
_MAX_STAGES = 6


def linear(
    layout: streams_lib.Layout,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: targets.Target,
) -> Config:
  """Chooses the configuration of a linear recurrence.

  Args:
    layout: of all streams.
    inputs: the streams that are read.
    outputs: the streams that are written.
    target: the device.
  """
  tiles = _tiles(layout)
  segments = 1
  if tiles < _FEW_TILES:
    most = max(1, layout.time // _SEGMENT_STEPS)
    segments = min(max(1, target.cores // tiles), most)
  size = sum(s.dtype.itemsize for s in (*inputs, *outputs))
  # Two warpgroups share what one would otherwise do alone, where there is
  # shared memory for blocks of 16 rows in both.
  warpgroups = 2 if tiles * segments <= target.cores and size >= 24 else 1
  steps = -(-layout.time // (segments * warpgroups))
  return _fit(layout, inputs, outputs, target, segments, warpgroups, steps)


def diagonal(
    layout: streams_lib.Layout,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: targets.Target,
    operations: int,
) -> Config:
  """Chooses the configuration of a diagonal recurrence.

  Args:
    layout: of all streams.
    inputs: the streams that are read.
    outputs: the streams that are written.
    target: the device.
    operations: how many operations a step is; blocks are unrolled.
  """
  steps = min(layout.time, max(1, _UNROLLED // max(1, operations)))
  return _fit(layout, inputs, outputs, target, 1, 1, steps)


# Operations in an unrolled block: more take long to compile and gain nothing.
_UNROLLED = 1500


def _tiles(layout: streams_lib.Layout) -> int:
  return layout.batch * layout.padded // streams_lib.LANES


def _fit(layout, inputs, outputs, target, segments, warpgroups, steps):
  """Returns the largest blocks, and enough of them, that fit."""
  resident = -(-_tiles(layout) * segments // target.cores)
  budget = _SHARED // min(max(resident, 1), 2)
  block = streams_lib.LANES * sum(s.dtype.itemsize for s in inputs)
  for rows in _candidates(steps):
    enough = max(2, -(-_IN_FLIGHT // (rows * block * warpgroups)))
    waves = -(-steps // rows)
    for stages in range(min(enough, _MAX_STAGES, max(waves, 1)), 0, -1):
      config = Config(rows, warpgroups, segments, stages)
      if streams_lib.shared_bytes(inputs, outputs, config) <= budget:
        if stages > 1 or waves == 1:
          return config
  return Config(1, 1, 1, 1)


def _candidates(steps: int) -> list[int]:
  """Returns numbers of rows to try, best first."""
  sizes = [rows for rows in (16, 8, 4, 2, 1) if rows <= steps]
  # A divisor of the steps leaves no block that reaches beyond them.
  exact = [r for r in range(min(16, steps), 7, -1) if steps % r == 0]
  return exact[:1] + sizes
