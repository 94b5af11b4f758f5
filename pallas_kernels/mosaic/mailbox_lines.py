"""Reads mailboxes at places that lie at fixed distances from each other.

A thread needs one address for all places of a line, which leaves registers to
the data. `look` begins to read; `await_pieces` reads again what was not there.
Elements have 16 bits.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True)
class Line:
  """Places at fixed distances from each other, of one thread.

  Attributes:
    ref: in device memory.
    offset: of the place at distance 0, in elements, int32 [128].
    instead: (int32 condition, reference, offset) to read at the same distances
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
    distance: in bytes.
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
    lines: where they lie; elements have 16 bits.
    pieces: of these lines.

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
    lines: as for `look`.
    pieces: as for `look`.
    seen: results of `look`, from the same step of a loop.
  """
  reader = _Lines(lines, pieces)
  for word, x in zip(reader.words, seen, strict=True):
    reader.code += f' mov.b32 {word}, {reader.operand(x)};'
  reader.code += ' bra.uni check_%%; again_%%:'
  for i in range(len(pieces)):
    reader.code += mailbox.any_sentinel(reader.four(i), 2)
    reader.read(i, '@p ')
  reader.code += ' check_%%:' + mailbox.any_sentinel(reader.words, 2)
  reader.code += ' vote.sync.any.pred p, p, 0xFFFFFFFF; @!p bra done_%%;'
  reader.code += f' add.u32 k, k, 1; setp.lt.u32 p, k, {sync.PATIENCE};'
  reader.code += ' @p bra again_%%; trap; done_%%:'
  reader.replace()
  return reader.emit()
