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
import pytest

import rnnzoo
from rnnzoo.engines import choice as choice_lib
from rnnzoo.inspect import planning
from tests.testing import abstract_gpu
from tests.testing import several_devices

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

  @pytest.mark.slow
  def test_dropout_and_running_averages(self):
    options = {'num_layers': 2, 'dropout_rate': 0.5, 'norm': 'batch'}
    stack = rnnzoo.Stack(rnnzoo.GRU, 3, 8, rngs=nnx.Rngs(0), **options)
    rngs = nnx.Rngs(dropout=0)
    found = rnnzoo.dryrun(stack, x_of((2, 5, 3)), rngs=rngs)
    self.assertLen(found.choices, 2)
    # Nothing was computed, nor drawn.
    self.assertEqual(int(rngs.dropout.count[...]), 0)
    self.assertTrue((stack.norms[0].mean[...] == 0).all())

  def test_choices(self):
    both = functools.partial(rnnzoo.Bidirectional, rnnzoo.MinGRU)
    options = {'implementation': ('pallas', 'associative_scan')}
    layer = rnnzoo.Stack(both, 3, 4, num_layers=2, rngs=nnx.Rngs(0), **options)
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

  @pytest.mark.slow
  def test_runs_nothing_and_leaves_no_trace(self):
    abstract = nnx.eval_shape(lambda: rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0)))
    reset = jax.ShapeDtypeStruct((2, 5), bool)
    options = {'reset': reset, 'reverse': True}
    plan = rnnzoo.dryrun(abstract, x_of((2, 5, 3)), **options)
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
    # A part of time is run for its map, and again from the h that is found.
    self.assertEqual(sum(plan.kernels.values()), 2 if over == 'data' else 4)
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

  @parameterized.parameters(
      ('GRU', ('data', 'time'), (4, 16, 6), {'batch': 'data'}),
      ('GRU', (None, 'time'), (8, 16, 6), {}),
      ('GRU_cut', ('data',), (4, 16, 6), {'batch': 'data', 'heads': 'model'}),
      (
          *('MinGRU', ('data', 'time'), (4, 4, 6)),
          {'batch': 'data', 'time': 'time'},
      ),
      (
          *('MinGRU_cut', (None, 'time'), (8, 4, 6)),
          {'time': 'time', 'features': 'model'},
      ),
      ('SLSTMBlock', ('data', 'time'), (4, 16, 4, 6), {'batch': 'data'}),
  )
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_parts_over_devices(self, name, spec, shape, over):
    mesh = several_devices.explicit_mesh(data=2, time=4, model=2, one=1)
    typed = lambda shape, *spec: x_of(
        shape, sharding=NamedSharding(mesh, P(*spec))
    )
    name, _, is_cut = name.partition('_')
    options = {} if name == 'MinGRU' else {'num_heads': 2}
    layer = nnx.eval_shape(
        lambda: getattr(rnnzoo, name)(6, 6, rngs=nnx.Rngs(0), **options)
    )
    if is_cut:
      layer.kernel.set_value(typed(layer.kernel.shape, None, None, 'model'))
      layer.bias.set_value(typed(layer.bias.shape, None, 'model'))
      if name == 'GRU':
        kernel = layer.recurrent_kernel
        kernel.set_value(typed(kernel.shape, None, 'model'))
    plan = rnnzoo.dryrun(layer, typed((8, 16, 6), *spec))
    (choice,) = plan.choices
    self.assertEqual(choice.shape, shape)
    self.assertEqual(choice.over, tuple((k, (v,)) for k, v in over.items()))
    said = ''.join(f', {part} over {(axis,)}' for part, axis in over.items())
    self.assertIn(f'on each device: {choice.path!r}{said}\n', str(plan))
    # The plan of a run after it, on one device, has no such line.
    plan = rnnzoo.dryrun(rnnzoo.GRU(6, 6, rngs=nnx.Rngs(0)), x_of((8, 16, 6)))
    self.assertEqual(plan.choices[0].over, ())

  def test_levels_over_devices(self):
    # The stack gives each device its sequences; the levels do not again.
    mesh = several_devices.explicit_mesh(data=2)
    sharding = NamedSharding(mesh, P('data'))
    stack = rnnzoo.Stack(rnnzoo.GRU, 3, 4, num_layers=2, rngs=nnx.Rngs(0))
    plan = rnnzoo.dryrun(stack, x_of((8, 5, 3), sharding=sharding))
    self.assertEqual(
        [choice.over for choice in plan.choices], [(('batch', ('data',)),)] * 2
    )
    self.assertEqual(str(plan).count(", batch over ('data',)\n"), 2)
    # On an Auto axis XLA decides.
    mesh = jax.sharding.AbstractMesh(
        (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    sharding = NamedSharding(mesh, P('data'))
    plan = rnnzoo.dryrun(stack, x_of((8, 5, 3), sharding=sharding))
    self.assertNotIn(', batch over', str(plan))

  def test_devices_that_are_here(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    with jax.set_mesh(jax.make_mesh((1,), ('data',))):
      plan = rnnzoo.dryrun(layer, x_of((2, 5, 3)), gradient=False)
    self.assertTrue(plan.compiled)
    self.assertIn('Memory', str(plan))

  def test_parameters_over_the_same_axes(self):
    mesh = jax.make_mesh(
        (1,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    layer = rnnzoo.GRU(4, 4, rngs=nnx.Rngs(0))
    over = lambda mesh: NamedSharding(mesh, P('data'))
    carry = jax.tree.map(
        lambda c: jax.device_put(c, over(mesh)), layer.initial_carry((2,))
    )
    x = x_of((2, 5, 4), sharding=over(mesh.abstract_mesh))
    struct = planning._struct(carry[0], x.sharding.mesh)
    self.assertEqual(struct.sharding, over(mesh.abstract_mesh))
    elsewhere = jax.sharding.AbstractMesh((1,), ('model',))
    self.assertEqual(planning._struct(carry[0], elsewhere).sharding.spec, P())

  def test_a_mesh_around_without_devices(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    mesh = jax.sharding.AbstractMesh((2,), ('data',))
    with jax.sharding.use_abstract_mesh(mesh):
      plan = rnnzoo.dryrun(layer, x_of((2, 5, 3)))
    self.assertFalse(plan.compiled)
    self.assertIn('on 2 x cpu, mesh data=2 (Explicit)', str(plan))

  def test_devices_of_a_mesh_around(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    with jax.sharding.use_abstract_mesh(abstract_gpu.one('NVIDIA H200')):
      alone = str(rnnzoo.dryrun(layer, x_of((8, 5, 3)), gradient=False))
    self.assertStartsWith(
        alone, 'GRU, forward, on 1 x NVIDIA H200\nx: float32[8,5,3]\n'
    )
    self.assertNotIn('Memory', alone)
    runs = 'dense_recurrence' if abstract_gpu.RUNS else 'need jax >= 0.11'
    self.assertIn(runs, alone)

  def test_linear_scan_over_devices(self):
    mesh = several_devices.explicit_mesh(time=2, model=2)
    sharding = NamedSharding(mesh, P(None, 'time', 'model'))
    with choice_lib.noted() as choices, jax.sharding.use_abstract_mesh(mesh):
      a = x_of((2, 6, 4), sharding=sharding)
      jax.eval_shape(rnnzoo.linear_scan, a, a)
    (choice,) = choices
    self.assertEqual(
        choice.over, (('time', ('time',)), ('features', ('model',)))
    )

  def test_messages_of_a_compiled_program(self):
    self.assertEqual(
        [(m.kind, m.bytes, m.in_loop) for m in planning.sent(HLO)],
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
    message = 'x must be an array'
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.dryrun(layer, (2, 5, 3))
    with self.assertRaisesRegex(ValueError, 'gradient must be a bool'):
      rnnzoo.dryrun(layer, x_of((2, 5, 3)), gradient='yes')
    with self.assertRaisesRegex(ValueError, 'seq_lengths must be an array'):
      rnnzoo.dryrun(layer, x_of((2, 5, 3)), seq_lengths=[3, 4])

  def test_inside_of_jit(self):
    layer, x = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 5, 3))
    for function in (
        lambda x: rnnzoo.dryrun(layer, x),
        lambda _: rnnzoo.dryrun(layer, x_of((2, 5, 3))),
        lambda x: rnnzoo.verify(layer, x),
    ):
      with self.assertRaisesRegex(ValueError, 'a call outside would work'):
        jax.eval_shape(function, x)


if __name__ == '__main__':
  absltest.main()
