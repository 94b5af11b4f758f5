"""Gates that a cell adds up: products start from what R h is added to.

Most cells read x + b + R h of a gate, and neither part for itself. A product
that starts from x + b then leaves nothing to be added: an update costs two
operations less an element. A gate that is read in another way, twice for
instance, has a product of its own as before.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core

from pallas_kernels.mosaic import jaxpr_interpreter

Array = jax.Array


class GateSums(NamedTuple):
  """A cell's update by sums.

  Attributes:
    starts: (theta, inputs) -> for each recurrent gate what R h is added to, or
      None.
    update: (theta, inputs, gates, carry) -> carry, where gates of which there
      is a start are sums.
  """

  starts: Callable[..., list[Array | None]]
  update: Callable[..., Any]


def find(update: Callable[..., Any], *args) -> GateSums | None:
  """Returns the update by sums, or None if it adds up no gate.

  Args:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise.
    *args: its arguments, or their types.
  """
  closed, shape = jax.make_jaxpr(update, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  theta, row, gates, _ = args
  first = len(jax.tree.leaves((theta, row)))
  given = jaxpr.invars[:first]
  own: list[Any] = jaxpr.invars[first:][: len(gates)]
  # Variables that theta and the inputs determine, and those that nothing does:
  # these are the same in all threads.
  known, constant = {*given}, {*jaxpr.constvars}
  uses: dict[Any, list[Any]] = {}
  for eqn in jaxpr.eqns:
    variables = jaxpr_interpreter.variables(eqn.invars)
    if variables <= constant:
      constant.update(eqn.outvars)
    elif variables <= known | constant:
      known.update(eqn.outvars)
    for variable in variables:
      uses.setdefault(variable, []).append(eqn)
  starts: list[Any] = []
  added: dict[Any, int] = {}
  for gate in own:
    starts.append(None)
    found = uses.get(gate, [])
    if len(found) != 1 or gate in jaxpr.outvars:
      continue
    (eqn,) = found
    if eqn.primitive.name != 'add':
      continue
    place = 0 if eqn.invars[0] is gate else 1
    other: Any = eqn.invars[1 - place]
    if isinstance(other, jex_core.Literal) or other not in known:
      continue
    # A scalar would have no element for each thread.
    if other.aval.shape == gate.aval.shape:
      starts[-1] = other
      added[eqn.outvars[0]] = place
  if not added:
    return None
  return GateSums(
      lambda theta, row: _starts(closed, given, starts, (theta, row)),
      lambda *args: _update(closed, added, shape, args),
  )


def _starts(closed, given, starts, args) -> list[Array | None]:
  live = {start for start in starts if start is not None}
  eqns: list[Any] = []
  for eqn in reversed(closed.jaxpr.eqns):
    if not live.isdisjoint(eqn.outvars):
      eqns.insert(0, eqn)
      live |= jaxpr_interpreter.variables(eqn.invars)
  environment = jaxpr_interpreter.Environment(
      jaxpr_interpreter.bind_in_place, lambda value: value
  )
  environment.bind(closed.jaxpr.constvars, closed.consts)
  environment.bind(given, jax.tree.leaves(args))
  environment.evaluate(eqns)
  return [None if s is None else environment.read([s])[0] for s in starts]


def _update(closed, added, shape, args) -> Any:
  def rule(eqn, inputs: Sequence[Any]):
    place = next((added[v] for v in eqn.outvars if v in added), None)
    if place is not None:
      return [inputs[place]]
    return jaxpr_interpreter.bind_in_place(eqn, inputs)

  leaves = jaxpr_interpreter.interpret(
      closed.jaxpr, closed.consts, jax.tree.leaves(args), rule
  )
  return jax.tree.unflatten(jax.tree.structure(shape), leaves)
