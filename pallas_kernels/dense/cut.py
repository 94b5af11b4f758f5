"""Static sizes: how a recurrence is cut into CTAs, and which arrays it streams.

`tuning.py` chooses a `Config`; everything here is known before a kernel is
traced. `threads.py` has the coordinates inside a kernel.
"""

import dataclasses
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.mosaic import ptx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How a dense recurrence is cut.

  Attributes:
    exchange: how CTAs hand an operand to each other: 'shared', 'cluster' or
      'device' (see the package docstring).
    columns: batch rows of a CTA, a multiple of 8, or 4. With 4, the 8 columns
      of a tensor core tile hold these 4 twice, and each thread keeps half as
      many elements.
    units: units of a CTA, a multiple of 8.
    warpgroups: warpgroups of a CTA.
    sums: number of parts into which the warps of a CTA cut the sums, a power of
      two; at least 2 with 'device'.
    cluster: CTAs of a cluster. With 'cluster' it holds a whole head. With
      'device' it is a team, whose CTAs share out the gates of an adjoint's sum:
      each multiplies some gates for the units of all. Each then reads less from
      device memory, at the price of a hand-off in the cluster.
    delay: cycles to wait before polling device memory; polling sooner slows the
      writers.
    stages: slots of the ring buffer of inputs, at least 4.
    registers: limit of the registers of a thread that hold the recurrent
      kernel, or None for no limit; shared memory holds the remainder.
    capability: compute capability of the device.
    together: pieces of 16 bytes that a thread polls at once, with 'device' and
      one head, where operands go from device memory straight to registers. 0
      where a CTA fetches them to its shared memory.
  """

  exchange: str
  columns: int
  units: int
  warpgroups: int
  sums: int = 1
  cluster: int = 1
  delay: int = 0
  stages: int = 6
  registers: int | None = None
  together: int = 0
  capability: tuple[int, int] = (9, 0)

  @property
  def through_device(self) -> bool:
    return self.exchange == 'device'

  @property
  def direct(self) -> bool:
    """Whether operands go from device memory straight to registers."""
    return self.together > 0

  @property
  def threads(self) -> int:
    return self.warpgroups * ptx.LANES

  @property
  def warps(self) -> int:
    return 4 * self.warpgroups

  @property
  def team(self) -> int:
    """CTAs that may share out the gates of a sum."""
    return self.cluster if self.through_device else 1

  @property
  def slots(self) -> int:
    """Steps whose operands are in shared memory at once.

    Within a cluster, a peer may send the next step's operand while this CTA
    multiplies the current one, so there are two slots. Two are enough: the peer
    needs this CTA's own share before it can send the step after. Over the
    device a CTA fetches an operand itself, after all its warps have multiplied.
    """
    return 1 if self.through_device else 2

  @property
  def tiles(self) -> int:
    """Tensor core tiles side by side that hold all columns."""
    return pl.cdiv(self.columns, 8)

  @property
  def twice(self) -> bool:
    """Whether a tile holds its 4 columns twice."""
    return self.columns == 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Sizes of a recurrence: features are heads times size.

  Arrays of all steps hold the features of one level after another.
  """

  batch: int
  time: int
  heads: int
  size: int
  time_major: bool
  levels: int = 1

  @property
  def features(self) -> int:
    return self.heads * self.size

  @property
  def row(self) -> int:
    """Features of a level."""
    return self.features // self.levels

  @property
  def blocks(self) -> int:
    """Blocks of 32 units in a head."""
    return pl.cdiv(self.size, 32)

  def parts(self, config: Config) -> int:
    """CTAs of a head: whole clusters, so the last ones may have no units."""
    parts = pl.cdiv(self.size, config.units)
    return pl.cdiv(parts, config.cluster) * config.cluster

  def slices(self, config: Config) -> int:
    """Slices of the batch, one CTA each."""
    return pl.cdiv(self.batch, config.columns)

  def ctas(self, config: Config) -> int:
    """CTAs of a kernel; with 'device' all have to be resident at once."""
    return self.heads * self.parts(config) * self.slices(config)

  def stream(self, stream: 'Stream') -> tuple[int, ...]:
    """Returns the shape of an array that holds all steps."""
    lead = (self.batch, self.time)
    lead = lead[::-1] if self.time_major else lead
    if stream.by_head:
      return (self.heads, *lead, stream.tiles, self.size)
    gates = () if stream.gates is None else (stream.gates,)
    return (*lead, *gates, self.features)


@dataclasses.dataclass(frozen=True)
class Stream:
  """An array over all steps: [B, T, F] or [B, T, G, F], or flags [T, G, B'].

  Attributes:
    dtype: dtype as stored; flags are int32.
    gates: G, or None for an array without that axis; for flags, the number of
      directions.
    flags: whether the array holds flags; B' is the batch rounded up to 4.
    by_head: whether the array is [N, B, T, G, D] instead.
  """

  dtype: Any
  gates: int | None = None
  flags: bool = False
  by_head: bool = False

  @property
  def tiles(self) -> int:
    """Tiles of one step."""
    return self.gates or 1


# Trees of the arrays that a kernel reads and writes in every step.
#
# A leaf is a `config.Stream`, the type of an array, a reference to it, or a
# thread's value of one step; the trees keep these in one order.


class Streams(NamedTuple):
  """The streams of a kernel, in two trees."""

  ins: Any
  outs: Any


class ForwardInputs(NamedTuple):
  """Streams that the forward kernel reads, or their references."""

  x: Any
  flags: Any


class ForwardOutputs(NamedTuple):
  """Streams that the forward kernel writes, their references or values.

  Attributes:
    carries: the first arrays of the carry after each step.
    starts: the carry that each step starts from; h first, [N, B, T, 1, D].
    operand: the factor of the second product, [N, B, T, 1, D], or None.
  """

  carries: tuple[Any, ...]
  starts: tuple[Any, ...]
  operand: Any


class AdjointInputs(NamedTuple):
  """Streams that the adjoint reads, or their references."""

  x: Any
  h_gates: tuple[Any, ...]
  starts: tuple[Any, ...]
  d_carries: tuple[Any, ...]
  flags: Any


class AdjointOutputs(NamedTuple):
  """Streams that the adjoint writes, or their references.

  Attributes:
    d_x: cotangents of the inputs.
    d_gates: cotangents of the recurrent gates, one stream for each product;
      empty where they equal `d_x`.
  """

  d_x: Any
  d_gates: tuple[Any, ...]
