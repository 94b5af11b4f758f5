"""Pointwise functions and their derivatives as code that Mosaic GPU lowers.

A cell's `update` is plain `jnp`, written for any device. Inside a kernel body
it meets a compiler that knows fewer primitives, and some of those it knows are
slow on a GPU. The functions here trace a function, replace these primitives
(`approximations`) and leave the others alone:

* `legalize(fn)` is fn, for calls inside a kernel body;
* `map_rows` is the same for several steps at once;
* `in_turn` evaluates urgent results first.

fn may itself be a `jax.vjp`: the derivative is derived from the one definition,
so no cell has one of its own. `pull` applies the pullback that it returned.

A primitive that is neither replaced nor known to lower raises
`NotImplementedError` while tracing, early enough to choose another path.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import approximations
from pallas_kernels.mosaic import jaxpr_interpreter

Array = jax.Array
Accuracy = approximations.Accuracy


def legalize(
    fn: Callable[..., Any], accuracy: Accuracy = approximations.PRECISE
) -> Callable[..., Any]:
  """Returns `fn` for calls inside a kernel body.

  Args:
    fn: a pointwise function of pytrees of arrays.
    accuracy: of the special functions in it.

  Raises:
    NotImplementedError: when called, where fn has a primitive without a rule.
  """

  def legal_fn(*args):
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    rule = _legal_rule(approximations.Approximations(accuracy))
    leaves = jaxpr_interpreter.interpret(
        closed.jaxpr, closed.consts, jax.tree.leaves(args), rule
    )
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)

  return legal_fn


def pull(
    pullback, cotangent, accuracy: Accuracy = approximations.PRECISE
) -> Any:
  """Applies the pullback of a `jax.vjp` under `legalize` or `map_rows`."""
  return legalize(lambda f, ct: f(ct), accuracy)(pullback, cotangent)


def _legal_rule(special: approximations.Approximations):
  """Returns the rule of equations that replaces primitives."""

  def rule(eqn, inputs):
    name = eqn.primitive.name
    if name in approximations.RULES:
      params = {'y': eqn.params['y']} if name == 'integer_pow' else {}
      return [approximations.RULES[name](special, *inputs, **params)]
    if name in _REPLACED:
      return [_REPLACED[name](*inputs, **eqn.params)]
    function = jaxpr_interpreter.called(eqn)
    if function is not None:
      return jaxpr_interpreter.interpret(*function, inputs, rule)
    if name not in _NATIVE:
      known = sorted({*_NATIVE, *_REPLACED, *approximations.RULES})
      raise NotImplementedError(
          f'GPU kernels have no rule for the primitive {name!r} in a pointwise'
          f' function. They have rules for {known}.'
      )
    outputs = jaxpr_interpreter.bind(eqn, inputs)
    if name == 'neg':
      special.note_negation(*inputs, *outputs)
    return outputs

  return rule


def map_rows(
    fn: Callable[[Any, Any], Any],
    shared: Any,
    rows: Sequence[Any],
    accuracy: Accuracy = approximations.PRECISE,
) -> list[Any]:
  """Returns [fn(shared, row) for row in rows], for calls in a kernel body.

  Each operation is done for all rows before the next one. A warp waits long for
  the result of a special function; this way it has other rows to go on with,
  and the compiler would not find that order by itself.

  Args:
    fn: a pointwise function of pytrees of arrays.
    shared: its first argument.
    rows: second arguments, all of one structure.
    accuracy: of the special functions in it.
  """
  legal = legalize(fn, accuracy)
  closed, shape = jax.make_jaxpr(legal, return_shape=True)(shared, rows[0])
  columns = [jax.tree.leaves((shared, row)) for row in rows]
  args = [list(column) for column in zip(*columns, strict=True)]
  outputs = _run_rows(closed.jaxpr, closed.consts, args, len(rows))
  structure = jax.tree.structure(shape)
  return [
      jax.tree.unflatten(structure, [column[i] for column in outputs])
      for i in range(len(rows))
  ]


def _run_rows(jaxpr, consts, args, count: int) -> list[list[Any]]:
  """Evaluates a jaxpr of native primitives for several rows at once."""

  def rule(eqn, inputs):
    inner = eqn.params.get('jaxpr')
    if inner is not None:
      return _run_rows(inner.jaxpr, inner.consts, inputs, count)
    rows = zip(*inputs, strict=True)
    found = [eqn.primitive.bind(*row, **eqn.params) for row in rows]
    if eqn.primitive.multiple_results:
      return [list(column) for column in zip(*found, strict=True)]
    return [found]

  columns = [[const] * count for const in consts]
  literal = lambda value: [value] * count
  return jaxpr_interpreter.interpret(jaxpr, columns, args, rule, literal)


def in_turn(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], first: int
) -> Callable[..., tuple[list[Any], Callable[[], list[Any]]]]:
  """Evaluates a function as early as possible, and its urgent results first.

  Args:
    fn: a function made of native primitives, as `legalize` returns it.
      Operations that do not depend on its arguments are evaluated at once.
    avals: shapes and dtypes of its arguments.
    first: number of its results that are urgent.

  Returns:
    A function of the arguments. It returns the urgent results, and a function
    that evaluates the remaining operations and returns the other results.
  """
  closed = jax.make_jaxpr(fn)(*avals)
  jaxpr = closed.jaxpr

  def rule(eqn, inputs):
    inner = eqn.params.get('jaxpr')
    if inner is None:
      return jaxpr_interpreter.bind(eqn, inputs)
    columns = [[x] for x in inputs]
    return [x for (x,) in _run_rows(inner.jaxpr, inner.consts, columns, 1)]

  environment = jaxpr_interpreter.Environment(rule, lambda value: value)
  environment.bind(jaxpr.constvars, closed.consts)
  unknown = set(jaxpr.invars)
  waiting = []
  for eqn in jaxpr.eqns:
    if unknown.isdisjoint(jaxpr_interpreter.variables(eqn.invars)):
      environment.evaluate([eqn])
    else:
      unknown.update(eqn.outvars)
      waiting.append(eqn)

  live = jaxpr_interpreter.variables(jaxpr.outvars[:first])
  now: list[Any] = []
  later: list[Any] = []
  for eqn in reversed(waiting):
    needed = not live.isdisjoint(eqn.outvars)
    (now if needed else later).insert(0, eqn)
    if needed:
      live |= jaxpr_interpreter.variables(eqn.invars)

  def apply(*args):
    environment.bind(jaxpr.invars, args)
    environment.evaluate(now)

    def rest():
      environment.evaluate(later)
      return environment.read(jaxpr.outvars[first:])

    return environment.read(jaxpr.outvars[:first]), rest

  return apply


def _reshape(x, *, new_sizes, **_):
  if tuple(new_sizes) != jnp.shape(x):
    raise NotImplementedError(
        'GPU kernels cannot reshape in a pointwise function, from'
        f' {jnp.shape(x)} to {tuple(new_sizes)}.'
    )
  return x


# Primitives that `jax.vjp` and `jax.nn` emit and Mosaic GPU does not lower, or
# not well.
_REPLACED: dict[str, Callable[..., Any]] = {
    'add_any': lambda x, y: x + y,
    'copy': lambda x: x,
    'expm1': approximations.expm1,
    'one_minus_square': lambda x: (1 + x) * (1 - x),
    # Autodiff inserts these two, which change nothing, where there is a mesh.
    'reshape': _reshape,
    'reshard': lambda x, **_: x,
    'square': lambda x: x * x,
    'stop_gradient': lambda x: x,
}

# Primitives that Mosaic GPU lowers on registers of any layout.
_NATIVE = frozenset(
    (
        'abs',
        'add',
        'and',
        'broadcast_in_dim',
        'clamp',
        'convert_element_type',
        'cos',
        'eq',
        'exp2',
        'ge',
        'gt',
        'le',
        'log',
        'lt',
        'max',
        'min',
        'mul',
        'ne',
        'neg',
        'not',
        'or',
        'rsqrt',
        'select_n',
        'sign',
        'sin',
        'sqrt',
        'sub',
        'xor',
    )
)
