"""Plain loops in place of the dense kernels, which cannot be interpreted.

`imitated` puts them where the kernels are. They take the arguments and return
the results that the kernels' docstrings promise, so all that surrounds a kernel
runs on any number of CPU devices as if each was a GPU.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import devices
from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from pallas_kernels.dense import backward
  from pallas_kernels.dense import forward
  from pallas_kernels.dense import plan as plan_lib
  from pallas_kernels.mosaic import step_flags


def unpacked(cell):
  """Returns what plans have of a cell: functions of rows for its parameters."""
  by_name = lambda method: lambda theta, *args: method(
      dict(zip(cell.param_names, theta, strict=True)), *args
  )
  two = hasattr(cell, 'operand')
  return {
      'update': by_name(cell.update),
      'operand': by_name(cell.operand) if two else None,
      'params': len(cell.param_names),
  }


def products(matrix, h):
  """[G, N, D, D], indexed [gate, head, row, sum], and [B, F] -> [G, B, F]."""
  _, heads, size, _ = matrix.shape
  h = h.reshape(-1, heads, size)
  gates = jnp.einsum('bnd,gned->gbne', h, matrix)
  return gates.reshape(len(matrix), -1, heads * size)


def whole(matrix):
  """Returns the float32 matrix that its parts add up to."""
  return sum(part.astype(jnp.float32) for part in matrix)


def rounded(x, dtype):
  return x.astype(dtype).astype(jnp.float32)


class Loop:
  """The steps of a kernel call, in the order of its plan."""

  def __init__(self, plan, flags):
    self.plan, self.flags = plan, flags
    if flags is not None:
      self.flags = flags[:, 0, : plan.shape.batch]
    if flags is not None and plan.reverse:
      self.flags = self.flags[::-1]

  def steps(self, x):
    """[B, T, ...], or as the plan has it, to float32 [steps, B, ...]."""
    shape = self.plan.shape
    x = x if shape.time_major else jnp.swapaxes(x, 0, 1)
    assert x.shape[:2] == (shape.time, shape.batch)
    return (x[::-1] if self.plan.reverse else x).astype(jnp.float32)

  def stream(self, x, dtype):
    """The inverse of `steps`, in a dtype."""
    x = (x[::-1] if self.plan.reverse else x).astype(dtype)
    return x if self.plan.shape.time_major else jnp.swapaxes(x, 0, 1)

  def choose(self, flags, bit, chosen, other):
    if flags is None:
      return other
    condition = ((flags & bit) != 0)[:, None]
    return tuple(
        jnp.where(condition, x, y) for x, y in zip(chosen, other, strict=True)
    )

  def before(self, flags, d_start, d_carry, zeros):
    """Returns cotangents of the carry before a step, and of the restart."""
    kept = self.choose(flags, step_flags.HOLD, d_carry, zeros)
    if flags is not None:
      d_start = tuple(map(jnp.add, d_start, kept))
    lost = self.choose(flags, step_flags.RESET, d_start, zeros)
    return self.choose(flags, step_flags.RESET, zeros, d_start), lost


def bounded(call, d):
  """Returns the cotangent that passes a recurrent kernel."""
  if call.zero_not_finite:
    d = jnp.where(jnp.isfinite(d), d, 0)
  clip = call.recurrent_gradient_clip
  return d if clip is None else jnp.clip(d, -clip, clip)


def gates_of(x):
  """[B, G, F] -> G arrays [B, F]."""
  return tuple(x[:, i] for i in range(x.shape[1]))


def by_head(plan, x):
  """[B, T, G, F] -> [N, B, T, G, D]."""
  x = x.reshape(*x.shape[:3], plan.shape.heads, plan.shape.size)
  return jnp.moveaxis(x, 3, 0)


def in_groups(run, plan, *args):
  """Runs each direction, or each level, alone.

  Args:
    run: a function of a plan and args.
    plan: of all.
    *args: trees of arrays. Heads are the first of five axes, and the second of
      four if it is a matrix; flags are integers; features are the last axis of
      all others. With levels, arrays of all steps hold one after the other.

  Returns:
    The results, put together.
  """
  shape, call, groups = plan.shape, plan.call, plan.call.groups
  lead = shape.batch, shape.time
  lead = lead[::-1] if shape.time_major else lead

  def one_by_one(x):
    is_matrix = x.ndim == 4 and x.shape[2] == x.shape[3]
    return (
        call.levels > 1
        and x.ndim in (3, 4)
        and x.shape[:2] == lead
        and not is_matrix
    )

  def axis(x):
    if jnp.issubdtype(x.dtype, jnp.integer):
      return 1  # Flags: the direction or level.
    if x.ndim == 5:
      return 0
    return 1 if x.ndim == 4 and x.shape[2] == x.shape[3] else -1

  def cut(x, group):
    if one_by_one(x) and not jnp.issubdtype(x.dtype, jnp.integer):
      return x.reshape(groups, *x.shape[:-1], -1)[group]
    return jnp.split(x, groups, axis(x))[group]

  def join(*xs):
    x = xs[0]
    if one_by_one(x):
      return jnp.stack(xs).reshape(*x.shape[:-1], -1)
    return jnp.concatenate(xs, 0 if x.ndim == 5 else -1)

  results = []
  for group in range(groups):
    reverse = call.reverse != (call.both_directions and group == 1)
    own = dataclasses.replace(
        plan,
        shape=dataclasses.replace(shape, heads=shape.heads // groups, levels=1),
        call=dataclasses.replace(
            call, reverse=reverse, both_directions=False, levels=1
        ),
    )
    own_args = jax.tree.map(lambda x, group=group: cut(x, group), args)
    results.append(run(own, *own_args))
  return jax.tree.map(join, *results)


def forward_loop(plan, theta, x, matrix, carry, restart, flags):
  """A loop in place of `forward.forward`."""
  if plan.call.groups > 1:
    return in_groups(
        forward_loop, plan, theta, x, matrix, carry, restart, flags
    )
  loop = Loop(plan, flags)
  matrix = whole(matrix)
  rows = tuple(theta)[: plan.params]
  assert theta.shape[1] == plan.shape.features

  def step(state, xs):
    x_t, flags_t = xs
    start = loop.choose(flags_t, step_flags.RESET, tuple(restart), state)
    row = gates_of(x_t)
    first = matrix if plan.operand is None else matrix[:-1]
    gates = tuple(products(first, rounded(start[0], plan.dtype)))
    u = start[0]
    if plan.operand is not None:
      u = plan.operand(rows, row, gates, start)
      gates += tuple(products(matrix[-1:], rounded(u, plan.dtype)))
    new = plan.update(rows, row, gates, start)
    new = loop.choose(flags_t, step_flags.HOLD, start, new)
    return new, (new, start, u)

  last, (new, start, u) = lax.scan(
      step, tuple(carry), (loop.steps(x), loop.flags)
  )
  call = plan.call
  carries = tuple(loop.stream(x, call.out_dtype) for x in new[: call.outputs])
  starts, kept = (), None
  operand = lambda x: by_head(plan, loop.stream(x, plan.dtype)[:, :, None])
  if plan.save:
    others = (loop.stream(s, jnp.float32) for s in start[1:])
    starts = (operand(start[0]), *others)
  if plan.save and plan.operand is not None:
    kept = operand(u)
  return carries, jnp.stack(last), starts, kept


def backward_loop(
    plan,
    theta,
    x,
    h_gates,
    starts,
    matrix,
    again,
    flags,
    d_carries,
    d_last,
    one_head=True,
):
  """A loop in place of `backward.backward`."""
  if plan.call.groups > 1:
    run = lambda *args: backward_loop(*args, one_head=False)
    args = theta, x, h_gates, starts, matrix, again, flags, d_carries, d_last
    return in_groups(run, plan, *args)
  loop = Loop(plan, flags)
  matrix = whole(matrix)
  rows = tuple(theta)[: plan.params]
  shape = plan.shape

  def joined(x):
    """[N, B, T, G, D] -> [B, T, G, F]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], shape.features)

  starts = (joined(starts[0])[:, :, 0], *starts[1:])
  if plan.again:
    h = starts[0].astype(jnp.float32)
    lead = h.shape[:2]
    gates = products(whole(again), h.reshape(-1, shape.features))
    h_gates = jnp.moveaxis(gates, 0, 1).reshape(*lead, -1, shape.features)
  else:
    h_gates = jnp.concatenate(list(map(joined, h_gates)), axis=2)
  zeros = tuple(jnp.zeros_like(d_last))

  def through(d_gates, first, last):
    """Returns the cotangent of the factor of some gates."""
    if plan.call.stop_recurrent_gradient:
      return jnp.zeros_like(d_last[0])
    d = sum(
        products(matrix[i : i + 1], rounded(d_gates[i], plan.dtype))[0]
        for i in range(first, last)
    )
    return bounded(plan.call, d)

  def step(state, xs):
    d_carry, d_rows, d_restart = state
    x_t, gates, start, g, flags_t = xs
    row, gates = gates_of(x_t), gates_of(gates)
    d_carry = (*map(jnp.add, d_carry[: len(g)], g), *d_carry[len(g) :])
    d_new = loop.choose(flags_t, step_flags.HOLD, zeros, d_carry)
    _, pull = jax.vjp(plan.update, rows, row, gates, start)
    d_row_params, d_row, d_gates, d_start = pull(d_new)
    first = plan.recurrent
    if plan.operand is not None:
      first -= 1
      _, pull = jax.vjp(plan.operand, rows, row, gates[:-1], start)
      more = pull(through(d_gates, first, plan.recurrent))
      d_row_params, d_row, d_gates, d_start = jax.tree.map(
          jnp.add,
          (d_row_params, d_row, d_gates, d_start),
          (*more[:2], (*more[2], jnp.zeros_like(d_gates[-1])), more[3]),
      )
    d_start = (d_start[0] + through(d_gates, 0, first), *d_start[1:])
    d_start, lost = loop.before(flags_t, d_start, d_carry, zeros)
    outs = jnp.stack(d_row, 1), jnp.stack(d_gates, 1)
    # A parameter's cotangent is a sum over the batch here; one row has it.
    d_rows = jax.tree.map(jnp.add, d_rows, d_row_params)
    return (d_start, d_rows, tuple(map(jnp.add, d_restart, lost))), outs

  xs = (
      loop.steps(x),
      loop.steps(h_gates),
      tuple(map(loop.steps, starts)),
      tuple(map(loop.steps, d_carries)),
      loop.flags,
  )
  init = tuple(d_last), jax.tree.map(jnp.zeros_like, rows), zeros
  (d_carry, d_rows, d_restart), (d_x, d_gates) = lax.scan(step, init, xs)
  same = plan.shared
  d_of_gates = ()
  apart = shape.heads > 1 and not plan.in_place
  if apart or not same or not one_head:
    whole_d = by_head(plan, loop.stream(d_gates, plan.dtype))
    d_of_gates = tuple(
        whole_d[:, :, :, p.first :][:, :, :, : p.gates] for p in plan.stages
    )
  d_theta = jnp.zeros((max(plan.params, 1), *d_last.shape[1:]), jnp.float32)
  for i, d in enumerate(d_rows):
    d_theta = d_theta.at[i, -1].set(d)
  return (
      loop.stream(d_x, plan.dtype),
      d_of_gates,
      jnp.stack(d_carry),
      d_theta,
      jnp.stack(d_restart),
  )


@contextlib.contextmanager
def instead():
  """Loops take the place of the kernels inside, as if there was a GPU."""
  target = devices.Target(132, False, (10, 0))
  with contextlib.ExitStack() as stack:
    patch = lambda *args: stack.enter_context(mock.patch.object(*args))
    patch(devices, 'current', lambda: target)
    yield [
        patch(forward, 'forward', mock.Mock(side_effect=forward_loop)),
        patch(backward, 'backward', mock.Mock(side_effect=backward_loop)),
    ]


@contextlib.contextmanager
def imitated(test, pieces=1):
  """`instead`, which fails unless the loops are called.

  Args:
    test: the test case.
    pieces: into how many pieces batches of more than one sequence are cut.
  """
  if not abstract_gpu.RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield []
    return
  with contextlib.ExitStack() as stack:
    called = stack.enter_context(instead())
    if pieces > 1:

      def cut(recurrence, make_plan):
        batch, *rest = recurrence.shape
        rows = -(-batch // pieces)
        found = []
        for start in range(0, batch, rows):
          shape = (min(rows, batch - start), *rest)
          plan = make_plan(dataclasses.replace(recurrence, shape=shape))
          found.append(plan_lib.Piece(plan=plan, start=start))
        return found

      stack.enter_context(mock.patch.object(plan_lib, 'cut_batch', cut))
    yield called
    for kernel in called:
      kernel.assert_called()
