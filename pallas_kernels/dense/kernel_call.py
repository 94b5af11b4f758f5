"""Launches a dense kernel: its grid, and CTAs that have to be resident at once.

The grid is (slice of the batch, head) and, with an exchange through the device,
group of CTAs of a head; a cluster adds the rank of a CTA in it. With an
exchange through the device every CTA waits for others, so all have to be on the
device at once. Three places keep to that:

* `tuning.py` chooses no more CTAs (`Shape.ctas`) than the device holds;
* `device_barrier` counts as many CTAs;
* `run` takes the members of a vmap axis in turn: a grid with
  one more axis would have more CTAs, that share one semaphore.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import product
from pallas_kernels.dense import ring
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import step_flags

Array = jax.Array


def prepare_flags(flags: Array, shape: cut.Shape) -> Array:
  """[1 or 2, B, T] -> int32 [T, 1 or 2, B'], B' the batch rounded up to 4."""
  missing = -shape.batch % 4
  flags = jnp.moveaxis(flags, 2, 0)
  if not missing:
    return flags
  return jnp.pad(flags, ((0, 0), (0, 0), (0, missing)))


def without_sentinel(x: Array, dtype: Any) -> Array:
  """Casts, and makes every NaN one that an exchange's sentinel is not."""
  return jnp.where(jnp.isnan(x), jnp.nan, x).astype(dtype)


def loop(time: int, body: Callable[..., Any], init: Any) -> Any:
  """Loops over steps, which are int32 with 64-bit types enabled too."""
  return lax.fori_loop(0, time, lambda i, s: body(i.astype(jnp.int32), s), init)


def stream_types(plan: plan_lib.Plan) -> Any:
  """Returns the types of the arrays that a kernel writes step by step."""
  shape = plan.shape
  return jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(shape.stream(s), s.dtype),
      plan.streams.outs,
  )


def exchange_types(plan: plan_lib.Plan) -> tuple[Any, ...]:
  """Returns the types of the exchanges through the device, one a product."""
  if not plan.config.through_device:
    return ()
  return tuple(
      jax.ShapeDtypeStruct(
          exchange_lib.Exchange.shape(plan.config, plan.shape, own.operands),
          plan.dtype,
      )
      for own in plan.products(plan.config)
      if not own.late
  )


def device_barrier(
    cta: threads.Cta, exchanges: Sequence[exchange_lib.Exchange]
) -> None:
  """Clears this CTA's part of the exchanges, and waits for all CTAs."""
  ctas = cta.shape.ctas(cta.config)
  mailbox.open_all(exchanges, ctas, cta.config.warpgroups)


class Steps:
  """Parts of a step that both kernels share, for one thread.

  Args:
    plan: static facts of the kernel.
    streams: references to the arrays that are read step by step.
    matrix: references to the parts of R.
    smem: references to shared memory.

  Attributes:
    cta: coordinates.
    ring: ring buffer of the streams.
    multipliers: the products of a step, in order.
  """

  def __init__(
      self, plan: plan_lib.Plan, streams: Any, matrix: Any, smem: plan_lib.Smem
  ):
    self.plan = plan
    self.cta = threads.Cta(
        plan.config, plan.shape, plan.reverse, plan.call, plan.dtype
    )
    self.ring = ring.Ring(self.cta, plan.streams.ins, streams, smem.ring)
    self.multipliers = product.multipliers(
        self.cta, plan.products(plan.config), matrix, smem.products
    )

  def read_theta(self, ref: Any) -> tuple[Array, ...]:
    """Returns this thread's elements of theta."""
    rows = range(self.plan.params)
    return tuple(ring.read_param(self.cta, ref, i) for i in rows)

  def restarts(self, step) -> Any:
    """Returns where the carry restarts before a step in the ring, or None."""
    return self._flag(step, step_flags.RESET) if self.plan.flags else None

  def held(self, step) -> Any:
    """Returns where the carry is held over a step in the ring, or None."""
    return self._flag(step, step_flags.HOLD) if self.plan.holds else None

  def _flag(self, step, bit: int) -> Array:
    return (self.ring.tiles.flags.read(step)[0] & bit) != 0


def run(
    plan: plan_lib.Plan,
    name: str,
    body: Callable[[Any, Any, plan_lib.Smem], None],
    inputs: Any,
    out_type: Any,
) -> Any:
  """Runs a kernel; returns arrays in the tree of `out_type`.

  Args:
    plan: static facts of the kernel.
    name: the kernel's name, in profiles.
    body: called once for each thread with references to the inputs, the outputs
      and shared memory, in the trees of `inputs`, `out_type` and
      `plan.smem_words`.
    inputs: a tree of arrays.
    out_type: a tree of types.
  """
  config, shape = plan.config, plan.shape
  grid = {'slice': shape.slices(config), 'head': shape.heads}
  options: dict[str, Any] = {}
  if config.warpgroups > 1:
    options = {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  if config.through_device:
    grid['group'] = shape.parts(config) // config.cluster
  if config.cluster > 1:
    options |= {'cluster': (config.cluster,), 'cluster_names': ('rank',)}
  arrays, in_tree = jax.tree.flatten(inputs)
  types, out_tree = jax.tree.flatten(out_type)
  words, smem_tree = jax.tree.flatten(plan_lib.smem_words(plan, config))

  def flat_body(*refs):
    start, end = len(arrays), len(arrays) + len(types)
    body(
        jax.tree.unflatten(in_tree, refs[:start]),
        jax.tree.unflatten(out_tree, refs[start:end]),
        jax.tree.unflatten(smem_tree, refs[end:]),
    )

  flat_body.__name__ = name
  kernel = plgpu.kernel(
      flat_body,
      out_type=tuple(types),
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in words],
      compiler_params=compiler_params.COMPILER_PARAMS,
      **options,
  )
  if config.through_device:
    kernel = mailbox.one_at_a_time(kernel)
  return jax.tree.unflatten(out_tree, kernel(*arrays))
