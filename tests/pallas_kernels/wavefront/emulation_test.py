"""The kernel of a wavefront computes what its layers compute in turn.

It runs on a CPU, with numpy in place of its instructions, see
tests/testing/wavefront_emulation.py.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from pallas_kernels import recurrence_op
from pallas_kernels import targets
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import wavefront_emulation
from tests.testing import wavefront_levels as levels

if abstract_gpu.RUNS:
  from pallas_kernels.wavefront import forward
  from pallas_kernels.wavefront import plan as plan_lib


class EmulationTest(parameterized.TestCase):

  def check(
      self, layer, *sizes, flags=True, cores=132, want, widest=12, **options
  ):
    """Compares the kernel with layers in turn.

    Args:
      layer: class.
      *sizes: levels, batch, steps, inputs, features and heads.
      flags: whether there are resets and masks.
      cores: multiprocessors of the device.
      want: recurrences of a CTA, and slices of W in shared memory.
      widest: the most slices.
      **options: see `levels.arguments`.
    """
    if not abstract_gpu.RUNS:
      return
    cell, types, call = levels.arguments(layer, *sizes, **options)
    arrays = levels.drawn((*types, *levels.rest(cell, types, call, flags)))
    self.enter_context(mock.patch.object(plan_lib, '_WIDEST', widest))
    self.enter_context(mock.patch.object(plan_lib, '_MOST_ROWS', 64))
    # Few chunks, so that their places are used again and again.
    self.enter_context(mock.patch.object(plan_lib, 'CHUNKS_OF_GATES', 4))
    self.enter_context(mock.patch.object(plan_lib, 'CHUNKS_OF_OUTPUTS', 4))
    target = targets.Target(cores, False, True)
    with mock.patch.object(targets, 'current', lambda: target):
      run = recurrence_op.levels(cell, *types, call, flags=flags)
    plan = run.args[0]
    self.assertEqual((plan.together, plan.in_smem), want)
    plain = forward.forward.__wrapped__
    with (
        mock.patch.object(forward, 'forward', plain),
        wavefront_emulation.emulated(),
    ):
      got = run(*arrays)
    for x, y in zip(got, levels.in_turn(cell, call, *arrays), strict=True):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype))
      self.assertLess(comparison.relative_error(x, y), 4e-3)

  def test_layers(self):
    self.check(rnnzoo.LSTM, 2, 9, 13, 28, 24, 1, reverse=True, want=(1, 0))

  @parameterized.named_parameters(
      (
          'gates that share 64 columns',
          rnnzoo.LSTM,
          (2, 16, 25, 24, 24, 1),
          (2, 0),
          6,
          {},
      ),
      (
          'a CTA with one recurrence less',
          rnnzoo.GRU,
          (2, 40, 10, 20, 24, 1),
          (3, 0),
          8,
          {},
      ),
      (
          'products of eight rows',
          rnnzoo.GRU,
          (2, 24, 10, 64, 64, 1),
          (2, 0),
          9,
          {'time_major': True, 'flags': False},
      ),
      (
          'less than a chunk',
          rnnzoo.SLSTM,
          (2, 8, 3, 64, 64, 1),
          (1, 0),
          132,
          {'dtype': 'float16'},
      ),
      (
          'W in shared memory, which is there in parts',
          rnnzoo.Elman,
          (2, 16, 14, 880, 64, 1),
          (1, 4),
          132,
          {'kernel_dtype': 'bfloat16', 'widest': 14},
      ),
  )
  @pytest.mark.slow
  def test_cuts(self, layer, sizes, want, cores, options):
    self.check(layer, *sizes, want=want, cores=cores, **options)


if __name__ == '__main__':
  absltest.main()
