"""How kernels cut their work: heuristics from shapes, and what was measured.

A configuration changes speed, never results beyond rounding. What limits the
speed is not obvious: more bytes in flight than the latency of memory asks for
make it slower, and so does arithmetic that warps do one after the other. So
where a table below knows what was fastest on a device, it decides.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools

from pallas_kernels import targets
from pallas_kernels.mosaic_gpu import cta as cta_lib
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
        (3, 2, 4): (8, 4, 2),
        (3, 2, 2): (16, 2, 2),
        (4, 2, 4): (8, 2, 3),
        (4, 2, 2): (8, 4, 2),
        (5, 3, 4): (8, 2, 3),
        (5, 3, 2): (8, 4, 2),
    }
}

# Tiles of the shape at which that was.
_MEASURED_TILES = 128

# The same, where it is something else in segments. Measured in November 2026 at
# (1, 65536, 1024).
_MEASURED_SEGMENTS = {
    'NVIDIA H200': {
        (2, 1, 4): (16, 2, 3),
        (3, 2, 4): (8, 2, 3),
    }
}

# Shared memory that the rings of one multiprocessor may take, in bytes: of 227
# KiB, what four warpgroups exchange takes 8.
_SHARED = 216 * 1024

# Below this many tiles of batch and features, time is cut into segments, at the
# price of reading inputs twice. With 64 tiles a card of 132 multiprocessors was
# as fast as with 128.
_FEW_TILES = 40

# Fewer steps than these are not worth a segment.
_SEGMENT_STEPS = 256

# Each CTA composes the maps of the segments before its own.
_MAX_SEGMENTS = 64

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
  in_segments = tiles < _FEW_TILES and layout.time >= 2 * _SEGMENT_STEPS
  table = _of_device(_MEASURED, target)
  if in_segments:
    table = {**table, **_of_device(_MEASURED_SEGMENTS, target)}
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
  segments = 1
  if in_segments:
    resident = target.cores * (2 if warpgroups == 1 else 1)
    most = layout.time // _SEGMENT_STEPS
    segments = max(1, min(resident // tiles, most, _MAX_SEGMENTS))
  config = Config(rows, warpgroups, segments, stages)
  steps = -(-layout.time // segments)
  return _fit(config, steps, inputs, outputs, tiles * segments, target)


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
    yield Config(rows, warpgroups, config.segments, stages)
  while rows > 2:
    rows = max(2, rows // 2)
    yield Config(rows, warpgroups, config.segments, 2)
  yield Config(2, 1, config.segments, 1)


# Heads of up to so many units are always one CTA's, and one cluster's. With two
# products in a step and 16 bits, one CTA is better for more: six heads of 128
# units of A-GRU took 0.56 ms with 16 or 64 sequences, in clusters 0.57 and 0.67
# ms; but one head in float32 took 1.1 instead of 0.7 ms.
_SHARED_UNITS, _CLUSTER_UNITS = 64, 512
_SHARED_UNITS_OF_TWO = 128

# CTAs of a cluster; more than 8 are not portable.
_LARGEST_CLUSTER = 16

# Units of a CTA in a cluster, and where a head is spread over the device.
_UNITS_IN_CLUSTER, _UNITS_ON_DEVICE = 32, 16

# In cycles. A step with 1024 units took 1.87 us without a delay, 1.57 with 150
# cycles, 1.52 - 1.55 with 250 and 1.58 with 350; one with 768 units 1.83, 1.58,
# 1.50 and 1.44; one with 1024 units and two products 2.85, 2.55, 2.40 and 2.40.
_DELAY = 300

# Steps for which inputs are in flight or in use, the best first; a power of two
# saves divisions.
_STAGES = (8, 6, 5)

# Registers of a thread that may hold the recurrent kernel, by warpgroups.
_REGISTERS = {1: 192, 2: 192, 3: 112, 4: 72}

# Shared memory of a CTA, in bytes, but for what Pallas takes itself.
_CTA_BYTES = 226 * 1024


def dense(
    shape: cta_lib.Shape,
    gates: int,
    two: bool,
    adjoint: bool,
    split: bool,
    needs: Callable[[cta_lib.Config], tuple[int, int]],
    target: targets.Target,
) -> cta_lib.Config:
  """Chooses the configuration of a recurrence with a dense kernel.

  Args:
    shape: sizes.
    gates: how many the first product has.
    two: whether there is a second product.
    adjoint: whether it is for the adjoint.
    split: whether operands have the two parts of float32.
    needs: returns the registers that hold the recurrent kernel, and the bytes
      of shared memory.
    target: the device.

  Raises:
    NotImplementedError: nothing fits.
  """
  for candidate in _dense_candidates(shape, gates, two, adjoint, split, target):
    for stages in _STAGES:
      config = dataclasses.replace(candidate, stages=stages)
      registers, size = needs(config)
      if registers <= _REGISTERS[config.warpgroups] and size <= _CTA_BYTES:
        return config
  raise NotImplementedError(
      f'A GPU kernel cannot hold a recurrent kernel of {shape.heads} heads of'
      f' {shape.size} units on {target.cores} multiprocessors, with'
      f' {shape.batch} sequences. {targets.OTHERWISE}'
  )


def _dense_candidates(
    shape: cta_lib.Shape,
    gates: int,
    two: bool,
    adjoint: bool,
    split: bool,
    target: targets.Target,
) -> Iterable[cta_lib.Config]:
  """Returns configurations for a dense kernel, the fastest first."""
  # Clusters of 8 have to fit however multiprocessors are dealt to at most 8
  # groups of 18, which leaves some over, most where few of them work; pairs
  # always fit.
  most = (
      target.cores * 8 // 11 if target.cores >= 128 else target.cores * 3 // 8
  )
  columns = functools.partial(_columns, shape)
  together = _SHARED_UNITS
  if two and not adjoint and not split:
    together = _SHARED_UNITS_OF_TWO
  if shape.size <= together:
    units = -(-shape.size // 8) * 8
    enough = min(2, -(-units // 32))
    for warpgroups in (1, enough) if adjoint else (enough,):
      yield cta_lib.Config(
          'shared', columns(1, target.cores), units, warpgroups
      )
  if shape.size <= _CLUSTER_UNITS:
    units = _UNITS_IN_CLUSTER
    parts = -(-shape.size // units)
    width = columns(parts, most)
    cuts = [(2, 8)] if adjoint else [(2, 2)]
    if shape.size <= 256 and not adjoint:
      cuts = [(1, 2 if two and width > 4 else 1), *cuts]
    for warpgroups, sums in (*cuts, (2, 4), (2, 8)):
      yield cta_lib.Config('cluster', width, units, warpgroups, sums, parts)
    yield from _device_candidates(shape, gates, adjoint, target, most)
    return
  units = 8 * -(-shape.size // (8 * _LARGEST_CLUSTER))
  parts = -(-shape.size // units)

  def in_cluster(sums: int, registers: int | None) -> cta_lib.Config:
    width = columns(parts, most)
    return cta_lib.Config(
        'cluster', width, units, 2, sums, parts, registers=registers
    )

  orders = [(8, 4) if adjoint else (4, 8), (8, 4) if two or adjoint else (4, 8)]
  whole, rest = (
      [in_cluster(sums, registers) for sums in order]
      for order, registers in zip(orders, (None, _REGISTERS[2]), strict=True)
  )
  yield from whole
  # Some of the recurrent kernel in shared memory pays where the way through the
  # device would be taken twice, and where there is no other way.
  if two:
    yield from rest
  yield from _device_candidates(shape, gates, adjoint, target, most)
  yield from rest


def _columns(shape: cta_lib.Shape, parts: int, most: int) -> int:
  """Returns 4 if so many CTAs are there at once, else 8.

  Args:
    shape: sizes.
    parts: CTAs of a head.
    most: CTAs that are there at once.
  """
  return 4 if shape.heads * parts * -(-shape.batch // 4) <= most else 8


def _device_candidates(
    shape: cta_lib.Shape,
    gates: int,
    adjoint: bool,
    target: targets.Target,
    most: int,
) -> Iterable[cta_lib.Config]:
  """Returns configurations with an exchange through the device."""
  rows = -(-shape.batch // 8)
  units = _UNITS_ON_DEVICE
  parts = -(-shape.size // units)

  def ctas(team: int) -> int:
    """Returns how many CTAs a slice of the batch has, in whole teams."""
    return shape.heads * -(-parts // team) * team

  # CTAs wait for each other, so all have to be there at once.
  for slices in range(min(rows, target.cores // ctas(1)), 0, -1):
    columns = 8 * -(-rows // slices)
    if columns > 64:
      break
    # With few gates a team is slower, but takes more columns.
    teams = (4, 2, 1) if gates % 4 == 0 else (1, 3, 2)
    for team in teams if adjoint else (1,):
      there = slices * ctas(team) <= (most if team > 2 else target.cores)
      if gates % team or not there:
        continue
      # What is more takes longer by itself.
      delay = _DELAY // (gates // team) if adjoint else _DELAY
      for sums in (4, 8):
        yield cta_lib.Config('device', columns, units, 2, sums, team, delay)
