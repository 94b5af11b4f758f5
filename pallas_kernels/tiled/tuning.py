"""How large tiles are: the cut with the least time by a short model.

A tile of M rows and C columns, K deep, takes the longer of two times: that of
its product, and that of reading M and C vectors of K from the L2 cache. With it
come the update of its elements and the wait for other CTAs. CTAs take tiles in
turn, so a last turn that is not full costs as much as a full one.
"""

from collections.abc import Iterator
import math

from pallas_kernels import targets
from pallas_kernels.streaming import wgmma_smem
from pallas_kernels.tiled import config as config_lib

Config = config_lib.Config

# Of one multiprocessor, by measurement: products, reads from the L2 cache while
# all read, updates of a unit of a row, and the rest of a step.
_FLOPS_PER_NS = 5000.0
_BYTES_PER_NS = 40.0
_UPDATE_NS = 0.35
_STEP_NS = 3000.0

# Rows of a batch, and units of a head, from which tiles are faster than R on
# the chip.
ROWS, UNITS = 512, 256

# Shared memory for the ring buffer, and its most slots.
_SMEM = 224 * 1024
_MOST_STAGES = 6

# Columns of a product.
_MOST_COLUMNS = 256


def choose(
    *,
    batch: int,
    heads: int,
    size: int,
    recurrent: int,
    adjoint: bool,
    target: targets.Target,
) -> Config:
  """Returns the configuration with the least time by the model.

  Args:
    batch: B.
    heads: N.
    size: D.
    recurrent: recurrent gates.
    adjoint: whether of the adjoint kernel.
    target: the device.

  Raises:
    NotImplementedError: there is none.
  """
  gates = 1 if adjoint else recurrent
  depth = size * (recurrent if adjoint else 1)

  def cost(config: Config) -> float:
    tiles = config_lib.Tiles(config=config, batch=batch, heads=heads, size=size)
    columns = gates * config.units
    flops = 2 * config.rows * columns * depth
    read = 2 * (config.rows + columns) * depth
    own = max(flops / _FLOPS_PER_NS, read / _BYTES_PER_NS)
    own += _UPDATE_NS * config.rows * config.units
    return math.ceil(tiles.total / target.cores) * own + _STEP_NS

  configs = list(_configs(size, gates, target))
  if not configs:
    raise NotImplementedError(
        'GPU kernels in tiles take heads of a multiple of'
        f' {config_lib.DEPTH} units and up to'
        f' {_MOST_COLUMNS // config_lib.GROUP} recurrent gates, got {size}'
        f' units and {recurrent} gates.'
    )
  return min(configs, key=cost)


def _configs(size: int, gates: int, target: targets.Target) -> Iterator[Config]:
  """Yields the configurations that fit."""
  for groups in (1, 2, 4, 8):
    columns = gates * groups * config_lib.GROUP
    if size % config_lib.DEPTH or size % (groups * config_lib.GROUP):
      continue
    if columns > _MOST_COLUMNS or columns % wgmma_smem.WIDTH:
      continue
    for warpgroups in (1, 2, 3):
      rows = warpgroups * config_lib.ROWS
      stage = 2 * config_lib.DEPTH * (rows + columns)
      yield Config(
          warpgroups=warpgroups,
          groups=groups,
          stages=min(_MOST_STAGES, _SMEM // stage),
          ahead=warpgroups == 1,
          ctas=target.cores,
      )
