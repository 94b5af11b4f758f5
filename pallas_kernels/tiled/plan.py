"""Static facts of one kernel, and where its arrays' elements lie."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import step
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import limits

Array = jax.Array
Ref = Any
DEPTH = limits.DEPTH


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A part that is on its way.

  Attributes:
    words: words that `fragments.load` returned.
    dtype: the elements' dtype.
  """

  words: Sequence[Array]
  dtype: Any

  def value(self) -> Array:
    """Returns the part, float32, when it is there."""
    return ptx.stack(fragments.decode(self.words, self.dtype))

  def halves(self) -> list[Array]:
    """Returns its first four units and its last four."""
    if jnp.dtype(self.dtype).itemsize == 2:
      words = self.words[:2], self.words[2:]
      return [ptx.stack(fragments.decode(w, self.dtype)) for w in words]
    values = fragments.decode(self.words, self.dtype)
    return [ptx.stack(values[:4]), ptx.stack(values[4:])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(step.Step):
  """Static (hashable) facts of one kernel, whose factors have 16 bits.

  A step has one product. `config` is one of `cut` or, in subclasses, of
  `on_chip`.

  Attributes:
    batch: B.
    time: T.
    heads: N.
    size: D.
    depth: I, if the forward kernel multiplies W x, or 0.
  """

  batch: int
  time: int
  heads: int
  size: int
  depth: int = 0

  @property
  def features(self) -> int:
    """F."""
    return self.heads * self.size

  @property
  def tiles(self) -> Any:
    """All tiles of a step."""
    return cut.Tiles(
        config=self.config, batch=self.batch, heads=self.heads, size=self.size
    )

  @property
  def columns(self) -> int:
    """Columns of a product."""
    return self.config.units * (1 if self.adjoint else self.recurrent)

  @property
  def early(self) -> int:
    """Slices of a product that depend on no other step, the first ones."""
    return self.depth // DEPTH

  @property
  def turns(self) -> int:
    """Slices of a product, as far as a CTA has it."""
    slices = self.size // DEPTH * (self.recurrent if self.adjoint else 1)
    return self.early + slices // self.config.members

  @property
  def part(self) -> int:
    """Units of a part."""
    return fragments.UNITS

  @property
  def parts(self) -> list[tuple[int, int]]:
    """Group and row of each part of a tile that a thread has."""
    return list(itertools.product(range(self.config.groups), range(2)))

  def with_gates(
      self, h_gates: Sequence[Array]
  ) -> Iterator[tuple[tuple[int, int], tuple[Array, ...]]]:
    """Yields each part's index and its values, one a gate."""
    count = len(self.parts)
    for i, index in enumerate(self.parts):
      yield index, tuple(h_gates[i::count])

  def in_order(
      self, first: Any, load: Callable[[int], Any], count: int
  ) -> Iterator[tuple[int, Any]]:
    """Yields the number of each part and the arrays read for it.

    Args:
      first: the arrays of the first one.
      load: starts to read for a part.
      count: number of parts.
    """
    following = first
    for i in range(count):
      loaded = following
      if self.config.ahead and i + 1 < count:
        following = load(i + 1)
      yield i, loaded
      if not self.config.ahead and i + 1 < count:
        following = load(i + 1)

  def time_of(self, step):
    """Returns the time of a step of the kernel's loop."""
    return self.time - 1 - step if self.reverse else step

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', N, D, D], as the matrix of the products.

    Forward [N D, columns of all tiles]: the gates of a tile side by side. For
    the adjoint, R transposed, [N G' D, D].
    """
    gates, heads, size, _ = kernel.shape
    kernel = kernel.astype(self.dtype)
    if self.adjoint:
      # [head, gate, to, from]
      kernel = jnp.transpose(kernel, (1, 0, 3, 2))
      return fragments.permute(kernel).reshape(heads * gates * size, size)
    tiles = (heads, size, -1, self.config.units)
    # A transpose of 32 units of 16 bits takes XLA twelve times as long.
    kernel = jnp.stack([fragments.permute(k).reshape(tiles) for k in kernel], 3)
    return kernel.reshape(heads * size, -1)

  def arrange_both(self, kernel: Array, recurrent_kernel: Array) -> Array:
    """Orders W, [G, I, F], and R, of one head, as one matrix of the products.

    [I + D, columns of all tiles]: the recurrent gates of a tile side by side,
    and above each the input gate of `projected`.
    """
    kernel = jnp.stack([kernel[i] for i in self.projected])[:, None]
    joint = jnp.concatenate(
        [kernel.astype(self.dtype), recurrent_kernel.astype(self.dtype)], axis=2
    )
    return self.arrange(joint)

  def slice_of(self, matrix: Ref) -> Callable[..., Ref]:
    """Returns (tile, k) -> a slice of the matrix of `arrange`."""
    depth = self.turns * self.config.members * DEPTH

    def slice_of(tile, k):
      rows = pl.ds(tile.head * depth + k * DEPTH, DEPTH)
      return matrix.at[rows, pl.ds(tile.block * self.columns, self.columns)]

    return slice_of

  def slice_of_step(self, ref: Ref, step, rows, columns) -> Ref:
    """Returns rows and columns of one step of an array of all steps."""
    time = self.time_of(step)
    if self.call.time_major:
      return ref.at[time, rows, columns]
    return ref.at[rows, time, columns]

  @property
  def kept_dtype(self) -> Any:
    """The dtype of gates that the forward pass keeps.

    If h has the digits of float16, sums rounded to it would make derivatives
    nearly twice as inexact.
    """
    wide = self.dtype == jnp.float16
    return jnp.dtype(jnp.float32 if wide else jnp.float16)

  @property
  def takes(self) -> bool:
    """Whether the forward kernel multiplies inputs that are in no sum."""
    return self.depth > 0 and bool(self.alone)

  @property
  def projected(self) -> tuple[int, ...]:
    """For each recurrent gate, the input gate that has its columns before it.

    Only where as many input gates as recurrent gates are in no sum.
    """
    inputs = dict(zip(self.apart, self.alone, strict=True))
    return tuple(inputs[j] if i is None else i for j, i in enumerate(self.sums))

  def shape_of_steps(self, gates: int = 1) -> tuple[int, int, int]:
    """Returns the shape of an array of all steps."""
    lead = (self.batch, self.time)
    if self.call.time_major:
      lead = lead[::-1]
    return (*lead, gates * self.features)

  def steps_type(self, dtype, gates: int = 1) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of all steps."""
    return jax.ShapeDtypeStruct(self.shape_of_steps(gates), dtype)

  def _at(self, place: fragments.Place, time, gates: int, gate: int) -> Array:
    if self.call.time_major:
      row = time * self.batch + place.row
    else:
      row = place.row * self.time + time
    return (row * gates + gate) * self.features + place.feature

  def load_steps(self, ref, place, time, gates: int, dtype):
    """Starts to read a part of each gate of one time."""
    return tuple(
        Loaded(
            fragments.load(
                ref,
                self._at(place, time, gates, gate),
                dtype,
                units=self.part,
            ),
            dtype,
        )
        for gate in range(gates)
    )

  def write_steps(self, ref, place, time, values, dtype) -> None:
    """Stores a part of each gate of one time."""
    for gate, value in enumerate(values):
      at = self._at(place, time, len(values), gate)
      fragments.write(ref, at, value, dtype, place.valid)

  def write_kept(self, ref, place, time, gates) -> None:
    """Stores a part of each gate of one time, kept for the adjoint."""
    if self.kept_dtype == jnp.float32:
      self.write_steps(ref, place, time, gates, jnp.float32)
    else:
      self.write_words(ref, place, time, gates)

  def write_words(self, ref, place, time, gates) -> None:
    """Stores a part of each gate of one time, from `fragments.pack`."""
    for gate, words in enumerate(gates):
      at = self._at(place, time, len(gates), gate)
      memory.store_words_gmem(ref, at, words, 2, place.valid)

  def prefetch(self, streams, tile, warpgroup, time) -> None:
    """Brings a warpgroup's rows of a time to the L2 cache.

    The four threads that share a row take its lines in turn.

    Args:
      streams: arrays of all steps, each with its number of gates and the bytes
        of an element.
      tile: the tile.
      warpgroup: number of this warpgroup.
      time: the rows' time.
    """
    lines = [
        (ref, gates, gate, size, first)
        for ref, gates, size in streams
        for gate in range(gates)
        for first in range(0, self.config.units, 128 // size)
    ]
    quarter = ptx.thread() & 3
    for half in range(2):
      place = fragments.Place.of(self.tiles, tile, warpgroup, 0, half)
      start = dataclasses.replace(place, feature=place.feature - quarter * 8)
      for i, (ref, gates, gate, size, first) in enumerate(lines):
        at = self._at(start, time, gates, gate) + first
        fragments.prefetch(ref, at, size, (quarter == i % 4).astype(jnp.int32))

  def prefetch_part(self, streams, place: fragments.Place, time) -> None:
    """Brings a part of a time to the L2 cache, by one of each four threads.

    Args:
      streams: arrays of all steps, each with its number of gates and the bytes
        of an element.
      place: the part's place.
      time: the rows' time.
    """
    lane = ptx.thread() & 3
    for ref, gates, size in streams:
      for gate in range(gates):
        at = self._at(place, time, gates, gate)
        # The four threads have two sectors of float32.
        where = lane == 0 if size == 2 else (lane & 1) == 0
        fragments.prefetch(ref, at, size, where.astype(jnp.int32))

  def _row(self, place: fragments.Place, i: int) -> Array:
    return (i * self.batch + place.row) * self.features + place.feature

  def load_row(self, ref, place, i: int, where=None):
    """Starts to read a part of one array of float32 [count, B, F]."""
    at = self._row(place, i)
    words = fragments.load(ref, at, jnp.float32, where, self.part)
    return Loaded(words, jnp.float32)

  def read_rows(self, ref, place, count: int):
    """Returns a part of each array of float32 [count, B, F]."""
    loaded = [self.load_row(ref, place, i) for i in range(count)]
    return tuple(x.value() for x in loaded)

  def write_rows(self, ref, place, values, needed=None) -> None:
    """Stores a part of each array of float32 [count, B, F]."""
    for i, value in enumerate(values):
      if needed is None or needed[i]:
        at = self._row(place, i)
        fragments.write(ref, at, value, jnp.float32, place.valid)

  def read_theta(self, ref, place):
    """Returns a part of each row of theta."""
    return tuple(
        fragments.read(
            ref, i * self.features + place.feature, jnp.float32, self.part
        )
        for i in range(self.params)
    )

  def read_flag(
      self, ref, place, time, bit: int, units: int | None = None
  ) -> Array:
    """Returns where a flag of a time is set, bool [units * 128].

    Args:
      ref: flags, [T, B].
      place: the part's place.
      time: the rows' time.
      bit: the flag's bit.
      units: number of units, None for all of a part.
    """
    at = time * self.batch + place.row
    flags = memory.load_gmem(ref, at, jnp.int32)
    return (ptx.stack([flags] * (units or self.part)) & bit) != 0


# Gates that the forward pass keeps for the adjoint.
#
# It keeps the sum of a gate x + R h, else R h and the input alone. The
# functions here compute these arrays for gates that were not kept, and for a
# device of so few rows that kernels of the family 'dense' run them.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Inputs:
  """The type of inputs of which the backward pass has no array.

  Attributes:
    gates: G.
    dtype: the inputs' dtype.
  """

  gates: int
  dtype: Any

  def beside(self, h: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of the inputs that belong to h, [B, T, F]."""
    batch, time, features = h.shape
    shape = batch, time, self.gates, features
    return jax.ShapeDtypeStruct(shape, self.dtype)


def alone(plan: Plan, x: Array) -> Array | None:
  """Returns the inputs that are in no sum, [B, T, K, F], or None."""
  if len(plan.alone) == plan.gates:
    return x
  if not plan.alone:
    return None
  return jnp.stack([x[:, :, i] for i in plan.alone], axis=2)


def _h_gates(plan: Plan, h: Array, recurrent_kernel: Array) -> Array:
  """Returns R h of all steps, float32 [B, T, G', F]."""
  lead = h.shape[:2]
  product = jnp.einsum(
      'abnd,gndk->abgnk',
      h.reshape(*lead, plan.heads, plan.size),
      recurrent_kernel.astype(plan.dtype),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(*lead, plan.recurrent, -1)


def kept(plan: Plan, h: Array, x: Array, recurrent_kernel: Array) -> Array:
  """Returns the gates as the forward kernel keeps them.

  Args:
    plan: the plan of either pass.
    h: h that every step starts from, [B, T, F].
    x: inputs, [B, T, G, F].
    recurrent_kernel: R, [G', N, D, D].

  Returns:
    [B, T, G' F] in `Plan.kept_dtype`.
  """
  product = _h_gates(plan, h, recurrent_kernel)
  split = lambda a: [a[:, :, i] for i in range(a.shape[2])]
  gates = jnp.concatenate(plan.kept(split(x), split(product)), axis=-1)
  most = float(jnp.finfo(plan.kept_dtype).max)
  return jnp.clip(gates, -most, most).astype(plan.kept_dtype)


def inputs(
    plan: Plan,
    h: Array,
    gates: Array,
    alone: Array | None,
    recurrent_kernel: Array,
    dtype: Any,
) -> Array:
  """Returns the inputs of all steps, which the sums have in them.

  Args:
    plan: the plan of either pass.
    h: h that every step starts from, [B, T, F].
    gates: gates from `kept`.
    alone: inputs from `alone`.
    recurrent_kernel: R.
    dtype: the inputs' dtype.

  Returns:
    [B, T, G, F].
  """
  if alone is not None and len(plan.alone) == plan.gates:
    return alone
  sums = gates.reshape(*h.shape[:2], plan.recurrent, -1)
  sums = sums - _h_gates(plan, h, recurrent_kernel)
  split = lambda a: [a[:, :, i].astype(dtype) for i in range(a.shape[2])]
  own = [] if alone is None else split(alone)
  return jnp.stack(plan.input_gates(own, split(sums)), axis=2)
