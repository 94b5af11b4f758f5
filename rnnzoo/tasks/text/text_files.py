"""A text in a file: UTF-8, or UTF-16 with its mark, plain or .gz."""

import codecs
import gzip
from typing import Any
import zlib

from rnnzoo.tasks import fields

# A .gz file may hold this many bytes, or this many times its own size.
_MOST_BYTES, _MOST_TIMES = 2**28, 100
_MARKS = (
    (codecs.BOM_UTF8, 'utf-8'),
    (codecs.BOM_UTF16_LE, 'utf-16-le'),
    (codecs.BOM_UTF16_BE, 'utf-16-be'),
)


def read(path: str, field: str, most: int | None = None) -> str:
  """Returns a text without a byte order mark, whose lines end in a newline.

  In the file they may have a carriage return before it.

  Args:
    path: of the file.
    field: of the config that holds the path, for messages.
    most: bytes that a text can have; None for any.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no such text, or larger than that, or its lines end in a
      carriage return alone.
  """
  file = fields.expand(path, field)
  if not path or not file.is_file():
    raise FileNotFoundError(
        f'{field}: there is no file {path!r}; it must be a text in UTF-8, or in'
        ' UTF-16 with its mark, plain or .gz'
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
  if '\r' in text and '\n' not in text:
    raise ValueError(
        f'{path} ends its lines with a carriage return alone; they must end'
        ' with a newline'
    )
  return text.replace('\r\n', '\n').removesuffix('\r')
