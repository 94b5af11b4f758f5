"""Dates as people write them, and as ISO 8601 does; made from a seed."""

from collections.abc import Sequence
import datetime

import numpy as np

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

  No day is in two of the parts.

  Args:
    seed: of days and ways to write them.
    counts: pairs of each part; together at most `NUM_DAYS`.
  """
  random = np.random.default_rng(seed)
  days = random.permutation(NUM_DAYS)[: sum(counts)]
  forms = random.integers(0, len(_FORMS), len(days))
  pairs = []
  for day, form in zip(days.tolist(), forms.tolist(), strict=True):
    date = _FIRST_DAY + datetime.timedelta(days=day)
    pairs.append((_FORMS[form](date), date.isoformat()))
  parts, start = [], 0
  for count in counts:
    part = pairs[start : start + count]
    parts.append(([pair[0] for pair in part], [pair[1] for pair in part]))
    start += count
  return parts


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
  if year == 2000:
    return 'two thousand'
  if not rest:
    return f'{_cardinal(century)} hundred'
  if century == 20 and rest < 10:
    return f'two thousand and {_cardinal(rest)}'
  if rest < 10:
    return f'{_cardinal(century)} oh {_cardinal(rest)}'
  return f'{_cardinal(century)} {_cardinal(rest)}'


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
