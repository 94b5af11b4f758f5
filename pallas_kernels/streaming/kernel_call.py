"""The plan of a kernel (its static arguments), and its launch."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import pointwise
from pallas_kernels.streaming import ring_buffers
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

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
  layout: streams.Layout
  config: time_blocks.Config
  reverse: bool
  has_flags: bool
  has_carry: bool
  has_restart: bool
  interpret: Any


def accuracy(plan: Plan) -> pointwise.Accuracy:
  """Returns the accuracy of special functions: all digits of float32.

  That holds for inputs in 16 bits too: a cell may take the logarithm of a
  number next to 0, and errors add up over a memory of hundreds of steps.
  """
  reciprocal = None if plan.interpret else instructions.reciprocal
  return pointwise.Accuracy(reciprocal=reciprocal)


def walk(plan: Plan, reverse: bool) -> time_blocks.Walk:
  """Returns the blocks of this warpgroup, inside a kernel.

  Args:
    plan: the static arguments.
    reverse: direction of the kernel's loop.
  """
  config = plan.config
  tile = lax.axis_index('tile')
  return time_blocks.Walk(
      layout=plan.layout,
      config=config,
      reverse=reverse,
      batch=lax.axis_index('batch'),
      features=pl.ds(tile * streams.LANES, streams.LANES),
      segment=lax.axis_index('segment') if config.segments > 1 else 0,
      warpgroup=lax.axis_index('warpgroup') if config.warpgroups > 1 else 0,
  )


def kernel(
    plan: Plan,
    body: Callable[..., None],
    name: str,
    ins: Sequence[streams.Stream],
    outs: Sequence[streams.Stream],
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
  grid = {'batch': layout.batch, 'tile': layout.padded // streams.LANES}
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
          *ring_buffers.ring_types(ins, config, config.stages),
          *ring_buffers.ring_types(outs, config, ring_buffers.OUT_SLOTS),
          ring_buffers.barrier_type(ins, config),
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
