"""Linear and diagonal recurrences as one differentiable operation.

`run` brings arrays into the form that kernels take and picks the operation:
`projected_op` where one kernel multiplies by W and scans, else `unprojected_op`
on the projected inputs.
"""

import dataclasses

import jax

from pallas_kernels import projection
from pallas_kernels import sharding
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import projected_op
from pallas_kernels.streaming import recurrence
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import tuning
from pallas_kernels.streaming import unprojected_op

Array = jax.Array
Recurrence = recurrence.Recurrence
Inputs = tuple[Array | projection.Product, ...]


def run(
    static: Recurrence,
    theta: Array,
    arrays: tuple[Array, ...],
    kernel: Array | None,
    carry: Array | None,
    restart: Array | None,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence; differentiable in all its floating-point operands.

  Args:
    static: the static arguments.
    theta: per-feature parameters, float32 [rows, F].
    arrays: inputs, [B, T, F] or [B, T, g, F]; with W the one array that it
      multiplies, [B, T, I].
    kernel: W, [G, I, F], or None.
    carry: float32 [S, B, F]; None for zeros, if linear.
    restart: float32 [S, B, F]; None for zeros, if linear.
    reset: bool [B, T] or None, in the order of the loop.
    mask: bool [B, T] or None.

  Returns:
    The final carry, float32 [S, B, F], and the first `outputs` arrays of the
    carry after every step, each [B, T, F].
  """
  _, _, features = static.shape
  # Rows and a carry of zeros that were made here vary over no axis of a mesh.
  operands = theta, arrays, kernel, carry, restart, reset, mask
  operands = sharding.alike(operands)
  theta, arrays, kernel, carry, restart, reset, mask = operands
  flags = step_flags.pack(reset, mask)
  if kernel is not None:
    (x,) = arrays
    if _multiplies(static, x, kernel):
      theta, carry, restart = _whole_tiles(features, (theta, carry, restart))
      last, h = projected_op.run(
          static, theta, x, kernel, carry, restart, flags
      )
      return last[..., :features], (h,)
    product = projection.Product(kernel, x)
    keep = static.call.keep_gates
    inputs: Inputs = (product.form() if keep else product,)
  else:
    inputs = arrays
  aligned = static.aligned(jax.eval_shape(projection.form, inputs))
  inputs = tuple(_pad_inputs(gates, aligned) for gates in inputs)
  padded = dataclasses.replace(static, shape=(*static.shape[:2], aligned))
  theta, carry, restart = _whole_tiles(aligned, (theta, carry, restart))
  last, carries = unprojected_op.run(
      padded, theta, inputs, carry, restart, flags
  )
  cut = lambda x: x[..., :features]
  if aligned != features:
    carries = tuple(map(cut, carries))
  return cut(last), carries


def _multiplies(static: Recurrence, x: Array, kernel: Array) -> bool:
  """Whether one kernel can multiply by W and scan, and is faster than two."""
  gates, depth, features = kernel.shape
  gate_streams = jax.ShapeDtypeStruct((*x.shape[:2], gates, features), x.dtype)
  return (
      static.linear
      and static.call.out_dtype == x.dtype
      and x.dtype.itemsize == 2
      and depth > 0
      and static.aligned((gate_streams,)) == features
      and tuning.projected(static.layout, kernel.shape, static.target)
  )


def _pad_inputs(
    gates: Array | projection.Product, size: int
) -> Array | projection.Product:
  """Pads the features of input gates."""
  if isinstance(gates, projection.Product):
    return dataclasses.replace(gates, size=size)
  return streams.pad_features(gates, size)


def _whole_tiles(features: int, small):
  """Pads small operands to whole tiles of features."""
  padded = streams.round_up(features, streams.LANES)
  return jax.tree.map(lambda x: streams.pad_features(x, padded), small)
