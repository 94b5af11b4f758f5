"""The contract between a cell's equations and the engines that unroll them.

A recurrent cell holds the equations of one step, and nothing else:

    carry' = update(params, x_gates, h_gates, carry)

`update` is pointwise in batch and feature: it never mixes two batch elements
or two features. Everything that does mix them is data which the engines own:

  x_gates  from the input:  W x_t + b, one array for each input gate;
  h_gates  from the memory: R h_{t-1}, one array for each recurrent gate.

Because the products are data, one definition of a cell runs in three ways (a
`lax.scan`, an associative scan, a GPU kernel), every derivative is derived from
`update`, and no engine knows a cell by name.

Dimensions, here and in the engines:

  B  batch        T  time         F  features
  G  gates        N  heads        D  features of one head, F = N D

The recurrent kernel is `[G, N, D, D]`, indexed [gate, head, from, to]: dense
for N = 1, block-diagonal for N > 1 and diagonal for D = 1.

To add a cell, write one file with a frozen dataclass derived from one of the
three classes below and a layer derived from `rnnzoo.RecurrentLayer`, and
name the layer in `rnnzoo/__init__.py`. docs/own_cell.md has an example.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Mapping
import functools
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
from jax import export
from jax import tree_util

from pallas_kernels import linear_maps

Array = jax.Array

# One array [..., F] for each gate, in the order that the cell documents.
Gates = tuple[Array, ...]

# One array [..., F] for each of the cell's `carry_names`.
Carry = tuple[Array, ...]

# A cell's own small parameters by name, each [..., F]; often none.
Params = Mapping[str, Any]


class Cell(abc.ABC):
  """Equations of one recurrent cell, pointwise in batch and feature.

  Subclasses are frozen dataclasses, so that a cell can be the static argument
  of a compiled function: two equal cells share one compilation.

  Attributes:
    input_gates: number of arrays in `x_gates`.
    recurrent_gates: number of arrays in `h_gates`; 0 where the gates do not see
      the memory.
    carry_names: names of the arrays passed from step to step. The first is h,
      the output, which the recurrent kernel multiplies.
    param_names: the names in `params`, the cell's own parameters.
    carry_type: a NamedTuple with `carry_names` as fields, which type checkers
      and editors then know; None for one made of `carry_names`.
  """

  input_gates: ClassVar[int]
  recurrent_gates: ClassVar[int]
  carry_names: ClassVar[tuple[str, ...]]
  param_names: ClassVar[tuple[str, ...]] = ()
  carry_type: ClassVar[type[Any] | None] = None

  @abc.abstractmethod
  def update(
      self, params: Params, x_gates: Gates, h_gates: Gates, carry: Carry
  ) -> Carry:
    """Returns the carry after one step.

    Args:
      params: the cell's own parameters, each broadcast against [..., F].
      x_gates: `input_gates` arrays [..., F].
      h_gates: `recurrent_gates` arrays [..., F].
      carry: arrays [..., F], one for each of `carry_names`.
    """

  def guess(
      self,
      params: Params,
      x_gates: Gates,
      h_gates: Gates,
      carry: Carry,
      diagonal: Array | None,
      solve: Callable[..., tuple[Array, Array]],
  ) -> Carry | None:
    """Returns carries of all steps to begin Newton's method with.

    A cell need not have it. It helps where one step from the initial carry is
    far from the trajectory: with gates that remember, or with a relu.

    Args:
      params: the cell's own parameters, each [..., F].
      x_gates: input gates of all steps, each [T, B, F].
      h_gates: gates of an earlier guess, at first of zeros, each [T, B, F].
      carry: carry before all steps, by that guess, each [T, B, F].
      diagonal: the recurrent kernel, [G, F], where it is diagonal; else None.
      solve: (start, a, b, low, high) -> s before all steps, and after them, for
        s' = clip(a s + b, low, high); `start` maps a carry to the s that it
        begins with. The bounds may be left out.
    """
    del params, x_gates, h_gates, carry, diagonal, solve
    return None

  @property
  def has_exact_guess(self) -> bool:
    """Whether `guess` is the trajectory itself where R is diagonal.

    Then it is one recurrence, of which `h_gates` and `carry` are no part.
    """
    return False


class TwoStageCell(Cell):
  """A cell whose last recurrent gate multiplies `operand` instead of h.

  One step then holds two dependent products: the gates of the first stage make
  the operand, and the operand's product completes `h_gates` for `update`.
  """

  @abc.abstractmethod
  def operand(
      self, params: Params, x_gates: Gates, h_gates: Gates, carry: Carry
  ) -> Array:
    """Returns the factor of the last recurrent gate's product, [..., F].

    Args:
      params: the cell's own parameters, each [..., F].
      x_gates: input gates, each [..., F].
      h_gates: the first `recurrent_gates - 1` recurrent gates.
      carry: the carry before the step, each [..., F].
    """


class LinearCell(Cell):
  """A cell that is affine in its memory: h' = A h + b, with (A, b) free of h.

  Such a cell has no recurrent gates, and time can be computed in parallel. Its
  output is the memory h itself: a readout such as o * tanh(h) belongs in a
  layer above. `update` follows from `coefficients`: cells leave it as it is.

  h is one array, or, with two `carry_names`, two numbers a feature: the parts
  of a complex number, or a position and its velocity. A is then a complex
  number (re, im), or a matrix ((p, q), (r, s)); b is a pair.

  Where A does not depend on the input gates, it may have the shape of the
  parameters, [F]: then no path stores it for every step.

  Attributes:
    reads_starts: whether `x_gates` has one array more, [..., 1], behind the
      input gates: 1 in steps that start a sequence (a reset, or a first step
      without a given carry), else 0.
  """

  recurrent_gates = 0
  carry_names: ClassVar[tuple[str, ...]] = ('h',)
  reads_starts: ClassVar[bool] = False

  @abc.abstractmethod
  def coefficients(self, params: Params, x_gates: Gates) -> tuple[Any, Any]:
    """Returns (a, b): arrays [..., F], or with two carries a pair each."""

  def update(
      self, params: Params, x_gates: Gates, h_gates: Gates, carry: Carry
  ) -> Carry:
    del h_gates
    a, b = self.coefficients(params, x_gates)
    b = b if isinstance(b, tuple) else (b,)
    return linear_maps.add(linear_maps.times(a, carry), b)


# Carries that say their order: named tuples, one class for each cell.
#
# Engines pass plain tuples. A layer gives names to the carries that it makes,
# and keeps the type of carries that it is given, so that a loop of the user's,
# in `lax.scan` for instance, has one type of carry before and after a step.


CarryT = TypeVar('CarryT', bound=tuple[jax.Array, ...])


class HiddenCarry(NamedTuple):
  """The carry of a cell whose memory is h alone, such as a GRU.

  Attributes:
    h: the output of the last step, [..., features].
  """

  h: jax.Array


def of(cell: Any) -> Any:
  """Returns the class of a cell's carries.

  Args:
    cell: an `rnnzoo.Cell`; its `carry_type`, or a class made of `carry_names`.
  """
  if cell.carry_type is not None:
    return cell.carry_type
  if cell.carry_names == HiddenCarry._fields:
    return HiddenCarry
  name = type(cell).__name__.removesuffix('Cell') + 'Carry'
  return _made(name, cell.carry_names)


def like(given: CarryT, carry: Iterable[jax.Array]) -> CarryT:
  """Returns a carry with the type of another one; for a list, a tuple."""
  make: Any = getattr(type(given), '_make', tuple)
  return make(carry)


def register(carry_type: type[Any], name: str | None = None) -> None:
  """Makes a class known to JAX: a pytree with numbers as keys, as of a tuple.

  By names, which a named tuple has on its own, paths in pytrees would change,
  and `nnx.tabulate` has no place for them.

  Args:
    carry_type: a named tuple.
    name: name in programs of `jax.export`; None for the class's name.
  """
  keyed = lambda carry: (
      [(tree_util.SequenceKey(i), c) for i, c in enumerate(carry)],
      None,
  )
  tree_util.register_pytree_with_keys(
      carry_type,
      keyed,
      lambda _, arrays: tuple.__new__(carry_type, arrays),
      lambda carry: (tuple(carry), None),
  )
  export.register_pytree_node_serialization(
      carry_type,
      serialized_name=f'rnnzoo.{name or carry_type.__name__}',
      serialize_auxdata=lambda _: b'',
      deserialize_auxdata=lambda _: None,
  )


@functools.cache
def _made(name: str, fields: tuple[str, ...]) -> Any:
  """Returns the class of a cell that has none of its own.

  Args:
    name: name of the class.
    fields: `Cell.carry_names`; one that is no name in Python is a number.
  """
  named: Any = collections.namedtuple  # Not with names that vary, says mypy.
  base = named(name, fields, rename=True)
  restore = lambda self: (_restored, (name, fields, tuple(self)))
  made = type(
      name,
      (base,),
      {
          '__slots__': (),
          '__module__': __name__,
          '__doc__': f'A carry: {", ".join(fields)}.',
          '__reduce__': restore,
      },
  )
  register(made, f'{name}({",".join(fields)})')
  return made


def _restored(name: str, fields: tuple[str, ...], carry: Any) -> Any:
  """Returns a carry that was pickled."""
  return _made(name, fields)._make(carry)


register(HiddenCarry)
