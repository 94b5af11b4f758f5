"""Recurrences with a dense or block-diagonal kernel: persistent in time.

carry_t = update(theta, x_t, R h_{t-1}, carry_{t-1}), and its adjoint. What
takes time is latency: one step's product cannot start before the step before it
has ended. So the recurrent kernel stays on chip, the carry never leaves the
registers, inputs arrive several steps ahead, outputs leave without being waited
for, and only what is multiplied is exchanged; `cta.py` says between whom and
how.

The adjoint multiplies the transposed kernel with the gates' cotangents, step by
step; the gates themselves, and the gradient of the kernel, are products over
all steps at once and are left to the compiler.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.dense import exchange as exchange_lib
from pallas_kernels.dense import matmul_partition
from pallas_kernels.dense import operand as operand_lib
from pallas_kernels.dense import resident_matmul
from pallas_kernels.dense import smem_pipeline
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import dataflow
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import ptx

Array = jax.Array
Stream = thread_layout.Stream
Product = matmul_partition.Product


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static in a call.

  Attributes:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise, in tuples.
    operand: (theta, inputs, h_gates, carry) -> what the last recurrent gate
      multiplies; None where that is h.
    params: how many rows of theta there are.
    gates: how many inputs there are.
    recurrent: how many recurrent gates there are.
    shape: sizes.
    reverse: whether time runs from the last step to the first.
    both: whether it runs the other way for the second half of the heads.
    flags: whether some steps restart or are held.
    dtype: of the inputs and of what is multiplied.
    config: how the work is cut.
    clip: bound of what comes back through a product, or None.
    stop: whether nothing does.
    early: of the recurrent gates, how many come first up to the last that
      `operand` depends on.
  """

  update: Callable[..., Any]
  operand: Callable[..., Any] | None
  params: int
  gates: int
  recurrent: int
  shape: thread_layout.Shape
  reverse: bool
  both: bool
  flags: bool
  dtype: Any
  config: Any
  clip: float | None = None
  stop: bool = False
  early: int = 0

  @property
  def stages(self) -> list[Product]:
    """The products of a step."""
    if self.operand is None:
      return [Product(self.recurrent, 0, False)]
    last = self.recurrent - 1
    return [Product(last, 0, False), Product(1, last, False)]

  def products(self, config) -> list[Product]:
    """The same, cut where some of it can be done later.

    What the operand does not depend on is multiplied while the operand is on
    its way. Where that is not far, fewer and fuller products are faster.
    """
    first, *others = self.stages
    early = max(1, self.early)
    late = first.gates - early
    if not others or late == 0:
      return self.stages
    parts = [Product(early, 0, False), Product(late, early, False, late=True)]
    folded = all(part.folded(config, self.shape) for part in parts)
    if config.sums == 1 and not folded:
      return self.stages
    return [*parts, *others]

  @property
  def adjoints(self) -> list[Product]:
    """Those of the adjoint, the last stage first."""
    return [Product(p.gates, p.first, True) for p in reversed(self.stages)]

  @property
  def stream_of_flags(self) -> Stream:
    return Stream(jnp.int32, 1 + self.both, flags=True)

  @property
  def ahead(self) -> int:
    """By how many steps flags are needed before inputs."""
    return 1 if self.flags else 0


def prepare_flags(flags: Array, shape: thread_layout.Shape) -> Array:
  """[1 or 2, B, T] -> int32 [T, 1 or 2, B'], B' the batch rounded up to 4."""
  missing = -shape.batch % 4
  flags = jnp.moveaxis(flags, 2, 0)
  return jnp.pad(flags, ((0, 0), (0, 0), (0, missing)))


def forward_streams(
    plan: Plan, x_dtype, states: int, outputs: int, out_dtype, save: bool
):
  """Returns the streams that `forward` reads and writes."""
  ins = [Stream(x_dtype, plan.gates)]
  if plan.flags:
    ins.append(plan.stream_of_flags)
  outs = [Stream(out_dtype)] * outputs
  if save:
    # Operands, of products over all steps that are done a head at a time.
    operand = Stream(plan.dtype, by_head=True)
    outs += [operand] + [Stream(jnp.float32)] * (states - 1)
    outs += [operand] * (plan.operand is not None)
  return ins, outs


def backward_streams(plan: Plan, x_dtype, states: int, d_dtypes):
  """Returns the streams that `backward` reads and writes."""
  ins = [Stream(x_dtype, plan.gates)]
  ins += [Stream(jnp.float32, p.gates, by_head=True) for p in plan.stages]
  ins += [Stream(plan.dtype, by_head=True)]
  ins += [Stream(jnp.float32)] * (states - 1)
  ins += [Stream(dtype) for dtype in d_dtypes]
  if plan.flags:
    ins.append(plan.stream_of_flags)
  outs = [Stream(plan.dtype, plan.gates)]
  # Products over all steps follow, a head at a time, so that they want heads
  # first; with one head that is the order of the inputs.
  same = shared_gates(plan, states) == tuple(range(plan.gates))
  if plan.shape.heads > 1 or not same:
    outs += [Stream(plan.dtype, p.gates, by_head=True) for p in plan.stages]
  return ins, outs


def needs(plan: Plan, ins, outs, products, config) -> tuple[int, int]:
  """Returns registers for the recurrent kernel, and bytes of shared memory."""
  split = jnp.dtype(plan.dtype) == jnp.float32
  kept = matmul_partition.kept_blocks(products, config, plan.shape, split)
  words = _words(plan.shape, config, ins, outs, products, split)
  # Each buffer starts at a multiple of 1024 bytes.
  size = sum(-(-4 * n // 1024) * 1024 for n in words)
  return sum(registers for _, registers in kept), size


def _words(shape, config, ins, outs, products, split) -> list[int]:
  """Returns the shared memory that a kernel takes, in int32."""
  words = [
      smem_pipeline.Ring.words(config, ins),
      0 if config.through_device else smem_pipeline.Staging.words(config, outs),
  ]
  kept = matmul_partition.kept_blocks(products, config, shape, split)
  Multiplier = resident_matmul.Multiplier
  for i, (blocks, _) in enumerate(kept):
    product, sharing = products[i], _sharing(products, i)
    if not product.late:
      words += [
          operand_lib.Operand.words(config, shape, sharing, split),
          operand_lib.Operand.SIGNAL_WORDS,
      ]
    words += [
        Multiplier.partial_words(config, product),
        Multiplier.rest_words(config, product, shape, split, blocks),
    ]
  return [max(n, 32) for n in words]


def _sharing(products: Sequence[Product], i: int) -> list[Product]:
  """Returns the i-th product and the late ones that have its operand."""
  late = itertools.takewhile(lambda product: product.late, products[i + 1 :])
  return [products[i], *late]


def multipliers(
    cta: thread_layout.Cta, products, matrix, scratch
) -> list[resident_matmul.Multiplier]:
  """Returns the products of a step, inside a kernel.

  Args:
    cta: coordinates.
    products: which.
    matrix: references to the recurrent kernel.
    scratch: references for each product, see `_words`.
  """
  kept = matmul_partition.kept_blocks(
      products, cta.config, cta.shape, cta.split
  )
  made: list[resident_matmul.Multiplier] = []
  left = list(scratch)
  for i, (blocks, _) in enumerate(kept):
    product, sharing = products[i], _sharing(products, i)
    if product.late:
      operand = made[-1].operand
    else:
      operand = operand_lib.Operand(cta, sharing, left.pop(0), left.pop(0))
    made.append(
        resident_matmul.Multiplier(
            cta, product, matrix, operand, left.pop(0), left.pop(0), blocks
        )
    )
  return made


def early_gates(plan: Plan, states: int) -> int:
  """Returns how many recurrent gates come first, up to the operand's last."""
  if plan.operand is None:
    return plan.recurrent
  aval = jax.ShapeDtypeStruct((ptx.LANES,), jnp.float32)
  avals = lambda n: (aval,) * n
  counts = plan.params, plan.gates, plan.recurrent - 1, states
  used = dataflow.used(plan.operand, *map(avals, counts))
  start = plan.params + plan.gates
  gates = used[start : start + plan.recurrent - 1]
  return max((i + 1 for i, needed in enumerate(gates) if needed), default=0)


def shared_gates(plan: Plan, states: int) -> tuple[int | None, ...]:
  """Returns for each recurrent gate the input with the same cotangent.

  Where a gate is the sum x + R h, the two cotangents are one array, which need
  not be written twice.
  """
  aval = jax.ShapeDtypeStruct((ptx.LANES,), jnp.float32)
  avals = lambda n: (aval,) * n

  def pull(theta, row, gates, start, d_new, d_u):
    _, f = jax.vjp(plan.update, theta, row, gates, start)
    _, d_row, d_gates, _ = f(d_new)
    if plan.operand is not None:
      _, f = jax.vjp(plan.operand, theta, row, gates[:-1], start)
      more = f(d_u)
      d_row = tuple(map(jnp.add, d_row, more[1]))
      d_gates = (*map(jnp.add, d_gates[:-1], more[2]), d_gates[-1])
    return d_row, d_gates

  numbers = dataflow.value_numbers(
      pull,
      avals(plan.params),
      avals(plan.gates),
      avals(plan.recurrent),
      avals(states),
      avals(states),
      aval,
  )
  d_row, d_gates = numbers[: plan.gates], numbers[plan.gates :]
  taken: set[int] = set()
  same: list[int | None] = []
  for number in d_gates:
    found = [j for j, n in enumerate(d_row) if n == number and j not in taken]
    same.append(found[0] if found else None)
    taken.update(found[:1])
  return tuple(same)


def loop(time: int, body: Callable[..., Any], init: Any) -> Any:
  """Loops over steps that are int32, whatever JAX makes of Python's numbers."""
  return lax.fori_loop(0, time, lambda i, s: body(i.astype(jnp.int32), s), init)


def accuracy(plan: Plan, error: float) -> pointwise.Accuracy:
  """Returns that of pointwise functions, `error` where h has 16 bits."""
  short = jnp.dtype(plan.dtype).itemsize == 2
  return pointwise.Accuracy(error if short else 0.0, instructions.reciprocal)


def publishable(x: Array, dtype) -> Array:
  """Casts, without NaNs that look like `waiting.POISON`."""
  return jnp.where(jnp.isnan(x), jnp.nan, x).astype(dtype)


def meet(
    cta: thread_layout.Cta, exchanges: Sequence[exchange_lib.Exchange]
) -> None:
  """Clears this CTA's parts of the exchanges, and waits for all CTAs."""
  shape, config = cta.shape, cta.config
  slices = pl.cdiv(shape.batch, config.columns)
  ctas = shape.heads * shape.parts(config) * slices
  mailbox.open_all(exchanges, ctas, config.warpgroups)


def kernel(plan, body, name, ins, outs, products, split, out_type):
  """Returns a kernel as a function of arrays."""
  config, shape = plan.config, plan.shape
  grid = {'slice': pl.cdiv(shape.batch, config.columns), 'head': shape.heads}
  options: dict[str, Any] = {}
  if config.warpgroups > 1:
    options = {'num_threads': config.warpgroups, 'thread_name': 'warpgroup'}
  if config.through_device:
    grid['group'] = shape.parts(config) // config.cluster
  if config.cluster > 1:
    options |= {'cluster': (config.cluster,), 'cluster_names': ('rank',)}
  words = _words(shape, config, ins, outs, products, split)
  body.__name__ = name
  kernel = plgpu.kernel(
      body,
      out_type=tuple(out_type),
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in words],
      compiler_params=plgpu.CompilerParams(
          approx_math=True,
          unsafe_no_auto_barriers=True,
          lowering_semantics=plgpu.LoweringSemantics.Lane,
      ),
      **options,
  )
  if config.through_device:
    return mailbox.one_at_a_time(kernel)
  return kernel
