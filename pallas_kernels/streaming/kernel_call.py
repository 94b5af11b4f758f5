"""What is static in a kernel call, and the launch itself."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import pointwise
from pallas_kernels.streaming import time_blocks

Ref = Any

# Barriers are placed by hand: those that Pallas would insert around accesses to
# shared memory take several times as long as the arithmetic.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static in a call.

  Attributes:
    step: the equations, pointwise and in tuples: (params, inputs) -> (a, b) of
      a linear recurrence, (params, inputs, carry) -> carry of a diagonal one.
    params: how many per-feature parameters there are.
    layout: of all streams.
    config: how the work is cut.
    reverse: whether time runs from the last step to the first.
    flags: whether some steps restart or are held.
    carry: whether a linear recurrence starts from a given h; from zero if not.
    restart: whether it restarts from a given h; from zero if not.
    interpret: Pallas's interpret parameters for a run on a CPU, or None.
  """

  step: Callable[..., Any]
  params: int
  layout: time_blocks.Layout
  config: time_blocks.Config
  reverse: bool
  flags: bool
  carry: bool
  restart: bool
  interpret: Any


def accuracy(plan: Plan) -> pointwise.Accuracy:
  """Returns what the special functions of a kernel are made of.

  Their results have all digits of float32, for inputs in 16 bits too: a cell
  may take the logarithm of what is next to 0, and a memory of hundreds of steps
  adds errors up.
  """
  reciprocal = None if plan.interpret else instructions.reciprocal
  return pointwise.Accuracy(reciprocal=reciprocal)


def walk(plan: Plan, reverse: bool) -> time_blocks.Walk:
  """Returns this warpgroup's way through time, inside a kernel.

  Args:
    plan: what is static.
    reverse: direction of the kernel's loop.
  """
  config = plan.config
  tile = lax.axis_index('tile')
  return time_blocks.Walk(
      plan.layout,
      config,
      reverse,
      lax.axis_index('batch'),
      pl.ds(tile * time_blocks.LANES, time_blocks.LANES),
      lax.axis_index('segment') if config.segments > 1 else 0,
      lax.axis_index('warpgroup') if config.warpgroups > 1 else 0,
  )


def kernel(
    plan: Plan,
    body: Callable[..., None],
    name: str,
    ins: Sequence[time_blocks.Stream],
    outs: Sequence[time_blocks.Stream],
    out_type: Sequence[Any],
    scratch: Sequence[Any] = (),
) -> Callable[..., Any]:
  """Returns a kernel as a function of arrays.

  Args:
    plan: what is static.
    body: takes references to operands and outputs, and the scratch that `split`
      takes apart.
    name: of the kernel, for profiles.
    ins: streams that it reads.
    outs: streams that it writes.
    out_type: shapes and dtypes of all outputs.
    scratch: types of further scratch.
  """
  config, layout = plan.config, plan.layout
  grid = {'batch': layout.batch, 'tile': layout.padded // time_blocks.LANES}
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
          *time_blocks.ring_types(ins, config, config.stages),
          *time_blocks.ring_types(outs, config, time_blocks.OUT_SLOTS),
          time_blocks.barrier_type(ins, config),
          *scratch,
      ],
      compiler_params=COMPILER_PARAMS,
      interpret=plan.interpret,
      **options,
  )


def split(refs: Sequence[Ref], inputs: int, outputs: int, ins, outs):
  """Splits a kernel's references by what they are.

  Args:
    refs: those after the small operands.
    inputs: how many arrays hold the streams that are read.
    outputs: how many outputs there are.
    ins: streams that are read.
    outs: streams that are written.

  Returns:
    Arrays, outputs, rings of the streams read and written, the barriers of the
    former, and the rest of the scratch.
  """
  groups = []
  for size in (inputs, outputs, len(ins), len(outs)):
    groups.append(refs[:size])
    refs = refs[size:]
  return *groups, refs[0], refs[1:]
