"""Pointwise functions and their derivatives as code that Mosaic GPU lowers.

A cell's `update` is plain `jnp`, written for any device. Inside a kernel body
it meets a compiler that knows fewer primitives, and on a GPU some of those it
knows are slow. The functions here trace a function, replace what needs
replacing and leave the rest as it is:

* `legalize(fn)` is fn, for calls inside a kernel body;
* `map_rows` is the same for several steps at once.

fn may itself be a `jax.vjp`: the derivative is derived from the one definition,
so no cell has one of its own. `pull` applies what it returned.

Kernels are compiled with approximate mathematics: exp, tanh and rsqrt are
single instructions of the special-function unit. The replacements below turn
these into float32 results. Errors are mostly a few 1e-7 of the result and at
most 4e-6, where tanh alone would be off by 5e-4; where results are rounded to
16 bits anyway, `Accuracy` says what may be saved. A primitive that is neither
replaced nor known to lower raises `NotImplementedError` while tracing, early
enough to choose another path.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """What the special functions of a kernel are made of.

  Attributes:
    error: what tanh, the logistic function and log1p may be off by absolutely,
      where that is cheaper than being off by some 1e-7 of the result. From
      2^-22 on, digits near zero are not looked after; from 2^-11 on, which is a
      quarter of what rounding to bfloat16 does, tanh is a single instruction.
    reciprocal: 1 / x of a float32 array, or None where there is nothing better
      than a reciprocal square root.
  """

  error: float = 0.0
  reciprocal: Callable[[Any], Any] | None = None

  @property
  def near(self) -> bool:
    return self.error >= 2**-22

  @property
  def fast(self) -> bool:
    return self.error >= 2**-11


def legalize(
    fn: Callable[..., Any], accuracy: Accuracy = Accuracy()
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
    leaves = _Evaluation(accuracy).run(
        closed.jaxpr, closed.consts, *jax.tree.leaves(args)
    )
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)

  return legal_fn


def pull(pullback, cotangent, accuracy: Accuracy = Accuracy()) -> Any:
  """Applies what `jax.vjp` returned under `legalize` or `map_rows`."""
  return legalize(lambda f, ct: f(ct), accuracy)(pullback, cotangent)


def map_rows(
    fn: Callable[[Any, Any], Any],
    shared: Any,
    rows: Sequence[Any],
    accuracy: Accuracy = Accuracy(),
) -> list[Any]:
  """Returns [fn(shared, row) for row in rows], for calls in a kernel body.

  Each operation is done for all rows before the next one. A warp waits long for
  the result of a special function; this way it has other rows to go on with,
  which the compiler would not find out by itself.

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
  columns = [[const] * count for const in consts] + args
  variables = (*jaxpr.constvars, *jaxpr.invars)
  values = dict(zip(variables, columns, strict=True))

  def read(v):
    return [v.val] * count if isinstance(v, jex_core.Literal) else values[v]

  for eqn in jaxpr.eqns:
    inputs = [read(v) for v in eqn.invars]
    inner = eqn.params.get('jaxpr')
    if inner is not None:
      outputs = _run_rows(inner.jaxpr, inner.consts, inputs, count)
    else:
      rows = zip(*inputs, strict=True)
      found = [eqn.primitive.bind(*row, **eqn.params) for row in rows]
      outputs = [found]
      if eqn.primitive.multiple_results:
        outputs = [list(column) for column in zip(*found, strict=True)]
    values.update(zip(eqn.outvars, outputs, strict=True))
  return [read(v) for v in jaxpr.outvars]


def in_turn(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], first: int
) -> Callable[..., tuple[list[Any], Callable[[], list[Any]]]]:
  """Evaluates a function as soon as possible, and what is wanted first, first.

  Args:
    fn: a function made of native primitives, as what `legalize` returns is.
      What does not depend on its arguments is evaluated at once.
    avals: shapes and dtypes of its arguments.
    first: how many of its results are wanted first.

  Returns:
    A function of the arguments. It returns these results, and a function that
    returns the others and evaluates, when called, what they need besides.
  """
  closed = jax.make_jaxpr(fn)(*avals)
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts, strict=True))

  def read(v):
    return v.val if isinstance(v, jex_core.Literal) else values[v]

  def evaluate(eqns):
    for eqn in eqns:
      inner = eqn.params.get('jaxpr')
      inputs = [read(v) for v in eqn.invars]
      if inner is not None:
        columns = [[x] for x in inputs]
        outs = [x for (x,) in _run_rows(inner.jaxpr, inner.consts, columns, 1)]
      else:
        outs = eqn.primitive.bind(*inputs, **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
      values.update(zip(eqn.outvars, outs, strict=True))

  unknown = set(jaxpr.invars)
  waiting = []
  for eqn in jaxpr.eqns:
    if unknown.isdisjoint(_variables(eqn.invars)):
      evaluate([eqn])
    else:
      unknown.update(eqn.outvars)
      waiting.append(eqn)

  live = _variables(jaxpr.outvars[:first])
  now: list[Any] = []
  later: list[Any] = []
  for eqn in reversed(waiting):
    needed = not live.isdisjoint(eqn.outvars)
    (now if needed else later).insert(0, eqn)
    if needed:
      live |= _variables(eqn.invars)

  def apply(*args):
    values.update(zip(jaxpr.invars, args, strict=True))
    evaluate(now)

    def rest():
      evaluate(later)
      return list(map(read, jaxpr.outvars[first:]))

    return list(map(read, jaxpr.outvars[:first])), rest

  return apply


def _variables(atoms) -> set[Any]:
  return {v for v in atoms if not isinstance(v, jex_core.Literal)}


def used(fn: Callable[..., Any], *args) -> list[bool]:
  """Returns which leaves of the arguments a function's value depends on."""
  jaxpr = jax.make_jaxpr(legalize(fn))(*args).jaxpr
  live = _variables(jaxpr.outvars)
  for eqn in reversed(jaxpr.eqns):
    if live.intersection(eqn.outvars):
      live |= _variables(eqn.invars)
  return [v in live for v in jaxpr.invars]


def value_numbers(fn: Callable[..., Any], *args) -> list[int]:
  """Returns a number for each leaf of a function's value; equal means equal.

  Two leaves have one number if they are the same operations of the same values,
  additions of zero aside.
  """
  # Shapes without a mesh would be brought to one that is there.
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    closed = jax.make_jaxpr(legalize(fn))(*args)
  numbers: dict[Any, int] = {}
  zeros: set[int] = set()

  def number(key):
    return numbers.setdefault(key, len(numbers))

  def run(jaxpr, inputs):
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {v: number(v) for v in jaxpr.constvars}

    def read(v):
      if not isinstance(v, jex_core.Literal):
        return values[v]
      found = number(('literal', str(v.val)))
      if jnp.ndim(v.val) == 0 and v.val == 0:
        zeros.add(found)
      return found

    for eqn in jaxpr.eqns:
      args = tuple(read(v) for v in eqn.invars)
      name, inner = eqn.primitive.name, eqn.params.get('jaxpr')
      if inner is not None:
        outs = run(inner.jaxpr, args)
      elif name == 'add' and zeros.intersection(args):
        outs = [args[0] if args[1] in zeros else args[1]]
      else:
        key = name, str(sorted(eqn.params.items())), args
        outs = [number((key, i)) for i in range(len(eqn.outvars))]
        if name == 'broadcast_in_dim' and args[0] in zeros:
          zeros.update(outs)
      values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]

  return run(closed.jaxpr, [number(v) for v in closed.jaxpr.invars])


class _Evaluation:
  """Runs a jaxpr with replacements, and computes nothing costly twice.

  The compiler merges equal arithmetic, but not equal special functions, and
  does not know that some of them share most of their work.
  """

  def __init__(self, accuracy: Accuracy):
    self._accuracy = accuracy
    self._results: dict[Any, Any] = {}
    self._negated: dict[int, Any] = {}
    # Keys hold identities, so what they identify must stay alive.
    self._alive: list[Any] = []

  def run(self, jaxpr, consts, *args) -> list[Any]:
    variables = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(variables, (*consts, *args), strict=True))

    def read(v):
      return v.val if isinstance(v, jex_core.Literal) else values[v]

    for eqn in jaxpr.eqns:
      inputs = [read(v) for v in eqn.invars]
      outputs = self._apply(eqn, inputs)
      values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]

  def _apply(self, eqn, inputs) -> list[Any]:
    name = eqn.primitive.name
    inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
    if name in _SHARED:
      return [_SHARED[name](self, *inputs, **_params(eqn))]
    if name in _REPLACED:
      return [_REPLACED[name](*inputs, **eqn.params)]
    if inner is not None and name in _CALLS:
      consts = getattr(inner, 'consts', ())
      return self.run(getattr(inner, 'jaxpr', inner), consts, *inputs)
    if name not in _NATIVE:
      raise NotImplementedError(
          f'GPU kernels have no rule for the primitive {name!r} in a pointwise'
          ' function. They have rules for'
          f' {sorted({*_NATIVE, *_REPLACED, *_SHARED})}.'
      )
    outputs = eqn.primitive.bind(*inputs, **eqn.params)
    if name == 'neg':
      self._alive += [outputs, *inputs]
      self._negated[id(outputs)] = inputs[0]
    return outputs if eqn.primitive.multiple_results else [outputs]

  def once(self, name: str, x, make: Callable[[], Any]):
    """Returns `make()`, called once for each name and x."""
    key = name, id(x)
    if key not in self._results:
      self._alive.append(x)
      self._results[key] = make()
    return self._results[key]

  def logistic(self, x):
    """1 / (1 + exp(-x)); with 1 / (1 + exp(x)) at next to no price."""
    negated = id(x) in self._negated
    x = self._negated.get(id(x), x)
    if self._accuracy.fast:
      half = self.once('half', x, lambda: 0.5 * jnp.tanh(0.5 * x))
      return 0.5 - half if negated else 0.5 + half
    if self._accuracy.near:
      make = lambda: self._reciprocal(1 + lax.exp2((-1 / math.log(2)) * x))
      result = self.once('logistic', x, make)
      return 1 - result if negated else result

    def make_both():
      # Bounded, so that a product with the reciprocal is never inf * 0.
      e = jnp.minimum(lax.exp2((-1 / math.log(2)) * x), 1e30)
      return e, self._reciprocal(1 + e)

    e, result = self.once('logistic', x, make_both)
    return e * result if negated else result

  def div(self, x, y):
    if not jnp.issubdtype(jnp.result_type(y), jnp.floating):
      return lax.div(x, y)
    if not isinstance(y, jax.Array) and jnp.ndim(y) == 0 and y != 0:
      return x * np.float32(1 / float(y))
    return x * self._signed_reciprocal(y)

  def integer_pow(self, x, *, y):
    if y < 0 and self._accuracy.reciprocal is None:
      return self._signed_reciprocal(self.integer_pow(x, y=-y))
    if y < 0:
      # The derivative of a quotient has it next to the reciprocal.
      x, y = self._signed_reciprocal(x), -y
    result = None
    for bit in bin(y)[2:]:
      result = None if result is None else result * result
      if bit == '1':
        result = x if result is None else result * x
    return jnp.ones_like(x) if result is None else result

  def tanh(self, x):
    def make():
      if self._accuracy.fast:
        return jnp.tanh(x)
      if self._accuracy.near:
        return 1 - 2 * self._reciprocal(1 + lax.exp2((2 / math.log(2)) * x))
      return _tanh(x)

    return self.once('tanh', x, make)

  def exp(self, x):
    return self.once('exp', x, lambda: jnp.exp(x))

  def log1p(self, x):
    if self._accuracy.near:
      return jnp.log(1 + x)
    return _log1p(x)

  def _instruction(self, x):
    """Returns 1 / x by one instruction, or None."""
    reciprocal = self._accuracy.reciprocal
    if reciprocal is None or not jnp.ndim(x) or x.dtype != jnp.float32:
      return None
    return reciprocal(x)

  def _reciprocal(self, x):
    """Returns 1 / x for x > 0."""
    found = self._instruction(x)
    if found is not None:
      return found
    root = lax.rsqrt(x)
    return root * root

  def _signed_reciprocal(self, x):
    def make():
      found = self._instruction(x)
      if found is not None:
        return found
      positive = self._reciprocal(jnp.abs(x))
      return jnp.where(x < 0, -positive, positive)

    return self.once('reciprocal', x, make)


def _params(eqn) -> dict[str, Any]:
  """Returns the parameters of a primitive that mean something here."""
  return {'y': eqn.params['y']} if eqn.primitive.name == 'integer_pow' else {}


def _tanh(x):
  """Returns tanh, by one Newton step from the fast instruction.

  With E = exp(-2|x|), tanh|x| is the root y of (1 - y) - (1 + y) E, which is
  linear in y with slope -(1 + E), and 1 / (1 + E) is (1 + y) / 2. For small x
  the residual has no digits left and the series takes over. Everything but E
  and the last two products is off the critical path, which in a recurrence is
  what counts.
  """
  fast = jnp.tanh(x)
  size = jnp.abs(fast)
  residual = (1 - size) - (1 + size) * lax.exp2((-2 / math.log(2)) * abs(x))
  half = jnp.where(x < 0, -0.5, 0.5)
  small = jnp.abs(x) < 0.03
  slope = jnp.where(small, 0, half + 0.5 * fast)
  return slope * residual + jnp.where(small, x - x * x * x * (1 / 3), fast)


def _log1p(x):
  series = x * (1 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4 - x * (1 / 5)))))
  return jnp.where(jnp.abs(x) < 0.03, series, jnp.log(1 + x))


def _expm1(x, **_):
  series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
  return jnp.where(jnp.abs(x) < 0.1, series, jnp.exp(x) - 1)


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
    'expm1': _expm1,
    'one_minus_square': lambda x: (1 + x) * (1 - x),
    # Autodiff inserts these two, which change nothing, where there is a mesh.
    'reshape': _reshape,
    'reshard': lambda x, **_: x,
    'square': lambda x: x * x,
    'stop_gradient': lambda x: x,
}

# Primitives that are costly, and that share work with each other.
_SHARED: dict[str, Callable[..., Any]] = {
    'div': _Evaluation.div,
    'exp': _Evaluation.exp,
    'integer_pow': _Evaluation.integer_pow,
    'log1p': _Evaluation.log1p,
    'logistic': _Evaluation.logistic,
    'tanh': _Evaluation.tanh,
}

# Primitives that hold a function: it is evaluated in place.
_CALLS = (
    'jit',
    'closed_call',
    'custom_jvp_call',
    'custom_vjp_call',
    'remat2',
    'checkpoint',
)

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
