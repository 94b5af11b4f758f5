"""A bound on padding: one long sequence makes all beside it as long."""

from collections.abc import Sequence

import numpy as np

# Arrays up to this size may be padding for the most part.
_MANY_BYTES = 2**33
# The least share of data of larger ones.
_LEAST_SHARE = 0.1


def check(
    lengths: Sequence[int] | np.ndarray, step_bytes: int, remedy: str
) -> None:
  """Raises ValueError where more than 8 GiB would be padding for the most part.

  Args:
    lengths: of the sequences, which are padded to the longest.
    step_bytes: the size of a step.
    remedy: says what would work, without a full stop.
  """
  lengths = np.asarray(lengths, np.int64)
  steps = len(lengths) * int(lengths.max())
  share = int(lengths.sum()) / steps
  if steps * step_bytes > _MANY_BYTES and share < _LEAST_SHARE:
    raise ValueError(
        f'{len(lengths):,} sequences, padded to the longest of'
        f' {lengths.max():,} steps (number {lengths.argmax():,}, from 0), would'
        f' have {steps * step_bytes:,} bytes, of which {share:.2%} hold data;'
        f' half of the sequences have at most {int(np.median(lengths)):,}'
        f' steps; {remedy}'
    )
