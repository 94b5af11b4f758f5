"""Static facts of a kernel that runs levels at the same time."""

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.wavefront import chunks as chunks_lib

# Elements of a row of a slice, 128 bytes, and rows of a product.
DEPTH, ROWS = 64, 64

# Warpgroups of a CTA that multiply W x, with so many columns of W each.
CONSUMERS, COLUMNS = 2, 64

# CTAs of a cluster, which share slices of x.
MEMBERS = 2

# The most recurrences of a CTA, each of one warpgroup if there are several.
_TOGETHER = 3

# Warpgroups of a CTA, the last of which copies and waits.
WARPGROUPS = _TOGETHER + 1

# Slices of W that a warpgroup has in registers, 16 for each; shared memory has
# the others.
_IN_REGISTERS = 10

# Registers of a thread that multiplies, that runs a recurrence, and of others.
MULTIPLYING, RECURRING, OTHERS = 232, 160, 24

# The most registers of a thread that hold R: others have the values of a step.
_REGISTERS = 96

# Bytes of a slice of x.
_SLICE = 2 * ROWS * DEPTH

# Slots of the ring buffer for slices of x.
_FEWEST_STAGES, _MOST_STAGES = 4, 24

# Chunks that are in device memory at once, a power of two. Gates may be so many
# ahead of their recurrence, and outputs of the gates that are made of them. At
# least four: a recurrence reads gates of the chunk after the one that it is at,
# and these are stored while the next ones are multiplied.
CHUNKS_OF_GATES, CHUNKS_OF_OUTPUTS = 8, 16

# Slots of the ring buffer for gates.
_STAGES_OF_GATES = 4

# The most slices of the widest inputs: others were not measured.
_WIDEST = 16

# Units of the largest heads: larger ones, of cells with two products a step,
# were not measured.
_UNITS = 64

# The fewest rows of a batch, as a copy of a slice has eight, and the most: four
# levels of 64 units took 1.2 times as long with 64 rows as in parts.
_FEWEST_ROWS, _MOST_ROWS = 8, 32

# The most slices of x that a CTA multiplies for a step, by levels: more should
# take longer than the steps of all levels in turn. To store gates takes as long
# as two of them. Four stacks beyond took 1.0 to 1.25 times as long as in parts.
_SLICES, _SLICES_OF_A_STORE = 2, 2

# Shared memory of a CTA in bytes, less what mbarriers take.
_CTA_BYTES = 226 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static facts of the kernel.

  Attributes:
    dense: of the recurrences of all levels.
    inputs: I, features of the lowest level's inputs, a multiple of 8.
    together: recurrences of a CTA.
    stages: slots of the ring buffer for slices of x.
  """

  dense: plan_lib.Plan
  inputs: int
  together: int
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
    return _round(pl.cdiv(self.width, CONSUMERS * COLUMNS), MEMBERS)

  @property
  def makers(self) -> int:
    """CTAs that make gates, the first ones of the grid."""
    return self.levels * self.blocks

  @property
  def recurrences(self) -> int:
    """Recurrences of a level: some rows of a head each."""
    return self.dense.shape.ctas(self.dense.config) // self.levels

  @property
  def runners_of_level(self) -> int:
    """CTAs that run the recurrences of a level."""
    return pl.cdiv(self.recurrences, self.together)

  @property
  def runners(self) -> int:
    """CTAs that run recurrences, after the others."""
    return self.levels * self.runners_of_level

  @property
  def ctas(self) -> int:
    """CTAs of the grid; all are on the device at once."""
    return _round(self.makers + self.runners, MEMBERS)

  @property
  def turns(self) -> int:
    """Slices of W, as many as the widest inputs have."""
    return pl.cdiv(max(self.inputs, self.dense.shape.row), DEPTH)

  @property
  def in_registers(self) -> int:
    """Slices of W that registers hold."""
    return min(self.turns, _IN_REGISTERS)

  @property
  def in_smem(self) -> int:
    """Slices of W that shared memory holds."""
    return self.turns - self.in_registers

  @property
  def staged(self) -> int:
    """Slices of W that fit where slices of x will be."""
    return self.stages * ROWS // (CONSUMERS * COLUMNS)

  @functools.cached_property
  def smem(self) -> plan_lib.Smem:
    """Bytes of a recurrence's buffers in shared memory."""
    words = plan_lib.smem_words(self.dense, self.dense.config)
    return jax.tree.map(lambda n: _round(4 * n, 128), words)

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
  if not _FEWEST_ROWS <= shape.batch <= _MOST_ROWS:
    raise NotImplementedError(
        f'Levels run in one kernel with {_FEWEST_ROWS} to {_MOST_ROWS}'
        f' sequences, got {shape.batch}.'
    )
  if shape.batch * shape.time * shape.row >= 2**31:
    raise NotImplementedError(
        'Levels run in one kernel with fewer than 2^31 elements of outputs, got'
        f' [{shape.batch}, {shape.time}, {shape.row}].'
    )
  widest = max(inputs, shape.row)
  if widest > _WIDEST * DEPTH:
    raise NotImplementedError(
        f'Levels run in one kernel with up to {_WIDEST * DEPTH} inputs, got'
        f' {widest}.'
    )
  # Few CTAs make the gates of narrow levels, and would keep the recurrences of
  # many sequences waiting.
  plan = Plan(dense=dense, inputs=inputs, together=1, stages=_FEWEST_STAGES)
  slices = plan.parts * (plan.turns + _SLICES_OF_A_STORE)
  if slices > _SLICES * shape.levels * plan.chunks.steps:
    raise NotImplementedError(
        f'{shape.levels} levels with {shape.batch} sequences and {widest}'
        ' inputs should be faster part by part.'
    )
  for together in range(1, _TOGETHER + 1):
    # A recurrence that shares its multiprocessor has one warpgroup.
    config = dataclasses.replace(
        dense.config,
        stages=_STAGES_OF_GATES,
        warpgroups=dense.config.warpgroups if together == 1 else 1,
    )
    plan = Plan(
        dense=dataclasses.replace(dense, config=config),
        inputs=inputs,
        together=together,
        stages=_FEWEST_STAGES,
    )
    stages = _stages(plan)
    registers, _ = plan_lib.needs(plan.dense, config)
    if registers > _REGISTERS:
      continue
    if plan.ctas <= cores and stages >= _FEWEST_STAGES:
      return dataclasses.replace(plan, stages=stages)
  raise NotImplementedError(
      f'{shape.levels} levels of {plan.width} gates and {widest} inputs, with'
      f' {shape.batch} sequences, are more than {cores} multiprocessors hold at'
      ' once.'
  )


def _stages(plan: Plan) -> int:
  """Returns how many slices of x shared memory holds, 0 if it is too small.

  Recurrences have their buffers there.
  """
  # Words, and mbarriers that are words, take 1 KiB each.
  taken = 2048 + 2 * DEPTH * CONSUMERS * COLUMNS * max(plan.in_smem, 1)
  stages = min((_CTA_BYTES - taken) // _SLICE, _MOST_STAGES)
  # With as many slots as slices, each slice's slot would be a constant. The
  # compiler then keeps a descriptor of each, more than there are registers for:
  # 1.59 ms in place of .99, where inputs have 1,024 features.
  if stages == plan.turns:
    stages -= 1
  if plan.together * sum(jax.tree.leaves(plan.smem)) > stages * _SLICE:
    return 0
  return stages


def _round(number: int, multiple: int) -> int:
  return pl.cdiv(number, multiple) * multiple
