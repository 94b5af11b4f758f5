"""GPU kernels, interpreted on a CPU, against float64.

The same bodies that a GPU runs, with its memories and barriers imitated: wrong
indices, wrong derivatives and waiting for ever show here, races where a test
looks for them and the accuracy of fast instructions not at all.
`jax.checkpoint` is tested by lowering only, since interpreted kernels have
effects that it does not take.
"""

import contextlib
import functools
import itertools
import math
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines import selection
from tests.engines import linear_scan_test
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import random_layers
from tests.testing import reference

if abstract_gpu.RUNS:
  from pallas_kernels import devices
  from pallas_kernels.mosaic import affine_maps
  from pallas_kernels.streaming import blocks
  from pallas_kernels.streaming import handoffs
  from pallas_kernels.streaming import tuning

# As layers_test.TOLERANCE, for more steps. Kernels read gates and, in the
# backward pass, h rounded to bfloat16: one more rounding each, 4 u and 6 u.
TOLERANCE = {'float32': (2e-6, 4e-6), 'bfloat16': (1.6e-2, 2.4e-2)}

# With relu, a pre-activation that rounds across zero changes the gradient by
# its whole size: of 2^-8 of them, which is 2^-4 in the norm.
RELU = {'float32': (2e-6, 4e-6), 'bfloat16': (1.6e-2, 6.3e-2)}

# Weights are small, so that |u| < 1 and nothing grows with the length.
case = functools.partial(comparison.Case, path='pallas', scale=0.4)
TANH = {'activation': 'tanh'}
CASES = comparison.table(
    case,
    """
MinGRU 2x21x130 reset mask time_major candidate=positive
MinGRU 1x130x8 bfloat16 lengths reverse time_major
MinGRU 1x1x1
MinLSTM 2x5x256 lengths
MinLSTM 3x13x130 bfloat16 reset mask reverse use_bias=False
MinLSTM 2x21x8 reset reverse time_major candidate=positive
IndRNN 3x13x130 reset mask reverse
IndRNN 3x21x8 lengths time_major activation=tanh
IndRNN 2x9x130 bfloat16 reset reverse activation=tanh
IndRNN 1x67x1
IRevRNN 2x21x130 reverse inner_steps=1 activation=tanh inner_activation=sigmoid
IRevRNN 2x13x256 bfloat16 lengths reverse
IRevRNN 1x9x1 mask time_major activation=sigmoid inner_activation=relu
LSTM 2x5x8 reset mask reverse num_heads=8
GRU 2x5x8 reset lengths num_heads=8
LRU 2x13x130 reset mask reverse
RGLRU 2x13x130 reset lengths reverse num_heads=2
RGLRU 2x9x8 bfloat16 reset time_major signed=True
HGRN 2x9x8 reset mask lower_bound=0.5
HGRN 2x9x130 bfloat16 lengths time_major complex=True
QRNN 1x21x8 reset pooling=ifo
CfC 2x5x8 reset mask num_heads=8 mode=no_gate timespans=True
CfC 2x5x8 lengths reverse num_heads=8 mode=pure
""",
)


class LayersTest(comparison.ComparisonTestCase):

  @parameterized.named_parameters(*comparison.named(CASES))
  @pytest.mark.slow
  @pytest.mark.few(3)
  def test_agrees_with_reference(self, case):
    tolerance = TOLERANCE
    if case.layer in (rnnzoo.IndRNN, rnnzoo.IRevRNN) and case.options != TANH:
      tolerance = RELU
    with abstract_gpu.interpreted(self):
      self.compare(case, tolerance[case.dtype])


def adjoint(a, b, h0, reset, reverse, g):
  """h, and the gradients of sum(g h) by a, b and h0: a loop in float64."""
  with jax.enable_x64(True):
    a, b, h0, g = (jnp.asarray(x, jnp.float64) for x in (a, b, h0, g))
    run = lambda *given: reference.linear_scan(*given, reset, reverse)
    h, pull = jax.vjp(run, a, b, h0)
    return h, pull(g)


def draw(batch, time, features, with_reset, dtype=np.float32):
  """Returns a, b, h0, reset and weights; a has negatives, zeros and ones."""
  rng = np.random.default_rng(0)
  a = rng.uniform(-1.05, 1.05, (batch, time, features))
  a[rng.random(a.shape) < 0.05] = 0
  a[rng.random(a.shape) < 0.3] = 1
  b, g = rng.standard_normal((2, batch, time, features))
  h0 = rng.standard_normal((batch, features)).astype(np.float32)
  reset = rng.random((batch, time)) < (0.1 if with_reset else 0)
  return a.astype(dtype), b.astype(dtype), h0, reset, g.astype(dtype)


def cut(*given):
  """Makes the kernels for linear recurrences cut their work, if in a way."""
  if not given or not abstract_gpu.RUNS:
    return contextlib.nullcontext()
  rows, warpgroups, stages = given
  config = blocks.Config(
      rows=rows, warpgroups=warpgroups, segments=1, stages=stages
  )
  return mock.patch.object(tuning, 'linear', lambda *_: config)


# Rows of a block, warpgroups and stages.
CUTS = ((4, 4, 2), (2, 2, 1), (8, 1, 1))


class LinearScanTest(parameterized.TestCase):

  def check(self, sizes, dtype, with_reset, reverse):
    a, b, h0, reset, g = draw(*sizes, with_reset, dtype)

    def loss(a, b, h0):
      options = {'reset': reset if with_reset else None, 'reverse': reverse}
      h = rnnzoo.linear_scan(a, b, h0, implementation='pallas', **options)
      return jnp.sum(g.astype(np.float32) * h), h

    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    gradients, h = grad(a, b, h0)
    self.assertEqual(h.dtype, a.dtype)
    want_h, want = adjoint(a, b, h0, reset, reverse, g)
    # Summands in float32, rounded as they are written; in bfloat16 h is read
    # rounded for d_a.
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 2e-6
    self.assertLess(comparison.relative_error(h, want_h), tolerance)
    for name, x, y in zip(('a', 'b', 'h0'), gradients, want, strict=True):
      self.assertLess(comparison.relative_error(x, y), tolerance, f'd {name}')

  @parameterized.parameters(
      ((2, 13, 8), np.float32, True, False),
      ((2, 20, 130), jnp.bfloat16, True, True),
      ((1, 37, 130), np.float32, False, True),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_agrees_with_loop(self, sizes, dtype, with_reset, reverse):
    with abstract_gpu.interpreted(self):
      self.check(sizes, dtype, with_reset, reverse)

  @parameterized.parameters(
      ((3, 2, 1), 6), ((4, 3, 2), 37), ((4, 4, 1), 37), ((4, 4, 2), 16)
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_turns(self, cut_as, time):
    # Warpgroups change nothing, and there is no race between them.
    a, b, h0, reset, _ = draw(2, time, 8, with_reset=True)
    scan = functools.partial(
        rnnzoo.linear_scan, a, b, h0, reset=reset, implementation='pallas'
    )
    if not abstract_gpu.RUNS:
      return
    with abstract_gpu.interpreted(self), cut(8, 1, 2):
      want = scan()
    with abstract_gpu.without_races(self), cut(*cut_as):
      got = jax.block_until_ready(scan())
    np.testing.assert_array_equal(got, want)

  @parameterized.parameters(*CUTS[:2])
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_any_cut_of_a_layer(self, *cut_as):
    # Parameters and restarts have gradients from every warpgroup.
    given = case(
        rnnzoo.MinGRU, sizes=(2, 37, 8), reset=True, mask=True, reverse=True
    )
    compare = comparison.ComparisonTestCase.compare
    with abstract_gpu.interpreted(self), cut(*cut_as):
      compare(self, given, TOLERANCE['float32'])

  _close = comparison.ComparisonTestCase._close

  @parameterized.parameters((None, False), ((2, 2, 2), True), ((3, 1, 1), True))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_forgets_an_infinity(self, cut_as, reverse):
    with abstract_gpu.interpreted(self), cut(*cut_as or ()):
      check = linear_scan_test.check_forgets_an_infinity
      check(self, 'pallas', reverse)

  @parameterized.parameters((None, True), ((4, 4, 2), False), ((2, 2, 1), True))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_keeps_an_infinity_until_it_is_forgotten(self, cut_as, reverse):
    # Beyond products of factors that underflow, and with their signs.
    a = np.full((2, 32, 1), -1e-20, np.float32)
    b = np.ones_like(a)
    b[:, 1] = np.inf
    a[1, 25] = 0
    reset = np.zeros((2, 32), bool)
    reset[0, 25] = True
    want = np.ones_like(a)
    want[:, 1:25:2], want[:, 2:25:2] = np.inf, -np.inf
    if reverse:
      a, b, want = (x[:, ::-1] for x in (a, b, want))
      # The boundary between two steps has the index of the later one.
      reset = np.roll(reset[:, ::-1], 1, axis=1)
    with abstract_gpu.interpreted(self), cut(*cut_as or ()):
      h = rnnzoo.linear_scan(
          a, b, reset=reset, reverse=reverse, implementation='pallas'
      )
      np.testing.assert_array_equal(h, want)

  @parameterized.product(
      cut_as=(None, (2, 2, 2)), reverse=(False, True), poison=(np.nan, np.inf)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_nothing_passes_a_reset(self, cut_as, reverse, poison):
    with abstract_gpu.interpreted(self), cut(*cut_as or ()):
      check = linear_scan_test.check_nothing_passes_a_reset
      check(self, 'pallas', reverse, poison, poisoned=(1,))

  @parameterized.parameters(((),), (CUTS[2],))
  @pytest.mark.slow
  def test_forgets_a_product_that_overflows(self, cut_as):
    # 1e60 is no float32, and neither is it times 0.
    a = np.ones((1, 8, 1), np.float32)
    a[:, :3, 0] = 1e30, 1e30, 0
    b = np.ones_like(a)
    b[:, :2] = 0
    with abstract_gpu.interpreted(self), cut(*cut_as):
      h = rnnzoo.linear_scan(a, b, implementation='pallas')
      want = [0, 0, 1, 2, 3, 4, 5, 6]
      np.testing.assert_array_equal(np.asarray(h)[0, :, 0], want)

  @pytest.mark.slow
  def test_low_precision_sums_in_float32(self):
    with abstract_gpu.interpreted(self):
      linear_scan_test.check_sums_in_float32(self, 'pallas')

  @pytest.mark.slow
  def test_mixed_dtypes(self):
    a, b, *_ = draw(2, 13, 8, with_reset=False)
    b = b.astype(jnp.bfloat16)
    scan = functools.partial(rnnzoo.linear_scan, a, b)
    with abstract_gpu.interpreted(self):
      h = scan(implementation='pallas')
      self.assertEqual(h.dtype, np.float32)
      np.testing.assert_allclose(
          h, scan(implementation='scan'), rtol=1e-5, atol=1e-5
      )


class SegmentsTest(absltest.TestCase):
  """Maps and places of segments; CTAs that poll each other need a GPU."""

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  @pytest.mark.slow
  def test_maps_of_blocks(self):
    a, b, *_ = draw(1, 48, 40, with_reset=False)
    a, b = a[0].copy(), b[0].copy()
    a[:9, 0], b[:9, 0], a[9, 0] = 1e30, 0, 0  # An overflow that is forgotten,
    a[:40, 1], a[40, 1], b[3, 1] = 1e-20, 0, np.inf  # an infinity,
    a[:20, 2] = 1e-20  # and an underflow.
    a, b = jnp.asarray(a), jnp.asarray(b)
    want, h = [], (jnp.zeros(40),)
    for x, y in zip(a, b, strict=True):
      want.append(h := affine_maps.step((x, (y,)), h))
    for size in (1, 3, 8):
      h = (jnp.zeros(40),)
      for start in range(0, 48, size):
        end = start + size
        block = list(zip(a[start:end], zip(b[start:end]), strict=True))
        h = affine_maps.apply(affine_maps.compose(block), h)
        np.testing.assert_allclose(h[0], want[end - 1][0], rtol=2e-6, atol=1e-5)

  def test_blocks_never_forget(self):
    # Steps of 20,000 that amount to nothing but a NaN, or an infinity.
    a = np.random.default_rng(0).uniform(1e-3, 1, (20_000, 128))
    a = jnp.asarray(a, jnp.float32)
    for poison in (jnp.nan, jnp.inf):

      def block(h, a):
        pairs = [(row, (jnp.ones_like(row),)) for row in a]
        return affine_maps.apply(affine_maps.compose(pairs), h), ()

      h = (jnp.full((128,), poison),)
      (h,), _ = jax.lax.scan(block, h, a.reshape(-1, 16, 128))
      self.assertFalse(np.isfinite(h).any())

  def test_places_are_distinct(self):
    layout = blocks.Layout(3, 4096, 256)
    config = blocks.Config(8, 1, 4, 4, 2)
    # Maps of 2, 4 and 6 numbers.
    for like in (0, (0,)), ((0, 0), (0, 0)), (((0, 0), (0, 0)), (0, 0)):
      shape = handoffs.MapRing.shape(layout, like, 4)
      found = []
      for batch, wave in np.ndindex(3, shape[0]):
        walk = types.SimpleNamespace(
            layout=layout, batch=batch, config=config, features=slice(0, 256)
        )
        with mock.patch.object(handoffs.ptx, 'thread', lambda: np.arange(256)):
          ring = handoffs.MapRing(walk, like, None, 4, 0)
        found += [place for _, place in ring.places(wave + 5)]
      starts = np.sort(np.concatenate(found))
      places = 4 * np.arange(math.prod(shape) // 4)
      np.testing.assert_array_equal(starts, places)

  def test_cut(self):
    target = devices.Target(132, False)
    found = set()
    for batch, time, tiles in itertools.product(
        (1, 3, 39, 40), (256, 511, 512, 600, 1023, 65537), (1, 8, 13, 132)
    ):
      layout = blocks.Layout(batch, time, 128 * tiles)
      for dtype, ins, outs in itertools.product(
          ('float32', 'bfloat16'), (2, 3, 5), (1, 2, 3)
      ):
        stream = blocks.Stream(0, None, jnp.dtype(dtype))
        ins, outs = [stream] * ins, [stream] * outs
        is_adjoint = len(outs) > 1
        config = tuning.linear(layout, ins, outs, target, is_adjoint)
        found.add(config.segments > 1)
        size = blocks.shared_bytes(ins, outs, config)
        shared = 2 if batch * tiles > 132 else 1
        self.assertLessEqual(shared * size, 224 * 1024)
        steps = config.segments * config.rows * config.warpgroups
        # While a block is worked on, the next one is on its way.
        self.assertGreaterEqual(config.stages, 2 if steps < time else 1)
        if config.segments == 1:
          continue
        # All CTAs are on the GPU at once, maps come in pairs, and the blocks
        # that have been read once leave room for one that is on its way.
        self.assertLessEqual(batch * tiles * config.segments, 132)
        self.assertEqual(config.segments % 2, 0)
        self.assertEqual(config.warpgroups, 1)
        self.assertLess(config.ahead, config.stages)
        self.assertLessEqual(config.ahead, handoffs.MOST_AHEAD)
    self.assertEqual(found, {False, True})


class TransformationsTest(parameterized.TestCase):

  def close(self, run):
    """`run`, a function of the implementation, is the same by the loop."""
    with abstract_gpu.interpreted(self):
      comparison.assert_near(run('pallas'), run('scan'), 4e-6)

  @parameterized.parameters('MinGRU', 'IndRNN')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap(self, name):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, 7, 4)).astype(np.float32)

    def run(implementation):
      layer = random_layers.make(name, 4, 8, implementation=implementation)
      reset = np.tile(np.arange(7) % 5 == 3, (2, 1))
      loss, state = random_layers.squares(layer, reset=reset)
      many = jax.tree.map(lambda p: jnp.stack([0.5 * p, -p]), state)
      grad = jax.grad(loss, (0, 1))

      @jax.jit
      def over_batches_ensembles_and_both(state, many, x):
        return (
            jax.vmap(grad, (None, 0))(state, x),
            jax.vmap(grad, (0, None))(many, x[0]),
            jax.grad(lambda *args: jax.vmap(loss)(*args).sum())(many, x),
        )

      return over_batches_ensembles_and_both(state, many, x)

    self.close(run)

  @pytest.mark.slow
  def test_x64(self):
    # Indices and constants keep the dtypes that the kernel takes.
    a, b, h0, *_ = draw(2, 13, 8, with_reset=False)

    def run(implementation):
      f = functools.partial(rnnzoo.linear_scan, implementation=implementation)
      loss = lambda *args: jnp.sum(f(*args) ** 2)
      return jax.grad(loss, (0, 1, 2))(a, b, h0)

    with jax.enable_x64(True):
      self.close(run)

  @pytest.mark.slow
  def test_sees_no_padding(self):
    x = np.ones((2, 13, 4), np.float32)
    x[1, 5:] = np.nan

    def run(implementation):
      layer = random_layers.make('IndRNN', 4, 8, implementation=implementation)
      loss = lambda layer, x: jnp.sum(layer(x, seq_lengths=np.array([13, 5])))
      gradients = nnx.grad(loss, argnums=(0, 1))(layer, x)
      chex.assert_tree_all_finite(gradients)
      return gradients

    self.close(run)

  def test_one_of_several(self):
    # The next implementation runs, and the reason is logged.
    selection.log_once.cache_clear()
    x = np.ones((2, 5, 4), np.float32)
    layer = random_layers.make('AGRU', 4, 8, implementation=('pallas', 'scan'))
    scan = random_layers.make('AGRU', 4, 8, implementation='scan')
    np.testing.assert_array_equal(layer(x), scan(x))
    layer.implementation = 'pallas'
    with abstract_gpu.interpreted(self):
      if abstract_gpu.RUNS:
        message = 'dense recurrences cannot be interpreted'
        with self.assertRaisesRegex(NotImplementedError, message):
          layer(x)
      else:
        layer(x)


if __name__ == '__main__':
  absltest.main()
