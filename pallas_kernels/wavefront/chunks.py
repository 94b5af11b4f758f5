"""Chunks of time, and how CTAs tell each other which of them are done.

A chunk is a few steps, by their time: the last one of a sequence may have
fewer, and a loop in reverse begins with it. A level's gates of a chunk are
there when all CTAs that make a part of them have said so, and its outputs when
all have stored theirs. Each of the two has a counter for each level and chunk,
in device memory, that only grows.

Threads that multiply or run a recurrence neither poll nor fence. Warps of
another warpgroup do both for them, and words in shared memory stand for what
these have seen, or have to tell:

    gates      products    ==word, products==>  warp  ==release==>  counter
               counter     ==acquire==>  warp  ==word, chunks==>  recurrence
    outputs    recurrence  ==word, steps==>  warp  ==release==>  counter
               counter     ==acquire==>  warp  ==word, chunks==>  copies
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any

# Puts the address of counter %index into register a.
_ADDRESS = memory.gmem_address(4).replace('%offset', '%index')

# Puts the address of word %word into register a.
_WORD = '.reg .u32 a; mad.lo.u32 a, %word, 4, %base;'


@dataclasses.dataclass(frozen=True)
class Chunks:
  """The chunks of a sequence, numbered in the order of the loop.

  Attributes:
    time: number of steps.
    reverse: whether the loop runs from the last step to the first.
    steps: of a chunk, a power of two.
  """

  time: int
  reverse: bool
  steps: int

  @property
  def count(self) -> int:
    return pl.cdiv(self.time, self.steps)

  def start(self, chunk):
    """Returns the first time of a chunk."""
    return self.steps * (self.count - 1 - chunk if self.reverse else chunk)

  def end(self, chunk):
    """Returns the number of steps of the loop until a chunk is done."""
    if self.reverse:
      return self.time - self.start(chunk)
    return jnp.minimum(self.start(chunk) + self.steps, self.time)

  def of_step(self, step) -> tuple[Any, Any]:
    """Returns the chunk of a step of the loop, and whether it begins there."""
    last, bits = self.steps - 1, self.steps.bit_length() - 1
    if not self.reverse:
      return step >> bits, (step & last) == 0
    time = self.time - 1 - step
    first = ((time & last) == last) | (step == 0)
    return self.count - 1 - (time >> bits), first


class Counters(mailbox.Mailbox):
  """Counters in device memory, one for each kind, level and chunk.

  Args:
    ref: int32 in device memory.
    levels: number of them.
    chunks: those of a sequence.
    cta: number of this CTA, which clears a part of them.
    ctas: number of all.
  """

  def __init__(self, ref: Ref, levels: int, chunks: Chunks, cta, ctas: int):
    self.ref, self._levels, self._chunks = ref, levels, chunks
    self._cta, self._ctas = cta, ctas

  @classmethod
  def type(cls, levels: int, chunks: Chunks) -> jax.ShapeDtypeStruct:
    """Returns the type of the array."""
    return jax.ShapeDtypeStruct((2 * levels * chunks.count,), jnp.int32)

  def clear(self) -> None:
    size = 2 * self._levels * self._chunks.count
    stride = self._ctas * ptx.LANES
    zero = ptx.full(1, 0, jnp.int32)
    first = ptx.thread() + self._cta * ptx.LANES

    def clear_next(i, at):
      del i
      exists = (at < size).astype(jnp.int32)
      memory.store_gmem(self.ref, at * exists, zero, jnp.int32, exists)
      return at + stride

    lax.fori_loop(0, pl.cdiv(size, stride), clear_next, first)

  def gates(self, level, chunk):
    """Returns the index of the counter of a level's gates."""
    return level * self._chunks.count + chunk

  def outputs(self, level, chunk):
    """Returns the index of the counter of a level's outputs."""
    return (self._levels + level) * self._chunks.count + chunk

  def add(self, index) -> None:
    """Adds one, after all stores that a warp knows of; the warp calls it."""
    code = (
        '{ .reg .u32 t; .reg .pred p; mov.u32 t, %tid.x; and.b32 t, t, 31;'
        f' setp.eq.u32 p, t, 0; {_ADDRESS} fence.acq_rel.gpu;'
        ' @p red.relaxed.gpu.global.add.u32 [a], 1; }'
    )
    ptx.emit(code, {}, {'index': index, 'base': self.ref})

  def wait(self, index, count) -> None:
    """Waits until a counter has reached a number; a warp calls it.

    If the counter does not reach the number, the kernel is aborted.

    Args:
      index: of the counter.
      count: the number.
    """
    code = (
        f'{{ .reg .u32 v, k; .reg .pred p; {_ADDRESS} mov.b32 k, 0;'
        ' again_%%: ld.acquire.gpu.global.u32 v, [a];'
        ' setp.ge.s32 p, v, %count; @p bra done_%%; add.u32 k, k, 1;'
        f' setp.lt.u32 p, k, {sync.PATIENCE}; @p bra again_%%; trap;'
        ' done_%%: }'
    )
    ptx.emit(code, {}, {'index': index, 'base': self.ref, 'count': count})


class Words:
  """Numbers in shared memory.

  Args:
    ref: int32 in shared memory, `COUNT` of them.
  """

  # Chunks whose inputs are there, of products or of recurrences; and what is
  # stored: products of each warpgroup that multiplies, and outputs of each
  # recurrence, by their steps.
  CHUNKS, PRODUCTS, STEPS = 0, 8, 16
  COUNT = 32

  # Looks at a word before the kernel is aborted.
  _PATIENCE = 1 << 28

  def __init__(self, ref: Ref):
    self.ref = ref

  def clear(self) -> None:
    """Makes all zero; before a barrier of the CTA."""
    lane = ptx.thread() & (self.COUNT - 1)
    memory.store_smem(self.ref, 4 * lane, ptx.full(1, 0, jnp.int32), jnp.int32)

  def put(self, word, value) -> None:
    """Stores a number, after all stores that a warp knows of."""
    code = f'{{ {_WORD} st.release.cta.shared.u32 [a], %value; }}'
    operands = {'base': self.ref, 'word': word, 'value': value}
    ptx.emit(code, {}, operands)

  def put_by(self, where, word, value) -> None:
    """As `put`, by the threads whose int32 [128] is not 0."""
    code = (
        f'{{ {_WORD} .reg .pred p; setp.ne.s32 p, %where, 0;'
        ' @p st.release.cta.shared.u32 [a], %value; }'
    )
    operands = {
        'base': self.ref,
        'word': word,
        'value': value,
        'where': where,
    }
    ptx.emit(code, {}, operands)

  def wait(self, word, value, nap: int = 0) -> None:
    """Waits until a number is as large.

    Args:
      word: which one.
      value: the number.
      nap: nanoseconds between two looks, which leave cycles to others.
    """
    sleep = f' nanosleep.u32 {nap};' if nap else ''
    code = (
        f'{{ {_WORD} .reg .u32 v, k; .reg .pred p; mov.b32 k, 0;'
        ' again_%%: ld.acquire.cta.shared.u32 v, [a];'
        f' setp.ge.s32 p, v, %value; @p bra done_%%; add.u32 k, k, 1;{sleep}'
        f' setp.lt.u32 p, k, {self._PATIENCE}; @p bra again_%%; trap;'
        ' done_%%: }'
    )
    ptx.emit(code, {}, {'base': self.ref, 'word': word, 'value': value})
