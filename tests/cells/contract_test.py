"""A cell that breaks the contract is refused when a layer is made of it."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo


def sum_of_gates(self, params, x_gates, h_gates, carry):
  return (jnp.tanh(sum(x_gates) + sum(h_gates)),)


def of_gates(f):
  """Returns an `update` that is a function of the sum of all gates."""
  return lambda self, p, x, h, c: (f(sum(x) + sum(h)),)


def make(base=rnnzoo.Cell, frozen=True, **members):
  """A cell that is right but for what is given; None leaves a member out."""
  right = {
      'input_gates': 1,
      'recurrent_gates': 1,
      'carry_names': ('h',),
      'update': sum_of_gates,
  }
  members = {k: v for k, v in (right | members).items() if v is not None}
  return dataclasses.dataclass(frozen=frozen)(type('Bad', (base,), members))


def operand_of(index):
  return lambda self, p, x, h, c: h[index] * c[0]


LINEAR = {'base': rnnzoo.LinearCell, 'recurrent_gates': 0, 'update': None}
TWO = {'base': rnnzoo.TwoStageCell, 'recurrent_gates': 2}
PRODUCT = lambda x: x @ jnp.eye(x.shape[-1])

# name -> what is wrong, what the message says
BROKEN = {
    'norm': ({'update': of_gates(jax.nn.standardize)}, 'reduce_sum.* features'),
    'cumsum': ({'update': of_gates(lambda x: jnp.cumsum(x, -1))}, "'cumsum'"),
    'reversed': ({'update': of_gates(lambda x: x[..., ::-1])}, "'rev' mixes"),
    'product': ({'update': of_gates(PRODUCT)}, "'dot_general' mixes features"),
    'sorted': ({'update': of_gates(jnp.sort)}, "'sort' mixes features"),
    'batch': ({'update': of_gates(lambda x: x - x.mean(0))}, 'batch elements'),
    'in_a_branch': (
        {'update': of_gates(jax.jit(lambda x: x - x.mean(-1, keepdims=True)))},
        'mixes features',
    ),
    'missing_parameter': (
        {'update': lambda self, p, x, h, c: (x[0] * p['w'],)},
        r"Bad.update cannot be traced .* parameters \[\]: KeyError: 'w'",
    ),
    'numpy': (
        {'update': lambda self, p, x, h, c: (np.tanh(x[0]),)},
        'it calls numpy; jax.numpy would work$',
    ),
    'branch': (
        {'update': lambda self, p, x, h, c: (x[0] if h[0].any() else h[0],)},
        'it asks for a value, as `if` does; jnp.where would work$',
    ),
    'undeclared': ({'param_names': ('w',)}, r"\['w'\] are missing"),
    'too_many': (
        {'update': lambda self, p, x, h, c: (x[0], h[0])},
        r"a tuple of 1 arrays, \('h',\), got \(array, array\)",
    ),
    'no_tuple': (
        {'update': lambda self, p, x, h, c: x[0] + h[0]},
        'must return a tuple of 1 arrays',
    ),
    'no_array': (
        {'update': lambda self, p, x, h, c: (None,)},
        'must return an array for h, got a NoneType',
    ),
    'shape': (
        {'update': lambda self, p, x, h, c: (jnp.stack([x[0], h[0]]),)},
        r'h of shape \[batch, features\], got \[2, batch, features\]',
    ),
    'complex': (
        {'update': of_gates(lambda x: x * 1j)},
        'real .* got complex64',
    ),
    'integer': ({'update': of_gates(lambda x: x.astype(int))}, 'got int32'),
    'no_input_gates': (
        {'input_gates': None},
        'input_gates .* got None',
    ),
    'no_gates': (
        {'recurrent_gates': None},
        'recurrent_gates .* None',
    ),
    'carry_is_a_str': ({'carry_names': 'h'}, "tuple of names.* got 'h'"),
    'same_names': ({'carry_names': ('h', 'h')}, 'carry_names must be'),
    'gates': ({'input_gates': 0}, 'an int of at least 1, got 0'),
    'not_frozen': ({'frozen': False}, r'@dataclasses.dataclass\(frozen=True\)'),
    'one_gate_for_two_stages': (
        TWO | {'recurrent_gates': 1, 'operand': operand_of(0)},
        'at least 2 recurrent gates',
    ),
    'operand_sees_its_own_gate': (
        TWO | {'operand': operand_of(1)},
        'operand cannot be traced with the first 1 of 2 recurrent gates',
    ),
    'operand_mixes': (
        TWO | {'operand': lambda self, p, x, h, c: jax.nn.softmax(h[0])},
        'Bad.operand must be pointwise',
    ),
    'linear_with_gates': (
        LINEAR | {'recurrent_gates': 1, 'coefficients': lambda s, p, x: (x, x)},
        'LinearCell, which has no recurrent gates',
    ),
    'linear_with_an_update': (
        LINEAR
        | {
            'update': lambda self, p, x, h, c: (jnp.tanh(c[0] + x[0]),),
            'coefficients': lambda self, p, x: (x[0], x[0]),
        },
        'a LinearCell with an update of its own',
    ),
    'starts': (
        LINEAR
        | {'reads_starts': 'yes', 'coefficients': lambda s, p, x: (x[0], x[0])},
        "Bad.reads_starts must be True or False, got 'yes'",
    ),
    'one_coefficient': (
        LINEAR | {'coefficients': lambda self, p, x: (x[0],)},
        r"tuple of 2 arrays, \('a', 'b'\)",
    ),
    'complex_coefficients': (
        LINEAR | {'coefficients': lambda self, p, x: (x[0] * 1j, x[0])},
        'coefficients must return real .* for a, got complex64',
    ),
}


def layer(cell, **options):
  return rnnzoo.RecurrentLayer(cell, 3, 4, rngs=nnx.Rngs(0), **options)


class ContractTest(parameterized.TestCase):

  @parameterized.parameters(*BROKEN)
  def test_refuses(self, name):
    members, message = BROKEN[name]
    cell = make(**members)()
    with self.assertRaisesRegex(ValueError, message):
      layer(cell)
    gates = jnp.ones((2, 5, 1, 4))
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.unroll(cell, {}, gates, jnp.ones((1, 1, 4, 4)), (gates[:, 0, 0],))

  @parameterized.parameters(
      (rnnzoo.LSTMCell, 'the class LSTMCell'), ('LSTM', "got 'LSTM'")
  )
  def test_no_cell(self, cell, message):
    with self.assertRaisesRegex(ValueError, message):
      layer(cell)

  @parameterized.parameters(
      (rnnzoo.HGRNCell, 'a', 'lower_bound must be a finite number from 0'),
      (rnnzoo.ComplexHGRNCell, 1.0, 'lower_bound must be .* got 1.0'),
      (rnnzoo.RGLRUCell, 'a', "signed must be a bool, got 'a'"),
  )
  def test_setting(self, cell, value, message):
    with self.assertRaisesRegex(ValueError, message):
      cell(value)

  def test_unhashable_field(self):

    @dataclasses.dataclass(frozen=True)
    class Cell(rnnzoo.ElmanCell):
      weights: list = dataclasses.field(default_factory=list)

    with self.assertRaisesRegex(ValueError, "fields .*'weights'.* unhashable"):
      layer(Cell())

  def test_takes_what_is_pointwise(self):
    # Loops, branches, casts and stacked parameters mix nothing.
    def update(self, params, x_gates, h_gates, carry):
      x = x_gates[0] + h_gates[0].astype(jnp.bfloat16).astype(jnp.float32)
      x = jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y), x)
      x = jax.lax.select(x > 0, x, jax.nn.softplus(x)) + jnp.sum(params['w'], 0)
      return (jnp.where(jnp.isnan(x), 0, jax.checkpoint(jnp.sin)(x)),)

    params = {'w': nnx.Param(jnp.ones((2, 4)))}
    y = layer(make(update=update)(), cell_params=params)(jnp.ones((2, 5, 3)))
    self.assertEqual(y.shape, (2, 5, 4))

  def test_own_parameters_are_variables(self):
    # No optimiser would find a plain array.
    cell = make(update=of_gates(jnp.tanh))()
    with self.assertRaisesRegex(
        ValueError, r"\['w'\] must be an nnx.Param.* Arr"
    ):
      layer(cell, cell_params={'w': jnp.ones(4)})

  def test_once(self):
    traces = []

    def update(self, params, x_gates, h_gates, carry):
      traces.append(1)
      return (x_gates[0] + h_gates[0],)

    cls = make(update=update)
    layer(cls())
    layer(cls())
    self.assertLen(traces, 1)


if __name__ == '__main__':
  absltest.main()
