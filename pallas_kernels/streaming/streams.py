"""Arrays in device memory as kernels see them: streams of [B, T, F]."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

Array = jax.Array
Ref = Any

# Threads of a warpgroup, which is a thread to Mosaic GPU; features of a tile.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Layout:
  """The arrays that a kernel walks over.

  Attributes:
    batch: B.
    time: T.
    features: F.
    time_major: whether arrays are [T, B, F] instead of [B, T, F].
    margin: steps by which arrays are longer on either side. Interpret mode
      knows no copies that reach beyond an array; on a GPU it is 0.
  """

  batch: int
  time: int
  features: int
  time_major: bool = False
  margin: int = 0

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of a stream."""
    time = self.time + 2 * self.margin
    if self.time_major:
      return time, self.batch, self.features
    return self.batch, time, self.features

  def widen(self, x: Array) -> Array:
    """Adds the margins to a stream."""
    if not self.margin:
      return x
    pads = [(0, 0)] * x.ndim
    pads[0 if self.time_major else 1] = (self.margin, self.margin)
    return jnp.pad(x, pads)

  def narrow(self, x: Array) -> Array:
    """Removes the margins."""
    axis = 0 if self.time_major else 1
    end = x.shape[axis] - self.margin
    return lax.slice_in_dim(x, self.margin, end, axis=axis)

  @property
  def padded(self) -> int:
    """F rounded up to whole tiles, as small operands are padded."""
    return round_up(self.features, LANES)

  def is_contiguous(self, array: Any) -> bool:
    """Whether consecutive steps of a tile of features are contiguous."""
    axis = 0 if self.time_major else 1
    return math.prod(array.shape[axis + 1 :]) == LANES

  def block(self, ref: Ref, gate: int | None, batch, start, size, features):
    """Returns one block [size, features] of a stream in device memory."""
    lead = (batch, pl.ds(start + self.margin, size))
    if self.time_major:
      lead = lead[::-1]
    gate_index = () if gate is None else (gate,)
    return ref.at[(*lead, *gate_index, features)]


@dataclasses.dataclass(frozen=True)
class Stream:
  """One [B, T, F] stream: an array, or one gate of a [B, T, G, F] array.

  Attributes:
    array: position among the kernel's arrays.
    gate: index of the third axis, or None where there is none.
    dtype: as stored.
    shift: number of steps of time by which it is read later.
  """

  array: int
  gate: int | None
  dtype: Any
  shift: int = 0


def streams_of(arrays: Sequence[Any]) -> tuple[Stream, ...]:
  """Returns the streams in arrays [B, T, F] or [B, T, G, F], in order."""
  streams: list[Stream] = []
  for i, array in enumerate(arrays):
    gates = range(array.shape[2]) if array.ndim == 4 else (None,)
    streams += [Stream(i, gate, array.dtype) for gate in gates]
  return tuple(streams)


def zeros() -> Array:
  """Returns zeros in registers, in the layout of rows of a stream."""
  layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
  return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), layout)


def round_up(size: int, multiple: int) -> int:
  """Returns the next multiple that is at least `size`."""
  return pl.cdiv(size, multiple) * multiple


def pad_features(x: Array, size: int) -> Array:
  """Pads the last axis to `size`."""
  missing = size - x.shape[-1]
  if not missing:
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def pad_to_tiles(features: int, small: Any) -> Any:
  """Pads a tree of small operands, [..., F], to whole tiles of features."""
  padded = round_up(features, LANES)
  return jax.tree.map(lambda x: pad_features(x, padded), small)
