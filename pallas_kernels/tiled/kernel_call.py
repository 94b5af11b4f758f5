"""Makes a kernel: one CTA a multiprocessor, all of them at once."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import mailbox
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import plan as plan_lib


def kernel(
    plan: plan_lib.Plan,
    name: str,
    body: Callable[[Any, Any, cut.Counters, Any, Any], None],
    inputs: Any,
    out_type: Any,
    buffers: Callable[..., Any],
    buffer_types: Mapping[str, Any],
) -> Callable[..., Any]:
  """Returns a kernel as a function of arrays.

  Args:
    plan: static facts of the kernel.
    name: the kernel's name, in profiles.
    body: called once for each warpgroup with references to inputs and outputs,
      in the trees of `inputs` and `out_type`; the counters, all zero; the
      buffers; and the warpgroup's number.
    inputs: a tree of arrays.
    out_type: a tree of types.
    buffers: makes the buffers of references to them by name.
    buffer_types: types of the buffers by name.

  Returns:
    A function from the leaves of `inputs` to the leaves of `out_type`, and the
    counters behind them.
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
        jax.tree.unflatten(in_tree, refs[:start]),
        outs,
        counters,
        buffers(**dict(zip(buffer_types, refs[end:], strict=True))),
        lax.axis_index('warpgroup'),
    )

  flat_body.__name__ = name
  run = plgpu.kernel(
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
  return mailbox.one_at_a_time(run)
