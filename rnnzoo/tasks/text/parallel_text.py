"""Parallel text: files, and buckets by length.

Dimensions: N pairs of a bucket, S tokens of a source, T of a target.
"""

from collections.abc import Sequence

from absl import logging
import numpy as np

from rnnzoo import settings
from rnnzoo.models import decoding
from rnnzoo.tasks import padding
from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.text import text_files


def read_parallel(
    source: str, target: str, fields: tuple[str, str]
) -> tuple[list[str], list[str]]:
  """Returns the lines of two files, each the other's translation.

  An empty line beside one that is not stays; a warning tells of it.

  Args:
    source: path of a file that `text_files.read` reads.
    target: the same.
    fields: of the config that hold the paths, for messages.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: one is no text, or has no lines, or not as many as the other.
  """
  sources, targets = _read(source, fields[0]), _read(target, fields[1])
  if len(sources) != len(targets):
    short, long = sorted(
        ((len(sources), source), (len(targets), target)), key=lambda x: x[0]
    )
    raise ValueError(
        f'{short[1]} has {short[0]:,} lines and {long[1]} {long[0]:,}: line'
        f' {short[0] + 1} of {long[1]} has no translation'
    )
  for lines, others, path in (
      (sources, targets, source),
      (targets, sources, target),
  ):
    places = [
        place
        for place, (line, other) in enumerate(
            zip(lines, others, strict=True), 1
        )
        if other.strip() and not line.strip()
    ]
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
  text = text_files.read(path, field)
  if not text:
    raise ValueError(f'{path} has no lines')
  return text.removesuffix('\n').split('\n')


def read_tfds(
    source: str, data_dir: str
) -> tuple[str, dict[str, tuple[list[str], list[str]]]]:
  """Returns the name of a set of TFDS, and its pairs of lines by split.

  A split for validation or for the test that the set lacks is the last
  twentieth of the lines left to train on.

  Args:
    source: 'tfds:<name>'.
    data_dir: where TFDS keeps its sets.

  Raises:
    ValueError: the set cannot be read, or has no text.
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
      count = len(splits['train'][0]) // 20
      if not count:
        raise ValueError(
            f'config.data.source={source!r} has no split {name!r}, and too few'
            ' training examples to split it off'
        )
      sources, targets = splits['train']
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

  Args:
    lengths: of the pairs to train on, of which each bucket gets as many.
    num_buckets: at most.
  """
  places = np.arange(1, num_buckets) / num_buckets
  cuts = np.quantile(lengths, places, method='lower').astype(int)
  return sorted({int(cut) for cut in cuts if cut < lengths.max()})


def buckets(
    pairs: tuple[list[list[int]], list[list[int]]], cuts: Sequence[int]
) -> list[dict[str, np.ndarray]]:
  """Returns pairs by length, each padded to the longest one of its bucket.

  Args:
    pairs: tokens of sources and of targets.
    cuts: of `boundaries`.

  Returns:
    For each bucket that has pairs, 'source' int32 [N, S], its end included;
    'source_length' int32 [N]; 'target' int32 [N, T + 1], from start to end; and
    'target_length' int32 [N], tokens to predict, the end included.

  Raises:
    ValueError: nearly all of many bytes would be padding.
  """
  found = np.searchsorted(np.array(cuts, int), longest(pairs))
  parts = []
  for bucket in range(len(cuts) + 1):
    places = np.flatnonzero(found == bucket)
    if not len(places):
      continue
    for side in pairs:
      padding.check(
          [len(side[i]) + 1 for i in places],
          4,
          'shorten or leave out the longest lines; of those to train on,'
          ' config.data.max_length leaves them out',
      )
    sources = [[*pairs[0][i], decoding.END] for i in places]
    targets = [[decoding.START, *pairs[1][i], decoding.END] for i in places]
    parts.append(
        {
            'source': pad(sources),
            'source_length': np.array(list(map(len, sources)), np.int32),
            'target': pad(targets),
            'target_length': np.array(list(map(len, targets)), np.int32) - 1,
        }
    )
  return parts


def pad(rows: Sequence[Sequence[int]], width: int = 0) -> np.ndarray:
  """Returns tokens as one array [rows, at least width], padding behind them."""
  width = max([width, *map(len, rows)])
  array = np.full((len(rows), width), decoding.PAD, np.int32)
  for row, tokens in zip(array, rows, strict=True):
    row[: len(tokens)] = tokens
  return array
