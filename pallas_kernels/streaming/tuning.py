"""How linear and diagonal kernels cut their work.

A configuration changes speed, never results beyond rounding. What limits the
speed is not obvious: more bytes in flight than the latency of memory asks for
make it slower, and so do blocks so small that waiting for them, which takes
hundreds of cycles a block, is not hidden. The numbers are what was fastest on
an H200 in November 2026; from process to process times differ by 10 %.
"""

from collections.abc import Iterable, Sequence

from pallas_kernels import targets
from pallas_kernels.streaming import projected as projected_kernel
from pallas_kernels.streaming import ring_buffers
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Config = time_blocks.Config
Stream = streams.Stream

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

# Bytes of each stream that are in flight on the whole card where it is fastest.
# With 40 to 512 tiles, what these choose was at most 8 % slower than the best
# of 15 cuts, in float32 and bfloat16, for a plain scan and for minGRU, wherever
# it was one of them.
_FORWARD_IN_FLIGHT = 3 * 2**20
_ADJOINT_IN_FLIGHT = 2 * 2**20

# Shared memory that the rings of one multiprocessor may take, in bytes: of 227
# KiB, what warpgroups hand on takes 2.
_SHARED = 216 * 1024

# Fewer segments than these, of a forward kernel and of an adjoint, do not pay,
# nor do segments of fewer steps. Two, for 36 tiles, took up to twice as long as
# none. Four were, with 24 and 32 tiles of 4096 steps, up to 17 % slower forward
# and 10 to 28 % faster in the adjoint; with 8 tiles of 1024 steps up to 38 %
# slower and 7 to 31 % faster. Eight and ten, for 8 to 16 tiles, took 0.52 to
# 0.80 of the time of none forward, and 0.38 to 0.54 in the adjoint.
_FEWEST_SEGMENTS = (6, 4)
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

# A product and a recurrence in one kernel pay where chains, which are sequences
# times tiles of features, keep the device busy: a block of 128 steps is scanned
# in 3.4 us, of one chain after the block before it, while a kernel that does
# nothing else takes 2.1 us at least. Of the time of two kernels, one took 0.71
# with 256 chains of 64 inputs, 0.79 with 96 of 768, 0.83 and 0.94 with 32 of
# 1024 and 512, and 1.14 with 16 of 32.
_FEWEST_CHAINS, _FEWEST_PRODUCTS = 96, 2**15

# What a CTA of a diagonal recurrence has in flight, in bytes.
_DIAGONAL_IN_FLIGHT = 48 * 1024

# Operations in an unrolled block. IRevRNN with 3 inner steps took 0.42 ms with
# 4 rows, 0.35 with 16 and 0.37 with 20; forward and backward 1.11, 0.88 and
# 0.83 where the adjoint had 2, 4 and 8.
_UNROLLED = 2600


def linear(
    layout: streams.Layout,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: targets.Target,
    adjoint: bool = False,
) -> Config:
  """Chooses the configuration of a linear recurrence.

  Args:
    layout: of all streams.
    inputs: the streams that are read.
    outputs: the streams that are written.
    target: the device.
    adjoint: whether it is for the backward pass.
  """
  tiles = _tiles(layout)
  size = max(s.dtype.itemsize for s in inputs)
  # CTAs wait for each other, so all have to be there at once.
  most = min(target.cores // tiles, layout.time // _SEGMENT_STEPS)
  segments = min(most, _MAX_SEGMENTS) // 2 * 2
  if segments >= _FEWEST_SEGMENTS[adjoint] and not target.interpret:
    rows = _segment_rows(inputs, outputs)
    config = Config(rows, 1, segments, _SEGMENT_STAGES, _AHEAD)
    steps = -(-layout.time // segments)
    return _fit(config, steps, inputs, outputs, tiles * segments, target)
  config = _cut(tiles, size, inputs, outputs, target, adjoint)
  return _fit(config, layout.time, inputs, outputs, tiles, target)


def _cut(
    tiles: int,
    size: int,
    inputs: Sequence[Stream],
    outputs: Sequence[Stream],
    target: targets.Target,
    adjoint: bool,
) -> Config:
  """Returns the cut of a sequence without segments."""
  cuts = _ADJOINT if adjoint else _FORWARD
  in_flight = _ADJOINT_IN_FLIGHT if adjoint else _FORWARD_IN_FLIGHT
  wanted = in_flight / (tiles * size * streams.LANES)
  every = [Config(rows, groups, 1, stages) for rows, groups, stages in cuts]
  budget = _budget(tiles, target)
  size_of = lambda c: ring_buffers.shared_bytes(inputs, outputs, c)
  configs = [c for c in every if size_of(c) <= budget] or every[:1]
  steps = lambda c: c.rows * c.warpgroups * c.stages
  if tiles > target.cores:
    # Several CTAs share a multiprocessor.
    most = [c for c in configs if steps(c) <= wanted]
    return most[-1] if most else configs[0]
  enough = [c for c in configs if steps(c) >= 0.9 * wanted]
  return enough[0] if enough else configs[-1]


def _segment_rows(inputs: Sequence[Stream], outputs: Sequence[Stream]) -> int:
  """Returns as many rows of a block as fit, a multiple of 8."""
  row = Config(1, 1, 1, _SEGMENT_STAGES)
  most = _SHARED // ring_buffers.shared_bytes(inputs, outputs, row)
  return max(8, min(most // 8 * 8, _MAX_ROWS))


def projected(
    layout: streams.Layout,
    kernel: Sequence[int],
    target: targets.Target,
) -> bool:
  """Whether a product and a linear recurrence are faster in one kernel.

  Args:
    layout: of h.
    kernel: the shape of W, [G, I, F].
    target: the device.
  """
  gates, depth, _ = kernel
  if not target.wgmma or gates > projected_kernel.MOST_GATES:
    return False
  if target.interpret:
    return True
  chains = _tiles(layout)
  busy = gates * depth * chains >= _FEWEST_PRODUCTS
  # Of the last block, all is multiplied.
  whole = streams.round_up(layout.time, projected_kernel.BLOCK)
  return (busy or chains >= _FEWEST_CHAINS) and 4 * layout.time >= 3 * whole


def diagonal(
    layout: streams.Layout,
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
    operations: how many operations a step is, about; blocks are unrolled.
  """
  rows = max(2, min(16, _UNROLLED // max(1, operations)))
  rows = 1 << (rows.bit_length() - 1)
  block = rows * streams.LANES * sum(s.dtype.itemsize for s in inputs)
  stages = max(2, min(6, _DIAGONAL_IN_FLIGHT // block))
  config = Config(rows, 1, 1, stages)
  return _fit(config, layout.time, inputs, outputs, _tiles(layout), target)


def _budget(ctas: int, target: targets.Target) -> int:
  """Returns the bytes of shared memory that a CTA may use."""
  return _SHARED // (2 if ctas > target.cores else 1)


def _tiles(layout: streams.Layout) -> int:
  return layout.batch * layout.padded // streams.LANES


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
  budget = _budget(ctas, target)
  for smaller in _smaller(config, steps):
    if ring_buffers.shared_bytes(inputs, outputs, smaller) <= budget:
      return smaller
  raise NotImplementedError(
      f'A GPU kernel cannot hold {len(inputs)} streams in and'
      f' {len(outputs)} out in shared memory. {targets.OTHERWISE}'
  )


def _smaller(config: Config, steps: int) -> Iterable[Config]:
  """Returns configurations with ever smaller blocks, fit for few steps."""
  rows, warpgroups = config.rows, config.warpgroups
  while rows > 8 and steps < warpgroups * rows:
    rows //= 2
  while warpgroups > 1 and steps < warpgroups * rows:
    warpgroups //= 2
  while True:
    waves = -(-steps // (warpgroups * rows))
    # As few rows as that many waves need.
    fewest = max(2, -(-steps // (warpgroups * waves)))
    # With one stage nothing is on its way while a block is worked on.
    for stages in range(min(config.stages, waves), min(2, waves) - 1, -1):
      ahead = min(config.ahead, stages - 1)
      yield Config(fewest, warpgroups, config.segments, stages, ahead)
    if warpgroups == 1 and rows == 2:
      break
    if warpgroups > 1:
      warpgroups //= 2
    else:
      rows = max(2, rows // 2)
  yield Config(2, 1, config.segments, 1)
