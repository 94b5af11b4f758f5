"""Every layer on every path, forward and every gradient, against float64.

The suite iterates over `rnnzoo.LAYERS`, so a new layer is covered by its entry
there. Weights and carries are random, biases included: zeros hide differences
between formulas.
"""

import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import reference

import rnnzoo
from rnnzoo import sequential

BATCH, IN, FEATURES = 3, 4, 8

# Largest ||out - ref|| / ||ref|| over outputs and gradients. Operands of a
# product are rounded once, to a relative error u / 2 at most: u = 2^-52, 2^-23,
# 2^-8. A result passes through T <= 7 steps of about ten roundings each, which
# add up like a random walk and are damped by the gates: some 10 u. In bfloat16
# only inputs, weights and the operand h are rounded to 8 bits, state and sums
# being float32, and weights and inputs are rounded before the reference sees
# them: 2 u. Gradients round dgates as well: 4 u.
TOLERANCE = {
    'float64': (1e-12, 1e-12),
    'float32': (1e-6, 2e-6),
    'bfloat16': (8e-3, 1.6e-2),
}

# (time, reset, mask, reverse). Chunks are three steps long, so that 7 has a
# remainder and 6 has none.
SEQUENCES = {
    'one_step': (1, False, False, False),
    'reset': (7, True, False, False),
    'mask': (6, False, True, False),
    'reset_mask_reverse': (7, True, True, True),
}

# Options that give a layer other equations.
OPTIONS = {
    'AntisymmetricRNN': [{'gated': True}],
    'AGRU': [{'learn_epsilon': False, 'gamma': 2.0}],
    'MinGRU': [{'candidate': 'positive'}],
    'MinLSTM': [{'candidate': 'positive'}],
    'IndRNN': [{'activation': 'tanh'}],
}


def abstract(cls, **options):
  """A layer with shapes in place of arrays."""
  make = lambda: cls(IN, FEATURES, rngs=nnx.Rngs(0), **options)
  return nnx.eval_shape(make)


def variants(layers):
  """Yields (name, options) for each layer, with heads where it has them."""
  for name, layer in layers.items():
    yield name, {}
    made = abstract(layer)
    kernel = made.recurrent_kernel
    if kernel is not None and kernel.shape[-1] > 1:
      heads = 1 if made.num_heads > 1 else 2
      yield name, {'num_heads': heads}
    for options in OPTIONS.get(name, ()):
      yield name, options


def cases(layers):
  """Yields the suite's cases for a mapping such as `rnnzoo.LAYERS`."""
  for name, options in variants(layers):
    layer = layers[name]
    paths = ['scan']
    if isinstance(abstract(layer, **options).cell, rnnzoo.LinearCell):
      paths.append('associative_scan')
    tag = '_'.join(f'{k}_{v}' for k, v in options.items())
    for sequence, path, dtype in itertools.product(SEQUENCES, paths, TOLERANCE):
      parts = (name, tag, sequence, path, dtype)
      yield {
          'testcase_name': '_'.join(filter(None, parts)),
          'layer': layer,
          'options': options,
          'sequence': sequence,
          'path': path,
          'dtype': dtype,
      }


def randomize(tree, seed, dtype, scale=0.4):
  """Replaces every array by random numbers that `dtype` can hold.

  In numpy, as all that surrounds the functions under test: an operation of
  jax.numpy would be compiled for each shape and dtype.
  """
  leaves, treedef = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  made = [(scale * rng.standard_normal(x.shape)).astype(dtype) for x in leaves]
  return jax.tree.unflatten(treedef, made)


def random_carry(cell, seed, dtype):
  """A carry as a run could have left it: normalisers are at least 1."""
  rng = np.random.default_rng(seed)
  carry = []
  for name in cell.carry_names:
    value = 0.4 * rng.standard_normal((BATCH, FEATURES))
    carry.append((1 + value**2 if name == 'n' else value).astype(dtype))
  return tuple(carry)


def relative_error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


class CrossProduct(parameterized.TestCase):
  """The suite for any layers: a subclass parameterizes `check` by `cases`."""

  def check(self, layer, options, sequence, path, dtype):
    time, has_reset, has_mask, reverse = SEQUENCES[sequence]
    rng = np.random.default_rng(1)
    reset = mask = None
    if has_reset:
      reset = rng.random((BATCH, time)) < 0.3
    if has_mask:
      mask = rng.random((BATCH, time)) < 0.6
      mask[0] = True  # One sequence without padding, one that is all padding.
      mask[1] = False
    with (
        jax.enable_x64(True),
        mock.patch.object(sequential, 'chunk_length', lambda *_: 3),
    ):
      self._compare(layer, options, path, dtype, time, reset, mask, reverse)

  def _compare(self, cls, options, path, dtype, time, reset, mask, reverse):
    wide = jnp.promote_types(dtype, jnp.float32)
    layer = abstract(
        cls,
        implementation=path,
        learn_initial_carry=True,
        dtype=jnp.dtype(dtype),
        param_dtype=wide,
        **options,
    )
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(
        lambda x: x.astype(wide), randomize(state, 2, jnp.dtype(dtype))
    )
    # sLSTM's n is 0 or at least 1; a learned one starts at 0 and is tested so.
    if 'n' in layer.cell.carry_names:
      state['learned_carry'] = jax.tree.map(
          np.zeros_like, state['learned_carry']
      )
    x = randomize(np.zeros((BATCH, time, IN)), 3, jnp.dtype(dtype), 1.0)
    carry = random_carry(layer.cell, 4, wide)
    weights = tuple(
        randomize(np.zeros(shape), 5 + i, wide, 1.0)
        for i, shape in enumerate(
            [(BATCH, time, FEATURES)] + [(BATCH, FEATURES)] * len(carry)
        )
    )

    @reference.jit
    def run(state, x, carry):
      def loss(state, x, carry):
        final, y = nnx.merge(graphdef, state).unroll(
            x, initial_carry=carry, reset=reset, mask=mask, reverse=reverse
        )
        outputs = (y, *final)
        total = sum(
            jnp.sum(w * o.astype(w.dtype))
            for w, o in zip(weights, outputs, strict=True)
        )
        return total, (final, y)

      return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(state, x, carry)

    (_, (final, y)), (d_state, d_x, d_carry) = run(state, x, carry)
    self.assertEqual(y.dtype, jnp.dtype(dtype))
    self.assertEqual(final[0].dtype, wide)

    made = nnx.merge(graphdef, state)
    double = lambda tree: jax.tree.map(
        lambda v: np.asarray(v, np.float64), tree
    )
    pure = lambda v: None if v is None else v[...]
    arrays = double(
        {
            'x': x,
            'kernel': pure(made.kernel),
            'bias': pure(made.bias),
            'recurrent_kernel': pure(made.recurrent_kernel),
            # One number for all features is given to each, see `_close`.
            'cell_params': {
                k: np.broadcast_to(v, np.broadcast_shapes(v.shape, (FEATURES,)))
                for k, v in made.cell_params.items()
            },
            'carry': carry,
            'restart': tuple(
                np.broadcast_to(c[...], (BATCH, FEATURES))
                for c in made.learned_carry
            ),
        }
    )
    none = lambda flags, value: (
        np.full((BATCH, time), value) if flags is None else flags
    )
    (want_final, want_y), want = reference.layer_value_and_grad(
        layer.cell,
        layer.recurrent_structure,
        reverse,
        arrays,
        none(reset, False),
        none(mask, True),
        double(weights),
    )

    got = {
        'x': d_x,
        'carry': d_carry,
        'kernel': d_state['kernel'],
        'bias': d_state['bias'],
        'recurrent_kernel': d_state.get('recurrent_kernel'),
        'cell_params': dict(d_state.get('cell_params', {})),
        'restart': d_state['learned_carry'],
    }
    if reset is None:
      del got['restart']
    want['restart'] = jax.tree.map(
        lambda g: np.asarray(g).sum(0), want['restart']
    )
    forward, backward = TOLERANCE[dtype]
    self._close('y', y, want_y, forward)
    names = layer.cell.carry_names
    for name, a, b in zip(names, final, want_final, strict=True):
      self._close(f'final {name}', a, b, forward)
    for name, gradient in got.items():
      a = jax.tree.leaves(gradient)
      b = jax.tree.leaves(want[name])
      self.assertEqual(len(a), len(b), name)
      for i, (a_i, b_i) in enumerate(zip(a, b, strict=True)):
        self._close(f'd {name} {i}', a_i, b_i, backward)

  def _close(self, name, got, want, tolerance):
    if got.ndim == 0:
      # A sum over features may cancel, while its error is that of its terms.
      scale = np.linalg.norm(want)
      error = abs(np.float64(got) - np.sum(want)) / scale
    else:
      self.assertEqual(got.shape, want.shape, name)
      error = relative_error(got, want)
    self.assertLessEqual(error, tolerance, name)


class LayersTest(CrossProduct):

  @parameterized.named_parameters(*cases(rnnzoo.LAYERS))
  def test_agrees_with_reference(self, **case):
    self.check(**case)


if __name__ == '__main__':
  absltest.main()
