"""Levels in one kernel: plans, what surrounds it, and its code for a GPU.

The kernel cannot be interpreted. A loop takes its place here; benchmarks run
it on a GPU and compare it with layers in turn.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax

from pallas_kernels import recurrence_op
from pallas_kernels import targets
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import wavefront_levels as levels

if abstract_gpu.RUNS:
  from pallas_kernels.wavefront import forward

H200 = 'NVIDIA H200'


class LevelsTest(parameterized.TestCase):

  @parameterized.parameters(
      (rnnzoo.LSTM, 3, 8, 9, 20, 32, 2, False, {}),
      (rnnzoo.GRU, 2, 9, 5, 64, 32, 1, True, {'time_major': True}),
      (rnnzoo.Elman, 4, 16, 6, 12, 64, 1, True, {'reverse': True}),
  )
  def test_around_the_kernel(self, layer, *sizes):
    *sizes, flags, options = sizes
    cell, types, call = levels.arguments(layer, *sizes, **options)
    arrays = levels.drawn((*types, *levels.rest(cell, types, call, flags)))
    if not abstract_gpu.RUNS:
      with self.assertRaises(NotImplementedError):
        recurrence_op.levels(cell, *types, call, flags=flags)
      return
    target = targets.Target(132, False, True)
    with (
        mock.patch.object(targets, 'current', lambda: target),
        mock.patch.object(forward, 'forward', levels.loop),
    ):
      run = recurrence_op.levels(cell, *types, call, flags=flags)
      got = jax.jit(run)(*arrays)
    want = levels.in_turn(cell, call, *arrays)
    for x, y in zip(got, want, strict=True):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype))
      self.assertLess(comparison.relative_error(x, y), 4e-3)

  @parameterized.parameters(
      (rnnzoo.LSTM, 4, 16, 1024, 768, 768, 12, False, {}),
      (rnnzoo.GRU, 3, 24, 500, 100, 128, 2, True, {'time_major': True}),
      (rnnzoo.LSTM, 2, 9, 13, 28, 64, 1, True, {'reverse': True}),
      (rnnzoo.SLSTM, 2, 16, 3, 256, 256, 4, False, {'dtype': 'float16'}),
  )
  def test_lowers_for_a_gpu(self, layer, *sizes):
    *sizes, flags, options = sizes
    self.check_lowers(layer, sizes, flags, options)

  def test_lowers_with_64_bits(self):
    # Numbers that PTX gets have 32 bits all the same.
    with jax.enable_x64(True):
      self.check_lowers(rnnzoo.LSTM, (2, 9, 13, 28, 64, 1), True, {})

  def check_lowers(self, layer, sizes, flags, options):
    """Lowers the kernel for a GPU, arguments as in `levels.arguments`."""
    cell, types, call = levels.arguments(layer, *sizes, **options)
    types = (*types, *levels.rest(cell, types, call, flags))
    with abstract_gpu.device(self, H200):
      run = recurrence_op.levels(cell, *types[:5], call, flags=flags)
      text = abstract_gpu.lower(run, *types)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 1)

  @parameterized.parameters(
      ('first', 132, 4, 16, 768, 768, 12, (3, 128, 24, 2, 16)),
      # Two rows of the batch that no copy has for itself.
      ('octets', 132, 2, 24, 64, 64, 1, (1, 16, 24, 0, 8)),
      ('fewer multiprocessors', 78, 2, 16, 768, 768, 12, (2, 72, 24, 2, 16)),
      ('two products', 132, 4, 32, 64, 64, 1, (1, 40, 24, 0, 16)),
      ('15 slices', 132, 3, 16, 960, 960, 15, (3, 120, 18, 5, 16)),
      # Not as many slots as slices.
      ('16 slices', 132, 3, 16, 1024, 1024, 16, (3, 130, 15, 6, 16)),
  )
  def test_plans(self, _, cores, depth, batch, inputs, features, heads, want):
    if not abstract_gpu.RUNS:
      return
    cell, types, call = levels.arguments(
        rnnzoo.LSTM, depth, batch, 400, inputs, features, heads
    )
    target = targets.Target(cores, False, True)
    with mock.patch.object(targets, 'current', lambda: target):
      plan = recurrence_op.levels(cell, *types, call, flags=False).args[0]
    got = plan.together, plan.ctas, plan.stages, plan.in_smem, plan.rows
    self.assertEqual(got, want)
    self.assertLessEqual(plan.ctas, cores)

  @parameterized.parameters(
      ('Fewer than 8 rows', 7, 64, 64, 1, {}),
      ('A head of several CTAs', 16, 128, 128, 1, {}),
      ('Too many rows', 40, 64, 64, 1, {}),
      ('Rows that keep recurrences waiting', 32, 512, 512, 8, {}),
      ('Too wide', 8, 1032, 64, 1, {}),
      ('Heads of no octets', 16, 12, 12, 1, {}),
      ('32 bits', 16, 64, 64, 1, {'dtype': 'float32'}),
      ('Long', 32, 64, 256, 4, {'time': 300_000}),
      ('Few multiprocessors', 8, 512, 512, 8, {'cores': 30}),
  )
  def test_others_are_refused(self, _, batch, inputs, features, heads, options):
    options = {'time': 400, 'cores': 132, **options}
    time, cores = options.pop('time'), options.pop('cores')
    cell, types, call = levels.arguments(
        rnnzoo.LSTM, 2, batch, time, inputs, features, heads, **options
    )
    target = targets.Target(cores, False, True)
    with mock.patch.object(targets, 'current', lambda: target):
      with self.assertRaises(NotImplementedError):
        recurrence_op.levels(cell, *types, call, flags=False)

  def test_other_devices_are_refused(self):
    cell, types, call = levels.arguments(rnnzoo.LSTM, 2, 16, 400, 64, 64, 1)
    for target in (targets.Target(132, False), targets.Target(132, True)):
      with mock.patch.object(targets, 'current', lambda t=target: t):
        with self.assertRaises(NotImplementedError):
          recurrence_op.levels(cell, *types, call, flags=False)


if __name__ == '__main__':
  absltest.main()
