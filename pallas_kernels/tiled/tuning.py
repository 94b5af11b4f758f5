"""How large tiles are: the cut with the least time by a short model.

A tile of M rows and C columns, K deep, takes the longer of two times: its
product, or copying M and C vectors of K to shared memory. The
update of its elements comes after it, mostly waiting for memory. CTAs take
tiles in turn, so a last turn that is not full costs as much as a full one; all
but the largest tiles leave registers for the update.

The numbers below were fitted on one H200 in November 2026, to kernels that do
not multiply W x; benchmarks/tuning_tiled_h200.json has the measurements. With W
x large tiles take less than the model says (benchmarks/tuning_tiled_h100.json).
Among cuts that it has nearly on a par, 128 x 64 units was the fastest with its
gradient in four of four shapes (benchmarks/tuning_ties_h200.json).

If R is on the chip, batches of 17 to 32 rows are cut into tiles of 32 rows,
others into tiles of 64. An LSTM of 32 x 256 x 1280 (batch x time x units) takes
2.5 ms forward and backward with them, on one H100, and 4.7 with kernels of the
family `dense` (benchmarks/tuning_low_tiles_h100.json).

Where an adjoint has fewer tiles than half of the CTAs, a team of two or four
shares out the sum of each: three LSTMs of 80 x 70 x 1150 take 5.0 ms forward
and backward, and with one CTA a tile 7.5; an LSTM of 120 x 16 x 4096 takes 2.4
and 2.8 (benchmarks/tuning_teams_h200.json).
"""

from collections.abc import Iterator
import dataclasses
import itertools
import math
from typing import Any

from pallas_kernels import devices
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles
from pallas_kernels.tiled import on_chip as on_chip_lib
from pallas_kernels.tiled import on_chip_products

Config = cut.Config

# Rates of one multiprocessor: products, copies to shared memory while all copy,
# the update of a unit of a row, and the wait for others in a step.
_FLOPS_PER_NS = 5000.0
_BYTES_PER_NS = 70.0
_UPDATE_NS = 1.4
_STEP_NS = 2000.0

# Groups of units of a tile. With four groups an adjoint took twice as long as
# with two.
_GROUPS = (1, 2)

# Shared memory for the ring buffer, and its most slots.
_SMEM = 224 * 1024
_MOST_STAGES = 6

# Registers of a thread, besides its product: the fewest for an update,
# and enough to read a part while another one is computed.
_FEWEST_REGISTERS, _MANY_REGISTERS = 72, 180

# Columns of a product.
_MOST_COLUMNS = 256

# Units of a tile whose R stays on the chip. An LSTM of 128 rows of 768 units
# took 4.8 ms forward with 16, 5.2 with 24 and 5.3 with 12, on an H100 and while
# each warpgroup arrived by itself.
_FEWEST_UNITS = 16

# Values of a unit, R h and h, of all parts of a thread with R on the chip: all
# are on their way at once. Three parts of an LSTM, or in the adjoint of a GRU,
# found too few registers; two did not, and neither did five of an Elman RNN.
_MOST_VALUES = 10

# Shared memory of a CTA of a team, less 1 KiB that Pallas takes and mbarriers,
# and the fewest slots of its ring buffer.
_TEAM_SMEM = 226 * 1024 - 256
_FEWEST_STAGES = 4

# Slices of the matrix of a low tile that are in registers, where shared memory
# has no room for all of the operand: a thread has 16 of each, and as many again
# of two on their way to tensor cores. With five, registers spilled.
_MOST_HELD = 4


def choose(
    *,
    batch: int,
    heads: int,
    size: int,
    recurrent: int,
    adjoint: bool,
    target: devices.Target,
    depth: int = 0,
) -> Config:
  """Returns the configuration with the least time by the model.

  Args:
    batch: B.
    heads: N.
    size: D.
    recurrent: recurrent gates.
    adjoint: whether of the adjoint kernel.
    target: the device.
    depth: I, if the kernel multiplies W x, or 0.

  Raises:
    NotImplementedError: there is none.
  """
  gates = 1 if adjoint else recurrent
  depth += size * (recurrent if adjoint else 1)

  def cost(config: Config) -> float:
    tiles = cut.Tiles(config=config, batch=batch, heads=heads, size=size)
    columns = gates * config.units
    flops = 2 * config.rows * columns * depth
    read = 2 * (config.rows + columns) * depth
    own = max(flops / _FLOPS_PER_NS, read / _BYTES_PER_NS)
    own += _UPDATE_NS * config.rows * config.units
    turns = math.ceil(tiles.total * config.members / target.cores)
    return turns * own / config.members + _STEP_NS * (1 + (config.members > 1))

  def in_teams(config: Config, members: int) -> Iterator[Config]:
    tiles = cut.Tiles(config=config, batch=batch, heads=heads, size=size)
    most = _teams(target, members)
    uneven = depth // limits.DEPTH % members or 2 * config.groups % members
    # Three warpgroups have too few registers.
    if tiles.total <= most and not uneven and config.warpgroups < 3:
      team = dataclasses.replace(config, members=members)
      stage = 2 * limits.DEPTH * (config.rows + gates * config.units)
      stages = min(_MOST_STAGES, (_SMEM - 4 * team.sum_words) // stage)
      yield dataclasses.replace(team, stages=stages)

  configs = list(_configs(size, gates, target))
  if adjoint:
    for config, members in itertools.product(list(configs), (2, 4)):
      configs += in_teams(config, members)
  if not configs:
    raise NotImplementedError(
        'GPU kernels in tiles take heads of a multiple of'
        f' {limits.DEPTH} units and up to'
        f' {_MOST_COLUMNS // cut.GROUP} recurrent gates, got {size}'
        f' units and {recurrent} gates.'
    )
  return min(configs, key=cost)


def on_chip(
    *, batch: int, heads: int, size: int, recurrent: int, target: devices.Target
) -> bool:
  """Returns whether both passes of a recurrence can keep R on the chip.

  It takes the arguments of `choose`.
  """
  facts: dict[str, Any] = {
      'batch': batch,
      'heads': heads,
      'size': size,
      'recurrent': recurrent,
      'target': target,
  }
  choosers = choose_resident, choose_team
  return all(choose(**facts) is not None for choose in choosers)


def choose_resident(
    *, batch: int, heads: int, size: int, recurrent: int, target: devices.Target
) -> on_chip_lib.GateConfig | None:
  """Returns the cut of a forward pass with R on the chip, or None.

  It takes the arguments of `choose`.
  """
  if heads > 1 or size % limits.DEPTH:
    return None
  if batch in limits.LOW_BATCHES:
    return _choose_low_resident(batch, size, recurrent, target)
  row_blocks = math.ceil(batch / cut.ROWS)
  for units in range(_FEWEST_UNITS, size + 1, 8):
    columns = recurrent * units
    whole = not size % units and not columns % (on_chip_lib.GROUP)
    ctas = row_blocks * (size // units)
    if columns > _MOST_COLUMNS or not whole or ctas > target.cores:
      continue
    config = on_chip_lib.GateConfig(units=units, gates=recurrent, stages=0)
    if not _has_registers(config, recurrent):
      return None
    left = _TEAM_SMEM - 2 * size * columns
    slot = 2 * limits.DEPTH * cut.ROWS
    # Sums lie where slices were.
    fewest = max(_FEWEST_STAGES, -(-config.sum_bytes // slot))
    stages = min(max(size // limits.DEPTH, fewest), left // slot)
    if stages >= fewest:
      return dataclasses.replace(config, stages=stages)
  return None


def choose_team(
    *, batch: int, heads: int, size: int, recurrent: int, target: devices.Target
) -> on_chip_lib.TeamConfig | None:
  """Returns the cut of an adjoint with R' on the chip, or None.

  It takes the arguments of `choose`.
  """
  slices = recurrent * size // limits.DEPTH
  if heads > 1 or size % limits.DEPTH or slices % on_chip_lib.MEMBERS:
    return None
  turns = slices // on_chip_lib.MEMBERS
  if batch in limits.LOW_BATCHES:
    return _choose_low_team(batch, size, turns, target)
  unit_blocks = _teams(target, on_chip_lib.MEMBERS)
  unit_blocks //= math.ceil(batch / cut.ROWS)
  if not unit_blocks:
    return None
  units = on_chip_lib.GROUP * math.ceil(
      size / (unit_blocks * on_chip_lib.GROUP)
  )
  slot = 2 * limits.DEPTH * cut.ROWS
  config = on_chip_lib.TeamConfig(units=units, stages=_FEWEST_STAGES)
  left = _TEAM_SMEM - 2 * turns * limits.DEPTH * units
  left -= 4 * config.sum_words
  stages = min(max(turns, _FEWEST_STAGES), left // slot)
  if stages < _FEWEST_STAGES or units > _MOST_COLUMNS:
    return None
  if not _has_registers(config, recurrent):
    return None
  return dataclasses.replace(config, stages=stages)


def _choose_low_resident(
    batch: int, size: int, recurrent: int, target: devices.Target
) -> on_chip_lib.GateConfig | None:
  """Returns the cut of `choose_resident` into low tiles, or None."""
  row_blocks = math.ceil(batch / low_tiles.ROWS)
  most = low_tiles.COLUMNS // low_tiles.GROUP
  if recurrent > most or row_blocks * (size // low_tiles.GROUP) > target.cores:
    return None
  stages, held = _low_stages(size // limits.DEPTH, 0)
  if stages < _FEWEST_STAGES:
    return None
  # Sums lie where slices were: the fewest slots have room for them.
  return on_chip_lib.GateConfig(
      units=low_tiles.GROUP,
      gates=recurrent,
      stages=stages,
      rows=low_tiles.ROWS,
      held=held,
  )


def _choose_low_team(
    batch: int, size: int, turns: int, target: devices.Target
) -> on_chip_lib.TeamConfig | None:
  """Returns the cut of `choose_team` into low tiles, or None."""
  row_blocks = math.ceil(batch / low_tiles.ROWS)
  unit_blocks = size // low_tiles.COLUMNS
  if row_blocks * unit_blocks > _teams(target, on_chip_lib.MEMBERS):
    return None
  config = on_chip_lib.TeamConfig(
      units=low_tiles.COLUMNS, stages=_FEWEST_STAGES, rows=low_tiles.ROWS
  )
  stages, held = _low_stages(turns, 4 * config.sum_words)
  if stages < _FEWEST_STAGES:
    return None
  return dataclasses.replace(config, stages=stages, held=held)


def _low_stages(turns: int, sums: int) -> tuple[int, int]:
  """Returns numbers of slots beside a low tile's matrix and of slices held.

  Args:
    turns: slices of the matrix.
    sums: bytes of shared memory for sums.
  """
  row = 2 * limits.DEPTH
  for held in (0, _MOST_HELD):
    left = _TEAM_SMEM - sums - (turns - held) * row * low_tiles.COLUMNS
    stages = min(max(turns, _FEWEST_STAGES), left // (row * low_tiles.ROWS))
    if stages >= turns:
      break
  return stages // on_chip_products.TURNS * on_chip_products.TURNS, held


def _has_registers(
    config: on_chip_lib.GateConfig | on_chip_lib.TeamConfig, recurrent: int
) -> bool:
  """Returns whether a thread has registers for its parts of a tile."""
  return config.parts * (recurrent + 1) <= _MOST_VALUES


def _teams(target: devices.Target, members: int) -> int:
  """Returns the clusters of two or four that are on the device at once.

  They have to fit however pairs of multiprocessors are dealt to 8 groups: of
  clusters of four, each group may have a pair left over. On 132
  multiprocessors 64 clusters of two were run, and no more.
  """
  return (target.cores - (2 * 8 if members > 2 else 4)) // members


def _configs(size: int, gates: int, target: devices.Target) -> Iterator[Config]:
  """Yields the configurations that fit."""
  for groups in _GROUPS:
    columns = gates * groups * cut.GROUP
    if size % limits.DEPTH or size % (groups * cut.GROUP):
      continue
    if columns > _MOST_COLUMNS or columns % wgmma_smem.WIDTH:
      continue
    for warpgroups in (1, 2, 3):
      rows = warpgroups * cut.ROWS
      registers = _registers_left(warpgroups, columns)
      if registers < _FEWEST_REGISTERS:
        continue
      stage = 2 * limits.DEPTH * (rows + columns)
      yield Config(
          warpgroups=warpgroups,
          groups=groups,
          stages=min(_MOST_STAGES, _SMEM // stage),
          ahead=registers >= _MANY_REGISTERS,
          ctas=target.cores,
      )


def _registers_left(warpgroups: int, columns: int) -> int:
  """Returns a thread's registers, less the registers of its product."""
  return min(255, 2**16 // (128 * warpgroups)) - columns // 2
