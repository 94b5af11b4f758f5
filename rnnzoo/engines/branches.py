"""One branch for all rows of a `jax.vmap`.

Under `jax.vmap` a `lax.cond` whose predicate differs between rows runs both
branches, and a `lax.while_loop` selects in every round. Where one predicate
holds for all rows, one branch runs.
"""

import jax
from jax.extend import core
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

Array = jax.Array


def for_all_mapped(flag: Array) -> Array:
  """Returns the flag; under `jax.vmap`, whether it holds in all of its rows."""
  return _for_all_mapped_p.bind(flag)


_for_all_mapped_p = core.Primitive('for_all_mapped')
_for_all_mapped_p.def_impl(lambda flag: flag)
_for_all_mapped_p.def_abstract_eval(lambda flag: flag)
mlir.register_lowering(
    _for_all_mapped_p, mlir.lower_fun(lambda flag: flag, multiple_results=False)
)


def _for_all_rows(args, dims):
  (flag,), (axis,) = args, dims
  return for_all_mapped(jnp.all(flag, axis=axis)), None


batching.primitive_batchers[_for_all_mapped_p] = _for_all_rows
