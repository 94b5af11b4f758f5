"""Facts about a pointwise function, found in its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import jaxpr_interpreter
from pallas_kernels.mosaic import pointwise


def used(fn: Callable[..., Any], *args) -> list[bool]:
  """Returns for each leaf of the arguments whether fn's value depends on it."""
  jaxpr = jax.make_jaxpr(pointwise.legalize(fn))(*args).jaxpr
  live = jaxpr_interpreter.variables(jaxpr.outvars)
  for eqn in reversed(jaxpr.eqns):
    if live.intersection(eqn.outvars):
      live |= jaxpr_interpreter.variables(eqn.invars)
  return [v in live for v in jaxpr.invars]


def value_numbers(fn: Callable[..., Any], *args) -> list[int]:
  """Returns a number for each leaf of fn's value; equal means equal.

  Two leaves have one number if they are the same operations of the same values,
  additions of zero aside.
  """
  # Shapes without a mesh would be brought to one that is there.
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    closed = jax.make_jaxpr(pointwise.legalize(fn))(*args)
  numbers: dict[Any, int] = {}
  zeros: set[int] = set()

  def number(key):
    return numbers.setdefault(key, len(numbers))

  def literal(value):
    found = number(('literal', str(value)))
    if jnp.ndim(value) == 0 and value == 0:
      zeros.add(found)
    return found

  def run(jaxpr, inputs):
    consts = [number(v) for v in jaxpr.constvars]
    return jaxpr_interpreter.interpret(jaxpr, consts, inputs, rule, literal)

  def rule(eqn, inputs):
    name, inner = eqn.primitive.name, eqn.params.get('jaxpr')
    if inner is not None:
      return run(inner.jaxpr, inputs)
    if name == 'add' and zeros.intersection(inputs):
      return [inputs[0] if inputs[1] in zeros else inputs[1]]
    key = name, str(sorted(eqn.params.items())), tuple(inputs)
    outs = [number((key, i)) for i in range(len(eqn.outvars))]
    if name == 'broadcast_in_dim' and inputs[0] in zeros:
      zeros.update(outs)
    return outs

  return run(closed.jaxpr, [number(v) for v in closed.jaxpr.invars])
