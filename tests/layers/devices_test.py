"""Layers on several devices: under `jax.shard_map`, and sharded under `jit`."""

import functools
import itertools
import math
import re

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import rnnzoo
from rnnzoo import models
from tests.testing import abstract_gpu
from tests.testing import compilation
from tests.testing import several_devices
from tests.testing import sharded_cases

# No other axis of the problem has this size.
LOCAL_BATCH = 5

LAYERS = tuple(rnnzoo.LAYERS)
BLOCKS = ('SLSTMBlock-alone-given-scan', 'SLSTMBlock-two-plain-scan')
NEWTON = (
    'GRU-alone-learned-associative_scan',
    'IndRNN-alone-learned-associative_scan',
)

# Of parameters, see tests/testing/split_program.py.
LAYOUTS = ('heads', 'both', 'saved', 'auto')

# Forms and calls that start from a carry of the user's or of the layer's.
WITH_CARRY = ('two-given', 'bidirectional-learned')

# Of tests/testing/mapped_program.py.
WAYS_OF_ROWS = (
    *('rows', 'batch', 'rows_and_batch'),
    *('gradient', 'gradient_batch', 'gradient_both', 'gradients'),
    *('shared', 'nested', 'tangent', 'in_shard_map'),
)

COLLECTIVES = (
    'all_gather',
    'all_to_all',
    'ppermute',
    'psum',
    'psum_invariant',
    'reduce_scatter',
)


def collectives(jaxpr):
  """Returns (primitive, shape) of all that a program sends between devices."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name in COLLECTIVES:
      name = equation.primitive.name
      found += [(name, x.aval.shape) for x in equation.invars]
    for inner in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr'),
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        found += collectives(inner)
  return found


class Numbers(parameterized.TestCase):
  """Compares several devices with one."""

  def run_program(self, name, devices, arguments, xla_flags=''):
    """Runs a program with a number of devices, fixed once in a process."""
    return several_devices.run(
        self, name, *arguments, devices=devices, xla_flags=xla_flags
    )

  def assert_same(self, program, devices, names, *before):
    """Runs cases of a program, each of which prints a line."""
    printed = self.run_program(
        program, devices, [*before, *names], compilation.XLA_FLAGS
    )
    for name in names:
      self.assertIn(f'{name} is the same on {devices} devices', printed)

  def assert_same_in_shard_map(self, names):
    self.assert_same('shard_map_program', 4, names)

  def assert_same_under_jit(self, kind, names):
    self.assert_same('sharded_program', 8, names, kind)

  def assert_same_split(self, layout, names):
    self.assert_same('split_program', 8, names, layout)


class DtypesTest(parameterized.TestCase):
  """Gradients are summed over devices in the dtype of the parameters given."""

  @parameterized.product(
      layer=('GRU', 'MinGRU', 'SLSTM', 'IndRNN'),
      param_dtype=('bfloat16', 'float32'),
      is_cast=(False, True),
  )
  @pytest.mark.few(3)
  @pytest.mark.slow
  def test_sums(self, layer, param_dtype, is_cast):
    made = rnnzoo.LAYERS[layer](
        8,
        8,
        dtype=jnp.bfloat16,
        param_dtype=param_dtype,
        learn_initial_carry=True,
        implementation='scan',
        rngs=nnx.Rngs(0),
    )
    graphdef, params = nnx.split(made)

    def loss(params, x):
      if is_cast:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
      return jnp.sum(nnx.merge(graphdef, params)(x).astype(jnp.float32) ** 2)

    mesh = jax.sharding.AbstractMesh(
        (2,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.sharding.use_abstract_mesh(mesh):
      over_batch = jax.sharding.NamedSharding(mesh, P('data'))
      x = jax.ShapeDtypeStruct((4, 6, 8), jnp.bfloat16, sharding=over_batch)
      jaxpr = jax.make_jaxpr(jax.grad(loss))(params, x)
    sums = re.findall(r':(\w+)\[.*\] = psum(?:_invariant)?\[', str(jaxpr))
    want = 'bf16' if is_cast or param_dtype == 'bfloat16' else 'f32'
    self.assertNotEmpty(sums)
    self.assertEqual({each for each in sums if each != want}, set())


class SavedNormsTest(parameterized.TestCase):
  """Norms whose parameters are sharded over the batch's mesh axis."""

  @parameterized.parameters(
      {'norm': 'layer'},
      {'norm': 'batch', 'trains': True},
      {'norm': 'batch', 'trains': False},
      {'norm': 'layer', 'made': rnnzoo.DenseStack},
  )
  @pytest.mark.slow
  def test_gathered_and_sharded_back(
      self, norm, trains=False, made=rnnzoo.Stack
  ):
    mesh = jax.sharding.AbstractMesh(
        (2,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )

    def saved(a):
      axis = next((i for i, n in enumerate(a.shape) if n % 2 == 0), None)
      spec = P() if axis is None else P(*(None,) * axis, 'data')
      return typed(mesh, a.shape, a.dtype, spec)

    def whole(a):
      """Returns a's mesh axes, with None for all axes that have none."""
      return (*a.sharding.spec, *[None] * a.ndim)[: a.ndim]

    stack = made(rnnzoo.GRU, 8, 8, num_layers=2, norm=norm, rngs=nnx.Rngs(0))
    graphdef, *states = nnx.split(stack, nnx.Param, ...)
    params, rest = jax.tree.map(saved, states)

    def loss(params, rest, x):
      own = nnx.merge(graphdef, params, rest, copy=True)
      y = own(x, **({'rngs': nnx.Rngs(0)} if trains else {}))
      return jnp.sum(y**3), nnx.state(own, nnx.BatchStat)

    with jax.sharding.use_abstract_mesh(mesh):
      x = typed(mesh, (4, 6, 8), jnp.float32, P('data'))
      gradients, after = jax.eval_shape(
          jax.grad(loss, has_aux=True), params, rest, x
      )
    wanted = params, nnx.filter_state(rest, nnx.BatchStat)
    for given, want in zip((gradients, after), wanted, strict=True):
      self.assertEqual(
          [whole(a) for a in jax.tree.leaves(given)],
          [whole(a) for a in jax.tree.leaves(want)],
      )


class SumsTest(parameterized.TestCase):
  """The gradient of each parameter is summed over devices once."""

  def sums(self, stack, wanted=nnx.Param):
    """Returns the sizes of the parameters, and those of sums over devices."""
    graphdef, params, frozen = nnx.split(stack, wanted, ...)

    def loss(params, x):
      own = nnx.merge(graphdef, params, frozen, copy=True)
      return jnp.sum(own(x).astype(jnp.float32) ** 2)

    mesh = jax.sharding.AbstractMesh(
        (2,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.sharding.use_abstract_mesh(mesh):
      x = typed(mesh, (4, 6, 8), jnp.float32, P('data'))
      jaxpr = jax.make_jaxpr(jax.grad(loss))(params, x)
    found = [math.prod(shape) for _, shape in collectives(jaxpr.jaxpr)]
    return [p.size for p in jax.tree.leaves(params)], found

  def stack(self, **options):
    options = {'num_layers': 3, 'implementation': 'scan'} | options
    return rnnzoo.Stack(rnnzoo.GRU, 8, 8, rngs=nnx.Rngs(0), **options)

  @parameterized.parameters(
      {}, {'norm': 'layer'}, {'residual': True}, {'learn_initial_carry': True}
  )
  def test_stacks(self, **options):
    if 'norm' in options:
      make = functools.partial(rnnzoo.GRU, implementation='scan')
      stack = rnnzoo.Stack(
          make, 8, 8, num_layers=3, rngs=nnx.Rngs(0), **options
      )
    else:
      stack = self.stack(**options)
    self.assertCountEqual(*self.sums(stack))

  @parameterized.parameters('LSTM', 'MinGRU')
  def test_one_layer(self, layer):
    made = rnnzoo.LAYERS[layer](
        8, 8, implementation='scan', learn_initial_carry=True, rngs=nnx.Rngs(0)
    )
    self.assertCountEqual(*self.sums(made))

  def test_frozen_parameters_are_not_summed(self):
    top = lambda path, _: path[:2] == ('layers', 2)
    params, sums = self.sums(self.stack(), top)
    self.assertLen(params, 4)
    self.assertCountEqual(params, sums)

  @parameterized.parameters('stack', 'lowest', 'upper')
  @pytest.mark.few(2)
  def test_variables_of_subclasses(self, place):
    stack = self.stack()
    module = {
        'stack': stack,
        'lowest': stack.layers[0],
        'upper': stack.layers[1],
    }[place]
    module.scale = nnx.Param(jnp.ones(3))
    module.count = nnx.Variable(jnp.zeros((), jnp.int32))
    module.rngs = nnx.Rngs(0)
    params, sums = self.sums(stack)
    params.remove(3)  # Nothing reads `scale`.
    self.assertCountEqual(params, sums)

  def test_upper_level_is_the_lowest_too(self):
    stack = self.stack()
    stack.layers[2] = stack.layers[0]
    params, sums = self.sums(stack)
    self.assertEqual(set(params), set(sums))


class SymbolicTest(parameterized.TestCase):

  @parameterized.parameters(None, 'scan')
  def test_batch(self, implementation):
    stack = rnnzoo.Stack(
        rnnzoo.GRU, 8, 8, implementation=implementation, rngs=nnx.Rngs(0)
    )
    mesh = jax.sharding.AbstractMesh(
        (4,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    (size,) = jax.export.symbolic_shape('b', constraints=['mod(b, 4) == 0'])
    with jax.sharding.use_abstract_mesh(mesh):
      x = typed(mesh, (size, 6, 8), jnp.float32, P('data'))
      h = jax.eval_shape(stack, x)
    self.assertEqual(h.shape, (size, 6, 8))


class CarryErrorsTest(parameterized.TestCase):
  """A carry of the wrong shape is refused by the shapes of the caller."""

  @parameterized.product(
      kind=('LSTM', 'Bidirectional', 'Stack', 'SLSTMBlock'),
      # The second is as large as a device's part of the batch.
      batch=(16, 1),
  )
  def test_unroll(self, kind, batch):
    layer, carry = self.layer(kind, batch)
    self.check(
        lambda x, carry: layer.unroll(x, initial_carry=carry),
        (8, 5, 4),
        carry,
        batch,
    )

  @parameterized.product(kind=('LSTM', 'Stack', 'SLSTMBlock'), batch=(16, 1))
  @pytest.mark.few(2)
  def test_step(self, kind, batch):
    layer, carry = self.layer(kind, batch)
    self.check(lambda x, c: layer.step(c, x), (8, 4), carry, batch)

  def layer(self, kind, batch):
    rngs = nnx.Rngs(0)
    if kind == 'SLSTMBlock':
      layer = rnnzoo.SLSTMBlock(4, 4, rngs=rngs)
    elif kind == 'LSTM':
      layer = rnnzoo.LSTM(4, 4, rngs=rngs)
    else:
      layer = getattr(rnnzoo, kind)(rnnzoo.LSTM, 4, 4, rngs=rngs)
    return layer, layer.initial_carry((batch,))

  def check(self, run, shape, carry, batch):
    mesh = jax.sharding.AbstractMesh(
        (8,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.sharding.use_abstract_mesh(mesh):
      x = typed(mesh, shape, jnp.float32, P('data'))
      with self.assertRaisesRegex(
          ValueError, rf'\(8, 4\).*got.*\({batch}, 4\)'
      ):
        jax.eval_shape(run, x, carry)


class NumbersTest(Numbers):

  @parameterized.parameters(
      ('Explicit', 'stacks', 'parts of parts of time'),
      ('Explicit', 'functions', 'sharded parameters'),
      ('Auto', 'functions', 'sharded parameters'),
  )
  @pytest.mark.slow
  def test_public_functions(self, kind, group, last):
    printed = self.run_program(
        'sharded_program', 8, [kind, group], compilation.XLA_FLAGS
    )
    self.assertIn(f'{last} is the same on 8 devices', printed)

  @pytest.mark.slow
  def test_shard_map(self):
    # All forms of one cell, and all cells in one form.
    cases = sharded_cases.in_turn('LSTM')
    names = [f'LSTM-{form}-{call}-scan' for form, call in cases]
    names.append('MinGRU-bidirectional-learned-scan')
    calls = itertools.cycle(sharded_cases.CALLS)
    for layer, call in zip(LAYERS, calls, strict=False):
      names.append(f'{layer}-alone-{call}-{sharded_cases.paths(layer)[-1]}')
    self.assert_same_in_shard_map([*names, BLOCKS[0], NEWTON[0]])

  @parameterized.parameters(*enumerate(('Explicit', 'Auto')))
  @pytest.mark.slow
  def test_jit(self, i, kind):
    # Half of the layers with each kind; all forms are shown under shard_map.
    call = WITH_CARRY[i].split('-')[1]
    names = [f'LSTM-{WITH_CARRY[i]}-scan']
    for layer in LAYERS[i::2]:
      names.append(f'{layer}-alone-{call}-{sharded_cases.paths(layer)[-1]}')
    if kind == 'Auto':
      names.append('LSTM-three-learned-scan')
    self.assert_same_under_jit(kind, [*names, BLOCKS[i], *NEWTON[i:]])

  @pytest.mark.slow
  def test_kernels_with_auto_axes(self):
    if not abstract_gpu.RUNS:
      return  # There are no kernels to run.
    names = (
        *('LSTM-two-given-pallas_carries', 'GRU-bidirectional-learned-pallas'),
        *('SLSTM-two-given-pallas', 'AGRU-bidirectional-learned-pallas'),
        *('IndRNN-two-given-pallas', 'MinGRU-bidirectional-learned-pallas'),
    )
    self.assert_same_under_jit('Auto', names)

  @parameterized.parameters(*LAYERS)
  @pytest.mark.exhaustive
  def test_everything(self, layer):
    paths = sharded_cases.paths(layer)
    self.assert_same_in_shard_map(
        [
            f'{layer}-{form}-{call}-{path}'
            for form, call in sharded_cases.in_turn(layer)
            for path in paths
        ]
    )
    for kind in ('Explicit', 'Auto'):
      if kind == 'Auto' and abstract_gpu.RUNS:
        paths += ('pallas',)
      self.assert_same_under_jit(
          kind, [f'{layer}-{f}-{path}' for f in WITH_CARRY for path in paths]
      )


class PartialManualTest(Numbers):
  """Inside a user's `jax.shard_map` over one of two mesh axes."""

  @pytest.mark.slow
  def test_cases(self):
    names = (
        *('linear_scan-scan-Explicit-vma', 'linear_scan-scan-Auto-free'),
        'linear_scan-associative_scan-Explicit-free',
        *('LSTM-scan-Explicit-vma', 'LSTM-None-Auto-free'),
        *('Stack-None-Explicit-free', 'MinGRU-associative_scan-Explicit-vma'),
    )
    self.assert_same('partial_manual_program', 4, names)


class MappedTest(Numbers):
  """Rows of `jax.vmap` over an Explicit axis of a mesh."""

  @pytest.mark.slow
  def test_newton(self):
    # An axis in both places at once finds what either place alone would.
    ways = {
        'GRU': ('rows_and_batch', 'gradient_both', 'nested'),
        'IndRNN': (
            *('batch', 'gradient_batch', 'gradients'),
            *('shared', 'tangent', 'in_shard_map'),
        ),
    }
    names = [f'{layer}:{way}' for layer in ways for way in ways[layer]]
    self.assert_same('mapped_program', 8, names)

  @parameterized.parameters('LSTM', 'AGRU', 'IndRNN')
  @pytest.mark.exhaustive
  def test_newton_in_every_way(self, layer):
    self.assert_same(
        'mapped_program', 8, [f'{layer}:{way}' for way in WAYS_OF_ROWS]
    )

  @parameterized.parameters('LSTM', 'MinGRU')
  def test_gradients_by_scan(self, layer):
    made = rnnzoo.LAYERS[layer](4, 4, implementation='scan', rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(made)
    loss = lambda state, x: jnp.sum(nnx.merge(graphdef, state)(x) ** 2)
    mesh = explicit_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
      states = jax.tree.map(
          lambda p: typed(mesh, (8, *p.shape), p.dtype, P('a')), state
      )
      x = typed(mesh, (4, 5, 4), jnp.float32, P('b'))
      each = jax.vmap(jax.grad(loss), (0, None))
      for gradient in jax.tree.leaves(jax.eval_shape(each, states, x)):
        self.assertEqual(gradient.sharding.spec[0], 'a')


class SplitTest(Numbers):
  """Parameters over devices, by heads or features that are independent."""

  @pytest.mark.slow
  def test_heads_are_split_and_one_is_gathered_with_one_warning(self):
    self.assert_same_split('both', ['GRU-alone-given-scan', 'one_head'])

  @parameterized.parameters(*enumerate(LAYOUTS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_layers(self, index, layout):
    forms = itertools.cycle(('alone-given', 'two-plain', 'alone-learned'))
    names = [
        f'{layer}-{form}-scan'
        for layer, form in zip([*rnnzoo.LAYERS][index::4], forms, strict=False)
    ]
    if layout == 'both':
      names += ['MinGRU-bidirectional-learned-scan', 'functions', 'block']
    self.assert_same_split(layout, names)


@pytest.mark.exhaustive
class AllSplitTest(Numbers):

  @parameterized.product(layer=tuple(rnnzoo.LAYERS), layout=LAYOUTS)
  def test_all(self, layer, layout):
    paths = ['scan', 'associative_scan']
    if abstract_gpu.RUNS and layout != 'auto':
      paths.append('pallas')
    cases = itertools.product(('two-given', 'bidirectional-learned'), paths)
    self.assert_same_split(
        layout, [f'{layer}-{form}-{path}' for form, path in cases]
    )


class Kernels(parameterized.TestCase):
  """Traces programs for two GPUs that are not there.

  With kernels, two stacked layers once had the wrong gradient in the first:
  the second one's cotangent of its input was summed over the devices.
  """

  def trace(self, case, *, params_vary):
    """Returns the parameters and the jaxpr of their gradient."""
    params, data, loss = case.problem(batch=2 * LOCAL_BATCH, features=8)
    mesh = abstract_gpu.mesh('NVIDIA H200')

    def over_devices(params, data):
      if params_vary:
        vary = lambda p: jax.lax.pcast(p, ('data',), to='varying')
        params = jax.tree.map(vary, params)
      gradient = jax.grad(loss)(params, data)
      return jax.tree.map(lambda y: y[None], gradient)

    with jax.sharding.use_abstract_mesh(mesh):
      sharded = jax.shard_map(
          over_devices,
          mesh=mesh,
          in_specs=(P(), P('data')),
          out_specs=P('data') if params_vary else P(),
      )
      return params, jax.make_jaxpr(sharded)(params, data).jaxpr

  def trace_under_jit(self, case):
    """`trace` of data that is sharded over an Explicit axis."""
    params, data, loss = case.problem(batch=2 * LOCAL_BATCH, features=8)
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    with jax.sharding.use_abstract_mesh(mesh):
      over_batch = jax.sharding.NamedSharding(mesh, P('data'))
      data = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_batch),
          data,
      )
      return params, jax.make_jaxpr(jax.grad(loss))(params, data).jaxpr

  def assert_sums_gradients_of_parameters_only(self, case):
    if not abstract_gpu.RUNS:
      with self.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
        params, data, loss = case.problem(batch=2 * LOCAL_BATCH, features=8)
        jax.eval_shape(jax.grad(loss), params, data)
      return
    # Each device has its own copy of the parameters: nothing is to be summed.
    _, jaxpr = self.trace(case, params_vary=True)
    self.assertEmpty(collectives(jaxpr))
    for params, jaxpr in (
        self.trace(case, params_vary=False),
        self.trace_under_jit(case),
    ):
      self.assert_sums(case, params, jaxpr)

  def assert_sums(self, case, params, jaxpr):
    """Fails unless the sums over devices are those of the parameters."""
    summed = [shape for _, shape in collectives(jaxpr)]
    for shape in summed:
      self.assertNotIn(LOCAL_BATCH, shape)
    # Both directions of a layer have their parameters joined first, and a
    # number that all features share is then one for each.
    size = sum(p.size for p in jax.tree.leaves(params))
    joined = 16 if 'bidirectional' in case.form else 0
    self.assertBetween(sum(map(math.prod, summed)), size, size + 4 * joined)


def explicit_mesh():
  axis_types = (jax.sharding.AxisType.Explicit,) * 2
  return jax.sharding.AbstractMesh((4, 2), ('a', 'b'), axis_types=axis_types)


def typed(mesh, shape, dtype, spec):
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


class TokensTest(parameterized.TestCase):
  """Models of tokens, which a caller has sharded in any way."""

  @parameterized.product(
      specs=(
          (P('a'), P('a'), P('a')),
          (P('a'), P('b'), P('a')),
          (P('a'), P(), P()),
          (P(), P('a'), P()),
          (P(), P(), P('a')),
          (P(None, 'b'), P('a'), P('b')),
      ),
      attention=(None, 5),
      teacher_forcing=(1.0, 0.5),
  )
  @pytest.mark.few(4)
  def test_seq2seq(self, specs, attention, teacher_forcing):
    rngs = nnx.Rngs(0)
    model = models.Seq2Seq(
        rnnzoo.Bidirectional(rnnzoo.GRU, 6, 4, rngs=rngs),
        rnnzoo.LSTM(14, 8, rngs=rngs),
        num_source_tokens=7,
        num_target_tokens=9,
        attention_features=attention,
        rngs=rngs,
    )

    def run(source, lengths, target):
      return model(
          source,
          target,
          source_lengths=lengths,
          teacher_forcing=teacher_forcing,
          rngs=nnx.Rngs(0),
      )

    mesh, shapes = explicit_mesh(), ((8, 6), (8,), (8, 4))
    with jax.sharding.use_abstract_mesh(mesh):
      given = [
          typed(mesh, shape, jnp.int32, spec)
          for shape, spec in zip(shapes, specs, strict=True)
      ]
      logits = jax.eval_shape(run, *given)
    self.assertEqual(logits.shape, (8, 4, 9))
    self.assertIsNotNone(logits.sharding.spec[0])

  @parameterized.product(
      specs=((P('a'), P()), (P(), P('a'))), teacher_forcing=(1.0, 0.5)
  )
  def test_seq2seq_of_one_source_or_target_inside_shard_map(
      self, specs, teacher_forcing
  ):
    rngs = nnx.Rngs(0)
    model = models.Seq2Seq(
        rnnzoo.GRU(6, 8, rngs=rngs),
        rnnzoo.LSTM(14, 8, rngs=rngs),
        num_source_tokens=7,
        num_target_tokens=9,
        attention_features=5,
        rngs=rngs,
    )

    def run(source, target):
      options = {'teacher_forcing': teacher_forcing, 'rngs': nnx.Rngs(0)}
      return model(source, target, **options)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ('a',), axis_types=auto)
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P('a'))
    source, target = [
        jax.ShapeDtypeStruct((8 if spec else 2, time), jnp.int32)
        for spec, time in zip(specs, (6, 4), strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh):
      logits = jax.eval_shape(run, source, target)
    self.assertEqual(logits.shape, (8, 4, 9))

  @parameterized.product(num_beams=(1, 2), is_mapped=(True, False))
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_decoding(self, num_beams, is_mapped):
    rngs = nnx.Rngs(0)
    model = models.Seq2Seq(
        rnnzoo.GRU(6, 8, rngs=rngs),
        rnnzoo.LSTM(14, 8, rngs=rngs),
        num_source_tokens=7,
        num_target_tokens=9,
        attention_features=5,
        rngs=rngs,
    )
    run = lambda source, lengths: model.decode(
        source, lengths, max_length=3, num_beams=num_beams
    )
    mesh = explicit_mesh()
    if is_mapped:
      run = jax.shard_map(run, mesh=mesh, in_specs=P('a'), out_specs=P('a'))
    with jax.sharding.use_abstract_mesh(mesh):
      source = typed(mesh, (8, 6), jnp.int32, P('a'))
      lengths = typed(mesh, (8,), jnp.int32, P('a'))
      decoded = jax.eval_shape(run, source, lengths)
    self.assertEqual(decoded.tokens.shape, (8, 3))
    self.assertEqual(decoded.tokens.sharding.spec[0], 'a')

  @parameterized.parameters((P(None, 'b'),), (P('a', 'b'),))
  @pytest.mark.slow
  def test_language_model_of_a_text_over_devices(self, spec):
    model = models.LanguageModel(rnnzoo.GRU, 11, 8, rngs=nnx.Rngs(0))
    mesh = explicit_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
      tokens = typed(mesh, (8, 6), jnp.int32, spec)
      logits = jax.eval_shape(model, tokens)
    self.assertEqual(logits.shape, (8, 6, 11))


class FlagsTest(parameterized.TestCase):
  """Flags that a caller has sharded over other axes than x."""

  def setUp(self):
    super().setUp()
    rngs = nnx.Rngs(0)
    stack = lambda layer: rnnzoo.Stack(layer, 4, 8, num_layers=2, rngs=rngs)
    self.layers = {
        'Stack': stack(rnnzoo.GRU),
        'linear': stack(rnnzoo.MinGRU),
        'SequenceModel': models.SequenceModel(
            rnnzoo.GRU(4, 8, rngs=rngs), 3, rngs=rngs
        ),
    }

  @parameterized.product(
      name=('Stack', 'linear', 'SequenceModel'),
      specs=(
          (P('a'), P('b'), P('b')),
          (P(('a', 'b')), P('a'), P('b')),
          (P(None, 'b'), P('a'), P('b')),
      ),
  )
  @pytest.mark.few(2)
  def test_flags_go_where_x_is(self, name, specs):
    mesh, layer = explicit_mesh(), self.layers[name]

    def run(x, mask, lengths):
      return layer(x, reset=mask, mask=mask, seq_lengths=lengths)

    shapes = (8, 6, 4), (8, 6), (8,)
    dtypes = jnp.float32, jnp.bool_, jnp.int32
    with jax.sharding.use_abstract_mesh(mesh):
      given = [
          typed(mesh, *kind) for kind in zip(shapes, dtypes, specs, strict=True)
      ]
      y = jax.eval_shape(run, *given)
    self.assertEqual(y.shape[0], 8)
    self.assertIsNotNone(y.sharding.spec[0])


class AllKernelsTest(Kernels):

  @parameterized.parameters('LSTM', 'IndRNN')
  @pytest.mark.slow
  def test_gates_that_are_not_kept(self, layer):
    self.assert_sums_gradients_of_parameters_only(
        sharded_cases.Case(layer, 'two', 'plain', 'pallas_carries')
    )

  @parameterized.parameters(*LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_every_form(self, layer):
    for form, call in sharded_cases.in_turn(layer):
      with self.subTest(f'{form} {call}'):
        self.assert_sums_gradients_of_parameters_only(
            sharded_cases.Case(layer, form, call, 'pallas')
        )


if __name__ == '__main__':
  absltest.main()
