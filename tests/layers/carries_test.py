"""Named carries: layers return them; a carry that is given keeps its type."""

import dataclasses
import functools
import pickle
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import export
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import cell
from rnnzoo import linen
from rnnzoo.layers import recurrent

X = np.ones((2, 3, 2), np.float32)


@dataclasses.dataclass(frozen=True)
class FadingCell(rnnzoo.Cell):
  """A cell that leaves the class of its carry to rnnzoo."""

  input_gates = 1
  recurrent_gates = 0
  carry_names = ('h', 'trace')

  def update(self, params, x_gates, h_gates, carry):
    trace = 0.5 * carry[1] + x_gates[0]
    return jnp.tanh(trace), trace


class Flipped(NamedTuple):
  c: jax.Array
  h: jax.Array


def lstm():
  return rnnzoo.LSTM(2, 4, rngs=nnx.Rngs(0))


def traced(test):
  """Runs a test in a trace: types of carries are known before any number."""

  @functools.wraps(test)
  def run(*arguments):
    jax.eval_shape(lambda: test(*arguments))

  return run


class CarriesTest(parameterized.TestCase):

  @parameterized.parameters(*rnnzoo.LAYERS)
  @traced
  def test_names_are_those_of_the_cell(self, name):
    layer = rnnzoo.LAYERS[name](2, 4, rngs=nnx.Rngs(0))
    carry = layer.initial_carry((2,))
    self.assertEqual(carry._fields, layer.cell.carry_names)
    self.assertIs(getattr(carry, layer.cell.carry_names[0]), carry[0])
    self.assertIsInstance(carry, tuple)
    self.assertIs(type(carry), cell.of(layer.cell))
    self.assertIs(type(layer.step(carry, X[:, 0])[0]), type(carry))

  @traced
  def test_unroll_and_unroll_carries(self):
    layer = lstm()
    (h, c), _ = layer.unroll(X)
    carry, steps = layer.unroll_carries(X)
    for named in (carry, steps, layer.unroll(X)[0]):
      self.assertIsInstance(named, rnnzoo.LSTMCarry)
    self.assertEqual((carry.h.shape, carry.c.shape), (h.shape, c.shape))
    self.assertEqual(steps.c.shape, (2, 3, 4))

  @parameterized.parameters(tuple, list, rnnzoo.LSTMCarry._make)
  @traced
  def test_what_is_given_keeps_its_type(self, make):
    layer = lstm()
    given = make(layer.initial_carry((2,)))
    want = tuple if isinstance(given, list) else type(given)
    for carry in (
        layer.step(given, X[:, 0])[0],
        layer.unroll(X, initial_carry=given)[0],
        *layer.unroll_carries(X, initial_carry=given),
        *rnnzoo.unroll_carries(
            *(layer.cell, {}, jnp.ones((2, 3, 4, 4))),
            *(jnp.ones((4, 1, 4, 4)), given),
        ),
    ):
      self.assertIs(type(carry), want)

  @parameterized.parameters(False, True)
  @traced
  def test_loops(self, named):
    layer = lstm()
    carry = layer.initial_carry((2,))
    carry = carry if named else tuple(carry)
    step = lambda carry, x: layer.step(carry, x)
    last, _ = jax.lax.scan(step, carry, jnp.swapaxes(X, 0, 1))
    again = jax.lax.while_loop(
        lambda carry: jnp.sum(carry[0]) < 0,
        lambda carry: layer.unroll(X, initial_carry=carry)[0],
        last,
    )
    self.assertIs(type(again), type(carry))

  def test_a_learned_one_can_be_donated(self):
    layer = rnnzoo.CfC(3, 4, learn_initial_carry=True, rngs=nnx.Rngs(0))
    layer.initial_carry().h.delete()
    np.testing.assert_array_equal(layer.initial_carry().h, np.zeros(4))

  @traced
  def test_layers_of_layers(self):
    stack = rnnzoo.Stack(rnnzoo.LSTM, 2, 4, num_layers=2, rngs=nnx.Rngs(0))
    both = rnnzoo.Bidirectional(rnnzoo.LSTM, 2, 4, rngs=nnx.Rngs(0))
    for layer in (stack, both):
      carry, _ = layer.unroll(X)
      self.assertIs(type(carry), tuple)
      for part in (*carry, *layer.initial_carry((2,))):
        self.assertIsInstance(part, rnnzoo.LSTMCarry)

  @traced
  def test_linen(self):
    layer = linen.LSTM(features=4)
    (carry, _), variables = layer.init_with_output(
        jax.random.key(0), X, method='unroll'
    )
    self.assertIsInstance(carry, rnnzoo.LSTMCarry)
    carry, _ = layer.apply(variables, tuple(carry), X[:, 0], method='step')
    self.assertIs(type(carry), tuple)

  @traced
  def test_class_made_of_names(self):
    layer = recurrent.RecurrentLayer(FadingCell(), 2, 4, rngs=nnx.Rngs(0))
    carry, _ = layer.unroll(X)
    self.assertEqual(type(carry).__name__, 'FadingCarry')
    self.assertIs(type(layer.unroll(X)[0]), type(carry))
    self.assertEqual(carry._fields, ('h', 'trace'))
    numbers = type(carry)(1, 2)
    self.assertIs(type(pickle.loads(pickle.dumps(numbers))), type(carry))

  @parameterized.parameters(
      rnnzoo.HiddenCarry,
      rnnzoo.LSTMCarry,
      rnnzoo.SLSTMCarry,
      rnnzoo.IRevRNNCarry,
      rnnzoo.ComplexCarry,
  )
  def test_export_and_pickle_know_it(self, carry_type):
    carry = carry_type._make(range(len(carry_type._fields)))
    self.assertIs(type(pickle.loads(pickle.dumps(carry))), carry_type)
    with self.assertRaisesRegex(ValueError, 'Duplicate serialization'):
      both = {'serialize_auxdata': bytes, 'deserialize_auxdata': bytes}
      export.register_pytree_node_serialization(
          carry_type, serialized_name='of_this_test', **both
      )

  def test_paths_are_those_of_a_tuple(self):
    carry = rnnzoo.LSTMCarry(h=1, c=2)
    paths = lambda tree: [path for path, _ in jax.tree.leaves_with_path(tree)]
    self.assertEqual(paths(carry), paths((1, 2)))

  @traced
  def test_another_order_is_an_error(self):
    layer = lstm()
    given = Flipped(*layer.initial_carry((2,)))
    with self.assertRaisesRegex(
        ValueError, r"order \('h', 'c'\), got \('c', 'h'\)"
    ):
      layer.step(given, X[:, 0])

  def test_another_type_of_carry_is_an_error(self):

    class WrongCell(FadingCell):
      carry_type = rnnzoo.LSTMCarry

    with self.assertRaisesRegex(ValueError, 'carry_type must be None or'):
      recurrent.RecurrentLayer(WrongCell(), 2, 4, rngs=nnx.Rngs(0))


if __name__ == '__main__':
  absltest.main()
