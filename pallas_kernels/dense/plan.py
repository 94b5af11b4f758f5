"""Static facts of one kernel: products, streams, shared memory and registers.

Nothing here is traced into a kernel. `tuning.choose` asks `needs` whether a
`Config` fits before a kernel is built with it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels import step
from pallas_kernels.dense import cut
from pallas_kernels.dense import cut as cut_lib
from pallas_kernels.dense import gradients
from pallas_kernels.dense import partition
from pallas_kernels.dense import product as product_lib
from pallas_kernels.dense import ring as ring_lib
from pallas_kernels.dense import tuning
from pallas_kernels.mosaic import cells

Array = jax.Array
Config = cut.Config
Product = partition.Product
Stream = cut.Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence:
  """Static (hashable) facts of a recurrence, for the whole batch.

  Attributes:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise, on tuples.
    operand: (theta, inputs, h_gates, carry) -> the factor of the last recurrent
      gate; None where that factor is h.
    params: rows of theta.
    shape: (B, T, N, D).
    call: options of the run; `call.out_dtype` is not None.
    target: the device.
    holds: whether a mask may hold the carry.
    restart_learns: whether the restart has a gradient.
  """

  update: Callable[..., Any]
  operand: Callable[..., Any] | None
  params: int
  shape: tuple[int, int, int, int]
  call: call_lib.Call
  target: devices.Target
  holds: bool = True
  restart_learns: bool = True

  @property
  def batch_axis(self) -> int:
    """Axis of the batch in arrays of all steps."""
    return 1 if self.call.time_major else 0

  def of_batch(self, batch: int) -> 'Recurrence':
    """Returns the recurrence of so many sequences."""
    return dataclasses.replace(self, shape=(batch, *self.shape[1:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(step.Step):
  """Static facts of one kernel.

  Attributes:
    shape: sizes.
    holds: whether flags may hold the carry.
    restart_learns: whether flags may restart it from arrays that learn.
    again: whether the adjoint multiplies R h again, in the one CTA of a head,
      instead of reading it.
    in_place: whether the gradient of R reads the cotangents of x where they
      lie, as `gradients.d_small_kernel` can.
  """

  shape: cut.Shape
  holds: bool = True
  restart_learns: bool = True
  again: bool = False
  in_place: bool = False

  @property
  def split(self) -> bool:
    """Whether a factor has two bfloat16 parts."""
    return jnp.dtype(self.dtype) == jnp.float32

  @property
  def ahead(self) -> int:
    """Steps by which flags are needed before inputs."""
    return 1 if self.flags else 0

  @property
  def stages(self) -> list[Product]:
    """The products of a step of the recurrence, each with its own factor."""
    if self.operand is None:
      return [Product(self.recurrent, 0, False)]
    last = self.recurrent - 1
    return [Product(last, 0, False), Product(1, last, False)]

  def products(self, config: Config) -> list[Product]:
    """Returns the products of a step of the kernel, in order.

    The adjoint has the transposed products, the last stage first. A forward
    kernel cuts its first product in two where the operand of the second depends
    on some gates only: later gates are multiplied while the operand is handed
    over. Within a CTA the hand-off is short, and fewer, fuller products are
    faster.

    Args:
      config: the cut.
    """
    if self.adjoint:
      return [Product(p.gates, p.first, True) for p in reversed(self.stages)]
    first, *others = self.stages
    early = max(1, self.early_gates)
    late = first.gates - early
    if not others or late == 0:
      return self.stages
    parts = [Product(early, 0, False), Product(late, early, False, late=True)]
    folded = all(part.folded(config, self.shape) for part in parts)
    if config.sums == 1 and not folded:
      return self.stages
    return [*parts, *others]

  @functools.cached_property
  def early_gates(self) -> int:
    """Leading recurrent gates, up to the last one that `operand` reads."""
    if self.operand is None:
      return self.recurrent
    counts = self.params, self.gates, self.recurrent - 1, self.states
    used = cells.used(self.operand, *map(step.elements, counts))
    start = self.params + self.gates
    gates = used[start : start + self.recurrent - 1]
    return max((i + 1 for i, needed in enumerate(gates) if needed), default=0)

  @functools.cached_property
  def streams(self) -> cut.Streams:
    """The streams that the kernel reads and writes."""
    return _adjoint_streams(self) if self.adjoint else _forward_streams(self)


def _flags_stream(plan: Plan) -> Stream | None:
  if not plan.flags:
    return None
  return Stream(jnp.int32, plan.call.groups, flags=True)


def _gates_by_head(plan: Plan, dtype: Any) -> tuple[Stream, ...]:
  return tuple(Stream(dtype, p.gates, by_head=True) for p in plan.stages)


def _forward_streams(plan: Plan) -> cut.Streams:
  ins = cut.ForwardInputs(Stream(plan.x_dtype, plan.gates), _flags_stream(plan))
  # The products over all steps that read these go head by head.
  factor = Stream(plan.dtype, by_head=True)
  starts = (factor, *[Stream(jnp.float32)] * (plan.states - 1))
  outs = cut.ForwardOutputs(
      carries=(Stream(plan.call.out_dtype),) * plan.call.outputs,
      starts=starts if plan.save else (),
      operand=factor if plan.save and plan.operand is not None else None,
  )
  return cut.Streams(ins, outs)


def _adjoint_streams(plan: Plan) -> cut.Streams:
  others = (Stream(jnp.float32),) * (plan.states - 1)
  ins = cut.AdjointInputs(
      x=Stream(plan.x_dtype, plan.gates),
      h_gates=() if plan.again else _gates_by_head(plan, jnp.float32),
      starts=(Stream(plan.dtype, by_head=True), *others),
      d_carries=(Stream(plan.call.out_dtype),) * plan.call.outputs,
      flags=_flags_stream(plan),
  )
  # The products over all steps that follow go head by head and want heads
  # first. With one head, d_x has that order and can serve for both, as it can
  # where `gradients.d_small_kernel` reads it.
  d_gates: tuple[Stream, ...] = ()
  apart = plan.shape.heads > 1 and not plan.in_place
  if apart or not plan.shared:
    d_gates = _gates_by_head(plan, plan.dtype)
  outs = cut.AdjointOutputs(Stream(plan.dtype, plan.gates), d_gates)
  return cut.Streams(ins, outs)


class Smem(NamedTuple):
  """Shared memory of a kernel: words of int32, or references.

  Attributes:
    ring: ring buffer of the inputs.
    staging: staging of the outputs.
    products: memory of each product of a step.
    again: the matrix of the product R h that the adjoint multiplies again, or
      None.
  """

  ring: Any
  staging: Any
  products: tuple[product_lib.Smem, ...]
  again: Any


def smem_words(plan: Plan, config: Config) -> Smem:
  """Returns the shared memory that a kernel allocates, in int32."""
  ins, outs = plan.streams
  products = plan.products(config)
  words = Smem(
      ring=ring_lib.Ring.words(config, ins),
      staging=(
          0 if config.through_device else ring_lib.Staging.words(config, outs)
      ),
      products=product_lib.smem_words(products, config, plan.shape, plan.split),
      again=_words_again(plan, config),
  )
  # Empty buffers are not allowed.
  return jax.tree.map(lambda n: max(n, 32), words)


def _words_again(plan: Plan, config: Config) -> int | None:
  """Returns the shared memory for the matrix of R h, in int32."""
  if not plan.again:
    return None  # Every buffer, empty or not, takes 1024 bytes.
  (product,) = plan.stages
  return product_lib.matrix_words(product, config, plan.shape)


def resources(plan: Plan, config: Config) -> tuple[int, int]:
  """Returns a thread's registers for the recurrent kernel, and a CTA's bytes.

  Args:
    plan: static facts of the kernel.
    config: the cut to try.
  """
  kept = partition.kept_blocks(
      plan.products(config), config, plan.shape, plan.split
  )
  # Each buffer starts at a multiple of 1024 bytes.
  words = jax.tree.leaves(smem_words(plan, config))
  size = sum(-(-4 * n // 1024) * 1024 for n in words)
  return sum(registers for _, registers in kept), size


# Cuts a batch into as few pieces as a kernel can hold at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """Some rows of a batch.

  Attributes:
    plan: plan of the kernel that runs them.
    start: the first row.
  """

  plan: Plan
  start: int

  def cut(self, axis: int, arrays: Any) -> Any:
    """Returns these rows of a tree of arrays.

    Args:
      axis: the batch axis of all arrays.
      arrays: arrays of the whole batch.
    """
    end = self.start + self.plan.shape.batch
    return jax.tree.map(
        lambda x: lax.slice_in_dim(x, self.start, end, axis=axis), arrays
    )


def join(axis: int, parts: Sequence[Any]) -> Any:
  """Concatenates the results of all pieces; undoes `Piece.cut`."""
  if len(parts) == 1:
    return parts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


def plan_pieces(
    recurrence: Recurrence,
    x: Array,
    recurrent_kernel: Array,
    *,
    states: int,
    flags: bool,
    adjoint: bool = False,
    save: bool = False,
) -> list[Piece]:
  """Returns the pieces of a batch, with a configured plan each.

  Args:
    recurrence: static facts of the whole batch.
    x: the inputs; their type is read.
    recurrent_kernel: the recurrent kernel; its type is read.
    states: arrays of the carry.
    flags: whether there are flags.
    adjoint: whether to plan the adjoint instead of the forward kernel.
    save: whether the forward kernel returns the arrays that the adjoint reads.

  Raises:
    NotImplementedError: not even 8 rows fit.
  """

  def make_plan(piece: Recurrence) -> Plan:
    batch, time, heads, size = piece.shape
    plan = Plan(
        update=piece.update,
        operand=piece.operand,
        params=piece.params,
        gates=x.shape[2],
        recurrent=recurrent_kernel.shape[0],
        states=states,
        shape=cut_lib.Shape(
            batch=batch,
            time=time,
            heads=heads,
            size=size,
            time_major=piece.call.time_major,
            levels=piece.call.levels,
        ),
        call=piece.call,
        flags=flags,
        holds=flags and piece.holds,
        restart_learns=flags and piece.restart_learns,
        x_dtype=x.dtype,
        dtype=jnp.promote_types(x.dtype, recurrent_kernel.dtype),
        adjoint=adjoint,
        save=save,
    )
    return _configured(plan, piece.target)

  return cut_batch(recurrence, make_plan)


def _configured(plan: Plan, target: devices.Target) -> Plan:
  """Returns the plan with the best configuration that fits."""
  kind = tuning.Kind(
      gates=plan.stages[0].gates,
      two=plan.operand is not None,
      adjoint=plan.adjoint,
      split=plan.split,
  )

  def choose(plan: Plan, kind: tuning.Kind) -> Plan:
    needs = functools.partial(resources, plan)
    config = tuning.choose(plan.shape, kind, needs, target)
    return dataclasses.replace(plan, config=config)

  if plan.adjoint and _reads_in_place(plan, target):
    plan = dataclasses.replace(plan, in_place=True)
  if tuning.multiplies_again(plan.shape, kind, target):
    again = choose(
        dataclasses.replace(plan, again=True),
        dataclasses.replace(kind, again=True),
    )
    if again.config.exchange == 'shared':
      return again
  return choose(plan, kind)


def _reads_in_place(plan: Plan, target: devices.Target) -> bool:
  """Returns whether `gradients.d_small_kernel` has the gradient of R."""
  if target.interpret or not target.wgmma:
    return False
  shape = plan.shape
  fits = gradients.fits(shape.batch * shape.time, shape.size)
  if not fits or shape.heads == 1 or plan.split:
    return False
  if plan.operand is not None:  # A gate has another factor than h.
    return False
  if shape.levels > 1:
    return False
  return plan.shared


def cut_batch(
    recurrence: Recurrence, make_plan: Callable[[Recurrence], Plan]
) -> list[Piece]:
  """Cuts a batch into as few pieces as fit the device.

  Args:
    recurrence: static facts of the whole batch.
    make_plan: returns a plan, or raises NotImplementedError.
  """
  batch, time, heads, size = recurrence.shape
  plans: dict[int, Plan] = {}

  def plan_of(rows: int) -> Plan:
    if rows not in plans:
      shape = (rows, time, heads, size)
      plans[rows] = make_plan(dataclasses.replace(recurrence, shape=shape))
    return plans[rows]

  # Kernels take rows by 8.
  octets = -(-batch // 8)
  sizes = {8 * -(-octets // pieces) for pieces in range(1, octets + 1)}
  if recurrence.call.levels > 1:
    sizes = {8 * octets}  # Arrays hold level by level.
  for rows in sorted(sizes, reverse=True):
    starts = range(0, batch, rows)
    try:
      return [
          Piece(plan=plan_of(min(rows, batch - start)), start=start)
          for start in starts
      ]
    except NotImplementedError:
      if rows == min(sizes):
        raise
  raise ValueError('there are no sequences')
