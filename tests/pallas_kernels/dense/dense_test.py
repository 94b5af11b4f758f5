"""The operation around the kernels for dense recurrences, on a CPU.

Plain loops take the place of the kernels, see tests/testing/dense_loops.py.
That tests padding, batches in pieces, the carries that steps start from, the
products of all steps at once and the choice of cotangents that these read.
"""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import call as call_lib
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import random_layers
from tests.testing import reference

if abstract_gpu.RUNS:
  from pallas_kernels import devices
  from pallas_kernels.dense import cut
  from pallas_kernels.dense import gradients
  from pallas_kernels.dense import plan as plan_lib
  from pallas_kernels.dense import tuning

# Two bfloat16 hold a float32 recurrent kernel to 2^-17 = 8e-6, as its largest
# error; for bfloat16 see kernels_test.TOLERANCE.
TOLERANCE = {'float32': (1e-5, 1e-5), 'bfloat16': (1.6e-2, 2.4e-2)}


case = functools.partial(comparison.Case, path='pallas')
heads = lambda n: {'num_heads': n}
CASES = comparison.table(
    case,
    """
    LSTM 3x7x8
    LSTM 3x7x10 reset mask reverse num_heads=2
    LSTM 3x7x16 bfloat16 reset time_major num_heads=2
    GRU 3x7x12 reset lengths
    GRU 3x1x32 reset time_major num_heads=4
    GRU 3x7x8 bfloat16 mask reverse use_bias=False
    AGRU 3x7x8 reset mask time_major
    AGRU 3x7x5 lengths reverse
    AGRU 3x7x12 bfloat16 reset
    SLSTM 3x7x10 reset mask reverse time_major num_heads=2
    Elman 3x7x8 reset mask use_bias=False
    Elman 3x7x5 reverse
    AntisymmetricRNN 3x7x12 reset gated=True
    """,
)


class LayersTest(comparison.ComparisonTestCase):

  @parameterized.named_parameters(*comparison.named(CASES))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, case):
    with dense_loops.imitated(self):
      self.compare(case, TOLERANCE[case.dtype])

  # 1, 1 and 1 of 3; 2 and 1.
  @parameterized.parameters(
      *zip(
          (3, 2),
          comparison.table(
              case,
              """
              GRU 3x7x5 reset mask
              LSTM 3x7x5 lengths reverse time_major
              """,
          ),
          strict=True,
      )
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_in_pieces(self, pieces, case):
    with dense_loops.imitated(self, pieces):
      self.compare(case, TOLERANCE[case.dtype])

  @parameterized.parameters(
      (1, case(rnnzoo.LSTM, heads(2), reset=True, mask=True)),
      (2, case(rnnzoo.GRU, lengths=True, reverse=True, time_major=True)),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_multiplied_again(self, pieces, case):
    if not abstract_gpu.RUNS:
      return
    case = dataclasses.replace(case, dtype='bfloat16', sizes=(3, 7, 64))
    planned, needs = [], plan_lib.resources
    noted = lambda plan, config: planned.append(plan) or needs(plan, config)
    with (
        mock.patch.object(tuning, '_AGAIN_COLUMNS', 0),
        mock.patch.object(plan_lib, 'resources', noted),
        dense_loops.imitated(self, pieces),
    ):
      self.compare(case, TOLERANCE['bfloat16'])
    self.assertTrue(any(plan.again for plan in planned))

  @parameterized.parameters(
      case(rnnzoo.GRU),
      case(rnnzoo.AGRU, dtype='bfloat16'),
      case(rnnzoo.LSTM, dtype='float16', path=rnnzoo.Pallas(keep='carries')),
  )
  @pytest.mark.slow
  def test_recurrent_gates_have_float32(self, case):
    if not abstract_gpu.RUNS:
      return
    f, args = comparison.abstract_gradient(case)
    with dense_loops.imitated(self) as (_, backward):
      jax.eval_shape(f, *args)
      for gates in backward.call_args.args[3]:
        self.assertEqual(gates.dtype, jnp.float32)

  @parameterized.parameters(
      (1, 64, True, case(rnnzoo.LSTM, reset=True, mask=True)),
      (2, 128, True, case(rnnzoo.LSTM, lengths=True, time_major=True)),
      (1, 64, True, case(rnnzoo.SLSTM, reset=True, reverse=True)),
      # The cotangents of R h are others than those of x; another factor than h.
      (1, 64, False, case(rnnzoo.GRU, reset=True)),
      (1, 64, False, case(rnnzoo.AGRU, reset=True)),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradient_reads_d_x_in_place(self, pieces, size, in_place, case):
    if not abstract_gpu.RUNS:
      return

    def d_kernel(h, d_gates, cores):
      del cores
      d_gates = d_gates.reshape(*h.shape[1:3], -1, h.shape[0], h.shape[-1])
      h = h.astype(jnp.float32)
      return jnp.einsum('nabkd,abgne->gnde', h, d_gates.astype(jnp.float32))

    options = case.options | {'num_heads': 2}
    case = dataclasses.replace(
        case, options=options, dtype='bfloat16', sizes=(3, 7, 2 * size)
    )
    target = devices.Target(cores=132, interpret=False)
    called = mock.Mock(side_effect=d_kernel)
    reads = plan_lib._reads_in_place
    with (
        mock.patch.object(gradients, '_FEWEST_ROWS', 1),
        mock.patch.object(gradients, '_DIVISOR', 1),
        mock.patch.object(gradients, 'd_small_kernel', called),
        mock.patch.object(
            plan_lib, '_reads_in_place', lambda plan, _: reads(plan, target)
        ),
        dense_loops.imitated(self, pieces),
    ):
      self.compare(case, TOLERANCE['bfloat16'])
    self.assertEqual(called.called, in_place)


class BidirectionalTest(parameterized.TestCase):
  """Both directions in one kernel."""

  @parameterized.parameters(
      (case(rnnzoo.SLSTM, heads(2), reset=True, reverse=True), True),
      (case(rnnzoo.GRU, reset=True, lengths=True, time_major=True), False),
      (case(rnnzoo.AGRU, {'learn_initial_carry': True}, mask=True), True),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_agrees_with_two_scans(self, case, with_carry):
    layer = rnnzoo.Bidirectional(
        case.layer, 3, case.features, rngs=nnx.Rngs(0), **case.options
    )
    batch, time = case.batch, case.time
    rng = np.random.default_rng(0)
    lead = (time, batch) if case.time_major else (batch, time)
    x = rng.standard_normal((*lead, 3)).astype(np.float32)
    call = {'time_major': case.time_major, 'reverse': case.reverse}
    if case.reset:
      call['reset'] = rng.random(lead) < 0.3
    if case.mask:
      call['mask'] = rng.random(lead) < 0.8
    if case.lengths:
      call['seq_lengths'] = np.array([time, 3, 0])
    if with_carry:  # The first layer's own, and a given one.
      draw = lambda c: rng.uniform(0.5, 1.5, c.shape).astype(np.float32)
      own = layer.backward.initial_carry((batch,))
      call['initial_carry'] = None, jax.tree.map(draw, own)

    def run(implementation):
      for level in layer.forward, layer.backward:
        level.implementation = implementation
      unroll, state = random_layers.pure(layer, 'unroll')

      def loss(state, x):
        results = unroll(state, x, **call)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results))

      return jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x)

    with dense_loops.imitated(self) as called:
      got = run('pallas')
      self.assertEqual([kernel.call_count for kernel in called], [1, 1])
      comparison.assert_near(got, run('scan'), 1e-5)

  @parameterized.parameters('subclass', 'options')
  def test_layers_that_differ_run_apart(self, differs):
    class Shifted(rnnzoo.GRU):

      def _initial_carry(self, *args, **options):
        return (super()._initial_carry(*args, **options)[0] + 1,)

    options = {'implementation': 'pallas', 'rngs': nnx.Rngs(0)}
    layer = rnnzoo.Bidirectional(rnnzoo.GRU, 3, 8, **options)
    if differs == 'subclass':
      layer.backward = Shifted(3, 8, **options)
    layer.backward.stop_recurrent_gradient = differs == 'options'
    with dense_loops.imitated(self) as called:
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
        outputs = rnnzoo.unroll_carries(
            *(cell, params, x_gates, kernel, carry),
            restart_carry=restart,
            reset=reset,
            mask=mask,
            implementation=implementation,
            **options,
        )
        total = sum(
            jnp.sum(jnp.sin(i + y))
            for i, y in enumerate(jax.tree.leaves(outputs))
        )
        return total, outputs

      grad = jax.grad(loss, tuple(range(5)), has_aux=True)
      return reference.jit(grad)(*given)

    with dense_loops.imitated(self):
      got = run('pallas')
      want = run('scan')
      # 'scan' rounds h to the dtype of the recurrent kernel.
      low = kernel_dtype == 'bfloat16'
      chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
      comparison.assert_near(got, want, 1e-2 if low else 3e-5)

  @parameterized.parameters('Multiplying', 'Swapped', 'Doubling')
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_gates_of_any_cell(self, name):
    self.check(name, reverse=name == 'Swapped')

  @parameterized.product(
      name=('GRU', 'AGRU'),
      option=(
          {'recurrent_gradient_clip': 0.1},
          {'stop_recurrent_gradient': True},
      ),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_recurrent_gradient(self, name, option):
    self.check(name, outputs=1, **option)

  @pytest.mark.slow
  def test_all_carries(self):
    self.check('SLSTM', reverse=True)

  @parameterized.parameters(('bfloat16', 'float32'), ('float32', 'bfloat16'))
  @pytest.mark.slow
  @pytest.mark.few(1)
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
    plan = plan_lib.Plan(
        **dense_loops.unpacked(cell),
        gates=cell.input_gates,
        recurrent=cell.recurrent_gates,
        states=len(cell.carry_names),
        shape=cut.Shape(batch=1, time=1, heads=1, size=8, time_major=False),
        call=call_lib.Call(),
        flags=False,
        x_dtype=jnp.float32,
        dtype=jnp.float32,
    )
    self.assertEqual(plan.sums, expected)


if __name__ == '__main__':
  absltest.main()
