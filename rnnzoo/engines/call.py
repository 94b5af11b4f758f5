"""The parts of a run over time: operands, a projection, static options.

`Call`, the static options, is the record that the GPU kernels take too. The
three travel whole, from a layer or `unroll` to the path that runs.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo.engines import products

Array = jax.Array
Call = call_lib.Call


class Operands(NamedTuple):
  """The arrays of a run: it is differentiated by all but the two flags.

  B sequences of T steps; `[B, T, ...]` is `[T, B, ...]` where
  `Call.time_major` is set.

  Attributes:
    params: the cell's own parameters by name, each [..., F].
    weights: the projection's parameters.
    x: inputs of the projection, [B, T, ...].
    recurrent_kernel: R, [G, N, D, D], or None.
    carry: carry before the first step, each [B, F]; None for zeros.
    restart: carry before steps whose `reset` is true, [B, F]; None for zeros.
    reset: bool [B, T] or None; applies before the step.
    mask: bool [B, T] or None; where false, the carry is held.
  """

  params: cell_lib.Params
  weights: Any
  x: Array
  recurrent_kernel: Array | None
  carry: Any
  restart: Any
  reset: Array | None
  mask: Array | None

  def swapped(self) -> 'Operands':
    """Returns operands with batch and time of x and the flags swapped."""
    x, reset, mask = jax.tree.map(
        lambda a: jnp.swapaxes(a, 0, 1), (self.x, self.reset, self.mask)
    )
    return self._replace(x=x, reset=reset, mask=mask)


class KernelInputs(NamedTuple):
  """A projection as `pallas_kernels.recurrence` takes it.

  Attributes:
    x: input gates, in one array or several, or inputs that `input_kernel`
      multiplies.
    input_kernel: W, [G, I, F], or None.
    bias: [G, F] or None.
  """

  x: Array | tuple[Array, ...]
  input_kernel: Array | None
  bias: Array | None


class Projection(abc.ABC):
  """A hashable map (weights, x) -> input gates, each [..., F]."""

  @abc.abstractmethod
  def __call__(self, weights: Any, x: Array) -> cell_lib.Gates:
    """Returns the input gates."""

  def joint(self) -> 'Projection':
    """Returns this map with one product for all gates, where it can."""
    return self

  def without_bias(self, weights: Any) -> tuple[Any, Array | None]:
    """Returns weights of gates without their bias, and the bias [G, F]."""
    return weights, None

  @abc.abstractmethod
  def features(self, weights: Any, x: Array) -> int:
    """Returns F."""

  @abc.abstractmethod
  def for_kernels(self, weights: Any, x: Array) -> KernelInputs:
    """Returns the arrays that a GPU kernel reads in place of the gates."""


@dataclasses.dataclass(frozen=True)
class Dense(Projection):
  """W x + b, with weights (W [G, I, F], b [G, F] or None) and x [..., I].

  Attributes:
    is_joint: all gates have one product.
  """

  is_joint: bool = False

  def __call__(self, weights, x):
    with jax.named_scope('projection'):
      return products.project(weights, x, joint=self.is_joint)

  def joint(self):
    return Dense(is_joint=True)

  def without_bias(self, weights):
    kernel, bias = weights
    return (kernel, None), bias

  def features(self, weights, x):
    del x
    return weights[0].shape[-1]

  def for_kernels(self, weights, x):
    return KernelInputs(x, *weights)


@dataclasses.dataclass(frozen=True)
class Given(Projection):
  """Gates that are there already: x is [B, T, G, F], weights are ()."""

  def __call__(self, weights, x):
    del weights
    return tuple(x[:, :, g] for g in range(x.shape[2]))

  def features(self, weights, x):
    del weights
    return x.shape[-1]

  def for_kernels(self, weights, x):
    del weights
    return KernelInputs(x, None, None)


@dataclasses.dataclass(frozen=True)
class Biased(Given):
  """Gates without their bias: x is [B, T, G, F], weights are (b or None,)."""

  def __call__(self, weights, x):
    gates = super().__call__((), x)
    return products.add_bias(gates, *weights)

  def for_kernels(self, weights, x):
    return KernelInputs(x, None, *weights)


@dataclasses.dataclass(frozen=True)
class Coefficients:
  """(a, b) of a linear cell in place of its gates; weights (params, weights).

  Attributes:
    cell: the linear cell.
    project: the projection to its gates.
  """

  cell: cell_lib.LinearCell
  project: Projection

  def __call__(self, weights: Any, x: Array) -> cell_lib.Gates:
    params, weights = weights
    x_gates = self.project(weights, x)
    dtype = promotion.wide(x_gates[0].dtype)
    x_gates = tuple(gate.astype(dtype) for gate in x_gates)
    coefficients = self.cell.coefficients(params, x_gates)
    # One may be free of the input, a learned decay for instance.
    return tuple(jnp.broadcast_to(c, x_gates[0].shape) for c in coefficients)

  def without_bias(self, weights: Any) -> tuple[Any, None]:
    """Returns weights and None; coefficients have no bias."""
    return weights, None
