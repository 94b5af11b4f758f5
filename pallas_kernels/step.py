"""A cell's equations as kernels call them; its numbers are rows of an array.

Numbers of which a feature has one (the cell's parameters, a bias of the input
gates, a diagonal recurrent kernel) reach a kernel as rows of one array,
`theta`. A kernel adds the bias itself and sums its gradient in registers: that
spares a pass over the gates either way.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Rows:
  """The meaning of the rows of theta [rows, F].

  Attributes:
    params: names and leading axes of the cell's own parameters.
    bias: number of input gates that have a bias.
    recurrent: number of recurrent gates.
    features: F.
  """

  params: tuple[tuple[str, tuple[int, ...]], ...]
  bias: int
  recurrent: int
  features: int

  @classmethod
  def of(cls, params, bias, recurrent_kernel, features):
    return cls(
        tuple((k, tuple(v.shape[:-1])) for k, v in sorted(params.items())),
        0 if bias is None else bias.shape[0],
        0 if recurrent_kernel is None else recurrent_kernel.shape[0],
        features,
    )

  @property
  def count(self) -> int:
    own = sum(math.prod(shape) for _, shape in self.params)
    return own + self.bias + self.recurrent

  def pack(self, params, bias, recurrent_kernel) -> Array:
    """Returns theta, float32 [rows, F]; one row of zeros if there are none."""
    parts = [
        jnp.broadcast_to(params[name], (*shape, self.features)).reshape(
            -1, self.features
        )
        for name, shape in self.params
    ]
    if self.bias:
      parts.append(bias)
    if self.recurrent:
      parts.append(recurrent_kernel[:, :, 0, 0])
    if not parts:
      parts.append(jnp.zeros((1, self.features)))
    return jnp.concatenate([part.astype(jnp.float32) for part in parts])

  def unpack(self, theta: Sequence[Array]):
    """Returns params, bias and recurrent weights of one feature.

    A parameter with leading axes becomes a nested tuple, which indexes and
    iterates like it.
    """
    rest = iter(theta)

    def nest(shape):
      if not shape:
        return next(rest)
      return tuple(nest(shape[1:]) for _ in range(shape[0]))

    params = {name: nest(shape) for name, shape in self.params}
    return params, nest((self.bias,)), nest((self.recurrent,))


def _add(row: Sequence[Array], bias: Sequence[Array]) -> tuple[Array, ...]:
  if not bias:
    return tuple(row)
  return tuple(x + b for x, b in zip(row, bias, strict=True))


@dataclasses.dataclass(frozen=True)
class Coefficients:
  """(theta, input gates) -> (a, b) of a linear cell."""

  cell: Any
  rows: Rows

  def __call__(self, theta, row):
    params, bias, _ = self.rows.unpack(theta)
    a, b = self.cell.coefficients(params, _add(row, bias))
    # One may be free of the input, a learned decay for instance.
    return tuple(jnp.broadcast_to(x, row[0].shape) for x in (a, b))


@dataclasses.dataclass(frozen=True)
class Update:
  """(theta, input gates, carry) -> carry of a cell with a diagonal R."""

  cell: Any
  rows: Rows

  def __call__(self, theta, row, carry):
    params, bias, weights = self.rows.unpack(theta)
    h_gates = tuple(w * carry[0] for w in weights)
    new = self.cell.update(params, _add(row, bias), h_gates, carry)
    return tuple(x.astype(jnp.float32) for x in new)


@dataclasses.dataclass(frozen=True)
class Gated:
  """(theta, input gates, h_gates, carry) -> result of a cell's method."""

  method: str
  cell: Any
  rows: Rows

  def __call__(self, theta, row, h_gates, carry):
    params, bias, _ = self.rows.unpack(theta)
    method = getattr(self.cell, self.method)
    new = method(params, _add(row, bias), h_gates, carry)
    return jax.tree.map(lambda x: x.astype(jnp.float32), new)
