"""Static facts of a team's kernel, and where its arrays' elements lie."""

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
from pallas_kernels.tiled import plan as plan_lib
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any
DEPTH = limits.DEPTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plan_lib.Plan):
  """Static (hashable) facts of one kernel, an adjoint by `teams.Config`."""

  @property
  def tiles(self) -> teams.Tiles:
    """All tiles of a step."""
    return teams.Tiles(config=self.config, batch=self.batch, size=self.size)

  @property
  def turns(self) -> int:
    """Slices of a CTA's part of a sum."""
    return self.recurrent * self.size // (DEPTH * teams.MEMBERS)

  @property
  def part(self) -> int:
    """Units of a part."""
    return teams.UNITS

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', 1, D, D], as [D, G' D]: a row for each column of tiles."""
    gates, _, size, _ = kernel.shape
    # [gate, to, from]
    kernel = jnp.swapaxes(kernel[:, 0].astype(self.dtype), 1, 2)
    if self.config.low:
      kernel = low_tiles.order(kernel)
    else:
      kernel = fragments.permute(kernel, teams.UNITS)
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

  def slice_of_rows(self, ref: Ref, step, tile, first) -> Ref:
    """Returns a slice of a row block in one step of an array of all steps."""
    rows = pl.ds(tile.row, self.config.rows)
    return self.slice_of_step(ref, step, rows, pl.ds(first, DEPTH))
