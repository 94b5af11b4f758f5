"""`rnnzoo.dryrun`."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from rnnzoo import planning
from tests.testing import abstract_gpu

HLO = """
%body (p: (f32[2])) -> (f32[2]) {
  %a = f32[2]{0} all-reduce(%x), to_apply=%add
}
ENTRY %main {
  %b = (f32[], bf16[3,4]{1,0}) all-reduce-start(%x, %y), to_apply=%add
  %c = (f32[1,2], f32[4,2]) all-gather-start(%z), dimensions={0}
  %d = pred[8]{0} collective-permute(%r)
}
"""


def x_of(shape, **options):
  return jax.ShapeDtypeStruct(shape, jnp.float32, **options)


class DryRunTest(parameterized.TestCase):

  def test_choices(self):
    layer = rnnzoo.Stack(
        functools.partial(rnnzoo.Bidirectional, rnnzoo.MinGRU),
        3,
        4,
        num_layers=2,
        implementation=('pallas', 'associative_scan'),
        rngs=nnx.Rngs(0),
    )
    plan = rnnzoo.dryrun(layer, x_of((2, 5, 3)), gradient=False)
    self.assertLen(plan.choices, 4)
    for choice in plan.choices:
      self.assertEqual(choice.cell, 'MinGRUCell')
      self.assertEqual(choice.path, 'associative_scan')
      ((path, reason),) = choice.passed_over
      self.assertEqual(path, 'pallas')
      self.assertRegex(reason, 'GPU')
    self.assertIn("'pallas' is passed over: GPU kernels need", str(plan))
    self.assertEmpty(plan.messages)

  def test_runs_nothing_and_leaves_no_trace(self):
    abstract = nnx.eval_shape(lambda: rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0)))
    plan = rnnzoo.dryrun(
        abstract,
        x_of((2, 5, 3)),
        reset=jax.ShapeDtypeStruct((2, 5), bool),
        reverse=True,
    )
    self.assertRegex(str(plan), r'^GRU, forward and backward, on 1 x ')
    self.assertGreater(plan.temp_bytes, 0)
    rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 3)))
    self.assertLen(plan.choices, 1)

  @parameterized.parameters('data', 'time')
  def test_devices_that_are_not_here(self, over):
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    spec = P('data') if over == 'data' else P(None, 'data')
    x = x_of((4, 40, 24), sharding=NamedSharding(mesh, spec))
    layer = rnnzoo.MinGRU(24, 32, implementation='pallas', rngs=nnx.Rngs(0))
    if not abstract_gpu.RUNS:
      with self.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
        rnnzoo.dryrun(layer, x)
      return
    plan = rnnzoo.dryrun(layer, x)
    self.assertFalse(plan.compiled)
    self.assertRegex(str(plan), r'on 2 x NVIDIA H200, mesh data=2 \(Explicit\)')
    self.assertEqual(sum(plan.kernels.values()), 2)
    self.assertEqual(plan.choices[0].path, 'pallas')
    own = (2, 40, 24) if over == 'data' else (4, 20, 24)
    self.assertIn(f'{list(own)} on each device', str(plan))
    gathered = [m.bytes for m in plan.messages if m.kind == 'all-gather']
    maps = 2 * 2 * 4 * 32 * 4  # Of two parts, (a, b), float32.
    self.assertEqual(gathered, [] if over == 'data' else [maps] * 2)
    size = sum(p.size for p in jax.tree.leaves(nnx.state(layer)))
    summed = sum(m.bytes for m in plan.messages if m.kind == 'all-reduce')
    # Until it is compiled, the final carry is summed too, used or not.
    last = 4 * 32 if over == 'time' else 0
    self.assertEqual(summed, 4 * (size + last))

  def test_messages_of_a_compiled_program(self):
    self.assertEqual(
        [(m.kind, m.bytes, m.in_loop) for m in planning._sent(HLO)],
        [
            ('all-reduce', 8, True),
            ('all-reduce', 28, False),
            ('all-gather', 32, False),
            ('collective-permute', 8, False),
        ],
    )

  def test_errors(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'layer must be'):
      rnnzoo.dryrun(np.tanh, x_of((2, 5, 3)))
    with self.assertRaisesRegex(
        ValueError, 'x must be .*got a tuple; jax.Shape'
    ):
      rnnzoo.dryrun(layer, (2, 5, 3))
    with self.assertRaisesRegex(ValueError, 'gradient must be a bool'):
      rnnzoo.dryrun(layer, x_of((2, 5, 3)), gradient='yes')


if __name__ == '__main__':
  absltest.main()
