"""One trace, several platforms: which path runs is known when it is compiled.

A program is traced once and then compiled: for the GPU that is here, for the
CPU beside it, or for both by `jax.export`. A kernel for GPUs can be lowered for
CUDA alone, so `by_platform` keeps two functions until the platform is known.

Both are inside a primitive, one for the forward and one for the backward pass,
since residuals need one structure: it is the kernel's. `elsewhere` leaves
zeros there and runs again in the backward pass. XLA removes the zeros.

Second derivatives and forward mode come from `elsewhere`: a kernel has
none.

A program that was traced where no GPU is known has no kernels, on any platform;
`without_kernels` says so where it is compiled for CUDA. A program of kernels
alone cannot be compiled for several platforms; `kernels_alone` says so.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo.engines import autodiff
from rnnzoo.engines import first_use
from rnnzoo.engines import selection

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Functions:
  """The static arguments of `by_platform`, hashable.

  Attributes:
    on_gpu: function of a tree of arrays to a tree of floating-point arrays. It
      has first derivatives in reverse mode. `by_platform` raises its errors.
    elsewhere: another such function, with derivatives of every order. It is
      traced if it is needed; its results are cast to the dtypes of `on_gpu`.
  """

  on_gpu: Function
  elsewhere: Function


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('operands', 'residuals'),
    meta_fields=('structure',),
)
@dataclasses.dataclass(frozen=True)
class _Saved:
  """The arrays that the backward pass reads.

  Attributes:
    operands: operands of the function.
    residuals: leaves of the kernel's pullback; zeros if no kernel ran.
    structure: tree structure of that pullback.
  """

  operands: Any
  residuals: Sequence[Any]
  structure: Any


def _choose(functions: Functions, *args):
  """Returns on_gpu(*args) or elsewhere(*args), both trees of one type."""
  flat, tree = jax.tree.flatten(args)
  # JAX keeps the jaxprs of equal functions. No two partials are equal.
  on_gpu = functools.partial(functions.on_gpu)
  jaxpr, types = jax.make_jaxpr(on_gpu, return_shape=True)(*args)
  config: Any = jax.config  # Its attributes have no types.
  elsewhere = _Elsewhere(
      functions.elsewhere,
      tree,
      tuple(jaxpr.out_avals),
      config.jax_default_matmul_precision,
  )
  results = _by_platform_p.bind(*flat, jaxpr=jaxpr, elsewhere=elsewhere)
  return jax.tree.unflatten(jax.tree.structure(types), results)


def _forward(functions: Functions, operands):
  structures: list[Any] = []
  types: list[Any] = []

  def on_gpu(operands):
    results, pull = jax.vjp(*_of_moving(functions.on_gpu, operands))
    residuals, structure = jax.tree.flatten(pull)
    structures.append(structure)
    types[:] = map(jax.typeof, residuals)
    return results, residuals

  def elsewhere(operands):
    like = jax.tree.leaves(operands)[0]
    zeros = [
        devices.like(jnp.zeros(one.shape, one.dtype), like) for one in types
    ]
    return functions.elsewhere(operands), zeros

  results, residuals = _choose(Functions(on_gpu, elsewhere), operands)
  return results, _Saved(operands, residuals, structures[0])


def _tangent(functions: Functions, saved: _Saved, tangents):
  _, d_results = autodiff.pushforward(
      functions.elsewhere, (saved.operands,), (tangents,)
  )
  on_gpu = functools.partial(functions.on_gpu)
  results = jax.eval_shape(on_gpu, saved.operands)
  return jax.tree.map(_cast, d_results, results)


def _adjoint(functions: Functions, saved: _Saved, cotangents):
  def on_gpu(operands, residuals, cotangents):
    del operands
    return jax.tree.unflatten(saved.structure, residuals)(cotangents)

  def elsewhere(operands, residuals, cotangents):
    del residuals
    results, pull = jax.vjp(*_of_moving(functions.elsewhere, operands))
    return pull(jax.tree.map(_cast, cotangents, results))

  (moving,) = _choose(
      Functions(on_gpu, elsewhere),
      saved.operands,
      saved.residuals,
      cotangents,
  )
  leaves, tree = jax.tree.flatten(saved.operands)
  rest = iter(moving)
  return jax.tree.unflatten(
      tree, [next(rest) if _moves(x) else None for x in leaves]
  )


def _of_moving(function: Function, operands):
  """Returns a function of a tree's floating-point arrays, and these arrays."""
  leaves, tree = jax.tree.flatten(operands)

  def of_moving(moving):
    rest = iter(moving)
    merged = [next(rest) if _moves(x) else x for x in leaves]
    return function(jax.tree.unflatten(tree, merged))

  return of_moving, [x for x in leaves if _moves(x)]


def _moves(x) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact)


def _cast(x, like):
  return x if x.dtype == like.dtype else x.astype(like.dtype)


# (functions, operands) -> results of functions.on_gpu in programs for CUDA, of
# functions.elsewhere in all other programs.
by_platform = autodiff.differentiable(
    _forward, _tangent, _adjoint, primal=_choose
)


def kernels_if_any(functions: Functions, operands):
  """Returns `by_platform`'s results, or `elsewhere`'s where no kernel can run.

  Args:
    functions: `on_gpu`, of kernels for linear recurrences, raises
      NotImplementedError where they cannot run.
    operands: a tree of arrays.
  """
  try:
    if devices.is_interpreting():
      return functions.on_gpu(operands)
    devices.current()
    if first_use.doubt('linear'):
      return functions.elsewhere(operands)
    return by_platform(functions, operands)
  except NotImplementedError:
    return functions.elsewhere(operands)


# Arguments are arrays. `jaxpr` runs on GPUs; `elsewhere` is a function of the
# arrays, traced when a program is compiled for another platform. Results have
# the types of the jaxpr's.
_by_platform_p = core.Primitive('by_platform')
_by_platform_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class _Elsewhere:
  """A function of arrays, to be traced later.

  Attributes:
    function: function from trees of arrays to a tree.
    arguments: structure of its arguments.
    types: types of the leaves of its result.
    precision: matrix products' precision where the function was called.
  """

  function: Callable[..., Any]
  arguments: Any
  types: tuple[Any, ...]
  precision: str | None

  @promotion.of_ranks
  def __call__(self, *flat):
    args = self.arguments.unflatten(flat)
    with jax.default_matmul_precision(self.precision):
      leaves = jax.tree.leaves(self.function(*args))
    return list(map(_cast, leaves, self.types))


def _on_gpu(*args, jaxpr, elsewhere):
  del elsewhere
  return core.jaxpr_as_fun(jaxpr)(*args)


def _not_on_gpu(*args, jaxpr, elsewhere):
  del jaxpr
  return elsewhere(*args)


@_by_platform_p.def_impl
def _(*args, **params):
  platforms = {d.platform for x in args for d in getattr(x, 'devices', set)()}
  function = _on_gpu if platforms == {'gpu'} else _not_on_gpu
  return function(*args, **params)


@_by_platform_p.def_abstract_eval
def _(*args, jaxpr, elsewhere):
  del args, elsewhere
  return list(jaxpr.out_avals)


def _lower_for_cuda(context, *args, **params):
  # Pallas asks the module for how many platforms it is.
  module = context.module_context.replace(platforms=('cuda',))
  context = context.replace(module_context=module)
  return mlir.lower_fun(_on_gpu, multiple_results=True)(
      context, *args, **params
  )


def _jvp(primals, tangents, **params):
  results = _by_platform_p.bind(*primals, **params)
  tangents = [None if type(d) is ad.Zero else d for d in tangents]
  # `elsewhere` knows no residuals but zeros, and reads none.
  _, d_results = autodiff.pushforward(
      lambda args: params['elsewhere'](*args), (list(primals),), (tangents,)
  )
  return results, d_results


def _batch(axis_data, args, axes, *, jaxpr, elsewhere):
  if all(axis is None for axis in axes):
    results = _by_platform_p.bind(*args, jaxpr=jaxpr, elsewhere=elsewhere)
    return results, [None] * len(results)
  mapped = functools.partial(
      jax.vmap,
      in_axes=tuple(axes),
      axis_size=axis_data.size,
      spmd_axis_name=axis_data.spmd_name,
  )
  rows = Functions(mapped(core.jaxpr_as_fun(jaxpr)), mapped(elsewhere))
  results = _choose(rows, *args)
  return results, [0] * len(results)


mlir.register_lowering(
    _by_platform_p, mlir.lower_fun(_not_on_gpu, multiple_results=True)
)
mlir.register_lowering(_by_platform_p, _lower_for_cuda, platform='cuda')
ad.primitive_jvps[_by_platform_p] = _jvp
batching.fancy_primitive_batchers[_by_platform_p] = _batch


def _marker(name: str) -> core.Primitive:
  """Returns a primitive that returns its argument."""
  marker = core.Primitive(name)
  marker.def_impl(lambda x: x)
  marker.def_abstract_eval(lambda x: x)
  ad.deflinear2(marker, lambda d, x: [d])
  batching.primitive_batchers[marker] = lambda args, axes: (
      marker.bind(*args),
      axes[0],
  )
  return marker


# For arrays of a recurrence that was traced where no GPU is known, so that no
# kernel could be planned: a program that is compiled for CUDA warns, once.
_without_kernels_p = _marker('without_kernels')
without_kernels = _without_kernels_p.bind

# For arrays of a recurrence that only a kernel may run: compiling for several
# platforms raises NotImplementedError.
_kernels_alone_p = _marker('kernels_alone')
kernels_alone = _kernels_alone_p.bind


def _warn_on_cuda(context, x):
  del context
  selection.warn_once(
      'this program was traced without a GPU and is compiled for CUDA: it has'
      ' no GPU kernels. Trace it on a machine with a GPU, or inside of'
      ' jax.sharding.use_abstract_mesh with an abstract_device.'
  )
  return [x]


def _refuse_several(context, x):
  platforms = context.module_context.platforms
  if len(platforms) > 1:
    raise NotImplementedError(
        "implementation='pallas' compiles for CUDA alone, got the platforms"
        f' {tuple(platforms)}. implementation=None keeps the kernels for CUDA'
        " and has another path for the rest; 'scan' runs everywhere."
    )
  return [x]


mlir.register_lowering(_without_kernels_p, lambda context, x: [x])
mlir.register_lowering(_without_kernels_p, _warn_on_cuda, platform='cuda')
mlir.register_lowering(_kernels_alone_p, _refuse_several)
