"""The kernel that runs levels at the same time, from the lowest inputs up.

The first CTAs make gates of a level each, and the others run recurrences of
one, each over some rows of a head. Their warpgroups:

                     gates, `gate_products`     recurrences
    the first ones   two multiply               as of `dense/forward.py`
    the last one     two warps copy slices      one warp waits for gates, others
                     of x, one waits for x,     count outputs, `chunks`
                     one counts gates
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
    kernels: W of each level, [G, I, F], in float32 or the dtype of x.
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

  def wavefront_recurrence(*refs):
    rest = iter(refs)
    take = lambda count: [next(rest) for _ in range(count)]
    _Cta(
        plan,
        jax.tree.unflatten(in_tree, take(len(arrays))),
        jax.tree.unflatten(out_tree, take(len(types))),
        chunks_lib.Words(next(rest)),
        gate_products.Buffers(*rest),
    ).run()

  kernel = plgpu.kernel(
      wavefront_recurrence,
      out_type=tuple(types),
      grid=(plan.ctas // plan_lib.MEMBERS,),
      grid_names=('cluster',),
      cluster=(plan_lib.MEMBERS,),
      cluster_names=('member',),
      num_threads=plan_lib.WARPGROUPS,
      thread_name='warpgroup',
      scratch_types=[
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
      words: chunks_lib.Words,
      buffers: gate_products.Buffers,
  ):
    self.plan, self.ins, self.outs = plan, ins, outs
    self.words, self.buffers = words, buffers
    self.group = lax.axis_index('warpgroup')
    index = lax.axis_index('cluster') * plan_lib.MEMBERS
    index = index + lax.axis_index('member')
    self.counters = chunks_lib.Counters(
        outs.counters, plan.levels, plan.chunks, index, plan.ctas
    )
    made = lax.div(index, jnp.int32(plan.blocks))
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
        block=index - made * plan.blocks,
    )
    self.makes = index < plan.makers
    self.runs = ~self.makes & (index < plan.makers + plan.runners)
    runner = index - plan.makers
    self.level = lax.div(runner, jnp.int32(plan.runners_of_level))
    place = runner - self.level * plan.runners_of_level
    self.first = place * plan.together

  def run(self) -> None:
    """Runs the task of this warpgroup."""
    plan = self.plan
    self.products.open(self._one())
    self.words.clear()
    pl.when(self.makes)(lambda: self.products.stage(self.group))
    mailbox.open_all([self.counters], plan.ctas, plan_lib.WARPGROUPS)
    last = self.group == plan_lib.WARPGROUPS - 1
    multiplies = self.makes & (self.group < plan_lib.CONSUMERS)
    # Several recurrences have a warpgroup each.
    task: Any = self.group
    recurs = self._exists(task)
    if plan.together == 1:
      task, recurs = 0, self.group < plan.dense.config.warpgroups
    recurs &= self.runs

    @pl.when(multiplies)
    def _():
      plgpu.set_max_registers(plan_lib.MULTIPLYING, action='increase')
      self.products.multiply(self.group)

    for highest in (False, True):
      own = (self.level == plan.levels - 1) == highest

      @pl.when(recurs & own)
      def _(highest=highest):
        plgpu.set_max_registers(plan_lib.RECURRING, action='increase')
        self._run_recurrence(task, highest)

    def each_warp():
      warp = lax.axis_index('warp')
      for number in range(gate_products.COPIERS):
        copy = functools.partial(self.products.copy, number)
        pl.when((warp == number) & self.makes)(copy)
      others = self.products.look_out, self.products.tell
      for number, run in enumerate(others, gate_products.COPIERS):
        pl.when((warp == number) & self.makes)(run)
      pl.when((warp == 0) & self.runs)(self._await_gates)
      told = warp - 1
      pl.when((warp > 0) & self.runs & self._exists(told))(
          functools.partial(self._tell_outputs, told)
      )

    @pl.when(~(multiplies | recurs))
    def _():
      plgpu.set_max_registers(plan_lib.OTHERS, action='decrease')

      @pl.when(last)
      def _():
        pl.kernel(each_warp, mesh=plgpu.WarpMesh(axis_name='warp'))()

    # No CTA leaves while another may still tell it that a slot is free.
    sync.cluster_barrier()

  def _exists(self, task) -> Any:
    """Returns whether a CTA that runs recurrences has one of this number."""
    plan = self.plan
    return (task < plan.together) & (self.first + task < plan.recurrences)

  def _buffers(self, task) -> dense_plan.Smem:
    """Returns a recurrence's shared memory, where others have slices of x."""
    sizes, places = self.plan.smem, []
    at = task * sum(jax.tree.leaves(sizes))
    for size in jax.tree.leaves(sizes):
      places.append(ptx.Place(self.buffers.slices.ref, at))
      at = at + size
    return jax.tree.unflatten(jax.tree.structure(sizes), places)

  def _one(self) -> Array:
    """Returns int32 [128], 1 in the first thread of the CTA, else 0."""
    return ((ptx.thread() == 0) & (self.group == 0)).astype(jnp.int32)

  def _await_gates(self) -> None:
    """Passes on which gates are there; one warp does."""
    plan = self.plan

    @pl.loop(0, plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)
      index = self.counters.gates(self.level, chunk)
      self.counters.wait(index, plan.blocks)

      # Outputs take the place of earlier ones, which have been read.
      earlier = chunk - plan_lib.CHUNKS_OF_OUTPUTS
      above = self.level + 1

      @pl.when((earlier >= 0) & (above < plan.levels))
      def _():
        index = self.counters.gates(above, earlier)
        self.counters.wait(index, plan.blocks)

      self.words.put(chunks_lib.Words.CHUNKS, chunk + 1)

  def _tell_outputs(self, task) -> None:
    """Tells others which outputs of a recurrence are stored; one warp does."""
    plan, word = self.plan, chunks_lib.Words.STEPS + task

    @pl.loop(0, plan.chunks.count)
    def _(chunk):
      chunk = chunk.astype(jnp.int32)
      self.words.wait(word, plan.chunks.end(chunk), nap=40)
      self.counters.add(self.counters.outputs(self.level, chunk))

  def _run_recurrence(self, task, highest: bool) -> None:
    """Runs the recurrence of some rows of a head.

    Args:
      task: its number in the CTA.
      highest: whether it is of the highest level, which has an array apart.
    """
    plan, ins, outs = self.plan, self.ins, self.outs
    chunks, words = plan.chunks, self.words
    one = self._one()
    if plan.together > 1:
      one = (ptx.thread() == 0).astype(jnp.int32)
    smem = self._buffers(task)
    time = plan.dense.shape.time

    def before(step):
      chunk, first = chunks.of_step(step)
      wait = lambda: words.wait(chunks_lib.Words.CHUNKS, chunk + 1)
      pl.when(first & (step < time))(wait)

    def after(step):
      _, first = chunks.of_step(step)
      tell = lambda: words.put_by(one, chunks_lib.Words.STEPS + task, step)
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
    index = self.level * plan.recurrences + self.first + task
    slices = jnp.int32(plan.dense.shape.slices(plan.dense.config))
    head = lax.div(index, slices)
    windows = plan.windows[0], 0 if highest else plan.windows[1]
    steps = forward_step.Steps(
        dataclasses.replace(plan.dense, windows=windows),
        inputs,
        smem,
        forward_step.Sharing(
            place=(index - head * slices, head),
            levels_apart=plan.levels - 1 if highest else 0,
            barrier=sync.LAST_BARRIER - task,
            together=chunks.steps,
            before=before,
            after=after,
        ),
    )
    last = forward_loops.within_cluster(steps, outputs, smem)
    gmem_io.write_rows(steps.cta, outs.last, last)
