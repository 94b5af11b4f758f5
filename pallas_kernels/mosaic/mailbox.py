"""Mailboxes: how CTAs hand data to each other through device memory.

A mailbox is an array in device memory. The data is its own signal: an empty
place holds the sentinel, and a reader polls until the sentinel has gone. That
takes no flag, no fence and one trip through the L2 cache. A ring has a few
slots that steps use in turn, so that they stay in the cache:

    writer                                  reader
    clear       all slots := sentinel       clear
    open        ------- all CTAs have cleared -------
    publish     slot of step s := data
                                            poll    data of step s
    retire      slot of step s := sentinel
    settle      fence, every few steps
    publish     slot of step s + slots := data

A writer retires a slot when all readers have read it. No reader says so: a CTA
publishes some later step only after it has read step s, so the writer retires
the slot of step s once it has polled that later step. The fence comes in time
for the sentinel to be seen before the slot is polled again.

CTAs that poll each other must all be on the device at once, or CTAs that wait
keep the rest from starting. `tuning` cuts the work accordingly and
`one_at_a_time` keeps `jax.vmap` from adding CTAs.

Warpgroups of a CTA, and CTAs of a cluster, need no sentinel: barriers and
mbarriers in shared memory say that data is there (`sync`).
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, ClassVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any

# A NaN bit pattern that no computation produces, in 16 and in 32 bits. Data
# that holds it nevertheless is published as another NaN.
SENTINEL = '0xFFFFFFFF'
_LARGEST_DATA = '0xFFFFFFFE'


class Mailbox(abc.ABC):
  """Places in device memory, each written once; `open_all` comes first."""

  @abc.abstractmethod
  def clear(self) -> None:
    """Fills all places of this CTA with the sentinel."""


class MailboxRing(Mailbox):
  """Slots that steps use in turn: step s has slot s modulo `slots`.

  Attributes:
    slots: number of slots, a power of two.
    steps_between_fences: a power of two.
  """

  slots: ClassVar[int]
  steps_between_fences: ClassVar[int]

  def slot(self, step):
    """Returns the index of a step's slot."""
    return step & (self.slots - 1)

  def settle(self, step) -> None:
    """Fences in some steps, so that retired slots read as empty in time."""
    due = (step & (self.steps_between_fences - 1)) == 0
    pl.when(self._fences(due))(sync.fence)

  def _fences(self, due):
    """Returns whether this thread fences, where a fence is due."""
    return due


def open_all(mailboxes: Sequence[Mailbox], ctas: int, warpgroups: int) -> None:
  """Clears mailboxes, and waits until all CTAs have cleared theirs.

  Args:
    mailboxes: this CTA's mailboxes.
    ctas: number of CTAs that call this.
    warpgroups: number of warpgroups of each CTA.
  """
  for mailbox in mailboxes:
    mailbox.clear()
  sync.fence()
  sync.barrier(warpgroups)
  semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)
  plgpu.semaphore_signal(semaphore, 1, memory_scope='gpu')
  _await_count(semaphore, ctas * warpgroups)


def _await_count(semaphore: Ref, count: int) -> None:
  """Waits until a semaphore in device memory has been signalled `count` times.

  Other kernels may hold multiprocessors for a while, for instance to wait for
  another host. After minutes the kernel is aborted with an error.
  """
  code = (
      '{ .reg .u32 v, k; .reg .pred p; mov.b32 k, 0;'
      ' again_%%: ld.acquire.gpu.global.u32 v, [%semaphore];'
      ' setp.ge.u32 p, v, %count; @p bra done_%%; add.u32 k, k, 1;'
      f' nanosleep.u32 500; setp.lt.u32 p, k, {1 << 28}; @p bra again_%%; trap;'
      ' done_%%: }'
  )
  ptx.emit(code, {}, {'semaphore': semaphore, 'count': count})


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a kernel that `jax.vmap` runs once for each element.

  By Pallas's own rule the grid would gain an axis. Its CTAs would share one
  semaphore, and more CTAs would wait for each other than fit on the device.
  """
  return jax.custom_batching.sequential_vmap(kernel)


def sentinel() -> Array:
  """Returns the sentinel as a word, int32 [128]."""
  code = f'mov.b32 %word, {SENTINEL};'
  return ptx.emit(code, {'word': jnp.int32}, {}, pure=True)[0]


def without_sentinel(x: Array) -> Array:
  """Returns float32 [128] as words, of which none is the sentinel."""
  code = f'{{ .reg .b32 w; mov.b32 w, %x; min.u32 %word, w, {_LARGEST_DATA}; }}'
  return ptx.emit(code, {'word': jnp.int32}, {'x': x}, pure=True)[0]


def publish(
    ref: Ref, offset: Array, value: Array, dtype, where: Array | None = None
) -> None:
  """Stores elements that other CTAs poll.

  Args:
    ref: an array in device memory.
    offset: the place in elements.
    value: float32; in 16 bits it must not become the sentinel.
    dtype: the elements' dtype, floating.
    where: int32, not 0 in threads that publish; None for all threads.
  """
  if jnp.dtype(dtype) != jnp.float32:
    memory.store_relaxed(ref, offset, value, dtype, where)
    return
  operands = {'base': ref, 'offset': offset, 'value': value}
  code, guard = memory.predicate(where, operands)
  code += f' .reg .b32 w; mov.b32 w, %value; min.u32 w, w, {_LARGEST_DATA};'
  code += f' {guard}st.relaxed.gpu.global.b32 [a], w;'
  code = '{' + memory.gmem_address(4) + code + '}'
  ptx.emit(code, {}, operands, count=ptx.per_thread(value))


def publish_pair(ref: Ref, offset: Array, words: Sequence[Array]) -> None:
  """Stores two words that other CTAs poll; the offset is in words."""
  low, high = words
  code = memory.gmem_address(4)
  code += ' st.relaxed.gpu.global.v2.b32 [a], {%low, %high};'
  operands = {'base': ref, 'offset': offset, 'low': low, 'high': high}
  ptx.emit('{' + code + '}', {}, operands)


def fill(ref: Ref, offset, size: int, where) -> None:
  """Fills 16 bytes of device memory with the sentinel.

  Args:
    ref: an array in device memory.
    offset: the place in elements.
    size: bytes of an element.
    where: int32, not 0 in threads that fill.
  """
  code = memory.gmem_address(size) + (
      f' .reg .b32 w; .reg .pred p; mov.b32 w, {SENTINEL};'
      ' setp.ne.s32 p, %where, 0;'
      ' @p st.global.v4.b32 [a], {w, w, w, w};'
  )
  operands = {'base': ref, 'offset': offset, 'where': where}
  ptx.emit('{' + code + '}', {}, operands)


def peek(places: Sequence[Sequence[Any]]) -> list[Array]:
  """Reads 16 bytes at each place, published or not, for `poll`.

  Args:
    places: each a reference to device memory and an offset in words.

  Returns:
    Four int32 [128] for each place.
  """
  code = memory.gmem_address(4)
  code += ' ld.relaxed.gpu.global.v4.b32 {%w0, %w1, %w2, %w3}, [a];'
  results = {f'w{i}': jnp.int32 for i in range(4)}
  words: list[Array] = []
  for ref, offset in places:
    operands = {'base': ref, 'offset': offset}
    words += ptx.emit('{' + code + '}', results, operands)
  return words


def poll(
    places: Sequence[Sequence[Any]],
    size: int,
    seen: Sequence[Array] | None = None,
    in_pairs: bool = True,
) -> list[Array]:
  """Reads 16 bytes at each place as soon as they have been published.

  If no data comes, the kernel is aborted with an error.

  Args:
    places: each a reference to device memory and an offset in elements,
      followed by any number of (int32 condition, reference, offset) that are
      read instead where the condition is not 0; the last one wins.
    size: bytes of an element, 2 or 4.
    seen: results of `peek` for these places, from this step of the loop, or
      None. If they hold data, nothing is read again.
    in_pairs: whether the device compares pairs of 16 bits, as 9.0 does.

  Returns:
    Four int32 [128] for each place.
  """
  n = len(places)
  results = {f'w{i}': jnp.int32 for i in range(4 * n)}
  words = [f'%{name}' for name in results]
  operands: dict[str, Any] = {}

  def operand(name, x):
    name = f'{name}{len(operands)}'
    operands[name] = x
    return f'%{name}'

  code = ' .reg .pred p; .reg .b32 m, k, x; .reg .u64 o;'
  code += f' .reg .u64 a<{n}>; mov.b32 k, 0;'
  for i, (ref, offset, *others) in enumerate(places):
    for condition, ref_, offset_ in ((None, ref, offset), *others):
      code += f' cvt.s64.s32 o, {operand("offset", offset_)};'
      code += f' shl.b64 o, o, {size.bit_length() - 1};'
      code += f' add.u64 o, o, {operand("base", ref_)};'
      if condition is None:
        code += f' mov.u64 a{i}, o;'
      else:
        code += f' setp.ne.s32 p, {operand("condition", condition)}, 0;'
        code += f' selp.b64 a{i}, o, a{i}, p;'
  if seen is not None:
    for word, x in zip(words, seen, strict=True):
      code += f' mov.b32 {word}, {operand("seen", x)};'
    code += ' bra.uni check_%%;'
  code += ' again_%%:'
  for i in range(n):
    four = ', '.join(words[4 * i : 4 * i + 4])
    code += f' ld.relaxed.gpu.global.v4.b32 {{{four}}}, [a{i}];'
  code += ' check_%%:' + any_sentinel(words, size, in_pairs)
  # All threads of a warp together, as tensor cores want them.
  code += ' vote.sync.any.pred p, p, 0xFFFFFFFF;'
  code += ' add.u32 k, k, 1;'
  code += ' @!p bra done_%%;'
  code += f' setp.lt.u32 p, k, {sync.PATIENCE};'
  code += ' @p bra again_%%;'
  code += ' trap;'
  code += ' done_%%:'
  return list(ptx.emit('{' + code + '}', results, operands))


def any_sentinel(words: Sequence[str], size: int, in_pairs: bool = True) -> str:
  """Returns code that sets p where an element of the words is the sentinel.

  Args:
    words: names of operands.
    size: bytes of an element, 2 or 4.
    in_pairs: as in `poll`.
  """
  # The sentinel is the largest unsigned number.
  if size == 2 and not in_pairs:
    code = '{ .reg .pred q; .reg .b16 low, high; setp.ne.b32 p, k, k;'
    for word in words:
      code += f' mov.b32 {{low, high}}, {word};'
      code += ''.join(
          f' setp.eq.u16 q, {half}, 0xFFFF; or.pred p, p, q;'
          for half in ('low', 'high')
      )
    return code + ' }'
  kind = 'u32' if size == 4 else 'u16x2'
  code = f' mov.b32 m, {words[0]};'
  code += ''.join(f' max.{kind} m, m, {word};' for word in words[1:])
  if size == 4:
    return code + f' setp.eq.u32 p, m, {SENTINEL};'
  # Whether one of the halves of ~m is zero.
  code += ' not.b32 m, m; sub.u32 x, m, 0x00010001;'
  return code + ' lop3.b32 x, x, m, 0x80008000, 0x20; setp.ne.u32 p, x, 0;'


# Reads mailboxes at places that lie at fixed distances from each other.
#
# A thread needs one address for all places of a line, which leaves registers to
# the data. `look` begins to read; `await_pieces` reads the missing data
# again. Elements have 16 bits.


@dataclasses.dataclass(frozen=True)
class Line:
  """Places at fixed distances from each other, of one thread.

  Attributes:
    ref: an array in device memory.
    offset: the place at distance 0, in elements, int32 [128].
    instead: (int32 condition, reference, offset) to read at those distances
      where the condition is not 0, after these have been published; or None.
  """

  ref: Ref
  offset: Array
  instead: Any = None


@dataclasses.dataclass(frozen=True)
class Piece:
  """16 bytes of a line that a thread polls.

  Attributes:
    line: index of the line.
    distance: the distance in bytes.
    exists: int32 [128] and the bit of it that is set in threads for which the
      piece exists, others get zeros; None where it exists for all.
  """

  line: int
  distance: int
  exists: tuple[Array, int] | None = None


class _Lines:
  """Code that reads pieces of lines, in 16 bits an element."""

  def __init__(self, lines: Sequence[Line], pieces: Sequence[Piece]):
    self.lines, self.pieces = lines, pieces
    self.operands: dict[str, Any] = {}
    self.results = {f'w{i}': jnp.int32 for i in range(4 * len(pieces))}
    self.words = [f'%{name}' for name in self.results]
    self.code = f' .reg .u64 o, a<{len(lines)}>; .reg .pred p, q;'
    self.code += ' .reg .b32 m, k, x; mov.b32 k, 0;'
    for i, line in enumerate(lines):
      self._address('a', i, line.ref, line.offset)

  def operand(self, x) -> str:
    name = f'x{len(self.operands)}'
    self.operands[name] = x
    return f'%{name}'

  def four(self, i: int) -> list[str]:
    return self.words[4 * i : 4 * i + 4]

  def read(self, i: int, guard: str = '') -> None:
    piece = self.pieces[i]
    place = f'[a{piece.line}+{piece.distance}]'
    self.code += f' {guard}ld.relaxed.gpu.global.v4.b32'
    self.code += f' {{{", ".join(self.four(i))}}}, {place};'

  def set_exists(self, i: int) -> bool:
    """Sets q where a piece exists; returns whether it may be missing."""
    exists = self.pieces[i].exists
    if exists is None:
      return False
    mask, bit = exists
    self.code += f' and.b32 x, {self.operand(mask)}, {hex(1 << bit)};'
    self.code += ' setp.ne.u32 q, x, 0;'
    return True

  def replace(self) -> None:
    """Reads the places instead, where any thread of the warp has to."""
    used = sorted({piece.line for piece in self.pieces})
    used = [i for i in used if self.lines[i].instead is not None]
    if not used:
      return
    n = len(self.lines)
    self.code += f' .reg .u64 b<{n}>; .reg .pred r<{n}>;'
    self.code += ' setp.ne.u32 p, 0, 0;'
    for i in used:
      condition, ref, offset = self.lines[i].instead
      self.code += f' setp.ne.s32 r{i}, {self.operand(condition)}, 0;'
      self.code += f' or.pred p, p, r{i};'
      self._address('b', i, ref, offset)
    self.code += ' vote.sync.any.pred p, p, 0xFFFFFFFF; @!p bra end_%%;'
    for i, piece in enumerate(self.pieces):
      if piece.line not in used:
        continue
      guard = f'r{piece.line}'
      if self.set_exists(i):
        self.code += f' and.pred q, q, {guard};'
        guard = 'q'
      self.code += f' @{guard} ld.global.v4.b32'
      self.code += f' {{{", ".join(self.four(i))}}},'
      self.code += f' [b{piece.line}+{piece.distance}];'
    self.code += ' end_%%:'

  def emit(self) -> list[Array]:
    code = '{' + self.code + ' }'
    return list(ptx.emit(code, self.results, self.operands))

  def _address(self, letter: str, i: int, ref, offset) -> None:
    self.code += f' cvt.s64.s32 o, {self.operand(offset)}; shl.b64 o, o, 1;'
    self.code += f' add.u64 {letter}{i}, o, {self.operand(ref)};'


def look(lines: Sequence[Line], pieces: Sequence[Piece]) -> list[Array]:
  """Reads pieces, published or not, for `await_pieces`.

  Args:
    lines: the lines that they lie in; elements have 16 bits.
    pieces: pieces of the lines.

  Returns:
    Four int32 [128] for each piece.
  """
  reader = _Lines(lines, pieces)
  for i in range(len(pieces)):
    guard = ''
    if reader.set_exists(i):
      reader.code += ''.join(f' mov.b32 {w}, 0;' for w in reader.four(i))
      guard = '@q '
    reader.read(i, guard)
  return reader.emit()


def await_pieces(
    lines: Sequence[Line], pieces: Sequence[Piece], seen: Sequence[Array]
) -> list[Array]:
  """Reads pieces again until they have been published; a warp together.

  A thread reads those again that it has not seen. If no data comes, the kernel
  is aborted with an error.

  Args:
    lines: the lines that they lie in.
    pieces: pieces of the lines.
    seen: results of `look`, from this step of the loop.
  """
  reader = _Lines(lines, pieces)
  for word, x in zip(reader.words, seen, strict=True):
    reader.code += f' mov.b32 {word}, {reader.operand(x)};'
  reader.code += ' bra.uni check_%%; again_%%:'
  for i in range(len(pieces)):
    reader.code += any_sentinel(reader.four(i), 2)
    reader.read(i, '@p ')
  reader.code += ' check_%%:' + any_sentinel(reader.words, 2)
  reader.code += ' vote.sync.any.pred p, p, 0xFFFFFFFF; @!p bra done_%%;'
  reader.code += f' add.u32 k, k, 1; setp.lt.u32 p, k, {sync.PATIENCE};'
  reader.code += ' @p bra again_%%; trap; done_%%:'
  reader.replace()
  return reader.emit()
