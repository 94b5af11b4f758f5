"""How linear and diagonal kernels cut their work: measurements and heuristics.

A configuration changes speed, never results beyond rounding. What limits the
speed is not obvious: more bytes in flight than the latency of memory asks for
make it slower, and so does arithmetic that warps do one after the other. So
where a table below knows what was fastest on a device, it decides.
"""

from collections.abc import Iterable, Sequence

from pallas_kernels import targets
from pallas_kernels.mosaic_gpu import streams as streams_lib

Config = streams_lib.Config
Stream = streams_lib.Stream

# What was fastest for a linear recurrence of 128 tiles on 132 multiprocessors:
# (streams read, streams written, bytes an element) -> (rows, warpgroups,
# stages). Measured in November 2026 at (8, 4096, 2048); from process to process
# times differ by 10 %.
_MEASURED = {
    'NVIDIA H200': {
        (2, 1, 4): (16, 1, 3),
        (2, 1, 2): (32, 1, 4),
        (3, 1, 4): (8, 4, 3),
        (3, 1, 2): (16, 4, 2),
        (3, 2, 4): (8, 2, 3),
        (3, 2, 2): (8, 4, 2),
        (4, 2, 4): (8, 2, 3),
        (4, 2, 2): (8, 4, 2),
        (5, 3, 4): (8, 2, 3),
        (5, 3, 2): (8, 4, 2),
    }
}

# Tiles of the shape at which that was.
_MEASURED_TILES = 128

# Shared memory that the rings of one multiprocessor may take, in bytes: of 227
# KiB, what four warpgroups exchange takes 8.
_SHARED = 216 * 1024

# Below this many tiles of batch and features, time is cut into segments. With
# 64 tiles a card of 132 multiprocessors was as fast as with 128.
_FEW_TILES = 40

# Fewer steps than these are not worth a segment.
_SEGMENT_STEPS = 256

# Each CTA composes the maps of all segments, which it has in registers.
_MAX_SEGMENTS = 32

# Stages of a segment, and by how many waves a block is read the first time
# before the second. What CTAs tell each other costs the same for few rows and
# for many, so what matters most is that blocks are large: at (1, 65536, 1024)
# in float32 16, 32 and 40 rows took 0.36, 0.252 and 0.252 ms, and the adjoint
# 0.39 and 0.36 with 16 and 24; blocks 1 wave ahead were 7 % slower.
_SEGMENT_STAGES, _AHEAD = 4, 2

# Rows of a block there, which are unrolled.
_MAX_ROWS = 64

# What a multiprocessor has in flight from device memory, in bytes.
_IN_FLIGHT = 48 * 1024

# Operations in an unrolled block: more take long to compile and gain nothing.
_UNROLLED = 1200


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
  size = max(s.dtype.itemsize for s in inputs)
  if tiles < _FEW_TILES and not target.interpret:
    # CTAs wait for each other, so all have to be there at once.
    most = min(target.cores // tiles, layout.time // _SEGMENT_STEPS)
    segments = min(most, _MAX_SEGMENTS) // 2 * 2
    if segments:
      rows = _segment_rows(inputs, outputs)
      config = Config(rows, 1, segments, _SEGMENT_STAGES, _AHEAD)
      steps = -(-layout.time // segments)
      return _fit(config, steps, inputs, outputs, tiles * segments, target)
  table = _of_device(_MEASURED, target)
  rows, warpgroups, stages = table.get(
      (len(inputs), len(outputs), size), (8, 2, 2)
  )
  if tiles > target.cores:
    # Several CTAs share a multiprocessor and overlap by themselves.
    warpgroups = 1
  elif warpgroups == 1 and _FEW_TILES <= tiles < _MEASURED_TILES:
    # As many bytes in flight on the whole card, from fewer multiprocessors.
    # With 96 tiles that was 5 % faster in float32 and 2 % in bfloat16; several
    # warpgroups have more than enough in flight anyway.
    stages = -(-stages * _MEASURED_TILES // tiles)
  config = Config(rows, warpgroups, 1, stages)
  return _fit(config, layout.time, inputs, outputs, tiles, target)


def _segment_rows(inputs: Sequence[Stream], outputs: Sequence[Stream]) -> int:
  """Returns as many rows of a block as fit, a multiple of 8."""
  row = Config(1, 1, 1, _SEGMENT_STAGES)
  most = _SHARED // streams_lib.shared_bytes(inputs, outputs, row)
  return max(8, min(most // 8 * 8, _MAX_ROWS))


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
  rows = max(2, min(16, _UNROLLED // max(1, operations)))
  rows = 1 << (rows.bit_length() - 1)
  block = rows * streams_lib.LANES * sum(s.dtype.itemsize for s in inputs)
  stages = max(2, min(6, _IN_FLIGHT // block))
  config = Config(rows, 1, 1, stages)
  return _fit(config, layout.time, inputs, outputs, _tiles(layout), target)


def _of_device(tables, target: targets.Target):
  return tables.get(target.kind, tables['NVIDIA H200'])


def _tiles(layout: streams_lib.Layout) -> int:
  return layout.batch * layout.padded // streams_lib.LANES


def _fit(
    config: Config,
    steps: int,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    ctas: int,
    target: targets.Target,
) -> Config:
  """Returns a configuration like the given one that fits.

  Args:
    config: what would be best.
    steps: in a segment.
    inputs: the streams that are read.
    outputs: the streams that are written.
    ctas: how many CTAs there are.
    target: the device.
  """
  budget = _SHARED // (2 if ctas > target.cores else 1)
  for smaller in _smaller(config, steps):
    if streams_lib.shared_bytes(inputs, outputs, smaller) <= budget:
      return smaller
  raise NotImplementedError(
      f'A GPU kernel cannot hold {len(inputs)} streams in and'
      f' {len(outputs)} out in shared memory. {targets.OTHERWISE}'
  )


def _smaller(config: Config, steps: int) -> Iterable[Config]:
  """Returns configurations with ever smaller blocks, fit for few steps."""
  rows, warpgroups = config.rows, config.warpgroups
  while warpgroups > 1 and steps < warpgroups * rows:
    warpgroups //= 2
  rows = max(2, min(rows, steps))
  if steps < 8 * rows * warpgroups:
    # A divisor of few steps leaves no block that reaches far beyond them.
    wave = warpgroups
    sizes = range(rows, max(1, rows // 2), -1)
    rows = next((r for r in sizes if steps % (r * wave) == 0), rows)
  for stages in range(min(config.stages, -(-steps // rows)), 0, -1):
    ahead = min(config.ahead, stages - 1)
    yield Config(rows, warpgroups, config.segments, stages, ahead)
  while rows > 2:
    rows = max(2, rows // 2)
    yield Config(rows, warpgroups, config.segments, 2)
  yield Config(2, 1, config.segments, 1)
