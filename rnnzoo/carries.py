"""Carries that say their order: named tuples, one class for each cell.

Engines pass plain tuples. A layer gives the carries that it makes names, and
those that it is given keep their type, so that a loop of the user's, by
`lax.scan` for instance, has one type of carry before and after a step.
"""

import collections
from collections.abc import Iterable
import functools
from typing import Any, NamedTuple, TypeVar

import jax
from jax import export
from jax import tree_util

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
  """Returns a carry with the type of another one.

  Args:
    given: a named tuple, a tuple or a list; a list's carry is a tuple.
    carry: the arrays.
  """
  make: Any = getattr(type(given), '_make', tuple)
  return make(carry)


def register(carry_type: type[Any], name: str | None = None) -> None:
  """Makes a class known to JAX: a pytree with numbers as keys, as of a tuple.

  By names, which a named tuple has on its own, paths in pytrees would change,
  and `nnx.tabulate` has no place for them.

  Args:
    carry_type: a named tuple.
    name: in programs of `jax.export`; None for that of the class.
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
    name: of the class.
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
