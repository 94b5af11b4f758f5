"""A text in a file: UTF-8, or UTF-16 or 32 with its mark, plain or .gz."""

import codecs
import gzip
import re
from typing import Any
import zlib

from rnnzoo.tasks import fields

# A .gz file may hold this many bytes, or this many times its own size.
_MOST_BYTES, _MOST_TIMES = 2**28, 100
_MARKS = (
    (codecs.BOM_UTF8, 'utf-8'),
    # The first of these begins as that of UTF-16 does.
    (codecs.BOM_UTF32_LE, 'utf-32-le'),
    (codecs.BOM_UTF32_BE, 'utf-32-be'),
    (codecs.BOM_UTF16_LE, 'utf-16-le'),
    (codecs.BOM_UTF16_BE, 'utf-16-be'),
)
# How files begin that gzip, bzip2, xz, zip and zstd packed.
_PACKED = re.compile(
    rb'\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|PK\x03\x04|\x28\xb5\x2f\xfd'
)


def read(path: str, field: str, most: int | None = None) -> str:
  """Returns a text without byte order marks, whose lines end in a newline.

  In the file they may have a carriage return before it. Marks within it, as in
  files that were joined, are left out as well.

  Args:
    path: of the file.
    field: of the config that holds the path, for messages.
    most: bytes that a text can have; None for any.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no such text, or larger than that, or a carriage return in
      it has no newline behind.
  """
  file = fields.expand(path, field)
  if not path or not file.is_file():
    raise FileNotFoundError(
        f'{field}: there is no file {path!r}; it must be a text in UTF-8, or in'
        ' UTF-16 or UTF-32 with its mark, plain or .gz'
    )
  limit = max(_MOST_BYTES, _MOST_TIMES * file.stat().st_size)
  limit = limit if most is None else min(limit, most)
  content = bytearray()
  with file.open('rb') as raw:
    is_packed = raw.peek(2).startswith(b'\x1f\x8b')
    stream: Any = gzip.open(raw) if is_packed else raw
    try:
      while part := stream.read(2**20):
        content += part
        if len(content) > limit:
          raise ValueError(
              f'{path} holds more than {limit:,} bytes; a part of it would work'
          )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
      raise ValueError(f'{path} is not a whole .gz file: {error}') from error
  if _PACKED.match(content):
    raise ValueError(
        f'{path} holds what is packed; unpack it, and give it as a plain text'
        ' or .gz'
    )
  marks = (pair for pair in _MARKS if content.startswith(pair[0]))
  mark, encoding = next(marks, (b'', 'utf-8'))
  content = content[len(mark) :]
  try:
    text = content.decode(encoding)
  except UnicodeDecodeError as error:
    *before, last = content[: error.start].decode(encoding).split('\n')
    raise ValueError(
        f'{path}, line {len(before) + 1}, is not {encoding.upper()}: byte'
        f' {len(last.encode(encoding)) + 1} of the line is'
        f' {content[error.start]:#04x}'
    ) from error
  if text.count('\0') > len(text) // 4:
    raise ValueError(
        f'{path} is full of zeros, as UTF-16 without its mark is; it must be'
        ' UTF-8, or begin with a byte order mark'
    )
  text = text.replace('\r\n', '\n').removesuffix('\r').replace('\ufeff', '')
  if '\r' in text:
    line = text.count('\n', 0, text.index('\r')) + 1
    raise ValueError(
        f'{path}, line {line}, has a carriage return without a newline behind;'
        ' lines must end with a newline'
    )
  return text
