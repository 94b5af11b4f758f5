"""Evaluates jaxprs with a rule for equations, in place of JAX's own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp

from pallas_kernels.mosaic import approximations

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
    rule: evaluates an equation.
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
  """Returns the results of a jaxpr; arguments as in `Environment`.

  Args:
    jaxpr: an open jaxpr.
    consts: values of its constants.
    args: values of its arguments.
    rule: evaluates an equation.
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


# Pointwise functions and their derivatives as code that Mosaic GPU lowers.
#
# A cell's `update` is plain `jnp`, written for any device. Inside a kernel body
# it meets a compiler that knows fewer primitives, and some that it knows
# are slow on a GPU. The functions here trace a function, replace these
# primitives (`approximations`) and leave all other ones alone:
#
# * `legalize(fn)` is fn, for calls inside a kernel body; * `map_rows` is fn
# for several steps at once; * `in_turn` evaluates urgent results first.
#
# fn may itself be a `jax.vjp`: the derivative is derived from the one
# definition, so no cell has one of its own. `pull` applies the pullback that it
# returned.
#
# A primitive that is neither replaced nor known to lower raises
# `NotImplementedError` while tracing, early enough to choose another path.


Array = jax.Array
Accuracy = approximations.Accuracy


def legalize(
    fn: Callable[..., Any], accuracy: Accuracy = approximations.PRECISE
) -> Callable[..., Any]:
  """Returns `fn` for calls inside a kernel body.

  Args:
    fn: a pointwise function of pytrees of arrays.
    accuracy: accuracy of the special functions in it.

  Raises:
    NotImplementedError: when called, where fn has a primitive without a rule.
  """

  def legal_fn(*args):
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    rule = _legal_rule(approximations.Approximations(accuracy))
    leaves = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), rule)
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
    function = called(eqn)
    if function is not None:
      return interpret(*function, inputs, rule)
    if name not in _NATIVE:
      known = sorted({*_NATIVE, *_REPLACED, *approximations.RULES})
      raise NotImplementedError(
          f'GPU kernels have no rule for the primitive {name!r} in a pointwise'
          f' function. They have rules for {known}.'
      )
    outputs = bind(eqn, inputs)
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
    accuracy: accuracy of the special functions in it.
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
    rows = list(zip(*inputs, strict=True))
    if all(x is y for row in rows for x, y in zip(row, rows[0], strict=True)):
      # It does not depend on the row.
      found = [eqn.primitive.bind(*rows[0], **eqn.params)] * count
    else:
      found = [eqn.primitive.bind(*row, **eqn.params) for row in rows]
    if eqn.primitive.multiple_results:
      return [list(column) for column in zip(*found, strict=True)]
    return [found]

  columns = [[const] * count for const in consts]
  literal = lambda value: [value] * count
  return interpret(jaxpr, columns, args, rule, literal)


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a pointwise function whose later calls repeat the first one.

  They bind its native primitives, and nothing else. In a block of 64 steps the
  functions of `jax.numpy` take most of the time that a kernel takes to trace.

  Args:
    fn: a function of pytrees of arrays, of equal types in all calls.
  """
  traced: list[Any] = []

  def call(*args):
    if not traced:
      closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
      traced.extend((closed, jax.tree.structure(shape)))
    closed, structure = traced
    columns = [[x] for x in jax.tree.leaves(args)]
    found = _run_rows(closed.jaxpr, closed.consts, columns, 1)
    return jax.tree.unflatten(structure, [x for (x,) in found])

  return call


def hoist(
    fn: Callable[[Any, Any], Any], theta: Any, row: Any
) -> tuple[Callable[[Any], list[Any]], Callable[[list[Any], Any], Any]]:
  """Splits fn(theta, row) into what is free of the row, and the rest.

  Args:
    fn: a pointwise function of pytrees of arrays.
    theta: shapes and dtypes of its first argument.
    row: those of its second one.

  Returns:
    `early` and `late`, with late(early(theta), row) = fn(theta, row). No value
    of `early` is one that `late` does not read.
  """
  closed, shape = jax.make_jaxpr(fn, return_shape=True)(theta, row)
  jaxpr = closed.jaxpr
  size = len(jax.tree.leaves(theta))
  first, second = jaxpr.invars[:size], jaxpr.invars[size:]
  known, unknown = list(first), set(second)
  early, late = [], []
  for eqn in jaxpr.eqns:
    reads = variables(eqn.invars)
    if not unknown.isdisjoint(reads):
      unknown.update(eqn.outvars)
      late.append(eqn)
    elif reads.isdisjoint(known):
      early.append(eqn)  # A constant.
      late.append(eqn)
    else:
      known += eqn.outvars
      early.append(eqn)
  read = variables([*jaxpr.outvars, *(v for eqn in late for v in eqn.invars)])
  kept = [v for v in known if v in read]

  def part(eqns, invars, outvars):
    own = jaxpr.replace(eqns=eqns, invars=invars, outvars=outvars)
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(own, closed.consts))

  of_theta = part(early, first, kept)
  of_row = part(late, [*kept, *second], jaxpr.outvars)
  structure = jax.tree.structure(shape)
  return (
      lambda theta: of_theta(*jax.tree.leaves(theta)),
      lambda values, row: jax.tree.unflatten(
          structure, of_row(*values, *jax.tree.leaves(row))
      ),
  )


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
    that evaluates the remaining operations and returns the remaining results.
  """
  closed = jax.make_jaxpr(fn)(*avals)
  jaxpr = closed.jaxpr

  def rule(eqn, inputs):
    inner = eqn.params.get('jaxpr')
    if inner is None:
      return bind(eqn, inputs)
    columns = [[x] for x in inputs]
    return [x for (x,) in _run_rows(inner.jaxpr, inner.consts, columns, 1)]

  environment = Environment(rule, lambda value: value)
  environment.bind(jaxpr.constvars, closed.consts)
  unknown = set(jaxpr.invars)
  waiting = []
  for eqn in jaxpr.eqns:
    if unknown.isdisjoint(variables(eqn.invars)):
      environment.evaluate([eqn])
    else:
      unknown.update(eqn.outvars)
      waiting.append(eqn)

  live = variables(jaxpr.outvars[:first])
  now: list[Any] = []
  later: list[Any] = []
  for eqn in reversed(waiting):
    needed = not live.isdisjoint(eqn.outvars)
    (now if needed else later).insert(0, eqn)
    if needed:
      live |= variables(eqn.invars)

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


# Facts about a pointwise function, found in its jaxpr.


def used(fn: Callable[..., Any], *args) -> list[bool]:
  """Returns for each leaf of the arguments whether fn's value depends on it."""
  jaxpr = jax.make_jaxpr(legalize(fn))(*args).jaxpr
  live = variables(jaxpr.outvars)
  for eqn in reversed(jaxpr.eqns):
    if live.intersection(eqn.outvars):
      live |= variables(eqn.invars)
  return [v in live for v in jaxpr.invars]


def value_numbers(fn: Callable[..., Any], *args) -> list[int]:
  """Returns a number for each leaf of fn's value; equal means equal.

  Two leaves have one number if they are equal operations on equal values,
  additions of zero aside.
  """
  # Shapes without a mesh would be brought to one that is there.
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    closed = jax.make_jaxpr(legalize(fn))(*args)
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
    return interpret(jaxpr, consts, inputs, rule, literal)

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
