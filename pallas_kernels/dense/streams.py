"""Trees of the arrays that a kernel reads and writes in every step.

A leaf is a `config.Stream`, the type of an array, a reference to it, or a
thread's value of one step; the trees keep these in one order.
"""

from typing import Any, NamedTuple


class Streams(NamedTuple):
  """The streams of a kernel, in two trees."""

  ins: Any
  outs: Any


class ForwardInputs(NamedTuple):
  """Streams that the forward kernel reads, or their references."""

  x: Any
  flags: Any


class ForwardOutputs(NamedTuple):
  """Streams that the forward kernel writes, their references or values.

  Attributes:
    carries: the first arrays of the carry after each step.
    starts: the carry that each step starts from; h first, [N, B, T, 1, D].
    operand: the factor of the second product, [N, B, T, 1, D], or None.
  """

  carries: tuple[Any, ...]
  starts: tuple[Any, ...]
  operand: Any


class AdjointInputs(NamedTuple):
  """Streams that the adjoint reads, or their references."""

  x: Any
  h_gates: tuple[Any, ...]
  starts: tuple[Any, ...]
  d_carries: tuple[Any, ...]
  flags: Any


class AdjointOutputs(NamedTuple):
  """Streams that the adjoint writes, or their references.

  Attributes:
    d_x: cotangents of the inputs.
    d_gates: cotangents of the recurrent gates, one stream for each product;
      empty where they equal `d_x`.
  """

  d_x: Any
  d_gates: tuple[Any, ...]
