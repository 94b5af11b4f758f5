"""When kernels in tiles pay. It imports no GPU backend until one is needed."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels.tiled import limits

# Rows of a batch times the square of a head's units, from which tiles are
# faster, for cells like LSTM and GRU and more rows than a tile has. With one
# head, by benchmarks/tuning_sizes_h200.json: 80 rows of 1,152 units, 512 of 384
# and 1,024 of 320 are faster; 1,024 of 256 take as long, and of 192 longer.
WORK = 70_000_000

# The work for all other cells and rows.
_WORK_OF_OTHERS = 130_000_000

# The work where both passes keep R on the chip, of heads of so many units and
# few arrays in a carry: with four, the adjoint has too few registers. By benchmarks/tuning_on_chip_h100.json, of LSTM and GRU: 80
# rows of 768 units, 128 of 512, 192 of 384.
WORK_ON_CHIP = 28_000_000
_ROWS, _SIZES_ON_CHIP, _STATES_ON_CHIP = 64, (384, 1024), 2

# The same for one tile of rows: 64 rows of 1,024 units take as long forward
# and .6 times as long with gradients; 48 rows take 1.3 times as long forward.
_WORK_OF_ONE_TILE = 60_000_000

# Units of a head in tiles, as a share of its own: the others are padding.
_MOST_PADDING = 1.25

# Cells with fewer gates were not measured below: they have less to multiply.
_GATES_ON_CHIP, _WORK_OF_FEW_GATES, _SIZE_OF_FEW_GATES = 3, 75_000_000, 768

# Units of heads whose tiles of 32 rows pay. With 16 rows, or 1,024 units, the
# forward passes of other kernels are faster, by
# benchmarks/tuning_low_tiles_h100.json, of LSTM and GRU.
_LOW_SIZES = 1088, 2048


def pay(
    target: devices.Target,
    kernel: Any,
    *,
    rows: int,
    time: int,
    gates: int,
    states: int,
    two_stages: bool,
    call: call_lib.Call,
) -> bool:
  """Returns whether kernels in tiles can run a recurrence, and pay.

  A batch of more than `limits.rows_at_once` is judged by one of its parts.

  Args:
    target: the device.
    kernel: R, [G', N, D, D]; its shape and dtype are read.
    rows: B.
    time: T.
    gates: G.
    states: arrays of the carry.
    two_stages: whether the cell has a second product in each step.
    call: options of the run.
  """
  recurrent, heads, size, _ = kernel.shape
  padded = limits.padded(size)
  can_run = (
      target.wgmma
      and not target.interpret
      and not two_stages
      and call.groups == 1
      and not call.cast_kernel
      and jnp.dtype(kernel.dtype).itemsize == 2
      and padded <= _MOST_PADDING * size
      and recurrent <= limits.GATES
  )
  size = padded
  rows = limits.rows_at_once(rows, time, max(gates, recurrent), heads * size)
  if not can_run or heads > 1:
    return False

  def on_chip() -> bool:
    # Pallas's GPU backend is imported where it is known to work.
    from pallas_kernels.tiled import tuning

    return tuning.on_chip(
        batch=rows, heads=heads, size=size, recurrent=recurrent, target=target
    )

  if rows in limits.LOW_BATCHES and _low_pay(recurrent, size, states, call):
    if on_chip():
      return True
  work = rows * size**2
  few_gates = recurrent < _GATES_ON_CHIP
  plain = not few_gates and states <= _STATES_ON_CHIP
  if work >= (WORK if plain and rows > _ROWS else _WORK_OF_OTHERS):
    return True
  least, (smallest, largest) = WORK_ON_CHIP, _SIZES_ON_CHIP
  if few_gates:
    least, smallest = _WORK_OF_FEW_GATES, _SIZE_OF_FEW_GATES
  elif rows <= _ROWS:
    least = _WORK_OF_ONE_TILE
  if work < least or rows < _ROWS or states > _STATES_ON_CHIP:
    return False
  return smallest <= size <= largest and on_chip()


def _low_pay(
    recurrent: int, size: int, states: int, call: call_lib.Call
) -> bool:
  """Returns whether tiles of 32 rows pay, where they can run."""
  smallest, largest = _LOW_SIZES
  return (
      smallest <= size <= largest
      and recurrent >= _GATES_ON_CHIP
      and states <= _STATES_ON_CHIP
      and not call.stop_recurrent_gradient
  )
