"""The kernel that runs levels at the same time, from the lowest inputs up.

A CTA has two tasks, which need not be of the same level: it makes some gates of
a level, and it runs the recurrence of some rows of a head. Its warpgroups:

    recurrence       as of `dense/forward.py`
    products         two, `gate_products`
    the last one     two warps copy slices of x; one waits for gates, and one
                     tells that outputs are stored, `chunks`
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.dense import forward_loops
from pallas_kernels.dense import forward_step
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import plan as dense_plan
from pallas_kernels.dense import streams as streams_lib
from pallas_kernels.mosaic import compiler_params
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.wavefront import chunks as chunks_lib
from pallas_kernels.wavefront import gate_products
from pallas_kernels.wavefront import plan as plan_lib

Array = jax.Array
Ref = Any


class Inputs(NamedTuple):
  """Arrays that the kernel reads, or their references.

  Attributes:
    x: of the lowest level, [B, T, I] or time-major.
    kernels: W of each level, transposed, [G F, I].
    theta: [P, L F].
    carry: before the first step, [S, B, L F].
    restart: after a reset, [S, B, L F].
    matrix: R transposed, [G', L N, D, D].
    flags: as for the dense kernels, or None.
  """

  x: Any
  kernels: Any
  theta: Any
  carry: Any
  restart: Any
  matrix: Any
  flags: Any


class Outputs(NamedTuple):
  """Types of arrays that the kernel writes, or their references.

  Attributes:
    below: the last outputs of all levels but the highest, [L - 1, B, T', F].
    highest: those of the highest level, [B, T, F].
    last: carry after the last step, [S, B, L F].
    gates: the last ones of all levels, [L, B, T', G F].
    counters: `chunks.Counters`.
  """

  below: Any
  highest: Any
  last: Any
  gates: Any
  counters: Any


@functools.partial(jax.jit, static_argnums=0)
def forward(plan: plan_lib.Plan, inputs: Inputs) -> tuple[Array, Array]:
  """Runs all levels.

  Args:
    plan: static facts of the kernel.
    inputs: arrays.

  Returns:
    Carries after the last step, [S, B, L F], and outputs of the highest level,
    [B, T, F] or time-major.
  """
  dense, shape = plan.dense, plan.dense.shape

  def steps(levels: tuple[int, ...], times: int, features: int):
    lead = (shape.batch, times)
    lead = lead[::-1] if shape.time_major else lead
    return jax.ShapeDtypeStruct((*levels, *lead, features), dense.x_dtype)

  window_of_gates, window = plan.windows
  out_type = Outputs(
      below=steps((plan.levels - 1,), window, shape.row),
      highest=steps((), shape.time, shape.row),
      last=jax.ShapeDtypeStruct(inputs.carry.shape, jnp.float32),
      gates=steps((plan.levels,), window_of_gates, plan.width),
      counters=chunks_lib.Counters.type(plan.levels, plan.chunks),
  )
  arrays, in_tree = jax.tree.flatten(inputs)
  types, out_tree = jax.tree.flatten(out_type)
  words, smem_tree = jax.tree.flatten(
      dense_plan.smem_words(dense, dense.config)
  )

  def wavefront_recurrence(*refs):
    rest = iter(refs)
    take = lambda count: [next(rest) for _ in range(count)]
    _Cta(
        plan,
        jax.tree.unflatten(in_tree, take(len(arrays))),
        jax.tree.unflatten(out_tree, take(len(types))),
        jax.tree.unflatten(smem_tree, take(len(words))),
        chunks_lib.Words(next(rest)),
        gate_products.Buffers.of(list(rest)),
    ).run()

  kernel = plgpu.kernel(
      wavefront_recurrence,
      out_type=tuple(types),
      grid=(plan.ctas // plan_lib.MEMBERS,),
      grid_names=('cluster',),
      cluster=(plan_lib.MEMBERS,),
      cluster_names=('member',),
      num_threads=plan.warpgroups,
      thread_name='warpgroup',
      scratch_types=[
          *(plgpu.SMEM((n,), jnp.int32) for n in words),
          plgpu.SMEM((chunks_lib.Words.COUNT,), jnp.int32),
          *gate_products.Buffers.types(plan),
      ],
      compiler_params=compiler_params.COMPILER_PARAMS,
  )
  results = mailbox.one_at_a_time(kernel)(*arrays)
  outs = jax.tree.unflatten(out_tree, results)
  return outs.last, outs.highest


class _Cta:
  """The tasks of one CTA, as its warpgroups share them."""

  def __init__(
      self,
      plan: plan_lib.Plan,
      ins: Inputs,
      outs: Outputs,
      smem: dense_plan.Smem,
      words: chunks_lib.Words,
      buffers: gate_products.Buffers,
  ):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.smem, self.words = smem, words
    self.group = lax.axis_index('warpgroup')
    index = lax.axis_index('cluster') * plan_lib.MEMBERS
    self.index = index + lax.axis_index('member')
    self.counters = chunks_lib.Counters(
        outs.counters, plan.levels, plan.chunks, self.index, plan.ctas
    )
    self.level = lax.div(self.index, jnp.int32(plan.runners_of_level))
    made = lax.div(self.index, jnp.int32(plan.blocks))
    self.products = gate_products.Products(
        plan=plan,
        x=ins.x,
        below=outs.below,
        gates=outs.gates,
        kernels=ins.kernels,
        counters=self.counters,
        words=words,
        buffers=buffers,
        level=made,
        block=self.index - made * plan.blocks,
    )

  def run(self) -> None:
    """Runs the task of this warpgroup."""
    plan = self.plan
    self.products.open(self._one())
    self.words.clear()
    mailbox.open_all([self.counters], plan.ctas, plan.warpgroups)
    runs, makes = self.index < plan.runners, self.index < plan.makers
    first = plan.dense.config.warpgroups
    for highest in (False, True):
      own = (self.level == plan.levels - 1) == highest
      pl.when((self.group < first) & runs & own)(
          functools.partial(self._run_recurrence, highest)
      )
    pl.when((self.group == first) & makes)(self.products.load)
    for consumer in range(plan_lib.CONSUMERS):
      pl.when((self.group == first + consumer) & makes)(
          functools.partial(self.products.multiply, consumer)
      )

    def each_warp():
      warp = lax.axis_index('warp')
      for number in range(gate_products.COPIERS):
        copy = functools.partial(self.products.copy, number)
        pl.when((warp == number) & makes)(copy)
      others = self._await_gates, self._tell_outputs
      for number, task in enumerate(others, gate_products.COPIERS):
        pl.when((warp == number) & runs)(task)

    @pl.when(self.group == first + plan_lib.CONSUMERS)
    def _():
      pl.kernel(each_warp, mesh=plgpu.WarpMesh(axis_name='warp'))()

    # No CTA leaves while another may still tell it that a slot is free.
    sync.cluster_barrier()

  def _one(self) -> Array:
    """Returns int32 [128], 1 in the first thread of the CTA, else 0."""
    return ((ptx.thread() == 0) & (self.group == 0)).astype(jnp.int32)

  def _await_gates(self) -> None:
    """Passes on which gates are there; one warp does."""
    plan = self.plan
    products = plan.parts * plan.blocks

    @pl.loop(0, plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)
      index = self.counters.gates(self.level, chunk)
      self.counters.wait(index, products, proxy=False)

      # Outputs take the place of earlier ones, which have been read.
      earlier = chunk - plan_lib.CHUNKS_OF_OUTPUTS
      above = self.level + 1

      @pl.when((earlier >= 0) & (above < plan.levels))
      def _():
        index = self.counters.gates(above, earlier)
        self.counters.wait(index, products, proxy=False)

      self.words.put(chunks_lib.Words.CHUNKS, chunk + 1)

  def _tell_outputs(self) -> None:
    """Tells others which outputs are stored; one warp does."""
    plan = self.plan

    @pl.loop(0, plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)
      self.words.wait(chunks_lib.Words.STEPS, plan.chunks.end(chunk), nap=40)
      self.counters.add(self.counters.outputs(self.level, chunk))

  def _run_recurrence(self, highest: bool) -> None:
    """Runs the recurrence of some rows of a head.

    Args:
      highest: whether it is of the highest level, which has an array apart.
    """
    plan, ins, outs, one = self.plan, self.ins, self.outs, self._one()
    chunks, words = plan.chunks, self.words
    time = plan.dense.shape.time

    def before(step):
      chunk, first = chunks.of_step(step)
      wait = lambda: words.wait(chunks_lib.Words.CHUNKS, chunk + 1)
      pl.when(first & (step < time))(wait)

    def after(step):
      _, first = chunks.of_step(step)
      tell = lambda: words.put_by(one, chunks_lib.Words.STEPS, step)
      pl.when((first & (step > 0)) | (step == time))(tell)

    inputs = forward_step.Inputs(
        theta_gmem=ins.theta,
        carry_gmem=ins.carry,
        restart_gmem=ins.restart,
        first_gmem=None,
        again_gmem=None,
        matrix_gmem=(ins.matrix,),
        streams_gmem=streams_lib.ForwardInputs(outs.gates, ins.flags),
    )
    written = outs.highest if highest else outs.below
    outputs = forward_step.Outputs(
        streams_gmem=streams_lib.ForwardOutputs((written,), (), None, ()),
        last_gmem=outs.last,
        exchanges_gmem=(),
    )
    slices = jnp.int32(plan.dense.shape.slices(plan.dense.config))
    head = lax.div(self.index, slices)
    windows = plan.windows[0], 0 if highest else plan.windows[1]
    steps = forward_step.Steps(
        dataclasses.replace(plan.dense, windows=windows),
        inputs,
        self.smem,
        forward_step.Sharing(
            place=(self.index - head * slices, head),
            levels_apart=plan.levels - 1 if highest else 0,
            before=before,
            after=after,
            multiplying=functools.partial(words.mark, one),
        ),
    )
    last = forward_loops.within_cluster(steps, outputs, self.smem)
    gmem_io.write_rows(steps.cta, outs.last, last)
