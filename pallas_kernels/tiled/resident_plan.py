"""Static facts of a kernel whose CTAs have R in shared memory."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles
from pallas_kernels.tiled import plan as plan_lib
from pallas_kernels.tiled import resident
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any
DEPTH = limits.DEPTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plan_lib.Plan):
  """Static (hashable) facts of a forward kernel by `resident.Config`."""

  @property
  def tiles(self) -> teams.Tiles:
    """All tiles of a step."""
    return teams.Tiles(config=self.config, batch=self.batch, size=self.size)

  @property
  def columns(self) -> int:
    """Columns of a product."""
    return self.config.columns

  @property
  def part(self) -> int:
    """Units of a part."""
    return resident.UNITS

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', 1, D, D], as [columns of all tiles, D]."""
    gates, _, size, _ = kernel.shape
    # [gate, from, to] -> [from, tile, gate, unit]
    kernel = kernel[:, 0].astype(self.dtype)
    kernel = kernel.reshape(gates, size, -1, self.config.units)
    kernel = jnp.transpose(kernel, (1, 2, 0, 3))
    if self.config.low:
      missing = self.columns // self.config.units - gates
      kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0)))
      return low_tiles.order(kernel).reshape(size, -1).T
    return fragments.permute(kernel.reshape(size, -1), resident.UNITS).T

  def slice_of_tile(self, matrix: Ref, tile) -> Callable[[int], Ref]:
    """Returns (k) -> a slice of a tile's part of the matrix of `arrange`."""
    rows = pl.ds(tile.block * self.columns, self.columns)
    return lambda k: matrix.at[rows, pl.ds(k * DEPTH, DEPTH)]
