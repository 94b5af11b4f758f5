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
    """,
)

# Those whose forward kernel multiplies W x.
PROJECTED = (
    case(rnnzoo.LSTM, sizes=(2048, 3, 768), in_features=768, time_major=True),
    case(
        rnnzoo.LSTM,
        dtype='float16',
        sizes=(2000, 3, 320),
        in_features=64,
        reset=True,
        lengths=True,
        reverse=True,
    ),
)

# The same with an input and a recurrent gate that are in no sum.
ALONE = (
    case(rnnzoo.GRU, sizes=(2048, 3, 768), in_features=768, time_major=True),
    case(
        rnnzoo.GRU,
        {'recurrent_gradient_clip': 1.0},
        dtype='float16',
        sizes=(1500, 3, 320),
        in_features=64,
        reset=True,
        lengths=True,
        reverse=True,
    ),
)

# Those that keep R on the chip.
FEWER_ROWS = (
    case(rnnzoo.LSTM, sizes=(256, 3, 768), time_major=True),
    case(
        rnnzoo.GRU,
        {'recurrent_gradient_clip': 1.0},
        dtype='float16',
        sizes=(130, 3, 768),
        reset=True,
        lengths=True,
        reverse=True,
    ),
)


# The same in tiles of 32 rows.
LOW = (
    case(rnnzoo.LSTM, sizes=(32, 3, 1536), time_major=True),
    case(
        rnnzoo.GRU,
        {'recurrent_gradient_clip': 1.0},
        dtype='float16',
        sizes=(17, 3, 1280),
        reset=True,
        lengths=True,
        reverse=True,
    ),
)


class TiledLoweringTest(parameterized.TestCase):

  @parameterized.named_parameters(*comparison.named(LAYERS[:1]))
  @pytest.mark.slow
  def test_layer(self, case):
    self.lowers(case)

  @parameterized.named_parameters(*comparison.named(LAYERS[1:]))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_layers(self, case):
    self.lowers(case)

  @parameterized.named_parameters(*comparison.named(FEWER_ROWS))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_on_chip(self, case):
    self.lowers(case, ON_CHIP)

  @parameterized.named_parameters(*comparison.named(LOW))
  @pytest.mark.slow
  def test_low(self, case):
    self.lowers(case, ON_CHIP)

  @parameterized.named_parameters(*comparison.named(PROJECTED))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_projected(self, case):
    self.lowers_with_depth(case, case.in_features)

  @parameterized.named_parameters(*comparison.named(ALONE))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_inputs_in_no_sum_projected(self, case):
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

  @pytest.mark.slow
  def test_on_chip_with_x64(self):
    with jax.enable_x64(True):
      self.lowers(case(rnnzoo.LSTM, sizes=(130, 3, 768), reset=True), ON_CHIP)

  @pytest.mark.slow
  def test_low_with_x64(self):
    with jax.enable_x64(True):
      self.lowers(case(rnnzoo.LSTM, sizes=(20, 3, 1536), reset=True), ON_CHIP)

  def lowers(self, case, names=NAMES):
    f, args = comparison.abstract_gradient(case)
    with abstract_gpu.device(self, H200):
      text = abstract_gpu.lower(f, *args)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)
      # A failure does not print the text.
      self.assertEqual([name in text for name in names], [True, True])

  @parameterized.parameters(4, 64)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap_takes_turns(self, in_features):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(600, 3, 512), in_features=in_features)
    )
    state, x, *rest = args
    many = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    with abstract_gpu.device(self, H200):
      over_batch = jax.vmap(f, (None, 0, None, None, None))
      text = abstract_gpu.lower(over_batch, state, many, *rest)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)

  @pytest.mark.slow
  def test_x64(self):
    with jax.enable_x64(True), abstract_gpu.device(self, H200):
      f, args = comparison.abstract_gradient(
          case(rnnzoo.LSTM, sizes=(600, 3, 512), reset=True)
      )
      text = abstract_gpu.lower(f, *args)
      self.assertTrue(NAMES[1] in text)

  @parameterized.parameters(4, 64)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_under_a_mesh(self, in_features):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(1200, 3, 512), in_features=in_features)
    )
    with abstract_gpu.device(self, H200):
      for kind in ('Auto', 'Explicit'):
        with jax.sharding.use_abstract_mesh(abstract_gpu.mesh(H200, kind)):
          self.assertTrue(NAMES[1] in abstract_gpu.lower(f, *args))

  @parameterized.parameters((256, 768), (32, 1536))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_on_chip_over_devices_and_vmap(self, rows, size):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(rows, 2, size))
    )
    state, x, *rest = args
    many = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    with abstract_gpu.device(self, H200):
      for kind in ('Auto', 'Explicit'):
        with jax.sharding.use_abstract_mesh(abstract_gpu.mesh(H200, kind)):
          text = abstract_gpu.lower(f, *args)
          self.assertEqual([name in text for name in ON_CHIP], [True, True])
      over_batch = jax.vmap(f, (None, 0, None, None, None))
      text = abstract_gpu.lower(over_batch, state, many, *rest)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)
      self.assertEqual([name in text for name in ON_CHIP], [True, True])

  @pytest.mark.slow
  def test_b200_has_no_wgmma(self):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(600, 3, 512))
    )
    with abstract_gpu.device(self, 'NVIDIA B200'):
      self.assertFalse(NAMES[0] in abstract_gpu.lower(f, *args))


if __name__ == '__main__':
  absltest.main()
