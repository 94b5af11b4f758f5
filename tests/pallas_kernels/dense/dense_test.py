"""The operation around the kernels for dense recurrences, on a CPU.

The kernels themselves cannot be interpreted. Here plain loops take their place,
with the arguments and results that their docstrings promise. That tests
padding, batches in pieces, the carries that steps start from, the products of
all steps at once and the choice of cotangents that these read.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import call as call_lib
from pallas_kernels import targets
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import random_layers
from tests.testing import reference

if abstract_gpu.RUNS:
  from pallas_kernels.dense import backward
  from pallas_kernels.dense import config as config_lib
  from pallas_kernels.dense import forward
  from pallas_kernels.dense import pieces as pieces_lib
  from pallas_kernels.dense import plan as plan_lib
  from pallas_kernels.mosaic import step_flags

# Two bfloat16 hold a float32 recurrent kernel to 2^-17 = 8e-6, as its largest
# error; for bfloat16 see kernels_test.TOLERANCE.
TOLERANCE = {'float32': (1e-5, 1e-5), 'bfloat16': (1.6e-2, 2.4e-2)}


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


def gates_of(x):
  """[B, G, F] -> G arrays [B, F]."""
  return tuple(x[:, i] for i in range(x.shape[1]))


def by_head(plan, x):
  """[B, T, G, F] -> [N, B, T, G, D]."""
  x = x.reshape(*x.shape[:3], plan.shape.heads, plan.shape.size)
  return jnp.moveaxis(x, 3, 0)


def in_halves(run, plan, *args):
  """Runs each half of the heads in its direction.

  Args:
    run: a function of a plan and args.
    plan: of both directions.
    *args: trees of arrays. Heads are the first of five axes, and the second of
      four if it is a matrix; flags are integers; features are the last axis of
      all others.

  Returns:
    The results of both halves, put together.
  """

  def axis(x):
    if jnp.issubdtype(x.dtype, jnp.integer):
      return 1  # Flags: the direction.
    if x.ndim == 5:
      return 0
    return 1 if x.ndim == 4 and x.shape[2] == x.shape[3] else -1

  shape = dataclasses.replace(plan.shape, heads=plan.shape.heads // 2)
  results = []
  for half, reverse in enumerate((plan.call.reverse, not plan.call.reverse)):
    call = dataclasses.replace(
        plan.call, reverse=reverse, both_directions=False
    )
    own = dataclasses.replace(plan, shape=shape, call=call)
    cut = lambda x, half=half: jnp.split(x, 2, axis(x))[half]
    results.append(run(own, *jax.tree.map(cut, args)))
  join = lambda x, y: jnp.concatenate([x, y], 0 if x.ndim == 5 else -1)
  return jax.tree.map(join, *results)


def forward_loop(plan, theta, x, matrix, carry, restart, flags):
  """A loop in place of `forward.forward`."""
  if plan.call.both_directions:
    return in_halves(
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
    flags,
    d_carries,
    d_last,
    one_head=True,
):
  """A loop in place of `backward.backward`."""
  if plan.call.both_directions:
    run = lambda *args: backward_loop(*args, one_head=False)
    args = theta, x, h_gates, starts, matrix, flags, d_carries, d_last
    return in_halves(run, plan, *args)
  loop = Loop(plan, flags)
  matrix = whole(matrix)
  rows = tuple(theta)[: plan.params]
  shape = plan.shape

  def joined(x):
    """[N, B, T, G, D] -> [B, T, G, F]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], shape.features)

  h_gates = jnp.concatenate(list(map(joined, h_gates)), axis=2)
  starts = (joined(starts[0])[:, :, 0], *starts[1:])
  zeros = tuple(jnp.zeros_like(d_last))

  def through(d_gates, first, last):
    """Returns the cotangent of the factor of some gates."""
    if plan.call.stop_recurrent_gradient:
      return jnp.zeros_like(d_last[0])
    d = sum(
        products(matrix[i : i + 1], rounded(d_gates[i], plan.dtype))[0]
        for i in range(first, last)
    )
    clip = plan.call.recurrent_gradient_clip
    return d if clip is None else jnp.clip(d, -clip, clip)

  def step(state, xs):
    d_carry, d_rows, d_restart = state
    x_t, gates, start, g, flags_t = xs
    row, gates = gates_of(x_t), gates_of(gates)
    d_carry = (
        *map(jnp.add, d_carry[: len(g)], g),
        *d_carry[len(g) :],
    )
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
    kept = loop.choose(flags_t, step_flags.HOLD, d_carry, zeros)
    if flags_t is not None:
      d_start = tuple(map(jnp.add, d_start, kept))
    lost = loop.choose(flags_t, step_flags.RESET, d_start, zeros)
    d_start = loop.choose(flags_t, step_flags.RESET, zeros, d_start)
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
  same = plan_lib.shared_gates(plan) == tuple(range(plan.gates))
  d_of_gates = ()
  if shape.heads > 1 or not same or not one_head:
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
def imitated(test, pieces=1):
  """Loops take the place of the kernels inside, as if there was a GPU.

  Args:
    test: the test case.
    pieces: into how many pieces batches of more than one sequence are cut.
  """
  if not abstract_gpu.RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield []
    return
  target = targets.Target(132, False)
  with contextlib.ExitStack() as stack:
    patch = lambda *args: stack.enter_context(mock.patch.object(*args))
    patch(targets, 'current', lambda: target)
    called = [
        patch(forward, 'forward', mock.Mock(side_effect=forward_loop)),
        patch(backward, 'backward', mock.Mock(side_effect=backward_loop)),
    ]
    if pieces > 1:

      def cut(recurrence, make_plan):
        batch, *rest = recurrence.shape
        rows = -(-batch // pieces)
        found = []
        for start in range(0, batch, rows):
          shape = (min(rows, batch - start), *rest)
          plan = make_plan(dataclasses.replace(recurrence, shape=shape))
          found.append(pieces_lib.Piece(plan=plan, start=start))
        return found

      patch(pieces_lib, 'cut_batch', cut)
    yield called
    for kernel in called:
      kernel.assert_called()


# (layer, options, dtype, (batch, time, features), other options).
heads = lambda n: {'num_heads': n}
CASES = (
    ('LSTM', {}, 'float32', (3, 7, 8), ''),
    ('LSTM', heads(2), 'float32', (3, 7, 10), 'reset mask reverse'),
    ('LSTM', heads(2), 'bfloat16', (3, 7, 16), 'reset time_major'),
    ('GRU', {}, 'float32', (3, 7, 12), 'reset lengths'),
    ('GRU', heads(4), 'float32', (3, 1, 32), 'reset time_major'),
    ('GRU', {'use_bias': False}, 'bfloat16', (3, 7, 8), 'mask reverse'),
    ('AGRU', {}, 'float32', (3, 7, 8), 'reset mask time_major'),
    ('AGRU', {}, 'float32', (3, 7, 5), 'lengths reverse'),
    ('AGRU', {}, 'bfloat16', (3, 7, 12), 'reset'),
    ('SLSTM', heads(2), 'float32', (3, 7, 10), 'reset mask reverse time_major'),
    ('Elman', {'use_bias': False}, 'float32', (3, 7, 8), 'reset mask'),
    ('Elman', {}, 'float32', (3, 7, 5), 'reverse'),
    ('AntisymmetricRNN', {'gated': True}, 'float32', (3, 7, 12), 'reset'),
)


def named():
  """Yields the cases with names."""
  for layer, options, dtype, sizes, flags in CASES:
    size = 'x'.join(map(str, sizes))
    parts = (layer, *options, dtype, size, *flags.split())
    yield '_'.join(parts), layer, options, dtype, sizes, flags


def case_of(layer, options, dtype, sizes, flags):
  batch, time, features = sizes
  return comparison.Case(
      rnnzoo.LAYERS[layer],
      options,
      'pallas',
      dtype,
      batch=batch,
      time=time,
      features=features,
      **dict.fromkeys(flags.split(), True),
  )


class LayersTest(comparison.ComparisonTestCase):

  @parameterized.named_parameters(*named())
  def test_agrees_with_reference(self, layer, options, dtype, sizes, flags):
    case = case_of(layer, options, dtype, sizes, flags)
    with imitated(self):
      self.compare(case, TOLERANCE[dtype])

  @parameterized.parameters(
      ('GRU', 3, 'reset mask'),  # 1, 1 and 1 of 3.
      ('LSTM', 2, 'lengths reverse time_major'),  # 2 and 1.
  )
  def test_in_pieces(self, layer, pieces, flags):
    case = case_of(layer, {}, 'float32', (3, 7, 5), flags)
    with imitated(self, pieces):
      self.compare(case, TOLERANCE['float32'])


class BidirectionalTest(parameterized.TestCase):
  """Both directions in one kernel."""

  @parameterized.parameters(
      ('LSTM', heads(2), ''),
      ('GRU', {}, 'reset mask time_major'),
      ('AGRU', {'learn_initial_carry': True}, 'reset lengths reverse carry'),
      ('SLSTM', heads(2), 'reset carry time_major reverse'),
  )
  def test_agrees_with_two_scans(self, layer, options, flags):
    layer = rnnzoo.Bidirectional(
        rnnzoo.LAYERS[layer], 3, 8, rngs=nnx.Rngs(0), **options
    )
    batch, time = 3, 7
    rng = np.random.default_rng(0)
    time_major = 'time_major' in flags
    lead = (time, batch) if time_major else (batch, time)
    x = rng.standard_normal((*lead, 3)).astype(np.float32)
    call = {'time_major': time_major, 'reverse': 'reverse' in flags}
    if 'reset' in flags:
      call['reset'] = rng.random(lead) < 0.3
    if 'mask' in flags:
      call['mask'] = rng.random(lead) < 0.8
    if 'lengths' in flags:
      call['seq_lengths'] = np.array([time, 3, 0])
    if 'carry' in flags:  # The first layer's own, and a given one.
      draw = lambda c: rng.uniform(0.5, 1.5, c.shape).astype(np.float32)
      own = layer.backward.initial_carry((batch,))
      call['initial_carry'] = None, jax.tree.map(draw, own)

    def run(implementation):
      for level in layer.forward, layer.backward:
        level.implementation = implementation
      graphdef, state = nnx.split(layer)

      def loss(state, x):
        results = nnx.merge(graphdef, state).unroll(x, **call)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results))

      return jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x)

    with imitated(self) as called:
      got = run('pallas')
      self.assertEqual([kernel.call_count for kernel in called], [1, 1])
      want = run('scan')
      for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        self.assertLess(comparison.relative_error(x, y), 1e-5)

  def test_a_subclass_runs_apart(self):
    class Shifted(rnnzoo.GRU):

      def _initial_carry(self, *args, **options):
        return (super()._initial_carry(*args, **options)[0] + 1,)

    make = lambda cls: cls(3, 8, implementation='pallas', rngs=nnx.Rngs(0))
    layer = rnnzoo.Bidirectional(
        rnnzoo.GRU, 3, 8, implementation='pallas', rngs=nnx.Rngs(0)
    )
    layer.backward = make(Shifted)
    with imitated(self) as called:
      jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(jnp.ones((2, 4, 3)))
      self.assertEqual([kernel.call_count for kernel in called], [2, 2])

  def test_layers_that_differ(self):
    layer = rnnzoo.Bidirectional(
        rnnzoo.GRU, 3, 8, implementation='pallas', rngs=nnx.Rngs(0)
    )
    layer.backward.stop_recurrent_gradient = True
    with imitated(self) as called:
      jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(jnp.ones((2, 4, 3)))
      self.assertEqual([kernel.call_count for kernel in called], [2, 2])


@dataclasses.dataclass(frozen=True)
class Multiplying(rnnzoo.Cell):
  """h' = tanh(x_0 (R h) + x_1): the cotangent of R h is no input's."""

  input_gates = 2
  recurrent_gates = 1
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    return (jnp.tanh(x_gates[0] * h_gates[0] + x_gates[1]),)


@dataclasses.dataclass(frozen=True)
class Swapped(rnnzoo.Cell):
  """Its recurrent gates are in another order than those of the input."""

  input_gates = 3
  recurrent_gates = 2
  carry_names = ('h', 'c')

  def update(self, params, x_gates, h_gates, carry):
    del params
    h, c = carry
    c = 0.5 * c + jnp.tanh(x_gates[0] + h_gates[1])
    gate = jax.nn.sigmoid(x_gates[2] + h_gates[0])
    return gate * c + 0.1 * h * x_gates[1], c


@dataclasses.dataclass(frozen=True)
class Doubling(rnnzoo.Cell):
  """Two recurrent gates share one input's cotangent; one has to be written."""

  input_gates = 1
  recurrent_gates = 2
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    return (jnp.tanh(x_gates[0] + h_gates[0] + h_gates[1]),)


CELLS = {
    'LSTM': rnnzoo.LSTMCell(),
    'GRU': rnnzoo.GRUCell(),
    'AGRU': rnnzoo.AGRUCell(),
    'SLSTM': rnnzoo.SLSTMCell(),
    'Multiplying': Multiplying(),
    'Swapped': Swapped(),
    'Doubling': Doubling(),
}
BATCH, TIME, FEATURES = 3, 4, 12


@functools.cache
def arguments(name, x_dtype, kernel_dtype):
  """Returns params, x_gates, kernel, carry and restart of two heads."""
  cell = CELLS[name]
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  carry = lambda: random_layers.as_carry(
      cell, [draw(BATCH, FEATURES) for _ in cell.carry_names]
  )
  size = FEATURES // 2
  return (
      {name: draw(FEATURES) for name in cell.param_names},
      draw(BATCH, TIME, cell.input_gates, FEATURES).astype(x_dtype),
      (0.4 * draw(cell.recurrent_gates, 2, size, size)).astype(kernel_dtype),
      carry(),
      carry(),
  )


class UnrollTest(parameterized.TestCase):

  def check(self, name, x_dtype='float32', kernel_dtype='float32', **options):
    """All outputs and gradients are those of 'scan'."""
    cell = CELLS[name]
    rng = np.random.default_rng(1)
    reset = rng.random((BATCH, TIME)) < 0.3
    mask = rng.random((BATCH, TIME)) < 0.8
    given = arguments(name, jnp.dtype(x_dtype), jnp.dtype(kernel_dtype))

    def run(implementation):
      def loss(params, x_gates, kernel, carry, restart):
        final, carries = rnnzoo.unroll_carries(
            cell,
            params,
            x_gates,
            kernel,
            carry,
            restart_carry=restart,
            reset=reset,
            mask=mask,
            implementation=implementation,
            **options,
        )
        outputs = final, carries
        total = sum(
            jnp.sum(jnp.sin(i + y))
            for i, y in enumerate(jax.tree.leaves(outputs))
        )
        return total, outputs

      grad = jax.grad(loss, tuple(range(5)), has_aux=True)
      return reference.jit(grad)(*given)

    with imitated(self):
      got = run('pallas')
      want = run('scan')
      # 'scan' rounds h to the dtype of the recurrent kernel.
      low = kernel_dtype == 'bfloat16'
      for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        self.assertEqual(x.dtype, y.dtype)
        self.assertEqual(x.shape, y.shape)
        error = comparison.relative_error(x, y)
        self.assertLess(error, 1e-2 if low else 3e-5)

  @parameterized.parameters('Multiplying', 'Swapped', 'Doubling')
  def test_gates_of_any_cell(self, name):
    self.check(name, reverse=name == 'Swapped')

  @parameterized.product(
      name=('GRU', 'AGRU'),
      option=(
          {'recurrent_gradient_clip': 0.1},
          {'stop_recurrent_gradient': True},
      ),
  )
  def test_recurrent_gradient(self, name, option):
    self.check(name, outputs=1, **option)

  def test_all_carries(self):
    self.check('SLSTM', reverse=True)

  @parameterized.parameters(('bfloat16', 'float32'), ('float32', 'bfloat16'))
  def test_mixed_dtypes(self, x_dtype, kernel_dtype):
    self.check('LSTM', x_dtype, kernel_dtype)


class SharedGatesTest(parameterized.TestCase):

  @parameterized.parameters(
      ('LSTM', (0, 1, 2, 3)),
      ('GRU', (0, 1, None)),
      ('AGRU', (0, 1, 2)),
      ('SLSTM', (0, 1, 2, 3)),
      ('Multiplying', (None,)),
      ('Swapped', (2, 0)),
      ('Doubling', (0, None)),
  )
  def test_shared_gates(self, name, expected):
    if not abstract_gpu.RUNS:
      return
    cell = CELLS[name]
    by_name = lambda f: lambda theta, *args: f(
        dict(zip(cell.param_names, theta, strict=True)), *args
    )
    plan = plan_lib.Plan(
        update=by_name(cell.update),
        operand=by_name(cell.operand) if hasattr(cell, 'operand') else None,
        params=len(cell.param_names),
        gates=cell.input_gates,
        recurrent=cell.recurrent_gates,
        states=len(cell.carry_names),
        shape=config_lib.Shape(
            batch=1, time=1, heads=1, size=8, time_major=False
        ),
        call=call_lib.Call(),
        flags=False,
        x_dtype=jnp.float32,
        dtype=jnp.float32,
    )
    self.assertEqual(plan_lib.shared_gates(plan), expected)


if __name__ == '__main__':
  absltest.main()
