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
from tests.testing import random_layers
from tests.testing import several_devices
from tests.testing import sharded_cases

sharded = several_devices.sharded

# No other axis of the problem has this size.
LOCAL_BATCH = 5

LAYERS = tuple(rnnzoo.LAYERS)

# The maps and readouts of the others may mix all features: each device has all.
SPLIT = tuple(
    name
    for name in LAYERS
    if name not in ('LRU', 'S5', 'LinOSS', 'RGLRU', 'HGRN', 'QRNN')
)
BLOCKS = ('SLSTMBlock-alone-given-scan', 'SLSTMBlock-two-plain-scan')
NEWTON = (
    'GRU-alone-learned-associative_scan',
    'IndRNN-alone-learned-associative_scan',
)

# Of parameters, see tests/testing/split_program.py.
LAYOUTS = ('both', 'heads', 'saved', 'auto')

# Forms and calls that start from a carry of the user's or of the layer's.
WITH_CARRY = ('two-given', 'bidirectional-learned')

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

  def assert_same(self, program, devices, names, *before):
    """Runs cases of a program, each of which prints a line."""
    printed = several_devices.run(
        self,
        program,
        *(*before, *names),
        devices=devices,
    )
    for name in names:
      self.assertIn(f'{name} is the same on {devices} devices', printed)


class DtypesTest(parameterized.TestCase):
  """Gradients are summed over devices in the dtype of the parameters given."""

  @parameterized.product(
      layer=('GRU', 'MinGRU', 'SLSTM', 'IndRNN'),
      param_dtype=('bfloat16', 'float32'),
      is_cast=(False, True),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_sums(self, layer, param_dtype, is_cast):
    made = rnnzoo.LAYERS[layer](
        *(8, 8),
        dtype=jnp.bfloat16,
        param_dtype=param_dtype,
        learn_initial_carry=True,
        implementation='scan',
        rngs=nnx.Rngs(0),
    )
    squares, params = random_layers.squares(made)

    def loss(params, x):
      if is_cast:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
      return squares(params, x)

    mesh = several_devices.explicit_mesh(data=2)
    with jax.sharding.use_abstract_mesh(mesh):
      x = sharded(mesh, P('data'), (4, 6, 8), jnp.bfloat16)
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
    mesh = several_devices.explicit_mesh(data=2)

    def saved(a):
      axis = next((i for i, n in enumerate(a.shape) if n % 2 == 0), None)
      spec = P() if axis is None else P(*(None,) * axis, 'data')
      return sharded(mesh, spec, a.shape, a.dtype)

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
      x = sharded(mesh, P('data'), (4, 6, 8))
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

    mesh = several_devices.explicit_mesh(data=2)
    with jax.sharding.use_abstract_mesh(mesh):
      x = sharded(mesh, P('data'), (4, 6, 8))
      jaxpr = jax.make_jaxpr(jax.grad(loss))(params, x)
    found = [math.prod(shape) for _, shape in collectives(jaxpr.jaxpr)]
    return [p.size for p in jax.tree.leaves(params)], found

  def stack(self, layer=rnnzoo.GRU, **options):
    make = functools.partial(layer, implementation='scan')
    options = {'num_layers': 3, 'rngs': nnx.Rngs(0)} | options
    return rnnzoo.Stack(make, 8, 8, **options)

  @parameterized.parameters(
      {},
      {'norm': 'layer', 'residual': True},
      {'learn_initial_carry': True},
      {'layer': rnnzoo.MinGRU},
      {'layer': functools.partial(rnnzoo.CfC, timespans=True), 'num_layers': 1},
  )
  def test_stacks(self, **options):
    self.assertCountEqual(*self.sums(self.stack(**options)))

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


class SymbolicTest(parameterized.TestCase):

  def test_batch(self):
    stack = rnnzoo.Stack(rnnzoo.GRU, 8, 8, rngs=nnx.Rngs(0))
    mesh = several_devices.explicit_mesh(data=4)
    (size,) = jax.export.symbolic_shape('b', constraints=['mod(b, 4) == 0'])
    with jax.sharding.use_abstract_mesh(mesh):
      h = jax.eval_shape(stack, sharded(mesh, P('data'), (size, 6, 8)))
    self.assertEqual(h.shape, (size, 6, 8))


class CarryErrorsTest(parameterized.TestCase):
  """A carry of the wrong shape is refused by the shapes of the caller."""

  @parameterized.product(
      kind=('LSTM', 'Bidirectional', 'Stack', 'SLSTMBlock'),
      # The second is as large as a device's part of the batch.
      batch=(16, 1),
  )
  def test_unroll_and_step(self, kind, batch):
    inside = () if kind in ('LSTM', 'SLSTMBlock') else (rnnzoo.LSTM,)
    layer = getattr(rnnzoo, kind)(*inside, 4, 4, rngs=nnx.Rngs(0))
    carry = layer.initial_carry((batch,))
    unroll = lambda x, carry: layer.unroll(x, initial_carry=carry)
    calls = [(unroll, (8, 5, 4)), (lambda x, c: layer.step(c, x), (8, 4))]
    mesh = several_devices.explicit_mesh(data=8)
    # The backward layer of both directions has no steps.
    for run, shape in calls[: 1 if kind == 'Bidirectional' else 2]:
      with jax.sharding.use_abstract_mesh(mesh):
        x = sharded(mesh, P('data'), shape)
        with self.assertRaisesRegex(
            ValueError, rf'\(8, 4\).*got.*\({batch}, 4\)'
        ):
          jax.eval_shape(run, x, carry)


class NumbersTest(Numbers):

  @parameterized.parameters(
      ('stacks', 'parts of parts of time'), ('functions', 'sharded parameters')
  )
  @pytest.mark.slow
  def test_public_functions(self, group, last):
    printed = several_devices.run(
        self,
        *('sharded_program', 'Explicit', group),
    )
    self.assertIn(f'{last} is the same on 8 devices', printed)

  @pytest.mark.slow
  def test_shard_map(self):
    # The form that has all others in it, and cells with a state of several
    # parts; under jit are other cells.
    names = (
        *('LSTM-two_bidirectional-given-scan', 'SLSTM-alone-plain-scan'),
        'MinGRU-bidirectional-learned-associative_scan',
    )
    self.assert_same('shard_map_program', 4, [*names, BLOCKS[0], NEWTON[0]])

  @parameterized.parameters(*enumerate(('Explicit', 'Auto')))
  @pytest.mark.slow
  def test_jit(self, i, kind):
    # Some layers with each kind; others are shown under shard_map.
    names = {
        'Explicit': 'MinLSTM-alone-learned-scan',
        'Auto': 'GRU-three-learned-scan',
    }[kind]
    names = [f'LSTM-{WITH_CARRY[i]}-scan', names, BLOCKS[i], NEWTON[1]]
    if kind == 'Auto' and abstract_gpu.RUNS:
      names += ['LSTM-two-given-pallas_carries', 'MinGRU-two-given-pallas']
    self.assert_same('sharded_program', 8, names, kind)

  @parameterized.parameters(*LAYERS)
  @pytest.mark.exhaustive
  def test_everything(self, layer):
    paths = sharded_cases.paths(layer)
    self.assert_same(
        'shard_map_program',
        4,
        [
            f'{layer}-{form}-{call}-{path}'
            for form, call in sharded_cases.in_turn(layer)
            for path in paths
        ],
    )
    for kind in ('Explicit', 'Auto'):
      if kind == 'Auto' and abstract_gpu.RUNS:
        paths += ('pallas',)
      self.assert_same(
          'sharded_program',
          8,
          [f'{layer}-{f}-{path}' for f in WITH_CARRY for path in paths],
          kind,
      )


class PartialManualTest(Numbers):
  """Inside a user's `jax.shard_map` over one of two mesh axes."""

  @pytest.mark.slow
  def test_cases(self):
    names = (
        *('linear_scan-scan-Auto-free', 'LSTM-scan-Explicit-vma'),
        *('Stack-None-Explicit-free', 'MinGRU-associative_scan-Explicit-vma'),
    )
    self.assert_same('partial_manual_program', 4, names)


class MappedTest(Numbers):
  """Rows of `jax.vmap` over an Explicit axis of a mesh."""

  @pytest.mark.slow
  def test_newton(self):
    # An axis in both places at once finds what either place alone would.
    ways = {
        'GRU': ('gradient_both',),
        'IndRNN': ('rows_and_batch', 'nested', 'gradients', 'shared')
        + ('tangent', 'in_shard_map'),
    }
    names = [f'{layer}:{way}' for layer in ways for way in ways[layer]]
    self.assert_same('mapped_program', 8, names)

  def test_gradients_by_scan(self):
    made = rnnzoo.LSTM(4, 4, implementation='scan', rngs=nnx.Rngs(0))
    loss, state = random_layers.squares(made)
    mesh = several_devices.explicit_mesh(a=4, b=2)
    with jax.sharding.use_abstract_mesh(mesh):
      states = jax.tree.map(
          lambda p: sharded(mesh, P('a'), (8, *p.shape), p.dtype), state
      )
      x = sharded(mesh, P('b'), (4, 5, 4))
      each = jax.vmap(jax.grad(loss), (0, None))
      for gradient in jax.tree.leaves(jax.eval_shape(each, states, x)):
        self.assertEqual(gradient.sharding.spec[0], 'a')


class SplitTest(Numbers):
  """Parameters over devices, by heads or features that are independent."""

  @parameterized.parameters(*enumerate(LAYOUTS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_layers(self, index, layout):
    forms = itertools.cycle(('alone-given', 'two-plain', 'alone-learned'))
    names = [
        f'{layer}-{form}-scan'
        for layer, form in zip(SPLIT[index::4], forms, strict=False)
    ]
    # One that has a single head is gathered, with one warning.
    names += ['one_head'] * (layout == 'both')
    self.assert_same('split_program', 8, names, layout)

  @pytest.mark.exhaustive
  def test_functions_and_a_block(self):
    names = 'MinGRU-bidirectional-learned-scan', 'functions', 'block'
    self.assert_same('split_program', 8, names, 'both')

  @parameterized.product(layer=SPLIT, layout=LAYOUTS)
  @pytest.mark.exhaustive
  def test_all(self, layer, layout):
    paths = ['scan', 'associative_scan']
    if abstract_gpu.RUNS and layout != 'auto':
      paths.append('pallas')
    cases = itertools.product(('two-given', 'bidirectional-learned'), paths)
    self.assert_same(
        'split_program',
        8,
        [f'{layer}-{form}-{path}' for form, path in cases],
        layout,
    )


class KernelsTest(parameterized.TestCase):
  """Traces programs for two GPUs that are not there.

  With kernels, two stacked layers once had the wrong gradient in the first:
  the second one's cotangent of its input was summed over the devices.
  """

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

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
      data = jax.tree.map(
          lambda x: sharded(mesh, P('data'), x.shape, x.dtype), data
      )
      return params, jax.make_jaxpr(jax.grad(loss))(params, data).jaxpr

  def assert_sums_gradients_of_parameters_only(self, case):
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

  @parameterized.parameters('LSTM', 'IndRNN')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gates_that_are_not_kept(self, layer):
    self.assert_sums_gradients_of_parameters_only(
        sharded_cases.Case(layer, 'two', 'plain', 'pallas_carries')
    )

  @parameterized.parameters(*LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_every_form(self, layer):
    # Stacks of three layers, and of two of both directions.
    for form, call in sharded_cases.in_turn(layer)[2::2]:
      with self.subTest(f'{form} {call}'):
        self.assert_sums_gradients_of_parameters_only(
            sharded_cases.Case(layer, form, call, 'pallas')
        )


def translator(encoder=None, attention=5):
  encoder = encoder or rnnzoo.GRU(6, 8, rngs=nnx.Rngs(0))
  return random_layers.seq2seq(
      encoder, 8, rnnzoo.LSTM, attention_features=attention
  )


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
    encoder = rnnzoo.Bidirectional(rnnzoo.GRU, 6, 4, rngs=nnx.Rngs(0))
    model = translator(encoder, attention)

    def run(source, lengths, target):
      options = {'source_lengths': lengths, 'rngs': nnx.Rngs(0)}
      return model(source, target, teacher_forcing=teacher_forcing, **options)

    mesh = several_devices.explicit_mesh(a=4, b=2)
    with jax.sharding.use_abstract_mesh(mesh):
      given = [
          sharded(mesh, spec, shape, 'int32')
          for shape, spec in zip(((8, 6), (8,), (8, 4)), specs, strict=True)
      ]
      logits = jax.eval_shape(run, *given)
    self.assertEqual(logits.shape, (8, 4, 9))
    self.assertIsNotNone(logits.sharding.spec[0])

  @parameterized.parameters((P('a'), P()), (P(), P('a')))
  def test_seq2seq_of_one_source_or_target_inside_shard_map(self, *specs):
    model = translator()
    run = lambda *given: model(*given, teacher_forcing=0.5, rngs=nnx.Rngs(0))
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
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_decoding(self, num_beams, is_mapped):
    model = translator()
    run = lambda source, lengths: model.decode(
        source, lengths, max_length=3, num_beams=num_beams
    )
    mesh = several_devices.explicit_mesh(a=4, b=2)
    if is_mapped:
      run = jax.shard_map(run, mesh=mesh, in_specs=P('a'), out_specs=P('a'))
    with jax.sharding.use_abstract_mesh(mesh):
      source = sharded(mesh, P('a'), (8, 6), 'int32')
      lengths = sharded(mesh, P('a'), (8,), 'int32')
      decoded = jax.eval_shape(run, source, lengths)
    self.assertEqual(decoded.tokens.shape, (8, 3))
    self.assertEqual(decoded.tokens.sharding.spec[0], 'a')

  @pytest.mark.slow
  def test_others_whose_flags_or_time_are_sharded_otherwise(self):
    rngs, mesh = nnx.Rngs(0), several_devices.explicit_mesh(a=4, b=2)
    language = models.LanguageModel(rnnzoo.GRU, 11, 8, rngs=rngs)
    stack = lambda layer: rnnzoo.Stack(layer, 4, 8, num_layers=2, rngs=rngs)
    sequence = models.SequenceModel(stack(rnnzoo.GRU), 3, rngs=rngs)
    linear = stack(rnnzoo.MinGRU)
    with jax.sharding.use_abstract_mesh(mesh):
      mask = sharded(mesh, P('a'), (8, 6), bool)
      lengths = sharded(mesh, P('b'), (8,), 'int32')
      for spec, of_tokens in (
          (P(('a', 'b')), P(None, 'b')),
          (P(None, 'b'), P('a', 'b')),
      ):
        tokens = sharded(mesh, of_tokens, (8, 6), 'int32')
        logits = jax.eval_shape(language, tokens)
        self.assertEqual(logits.shape, (8, 6, 11))
        x = sharded(mesh, spec, (8, 6, 4))
        for model in (sequence, linear):
          run = lambda x, mask, lengths, model=model: model(
              x, reset=mask, mask=mask, seq_lengths=lengths
          )
          y = jax.eval_shape(run, x, mask, lengths)
          self.assertEqual(y.shape[0], 8)
          self.assertIsNotNone(y.sharding.spec[0])


if __name__ == '__main__':
  absltest.main()
