"""Kernels for cards with less than an H200 has.

`benchmarks/assemble.py` compiles them for such cards, and a GPU runs them under
`devices.planned_for`. Here plans are looked at, and lowered.
"""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
import rnnzoo
from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from pallas_kernels.dense import tuning as dense_tuning
  from pallas_kernels.mosaic import mailbox
  from pallas_kernels.streaming import blocks
  from pallas_kernels.streaming import tuning as streaming_tuning

OLDER = ((8, 0), (8, 6), (8, 9), (12, 0))


class CapabilitiesTest(parameterized.TestCase):

  __test__ = abstract_gpu.RUNS

  @parameterized.product(capability=OLDER, size=(64, 256, 512, 768))
  def test_dense_plans(self, capability, size):
    target = devices.Target(100, False, capability)
    for adjoint in (False, True):
      config = dense_tuning.choose(
          dense_tuning.Shape(
              batch=16, time=8, heads=1, size=size, time_major=False
          ),
          dense_tuning.Kind(gates=3, two=False, adjoint=adjoint, split=False),
          lambda config: (0, 90 * 1024),
          target,
      )
      self.assertLessEqual(config.cluster, target.largest_cluster)
      self.assertEqual(config.capability, capability)
    with self.assertRaisesRegex(NotImplementedError, 'cannot hold'):
      dense_tuning.choose(
          dense_tuning.Shape(
              batch=16, time=8, heads=1, size=size, time_major=False
          ),
          dense_tuning.Kind(gates=3, two=False, adjoint=True, split=False),
          lambda config: (0, target.shared),  # Pallas takes 1 KiB beside.
          target,
      )

  @parameterized.product(capability=OLDER, time=(40, 8192))
  def test_streaming_plans(self, capability, time):
    target = devices.Target(100, False, capability)
    layout = blocks.Layout(batch=2, time=time, features=256)
    streams = [blocks.Stream(0, None, jnp.dtype('float32'))] * 4
    config = streaming_tuning.linear(layout, streams, streams, target, True)
    self.assertEqual(config.by_thread, capability < (9, 0))
    size = blocks.shared_bytes(streams, streams, config)
    self.assertLessEqual(size, target.shared)

  @parameterized.parameters(
      ('LSTM', 64, {}),
      ('GRU', 1024, {'dtype': jnp.bfloat16}),
      ('LRU', 8, {'dtype': jnp.bfloat16}),
  )
  def test_lowers(self, name, features, options):
    layer = nnx.eval_shape(
        lambda: getattr(rnnzoo, name)(
            8, features, rngs=nnx.Rngs(0), implementation='pallas', **options
        )
    )
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((3, 5, 8), jnp.bfloat16)
    loss = lambda state, x: jnp.sum(nnx.merge(graphdef, state)(x), dtype='f4')
    with abstract_gpu.device(self, 'NVIDIA H200'), devices.planned_for((8, 6)):
      text = abstract_gpu.lower(jax.grad(loss), state, x)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)

  @parameterized.parameters(((8, 0), True), ((7, 5), False), ((9, 0), False))
  def test_untried(self, capability, untried):
    card = absltest.mock.Mock(
        platform='gpu',
        device_kind='NVIDIA Z9',
        compute_capability='.'.join(map(str, capability)),
        core_count=100,
    )
    with (
        absltest.mock.patch.object(
            devices, 'default_device', return_value=card
        ),
        absltest.mock.patch.object(jax, 'local_devices', return_value=[card]),
    ):
      self.assertEqual(devices.untried(), 'NVIDIA Z9' if untried else '')
      if capability < (8, 0):
        with self.assertRaisesRegex(NotImplementedError, 'NVIDIA Z9'):
          devices.current()

  def test_sentinel_without_comparison_of_pairs(self):
    code = mailbox.any_sentinel(['%a', '%b'], 2, in_pairs=False)
    self.assertNotIn('u16x2', code)
    self.assertEqual(code.count('setp.eq.u16'), 4)


if __name__ == '__main__':
  absltest.main()
