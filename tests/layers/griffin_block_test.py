"""Griffin's recurrent block against a float64 loop, and its conversion."""

import functools
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import convert
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES, STATE, HEADS = 3, 7, 3, 5, 4, 2
rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN))
reset = rng.random((BATCH, TIME)) < 0.3
mask = rng.random((BATCH, TIME)) < 0.6
mask[0] = True
reset[1, 0] = mask[1, 0] = False  # The first valid step starts.

sigmoid = lambda x: 1 / (1 + np.exp(-x))


def make(**options):
  sizes = {'state_features': STATE, 'num_heads': HEADS}
  return random_layers.make(
      rnnzoo.GriffinBlock, IN, FEATURES, **sizes, **options
  )


def loop(params, x, carry, reset, mask):
  """The block in numpy for one sequence, by recurrentgemma's names."""
  p = params
  linear = lambda name, x: x @ p[f'{name}/kernel'] + p[f'{name}/bias']
  is_start = carry is None
  h, past = (np.zeros(STATE), np.zeros((3, STATE))) if is_start else carry
  for x_t, reset_t, mask_t in zip(x, reset, mask, strict=True):
    if reset_t:
      h, past = np.zeros(STATE), np.zeros((3, STATE))
    if not mask_t:
      yield h, past, np.zeros(FEATURES)
      continue
    seen = np.concatenate([past, linear('linear_x', x_t)[None]])
    past = seen[1:]
    u = (p['conv_1d/w'] * seen).sum(0) + p['conv_1d/b']
    r, i = (
        np.einsum('nd,nde->ne', u.reshape(HEADS, -1), p[f'rg_lru/{gate}/w'])
        + p[f'rg_lru/{gate}/b']
        for gate in ('a_gate', 'input_gate')
    )
    log_a = -8 * sigmoid(r.ravel()) * np.log1p(np.exp(p['rg_lru/a_param']))
    gain = 1 if is_start or reset_t else np.sqrt(1 - np.exp(2 * log_a))
    h = np.exp(log_a) * h + gain * sigmoid(i.ravel()) * u
    is_start = False
    y = linear('linear_y', x_t)
    cubic = np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))
    yield h, past, linear('linear_out', h * 0.5 * y * (1 + cubic))


class GriffinBlockTest(parameterized.TestCase):

  @parameterized.parameters('scan', 'associative_scan')
  def test_agrees_with_loop(self, implementation):
    with jax.enable_x64(True):
      block = make(param_dtype=jnp.float64, implementation=implementation)
      params = convert.to_recurrentgemma(block)
      given = (
          rng.standard_normal((BATCH, STATE)),
          rng.standard_normal((BATCH, 3, STATE)),
      )
      flags = {'reset': reset, 'mask': mask}
      run = reference.jit(
          lambda block, carry: block.unroll(x, initial_carry=carry, **flags)
      )
      for carry in (None, given):
        got = run(block, carry)
        for n in range(BATCH):
          own = None if carry is None else (carry[0][n], carry[1][n])
          steps = list(loop(params, x[n], own, reset[n], mask[n]))
          want = (*steps[-1][:2], np.stack([y for _, _, y in steps]))
          for a, b in zip((*got[0], got[1]), want, strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-10, atol=1e-12)

  def test_steps_and_gradients_of_paths_agree(self):

    @reference.jit
    def run(block, x):
      carry, steps = block.initial_carry((BATCH,)), []
      for t in range(TIME):
        first = reset[:, t] | (t == 0)
        carry, y = block.step(carry, x[:, t], reset=first)
        steps.append(y)
      return jnp.stack(steps, axis=1), block(x, reset=reset)

    loss = lambda block, x: jnp.sum(block(x, reset=reset, reverse=True) ** 2)
    grads = []
    with jax.enable_x64(True):
      for path in ('scan', 'associative_scan'):
        block = make(param_dtype=jnp.float64, implementation=path)
        grad = nnx.grad(loss, argnums=(0, 1))
        grads.append(jax.tree.leaves(reference.jit(grad)(block, x)))
      np.testing.assert_allclose(*run(block, x), rtol=1e-10, atol=1e-12)
    chex.assert_trees_all_close(*grads, rtol=1e-9, atol=1e-10)

  @parameterized.parameters('block', 'layer')
  def test_conversion_returns(self, kind):
    new = make
    if kind == 'layer':
      sizes = rnnzoo.RGLRU, STATE, STATE
      new = functools.partial(random_layers.make, *sizes, num_heads=HEADS)
    first, second = new(), new(seed=1)
    params = convert.to_recurrentgemma(first, prefix='a/')
    convert.from_recurrentgemma(second, params, prefix='a/')
    chex.assert_trees_all_equal(nnx.state(first), nnx.state(second))
    del params[next(iter(params))]
    with self.assertRaisesRegex(ValueError, 'has no entry'):
      convert.from_recurrentgemma(second, params, prefix='a/')

  def test_agrees_with_recurrentgemma(self):
    path = pathlib.Path(__file__).parents[1] / 'convert'
    record = dict(np.load(path / 'recurrentgemma_block.npz'))
    weights = {
        name.removeprefix('weights/').replace(':', '/'): record.pop(name)
        for name in list(record)
        if name.startswith('weights/')
    }
    size = record['x'].shape[-1]
    block = rnnzoo.GriffinBlock(
        *(size, size), state_features=8, num_heads=2, rngs=nnx.Rngs(0)
    )
    convert.from_recurrentgemma(block, weights)
    reset = record['position'] == 0
    reset[:, 0] = False  # A start it is without.
    (h, window), y = block.unroll(record['x'], reset=reset)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    close(y, record['y'])
    close(h, record['carry/h'])
    close(window, record['carry/window'])

  def test_errors(self):
    signed = make(signed=True)
    with self.assertRaisesRegex(ValueError, 'without signed=True'):
      convert.to_recurrentgemma(signed)
    with self.assertRaisesRegex(ValueError, 'conv_width'):
      make(conv_width=1)
    with self.assertRaisesRegex(ValueError, 'state_features must be .* got 0'):
      rnnzoo.GriffinBlock(3, 4, state_features=0, rngs=nnx.Rngs(0))
    carry = jnp.zeros((BATCH, STATE)), jnp.zeros((BATCH, 2, STATE))
    for wrong in (carry, carry[:1], None):
      with self.assertRaisesRegex(ValueError, 'carry'):
        signed.step(wrong, x[:, 0])


if __name__ == '__main__':
  absltest.main()
