"""Segments of a linear recurrence: what makes one long sequence parallel.

A first pass over all segments but the last finds the affine map that each
amounts to. With these every segment knows the h that it starts from.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import flags as flags_lib
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu import maps as maps_lib
from pallas_kernels.mosaic_gpu import streams as streams_lib

Array = jax.Array
Ref = Any
Plan = launch.Plan


def summarise(
    plan: Plan, reverse: bool, ins, step_maps, operands, arrays
) -> Array:
  """Returns the maps (A, B) that all segments but the last amount to.

  Args:
    plan: what is static.
    reverse: direction of the loop.
    ins: the streams that the maps depend on.
    step_maps: (params, rows, restart, block) -> the map of each step.
    operands: params, restart and flags.
    arrays: what the streams are part of.

  Returns:
    [segments - 1, 2, B, Fp], or something else, which is not to be read, where
    there is one segment.
  """
  layout, config = plan.layout, plan.config
  if config.segments == 1:
    return operands[0]

  def body(params, restart, flags, *refs):
    inputs, (maps_ref,), rings, _none, barriers, scratch = launch.split(
        refs, len(arrays), 1, ins, ()
    )
    walk = launch.walk(plan, reverse)
    theta, restart, flags = small(plan, walk, params, restart, flags)
    exchange = maps_lib.Exchange(walk, scratch)
    walk.prefetch(ins, inputs, rings, barriers)

    def wave(k, total):
      block = flags_lib.Block(walk, flags, k)
      walk.wait(barriers, k)
      maps = step_maps(theta, walk.rows(rings, k), restart, block)
      total = exchange.compose(k, maps, total)
      plgpu.commit_smem()  # Every thread has read its rows.
      walk.refill(ins, inputs, rings, barriers, k)
      return total

    zero = streams_lib.zeros()
    total = lax.fori_loop(0, walk.waves, wave, (zero + 1.0, zero))

    @pl.when(walk.warpgroup == 0)
    def _():
      for i, value in enumerate(total):
        maps_ref[walk.segment, i, walk.batch, walk.features] = value

  shape = (config.segments - 1, 2, layout.batch, layout.padded)
  (maps,) = launch.kernel(
      plan,
      body,
      'linear_recurrence_segments',
      ins,
      (),
      (jax.ShapeDtypeStruct(shape, jnp.float32),),
      maps_lib.exchange_types(config),
      segments=config.segments - 1,
  )(*operands, *arrays)
  return maps


def small(plan: Plan, walk, params: Ref, restart: Ref, flags: Ref):
  """Returns parameters and restart in registers, and flags if there are any."""
  theta = tuple(walk.read(params, k) for k in range(plan.params))
  if not plan.flags:
    return theta, None, None
  return theta, initial(walk, restart, plan.restart), flags


def initial(walk, ref: Ref, given: bool) -> Array:
  """Returns what to start or restart from: zero if nothing is given."""
  return walk.read(ref, walk.batch) if given else streams_lib.zeros()


def enter(walk, segments: Ref, h: Array) -> Array:
  """Returns h before this segment, from h before the first."""
  for i in range(walk.config.segments - 1):
    pair = tuple(walk.read(segments, i, j, walk.batch) for j in range(2))
    h = jnp.where(i < walk.segment, maps_lib.apply(pair, h), h)
  return h


def leave(walk, ref: Ref, h: Array):
  """Writes h after the last segment."""
  is_last = walk.segment == walk.config.segments - 1

  @pl.when(is_last & (walk.warpgroup == 0))
  def _():
    ref[walk.batch, walk.features] = h
