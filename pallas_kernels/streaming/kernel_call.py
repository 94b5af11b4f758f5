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

from pallas_kernels import linear_maps
from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import lanes

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static arguments of one kernel.

  Attributes:
    step: the equations, pointwise and in tuples: (params, inputs) -> (A, b) of
      a linear recurrence, (params, inputs, carry) -> carry of a diagonal one.
    params: number of per-feature parameters.
    layout: the layout of all streams.
    config: the cut.
    reverse: whether time runs from the last step to the first.
    has_flags: whether some steps restart or are held.
    has_carry: whether a linear recurrence starts from a given h, not from zero.
    has_restart: whether it restarts from a given h, not from zero.
    reads_starts: whether the step has one input more: whether it restarts.
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
  reads_starts: bool
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


class Operands(NamedTuple):
  """Operands of a kernel. Operands that it does not read may be any arrays.

  Attributes:
    theta: per-feature parameters, [plan.params, Fp], with Fp the padded
      features.
    arrays: inputs, each [B, T, F] or [B, T, G, F].
    carries: all arrays of the carry after every step, each [B, T, F], for the
      adjoint.
    carry: carry before the first step, [S, B, Fp].
    restart: the carry after a reset, of `carry`'s shape.
    flags: int32 [B, T], bits RESET and HOLD.
  """

  theta: Array
  arrays: tuple[Array, ...]
  carries: tuple[Array, ...]
  carry: Array
  restart: Array
  flags: Array


class Cotangents(NamedTuple):
  """Operands of an adjoint that the forward kernel has not.

  Attributes:
    carries: cotangents of the first of `Operands.carries`, each [B, T, F].
    last: cotangent of the last carry, as `Operands.carry`, float32.
  """

  carries: tuple[Array, ...]
  last: Array


def streams(
    plan: Plan, operands: Operands, cotangents: Cotangents
) -> tuple[tuple[blocks.Stream, ...], list[blocks.Stream]]:
  """Returns the streams of an adjoint.

  Returns:
    The streams of the inputs; and streams of the carry before each step, which
    is the carry after the step before, and of its cotangents.
  """
  arrays, carries, given = operands.arrays, operands.carries, cotangents.carries
  shifts = [1 if plan.reverse else -1] * len(carries) + [0] * len(given)
  # The adjoint is written for real numbers, whose gradient JAX conjugates.
  flips = [False] * len(carries) + [True] * len(given)
  others = [
      blocks.Stream(len(arrays) + i, None, x.dtype, shift, flip)
      for i, (x, shift, flip) in enumerate(
          zip((*carries, *given), shifts, flips, strict=True)
      )
  ]
  outs = blocks.streams_of(arrays)
  return tuple(dataclasses.replace(s, conjugate=True) for s in outs), others


class Loop:
  """The blocks of one warpgroup on their way through a kernel.

  Args:
    plan: the static arguments.
    reverse: direction of the loop.
    ins: streams that are read.
    outs: streams that are written.
    flags: reference to the packed flags.
    refs: references to arrays of `ins`, arrays of `outs`, other outputs, ring
      buffers, mbarriers and further scratch.
    counts: how many are arrays of `ins`, arrays of `outs` and other outputs.

  Attributes:
    walk: walk over time.
    inputs: ring buffers of `ins`.
    others: references to all further outputs.
    scratch: further scratch.
  """

  def __init__(self, plan: Plan, reverse: bool, ins, outs, flags, refs, counts):
    groups = []
    by_thread = plan.config.by_thread
    rings = len(ins), 0 if by_thread else len(outs), not by_thread
    for size in (*counts, *rings):
      groups.append(refs[:size])
      refs = refs[size:]
    sources, targets, self.others, in_rings, out_rings, barriers = groups
    self.scratch = refs
    self.walk = walk(plan, reverse)
    copies: Any = lanes if by_thread else blocks
    self.inputs = copies.Inputs(self.walk, ins, sources, in_rings, *barriers)
    self._outputs = copies.Outputs(self.walk, outs, targets, out_rings)
    self._params, self._flags = plan.params, flags if plan.has_flags else None

  def read(self, ref: Ref, states: int) -> tuple[Array, ...]:
    """Returns a carry [S, B, Fp] in registers."""
    return tuple(self.walk.read(ref, i, self.walk.batch) for i in range(states))

  def write(self, ref: Ref, carry: Sequence[Array]) -> None:
    """Writes a carry to [S, B, Fp]."""
    for i, value in enumerate(carry):
      ref[i, self.walk.batch, self.walk.features] = value

  def theta(self, ref: Ref) -> tuple[Array, ...]:
    """Returns the per-feature parameters in registers."""
    return tuple(self.walk.read(ref, k) for k in range(self._params))

  def flags(self, wave) -> 'BlockFlags':
    """Returns the flags of a wave's block."""
    return BlockFlags(self.walk, self._flags, wave)

  def run(self, wave: Callable[..., tuple[Any, Any]], state: Any) -> Any:
    """Runs all waves, and writes their results; returns the last state.

    Args:
      wave: (index, state) -> (state, rows of `outs`).
      state: state before the first wave.
    """

    def whole(k, state):
      state, rows = wave(k, state)
      self._outputs.write(k, rows)
      self.inputs.refill(k)
      return state

    return lax.fori_loop(0, self.walk.waves, whole, state)


def run(
    plan: Plan,
    name: str,
    body: Callable[..., None],
    operands: Operands,
    cotangents: Cotangents | None,
    ins: Sequence[blocks.Stream],
    outs: Sequence[blocks.Stream],
    others: Sequence[Any],
    scratch: Sequence[Any] = (),
) -> tuple[tuple[Array, ...], Sequence[Array]]:
  """Runs a kernel.

  Args:
    plan: the static arguments.
    name: the kernel's name, in profiles.
    body: takes a `Loop` and references to theta, carry and restart, and to the
      cotangent of the last carry.
    operands: arrays that the kernel reads.
    cotangents: cotangents of the adjoint, which runs against the order of the
      recurrence; None for the forward kernel.
    ins: streams that are read.
    outs: streams that are written; of the adjoint the cotangents of inputs.
    others: types of all further outputs.
    scratch: types of further scratch.

  Returns:
    The arrays that hold `outs`, and all further outputs.
  """
  config, layout = plan.config, plan.layout
  theta, arrays, carries, carry, restart, flags = operands
  last: tuple[Array, ...] = ()
  if cotangents is None:
    reverse, read = plan.reverse, list(map(layout.widen, arrays))
    results = [jax.ShapeDtypeStruct(layout.shape, s.dtype) for s in outs]
  else:
    given = (*arrays, *carries, *cotangents.carries)
    reverse, last = not plan.reverse, (cotangents.last,)
    read = list(map(layout.widen, given))
    of_inputs = read[: len(arrays)]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_inputs]
  counts = len(read), len(results), len(others)

  def whole(theta, carry, restart, flags, *refs):
    ends = len(last)
    loop = Loop(plan, reverse, ins, outs, flags, refs[ends:], counts)
    body(loop, theta, carry, restart, *refs[:ends])
    if not config.by_thread:
      plgpu.wait_smem_to_gmem(0)

  grid = {'batch': layout.batch, 'tile': layout.padded // blocks.LANES}
  if config.segments > 1:
    grid['segment'] = config.segments
  options: dict[str, Any] = {}
  if config.warpgroups > 1:
    options = {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  whole.__name__ = name
  kernel = plgpu.kernel(
      whole,
      out_type=(*results, *others),
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      scratch_types=[
          *blocks.ring_types(ins, config, config.stages),
          *blocks.ring_types(
              () if config.by_thread else outs, config, blocks.OUT_SLOTS
          ),
          *blocks.barrier_types(ins, config),
          *scratch,
      ],
      compiler_params=compiler_params.COMPILER_PARAMS,
      interpret=plan.interpret,
      **options,
  )
  found = kernel(theta, carry, restart, pack(plan, flags), *last, *read)
  count = len(results)
  return tuple(map(layout.narrow, found[:count])), found[count:]


# Flags of the steps of one block, and the maps of steps with flags.
#
# A kernel reads the flags of a block as a few words. If no bit of a block is
# set, as in most blocks of a sequence with some resets, it skips all work for
# flags.


# Steps of a word, which has bits of each.
_STEPS, _BITS = 16, 2


def pack(plan: Plan, flags: Array) -> Array:
  """Returns the flags of all blocks as words.

  Args:
    plan: the kernel's plan.
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
    walk: walk over time.
    ref: the result of `pack`, in device memory, or None without flags.
    wave: the block's wave.
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
    """Returns the result of one of two functions, by whether a flag is set.

    Args:
      with_flags: function that is right for any flags.
      without: function that is right where no flag of the block is set; it
        returns arrays of equal types.
    """
    if not self._words:
      return with_flags()
    is_set = functools.reduce(operator.or_, self._words) != 0
    return lax.cond(is_set, with_flags, without)

  def maps(
      self, pairs: Sequence[affine_maps.Map], restart: Any
  ) -> Sequence[affine_maps.Map]:
    """Returns the maps of a linear recurrence's steps, with flags.

    Args:
      pairs: the maps without flags.
      restart: h that a restart starts from.
    """
    return self.either(
        lambda: [self.map(i, pair, restart) for i, pair in enumerate(pairs)],
        lambda: pairs,
    )

  def map(self, i: int, pair, restart) -> affine_maps.Map:
    """Returns the map of the i-th step of a linear recurrence, with flags.

    Args:
      i: index of the step in the block.
      pair: the map without flags.
      restart: h that a restart starts from.
    """
    a, b = self.held(i, pair[0]), pair[1]
    if (idle := self.idle(i)) is not None:
      b = linear_maps.where(idle, 0.0, b)
    if (restarts := self.restarts(i)) is not None:
      again = affine_maps.step((a, b), restart)
      a = linear_maps.where(restarts, 0.0, a)
      b = linear_maps.where(restarts, again, b)
    return a, b

  def held(self, i: int, a: Any) -> Any:
    """Returns A of the i-th step: 1 where the carry is held."""
    idle = self.idle(i)
    if idle is None:
      return a
    return linear_maps.where(idle, linear_maps.identity(a), a)
