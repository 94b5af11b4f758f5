"""Kernels in tiles lower to CUDA without a GPU; see dense/lowering_test.py."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import pytest

from pallas_kernels.tiled import limits
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import tiled_loops

H200 = 'NVIDIA H200'
NAMES = 'tiled_recurrence', 'tiled_recurrence_adjoint'
ON_CHIP = 'resident_recurrence', 'team_recurrence_adjoint'

case = functools.partial(comparison.Case, path='pallas', dtype='bfloat16')
LAYERS = comparison.table(
    case,
    """
    LSTM 2048x3x768 time_major
    GRU 1500x3x320 float16 reset lengths reverse recurrent_gradient_clip=1.0
    SLSTM 600x3x512 mask time_major num_heads=1
    Elman 16384x3x256 reset stop_recurrent_gradient=True
    LSTM 100x3x1856 reset
    CfC 2048x3x768 reset
    """,
)

# Those whose forward kernel multiplies W x; GRU has an input and a recurrent
# gate that are in no sum.
PROJECTED = comparison.table(
    case,
    """
    LSTM 2048x3x768 time_major in_features=768
    LSTM 2000x3x320 float16 reset lengths reverse in_features=64
    GRU 1500x3x320 float16 reset reverse in_features=64
    """,
)

# Those that keep R on the chip; the last in tiles of 32 rows.
ON_CHIP_LAYERS = comparison.table(
    case,
    """
    LSTM 256x3x768 time_major
    GRU 130x3x768 float16 reset lengths reverse recurrent_gradient_clip=1.0
    LSTM 32x3x1536 time_major
    GRU 17x3x1280 float16 reset lengths reverse recurrent_gradient_clip=1.0
    """,
)


class TiledLoweringTest(parameterized.TestCase):

  @parameterized.named_parameters(*comparison.named(LAYERS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_layers(self, case):
    self.lowers(case)

  @parameterized.named_parameters(*comparison.named(ON_CHIP_LAYERS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_on_chip(self, case):
    self.lowers(case, ON_CHIP)

  @parameterized.named_parameters(*comparison.named(PROJECTED))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_projected(self, case):
    self.lowers_with_depth(case, case.in_features)

  @pytest.mark.slow
  def test_projected_from_some_rows_on(self):
    rows = limits.ROWS_TO_PROJECT
    of_rows = lambda count: case(
        rnnzoo.LSTM, sizes=(count, 2, 768), in_features=64, time_major=True
    )
    self.lowers_with_depth(of_rows(rows), 64)
    if abstract_gpu.RUNS:
      with tiled_loops.streamed():
        self.lowers_with_depth(of_rows(rows - 64), 0)

  def lowers_with_depth(self, case, depth):
    """Fails unless a forward kernel lowers that multiplies so many inputs."""
    with tiled_loops.forward_plans() as plans:
      self.lowers(case)
    if abstract_gpu.RUNS:
      self.assertEqual([plan.depth for plan in plans], [depth])

  @parameterized.parameters(
      (NAMES, (600, 3, 512)), (ON_CHIP, (130, 3, 768)), (ON_CHIP, (20, 3, 1536))
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_x64(self, names, sizes):
    with jax.enable_x64(True):
      self.lowers(case(rnnzoo.LSTM, sizes=sizes, reset=True), names)

  def lowers(self, case, names=NAMES):
    f, args = comparison.abstract_gradient(case)
    with abstract_gpu.device(self, H200):
      text = abstract_gpu.lower(f, *args)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)
      # A failure does not print the text.
      self.assertEqual([name in text for name in names], [True, True])

  @parameterized.parameters(
      (ON_CHIP, (256, 2, 768), 4),
      (ON_CHIP, (32, 2, 1536), 4),
      (NAMES, (1200, 2, 512), 4),
      (NAMES, (1200, 2, 512), 64),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_over_devices_and_vmap(self, names, sizes, in_features):
    given = case(rnnzoo.LSTM, sizes=sizes, in_features=in_features)
    f, args = comparison.abstract_gradient(given)
    over_batch, rows = next(comparison.mapped_gradients(given))
    with abstract_gpu.device(self, H200):
      for kind in ('Auto', 'Explicit'):
        with jax.sharding.use_abstract_mesh(abstract_gpu.mesh(H200, kind)):
          text = abstract_gpu.lower(f, *args)
          self.assertTrue(all(name in text for name in names))
      text = abstract_gpu.lower(over_batch, *rows)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)
      self.assertTrue(all(name in text for name in names))

  @pytest.mark.slow
  def test_b200_has_no_wgmma(self):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(600, 3, 512))
    )
    with abstract_gpu.device(self, 'NVIDIA B200'):
      self.assertFalse(NAMES[0] in abstract_gpu.lower(f, *args))


if __name__ == '__main__':
  absltest.main()
