"""Functions with a tangent and an adjoint of their own, for every order of AD.

The derivative of a function is a linear map: forward mode applies it to the
tangents of the operands, reverse mode applies its transpose to the cotangents
of the results. `jax.custom_vjp` takes the transpose alone and gives up forward
mode. A function of `differentiable` has both by hand. Reverse mode runs the
adjoint as it is written, inlined, with the memory and the sums that it was
written for; the tangent is not even traced then.

The linear map is a primitive, since JAX has nothing else whose transpose can be
given: `custom_derivatives.linear_call` has no rule for `vmap` and no second
derivatives. Derivatives of the tangent and of the adjoint by the
values that they depend on are JAX's own. An adjoint that is to know over how
many rows `jax.vmap` maps it is a primitive as well.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from pallas_kernels import promotion


def differentiable(
    forward: Callable[[Any, Any], tuple[Any, Any]],
    tangent: Callable[[Any, Any, Any], Any],
    adjoint: Callable[[Any, Any, Any], Any],
    primal: Callable[[Any, Any], Any] | None = None,
) -> Callable[[Any, Any], Any]:
  """Returns the function (static, operands) -> results.

  Args:
    forward: (static, operands) -> (results, residuals). All results are
      floating-point.
    tangent: (static, residuals, tangents) -> tangents of the results. The
      argument is a tree like `operands` with None for a tangent that is zero.
      It may raise NotImplementedError: then there is no forward mode.
    adjoint: (static, residuals, cotangents of the results) -> cotangents, a
      tree like `operands` with None for arrays that are not floating-point.
    primal: (static, operands) -> results, where no derivative is needed; the
      first result of `forward` if None.
  """
  # JAX calls them later than the caller, by which time its settings are back.
  tangent, adjoint = promotion.of_ranks(tangent), promotion.of_ranks(adjoint)

  def results_alone(static, operands):
    with promotion.ranks_allowed():
      return forward(static, operands)[0]

  # JAX calls `primal` itself: there is no function of ours between them.
  function = jax.custom_jvp(primal or results_alone, nondiff_argnums=(0,))

  @functools.partial(function.defjvp, symbolic_zeros=True)
  def _(static, primals, tangents):
    (operands,), (d_operands,) = primals, tangents
    with promotion.ranks_allowed():
      results, residuals = forward(static, operands)
    d_leaves, d_tree = jax.tree.flatten(d_operands)
    moves = tuple(type(d) is not SymbolicZero for d in d_leaves)
    residual_leaves, residual_tree = jax.tree.flatten(residuals)
    result_leaves, result_tree = jax.tree.flatten(results)
    linear_map = _LinearMap(
        tangent=tangent,
        adjoint=adjoint,
        static=static,
        operands=d_tree,
        residuals=residual_tree,
        results=result_tree,
        moves=moves,
    )
    d_results = _linear_map_p.bind(
        *residual_leaves,
        *_moving(d_leaves, moves),
        linear_map=linear_map,
        count=len(residual_leaves),
        types=tuple(map(jax.typeof, result_leaves)),
    )
    return results, jax.tree.unflatten(result_tree, d_results)

  return function


def _refuse(reason, residuals, tangents):
  del residuals, tangents
  raise NotImplementedError(reason)


# (reason, arrays) -> arrays; forward mode raises NotImplementedError(reason).
in_reverse_mode_only = differentiable(
    lambda reason, arrays: (arrays, ()),
    _refuse,
    lambda reason, residuals, cotangents: cotangents,
)


def pushforward(
    function: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[Any, Any]:
  """`jax.jvp` with None for tangents that are zero.

  Args:
    function: function of floating-point arrays.
    primals: trees of arrays, its arguments.
    tangents: trees like `primals`, with None for an array, or for a part of a
      tree, that does not move.

  Returns:
    The results, and their tangents.
  """
  leaves, tree = jax.tree.flatten(tuple(primals))
  d_leaves = jax.tree.leaves(
      jax.tree.map(
          lambda d, x: [None] * len(jax.tree.leaves(x)) if d is None else [d],
          tuple(tangents),
          tuple(primals),
          is_leaf=_is_none,
      ),
      is_leaf=_is_none,
  )
  moves = tuple(d is not None for d in d_leaves)

  def of_moving(*moving):
    merged = _merged(leaves, moving, moves)
    return function(*jax.tree.unflatten(tree, merged))

  return jax.jvp(of_moving, _moving(leaves, moves), _moving(d_leaves, moves))


def _is_none(x: Any) -> bool:
  return x is None


def _moving(values: Sequence[Any], moves: Sequence[bool]) -> tuple[Any, ...]:
  return tuple(x for x, moved in zip(values, moves, strict=True) if moved)


def _merged(still: Sequence[Any], moving: Sequence[Any], moves: Sequence[bool]):
  """Returns `still` with the values of `moving` where `moves` is true."""
  rest = iter(moving)
  return [
      next(rest) if moved else x for x, moved in zip(still, moves, strict=True)
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LinearMap:
  """The derivative of a function at some residuals, over flat arrays.

  Attributes:
    tangent: pushes tangents forward, as `differentiable` takes it.
    adjoint: pulls cotangents back, as `differentiable` takes it.
    static: the function's static argument.
    operands: structure of the operands.
    residuals: structure of the residuals.
    results: structure of the results.
    moves: flags of the operands' leaves that are inputs of the map.
  """

  tangent: Callable[[Any, Any, Any], Any]
  adjoint: Callable[[Any, Any, Any], Any]
  static: Any
  operands: Any
  residuals: Any
  results: Any
  moves: tuple[bool, ...]

  def apply(self, residuals: Sequence[Any], inputs: Sequence[Any]):
    tangents = _merged([None] * len(self.moves), inputs, self.moves)
    d_results = self.tangent(
        self.static,
        self.residuals.unflatten(residuals),
        self.operands.unflatten(tangents),
    )
    return self.results.flatten_up_to(d_results)

  def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]):
    d_operands = self.adjoint(
        self.static,
        self.residuals.unflatten(residuals),
        self.results.unflatten(cotangents),
    )
    return list(_moving(self.operands.flatten_up_to(d_operands), self.moves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batched:
  """A linear map for each row of its inputs.

  Attributes:
    one: the map of a row.
    axes: axis of each residual's rows, None for one that all rows share.
    size: number of rows.
    spmd_axis_name: mesh axes of the rows, as `jax.vmap` takes them.
  """

  one: Any
  axes: tuple[int | None, ...]
  size: Any
  spmd_axis_name: Any

  def apply(self, residuals: Sequence[Any], inputs: Sequence[Any]):
    return self._vmap(self.one.apply)(list(residuals), list(inputs))

  def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]):
    return self._vmap(self.one.transpose)(list(residuals), list(cotangents))

  def _vmap(self, function):
    return jax.vmap(
        function,
        in_axes=(list(self.axes), 0),
        axis_size=self.size,
        spmd_axis_name=self.spmd_axis_name,
    )


# Arguments: `count` residuals, then the inputs that the map is linear in.
_linear_map_p = core.Primitive('linear_map')
_linear_map_p.multiple_results = True


@_linear_map_p.def_impl
def _apply(*args, linear_map, count, types):
  del types
  return linear_map.apply(args[:count], args[count:])


mlir.register_lowering(
    _linear_map_p, mlir.lower_fun(_apply, multiple_results=True)
)


@_linear_map_p.def_abstract_eval
def _(*args, linear_map, count, types):
  del args, linear_map, count
  return list(types)


def _transpose(cotangents, *args, linear_map, count, types):
  del types
  residuals, inputs = args[:count], args[count:]
  cotangents = [ad.instantiate_zeros(d) for d in cotangents]
  d_inputs = linear_map.transpose(residuals, cotangents)
  known = [None] * count
  return known + [
      d if ad.is_undefined_primal(x) else None
      for d, x in zip(d_inputs, inputs, strict=True)
  ]


def _jvp(primals, tangents, *, linear_map, count, types):
  params = {'linear_map': linear_map, 'count': count, 'types': types}
  results = _linear_map_p.bind(*primals, **params)
  terms = []
  if any(type(d) is not ad.Zero for d in tangents[count:]):
    inputs = map(ad.instantiate_zeros, tangents[count:])
    terms.append(_linear_map_p.bind(*primals[:count], *inputs, **params))
  d_residuals = [None if type(d) is ad.Zero else d for d in tangents[:count]]
  if any(d is not None for d in d_residuals):
    at = lambda residuals: linear_map.apply(residuals, primals[count:])
    residuals = list(primals[:count])
    terms.append(pushforward(at, [residuals], [d_residuals])[1])
  return results, functools.reduce(lambda a, b: list(map(jnp.add, a, b)), terms)


def _batch(axis_data, args, axes, *, linear_map, count, types):
  if all(axis is None for axis in axes):
    params = {'linear_map': linear_map, 'count': count, 'types': types}
    results = _linear_map_p.bind(*args, **params)
    return results, [None] * len(results)
  size, mesh_axis = axis_data.size, axis_data.explicit_mesh_axis
  inputs = [
      batching.bdim_at_front(x, axis, size, mesh_axis)
      for x, axis in zip(args[count:], axes[count:], strict=True)
  ]
  batched = _Batched(
      one=linear_map,
      axes=tuple(axes[:count]),
      size=size,
      spmd_axis_name=axis_data.spmd_name,
  )
  results = _linear_map_p.bind(
      *args[:count],
      *inputs,
      linear_map=batched,
      count=count,
      types=tuple(core.unmapped_aval(size, 0, t, mesh_axis) for t in types),
  )
  return results, [0] * len(results)


ad.primitive_transposes[_linear_map_p] = _transpose
ad.primitive_jvps[_linear_map_p] = _jvp
batching.fancy_primitive_batchers[_linear_map_p] = _batch
