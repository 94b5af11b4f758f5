"""A linear cell over time that is sharded over devices.

Each device projects its own steps and runs them by the path that it would take
alone, from the h that `time_parts.py` finds.
"""

import jax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import associative
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import kernel_parts
from rnnzoo.engines import path_choice
from rnnzoo.engines import selection
from rnnzoo.engines import time_parts

Carry = cell_lib.Carry


def run(
    cell: cell_lib.LinearCell,
    projection: call_lib.Projection,
    operands: call_lib.Operands,
    call: call_lib.Call,
    implementation: selection.Implementation,
    over: time_parts.Names,
) -> tuple[Carry, Carry]:
  """Runs a linear cell, of whose steps this device has a part.

  Args:
    cell: the equations.
    projection: from `operands.x` to the input gates.
    operands: the arrays; x and the flags are this device's steps, and the carry
      is before the first of all steps. Carry and restart are arrays.
    call: static options.
    implementation: as for `rnnzoo.unroll`.
    over: the mesh axes that time is over, major to minor.

  Returns:
    The final carry, each [B, F], which is the same on all devices, and h after
    this device's steps, [B, T, F], or [T, B, F] if `call.time_major`.
  """
  shape = operands.x.shape
  swap = lambda x: x if call.time_major else jnp.swapaxes(x, 0, 1)
  x, reset, mask = jax.tree.map(
      swap, (operands.x, operands.reset, operands.mask)
  )
  if reset is not None and call.reverse:
    reset = time_parts.boundary(reset, 0, over)
  operands = operands._replace(x=x, reset=reset, mask=mask)

  choice = path_choice.Run(
      names=selection.names(implementation, linear=True),
      paths=(_scan, _associative_scan, _pallas),
      static=(cell, projection, call.reverse, over),
      label=type(cell).__name__,
  )
  h = choice.take(operands, shape)
  last = h[0] if call.reverse else h[-1]
  return (time_parts.last_carry(last, call.reverse, over),), (swap(h),)


def _scan(*arguments, **options):
  return _by(associative.step_scan, *arguments, **options)


def _associative_scan(*arguments, **options):
  return _by(associative.compose_scan, *arguments, **options)


def _pallas(cell, projection, reverse, over, operands, options=None):
  del options  # Those of other recurrences.
  # Where the caller's arrays are batch-major, XLA removes these transposes.
  swap = lambda x: jnp.swapaxes(x, 0, 1)
  a, b = map(swap, associative.coefficients(cell, projection, operands))
  h0 = operands.carry[0]
  return swap(kernel_parts.linear_scan(a, b, h0, None, reverse, over))


def _by(solve, cell, projection, reverse, over, operands, options=None):
  del options  # Those of other recurrences.
  return associative.unroll(cell, projection, operands, reverse, solve, over)
