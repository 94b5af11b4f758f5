"""How dense kernels cut their work: measurements and heuristics.

A configuration changes speed, never results beyond rounding. Of those that fit,
the fastest on one H200 comes first; all measured in November 2026.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools

from pallas_kernels import targets
from pallas_kernels.dense import config as config_lib

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

# The same where more slices of a batch find place that way: 768 units of LSTM
# took 2.5 ms instead of 3.2 with 64 sequences, 3.5 instead of 4.6 with 96, and
# 4.4 instead of 7.0 with 128.
_MORE_UNITS_ON_DEVICE = 24

# For heads of up to so many units. With 1024, 64 sequences took 4.8 instead of
# 4.3 ms: too much of the recurrent kernel is then in shared memory.
_WIDE_SIZE = 768

# The most columns of a CTA there, by warpgroups. More are better done in pieces
# of the batch: 256 sequences took 9.0 ms in two of them, and 11.5 in clusters.
_COLUMNS_ON_DEVICE = {2: 64, 3: 32}

# In cycles, by warpgroups. A step with 1024 units took 1.87 us without a delay,
# 1.57 with 150 cycles, 1.52 - 1.55 with 250 and 1.58 with 350; one with 768
# units 1.83, 1.58, 1.50 and 1.44; one with 1024 units and two products 2.85,
# 2.55, 2.40 and 2.40. With three warpgroups 128 sequences took 4.83 ms with 300
# cycles, 4.76 with 500 and 4.88 with 800.
_DELAY = {2: 300, 3: 500}

# Steps for which inputs are in flight or in use, the best first; a power of two
# saves divisions.
_STAGES = (8, 6, 5)

# Registers of a thread that may hold the recurrent kernel, by warpgroups.
_REGISTERS = {1: 192, 2: 192, 3: 112, 4: 72}

# Shared memory of a CTA, in bytes, but for what Pallas takes itself.
_CTA_BYTES = 226 * 1024


@dataclasses.dataclass(frozen=True)
class Kind:
  """What of a kernel decides, besides sizes.

  Attributes:
    gates: how many the first product has.
    two: whether there is a second product.
    adjoint: whether it is for the adjoint.
    split: whether operands have the two parts of float32.
  """

  gates: int
  two: bool
  adjoint: bool
  split: bool


def choose(
    shape: config_lib.Shape,
    kind: Kind,
    needs: Callable[[config_lib.Config], tuple[int, int]],
    target: targets.Target,
) -> config_lib.Config:
  """Chooses the configuration of a recurrence with a dense kernel.

  Args:
    shape: sizes.
    kind: of the kernel.
    needs: returns the registers that hold the recurrent kernel, and the bytes
      of shared memory.
    target: the device.

  Raises:
    NotImplementedError: nothing fits.
  """
  for candidate in _candidates(shape, kind, target):
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


def _candidates(
    shape: config_lib.Shape, kind: Kind, target: targets.Target
) -> Iterable[config_lib.Config]:
  """Returns configurations for a dense kernel, the fastest first."""
  two, adjoint = kind.two, kind.adjoint
  # Clusters have to fit however multiprocessors are dealt to at most 8 groups
  # of 18, which leaves some over, most where few of them work; pairs always do.
  most = (
      target.cores * 8 // 11 if target.cores >= 128 else target.cores * 3 // 8
  )
  columns = functools.partial(_columns, shape)
  together = _SHARED_UNITS
  if two and not adjoint and not kind.split:
    together = _SHARED_UNITS_OF_TWO
  if shape.size <= together:
    units = -(-shape.size // 8) * 8
    enough = min(2, -(-units // 32))
    for warpgroups in (1, enough) if adjoint else (enough,):
      yield config_lib.Config(
          exchange='shared',
          columns=columns(1, target.cores),
          units=units,
          warpgroups=warpgroups,
      )
  if shape.size <= _CLUSTER_UNITS:
    units = _UNITS_IN_CLUSTER
    parts = -(-shape.size // units)
    width = columns(parts, most)
    cuts = [(2, 8)] if adjoint else [(2, 2)]
    if shape.size <= 256 and not adjoint:
      cuts = [(1, 2 if two and width > 4 else 1), *cuts]
    for warpgroups, sums in (*cuts, (2, 4), (2, 8)):
      yield config_lib.Config(
          exchange='cluster',
          columns=width,
          units=units,
          warpgroups=warpgroups,
          sums=sums,
          cluster=parts,
      )
    yield from _device_candidates(shape, kind, target, most)
    return
  units = 8 * -(-shape.size // (8 * _LARGEST_CLUSTER))
  parts = -(-shape.size // units)

  def in_cluster(sums: int, registers: int | None) -> config_lib.Config:
    width = columns(parts, most)
    return config_lib.Config(
        exchange='cluster',
        columns=width,
        units=units,
        warpgroups=2,
        sums=sums,
        cluster=parts,
        registers=registers,
    )

  orders = [(8, 4) if adjoint else (4, 8), (8, 4) if two or adjoint else (4, 8)]
  whole, rest = (
      [in_cluster(sums, registers) for sums in order]
      for order, registers in zip(orders, (None, _REGISTERS[2]), strict=True)
  )
  yield from whole
  # Some of the recurrent kernel in shared memory pays where the way through the
  # device would be taken twice, and where a batch does not fit there at once.
  if two:
    yield from rest
  yield from _device_candidates(shape, kind, target, most)
  if not _is_wide(shape, kind, target):
    yield from rest


def _columns(shape: config_lib.Shape, parts: int, most: int) -> int:
  """Returns 4 if so many CTAs are there at once, else 8.

  Args:
    shape: sizes.
    parts: CTAs of a head.
    most: CTAs that are there at once.
  """
  return 4 if shape.heads * parts * -(-shape.batch // 4) <= most else 8


def _device_candidates(
    shape: config_lib.Shape, kind: Kind, target: targets.Target, most: int
) -> Iterable[config_lib.Config]:
  """Returns configurations with an exchange through the device."""
  candidates = list(_spread(shape, kind, target, most, _UNITS_ON_DEVICE, 2))
  if _is_wide(shape, kind, target):
    candidates += _spread(shape, kind, target, most, _MORE_UNITS_ON_DEVICE, 3)
  # Columns cost most, whoever has them.
  yield from sorted(candidates, key=lambda config: config.columns)


def _is_wide(
    shape: config_lib.Shape, kind: Kind, target: targets.Target
) -> bool:
  """Whether three warpgroups of a CTA may have one and a half times the units.

  That takes most of the device, so that clusters, of which fewer fit at once,
  are no longer needed. The sums of a single gate could not be shared out among
  12 warps, and for more than four gates there are too few registers.
  """
  ctas = shape.heads * -(-shape.size // _MORE_UNITS_ON_DEVICE)
  busy = target.cores // ctas * ctas
  fits = shape.size <= _WIDE_SIZE and 5 * busy >= 4 * target.cores
  return fits and not kind.adjoint and not kind.two and 1 < kind.gates <= 4


def _spread(
    shape: config_lib.Shape,
    kind: Kind,
    target: targets.Target,
    most: int,
    units: int,
    warpgroups: int,
) -> Iterable[config_lib.Config]:
  """Returns configurations with an exchange through the device, of one width.

  Args:
    shape: sizes.
    kind: of the kernel.
    target: the device.
    most: CTAs in clusters of more than two that are there at once.
    units: of a CTA.
    warpgroups: of a CTA.
  """
  rows = -(-shape.batch // 8)
  parts = -(-shape.size // units)

  def ctas(team: int) -> int:
    """Returns how many CTAs a slice of the batch has, in whole teams."""
    return shape.heads * -(-parts // team) * team

  # CTAs wait for each other, so all have to be there at once.
  for slices in range(min(rows, target.cores // ctas(1)), 0, -1):
    columns = 8 * -(-rows // slices)
    if columns > _COLUMNS_ON_DEVICE[warpgroups]:
      break
    # Threads that have many columns want registers for them.
    registers = None
    if warpgroups > 2 and columns > 16:
      registers = _REGISTERS[warpgroups] - 2 * columns
    # With few gates a team is slower, but takes more columns.
    teams = (4, 2, 1) if kind.gates % 4 == 0 else (1, 3, 2)
    for team in teams if kind.adjoint else (1,):
      there = slices * ctas(team) <= (most if team > 2 else target.cores)
      if kind.gates % team or not there:
        continue
      delay = _DELAY[warpgroups]
      if kind.adjoint:
        # What is more takes longer by itself.
        delay //= kind.gates // team
      for sums in (4, 8) if warpgroups == 2 else (4,):
        yield config_lib.Config(
            exchange='device',
            columns=columns,
            units=units,
            warpgroups=warpgroups,
            sums=sums,
            cluster=team,
            delay=delay,
            registers=registers,
        )
