"""ScannedRNN beside the class that programs for agents copy."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import linen as rnnzoo_linen

TIME, BATCH, FEATURES = 7, 3, 8

rng = np.random.default_rng(0)
ins = rng.standard_normal((TIME, BATCH, FEATURES)).astype(np.float32)
resets = rng.random((TIME, BATCH)) < 0.4
start = rng.standard_normal((BATCH, FEATURES)).astype(np.float32)

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def make(**options):
  return rnnzoo.ScannedRNN(FEATURES, FEATURES, rngs=nnx.Rngs(0), **options)


class FlaxScannedRNN(linen.Module):
  """A GRU under `nn.scan` that restarts where an episode begins."""

  @functools.partial(
      linen.scan,
      variable_broadcast='params',
      split_rngs={'params': False},
  )
  @linen.compact
  def __call__(self, carry, x):
    inputs, begins = x
    carry = jnp.where(begins[:, None] != 0, jnp.zeros_like(carry), carry)
    return linen.GRUCell(features=inputs.shape[1])(carry, inputs)


def as_ours(params):
  """Returns the parameters of `linen.GRUCell` as those of our ScannedRNN."""
  cell = params['GRUCell_0']
  stack = lambda side, gates, name: np.stack(
      [cell[side + gate][name] for gate in gates]
  )
  layer = {
      'kernel': stack('i', 'rzn', 'kernel'),
      'bias': stack('i', 'rzn', 'bias'),
      'recurrent_kernel': stack('h', 'rzn', 'kernel')[:, None],
      'cell_params': {'recurrent_bias': cell['hn']['bias']},
  }
  return {'params': {'rnn': {'layer': layer}}}


class ScannedRNNTest(parameterized.TestCase):

  @parameterized.parameters('bool', 'float32')
  @pytest.mark.slow
  def test_computes_what_the_copied_class_does(self, dtype):
    flags = resets.astype(dtype)
    theirs, ours = FlaxScannedRNN(), rnnzoo_linen.ScannedRNN()
    params = theirs.init(jax.random.key(1), start, (ins, flags))['params']
    params = jax.tree.map(
        lambda p: rng.standard_normal(p.shape).astype(np.float32), params
    )

    def loss(module, variables, carry):
      carry, y = module.apply(variables, carry, (ins, flags))
      return jnp.sum(y**2) + jnp.sum(carry), (carry, y)

    grads = jax.grad(loss, argnums=(1, 2), has_aux=True)
    grads = jax.jit(grads, static_argnums=0)
    want_grads, want = grads(theirs, {'params': params}, start)
    got_grads, got = grads(ours, as_ours(params), start)
    jax.tree.map(close, got, want)
    want_grads = as_ours(want_grads[0]['params']), want_grads[1]
    chex.assert_trees_all_close(got_grads, want_grads, rtol=1e-4, atol=1e-5)

  def test_parts_of_a_rollout_give_what_the_whole_does(self):
    rnn = make()
    carry, outputs = start, []
    for t in range(TIME):
      carry, y = rnn(carry, (ins[t : t + 1], resets[t : t + 1]))
      outputs.append(y)
    want_carry, want = rnn(start, (ins, resets))
    close(np.concatenate(outputs), want)
    close(carry, want_carry)

  @parameterized.parameters(
      (rnnzoo.LSTM,),
      (functools.partial(rnnzoo.Stack, rnnzoo.GRU, num_layers=2),),
      (rnnzoo.SLSTM,),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_any_layer_inside(self, layer):
    module = rnnzoo_linen.ScannedRNN(layer=layer)
    carry = module.initialize_carry(BATCH, FEATURES, layer)
    self.assertEqual(sum(map(jnp.sum, jax.tree.leaves(carry))), 0)
    variables = module.init(jax.random.key(0), carry, (ins, resets))
    after, y = module.apply(variables, carry, (ins, resets))
    self.assertEqual(y.shape, (TIME, BATCH, FEATURES))
    self.assertEqual(
        jax.tree.map(jnp.shape, after), jax.tree.map(jnp.shape, carry)
    )
    other = make(layer=layer)(carry, (ins, resets))[1]
    self.assertEqual(other.shape, y.shape)

  @parameterized.parameters('int32', 'uint8', 'bfloat16')
  @pytest.mark.few(2)
  def test_resets_of_any_dtype(self, dtype):
    rnn = make()
    flags = jnp.asarray(resets).astype(dtype)
    want = rnn(start, (ins, resets))[1]
    for each in flags, -flags:  # In uint8, -1 is 255.
      np.testing.assert_array_equal(rnn(start, (ins, each))[1], want)

  def test_a_learned_carry_is_refused(self):
    # The first episode would start from zeros, the next from what is learned.
    layer = functools.partial(
        rnnzoo.Stack, functools.partial(rnnzoo.GRU, learn_initial_carry=True)
    )
    scanned = rnnzoo_linen.ScannedRNN
    for call in (
        lambda: make(layer=layer),
        lambda: make(learn_initial_carry=True),
        lambda: scanned.initialize_carry(BATCH, FEATURES, layer),
        lambda: scanned(layer).init(jax.random.key(0), (start,), (ins, resets)),
    ):
      message = 'starts from zeros, and this GRU'
      with self.assertRaisesRegex(ValueError, message):
        call()

  def test_dropout_inside(self):
    stack = functools.partial(rnnzoo.Stack, rnnzoo.GRU, num_layers=2)
    rnn = make(layer=stack, dropout_rate=0.5)
    carry = (start,), (start,)
    dropped = rnn(carry, (ins, resets), rngs=nnx.Rngs(dropout=1))[1]
    difference = np.abs(dropped - rnn(carry, (ins, resets))[1])
    self.assertGreater(difference.max(), 1e-3)

  def test_several_batch_axes(self):
    carry = rnnzoo.ScannedRNN.initialize_carry((2, BATCH), FEATURES)
    rnn = make()
    both = np.stack([ins, -ins], 1), np.stack([resets, resets], 1)
    _, y = rnn(carry, both)
    close(y[:, 1], rnn(carry[1], (-ins, resets))[1])

  def test_errors(self):
    rnn = make()
    lstm = make(layer=rnnzoo.LSTM)
    cases = (
        (lambda: rnn(start, ins), r'pair \(ins, resets\)'),
        (lambda: rnn(start, ([[1.0]], resets)), 'ins must be .* got a list'),
        (
            lambda: rnnzoo_linen.ScannedRNN().init(
                jax.random.key(0), start, ([[1.0]], resets)
            ),
            'ins must be an array .* got a list; jnp.asarray',
        ),
        (
            lambda: rnn.initialize_carry(2, 8, rnnzoo.Bidirectional),
            r'partial\(Bidirectional, rnnzoo.GRU\) would work',
        ),
        (
            lambda: rnn(start, (ins, resets[0])),
            r'resets must have shape \(7, 3\), .* got \(3,\)',
        ),
        (
            lambda: rnn(start, (ins, None)),
            'resets must be an array, got a NoneType',
        ),
        (
            lambda: rnn(start, (ins[..., :2], resets)),
            r'ScannedRNN expects ins of shape .*= 8, got shape \(7, 3, 2\)',
        ),
        (
            lambda: rnn(start, (ins.astype(int), resets)),
            'ins of real floating-point numbers, got int64',
        ),
        (
            lambda: rnn(start[:2], (ins, resets)),
            r'carry must be as ScannedRNN.initialize_carry\(3, 8\) returns it,'
            r' with arrays of shapes \[\(3, 8\)\], for ins of shape \(7, 3, 8\)'
            r' .*; got \[\(2, 8\)\]',
        ),
        (lambda: rnn(start * 1j, (ins, resets)), '^carry must be real numbers'),
        (lambda: rnn(None, (ins, resets)), r'carry must be .* got \[\]'),
        (
            lambda: lstm((start, start[:2]), (ins, resets)),
            r'initialize_carry\(3, 8, layer\) .*; got'
            r' \[\(3, 8\), \(2, 8\)\]',
        ),
        (lambda: rnn(start, (ins, resets * 1j)), 'resets must be real numbers'),
        (
            lambda: rnn(rnn.initialize_carry(FEATURES, BATCH), (ins, resets)),
            r'\(3, 8\)\], .* got \[\(8, 3\)\]',
        ),
        (lambda: rnn.initialize_carry(8, 3, 4), 'layer must be'),
        (lambda: rnn.initialize_carry(-1, 8), 'batch_size must be'),
        (lambda: rnn.initialize_carry(1, 0), 'hidden_size must be'),
        (lambda: rnn.initialize_carry(1, 8, 'GRU'), 'layer must be'),
        *(
            (
                functools.partial(rnn.initialize_carry, 1, 8, layer),
                f'layer must be .* got {got}',
            )
            for layer, got in (
                (rnnzoo_linen.LSTM, 'the class rnnzoo.linen.LSTM'),
                (rnnzoo_linen.LSTM(8), 'an instance of rnnzoo.linen.LSTM'),
                (lstm.layer, 'an instance of rnnzoo.cells.lstm.LSTM'),
            )
        ),
        (
            lambda: rnnzoo_linen.ScannedRNN().init(
                jax.random.key(0), (), (ins, resets)
            ),
            'carry must be as',
        ),
    )
    for call, message in cases:
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == '__main__':
  absltest.main()
