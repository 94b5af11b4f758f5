"""Makes a kernel: one CTA a multiprocessor, all CTAs at once."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import mailbox
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import plan as plan_lib


def run(
    plan: plan_lib.Plan,
    name: str,
    body: Callable[..., Any],
    buffers: Callable[..., Any],
    buffer_types: Mapping[str, Any],
    *,
    inputs: Any,
    out_type: Any,
) -> Any:
  """Runs a kernel; returns arrays in the tree of `out_type`.

  Args:
    plan: static facts of the kernel.
    name: the kernel's name, in profiles.
    body: makes an object with a method `run`, for each warpgroup. It takes the
      plan; references to inputs and outputs, in the trees of `inputs` and
      `out_type`; the counters, all zero; the buffers; and the warpgroup's
      number.
    buffers: makes the buffers of references to them by name.
    buffer_types: types of the buffers by name.
    inputs: a tree of arrays.
    out_type: a tree of types.
  """
  config, tiles = plan.config, plan.tiles
  arrays, in_tree = jax.tree.flatten(inputs)
  counters = cut.Counters.type(tiles.counters)
  types, out_tree = jax.tree.flatten((out_type, counters))
  axes = tiles.grid
  options: dict[str, Any] = {}
  if axes['cluster']:
    options['cluster'] = tuple(axes['cluster'].values())
    options['cluster_names'] = tuple(axes['cluster'])

  def flat_body(*refs):
    start, end = len(arrays), len(arrays) + len(types)
    outs, ref = jax.tree.unflatten(out_tree, refs[start:end])
    counters = cut.Counters(ref, tiles.counters)
    mailbox.open_all([counters], tiles.ctas, config.warpgroups)
    body(
        plan,
        jax.tree.unflatten(in_tree, refs[:start]),
        outs,
        counters,
        buffers(**dict(zip(buffer_types, refs[end:], strict=True))),
        lax.axis_index('warpgroup'),
    ).run()

  flat_body.__name__ = name
  kernel = plgpu.kernel(
      flat_body,
      out_type=tuple(types),
      grid=tuple(axes['grid'].values()),
      grid_names=tuple(axes['grid']),
      num_threads=config.warpgroups,
      thread_name='warpgroup',
      scratch_types=list(buffer_types.values()),
      compiler_params=compiler_params.COMPILER_PARAMS,
      **options,
  )
  results = mailbox.one_at_a_time(kernel)(*arrays)
  return jax.tree.unflatten(out_tree, results)[0]
