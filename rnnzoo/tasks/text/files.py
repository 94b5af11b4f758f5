"""Parallel text: files, and buckets by length.

Dimensions: N pairs of a bucket, S tokens of a source, T of a target.
"""

from collections.abc import Sequence
import datetime
import gzip
import itertools
import zlib

from absl import logging
import numpy as np

from rnnzoo import settings
from rnnzoo.models import decoding
from rnnzoo.tasks import fields
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.series import sequence_arrays


def read(path: str, field: str) -> str:
  """Returns a text in UTF-8, plain or .gz, whose lines end in a newline.

  In the file they may end in a carriage return, too. Byte order marks are left
  out, also within it, as in files that were joined.

  `field` names the field of the config, for messages.
  """
  file = fields.expand(path, field)
  if not path or not file.is_file():
    raise FileNotFoundError(
        f'{field} must name a text file in UTF-8, plain or .gz; there is no'
        f' file {path!r}'
    )
  content = file.read_bytes()
  if content.startswith(b'\x1f\x8b'):
    try:
      content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
      raise ValueError(f'{path} is not a whole .gz file: {error}') from error
  try:
    text = content.decode()
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise ValueError(
        f'{path}, line {line}, is not UTF-8; iconv -f latin1 -t utf-8 makes it'
        ' of Latin-1, say'
    ) from error
  if '\0' in text:
    raise ValueError(f'{path} has zeros, as UTF-16 has them; UTF-8 would work')
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return text.replace('\ufeff', '')


def read_parallel(
    source: str, target: str, fields: Sequence[str]
) -> tuple[list[str], list[str]]:
  """Returns the lines of a text and of its translation.

  An empty line beside one that is not stays; a warning tells of it.

  Both are paths of files that `read` reads, and `fields` the config's fields
  that hold the paths, for messages.
  """
  sources, targets = _read(source, fields[0]), _read(target, fields[1])
  sides = (sources, targets, source), (targets, sources, target)
  if len(sources) != len(targets):
    (few, many, short), (_, _, long) = sorted(sides, key=lambda x: len(x[0]))
    raise ValueError(
        f'{short} has {len(few):,} lines and {long} {len(many):,}: line'
        f' {len(few) + 1} of {long} has no translation'
    )
  for lines, others, path in sides:
    pairs = enumerate(zip(lines, others, strict=True), 1)
    places = [i for i, (a, b) in pairs if b.strip() and not a.strip()]
    if places:
      logging.warning(
          '%s, line %d, is empty, and its translation is not; so are %d of %d'
          ' lines. They stay in the data.',
          path,
          places[0],
          len(places),
          len(lines),
      )
  return sources, targets


def _read(path: str, field: str) -> list[str]:
  text = read(path, field)
  if not text:
    raise ValueError(f'{path} has no lines')
  return text.removesuffix('\n').split('\n')


def read_tfds(
    source: str, data_dir: str
) -> tuple[str, dict[str, tuple[list[str], list[str]]]]:
  """Returns the name of a set 'tfds:<name>', and its pairs of lines by split.

  A split for validation or for the test that the set lacks is the last
  twentieth of the lines left to train on.
  """
  found = tfds_sets.read(source, data_dir)
  splits = {}
  for name, examples in found.splits.items():
    sides = []
    for side in examples:
      if wrong := [one for one in side if not isinstance(one, bytes | str)]:
        raise ValueError(
            f'config.data.source={source!r} must have texts as inputs and'
            f' targets; {name!r} has {settings.a(type(wrong[0]))}'
        )
      sides.append([_line(text) for text in side])
    splits[name] = (sides[0], sides[1])
  for name in ('test', 'validation'):
    if name not in splits:
      sources, targets = splits['train']
      count = len(sources) // 20
      if not count:
        raise ValueError(
            f'config.data.source={source!r} has no split {name!r}, and too few'
            ' training examples to split it off'
        )
      splits[name] = sources[-count:], targets[-count:]
      splits['train'] = sources[:-count], targets[:-count]
  return found.name, splits


def _line(text: bytes | str) -> str:
  text = text if isinstance(text, str) else text.decode('utf-8')
  return ' '.join(text.splitlines())


def longest(pairs: tuple[list[list[int]], list[list[int]]]) -> np.ndarray:
  """Returns the length of the longer one of each pair, int [N]."""
  return np.array([max(map(len, pair)) for pair in zip(*pairs, strict=True)])


def boundaries(lengths: np.ndarray, num_buckets: int) -> list[int]:
  """Returns the greatest length of each bucket but the last, which has none.

  There are at most `num_buckets`, and each gets as many pairs to train on.
  """
  places = np.arange(1, num_buckets) / num_buckets
  cuts = np.quantile(lengths, places, method='lower').astype(int)
  return sorted({int(cut) for cut in cuts if cut < lengths.max()})


def buckets(
    pairs: tuple[list[list[int]], list[list[int]]], cuts: Sequence[int]
) -> list[dict[str, np.ndarray]]:
  """Returns pairs by length, each padded to the longest one of its bucket.

  `pairs` are tokens of sources and of targets, `cuts` a result of `boundaries`.

  Returns:
    For each bucket that has pairs, 'source' int32 [N, S], its end included;
    'source_length' int32 [N]; 'target' int32 [N, T + 1], from start to end; and
    'target_length' int32 [N], tokens to predict, the end included.
  """
  found = np.searchsorted(np.array(cuts, int), longest(pairs))
  parts = []
  for bucket in np.unique(found):
    places = np.flatnonzero(found == bucket)
    source, source_length = pad([[*pairs[0][i], decoding.END] for i in places])
    targets = [[decoding.START, *pairs[1][i], decoding.END] for i in places]
    target, length = pad(targets)
    parts.append(
        {
            'source': source,
            'source_length': source_length,
            'target': target,
            'target_length': length - 1,
        }
    )
  return parts


def pad(
    rows: Sequence[Sequence[int]], width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (tokens as one array [rows, width], 0 behind them; lengths).

  Without a width it is that of the longest row.
  """
  arrays = [np.array(row, np.int32) for row in rows]
  return sequence_arrays.pad(arrays, width)


# Dates as people write them, and as ISO 8601 does; made from a seed.
_FIRST_DAY = datetime.date(1900, 1, 1)
NUM_DAYS = (datetime.date(2100, 1, 1) - _FIRST_DAY).days
_MONTHS = (
    'january february march april may june july august september october'
    ' november december'
).split()
_WEEKDAYS = 'monday tuesday wednesday thursday friday saturday sunday'.split()
_NUMBERS = (
    'zero one two three four five six seven eight nine ten eleven twelve'
    ' thirteen fourteen fifteen sixteen seventeen eighteen nineteen'
).split()
_TENS = '- - twenty thirty forty fifty sixty seventy eighty ninety'.split()
_ORDINALS = {
    'one': 'first',
    'two': 'second',
    'three': 'third',
    'five': 'fifth',
    'eight': 'eighth',
    'nine': 'ninth',
    'twelve': 'twelfth',
    'twenty': 'twentieth',
    'thirty': 'thirtieth',
}


def dates(
    seed: int, counts: Sequence[int]
) -> list[tuple[list[str], list[str]]]:
  """Returns dates as people write them, and as ISO 8601 does.

  Each part has a count of pairs, together at most `NUM_DAYS`, and no day is in
  two of the parts. The seed is of days and of ways to write days.
  """
  random = np.random.default_rng(seed)
  days = random.permutation(NUM_DAYS)[: sum(counts)]
  forms = random.integers(0, len(_FORMS), len(days))
  dates = [_FIRST_DAY + datetime.timedelta(days=day) for day in days.tolist()]
  texts = (_FORMS[f](day) for f, day in zip(forms, dates, strict=True))
  isos = (day.isoformat() for day in dates)
  take = lambda lines, count: list(itertools.islice(lines, count))
  return [(take(texts, count), take(isos, count)) for count in counts]


def _cardinal(number: int) -> str:
  """Returns a number below 100 in words: 'ninety four'."""
  if number < 20:
    return _NUMBERS[number]
  tens, ones = divmod(number, 10)
  return f'{_TENS[tens]} {_NUMBERS[ones]}' if ones else _TENS[tens]


def _ordinal(number: int) -> str:
  *before, last = _cardinal(number).split()
  return ' '.join([*before, _ORDINALS.get(last, f'{last}th')])


def _year(year: int) -> str:
  century, rest = divmod(year, 100)
  if century == 20 and rest < 10:
    return f'two thousand and {_cardinal(rest)}' if rest else 'two thousand'
  if not rest:
    return f'{_cardinal(century)} hundred'
  oh = 'oh ' if rest < 10 else ''
  return f'{_cardinal(century)} {oh}{_cardinal(rest)}'


def _suffixed(day: int) -> str:
  suffix = {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')
  return f'{day}th' if 10 < day < 20 else f'{day}{suffix}'


def _month(date: datetime.date) -> str:
  return _MONTHS[date.month - 1]


# Ways to write a date.
_FORMS = (
    lambda d: f'the {_ordinal(d.day)} of {_month(d)}, {_year(d.year)}',
    lambda d: f'{_month(d)} the {_ordinal(d.day)}, {_year(d.year)}',
    lambda d: f'{_year(d.year)}, {_month(d)} the {_ordinal(d.day)}',
    lambda d: f'{_month(d)} {_suffixed(d.day)}, {d.year}',
    lambda d: f'{d.day} {_month(d)} {d.year}',
    lambda d: f'{_month(d)[:3]} {d.day}, {d.year}',
    lambda d: (
        f'{_WEEKDAYS[d.weekday()]}, {_month(d)} {_suffixed(d.day)}, {d.year}'
    ),
    lambda d: (
        f'{_WEEKDAYS[d.weekday()]} the {_ordinal(d.day)} of {_month(d)},'
        f' {d.year}'
    ),
)
