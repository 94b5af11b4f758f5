"""Linear recurrences: h_t = a_t h_{t-1} + b_t, at the speed of memory.

(a_t, b_t) come from `coefficients(params, inputs_t)`, a pointwise function that
is traced into the kernel, so a cell's gates are computed where they are used
and only its pre-activations and h cross device memory. For a plain scan it is
the identity.

Time is parallel in waves (Martin and Cundy, 2018). Each of P parts has one
block of a wave in registers and reduces it to the affine map h -> A h + B that
it amounts to. The parts exchange these maps, so that each knows the h it starts
from, and then run through their block. A part is a warpgroup; those of a CTA
exchange through shared memory, CTAs of a cluster read each other's. Every
element is read once and written once.

The adjoint is a recurrence of the same kind in the other direction. With
λ_t = g_t + μ_{t+1} and μ_t = a_t λ_t,

    μ_t = a_t μ_{t+1} + a_t g_t,    da_t = λ_t h_{t-1},    db_t = λ_t,

and the inputs' gradients follow from da and db by the derivative of
`coefficients`. A composition that forgets (a = 0) takes b alone: the product
would turn an infinity before it into NaN.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import pointwise
from pallas_kernels.mosaic_gpu import flags as flags_lib
from pallas_kernels.mosaic_gpu import streams as streams_lib

Array = jax.Array
Ref = Any
Map = tuple[Array, Array]

@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static in a call.

  Attributes:
    coefficients: (params, inputs) -> (a, b), pointwise; inputs is a tuple.
    params: how many per-feature parameters there are.
    layout: of all streams.
    config: how the work is cut.
    reverse: whether time runs from the last step to the first.
    flags: whether some steps restart or are held.
    interpret: run on a CPU, for tests.
  """

  coefficients: Callable[[Any, tuple[Array, ...]], tuple[Array, Array]]
  params: int
  layout: streams_lib.Layout
  config: streams_lib.Config
  reverse: bool
  flags: bool
  interpret: Any = None


def forward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    h0: Array,
    restart: Array,
    flags: Array,
    out_dtype: Any,
) -> tuple[Array, Array]:
  """Runs the recurrence.

  Args:
    plan: what is static.
    params: [plan.params, Fp], with Fp the padded features.
    arrays: the inputs, each [B, T, F] or [B, T, G, F].
    h0: [B, Fp].
    restart: what a reset restarts from, [B, Fp].
    flags: int32 [B, T], bits RESET and HOLD; unused without `plan.flags`.
    out_dtype: dtype of h.

  Returns:
    h, [B, T, F], and h after the last step, float32 [B, Fp].
  """
  layout, config = plan.layout, plan.config
  arrays = [layout.widen(x) for x in arrays]
  ins = streams_lib.streams_of(arrays)
  outs = (streams_lib.Stream(0, None, out_dtype),)

  def body(*refs):
    refs = list(refs)
    params, h0, restart, flags = refs[:4]
    inputs = refs[4 : 4 + len(arrays)]
    h_ref, last_ref = refs[4 + len(arrays) : 6 + len(arrays)]
    scratch = refs[6 + len(arrays) :]
    in_rings, scratch = scratch[: len(ins)], scratch[len(ins) :]
    out_rings, scratch = scratch[: len(outs)], scratch[len(outs) :]
    barriers, *exchange_refs = scratch
    at, walk = _place(plan, plan.reverse)
    theta = tuple(params[k, at.features] for k in range(plan.params))
    flags = flags if plan.flags else None
    restart = restart[at.batch, at.features] if plan.flags else None
    exchange = _Exchange(walk, barriers, exchange_refs, at)
    walk.prefetch(ins, inputs, in_rings, barriers)

    def summarise(k):
      block = flags_lib.Block(walk, flags, k)
      maps = []
      for i, row in enumerate(walk.rows(in_rings, k)):
        pair = pointwise.legalize(plan.coefficients)(theta, row)
        pair = flags_lib.select(block.idle(i), (1.0, 0.0), pair)
        forget = (0.0, lambda pair=pair: _affine(pair, restart))
        maps.append(flags_lib.select(block.restarts(i), forget, pair))
      return maps, None

    def wave(k, h):
      maps, _ = exchange.publish(k, summarise)
      start, h = exchange.collect(k, h)
      out = []
      for pair in maps:
        start = _affine(pair, start)
        out.append((start,))
      walk.write(outs, (h_ref,), out_rings, k, out)
      walk.refill(ins, inputs, in_rings, barriers, k)
      return h if config.parts > 1 else start

    h = h0[at.batch, at.features]
    exchange.begin(h, summarise)
    h = lax.fori_loop(0, walk.waves, wave, h)
    h = exchange.finish(h)

    @pl.when(at.part == 0)
    def _():
      last_ref[at.batch, at.features] = h

    plgpu.wait_smem_to_gmem(0)

  batch, padded = layout.batch, layout.padded(config.width)
  h, last = _kernel(
      plan,
      body,
      'linear_recurrence',
      ins,
      outs,
      (
          jax.ShapeDtypeStruct(layout.shape, out_dtype),
          jax.ShapeDtypeStruct((batch, padded), jnp.float32),
      ),
  )(params, h0, restart, flags, *arrays)
  return layout.narrow(h), last


def backward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    h: Array,
    h0: Array,
    restart: Array,
    flags: Array,
    d_h: Array,
    d_last: Array,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: as for `forward`, except `config`.
    params: as for `forward`.
    arrays: as for `forward`.
    h: what `forward` returned.
    h0: as for `forward`.
    restart: as for `forward`.
    flags: as for `forward`.
    d_h: cotangent of h, [B, T, F].
    d_last: cotangent of the last h, float32 [B, Fp].

  Returns:
    The cotangents of `arrays`, of h0 [B, Fp], and, to be summed over the parts
    P, of the parameters [B, P, plan.params, Fp] and of `restart` [B, P, Fp].
  """
  layout, config = plan.layout, plan.config
  *arrays, h, d_h = (layout.widen(x) for x in (*arrays, h, d_h))
  count = len(arrays)
  # h_{t-1} is h, read one step of the forward loop earlier.
  shift = 1 if plan.reverse else -1
  previous = streams_lib.Stream(count, None, h.dtype, shift)
  cotangent = streams_lib.Stream(count + 1, None, d_h.dtype)
  outs = streams_lib.streams_of(arrays[:count])
  needed = _needed(plan, len(outs))
  read = (stream for stream, need in zip(outs, needed, strict=True) if need)
  ins = (*read, previous, cotangent)

  def body(*refs):
    refs = list(refs)
    params, h0, restart, flags, d_last = refs[:5]
    refs = refs[5:]
    inputs, refs = refs[: count + 2], refs[count + 2 :]
    d_arrays, refs = refs[:count], refs[count:]
    d_h0_ref, d_params_ref, d_restart_ref = refs[:3]
    scratch = refs[3:]
    in_rings, scratch = scratch[: len(ins)], scratch[len(ins) :]
    out_rings, scratch = scratch[: len(outs)], scratch[len(outs) :]
    barriers, *exchange_refs = scratch
    at, walk = _place(plan, not plan.reverse)
    theta = tuple(params[k, at.features] for k in range(plan.params))
    h0 = h0[at.batch, at.features]
    flags = flags if plan.flags else None
    restart = restart[at.batch, at.features] if plan.flags else None
    exchange = _Exchange(walk, barriers, exchange_refs, at)
    walk.prefetch(ins, inputs, in_rings, barriers)
    first_time = layout.time - 1 if plan.reverse else 0
    mu0 = d_last[at.batch, at.features]

    def rows_of(k):
      """Returns inputs, h before the step and g, for each step in a block."""
      for values in walk.rows(in_rings, k):
        given = iter(values)
        row = tuple(next(given) if need else 0.0 * mu0 for need in needed)
        yield (row, *given)

    def summarise(k):
      block = flags_lib.Block(walk, flags, k)
      maps, kept = [], []
      for i, (row, before, g) in enumerate(rows_of(k)):
        (a, _), pull = pointwise.vjp(plan.coefficients, theta, row)
        (a,) = flags_lib.select(block.idle(i), (1.0,), (a,))
        pair = (a, a * g)
        maps.append(flags_lib.select(block.restarts(i), (0.0, 0.0), pair))
        kept.append((a, pull, before, g))
      return maps, (kept, block)

    def wave(k, state):
      mu, d_theta, d_restart = state
      maps, (kept, block) = exchange.publish(k, summarise)
      start, mu = exchange.collect(k, mu)
      out = []
      for i, (a, pull, before, g) in enumerate(kept):
        adjoint = g + start
        is_first = walk.time(k, i) == first_time
        (before,) = flags_lib.select(is_first, (h0,), (before,))
        (before,) = flags_lib.select(block.restarts(i), (restart,), (before,))
        d_a, d_b = flags_lib.select(
            block.idle(i), (0.0, 0.0), (adjoint * before, adjoint)
        )
        d_params, d_row = pull((d_a, d_b))
        d_theta = tuple(map(jnp.add, d_theta, d_params))
        if plan.flags:
          (d_in,) = flags_lib.select(block.restarts(i), (a * adjoint,), (0.0,))
          d_restart = d_restart + d_in
        start = _affine(maps[i], start)
        out.append(d_row)
      walk.write(outs, d_arrays, out_rings, k, out)
      walk.refill(ins, inputs, in_rings, barriers, k)
      return (mu if config.parts > 1 else start), d_theta, d_restart

    zero = mu0 * 0.0
    d_theta = tuple(zero for _ in theta)
    state = (mu0, d_theta, zero if plan.flags else ())
    exchange.begin(mu0, summarise)
    mu, d_theta, d_restart = lax.fori_loop(0, walk.waves, wave, state)
    mu = exchange.finish(mu)

    @pl.when(at.part == 0)
    def _():
      d_h0_ref[at.batch, at.features] = mu

    for k, value in enumerate(d_theta):
      d_params_ref[at.batch, at.part, k, at.features] = value
    if plan.flags:
      d_restart_ref[at.batch, at.part, at.features] = d_restart
    plgpu.wait_smem_to_gmem(0)

  batch, padded = layout.batch, layout.padded(config.width)
  partial = (batch, config.parts)
  *d_arrays, d_h0, d_params, d_restart = _kernel(
      plan,
      body,
      'linear_recurrence_adjoint',
      ins,
      outs,
      (
          *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:count]),
          jax.ShapeDtypeStruct((batch, padded), jnp.float32),
          jax.ShapeDtypeStruct(
              (*partial, max(plan.params, 1), padded), jnp.float32
          ),
          jax.ShapeDtypeStruct((*partial, padded), jnp.float32),
      ),
  )(params, h0, restart, flags, d_last, *arrays, h, d_h)
  return tuple(map(layout.narrow, d_arrays)), d_h0, d_params, d_restart


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where a part works: its batch row, its features, its place in a wave."""

  batch: Array
  features: Any
  part: Array
  block: Array
  warpgroup: Array


def _place(plan: Plan, reverse: bool):
  config = plan.config
  batch = lax.axis_index('batch')
  features = pl.ds(lax.axis_index('tile') * config.width, config.width)
  block = lax.axis_index('block') if config.cluster > 1 else jnp.int32(0)
  warpgroup = (
      lax.axis_index('warpgroup') if config.warpgroups > 1 else jnp.int32(0)
  )
  part = block * config.warpgroups + warpgroup
  at = _Place(batch, features, part, block, warpgroup)
  walk = streams_lib.Walk(
      plan.layout, config, reverse, batch, features, part, warpgroup
  )
  return at, walk


class _Exchange:
  """How parts learn what the blocks before theirs amount to.

  Each wave's maps are published, and collected by all parts. CTAs of a cluster
  take their time to hear from each other, so there a wave is published while
  the one before it is still to be collected; its rows are then read twice from
  shared memory, and once from device memory. One warpgroup collects for all of
  its CTA.

  Args:
    walk: over time.
    barriers: of the blocks that arrive from device memory.
    refs: scratch, as `_exchange_types` lists it.
    at: where this part works.
  """

  def __init__(self, walk, barriers, refs, at):
    self.walk = walk
    self.config = walk.config
    self.barriers = barriers
    self.at = at
    refs = list(refs)
    if self.config.warpgroups > 1:
      self.maps, self.barrier, *refs = refs
    if self.config.cluster > 1:
      self.block_maps, self.starts, self.state, *refs = refs
      self.block_barriers, *refs = refs
      if self.config.warpgroups > 1:
        (self.start_barrier,) = refs

  def begin(self, h, summarise):
    """Publishes the first wave, where publishing runs ahead.

    Args:
      h: before the first step.
      summarise: as for `publish`.
    """
    if self.config.cluster > 1:
      self._by_leader(lambda: self._store(self.state, h))
      self._publish(0, summarise)

  def publish(self, wave, summarise):
    """Publishes this part's block of a wave, or of the next one.

    Args:
      wave: index of the wave.
      summarise: maps a wave to the maps of its steps, and to anything else that
        is worth keeping.

    Returns:
      What `summarise` returns for this wave.
    """
    if self.config.cluster == 1:
      return self._publish(wave, summarise)

    @pl.when(wave + 1 < self.walk.waves)
    def _():
      self._publish(wave + 1, summarise)

    return summarise(wave)

  def _publish(self, wave, summarise):
    self.walk.wait(self.barriers, wave)
    maps, kept = summarise(wave)
    if self.config.parts == 1:
      return maps, kept
    total = _compose(maps)
    slot = lax.rem(wave, _SLOTS)
    if self.config.warpgroups > 1:
      self._store(self.maps.at[slot, self.at.warpgroup], *total)
      plgpu.barrier_arrive(self.barrier)
      plgpu.barrier_wait(self.barrier)
    if self.config.cluster > 1:

      def publish():
        block = _compose(self._warpgroup_maps(slot, total))
        self._store(self.block_maps.at[slot], *block)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.block_barriers.at[lax.rem(wave, 2)])

      self._by_leader(publish)
    return maps, kept

  def collect(self, wave, h) -> tuple[Array, Array]:
    """Returns h before this part's block, and h after the whole wave.

    Args:
      wave: index of the wave.
      h: before the wave.
    """
    if self.config.parts == 1:
      return h, h
    slot = lax.rem(wave, _SLOTS)
    if self.config.cluster == 1:
      return _pick(self._warpgroup_maps(slot, None), self.at.warpgroup, h)
    start_ref = self.starts.at[lax.rem(wave, 2)]

    def collect():
      plgpu.barrier_wait(self.block_barriers.at[lax.rem(wave, 2)])
      blocks = []
      for block in range(self.config.cluster):
        at = {'block': jnp.int32(block)}
        peer = plgpu.cluster_ref(self.block_maps, at)
        blocks.append((peer[slot, 0], peer[slot, 1]))
      start, after = _pick(blocks, self.at.block, self.state[0])
      self._store(self.state, after)
      self._store(start_ref, start)

    self._by_leader(collect)
    if self.config.warpgroups == 1:
      return start_ref[0], h
    plgpu.barrier_arrive(self.start_barrier)
    plgpu.barrier_wait(self.start_barrier)
    maps = self._warpgroup_maps(slot, None)
    start, _ = _pick(maps, self.at.warpgroup, start_ref[0])
    return start, h

  def finish(self, h) -> Array:
    """Returns the last h, once no peer reads from here any more.

    Args:
      h: as the last wave left it.
    """
    if self.config.cluster == 1:
      return h

    def finish():
      barrier = self.block_barriers.at[self.walk.waves % 2]
      plgpu.barrier_arrive(barrier)
      plgpu.barrier_wait(barrier)

    self._by_leader(finish)
    return self.state[0]

  def _warpgroup_maps(self, slot, total) -> list[Map]:
    """Returns the maps of this CTA's blocks."""
    if self.config.warpgroups == 1:
      return [total]
    return [
        (self.maps[slot, w, 0], self.maps[slot, w, 1])
        for w in range(self.config.warpgroups)
    ]

  def _by_leader(self, fn):
    if self.config.warpgroups == 1:
      fn()
    else:
      pl.when(self.at.warpgroup == 0)(fn)

  def _store(self, ref, *values):
    for i, value in enumerate(values):
      ref[i] = value


# A part can be two waves ahead of one whose maps are being read.
_SLOTS = 4


def _exchange_types(config: streams_lib.Config):
  types: list[Any] = []
  lanes = lambda *shape: plgpu.SMEM((*shape, config.width), jnp.float32)
  among_warpgroups = plgpu.Barrier(num_arrivals=config.warpgroups)
  if config.warpgroups > 1:
    types += [lanes(_SLOTS, config.warpgroups, 2), among_warpgroups]
  if config.cluster > 1:
    types += [lanes(_SLOTS, 2), lanes(2, 1), lanes(1)]
    types.append(
        plgpu.ClusterBarrier(collective_axes=('block',), num_barriers=2)
    )
    if config.warpgroups > 1:
      types.append(among_warpgroups)
  return types


def _needed(plan: Plan, inputs: int) -> list[bool]:
  """Returns which inputs the adjoint has to read."""
  lane = jax.ShapeDtypeStruct((plan.config.width,), jnp.float32)
  params, row = (lane,) * plan.params, (lane,) * inputs

  def adjoint(params, cotangents, row):
    (a, _), pull = jax.vjp(plan.coefficients, params, row)
    return a, pull(cotangents)

  return pointwise.used(adjoint, params, (lane, lane), row)[-inputs:]


def _kernel(plan: Plan, body, name, ins, outs, out_type):
  config, layout = plan.config, plan.layout
  tiles = layout.padded(config.width) // config.width
  options: dict[str, Any] = {}
  if config.cluster > 1:
    options |= {'cluster': (config.cluster,), 'cluster_names': ('block',)}
  if config.warpgroups > 1:
    options |= {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  body.__name__ = name
  return plgpu.kernel(
      body,
      out_type=out_type,
      grid=(layout.batch, tiles),
      grid_names=('batch', 'tile'),
      scratch_types=[
          *streams_lib.ring_types(ins, config, config.stages),
          *streams_lib.ring_types(outs, config, streams_lib.OUT_SLOTS),
          streams_lib.barrier_type(ins, config),
          *_exchange_types(config),
      ],
      compiler_params=streams_lib.compiler_params(),
      interpret=plan.interpret,
      **options,
  )


def _affine(pair: Map, h: Array) -> Array:
  """Returns a h + b, where a = 0 forgets even an infinite h."""
  a, b = pair
  return jnp.where(a == 0, b, a * h + b)


def _compose(maps: Sequence[Map]) -> Map:
  """Returns the affine map that a sequence of them amounts to."""
  a, b = maps[0]
  for pair in maps[1:]:
    a, b = pair[0] * a, _affine(pair, b)
  return a, b


def _pick(maps: Sequence[Map], index, h) -> tuple[Array, Array]:
  """Returns h before the index-th map, and h after all of them."""
  start = h
  for i, pair in enumerate(maps):
    start = h if i == 0 else jnp.where(index == i, h, start)
    h = _affine(pair, h)
  return start, h
