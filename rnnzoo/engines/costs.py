"""When another path is faster than a GPU kernel, by measurement.

A kernel of the family 'dense' keeps R on the chip and takes a batch in pieces,
one after the other. A step of `lax.scan` multiplies all rows at once: with many
rows of a large R arithmetic is the limit, and the library's product wins.
Kernels in tiles, where they run, are faster than both. The times are in
benchmarks/tuning_large_batches_h200.json.

A linear recurrence of few features leaves most multiprocessors idle, however
long it is: 32 share a sequence at most. XLA's associative scan uses them all. A
single step is one kernel of XLA's, and so are a few. Times are in
benchmarks/lengths_h200.json.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import api
from pallas_kernels import auto_axes
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib

# Units of a head and rows of a batch from which 'scan' is faster, with one head
# and arrays of 16 bits. Measured: LSTM and GRU of 512 and 768 units.
_UNITS = 640
_ROWS = 1024

# Kernels for heads of more units, with so many gates or more, take 16 to 32
# rows at once, so that these are three pieces or four. By counting.
_LARGE_UNITS = 1536
_LARGE_GATES = 4
_ROWS_OF_LARGE = 64

# The fewest steps with which layers in depth run at the same time, in so many
# parts; and the steps from which more parts are faster. Measured on one H100
# and again on an H200: benchmarks/stacks_h200.json has the largest heads too.
_STEPS_OF_WAVEFRONT, _UNITS_OF_WAVEFRONT = 384, 512
_PARTS = 4
_LONG_WAVEFRONT, _PARTS_OF_LONG = 1024, 8

# Steps of a linear recurrence from which 'associative_scan' is faster, with so
# many numbers a step or fewer, batch times features. Measured: 1 x 64.
_LONG = 65536
_FEW_NUMBERS = 64

# Steps up to which it is faster too, with so many numbers or fewer. Measured:
# 1 x 64 and 16 x 64, of 4 steps and of 16. Calls of 4 steps are bound by their
# launch: 'linear_scan' takes 11 to 27 % less, layers 13 % less to 14 % more.
_SHORT = 4
_NUMBERS_OF_SHORT = 1024


def slower_linear_kernel(rows: int, time: int, features: int) -> str:
  """Returns why `None` passes over a linear recurrence's kernel, or ''.

  Args:
    rows: of the batch; it, and the others, may be symbolic.
    time: the number of steps.
    features: F.
  """
  if not all(isinstance(size, int) for size in (rows, time, features)):
    return ''
  if time == 1:
    return 'a kernel gains nothing for a single step, as measured.'
  if time <= _SHORT and rows * features <= _NUMBERS_OF_SHORT:
    return (
        f"'associative_scan' is mostly faster than the kernel, as measured, up"
        f' to {_SHORT} steps of {_NUMBERS_OF_SHORT:,} numbers or fewer; these'
        f' are {time} of {rows * features}.'
    )
  if time >= _LONG and rows * features <= _FEW_NUMBERS:
    return (
        f"'associative_scan' is faster than the kernel, as measured, from"
        f' {_LONG:,} steps of {_FEW_NUMBERS} numbers or fewer; these are'
        f' {time:,} of {rows * features}.'
    )
  return ''


def parts_of_wavefront(time: int, recurrent_kernel: Any) -> int:
  """Returns in how many parts of time layers in depth run at the same time.

  Args:
    time: T.
    recurrent_kernel: R of a layer, [G', N, D, D], or its type.

  Raises:
    NotImplementedError: one layer after the other is faster, or it was not
      measured.
  """
  units = recurrent_kernel.shape[-1]
  wide = jnp.dtype(recurrent_kernel.dtype).itemsize > 2
  if time < _STEPS_OF_WAVEFRONT or units > _UNITS_OF_WAVEFRONT or wide:
    raise NotImplementedError(
        f'From {_STEPS_OF_WAVEFRONT} steps on layers run at the same time, in'
        f' 16 bits and with heads of up to {_UNITS_OF_WAVEFRONT} units, as'
        f' measured; these are {time} steps of {units} units in'
        f' {jnp.dtype(recurrent_kernel.dtype).name}.'
    )
  return _PARTS_OF_LONG if time >= _LONG_WAVEFRONT else _PARTS


def slower_kernel(
    cell: cell_lib.Cell, operands: call_lib.Operands, call: call_lib.Call
) -> str:
  """Returns why `None` passes over the kernels; '' where it does not.

  Args:
    cell: the equations.
    operands: of the recurrence on this device.
    call: its options.
  """
  kernel = operands.recurrent_kernel
  if kernel is None or jnp.dtype(kernel.dtype).itemsize != 2:
    return ''
  heads = kernel.shape[1] // (1 + call.both_directions)
  units = kernel.shape[-1]
  rows = operands.x.shape[1 if call.time_major else 0]
  most, reason = _ROWS, 'as measured'
  if units > _LARGE_UNITS and kernel.shape[0] >= _LARGE_GATES:
    most, reason = _ROWS_OF_LARGE, 'by counting'
  if heads > 1 or units < _UNITS or not isinstance(rows, int) or rows < most:
    return ''
  time = operands.x.shape[0 if call.time_major else 1]
  known = isinstance(time, int)
  if known and api.in_tiles(cell, (rows, time), kernel, call):
    return ''
  if auto_axes.may_be_split(operands):
    return ''  # A device may have few of the rows.
  return (
      f"'scan' is faster than the kernels, {reason}, from {most:,} rows of a"
      f' head with {units:,} units; these are {rows:,}.'
  )
