"""Static facts of a kernel that runs levels at the same time."""

import dataclasses
import functools

from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.wavefront import chunks as chunks_lib

# Elements of a row of a slice, 128 bytes, and rows of a product.
DEPTH, ROWS = 64, 64

# Warpgroups that multiply W x, in turns; another one copies.
CONSUMERS = 2

# CTAs of a cluster, which share slices of x.
MEMBERS = 2

# Columns of W in a group: a thread stores eight gates side by side of it.
GROUP = 32

# Slots of the ring buffer for slices of x.
_FEWEST_STAGES, _MOST_STAGES = 4, 12

# Chunks that are in device memory at once, a power of two. Gates may be so many
# ahead of their recurrence, and outputs of the gates that are made of them.
CHUNKS_OF_GATES, CHUNKS_OF_OUTPUTS = 8, 16

# Slots of the ring buffer for gates: others leave more for slices of x.
_STAGES_OF_GATES = 4

# Columns of a CTA. Fewer would take no less time, and more have no registers.
_FEWEST_COLUMNS, _MOST_COLUMNS = 64, 128

# Units of the largest heads: larger ones, of cells with two products a step,
# were not measured.
_UNITS = 64

# The fewest rows of a batch: a copy of a slice has eight.
_FEWEST_ROWS = 8

# Shared memory of a CTA in bytes, less what mbarriers take.
_CTA_BYTES = 226 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static facts of the kernel.

  Attributes:
    dense: of the recurrences of all levels.
    inputs: I, features of the lowest level's inputs, a multiple of 8.
    columns: gates that a CTA makes.
    stages: slots of the ring buffer for slices of x.
  """

  dense: plan_lib.Plan
  inputs: int
  columns: int
  stages: int

  @property
  def levels(self) -> int:
    return self.dense.shape.levels

  @property
  def width(self) -> int:
    """Gates of a level, G F."""
    return self.dense.gates * self.dense.shape.row

  @property
  def blocks(self) -> int:
    """CTAs that make the gates of a level; the last may have none."""
    return _round(pl.cdiv(self.width, self.columns), MEMBERS)

  @property
  def makers(self) -> int:
    """CTAs that make gates."""
    return self.levels * self.blocks

  @property
  def runners(self) -> int:
    """CTAs that run a recurrence."""
    return self.dense.shape.ctas(self.dense.config)

  @property
  def runners_of_level(self) -> int:
    return self.runners // self.levels

  @property
  def ctas(self) -> int:
    """CTAs of the grid; all are on the device at once."""
    return _round(max(self.makers, self.runners), MEMBERS)

  @property
  def depth(self) -> int:
    """Rows of W, as many as the widest inputs have features."""
    return max(self.inputs, self.dense.shape.row)

  @property
  def turns(self) -> int:
    """Slices of W."""
    return pl.cdiv(self.depth, DEPTH)

  @property
  def rows(self) -> int:
    """Rows of the batch that a product has, each at a few times."""
    octets = pl.cdiv(self.dense.shape.batch, 8)
    return 8 if octets % 2 else 16

  @property
  def parts(self) -> int:
    """Products of a chunk."""
    return pl.cdiv(self.dense.shape.batch, self.rows)

  @functools.cached_property
  def chunks(self) -> chunks_lib.Chunks:
    steps = ROWS // self.rows
    return chunks_lib.Chunks(self.dense.shape.time, self.dense.reverse, steps)

  @property
  def windows(self) -> tuple[int, int]:
    """Times of which gates and outputs are in device memory."""
    steps = self.chunks.steps
    return steps * CHUNKS_OF_GATES, steps * CHUNKS_OF_OUTPUTS

  @property
  def warpgroups(self) -> int:
    """Warpgroups of a CTA: of the recurrence, those that multiply, and one."""
    return self.dense.config.warpgroups + CONSUMERS + 1


def make(dense: plan_lib.Plan, inputs: int, cores: int) -> Plan:
  """Returns the plan of a kernel.

  Args:
    dense: of the recurrences of all levels, each head in one CTA.
    inputs: features of the lowest level's inputs.
    cores: multiprocessors of the device.

  Raises:
    NotImplementedError: no kernel can run it.
  """
  shape = dense.shape
  width = dense.gates * shape.row
  if shape.size > _UNITS or dense.config.exchange != 'shared':
    raise NotImplementedError(
        f'Levels run in one kernel with heads of up to {_UNITS} units, got'
        f' {shape.size}.'
    )
  if dense.split or jnp.dtype(dense.x_dtype) != jnp.dtype(dense.dtype):
    raise NotImplementedError(
        'Levels run in one kernel in bfloat16 or float16, got'
        f' {jnp.dtype(dense.dtype).name}.'
    )
  if shape.batch < _FEWEST_ROWS or width % GROUP:
    raise NotImplementedError(
        f'Levels run in one kernel with {_FEWEST_ROWS} sequences or more, and a'
        f' multiple of {GROUP} gates in all heads, got {shape.batch} and'
        f' {width}.'
    )
  if shape.batch * shape.time * shape.row >= 2**31:
    raise NotImplementedError(
        'Levels run in one kernel with fewer than 2^31 elements of outputs, got'
        f' [{shape.batch}, {shape.time}, {shape.row}].'
    )
  config = dataclasses.replace(dense.config, stages=_STAGES_OF_GATES)
  dense = dataclasses.replace(dense, config=config)
  blocks = cores // shape.levels // MEMBERS * MEMBERS
  columns = pl.cdiv(width, max(blocks, 1))
  columns = _round(max(columns, _FEWEST_COLUMNS), GROUP)
  plan = Plan(
      dense=dense, inputs=inputs, columns=columns, stages=_FEWEST_STAGES
  )
  _, taken = plan_lib.needs(dense, config)
  # Words, and mbarriers that are words, take 1 KiB each.
  taken += 2048 + 2 * DEPTH * plan.turns * columns
  stages = min((_CTA_BYTES - taken) // (2 * ROWS * DEPTH), _MOST_STAGES)
  # Two warps copy every other slice of a product each. With an odd number of
  # slices and one slot more, a warp could come to a slot that the other has not
  # filled in the round before, and take the mbarrier's phase for a later one.
  for features in (inputs, shape.row):
    turns = pl.cdiv(features, DEPTH)
    if turns % 2 and stages == turns + 1:
      stages -= 1
  if columns > _MOST_COLUMNS or plan.ctas > cores or stages < _FEWEST_STAGES:
    raise NotImplementedError(
        f'{shape.levels} levels of {width} gates and {plan.depth} inputs, with'
        f' {shape.batch} sequences, are more than {cores} multiprocessors hold'
        ' at once.'
    )
  return dataclasses.replace(plan, stages=stages)


def _round(number: int, multiple: int) -> int:
  return pl.cdiv(number, multiple) * multiple
