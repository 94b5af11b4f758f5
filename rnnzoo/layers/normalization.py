"""flax's norms, wherever JAX is told to refuse promotions of dtypes."""

from typing import Any

from flax import nnx
import jax

from pallas_kernels import promotion
from rnnzoo.engines import partitioning

Array = jax.Array


@promotion.of_dtypes
def normalize(norm: nnx.Module, x: Array, **options: Any) -> Array:
  """Returns norm(x, **options).

  flax takes statistics in float32 and promotes x of 16 bits to it, as its
  documentation promises; `jax_numpy_dtype_promotion='strict'` would refuse.

  Parameters that are sharded over the mesh axis of x's batch, to save memory,
  are gathered: JAX refuses their product with x on Explicit axes.
  """
  graphdef, state = nnx.split(norm)
  if not partitioning.is_sharded(state):
    apply: Any = norm
    return apply(x, **options)
  whole = (None,) * (x.ndim - 1)
  positions = (*range(x.ndim - 1), -1), (*whole, -1)
  over = partitioning.choose([x, state], positions, x.shape[-1])
  (gathered,) = partitioning.place([state], positions[1:], over)
  own: Any = nnx.merge(graphdef, gathered)
  y = own(x, **options)
  if isinstance(norm, nnx.BatchNorm) and not options['use_running_average']:
    for name in ('mean', 'var'):
      average = getattr(norm, name)
      new = getattr(own, name)[...]
      average.set_value(partitioning.as_sharded(new, average[...]))
  return y
