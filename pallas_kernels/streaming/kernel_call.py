"""The plan of a kernel (its static arguments), and its launch."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks

Ref = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static arguments of one kernel.

  Attributes:
    step: the equations, pointwise and in tuples: (params, inputs) -> (a, b) of
      a linear recurrence, (params, inputs, carry) -> carry of a diagonal one.
    params: number of per-feature parameters.
    layout: of all streams.
    config: the cut.
    reverse: whether time runs from the last step to the first.
    has_flags: whether some steps restart or are held.
    has_carry: whether a linear recurrence starts from a given h, not from zero.
    has_restart: whether it restarts from a given h, not from zero.
    interpret: Pallas's interpret parameters for a run on a CPU, or None.
  """

  step: Callable[..., Any]
  params: int
  layout: blocks.Layout
  config: blocks.Config
  reverse: bool
  has_flags: bool
  has_carry: bool
  has_restart: bool
  interpret: Any


def accuracy(plan: Plan) -> cells.Accuracy:
  """Returns the accuracy of special functions: all digits of float32.

  That holds for inputs in 16 bits too: a cell may take the logarithm of a
  number next to 0, and errors add up over a memory of hundreds of steps.
  """
  reciprocal = None if plan.interpret else instructions.reciprocal
  return cells.Accuracy(reciprocal=reciprocal)


def walk(plan: Plan, reverse: bool) -> blocks.Walk:
  """Returns the blocks of this warpgroup, inside a kernel.

  Args:
    plan: the static arguments.
    reverse: direction of the kernel's loop.
  """
  config = plan.config
  tile = lax.axis_index('tile')
  return blocks.Walk(
      layout=plan.layout,
      config=config,
      reverse=reverse,
      batch=lax.axis_index('batch'),
      features=pl.ds(tile * blocks.LANES, blocks.LANES),
      segment=lax.axis_index('segment') if config.segments > 1 else 0,
      warpgroup=lax.axis_index('warpgroup') if config.warpgroups > 1 else 0,
  )


def kernel(
    plan: Plan,
    body: Callable[..., None],
    name: str,
    ins: Sequence[blocks.Stream],
    outs: Sequence[blocks.Stream],
    out_type: Sequence[Any],
    scratch: Sequence[Any] = (),
) -> Callable[..., Any]:
  """Returns a kernel as a function of arrays.

  Args:
    plan: the static arguments.
    body: takes references to operands and outputs, and the scratch that `split`
      takes apart.
    name: of the kernel, for profiles.
    ins: streams that it reads.
    outs: streams that it writes.
    out_type: shapes and dtypes of all outputs.
    scratch: types of further scratch.
  """
  config, layout = plan.config, plan.layout
  grid = {'batch': layout.batch, 'tile': layout.padded // blocks.LANES}
  if config.segments > 1:
    grid['segment'] = config.segments
  options: dict[str, Any] = {}
  if config.warpgroups > 1:
    options = {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  body.__name__ = name
  return plgpu.kernel(
      body,
      out_type=tuple(out_type),
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      scratch_types=[
          *blocks.ring_types(ins, config, config.stages),
          *blocks.ring_types(outs, config, blocks.OUT_SLOTS),
          blocks.barrier_type(ins, config),
          *scratch,
      ],
      compiler_params=compiler_params.COMPILER_PARAMS,
      interpret=plan.interpret,
      **options,
  )


class Refs(NamedTuple):
  """References of a kernel, after those to its small operands.

  Attributes:
    arrays: those that hold the streams that are read.
    outputs: of the kernel.
    in_rings: ring buffers of the streams that are read.
    out_rings: ring buffers of the streams that are written.
    barriers: mbarriers of `in_rings`.
    scratch: further scratch.
  """

  arrays: Sequence[Ref]
  outputs: Sequence[Ref]
  in_rings: Sequence[Ref]
  out_rings: Sequence[Ref]
  barriers: Ref
  scratch: Sequence[Ref]


def split(refs: Sequence[Ref], inputs: int, outputs: int, ins, outs) -> Refs:
  """Names the references of a kernel.

  Args:
    refs: those after the small operands.
    inputs: number of arrays that hold the streams that are read.
    outputs: number of outputs.
    ins: streams that are read.
    outs: streams that are written.
  """
  groups = []
  for size in (inputs, outputs, len(ins), len(outs)):
    groups.append(refs[:size])
    refs = refs[size:]
  barriers, *scratch = refs
  arrays, results, in_rings, out_rings = groups
  return Refs(arrays, results, in_rings, out_rings, barriers, scratch)


# Operands of a linear kernel that are read or written once.
#
# They are [B, Fp] or [rows, Fp], with Fp the features padded to whole tiles,
# and stay in registers for the whole loop.


Array = jax.Array
Walk = blocks.Walk


def read(plan: Plan, walk: Walk, params: Ref, restart: Ref, flags: Ref):
  """Returns theta and restart in registers, and flags; None for no flags."""
  theta = tuple(walk.read(params, k) for k in range(plan.params))
  if not plan.has_flags:
    return theta, None, None
  return theta, initial(walk, restart, plan.has_restart), flags


def initial(walk: Walk, ref: Ref, given: bool) -> Array:
  """Returns h to start or restart from: zero if none is given."""
  return walk.read(ref, walk.batch) if given else blocks.zeros()


def write_last(walk: Walk, ref: Ref, h: Array):
  """Writes h after the last wave."""

  @pl.when((walk.segment == 0) & (walk.warpgroup == walk.config.warpgroups - 1))
  def _():
    ref[walk.batch, walk.features] = h


# Flags of the steps of one block, and the maps of steps with flags.
#
# A kernel reads the flags of a block as a few words. Where no bit of them is
# set, as in most blocks of a sequence with some resets, it skips what flags
# need.


# Steps of a word, which has bits of each.
_STEPS, _BITS = 16, 2


def pack(plan: Plan, flags: Array) -> Array:
  """Returns the flags of all blocks as words.

  Args:
    plan: of the kernel.
    flags: int32 [B, T]; returned as it is where the plan has no flags.

  Returns:
    int32 [B, words of all blocks], the first block in time first. Steps beyond
    the sequence are held.
  """
  if not plan.has_flags:
    return flags
  layout, rows = plan.layout, plan.config.rows
  steps = blocks.steps(layout, plan.config)
  pad = lambda x, count, code: jnp.pad(
      x, [(0, 0)] * (x.ndim - 1) + [(0, count)], constant_values=code
  )
  flags = pad(flags, steps - layout.time, step_flags.HOLD)
  flags = flags.reshape(layout.batch, steps // rows, rows)
  flags = pad(flags, _words(rows) * _STEPS - rows, 0)
  flags = flags.reshape(layout.batch, -1, _STEPS)
  places = _BITS * lax.broadcasted_iota(jnp.int32, flags.shape, 2)
  return jnp.sum(flags << places, 2, dtype=jnp.int32)


def _words(rows: int) -> int:
  return -(-rows // _STEPS)


class BlockFlags:
  """The flags of a block's steps; steps beyond the sequence are held.

  Args:
    walk: over time.
    ref: what `pack` returned, in device memory, or None without flags.
    wave: of the block.
  """

  def __init__(self, walk: blocks.Walk, ref: Any, wave):
    self._walk = walk
    self._beyond = None
    self._words: Sequence[Any] = ()
    if ref is not None:
      count = _words(walk.config.rows)
      first = walk.place(wave) * count
      self._words = [ref[walk.batch, first + i] for i in range(count)]
    elif walk.ragged:
      times = [walk.time(wave, i) for i in range(walk.config.rows)]
      self._beyond = [time >= walk.layout.time for time in times]

  def restarts(self, i: int):
    """Whether the carry restarts before the i-th step."""
    return self._has(i, step_flags.RESET)

  def idle(self, i: int):
    """Whether the carry is held over the i-th step."""
    if self._beyond is not None:
      return self._beyond[i]
    return self._has(i, step_flags.HOLD)

  def _has(self, i: int, flag: int):
    if not self._words:
      return None
    word, place = divmod(self._walk.row(i), _STEPS)
    bit = int(np.uint32(flag << (_BITS * place)).astype(np.int32))
    return (self._words[word] & bit) != 0

  def either(self, with_flags: Callable[[], Any], without: Callable[[], Any]):
    """Returns what one of two functions returns, by whether a flag is set.

    Args:
      with_flags: is right for any flags.
      without: is right where no flag of the block is set, and returns arrays of
        the same types.
    """
    if not self._words:
      return with_flags()
    is_set = functools.reduce(operator.or_, self._words) != 0
    return lax.cond(is_set, with_flags, without)

  def maps(
      self, pairs: Sequence[affine_maps.Map], restart
  ) -> Sequence[affine_maps.Map]:
    """Returns the maps of a linear recurrence's steps, with flags.

    Args:
      pairs: the maps without flags.
      restart: value that a restart starts from.
    """
    return self.either(
        lambda: [self.map(i, pair, restart) for i, pair in enumerate(pairs)],
        lambda: [tuple(pair) for pair in pairs],
    )

  def map(self, i: int, pair, restart) -> affine_maps.Map:
    """Returns the map of the i-th step of a linear recurrence, with flags.

    Args:
      i: index of the step in the block.
      pair: the map without flags.
      restart: value that a restart starts from.
    """
    pair = step_flags.select(self.idle(i), (1.0, 0.0), pair)
    forget = 0.0, lambda: affine_maps.step(pair, restart)
    return step_flags.select(self.restarts(i), forget, pair)
