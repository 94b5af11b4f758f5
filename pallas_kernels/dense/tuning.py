"""Decides how many CTAs, warpgroups and columns a dense recurrence gets.

`choose` takes the first of some candidates that fits registers and shared
memory. A configuration changes speed, never results beyond rounding. Candidates
come in the order of their cost, which is mostly the number of hand-offs and
columns of a CTA in one step:

* A head of few units is one CTA's: no hand-off between CTAs.
* Up to `_CLUSTER_UNITS` units, a cluster has 32 units a CTA: a hand-off through
  distributed shared memory. If the clusters do not all fit at once, the last
  ones run in a second wave, and most multiprocessors idle. Then factors of two
  parts, of which a multiprocessor holds one CTA, get another cut where heads
  have up to `_ONE_WAVE_UNITS` units, a step one product, and the device as many
  multiprocessors as there are CTAs: a forward pass of fewer than four gates has
  clusters of fewer CTAs, each with more units, so that all fit. Other kernels
  keep 32 units a CTA and hand off through the L2 cache.
* For larger heads, first a cluster of up to 16 CTAs whose registers hold all of
  the recurrent kernel.
* Then 16 or 24 units a CTA all over the device: a hand-off through the L2
  cache, the fewest columns first. A GRU of 768 units and 16 sequences in
  bfloat16 gets 768 / 16 = 48 CTAs for each of two slices of 8 sequences.
* Then a cluster with a part of the recurrent kernel in shared memory. If a
  step has two hand-offs, this comes before the device.
* One head of `_DIRECT_UNITS` units or more, in 16 bits and with one product a
  step, has 16 units a CTA all over the device, and each warp polls its part of
  the operand straight into registers: shared memory is full of the recurrent
  kernel.

Within each kind, CTAs take as few columns as resident CTAs allow, since columns
of one CTA run in turn on its tensor cores.

The numbers below were measured on one H200 in November 2026;
benchmarks/tuning_dense_h200.json has the measurements.
"""

from collections.abc import Callable, Iterable
import dataclasses

from pallas_kernels import devices
from pallas_kernels.dense import cut

Config = cut.Config
Shape = cut.Shape

# Largest heads that are always one CTA's: with two hand-offs a step, and 16
# bits, larger heads gain from none between CTAs.
_SHARED_UNITS = 64
_SHARED_UNITS_OF_TWO = 128

# Largest heads of clusters with `_UNITS_IN_CLUSTER` units a CTA: 16 CTAs.
_CLUSTER_UNITS = 512
_UNITS_IN_CLUSTER = 32

# Most units of a CTA in clusters of fewer CTAs. A GRU gained by 48 units, and
# an LSTM did not; Elman takes the rule of the GRU, unmeasured.
_MORE_UNITS_IN_CLUSTER = 48

# Largest heads for which a hand-off through the L2 cache, or clusters of fewer
# CTAs, were measured to be faster than clusters in two waves.
_ONE_WAVE_UNITS = 256

# Units of a CTA where a head is spread over the device: one mma's rows for the
# fewest sums a CTA, or more where more slices of the batch are resident so.
_UNITS_ON_DEVICE = 16
_MORE_UNITS_ON_DEVICE = 24

# Largest heads for `_MORE_UNITS_ON_DEVICE`: beyond, too much of the recurrent
# kernel lies in shared memory.
_WIDE_SIZE = 768

# Most columns of a CTA over the device, by warpgroups: a batch of more is
# faster in pieces.
_COLUMNS_ON_DEVICE = {2: 64, 3: 32}

# Cycles to wait before polling, by warpgroups; polling sooner slows the
# writers, later adds to the step.
_DELAY = {2: 300, 3: 500}

# Units of one head from which warps poll the operand straight into registers;
# None for never. The numbers of this kind were measured on one H100.
_DIRECT_UNITS: int | None = 1536

# Forward it takes more units, or more columns.
_FORWARD_DIRECT_UNITS, _FORWARD_DIRECT_COLUMNS = 1537, 17

# The fewest gates: a cluster may hold a head with fewer.
_DIRECT_GATES = 3

# Most columns of such a CTA.
_DIRECT_COLUMNS = 32

# Forward and in the adjoint: pieces of 16 bytes that a thread polls at once,
# each in four registers, while as many more are on their way; and cycles that
# it waits before.
_TOGETHER = {False: 4, True: 8}
_DIRECT_DELAY = {False: 800, True: 500}

# CTAs that share out the gates of the adjoint's sum, if so many are resident:
# the largest team reads least.
_DIRECT_TEAMS = (4, 3, 2, 1)

# Registers of a thread for the recurrent kernel, forward and in the adjoint,
# less one and a half for each of its sums: the most that hardly spill.
_DIRECT_REGISTERS = {False: 176, True: 152}

# Columns of a CTA that has a whole head from which its adjoint multiplies R h
# again, instead of reading it: bytes bind there. On an H100, 12 x 64, without
# W x, forward and backward, LSTM and GRU: B 16 (4 columns) .888 -> .897 and
# .684 -> .730 ms; B 64 (8) 1.90 -> 1.28 and 1.33 -> .94; B 256 7.0 -> 4.9 and
# 5.2 -> 3.6; benchmarks/tuning_dense_h100.json has all.
_AGAIN_COLUMNS = 8

# Slots of the ring buffer, the best first: more hide more latency, and a power
# of two saves a division.
_STAGES = (8, 6, 5)

# Registers of a thread for the recurrent kernel, by warpgroups: as many
# as 65536 a CTA and 255 a thread leave beside the values of a step.
_REGISTERS = {1: 192, 2: 192, 3: 112, 4: 72}

# Bytes of a CTA's shared memory that Pallas takes.
_PALLAS_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """Facts of a kernel, besides sizes, that the choice depends on.

  Attributes:
    gates: gates of the first product.
    two: whether a step has a second product, and so a second hand-off.
    adjoint: whether the kernel runs the adjoint.
    split: whether factors have two bfloat16 parts.
    again: whether the adjoint multiplies R h again.
  """

  gates: int
  two: bool
  adjoint: bool
  split: bool
  again: bool = False


def choose(
    shape: Shape,
    kind: Kind,
    needs: Callable[[Config], tuple[int, int]],
    target: devices.Target,
) -> Config:
  """Chooses the configuration of a kernel.

  Args:
    shape: sizes.
    kind: facts of the kernel.
    needs: returns the registers of a thread that hold the recurrent kernel, and
      the bytes of shared memory of a CTA.
    target: the device.

  Raises:
    NotImplementedError: nothing fits.
  """
  for candidate in _candidates(shape, kind, target):
    if candidate.cluster > target.largest_cluster:
      continue
    if candidate.exchange == 'cluster' and target.largest_cluster == 1:
      continue
    candidate = dataclasses.replace(candidate, capability=target.capability)
    # Fewer stages leave room for two CTAs on a multiprocessor.
    crowded = kind.again and shape.ctas(candidate) > target.cores
    for stages in _STAGES[-1:] if crowded else _STAGES:
      config = dataclasses.replace(candidate, stages=stages)
      registers, size = needs(config)
      size += _PALLAS_BYTES
      if registers <= _REGISTERS[config.warpgroups] and size <= target.shared:
        return config
  raise NotImplementedError(
      f'A GPU kernel cannot hold a recurrent kernel of {shape.heads} heads of'
      f' {shape.size} units on {target.cores} multiprocessors, with'
      f' {shape.batch} sequences.'
  )


def multiplies_again(shape: Shape, kind: Kind, target: devices.Target) -> bool:
  """Returns whether the adjoint wants to multiply R h again, in one CTA."""
  if not kind.adjoint or kind.two or kind.split:
    return False
  # Blocks of 32 units are whole.
  fits = shape.size <= _SHARED_UNITS and shape.size % 32 == 0
  return fits and _columns(shape, 1, target.cores) >= _AGAIN_COLUMNS


def _candidates(
    shape: Shape, kind: Kind, target: devices.Target
) -> Iterable[Config]:
  """Returns configurations, the fastest first."""
  together = _SHARED_UNITS
  if kind.two and not kind.adjoint and not kind.split:
    together = _SHARED_UNITS_OF_TWO
  if shape.size <= together:
    yield from _one_cta(shape, kind, target)
  if target.has_tma and _is_direct(shape, kind):
    yield from _direct(shape, kind, target)
  if shape.size <= _CLUSTER_UNITS:
    yield from _small_clusters(shape, kind, target)
    yield from _over_device(shape, kind, target)
    return
  yield from _large_clusters(shape, kind, target, None)
  # A part of the recurrent kernel in shared memory costs less than a second
  # hand-off through the device, and than pieces of a batch that does not fit
  # there at once.
  rest = _large_clusters(shape, kind, target, _REGISTERS[2])
  if kind.two:
    yield from rest
  yield from _over_device(shape, kind, target)
  if not _is_wide(shape, kind, target):
    yield from rest


def _one_cta(
    shape: Shape, kind: Kind, target: devices.Target
) -> Iterable[Config]:
  """Returns configurations with a head in one CTA."""
  units = -(-shape.size // 8) * 8
  enough = min(2, -(-units // 32))
  columns = _columns(shape, 1, target.cores)
  # Without TMA, one warpgroup of many columns spills twice as much.
  one_first = kind.adjoint and (target.has_tma or columns < 8)
  for warpgroups in (1, enough) if one_first else (enough,):
    yield Config(
        exchange='shared',
        columns=columns,
        units=units,
        warpgroups=warpgroups,
    )


def _small_clusters(
    shape: Shape, kind: Kind, target: devices.Target
) -> Iterable[Config]:
  """Yields the cuts of heads of up to 512 units, the fastest first."""
  parts = -(-shape.size // _UNITS_IN_CLUSTER)
  most = _most_in_clusters(target)
  width = _columns(shape, parts, most)
  ctas = shape.heads * parts * -(-shape.batch // width)
  second_wave = most < ctas <= target.cores and shape.size <= _ONE_WAVE_UNITS
  if second_wave and kind.split and not kind.two:
    if not kind.adjoint and kind.gates < 4:
      yield from _clusters_at_once(shape, most // (ctas // parts), width)
    yield Config(
        exchange='device',
        units=_UNITS_IN_CLUSTER,
        columns=width,
        warpgroups=2,
        sums=4,
        delay=_DELAY[2],
    )
  # (Warpgroups, parts of the sums): long sums want to be shared out.
  cuts = [(2, 8)] if kind.adjoint else [(2, 2)]
  if shape.size <= 256 and not kind.adjoint:
    cuts = [(1, 2 if kind.two and width > 4 else 1), *cuts]
  for warpgroups, sums in (*cuts, (2, 4), (2, 8)):
    yield Config(
        exchange='cluster',
        columns=width,
        units=_UNITS_IN_CLUSTER,
        warpgroups=warpgroups,
        sums=sums,
        cluster=parts,
    )


def _clusters_at_once(
    shape: Shape, ctas: int, columns: int
) -> Iterable[Config]:
  """Returns clusters of up to so many CTAs, with more units each."""
  units = 8 * -(-shape.size // (8 * max(ctas, 1)))
  if ctas > 1 and units <= _MORE_UNITS_IN_CLUSTER:
    yield Config(
        exchange='cluster',
        columns=columns,
        units=units,
        warpgroups=2,
        sums=4,
        cluster=-(-shape.size // units),
    )


def _large_clusters(
    shape: Shape, kind: Kind, target: devices.Target, registers: int | None
) -> list[Config]:
  """Returns clusters of as many CTAs as there can be."""
  units = 8 * -(-shape.size // (8 * target.largest_cluster))
  parts = -(-shape.size // units)
  # A part of the kernel in shared memory makes two products want longer sums.
  long_first = kind.adjoint or (kind.two and registers is not None)
  return [
      Config(
          exchange='cluster',
          columns=_columns(shape, parts, _most_in_clusters(target)),
          units=units,
          warpgroups=2,
          sums=sums,
          cluster=parts,
          registers=registers,
      )
      for sums in ((8, 4) if long_first else (4, 8))
  ]


def most_at_once(config: Config, target: devices.Target) -> int:
  """Returns how many CTAs of a kernel are on the device at once, at least."""
  return _most_in_clusters(target) if config.cluster > 2 else target.cores


def _most_in_clusters(target: devices.Target) -> int:
  """Returns the CTAs in clusters of more than two that are resident at once.

  Clusters have to fit however multiprocessors are dealt to at most 8 groups of
  18. That leaves some over, most where few multiprocessors work.
  """
  cores = target.cores
  return cores * 8 // 11 if cores >= 128 else cores * 3 // 8


def _columns(shape: Shape, parts: int, most: int) -> int:
  """Returns 4 if all CTAs, `parts` a head, are resident at once, else 8."""
  return 4 if shape.heads * parts * -(-shape.batch // 4) <= most else 8


def _over_device(
    shape: Shape, kind: Kind, target: devices.Target
) -> Iterable[Config]:
  """Returns configurations with an exchange through the device."""
  candidates = list(_spread(shape, kind, target, _UNITS_ON_DEVICE, 2))
  if _is_wide(shape, kind, target):
    candidates += _spread(shape, kind, target, _MORE_UNITS_ON_DEVICE, 3)
  # Columns of a CTA cost most.
  yield from sorted(candidates, key=lambda config: config.columns)


def _is_direct(shape: Shape, kind: Kind) -> bool:
  """Whether warps may poll the operand straight into registers."""
  if _DIRECT_UNITS is None or shape.heads > 1 or kind.two or kind.split:
    return False
  is_large = kind.adjoint or (
      shape.size >= _FORWARD_DIRECT_UNITS
      or shape.batch >= _FORWARD_DIRECT_COLUMNS
  )
  return (
      is_large and shape.size >= _DIRECT_UNITS and kind.gates >= _DIRECT_GATES
  )


def _direct(
    shape: Shape, kind: Kind, target: devices.Target
) -> Iterable[Config]:
  """Yields the cuts of one large head, all columns in each CTA."""
  columns = 8 * -(-shape.batch // 8)
  if columns > _DIRECT_COLUMNS:
    return
  for team in _DIRECT_TEAMS if kind.adjoint else (1,):
    parts = -(-shape.size // (_UNITS_ON_DEVICE * team)) * team
    most = _most_in_clusters(target) if team > 2 else target.cores
    results = team if kind.adjoint else kind.gates
    sums = results * (_UNITS_ON_DEVICE // 8) * (columns // 8) * 2
    if kind.gates % team == 0 and parts <= most:
      yield Config(
          exchange='device',
          columns=columns,
          units=_UNITS_ON_DEVICE,
          warpgroups=2,
          sums=8,
          cluster=team,
          delay=_DIRECT_DELAY[kind.adjoint],
          registers=max(0, _DIRECT_REGISTERS[kind.adjoint] - 3 * sums // 2),
          together=_TOGETHER[kind.adjoint],
      )


def _is_wide(shape: Shape, kind: Kind, target: devices.Target) -> bool:
  """Whether three warpgroups of a CTA may have one and a half times the units.

  Such CTAs take most of the device, which clusters cannot. The sums of a single
  gate cannot be shared out among 12 warps, and more than four gates have too
  few registers.
  """
  ctas = shape.heads * -(-shape.size // _MORE_UNITS_ON_DEVICE)
  busy = target.cores // ctas * ctas
  fits = shape.size <= _WIDE_SIZE and 5 * busy >= 4 * target.cores
  return fits and not kind.adjoint and not kind.two and 1 < kind.gates <= 4


def _spread(
    shape: Shape,
    kind: Kind,
    target: devices.Target,
    units: int,
    warpgroups: int,
) -> Iterable[Config]:
  """Returns configurations over the device, with so many units a CTA."""
  rows = -(-shape.batch // 8)
  parts = -(-shape.size // units)

  def ctas(team: int) -> int:
    """Returns the CTAs of a slice of the batch, in whole teams."""
    return shape.heads * -(-parts // team) * team

  # CTAs wait for each other, so all have to be resident at once.
  for slices in range(min(rows, target.cores // ctas(1)), 0, -1):
    columns = 8 * -(-rows // slices)
    if columns > _COLUMNS_ON_DEVICE[warpgroups]:
      break
    # Many columns of a thread take registers from the recurrent kernel.
    registers = None
    if warpgroups > 2 and columns > 16:
      registers = _REGISTERS[warpgroups] - 2 * columns
    # With few gates a team is slower, but it has room for more columns.
    teams = (4, 2, 1) if kind.gates % 4 == 0 else (1, 3, 2)
    for team in teams if kind.adjoint else (1,):
      most = _most_in_clusters(target) if team > 2 else target.cores
      if kind.gates % team or slices * ctas(team) > most:
        continue
      delay = _DELAY[warpgroups]
      if kind.adjoint:
        # Reading more gates takes longer by itself.
        delay //= kind.gates // team
      for sums in (4, 8) if warpgroups == 2 else (4,):
        yield Config(
            exchange='device',
            columns=columns,
            units=units,
            warpgroups=warpgroups,
            sums=sums,
            cluster=team,
            delay=delay,
            registers=registers,
        )
