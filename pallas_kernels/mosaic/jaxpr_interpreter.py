"""Evaluates jaxprs with a rule for equations, in place of JAX's own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core as jex_core

# (equation, values of its inputs) -> values of its outputs.
Rule = Callable[[Any, list[Any]], Sequence[Any]]

# Primitives that hold a function: it is evaluated in place.
_CALLS = (
    'jit',
    'closed_call',
    'custom_jvp_call',
    'custom_vjp_call',
    'remat2',
    'checkpoint',
)


class Environment:
  """Values of a jaxpr's variables, filled in as equations are evaluated.

  Args:
    rule: for each equation.
    literal: maps a literal in the jaxpr to its value.
  """

  def __init__(self, rule: Rule, literal: Callable[[Any], Any]):
    self._rule, self._literal = rule, literal
    self._values: dict[Any, Any] = {}

  def bind(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
    self._values.update(zip(variables, values, strict=True))

  def read(self, atoms: Sequence[Any]) -> list[Any]:
    return [
        self._literal(atom.val)
        if isinstance(atom, jex_core.Literal)
        else self._values[atom]
        for atom in atoms
    ]

  def evaluate(self, eqns: Iterable[Any]) -> None:
    for eqn in eqns:
      self.bind(eqn.outvars, self._rule(eqn, self.read(eqn.invars)))


def interpret(
    jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Rule,
    literal: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
  """Returns the results of a jaxpr; arguments as for `Environment`.

  Args:
    jaxpr: an open jaxpr.
    consts: values of its constants.
    args: values of its arguments.
    rule: for each equation.
    literal: maps a literal in the jaxpr to its value.
  """
  environment = Environment(rule, literal)
  environment.bind(jaxpr.constvars, consts)
  environment.bind(jaxpr.invars, args)
  environment.evaluate(jaxpr.eqns)
  return environment.read(jaxpr.outvars)


def bind(eqn, inputs: Sequence[Any]) -> list[Any]:
  """Rule of a primitive as JAX has it."""
  outputs = eqn.primitive.bind(*inputs, **eqn.params)
  return outputs if eqn.primitive.multiple_results else [outputs]


def called(eqn) -> tuple[Any, Sequence[Any]] | None:
  """Returns jaxpr and constants of a call, None of any other equation."""
  inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
  if inner is None or eqn.primitive.name not in _CALLS:
    return None
  return getattr(inner, 'jaxpr', inner), getattr(inner, 'consts', ())


def bind_in_place(eqn, inputs: Sequence[Any]) -> Sequence[Any]:
  """As `bind`; calls are evaluated in place, without rules of derivatives."""
  function = called(eqn)
  if function is not None:
    return interpret(*function, inputs, bind_in_place)
  return bind(eqn, inputs)


def variables(atoms: Iterable[Any]) -> set[Any]:
  """Returns the atoms that are no literals."""
  return {v for v in atoms if not isinstance(v, jex_core.Literal)}
