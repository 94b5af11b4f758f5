"""Rules for the values of a config's fields, checked before anything runs.

A section of a config (`config.optimizer`, say) has one table of rules, by the
fields' names. Whoever reads the section checks it with `check`, which refuses
values that would fail late, or silently mean something else.
"""

from collections.abc import Callable, Iterable, Mapping
import difflib
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from rnnzoo import settings


class Rule(NamedTuple):
  """The values that a field may hold."""

  text: str  # The rule in words, after 'must be'.
  # Whether a value is allowed. Any type of value may be asked for.
  allows: Callable[[Any], bool]


# Rules of the fields of a section, by name.
Rules = Mapping[str, Rule]


def optional(rule: Rule) -> Rule:
  """Returns the rule of values that a rule allows, or None."""
  return Rule(
      f'{rule.text} or None',
      lambda value: value is None or rule.allows(value),
  )


def integer(least: int, most: int = 10**9) -> Rule:
  """Returns the rule of an int in [least, most]."""
  return Rule(
      f'an integer from {least} to {most}',
      lambda value: _is_a(value, int) and least <= value <= most,
  )


def seed() -> Rule:
  """Returns the rule of a seed. Seeds beyond 32 bits would collide."""
  return integer(0, 2**32 - 1)


def number(
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
) -> Rule:
  """Returns the rule of a number in [least, most], as float32 has it.

  A number that float32 rounds to zero, to infinity or onto an excluded bound is
  not allowed, since training would run with that instead.

  `above` and `below` exclude the bounds.
  """
  text = f'a number of at least {least:g}'
  if above:
    text = f'a number above {least:g}'
  if most < math.inf:
    text += f' and {"below" if below else "at most"} {most:g}'

  def allows(value):
    # JAX takes an int for an int32 wherever it meets one.
    if not (_is_a(value, float) or (_is_a(value, int) and abs(value) < 2**31)):
      return False
    rounded = float32(value)
    return (
        math.isfinite(rounded)
        and (rounded != 0.0 or value == 0)
        and (rounded > least if above else rounded >= least)
        and (rounded < most if below else rounded <= most)
    )

  return Rule(f'{text}, finite in float32', allows)


def one_of(names: Iterable[str]) -> Rule:
  """Returns the rule of a name."""
  known = tuple(names)
  return Rule(
      f'one of {", ".join(map(repr, known))}',
      lambda value: isinstance(value, str) and value in known,
  )


def flag() -> Rule:
  """Returns the rule of a bool, and nothing that merely counts as one."""
  return Rule('True or False', lambda value: isinstance(value, bool))


def text() -> Rule:
  """Returns the rule of a string."""
  return Rule(
      'a string', lambda value: isinstance(value, str) and '\0' not in value
  )


def pattern() -> Rule:
  """Returns the rule of a regular expression; '' is one as well."""

  def allows(value):
    try:
      return text().allows(value) and bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
      return False

  return Rule('a regular expression', allows)


def pairs(text: str, first: Rule, second: Rule) -> Rule:
  """Returns the rule of a tuple or list of pairs, none or more."""

  def allows(value):
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and first.allows(pair[0])
        and second.allows(pair[1])
        for pair in value
    )

  return Rule(text, allows)


def section() -> Rule:
  """Returns the rule of a section, with fields of its own."""
  return Rule(
      'a section with fields',
      lambda value: isinstance(value, ml_collections.ConfigDict),
  )


def check(given: ml_collections.ConfigDict, rules: Rules, name: str) -> None:
  """Raises ValueError unless a section's fields are there and allowed.

  Fields without a rule are not looked at. The section's name is for the
  message, as 'config.optimizer'.
  """
  if not isinstance(given, ml_collections.ConfigDict):
    raise ValueError(
        f'{name} must be a section with fields; got {shorten(given)}'
    )
  for field, rule in rules.items():
    if field not in given:
      raise ValueError(
          f'{name} has no field {field!r}, which must be {rule.text}'
          ' (start from a config in configs/ of the same task)'
      )
    if not rule.allows(given[field]):
      raise ValueError(
          f'{name}.{field} must be {rule.text}; got {shorten(given[field])}'
      )


def expand(path: str | os.PathLike[str], name: str = '') -> pathlib.Path:
  """Returns a path with '~' replaced by the home directory.

  The name of the field that holds it, as 'config.data.path', is for messages.
  """
  if not isinstance(path, str | os.PathLike) or len(str(path)) >= 4096:
    raise ValueError(
        f'{name or "a path"} must be a string or a pathlib.Path, below 4096'
        f' letters; got {shorten(path)}'
    )
  try:
    return pathlib.Path(path).expanduser()
  except RuntimeError as error:
    raise ValueError(
        f'{f"{name}=" if name else ""}{path} begins with the home directory of'
        f' nobody here; ./{path} is the path of that name'
    ) from error


def expand_directory(path: str | os.PathLike[str], name: str) -> pathlib.Path:
  """Returns the path of a directory, there or not, as `expand` does.

  Neither it nor a path above it may be a file.
  """
  found = expand(path, name)
  # os.path answers for names that no file system takes, too.
  for place in (found, *found.parents):
    if os.path.exists(place) and not os.path.isdir(place):
      below = '' if place == found else f' is below {place}, which'
      raise ValueError(f'{name}={path}{below} is a file, not a directory')
  return found


def check_unread(
    given: ml_collections.ConfigDict,
    names: Iterable[str] | Mapping[str, Any],
    choice: str,
) -> None:
  """Raises ValueError if a field of `config.data` is set that nothing reads.

  Args:
    given: `config.data`.
    names: names of fields that are '' where they are not set, or with the
      values that they then have. One that is not there is not set.
    choice: the field by which they are not read, as 'source'.
  """
  unset = names if isinstance(names, Mapping) else dict.fromkeys(names, '')
  for name, value in unset.items():
    if given.get(name, value) != value:
      raise ValueError(
          f'config.data.{name} would be ignored with config.data.{choice}='
          f'{shorten(given[choice])}; it must be {value!r} there, got'
          f' {shorten(given[name])}'
      )


def did_you_mean(name: Any, known: Iterable[str], most: int = 1) -> str:
  """Returns a question with known names that are nearly this one, or ''."""
  lower = {one.lower(): one for one in known}
  close = difflib.get_close_matches(str(name).lower(), lower, n=most)
  names = ' or '.join(repr(lower[one]) for one in close)
  return f'did you mean {names}?' if close else ''


def float32(value: float) -> float:
  """Returns a number as float32 has it: maybe rounded, or infinite."""
  try:
    with np.errstate(all='ignore'):
      rounded = np.float32(value)
  except OverflowError:  # An int beyond float64.
    return math.inf
  # XLA takes numbers below the least normal one for zero.
  return float(rounded if abs(rounded) >= 2.0**-126 else 0.0 * rounded)


def shorten(value: Any) -> str:
  """Returns a value as text that fits into a sentence."""
  try:
    whole = repr(value)
  except ValueError:  # Python refuses to print ints of thousands of digits.
    return f'{settings.a(type(value))} too long to be shown'
  return (
      whole if len(whole) <= 80 else f'{whole[:60]}... ({len(whole)} letters)'
  )


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
  return isinstance(value, kind) and not isinstance(value, bool)
