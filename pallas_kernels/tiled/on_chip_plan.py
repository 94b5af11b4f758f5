"""Static facts of kernels whose matrix stays on chip."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles
from pallas_kernels.tiled import on_chip
from pallas_kernels.tiled import plan as plan_lib

Array = jax.Array
Ref = Any
DEPTH = limits.DEPTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plan_lib.Plan):
  """Static (hashable) facts of a kernel of either pass."""

  @property
  def tiles(self) -> on_chip.Tiles:
    return on_chip.Tiles(config=self.config, batch=self.batch, size=self.size)

  @property
  def part(self) -> int:
    return on_chip.UNITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Plan):
  """Static facts of a forward kernel; config is an `on_chip.GateConfig`."""

  @property
  def columns(self) -> int:
    return self.config.columns

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
    return fragments.permute(kernel.reshape(size, -1), on_chip.UNITS).T

  def slice_of_tile(self, matrix: Ref, tile) -> Callable[[int], Ref]:
    """Returns (k) -> a slice of a tile's part of the matrix of `arrange`."""
    rows = pl.ds(tile.block * self.columns, self.columns)
    return lambda k: matrix.at[rows, pl.ds(k * DEPTH, DEPTH)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjoint(Plan):
  """Static facts of an adjoint by teams; config is an `on_chip.TeamConfig`."""

  @property
  def turns(self) -> int:
    """Slices of a CTA's part of a sum."""
    return self.recurrent * self.size // (DEPTH * on_chip.MEMBERS)

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', 1, D, D], as [D, G' D]: a row for each column of tiles."""
    gates, _, size, _ = kernel.shape
    # [gate, to, from]
    kernel = jnp.swapaxes(kernel[:, 0].astype(self.dtype), 1, 2)
    if self.config.low:
      kernel = low_tiles.order(kernel)
    else:
      kernel = fragments.permute(kernel, on_chip.UNITS)
    return jnp.transpose(kernel, (2, 0, 1)).reshape(size, gates * size)

  def slice_of_tile(self, matrix: Ref, tile) -> Callable[[int], Ref]:
    """Returns (k) -> a slice of this CTA's part of the matrix of `arrange`.

    Rows beyond the matrix are copied as zeros.
    """
    units = self.config.units

    def slice_of(k):
      first = (lax.axis_index('member') * self.turns + k) * DEPTH
      rows = pl.ds(tile.block * units, units)
      return matrix.at[rows, pl.ds(first, DEPTH)]

    return slice_of
