"""How dense kernels cut their work: measurements and heuristics.

A configuration changes speed, never results beyond rounding. Of those that fit,
the fastest on one H200 comes first; all measured in November 2026.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools

from pallas_kernels import targets
from pallas_kernels.mosaic_gpu import cta as cta_lib

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
    shape: cta_lib.Shape,
    kind: Kind,
    needs: Callable[[cta_lib.Config], tuple[int, int]],
    target: targets.Target,
) -> cta_lib.Config:
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
    shape: cta_lib.Shape, kind: Kind, target: targets.Target
) -> Iterable[cta_lib.Config]:
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
    yield from _device_candidates(shape, kind, target, most)
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
  yield from _device_candidates(shape, kind, target, most)
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
    shape: cta_lib.Shape, kind: Kind, target: targets.Target, most: int
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
    teams = (4, 2, 1) if kind.gates % 4 == 0 else (1, 3, 2)
    for team in teams if kind.adjoint else (1,):
      there = slices * ctas(team) <= (most if team > 2 else target.cores)
      if kind.gates % team or not there:
        continue
      # What is more takes longer by itself.
      delay = _DELAY // (kind.gates // team) if kind.adjoint else _DELAY
      for sums in (4, 8):
        yield cta_lib.Config('device', columns, units, 2, sums, team, delay)
