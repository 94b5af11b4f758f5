"""Dense kernels over the device compute what plain loops compute.

The kernels run on a CPU with numpy in place of their instructions, see
tests/testing/dense_emulation.py; heads are small and spread over CTAs as large
ones are.
"""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import call as call_lib
from pallas_kernels import devices
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_emulation
from tests.testing import dense_loops

if abstract_gpu.RUNS:
  from pallas_kernels.dense import backward
  from pallas_kernels.dense import cut
  from pallas_kernels.dense import forward
  from pallas_kernels.dense import kernel_call
  from pallas_kernels.dense import plan as plan_lib
  from pallas_kernels.dense import tuning

CELLS = {
    'LSTM': rnnzoo.LSTMCell(),
    'GRU': rnnzoo.GRUCell(),
    'AGRU': rnnzoo.AGRUCell(),
}

# Cuts of a head: the exchange, columns, units, sums and the cluster.
CUTS = {
    'four columns': ('shared', 4, 64, 1, 1),
    'shared': ('shared', 8, 64, 1, 1),
    'cluster': ('cluster', 8, 32, 4, 3),
    'device': ('device', 8, 16, 4, 2),
}

# More steps than an exchange has slots.
TIME = 10

# Registers for R, few enough that some of it lies in shared memory.
REGISTERS = {False: 64, True: 48}


class EmulationTest(parameterized.TestCase):

  def check(
      self,
      cell,
      batch,
      size,
      *,
      dtype='bfloat16',
      flags=True,
      reverse=False,
      time_major=False,
      lockstep=1024,
      time=TIME,
      teams=(4, 3, 2, 1),
      config=None,
      again=0,
      levels=1,
  ):
    """Compares a recurrence and its adjoint with loops.

    Args:
      cell: a name in `CELLS`.
      batch: sequences.
      size: units of a head.
      dtype: of the products.
      flags: whether there are resets and masks.
      reverse: the order of the loop.
      time_major: the layout.
      lockstep: see `dense_emulation.emulated`.
      time: steps.
      teams: CTAs of a team that may be chosen.
      config: a cut in place of those that `tuning` chooses; a team is the
        adjoint's.
      again: columns of a CTA whose adjoint multiplies R h again, or 0.
      levels: layers at the same time, each with one head.
    """
    if not abstract_gpu.RUNS:
      return
    cell = CELLS[cell]
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.float32):
      return jnp.asarray(rng.standard_normal(shape), dtype)

    gates, recurrent = cell.input_gates, cell.recurrent_gates
    states, names = len(cell.carry_names), cell.param_names
    lead = (time, batch) if time_major else (batch, time)
    features = levels * size
    x = draw(*lead, gates, features, dtype=dtype)
    kernel = 0.5 * size**-0.5 * draw(recurrent, levels, size, size)
    kernel = kernel.astype(dtype)
    carry, restart = (draw(states, batch, features) for _ in range(2))
    bits = rng.integers(0, 4, (levels, batch, time)) * flags
    recurrence = plan_lib.Recurrence(
        **dense_loops.unpacked(cell),
        shape=(batch, time, levels, size),
        call=call_lib.Call(
            out_dtype=dtype,
            reverse=reverse,
            time_major=time_major,
            levels=levels,
        ),
        target=devices.Target(132, False, (10, 0)),
    )

    def plan(**options):
      (piece,) = plan_lib.plan_pieces(
          *(recurrence, x, kernel), states=states, flags=flags, **options
      )
      return piece.plan

    columns = mock.patch.object(tuning, '_columns', return_value=again)
    with (
        mock.patch.object(tuning, '_DIRECT_UNITS', 72),
        mock.patch.object(tuning, '_FORWARD_DIRECT_UNITS', 72),
        mock.patch.object(tuning, '_DIRECT_REGISTERS', REGISTERS),
        mock.patch.object(tuning, '_DIRECT_TEAMS', teams),
        mock.patch.object(tuning, '_AGAIN_COLUMNS', 0 if again else 99),
        columns if again else contextlib.nullcontext(),
    ):
      run, pull = plan(save=True), plan(adjoint=True)
    self.assertEqual(pull.again, again > 0)
    if again:
      self.assertEqual(pull.config.exchange, 'shared')
    elif config is None:
      self.assertTrue(run.config.direct)
      self.assertTrue(pull.config.direct)
    else:
      forward_config = config
      if config.through_device:
        # Forward, the others would not wait for a team's CTA without units: by
        # the time it polls an operand, they may have retired it.
        forward_config = dataclasses.replace(config, cluster=1)
      object.__setattr__(run, 'config', forward_config)
      object.__setattr__(pull, 'config', config)
    packed = None
    if flags:
      bits = jnp.asarray(bits, jnp.int32)
      packed = kernel_call.prepare_flags(bits, run.shape)
    theta = draw(max(1, len(names)), features)
    transposed = (jnp.swapaxes(kernel, -1, -2),)
    args = run, theta, x, transposed, carry, restart, packed
    want = dense_loops.forward_loop(*args)
    with dense_emulation.emulated(lockstep):
      got = forward.forward.__wrapped__(*args)
    self.compare(got, want, dtype)

    h_gates = tuple(
        draw(levels, *lead, p.gates, size)
        for p in ([] if again else pull.stages)
    )
    args = (
        pull,
        theta,
        x,
        h_gates,
        want[2],
        (kernel,),
        transposed if again else (),
        packed,
        (draw(*lead, features, dtype=dtype),),
        draw(states, batch, features),
    )
    want = dense_loops.backward_loop(*args)
    with dense_emulation.emulated(lockstep):
      got = backward.backward.__wrapped__(*args)

    def summed(found):
      d_theta, d_restart = (x.sum(1) for x in found[3:])
      # These are written only where there are parameters and flags.
      return *found[:3], d_theta[: len(names)], d_restart if flags else ()

    self.compare(summed(got), summed(want), dtype)

  def compare(self, got, want, dtype):
    tolerance = 2.0 ** (-8 if dtype == jnp.bfloat16 else -10)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    comparison.assert_near(got, want, tolerance)

  @parameterized.parameters(
      # Five CTAs, of which a team has four; the last warps have no block.
      ('LSTM', 5, 72, {}),
      # Two blocks a warp in the adjoint.
      ('GRU', 1, 104, {'reverse': True, 'time': 4, 'teams': (1,)}),
      ('LSTM', 16, 96, {'flags': False}),
      # Two blocks a warp in both; the last block is half of one.
      ('LSTM', 9, 272, {'time_major': True, 'time': 4}),
      ('GRU', 31, 80, {'dtype': 'float16', 'time': 4}),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_operands_in_registers(self, cell, batch, size, options):
    self.check(cell, batch, size, **options)

  @parameterized.parameters(
      ('LSTM', 5, 64, 4, {'time': 4}),
      ('LSTM', 3, 32, 4, {'reverse': True, 'dtype': 'float16'}),
      ('GRU', 11, 64, 8, {'time_major': True, 'time': 4}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_multiplied_again(self, cell, batch, size, columns, options):
    self.check(cell, batch, size, again=columns, **options)

  @pytest.mark.exhaustive
  def test_warps_in_any_order(self):
    self.check('LSTM', 5, 72, lockstep=32, time=3)

  @pytest.mark.slow
  def test_operands_in_shared_memory(self):
    self.check_cut('LSTM', 5, 72, 'device')

  def check_cut(self, cell, batch, size, name, **options):
    """`check` with one of `CUTS`."""
    if abstract_gpu.RUNS:
      names = 'exchange', 'columns', 'units', 'sums', 'cluster'
      fields = dict(zip(names, CUTS[name], strict=True))
      config = cut.Config(warpgroups=2, **fields)
      self.check(cell, batch, size, config=config, **options)

  @parameterized.parameters(
      ('LSTM', 5, 48, 'four columns', {'reverse': True, 'time': 4}),
      ('GRU', 11, 64, 'shared', {'time_major': True, 'flags': False}),
      ('LSTM', 5, 72, 'cluster', {'time': 4}),
      ('GRU', 5, 72, 'device', {'time': 4, 'reverse': True}),
      ('AGRU', 3, 40, 'four columns', {'time': 4}),
      # The operand needs the first gate; the second one is multiplied late.
      ('AGRU', 5, 72, 'device', {'time': 4, 'time_major': True}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_cuts(self, cell, batch, size, name, options):
    self.check_cut(cell, batch, size, name, **options)

  @parameterized.parameters(
      ('LSTM', 5, 48, 'four columns', {'levels': 2, 'time': 4}),
      ('GRU', 5, 72, 'device', {'levels': 3, 'time': 4, 'time_major': True}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_levels(self, cell, batch, size, name, options):
    self.check_cut(cell, batch, size, name, **options)


if __name__ == '__main__':
  absltest.main()
