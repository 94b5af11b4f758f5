"""Layers as linen modules: the same parameters give the same numbers."""

import dataclasses
import functools
import inspect
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import linen
from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import linen as rnnzoo_linen
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 4, 3, 4

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = rng.random((BATCH, TIME)) < 0.3

close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


def with_str_names(tree):
  if not isinstance(tree, dict):
    return tree
  return {str(name): with_str_names(value) for name, value in tree.items()}


class LinenTest(parameterized.TestCase):

  @parameterized.parameters(
      *rnnzoo.LAYERS, 'Stack', 'DenseStack', 'Bidirectional'
  )
  @pytest.mark.few(2)
  def test_same_numbers(self, name):
    inside = () if name in rnnzoo.LAYERS else (rnnzoo.GRU,)
    sizes = {'in_features': IN, 'features': FEATURES}
    module = getattr(rnnzoo_linen, name)(*inside, **sizes)
    layer = random_layers.make(getattr(rnnzoo, name), *inside, IN, FEATURES)
    params = with_str_names(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    # Metadata such as IRevRNN's bound travels in a box.
    variables = jax.tree.map(
        lambda box, value: linen.meta.replace_boxed(box, value),
        shapes,
        {'params': params},
        is_leaf=lambda leaf: isinstance(leaf, linen.meta.AxisMetadata),
    )
    self.assertEqual(
        jax.tree.map(np.shape, linen.meta.unbox(variables)),
        jax.tree.map(np.shape, {'params': params}),
    )

    @reference.jit
    def run(variables, layer):
      unroll = functools.partial(module.apply, nnx_method='unroll')
      got = unroll(variables, x, reset=reset)
      return got, layer.unroll(x, reset=reset)

    jax.tree.map(close, *run(variables, layer))

  @pytest.mark.slow
  def test_infers_in_features_and_has_methods(self):
    module = rnnzoo_linen.LSTM(features=FEATURES)
    variables = module.init(jax.random.key(0), x)
    apply = functools.partial(module.apply, variables)
    carry, y = apply(x, method='unroll', reset=reset)
    self.assertEqual(y.shape, (BATCH, TIME, FEATURES))
    jax.tree.map(close, apply(x, reset=reset, nnx_method='unroll'), (carry, y))
    start = rnnzoo_linen.LSTM(features=FEATURES, in_features=IN).apply(
        variables, (BATCH,), method='initial_carry'
    )
    for t in range(TIME):
      start, y_t = apply(start, x[:, t], reset=reset[:, t], method='step')
      close(y_t, y[:, t])
    with self.assertRaisesRegex(ValueError, 'needs in_features='):
      apply((BATCH,), method='initial_carry')
    with self.assertRaisesRegex(ValueError, 'expects x as an array'):
      apply([1.0])

  @pytest.mark.slow
  def test_under_remat_and_scan(self):
    class Model(linen.Module):
      remat: bool

      @linen.compact
      def __call__(self, x):
        gru = linen.remat(rnnzoo_linen.GRU) if self.remat else rnnzoo_linen.GRU
        for level in range(2):
          x = gru(features=FEATURES, name=f'level_{level}')(x)
        return x

    plain, remat = Model(False), Model(True)
    variables = plain.init(jax.random.key(0), x)
    loss = lambda module: jax.jit(
        jax.grad(lambda v: (module.apply(v, x) ** 2).sum())
    )
    jax.tree.map(close, loss(remat)(variables), loss(plain)(variables))
    self.assertIn('remat', str(jax.make_jaxpr(loss(remat))(variables)))
    self.assertEqual(
        list(variables['params']['level_1']),
        list(rnnzoo_linen.GRU(FEATURES).init(jax.random.key(0), x)['params']),
    )

  @pytest.mark.slow
  def test_partitioning_at_init(self):
    normal = nnx.initializers.lecun_normal()
    init = nnx.with_partitioning(normal, (None, 'model'))
    module = rnnzoo_linen.GRU(features=FEATURES, kernel_init=init)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ('model',), axis_types=auto)
    with jax.set_mesh(mesh):
      variables = module.init(jax.random.key(0), x)
      specs = linen.get_partition_spec(variables)['params']
      y = module.apply(variables, x)
    self.assertEqual(
        specs['kernel'], jax.sharding.PartitionSpec(None, None, 'model')
    )
    close(module.apply(linen.meta.unbox(variables), x), y)

  def test_applying_draws_no_parameters(self):
    module = rnnzoo_linen.GRU(features=FEATURES)
    variables = module.init(jax.random.key(0), x)
    jaxpr = str(jax.make_jaxpr(module.apply)(variables, x))
    self.assertNotIn('random_bits', jaxpr)
    self.assertNotRegex(jaxpr, r'\bqr\b')
    drawn = str(jax.make_jaxpr(module.init)(jax.random.key(0), x))
    self.assertIn('random_bits', drawn)
    self.assertRegex(drawn, r'\bqr\b')

  def test_a_parameter_is_missing(self):
    module = rnnzoo_linen.GRU(features=FEATURES)
    params = dict(module.init(jax.random.key(0), x)['params'])
    del params['bias']
    with self.assertRaisesRegex(ValueError, 'GRU.bias .* variables lack its'):
      module.apply({'params': params}, x)

  @pytest.mark.slow
  def test_names_in_a_stack_are_str(self):
    both = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU)
    options = {'num_layers': 2, 'norm': 'batch'}
    module = rnnzoo_linen.Stack(both, features=FEATURES, **options)
    variables = module.init(jax.random.key(0), x)
    flat = traverse_util.flatten_dict(variables, sep='/')
    self.assertIn('params/layers/1/backward/kernel', flat)
    self.assertIn('batch_stats/norms/0/mean', flat)
    update = functools.partial(module.apply, mutable=['batch_stats'])
    new = update(variables, x)[1]
    self.assertEqual(
        list(traverse_util.flatten_dict(new, sep='/')),
        [name for name in flat if name.startswith('batch_stats')],
    )
    with self.subTest('into a layer of nnx'):
      options = {'num_layers': 2, 'norm': 'batch', 'rngs': nnx.Rngs(1)}
      stack = rnnzoo.Stack(module.layer, IN, FEATURES, **options)
      nnx.update(stack, nnx.restore_int_paths(variables['params']))
      close(stack(x), module.apply(variables, x))

  def test_fields_are_the_layers_options(self):
    for name, cls in rnnzoo.LAYERS.items():
      module = getattr(rnnzoo_linen, name)
      own = inspect.signature(cls.__init__).parameters
      every = inspect.signature(rnnzoo.RecurrentLayer.__init__).parameters
      known = every | own
      fields = {field.name for field in dataclasses.fields(module)}
      apart = {'self', 'rngs', 'options', 'unknown', 'cell', 'cell_params'}
      apart |= {'recurrent_structure', 'max_abs', 'num_heads'}
      apart |= {'state_features', 'input_map', 'readout'}
      different = (known.keys() ^ fields) - apart
      self.assertEqual(different, {'parent', 'name'}, msg=name)
      for field in dataclasses.fields(module):
        given = known.get(field.name)
        if field.default not in (None, dataclasses.MISSING) and given:
          self.assertEqual(field.default, given.default, msg=(name, field.name))
      for option in ('max_abs', 'num_heads'):
        self.assertEqual(option in fields, option in own, msg=(name, option))

  @pytest.mark.slow
  def test_block(self):
    module = rnnzoo_linen.SLSTMBlock(4, num_heads=2)
    options = inspect.signature(rnnzoo.SLSTMBlock.__init__).parameters
    fields = {field.name: field.default for field in dataclasses.fields(module)}
    self.assertEqual(
        set(fields) ^ set(options),
        {'self', 'rngs', 'unknown', 'parent', 'name'},
    )
    for name, option in options.items():
      if name in fields and name not in ('in_features', 'features'):
        self.assertEqual(fields[name], option.default, msg=name)
    block = random_layers.make(rnnzoo.SLSTMBlock, 4, 4, num_heads=2)
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    ones = np.ones((2, 3, 4), np.float32)
    y = reference.jit(module.apply)({'params': params}, ones)
    close(y, reference.jit(lambda block, x: block(x))(block, ones))


def deep(layer, *arguments, **options):
  """Returns a stack with dropout and running averages."""
  options |= {'num_layers': 2, 'dropout_rate': 0.5, 'norm': 'batch'}
  return layer(rnnzoo.GRU, *arguments, **options)


STACK = functools.partial(deep, rnnzoo.Stack)


class Recalled(linen.Module):
  """A ScannedRNN over whole sequences."""

  @linen.compact
  def __call__(self, x):
    rollout = jnp.swapaxes(x, 0, 1), jnp.zeros(x.shape[1::-1])
    start = rnnzoo_linen.ScannedRNN.initialize_carry(BATCH, FEATURES, STACK)
    return rnnzoo_linen.ScannedRNN(STACK)(start, rollout)[1]


class Inside(linen.Module):
  """Layers of other modules: recomputed, and one for each turn of a scan."""

  @linen.compact
  def __call__(self, x):
    recomputed = linen.remat(rnnzoo_linen.Bidirectional)(STACK, FEATURES)
    scanned = linen.scan(
        lambda module, x: (module(x), None),
        length=2,
        variable_axes={'params': 0, 'batch_stats': 0},
        split_rngs={'params': True, 'dropout': True},
    )
    stack = deep(rnnzoo_linen.Stack, 2 * FEATURES)
    return linen.Dense(5)(scanned(stack, recomputed(x))[0])


class TrainingTest(parameterized.TestCase):

  @parameterized.parameters(
      deep(rnnzoo_linen.Stack, FEATURES),
      deep(rnnzoo_linen.DenseStack, FEATURES),
      Recalled(),
      Inside(),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_dropout_by_rngs_and_averages_by_mutable(self, module):
    variables = module.init(jax.random.key(0), x)
    apply = jax.jit(
        functools.partial(module.apply, variables, x), static_argnames='mutable'
    )
    averages = lambda variables: [
        np.abs(leaf).max()
        for path, leaf in traverse_util.flatten_dict(variables).items()
        if path[0] == 'batch_stats' and path[-1] == 'mean'
    ]
    rngs = lambda seed: {'dropout': jax.random.key(seed)}
    plain, dropped, again = apply(), apply(rngs=rngs(1)), apply(rngs=rngs(2))
    normed, new = apply(mutable='batch_stats')
    both, _ = apply(rngs=rngs(1), mutable='batch_stats')
    self.assertEqual(max(averages(variables)), 0)
    self.assertGreater(min(averages(new)), 1e-3)
    made = plain, dropped, again, normed, both, apply(rngs=jax.random.key(3))
    for first, second in itertools.combinations(made, 2):
      self.assertGreater(np.abs(first - second).max(), 1e-3)

  def test_updates_are_those_of_nnx(self):
    module = rnnzoo_linen.Stack(rnnzoo.GRU, FEATURES, norm='batch')
    variables = module.init(jax.random.key(0), x)
    options = {'norm': 'batch', 'rngs': nnx.Rngs(1)}
    layer = rnnzoo.Stack(rnnzoo.GRU, IN, FEATURES, **options)
    nnx.update(layer, nnx.restore_int_paths(variables['params']))
    got, new = module.apply(variables, x, mutable=['batch_stats'])
    close(got, layer(x, rngs=nnx.Rngs(0)))
    for name, average in new['batch_stats']['norms']['0'].items():
      close(average, getattr(layer.norms[0], name))
    first = module.apply({}, x, mutable=True, rngs=jax.random.key(0))[1]
    self.assertTrue(first['batch_stats']['norms']['0']['mean'].any())
    with self.assertRaisesRegex(ValueError, "norms.0.mean .* 'batch_stats'"):
      module.apply({'params': variables['params']}, x)

  @parameterized.parameters(
      linen.with_partitioning, linen.with_logical_partitioning
  )
  @pytest.mark.slow
  def test_partitioned_initialisers(self, partitioned):
    init, zeros = linen.initializers.orthogonal(), linen.initializers.zeros
    options = {
        'kernel_init': partitioned(init, ('in', 'model')),
        'recurrent_kernel_init': partitioned(init, ('from', 'to')),
        'bias_init': partitioned(zeros, ('model',)),
    }
    plain = {name: init.__wrapped__ for name, init in options.items()}
    want = {
        'kernel': (None, 'in', 'model'),
        'recurrent_kernel': (None, None, 'from', 'to'),
        'bias': (None, 'model'),
    }
    for extra in ({}, {'forget_bias': 1.0}, {'chrono_steps': 9}):
      layer = rnnzoo_linen.LSTM(FEATURES, **options, **extra)
      variables = layer.init(jax.random.key(0), x)
      for name, axes in want.items():
        box = variables['params'][name]
        self.assertEqual(box.names, axes)
        self.assertIs(type(box), type(options['bias_init'](None, ())))
      unboxed = linen.unbox(variables)
      same = rnnzoo_linen.LSTM(FEATURES, **plain, **extra)
      chex.assert_trees_all_equal(unboxed, same.init(jax.random.key(0), x))
      got = layer.apply(variables, x)
      np.testing.assert_array_equal(got, layer.apply(unboxed, x))
    factory = functools.partial(rnnzoo.LSTM, **options)
    repeated = linen.vmap(
        rnnzoo_linen.Stack,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        metadata_params={linen.PARTITION_NAME: 'turn'},
    )(factory, FEATURES)
    shapes = jax.eval_shape(repeated.init, jax.random.key(0), x[None])
    bias = shapes['params']['layers']['0']['bias']
    self.assertEqual(bias.names, ('turn', None, 'model'))
    rnnzoo_linen.ScannedRNN.initialize_carry(BATCH, FEATURES, factory)
    with self.assertRaisesRegex(ValueError, 'nnx.with_partitioning would work'):
      factory(IN, FEATURES, rngs=nnx.Rngs(0))


class CalledTwice(linen.Module):
  """Calls one layer, and one ScannedRNN, twice."""

  @linen.compact
  def __call__(self, x):
    layer, scanned = rnnzoo_linen.GRU(4), rnnzoo_linen.ScannedRNN()
    rollout = jnp.swapaxes(x, 0, 1), jnp.zeros(x.shape[1::-1])
    carry = rnnzoo_linen.ScannedRNN.initialize_carry(x.shape[0], 4)
    return layer(x), layer(x), scanned(carry, rollout), scanned(carry, rollout)


class DrawnOnceTest(parameterized.TestCase):

  def test_calls_of_one_module_share_parameters(self):
    x = jnp.ones((2, 5, 3))
    made, variables = CalledTwice().init_with_output(jax.random.key(0), x)
    chex.assert_trees_all_equal(made[0], made[1])
    chex.assert_trees_all_equal(made[2], made[3])
    chex.assert_trees_all_equal(made, CalledTwice().apply(variables, x))

  @parameterized.parameters(
      rnnzoo_linen.GRU(2),
      rnnzoo_linen.MinLSTM(4),
      rnnzoo_linen.Stack(rnnzoo.GRU, 4, num_layers=2, norm='batch'),
      rnnzoo_linen.Bidirectional(rnnzoo.IndRNN, 4),
  )
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_inputs_of_another_width(self, module):
    variables = module.init(jax.random.key(0), jnp.ones((2, 5, 3)))
    message = r'kernel must have shape \(.*, got \('
    with self.assertRaisesRegex(ValueError, message):
      module.apply(variables, jnp.ones((2, 5, 2)))
    wider = dataclasses.replace(module, features=8)
    with self.assertRaisesRegex(ValueError, message):
      wider.apply(variables, jnp.ones((2, 5, 3)))

  def test_apply_makes_parameters_that_may_be_made(self):
    x, rngs = jnp.ones((2, 5, 3)), {'params': jax.random.key(0)}
    y, variables = rnnzoo_linen.GRU(4).apply(
        {}, x, mutable=['params'], rngs=rngs
    )
    chex.assert_trees_all_equal(y, rnnzoo_linen.GRU(4).apply(variables, x))


if __name__ == '__main__':
  absltest.main()
