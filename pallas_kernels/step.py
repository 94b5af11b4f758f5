"""A cell's equations as kernels call them; its numbers are rows of an array.

Numbers of which a feature has one (the cell's parameters, a bias of the input
gates, a diagonal recurrent kernel) reach a kernel as rows of one array,
`theta`. A kernel adds the bias itself and sums its gradient in registers: that
spares a pass over the gates either way.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels.mosaic import cells

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
  """(theta, input gates) -> (A, b) of a linear cell, with b a tuple.

  Where the cell reads starts, they come as one array behind the input gates.
  """

  cell: Any
  rows: Rows

  def __call__(self, theta, row):
    params, bias, _ = self.rows.unpack(theta)
    gates = self.cell.input_gates
    inputs = _add(row[:gates], bias) + tuple(row[gates:])
    a, b = self.cell.coefficients(params, inputs)
    b = b if isinstance(b, tuple) else (b,)
    # One may be a number, or free of the input, a learned decay for instance.
    return jax.tree.map(lambda x: jnp.broadcast_to(x, row[0].shape), (a, b))


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


# A step of a recurrence with a matrix R, as both families of kernels plan it:
# arrays that it needs, gates that are sums, and gates that are kept.

# Elements of an array that stands for one of each thread.
_LANES = 128


def elements(count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns `count` types, each of one element a thread."""
  return (jax.ShapeDtypeStruct((_LANES,), jnp.float32),) * count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """Static facts of a kernel's steps.

  Attributes:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise, on tuples.
    operand: (theta, inputs, h_gates, carry) -> the factor of the last recurrent
      gate; None where that factor is h.
    params: rows of theta.
    gates: input gates.
    recurrent: recurrent gates.
    states: arrays of the carry.
    call: options of the run.
    flags: whether there are flags, which restart or hold the carry.
    x_dtype: dtype of the inputs.
    dtype: dtype of the products' factors; float32 becomes two bfloat16 parts.
    adjoint: whether the kernel runs the adjoint.
    save: whether the forward kernel returns the arrays that the adjoint reads.
    config: how the work is cut, or None before that is chosen.
  """

  update: Callable[..., Any]
  operand: Callable[..., Any] | None = None
  params: int
  gates: int
  recurrent: int
  states: int
  call: call_lib.Call
  flags: bool
  x_dtype: Any
  dtype: Any
  adjoint: bool = False
  save: bool = False
  config: Any = None

  @property
  def reverse(self) -> bool:
    """Whether the kernel's loop runs from the last time to the first."""
    return self.call.reverse != self.adjoint

  def accuracy(self, error: float) -> cells.Accuracy:
    """Returns the accuracy of pointwise functions.

    Args:
      error: absolute error that is allowed where h has 16 bits.
    """
    # Pallas's GPU backend is imported where it is known to work.
    from pallas_kernels.mosaic import instructions

    short = jnp.dtype(self.dtype).itemsize == 2
    return cells.Accuracy(error if short else 0.0, instructions.reciprocal)

  @functools.cached_property
  def needed(self) -> tuple[bool, ...]:
    """Which arrays of the carry a step needs besides R h."""
    if self.flags:
      return (True,) * self.states
    counts = self.params, self.gates, self.recurrent, self.states
    used = cells.used(self.update, *map(elements, counts))
    return tuple(used[-self.states :])

  @functools.cached_property
  def sums(self) -> tuple[int | None, ...]:
    """For each recurrent gate an input gate with an equal cotangent, or None.

    A gate that is a sum x + R h has one cotangent for both terms, which need
    not be written twice; and an adjoint needs only the sum.
    """

    def pull(theta, row, gates, start, d_new, d_u):
      _, f = jax.vjp(self.update, theta, row, gates, start)
      _, d_row, d_gates, _ = f(d_new)
      if self.operand is not None:
        _, f = jax.vjp(self.operand, theta, row, gates[:-1], start)
        more = f(d_u)
        d_row = tuple(map(jnp.add, d_row, more[1]))
        d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
      return d_row, d_gates

    counts = self.params, self.gates, self.recurrent, self.states, self.states
    (d_u,) = elements(1)
    numbers = cells.value_numbers(pull, *map(elements, counts), d_u)
    d_row, d_gates = numbers[: self.gates], numbers[self.gates :]
    taken: set[int] = set()
    same: list[int | None] = []
    for number in d_gates:
      found = [j for j, n in enumerate(d_row) if n == number and j not in taken]
      same.append(found[0] if found else None)
      taken.update(found[:1])
    return tuple(same)

  @property
  def shared(self) -> bool:
    """Whether the inputs and R h have equal cotangents."""
    return self.sums == tuple(range(self.gates))

  @property
  def alone(self) -> tuple[int, ...]:
    """The input gates that are in no sum."""
    return tuple(i for i in range(self.gates) if i not in self.sums)

  @property
  def apart(self) -> tuple[int, ...]:
    """The recurrent gates that are in no sum."""
    return tuple(j for j, i in enumerate(self.sums) if i is None)

  def kept(self, x: Sequence[Any], h_gates: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arrays of gates that the forward pass keeps, beside `alone`.

    Args:
      x: input gates.
      h_gates: recurrent gates.
    """
    return tuple(
        h if i is None else x[i] + h
        for i, h in zip(self.sums, h_gates, strict=True)
    )

  def update_of_kept(self, theta, alone, kept, start):
    """`update` of input gates that are in no sum, and of `kept`'s results.

    A gate that is a sum has all of it in x.
    """
    x = self.input_gates(alone, kept)
    h_gates = tuple(
        h if i is None else jnp.zeros_like(h)
        for i, h in zip(self.sums, kept, strict=True)
    )
    return self.update(theta, x, h_gates, start)

  def input_gates(
      self, alone: Sequence[Any], kept: Sequence[Any]
  ) -> tuple[Any, ...]:
    """Returns an array for each input gate: its own, or its sum.

    Args:
      alone: arrays of the input gates that are in no sum, or their cotangents.
      kept: arrays of the recurrent gates and sums, or their cotangents.
    """
    found = dict(zip(self.alone, alone, strict=True))
    for i, value in zip(self.sums, kept, strict=True):
      if i is not None:
        found[i] = value
    return tuple(found[i] for i in range(self.gates))
