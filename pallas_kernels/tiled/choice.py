"""When kernels in tiles pay. It imports no GPU backend until one is needed."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels.tiled import limits

# Rows of a batch times a head's units, times these with padding, from which
# tiles are faster. By benchmarks/tuning_sizes_h200.json, of one head: a GRU of
# 80 rows of 1,152 units, LSTM and GRU of 512 of 384, an LSTM of 2,048 of 192;
# 1,024 of 256 take as long, and of 192 longer. For other cells: an Elman RNN of
# 1,024 rows of 300 units and an SLSTM of 512 of 448. Fewer rows than a tile has
# were not measured if R is not on the chip.
WORK, _WORK_OF_OTHERS, _WORK_OF_FEW_ROWS = 70_000_000, 100_000_000, 130_000_000

# The work where both passes keep R on the chip, of heads of so many units and
# few arrays in a carry: with four, the adjoint has too few registers. By
# benchmarks/tuning_on_chip_h100.json, of LSTM and GRU: 80 rows of 768 units,
# 128 of 512, 192 of 384.
WORK_ON_CHIP = 28_000_000
_SIZES_ON_CHIP, _STATES_ON_CHIP = (384, 1024), 2

# The same for rows of one tile, of heads of up to so many units: 64 rows of
# 1,152 take .6 times as long forward and .4 times with gradients; of 1,024 as
# long and .6 times. 48 rows of 1,024 take 1.3 times as long forward.
_ROWS, _WORK_OF_ONE_TILE, _SIZE_OF_ONE_TILE = 64, 60_000_000, 2048

# Units of a head with padding, as a share of its own. 4,096 rows of 130 units,
# padded by 1.48, are faster; 16,384 of 70, by 1.83, are slower.
_MOST_PADDING = 1.5

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
  rows = limits.rows_at_once(rows, time, max(gates, recurrent), heads * padded)
  if not can_run or heads > 1:
    return False

  def on_chip() -> bool:
    # Pallas's GPU backend is imported where it is known to work.
    from pallas_kernels.tiled import tuning

    return tuning.on_chip(
        batch=rows, heads=heads, size=size, recurrent=recurrent, target=target
    )

  work = rows * size * padded
  size = padded
  few_gates = recurrent < _GATES_ON_CHIP
  plain = not few_gates and states <= _STATES_ON_CHIP
  most = WORK if plain else _WORK_OF_OTHERS
  if work >= (most if rows > _ROWS else _WORK_OF_FEW_ROWS):
    return True
  if rows in limits.LOW_BATCHES:
    return _low_pay(recurrent, size, states, call) and on_chip()
  least, (smallest, largest) = WORK_ON_CHIP, _SIZES_ON_CHIP
  if few_gates:
    least, smallest = _WORK_OF_FEW_GATES, _SIZE_OF_FEW_GATES
  elif rows <= _ROWS:
    least, largest = _WORK_OF_ONE_TILE, _SIZE_OF_ONE_TILE
  if work < least or states > _STATES_ON_CHIP or (few_gates and rows <= _ROWS):
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
