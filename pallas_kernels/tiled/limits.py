"""Sizes that kernels in tiles can run. It imports no GPU backend."""

import math

# Depth of a slice of a product: a row of it is 128 bytes.
DEPTH = 64

# The most recurrent gates.
GATES = 4

# Rows of a batch from which the forward kernel also multiplies W x. By
# benchmarks/tiled_kept_h100.json it is slower with 128 and 256 rows, where R
# streams too, and faster from 512 on.
ROWS_TO_PROJECT = 512

# Rows of a batch for which kernels with R on chip have tiles of 32 rows.
LOW_BATCHES = range(17, 33)

# Rows of the smallest tile.
_TILE = 64

# Elements of the gates that one kernel reaches: offsets have 32 bits.
ELEMENTS = 2**31 - 1


def padded(size: int) -> int:
  """Returns the units of a head with padding: whole slices."""
  return -(-size // DEPTH) * DEPTH


def slice_of_inputs(rows: int) -> int:
  """Returns the number that a product W x of so many rows is in slices of."""
  # Outside of a kernel the library wants rows of 16 bytes.
  return DEPTH if rows >= ROWS_TO_PROJECT else 8


def rows_at_once(rows: int, time: int, gates: int, features: int) -> int:
  """Returns the rows of a batch that one kernel can run; larger ones are split.

  Args:
    rows: B.
    time: T.
    gates: input or recurrent gates, whichever are more.
    features: F.

  Returns:
    The rows of a part: the whole batch where one part suffices; 0
    where not even one row can run.
  """
  most = ELEMENTS // max(1, time * gates * features)
  if rows <= most:
    return rows
  if most < _TILE:
    return most
  tiles = math.ceil(rows / _TILE)
  parts = math.ceil(tiles / (most // _TILE))
  return _TILE * math.ceil(tiles / parts)
