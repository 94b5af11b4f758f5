"""The derivative of a step by the carry before it, for all steps at once.

A step mixes features by its products with the recurrent kernel only; `update`
and `operand` are pointwise. So their derivatives are one number for each pair
of arrays and feature, found by `jax.jvp` of the cell's own equations, and the
kernel does the rest:

    d new_i / d carry_j = diag(Q_ij) + [j = 0] sum_g diag(P_ig) R_g

with Q by the carry and P by the recurrent gates. A diagonal kernel leaves S x S
numbers a feature, exactly. For others there is the choice between the matrices
of all heads and a quasi-Newton's diagonal, which takes diag(R_g) for R_g and
forms no matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import products
from rnnzoo.engines.scan import derivatives as scan_derivatives
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import maps as maps_lib

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates

# So many steps of a cell with a large linearisation run side by side: few, for
# their memory, and enough to keep a CPU busy.
_STEPS_OF_LARGE = 32


def of_steps(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    x_gates: Gates,
    h_gates: Gates,
    start: Carry,
    *,
    exact: bool,
    stop: bool = False,
) -> maps_lib.Maps:
  """Returns derivatives of the carries after steps by the carries before them.

  Args:
    cell: the equations.
    params: the cell's own parameters.
    kernels: R as `scan_steps.pack` returns it, in the dtype of the state.
    x_gates: input gates, each [T, B, F].
    h_gates: recurrent gates, each [T, B, F].
    start: the carries before the steps, each [T, B, F].
    exact: whether heads of several features have matrices. A diagonal kernel's
      derivatives are exact anyway.
    stop: `stop_recurrent_gradient`: nothing passes through the kernels, and the
      derivative is pointwise.
  """

  def maps(given):
    at = _Step(cell, params, *given)
    if stop or not kernels:
      return _pointwise(at, [])
    if kernels[0].shape[1] > 1 and exact:
      return _heads(at, kernels)
    return _pointwise(at, list(map(diagonal, kernels)))

  given = x_gates, h_gates, start
  at_once = steps_at_once(cell, params, x_gates, start)
  if at_once is None:
    return maps(given)
  body = lambda state, given: (state, maps(given))
  return scan_steps.scan_chunks(body, (), given, at_once, False)[1]


def steps_at_once(
    cell: cell_lib.Cell, params: cell_lib.Params, x_gates: Gates, carry: Carry
) -> int | None:
  """Returns how many steps to take side by side; None for all.

  A cell of many inner steps has arrays for each inner step meanwhile. Arguments
  are as in `of_steps`; of the carry, [..., B, F], only the types matter.
  """
  time = x_gates[0].shape[0]
  at: Any = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape[-2:], a.dtype),
      (tuple(x_gates), (carry[0],) * cell.recurrent_gates, tuple(carry)),
  )
  pullbacks, _ = jax.eval_shape(
      functools.partial(scan_derivatives.linearize_step, cell), params, *at
  )
  if not scan_derivatives.is_large(pullbacks, at):
    return None
  return scan_steps.divisor(time, _STEPS_OF_LARGE)


def held(
    maps: maps_lib.Maps, reset: Array | None, mask: Array | None
) -> maps_lib.Maps:
  """Returns the maps with 1 for masked steps, and 0 for steps that restart."""
  if mask is None and reset is None:
    return maps

  def one(x, identity, axes):
    widen = lambda flag: flag.reshape(*flag.shape, *(1,) * axes)
    if mask is not None:
      x = jnp.where(widen(mask), x, identity)
    if reset is not None:
      x = jnp.where(widen(reset), jnp.zeros_like(x), x)
    return x

  if isinstance(maps, maps_lib.Heads):
    size = maps.matrix.shape[-1]
    identity = jnp.eye(size, dtype=maps.matrix.dtype)
    return maps_lib.Heads(one(maps.matrix, identity, 3))
  rows = enumerate(maps.entries)
  return maps_lib.Pointwise(
      tuple(
          tuple(one(x, float(i == j), 1) for j, x in enumerate(row))
          for i, row in rows
      )
  )


def diagonal(packed: Array) -> Array:
  """Returns diag(R_g) for every gate, [G, F]."""
  heads, size, width = packed.shape
  blocks = packed.reshape(heads, size, width // size, size)
  diagonal = jnp.diagonal(blocks, axis1=1, axis2=3)  # [N, G, D]
  return jnp.swapaxes(diagonal, 0, 1).reshape(width // size, heads * size)


class _Step:
  """The pointwise parts of steps, to be pushed forward.

  Each method takes rows of tangents: a row has a number for each gate and each
  array of the carry, which moves all of that array. All rows are one operation,
  with a leading axis in the results.
  """

  def __init__(self, cell, params, x_gates, h_gates, start):
    self.cell, self.start, self.h_gates = cell, start, h_gates
    self._given = params, x_gates
    self.staged = isinstance(cell, cell_lib.TwoStageCell)

  def new(self, rows: Array, last: Array | None = None) -> Carry:
    """Returns the tangents of the carry after a step.

    Args:
      rows: [n, G + S], or [n, G + S, F].
      last: the last gate's tangents instead, [n, T, B, F].
    """

    def push(row, last):
      d_gates, d_carry = self._tangents(row)
      if last is not None:
        d_gates = (*d_gates[:-1], last)
      d_new = self._push(self.cell.update, self.h_gates, d_gates, d_carry)
      return tuple(
          d.astype(x.dtype) for d, x in zip(d_new, self.start, strict=True)
      )

    return jax.vmap(push)(rows, last)

  def operand(self, rows: Array) -> Array:
    """Returns the tangents of the second stage's operand.

    Args:
      rows: rows of gates, as `new` takes them; the last gate's has no effect.
    """

    def push(row):
      d_gates, d_carry = self._tangents(row)
      first = self.h_gates[:-1]
      return self._push(self.cell.operand, first, d_gates[:-1], d_carry)

    return jax.vmap(push)(rows)

  def unit_rows(self) -> Array:
    """Returns a row for each gate and each array, which moves alone."""
    count = len(self.h_gates) + len(self.start)
    rows = jnp.eye(count, dtype=self.start[0].dtype)
    return devices.like(rows, self.start[0])

  def _tangents(self, row):
    moves = [jnp.broadcast_to(x, self.start[0].shape) for x in row]
    gates = len(self.h_gates)
    return tuple(moves[:gates]), tuple(moves[gates:])

  def _push(self, equations, h_gates, d_gates, d_carry):
    at = (*self._given, h_gates, self.start)
    return autodiff.pushforward(equations, at, (None, None, d_gates, d_carry))[
        1
    ]


def _pointwise(at: _Step, factors: list[Array]) -> maps_lib.Pointwise:
  """Returns S x S numbers a feature.

  Args:
    at: the steps.
    factors: each stage's factors of its operand in each gate, [G, F]; none
      where nothing passes through the kernels.
  """
  gates = len(at.h_gates)
  rows = at.unit_rows()[gates:]
  last = None
  if factors:
    # h moves the gates as well: a number for each feature.
    rows = jnp.broadcast_to(rows[..., None], (*rows.shape, factors[0].shape[1]))
    rows = rows.at[0, : factors[0].shape[0]].set(factors[0])
  if len(factors) == 2:
    last = factors[1][0] * at.operand(rows)
  columns = at.new(rows, last)
  return maps_lib.Pointwise(tuple(tuple(column) for column in columns))


def _heads(at: _Step, kernels: tuple[Array, ...]) -> maps_lib.Heads:
  """Returns a matrix for each head."""
  count, gates = len(at.start), len(at.h_gates)
  heads, size, _ = kernels[0].shape
  by_head = lambda x: x.reshape(*x.shape[:-1], heads, size)
  identity = jnp.eye(size, dtype=at.start[0].dtype)

  def matrices(d, first):
    """Returns [S, ..., N, to, from], one for each array, from rows."""
    own = by_head(d[gates:])[..., None] * identity
    through = jnp.zeros_like(own[0])
    for g, matrix in enumerate(first):
      through += by_head(d[g])[..., None] * matrix
    return own.at[0].add(through)

  first = _matrices(kernels[0])
  rows = at.unit_rows()
  d_new = at.new(rows)
  blocks = [matrices(d, first) for d in d_new]
  if at.staged:
    (last,) = _matrices(kernels[1])
    through = last @ matrices(at.operand(rows), first)
    blocks = [
        block + by_head(d[gates - 1])[..., None] * through
        for block, d in zip(blocks, d_new, strict=True)
    ]
  joined = [
      jnp.concatenate([block[j] for j in range(count)], axis=-1)
      for block in blocks
  ]
  return maps_lib.Heads(jnp.concatenate(joined, axis=-2))


def _matrices(packed: Array) -> list[Array]:
  """Returns R_g for every gate, [N, to, from]."""
  gates = packed.shape[2] // packed.shape[1]
  return list(jnp.swapaxes(products.unpack(packed, gates), -1, -2))
