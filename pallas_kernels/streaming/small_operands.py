"""Operands of a linear kernel that are read or written once.

They are [B, Fp] or [rows, Fp], with Fp the features padded to whole tiles, and
stay in registers for the whole loop.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Ref = Any
Walk = time_blocks.Walk


def read(
    plan: kernel_call.Plan, walk: Walk, params: Ref, restart: Ref, flags: Ref
):
  """Returns theta and restart in registers, and flags; None for no flags."""
  theta = tuple(walk.read(params, k) for k in range(plan.params))
  if not plan.has_flags:
    return theta, None, None
  return theta, initial(walk, restart, plan.has_restart), flags


def initial(walk: Walk, ref: Ref, given: bool) -> Array:
  """Returns h to start or restart from: zero if none is given."""
  return walk.read(ref, walk.batch) if given else streams.zeros()


def write_last(walk: Walk, ref: Ref, h: Array):
  """Writes h after the last wave."""

  @pl.when((walk.segment == 0) & (walk.warpgroup == walk.config.warpgroups - 1))
  def _():
    ref[walk.batch, walk.features] = h
