"""Plain loops in place of the kernels in tiles; see `dense_loops`."""

import contextlib
import dataclasses
import math
from typing import Any
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels.tiled import choice
from pallas_kernels.tiled import limits
from tests.testing import abstract_gpu
from tests.testing import dense_loops

if abstract_gpu.RUNS:
  from pallas_kernels.mosaic import step_flags
  from pallas_kernels.tiled import backward
  from pallas_kernels.tiled import forward
  from pallas_kernels.tiled import on_chip_backward
  from pallas_kernels.tiled import tuning


@dataclasses.dataclass(frozen=True)
class _Shape:
  batch: int
  time: int
  time_major: bool


class Loop(dense_loops.Loop):
  """The steps of a kernel call, in the order of its plan."""

  def __init__(self, plan, flags):
    view: Any = _View(
        _Shape(plan.batch, plan.time, plan.call.time_major),
        plan.call.reverse != plan.adjoint,
    )
    self.plan = view
    self.flags = flags
    if flags is not None and view.reverse:
      self.flags = flags[::-1]

  def gates(self, x, count):
    """[B, T, G F] -> float32 [steps, B, G, F]."""
    x = self.steps(x)
    return x.reshape(*x.shape[:2], count, -1)

  def joined(self, x, dtype):
    """The inverse of `gates`, in a dtype."""
    return self.stream(x.reshape(*x.shape[:2], -1), dtype)


@dataclasses.dataclass(frozen=True)
class _View:
  shape: _Shape
  reverse: bool


def unarranged(plan, matrix, depth=None):
  """Undoes `plan.arrange`: R as [G, N, from, to], float32.

  Args:
    plan: of the kernel.
    matrix: from `plan.arrange`.
    depth: the number of elements that the product sums over; None for those of
      a head.
  """
  gates, heads, size = plan.recurrent, plan.heads, plan.size
  shape = gates, heads, depth or size, size
  count = math.prod(shape)
  # Counted from 1: zeros may be added to the matrix.
  places = jnp.arange(1, count + 1).reshape(shape)
  exact = dataclasses.replace(plan, dtype=jnp.int32)
  order = exact.arrange(places).reshape(-1)
  flat = jnp.zeros(count + 1, jnp.float32)
  flat = flat.at[order].set(matrix.reshape(-1).astype(jnp.float32))
  return flat[1:].reshape(shape)


def forward_loop(plan, inputs):
  """A loop in place of `forward.forward`."""
  theta, x, source, matrix, carry, restart, flags = inputs
  loop = Loop(plan, flags)
  call, saved, alone = plan.call, plan.save, None
  if source is not None:
    # The gates of a tile side by side, as those of R.
    own = unarranged(plan, matrix[: plan.depth], plan.depth)[:, 0]
    matrix = matrix[plan.depth :]
    own = own[jnp.argsort(jnp.array(plan.projected))]
    x = jnp.einsum('abi,gif->abgf', source.astype(jnp.float32), own)
    for i in plan.alone:
      x = x.at[:, :, i].set(dense_loops.rounded(x[:, :, i], plan.x_dtype))
    if saved and plan.takes:
      alone = jnp.stack([x[:, :, i] for i in plan.alone], 2)
      alone = alone.reshape(*x.shape[:2], -1).astype(plan.x_dtype)
    x = x.reshape(*x.shape[:2], -1)
  matrix = jnp.swapaxes(unarranged(plan, matrix), -1, -2)
  rows = tuple(theta)[: plan.params]

  def step(state, xs):
    x_t, flags_t = xs
    again = None if restart is None else tuple(restart)
    start = loop.choose(flags_t, step_flags.RESET, again, state)
    h = dense_loops.rounded(start[0], plan.dtype)
    gates = tuple(dense_loops.products(matrix, h))
    new = plan.update(rows, dense_loops.gates_of(x_t), gates, start)
    new = loop.choose(flags_t, step_flags.HOLD, start, new)
    kept = plan.kept(dense_loops.gates_of(x_t), gates)
    return new, (new, start, jnp.stack(kept, 1))

  last, (new, start, gates) = lax.scan(
      step, tuple(carry), (loop.gates(x, plan.gates), loop.flags)
  )
  return forward.Outputs(
      carries=tuple(
          loop.stream(y, call.out_dtype) for y in new[: call.outputs]
      ),
      h=loop.stream(start[0], plan.dtype) if saved else None,
      others=tuple(loop.stream(s, jnp.float32) for s in start[1:])
      if saved
      else (),
      gates=loop.joined(gates, plan.kept_dtype) if saved else None,
      alone=alone,
      last=jnp.stack(last),
      state=None,
  )


def backward_loop(plan, inputs):
  """A loop in place of `backward.backward`."""
  theta, x, matrix, h, others, gates, d_carries, d_last, flags = inputs
  loop = Loop(plan, flags)
  matrix = unarranged(plan, matrix)
  rows = tuple(theta)[: plan.params]
  zeros = tuple(jnp.zeros_like(d_last))

  def through(d_gates):
    if plan.call.stop_recurrent_gradient:
      return zeros[0]
    d = sum(
        dense_loops.products(
            matrix[i : i + 1], dense_loops.rounded(d, plan.dtype)
        )[0]
        for i, d in enumerate(d_gates)
    )
    return dense_loops.bounded(plan.call, d)

  def step(state, xs):
    d_carry, d_rows, d_restart = state
    x_t, gates, start, g, flags_t = xs
    d_carry = (*map(jnp.add, d_carry[: len(g)], g), *d_carry[len(g) :])
    d_new = loop.choose(flags_t, step_flags.HOLD, zeros, d_carry)
    row = () if x_t is None else dense_loops.gates_of(x_t)
    gates = dense_loops.gates_of(gates)
    _, pull = jax.vjp(plan.update_of_kept, rows, row, gates, start)
    d_own, d_alone, d_gates, d_start = pull(d_new)
    d_row = plan.input_gates(d_alone, d_gates)
    d_start = (d_start[0] + through(d_gates), *d_start[1:])
    d_start, lost = loop.before(flags_t, d_start, d_carry, zeros)
    # A parameter's cotangent is a sum over the batch here.
    d_rows = jax.tree.map(jnp.add, d_rows, d_own)
    d_restart = tuple(map(jnp.add, d_restart, lost))
    outs = jnp.stack(d_row, 1), jnp.stack(d_gates, 1)
    return (d_start, d_rows, d_restart), outs

  xs = (
      None if x is None else loop.gates(x, len(plan.alone)),
      loop.gates(gates, plan.recurrent),
      tuple(map(loop.steps, (h, *others))),
      tuple(map(loop.steps, d_carries)),
      loop.flags,
  )
  init = tuple(d_last), jax.tree.map(jnp.zeros_like, rows), zeros
  (d_carry, d_rows, d_restart), (d_x, d_gates) = lax.scan(step, init, xs)
  d_theta = jnp.zeros((2, max(plan.params, 1), d_last.shape[-1]), jnp.float32)
  for i, d in enumerate(d_rows):
    d_theta = d_theta.at[1, i].set(d)
  return backward.Outputs(
      d_x=loop.joined(d_x, plan.dtype),
      d_gates=None if plan.shared else loop.joined(d_gates, plan.dtype),
      d_carry=jnp.stack(d_carry),
      d_theta=d_theta,
      d_restart=None if flags is None else jnp.stack(d_restart),
  )


def low():
  """Kernels inside have tiles of 32 rows, of up to so many with R on chip."""
  return mock.patch.object(limits, 'LOW_BATCHES', range(1, 33))


def _can_run(target, kernel, **_):
  del target
  size = kernel.shape[-1]
  return limits.padded(size) <= 1.25 * size


def streamed():
  """Kernels inside have R in device memory, not on the chip."""
  stack = contextlib.ExitStack()
  for name in ('choose_resident', 'choose_team'):
    never = mock.patch.object(tuning, name, lambda **_: None)
    stack.enter_context(never)
  return stack


@contextlib.contextmanager
def forward_plans():
  """Yields a list of the plans that `forward.forward` is called with inside."""
  plans: list[Any] = []
  if not abstract_gpu.RUNS:
    yield plans
    return
  kernel = forward.forward

  def run(plan, inputs):
    plans.append(plan)
    return kernel(plan, inputs)

  with mock.patch.object(forward, 'forward', run):
    yield plans


@contextlib.contextmanager
def imitated(test, on_chip: bool = True):
  """Loops take the place of the kernels inside, as if there was a GPU.

  Recurrences of any number of rows and of heads of some 64 units and more run
  in tiles. Fails unless the loops are called.

  Args:
    test: the test.
    on_chip: whether R stays on the chip, of one head.
  """
  if not abstract_gpu.RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield []
    return
  target = devices.Target(132, False)
  with contextlib.ExitStack() as stack:
    patch = lambda *args: stack.enter_context(mock.patch.object(*args))
    patch(devices, 'current', lambda: target)
    patch(choice, 'pay', _can_run)
    if not on_chip:
      stack.enter_context(streamed())
    loop = lambda body: mock.Mock(side_effect=body)
    run = patch(forward, 'forward', loop(forward_loop))
    pull = (
        patch(backward, 'backward', loop(backward_loop)),
        patch(on_chip_backward, 'run', loop(backward_loop)),
    )
    yield
    test.assertTrue(run.called)
    test.assertTrue(any(kernel.called for kernel in pull))
