"""Parameters written to a safetensors file and read from it."""

import functools
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import flax as safetensors
from safetensors import numpy as numpy_files

import rnnzoo
from rnnzoo import convert
from rnnzoo import models


def model(seed, features=4, **options):
  rngs = nnx.Rngs(seed)
  options = {'num_layers': 2, 'norm': 'batch', 'rngs': rngs, **options}
  stack = rnnzoo.Stack(rnnzoo.GRU, 3, features, **options)
  return models.SequenceClassifier(stack, 5, rngs=rngs)


class SafetensorsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir()) / 'model.safetensors'

  @pytest.mark.slow
  def test_a_model_comes_back(self):
    first, second = model(0), model(1)
    convert.save_safetensors(first, self.path)
    convert.load_safetensors(second, self.path)
    chex.assert_trees_all_equal(nnx.state(second), nnx.state(first))
    x = jnp.ones((2, 6, 3))
    np.testing.assert_array_equal(second(x), first(x))
    self.assertEqual(
        [p.name for p in self.path.parent.iterdir()], ['model.safetensors']
    )

  def test_other_equations_are_refused(self):
    new = lambda cls, **options: cls(4, 4, rngs=nnx.Rngs(0), **options)
    stack = functools.partial(rnnzoo.Stack, rnnzoo.MinGRU)
    relu = functools.partial(rnnzoo.Elman, activation='relu')
    slstm = new(rnnzoo.SLSTM, num_heads=1)
    for saved, loaded, message in (
        (new(rnnzoo.Elman), new(relu), 'module than .*tanh.*has .*relu'),
        (new(rnnzoo.LSTM), slstm, r'LSTMCell\(\).*has .*SLSTMCell'),
        (new(stack, residual=True), new(stack), 'residual = True'),
    ):
      convert.save_safetensors(saved, self.path)
      with self.assertRaisesRegex(ValueError, message):
        convert.load_safetensors(loaded, self.path)

  def test_names(self):
    layer = rnnzoo.GRU(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    convert.save_safetensors(layer, self.path)
    arrays = safetensors.load_file(self.path)
    self.assertEqual(
        {name: (a.shape, a.dtype) for name, a in arrays.items()},
        {
            'kernel': ((3, 3, 4), jnp.bfloat16),
            'bias': ((3, 4), jnp.bfloat16),
            'recurrent_kernel': ((3, 1, 4, 4), jnp.bfloat16),
            'cell_params.recurrent_bias': ((4,), jnp.bfloat16),
        },
    )
    np.testing.assert_array_equal(arrays['kernel'], layer.kernel[...])

  def test_refused(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    make = functools.partial(rnnzoo.GRU, 3, rngs=nnx.Rngs(0))
    convert.save_safetensors(layer, self.path)
    lstm = rnnzoo.LSTM(3, 4, rngs=nnx.Rngs(0))
    others = (
        (make(5), r'file has .*\(3, 4\).* module has .*\(3, 5\).* instead'),
        (make(4, param_dtype='bfloat16'), 'float32.* module has .*bfloat16'),
        (make(4, use_bias=False), r"GRU: .* \[\('bias', .* module has \[\] i"),
        (lstm, 'another module .* LSTM: the file'),
    )
    for other, message in others:
      before = jax.tree.map(np.asarray, nnx.state(other))
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        convert.load_safetensors(other, self.path)
      jax.tree.map(np.testing.assert_array_equal, nnx.state(other), before)

  def test_inside_of_jit(self):
    layer, other = rnnzoo.GRU(2, 3, rngs=nnx.Rngs(0)), nnx.GRUCell
    cell = other(2, 3, rngs=nnx.Rngs(0))
    path = pathlib.Path(self.create_tempdir().full_path) / 'gru'
    convert.save_safetensors(layer, path)
    for function, given in (
        (lambda layer: convert.save_safetensors(layer, path), layer),
        (lambda layer: convert.load_safetensors(layer, path), layer),
        (lambda _: convert.load_safetensors(layer, path), layer),
        (convert.to_torch, layer),
        (lambda cell: convert.from_flax(layer, cell), cell),
    ):
      with self.assertRaisesRegex(ValueError, 'a call outside would work'):
        nnx.eval_shape(function, given)

  def test_refuses_other_files(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    safetensors.save_file({'kernel': jnp.ones(2)}, self.path)
    with self.assertRaisesRegex(ValueError, "version '1' .* got None"):
      convert.load_safetensors(layer, self.path)
    self.path.write_bytes(b'not such a file')
    with self.assertRaisesRegex(ValueError, 'is no safetensors file'):
      convert.load_safetensors(layer, self.path)
    with self.assertRaises(FileNotFoundError):
      convert.load_safetensors(layer, self.path / 'missing')
    folder = self.path.parent
    with self.assertRaisesRegex(IsADirectoryError, 'file, got a folder'):
      convert.load_safetensors(layer, folder)
    with self.assertRaisesRegex(IsADirectoryError, 'file, got a folder'):
      convert.save_safetensors(layer, folder)
    with self.assertRaisesRegex(FileNotFoundError, 'there is no .*missing'):
      convert.save_safetensors(layer, folder / 'missing' / 'layer')
    with self.assertRaisesRegex(ValueError, 'must be an nnx.Module'):
      convert.save_safetensors({'kernel': 1}, self.path)

  def test_refuses_wider_numbers(self):
    layer = rnnzoo.Elman(3, 4, rngs=nnx.Rngs(0))
    convert.save_safetensors(layer, self.path)
    arrays = numpy_files.load_file(self.path)
    arrays['bias'] = arrays['bias'].astype(np.float64)
    metadata = {'format': 'rnnzoo', 'version': '1'}
    numpy_files.save_file(arrays, self.path, metadata=metadata)
    with self.assertRaisesRegex(ValueError, 'bias.*float64.*float32'):
      convert.load_safetensors(layer, self.path)

  def test_keeps_shardings(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    convert.save_safetensors(layer, self.path)
    mesh = jax.make_mesh((1,), ('x',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
    nnx.update(layer, jax.device_put(nnx.state(layer), sharding))
    convert.load_safetensors(layer, self.path)
    for value in jax.tree.leaves(nnx.state(layer)):
      self.assertEqual(value.sharding, sharding)

  def test_what_is_saved_can_be_read(self):
    module = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    for value in (np.ones(3), 2.5, 7, True, np.float64(0.5), jnp.int8(3)):
      with self.subTest(repr(value)):
        module.scale = nnx.Param(value)
        convert.save_safetensors(module, self.path)
        for before in (jnp.zeros_like(value), value):
          module.scale = nnx.Param(before)
          convert.load_safetensors(module, self.path)
          np.testing.assert_array_equal(module.scale.get_value(), value)
    for value, message in (
        (jnp.ones(3, jnp.float8_e4m3fn), 'read again, got float8_e4m3fn'),
        (jax.random.key(0), r'read again, got key'),
        (jax.ShapeDtypeStruct((2,), jnp.float32), 'shape but no values'),
        ({'a': 1.0}, 'scale must be an array, got a dict'),
    ):
      module.scale = nnx.Param(value)
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        convert.save_safetensors(module, self.path)

  def test_refuses_two_parameters_of_one_name(self):
    one = {'b.c': nnx.Param(jnp.ones(2)), 'b': {'c': nnx.Param(jnp.zeros(2))}}
    module = nnx.Sequential()
    module.a = nnx.data(one)
    message = r"'a\.b\.c' .*\('a', 'b', 'c'\) and \('a', 'b\.c'\)"
    with self.assertRaisesRegex(ValueError, message):
      convert.save_safetensors(module, self.path)
    self.assertFalse(self.path.exists())

  def test_says_which_package_is_missing(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    with mock.patch.dict(sys.modules, {'safetensors': None}):
      with self.assertRaisesRegex(ImportError, r'rnnzoo\[safetensors\]'):
        convert.save_safetensors(layer, self.path)

  def test_a_file_beside_it_is_left_alone(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'gru.partial').write_text('mine')
    convert.save_safetensors(rnnzoo.GRU(2, 3, rngs=nnx.Rngs(0)), folder / 'gru')
    names = {path.name for path in folder.iterdir()}
    self.assertEqual(names, {'gru', 'gru.partial'})

  def test_a_learned_carry_is_not_kept(self):
    # Here, beside the other door that replaces a trained layer's parameters.
    layer = rnnzoo.GRU(2, 3, learn_initial_carry=True, rngs=nnx.Rngs(0))
    learned = nnx.to_pure_dict(nnx.state(layer))['learned_carry']
    trained = jax.tree.map(lambda x: x + 1, learned)
    nnx.update(layer, {'learned_carry': trained})
    other = rnnzoo.GRU(2, 3, rngs=nnx.Rngs(1))
    convert.from_torch(layer, convert.to_torch(other))
    x = jnp.ones((1, 4, 2))
    np.testing.assert_allclose(layer(x), other(x), atol=1e-6)


if __name__ == '__main__':
  absltest.main()
