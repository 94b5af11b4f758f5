"""The operation around the kernels in tiles, on a CPU.

Plain loops take the place of the kernels, see tests/testing/tiled_loops.py.
"""

import dataclasses
import functools
import itertools
import types
from typing import Any
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api
from pallas_kernels import auto_axes
from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels.tiled import choice
from pallas_kernels.tiled import limits
import rnnzoo
from tests.engines import pallas_settings_test
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import tiled_loops

if abstract_gpu.RUNS:
  from pallas_kernels.tiled import cut as cut_lib
  from pallas_kernels.tiled import fragments
  from pallas_kernels.tiled import low_tiles
  from pallas_kernels.tiled import on_chip
  from pallas_kernels.tiled import on_chip_products
  from pallas_kernels.tiled import op
  from pallas_kernels.tiled import tuning

TOLERANCE = {'float16': (2e-3, 3e-3), 'bfloat16': (1.6e-2, 2.4e-2)}
H200 = devices.Target(132, False)
H20 = devices.Target(78, False)
SHARED_MEMORY = 227 * 1024

case = functools.partial(
    comparison.Case, path='pallas', dtype='bfloat16', scale=0.1
)
CASES = comparison.table(
    case,
    """
    LSTM 3x7x64
    LSTM 3x7x128 float16 reset mask reverse num_heads=2
    GRU 3x7x60 reset lengths time_major
    SLSTM 3x1x128 reset num_heads=2
    Elman 3x7x128 mask use_bias=False
    LSTM 3x5x64 time_major keep=carries
    """,
)


# Layers whose inputs have some 64 features and more.
WIDE = comparison.table(
    case,
    """
    LSTM 3x7x60 time_major in_features=60
    LSTM 3x5x128 float16 reset mask reverse in_features=192
    Elman 3x7x128 reset in_features=64
    GRU 3x5x64 in_features=128 keep=carries
    GRU 3x5x128 float16 reset mask reverse in_features=192
    """,
)


def projected():
  """Kernels inside multiply W x of any number of rows, and all inputs."""
  return mock.patch.object(limits, 'ROWS_TO_PROJECT', 0)


def drawn(given, param_dtype, dtype, scale=0.4):
  """Returns a function with gradients, and random arguments, with resets."""
  f, (state, x, *_) = comparison.abstract_gradient(given)
  state = comparison.randomize(state, 0, param_dtype, scale)
  reset = np.tile(np.arange(5) == 3, (given.batch, 1))
  return f, (state, comparison.randomize(x, 1, dtype), reset, None, None)


class LayersTest(comparison.ComparisonTestCase):

  @parameterized.named_parameters(*comparison.named(CASES))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, case):
    with tiled_loops.imitated(self):
      self.compare(case, TOLERANCE[case.dtype])

  @parameterized.named_parameters(*comparison.named(CASES[:3:2]))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_streamed_and_low_agree_with_reference(self, case):
    with tiled_loops.imitated(self, on_chip=False):
      self.compare(case, TOLERANCE[case.dtype])
    with tiled_loops.low(), tiled_loops.imitated(self):
      self.compare(case, TOLERANCE[case.dtype])

  @parameterized.named_parameters(*comparison.named(WIDE))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_projected_agrees_with_reference(self, case):
    with (
        projected(),
        tiled_loops.imitated(self, on_chip=False),
        tiled_loops.forward_plans() as plans,
    ):
      self.compare(case, TOLERANCE[case.dtype])
    if abstract_gpu.RUNS:
      self.assertTrue(plans and all(plan.depth for plan in plans))

  @parameterized.parameters((rnnzoo.LSTM, ()), (rnnzoo.GRU, (2,)))
  def test_inputs_in_no_sum(self, layer, alone):
    if not abstract_gpu.RUNS:
      return
    plans, make = [], op._make_plan

    def remember(*args, **options):
      plans.append(make(*args, **options))
      return plans[-1]

    f, args = comparison.abstract_gradient(case(layer, sizes=(3, 7, 64)))
    with (
        tiled_loops.imitated(self),
        mock.patch.object(op, '_make_plan', remember),
    ):
      jax.eval_shape(f, *args)
    self.assertEqual({plan.alone for plan in plans}, {alone})

  # Sums of input gates and R h: float16 would add to the errors of float16.
  @parameterized.parameters(('bfloat16', 2), ('float16', 4))
  def test_bytes_that_are_kept(self, dtype, size):
    make = functools.partial(rnnzoo.LSTM, 4, 64, dtype=dtype)
    x = jax.ShapeDtypeStruct((3, 7, 4), dtype)
    kept = lambda path: pallas_settings_test.kept(make, path, x)
    if not abstract_gpu.RUNS:
      return
    with tiled_loops.imitated(self):
      more = kept('pallas') - kept(rnnzoo.Pallas(keep='carries'))
    gates = 3 * 7 * 4 * 64
    self.assertGreaterEqual(more, size * gates)
    self.assertLess(more, (size + 2) * gates)

  @parameterized.parameters(
      {'recurrent_gradient_clip': 0.01}, {'stop_recurrent_gradient': True}
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_recurrent_gradient(self, **options):
    given = case(rnnzoo.GRU, options, sizes=(2, 5, 64), reset=True)
    by_scan = dataclasses.replace(given, path='scan')
    f, args = drawn(given, np.float32, np.float32)
    scan, _ = comparison.abstract_gradient(by_scan)
    with tiled_loops.imitated(self):
      comparison.assert_near(f(*args), scan(*args), 2e-2)


class PaddingTest(comparison.ComparisonTestCase):
  """Units of padding are copies: zeros may be no values of the equations."""

  @parameterized.product(tiled=(True, False), projected=(True, False))
  @pytest.mark.slow
  def test_a_cell_that_divides(self, tiled, projected):
    if not abstract_gpu.RUNS:
      return

    @dataclasses.dataclass(frozen=True)
    class Cell:
      input_gates, recurrent_gates, carry_names = 1, 1, ('h',)

      def update(self, params, x_gates, h_gates, carry):
        h = jnp.tanh(h_gates[0] + carry[0]) / params['scale']
        return (h / jnp.sqrt(x_gates[0]),)

    params, size = {'scale': jnp.full((60,), 2.0)}, 5 if projected else 60
    kernel = jnp.full((1, size, 60), 0.2) if projected else None
    recurrent_kernel = jnp.eye(60, dtype=jnp.bfloat16)[None, None]
    x = jnp.ones((3, 4, size) if projected else (3, 4, 1, size), jnp.bfloat16)
    carry = (jnp.full((3, 60), 0.5),)

    def run(params, x, kernel):
      _, (h,) = api.recurrence(
          Cell(), params, x, recurrent_kernel, carry, input_kernel=kernel
      )
      return h

    loops = tiled_loops.imitated(self) if tiled else dense_loops.instead()
    with loops, mock.patch.object(choice, 'pay', lambda *_, **__: tiled):
      h, pull = jax.vjp(run, params, x, kernel)
      results = h, pull(jnp.ones_like(h))
    self.assertEqual(h.shape, (3, 4, 60))
    for leaf in jax.tree.leaves(results):
      self.assertTrue(jnp.all(jnp.isfinite(leaf.astype(jnp.float32))))


def in_parts(target, function, operands, positions, out_positions):
  """In place of `auto_axes.over_batch`: as if one device had the last row."""
  del target

  def spread(prefix, tree):
    fill = lambda axis, part: jax.tree.map(lambda _: axis, part)
    return jax.tree.map(fill, prefix, tree)

  places = spread(positions, operands)

  def run(*operands):
    def part(place):
      cut = lambda x, axis: (
          x if axis == auto_axes.WHOLE else jnp.split(x, [-1], axis)[place]
      )
      return function(*jax.tree.map(cut, operands, places))

    def join(axis, *parts):
      return (
          sum(parts)
          if axis == auto_axes.WHOLE
          else jnp.concatenate(parts, axis)
      )

    parts = part(0), part(1)
    return jax.tree.map(join, spread(out_positions, parts[0]), *parts)

  return run


class FewRowsTest(comparison.ComparisonTestCase):
  """Devices whose part of the batch is better off with the other kernels."""

  # Without kernels nothing is split.
  __test__ = abstract_gpu.RUNS

  @parameterized.parameters(
      (rnnzoo.LSTM, {'in_features': 64}),
      (rnnzoo.GRU, {'reset': True, 'mask': True, 'time_major': True}),
      (rnnzoo.Elman, {'reset': True, 'reverse': True}),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, layer, options):
    given = case(layer, sizes=(4, 5, 64), **options)
    pay = lambda *_, rows, **__: rows > 1
    with (
        projected(),
        dense_loops.instead() as dense,
        tiled_loops.imitated(self),
        mock.patch.object(auto_axes, 'over_batch', in_parts),
        mock.patch.object(choice, 'pay', pay),
    ):
      self.compare(given, TOLERANCE['bfloat16'])
    self.assertEqual([loop.called for loop in dense], [True, True])

  @pytest.mark.exhaustive
  def test_either_pass_may_have_few(self):
    given = case(rnnzoo.LSTM, sizes=(4, 5, 64), reset=True)
    f, args = drawn(given, np.float32, jnp.bfloat16, 0.1)
    results, of = [], op._of_few_rows
    for few in ((), (0,), (3,), (0, 3), (1, 2)):
      with tiled_loops.imitated(self), dense_loops.instead():
        # Two parts in the forward pass, then two in the other.
        asked = []

        def of_few_rows(*given, few=few, asked=asked):
          asked.append(None)
          with mock.patch.object(choice, 'pay', lambda *_, **__: False):
            return of(*given) if len(asked) - 1 in few else None

        with (
            mock.patch.object(auto_axes, 'over_batch', in_parts),
            mock.patch.object(op, '_of_few_rows', of_few_rows),
        ):
          results.append(f(*args))
    for other in results[1:]:
      comparison.assert_near(other, results[0], 2e-2)

  @pytest.mark.slow
  def test_lowers_to_the_other_kernels(self):
    f, args = comparison.abstract_gradient(
        case(rnnzoo.LSTM, sizes=(65, 3, 768))
    )
    with (
        abstract_gpu.device(self, 'NVIDIA H200'),
        mock.patch.object(auto_axes, 'over_batch', in_parts),
    ):
      text = abstract_gpu.lower(f, *args)
    self.assertTrue('dense_recurrence' in text)
    self.assertFalse('resident_recurrence' in text)
    self.assertFalse('team_recurrence_adjoint' in text)


class LimitsTest(parameterized.TestCase):
  """Which recurrences run in tiles; the others go to the other kernels."""

  def pays(self, target=H200, size=512, heads=1, recurrent=4, **options):
    options = {
        'rows': 1024,
        'time': 8,
        'gates': 4,
        'states': 2,
        'two_stages': False,
        'call': call_lib.Call(),
        **options,
    }
    dtype = options.pop('dtype', jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((recurrent, heads, size, size), dtype)
    return choice.pay(target, kernel, **options)

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  @parameterized.parameters(
      {'dtype': jnp.float16},
      {'rows': 80, 'size': 1152},
      {'rows': 512, 'size': 448, 'states': 4},
      {'rows': 1024, 'size': 320, 'recurrent': 1, 'gates': 1},
      # With padding.
      {'rows': 4096, 'size': 130},
      # In parts.
      {'time': 2**10, 'rows': 2048},
      # On the chip.
      {'rows': 80, 'size': 768},
      {'rows': 192, 'size': 384},
      {'rows': 128, 'size': 1024, 'recurrent': 3},
      {'rows': 128, 'size': 512, 'recurrent': 3},
      {'rows': 128, 'size': 768, 'recurrent': 1},
      {'rows': 48, 'size': 1280},
      {'rows': 192, 'size': 768, 'target': devices.Target(114, False)},
  )
  def test_in_tiles(self, **options):
    self.assertTrue(self.pays(**options))

  @parameterized.parameters(
      {'rows': 17, 'size': 1088},
      {'rows': 32, 'size': 1856},
      {'rows': 24, 'size': 1536, 'recurrent': 3},
  )
  def test_low(self, **options):
    self.assertTrue(self.pays(**options))
    for other in (
        {'rows': 16},
        {'rows': 33, 'size': 1088},
        {'size': 1024},
        {'size': 1920},
        {'recurrent': 1},
        {'states': 4},
        {'target': H20},
        {'call': call_lib.Call(stop_recurrent_gradient=True)},
    ):
      self.assertFalse(self.pays(**(options | other)))

  @parameterized.parameters(
      # The adjoint cannot keep R on the chip,
      {'rows': 128, 'size': 704, 'recurrent': 3},
      {'rows': 256, 'size': 512, 'recurrent': 3, 'target': H20},
      # nor can either pass.
      {'rows': 96, 'size': 832, 'target': H20},
      {'rows': 128, 'size': 768, 'states': 4},
      {'rows': 192, 'size': 512, 'recurrent': 1},
      {'rows': 64, 'size': 768},
      {'rows': 1024, 'size': 192},
      {'rows': 16384, 'size': 70},
      {'dtype': jnp.float32},
      {'heads': 2},
      {'recurrent': 5},
      {'two_stages': True},
      {'call': call_lib.Call(both_directions=True)},
      {'time': 2**30},
      {'target': devices.Target(132, False, (10, 0))},
      {'target': devices.Target(4, True)},
  )
  def test_not_in_tiles(self, **options):
    self.assertFalse(self.pays(**options))


class PartsTest(comparison.ComparisonTestCase):
  """A batch whose gates have 2^31 elements and more runs in parts."""

  @parameterized.parameters(
      (1, 1), (200, 200), (201, 128), (384, 192), (385, 192), (650, 192)
  )
  def test_rows_at_once(self, batch, rows):
    with mock.patch.object(limits, 'ELEMENTS', 200 * 7 * 4 * 64):
      self.assertEqual(limits.rows_at_once(batch, 7, 4, 64), rows)
      self.assertEqual(limits.rows_at_once(batch, 7 * 256, 4, 64), 0)

  @parameterized.named_parameters(
      *comparison.named((CASES[0], WIDE[1], WIDE[4]))
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_reference(self, case):
    batch, time, features = case.sizes
    most = (batch - 1) * time * 4 * features
    in_parts = mock.patch.object(api, '_in_parts', wraps=api._in_parts)
    with (
        tiled_loops.imitated(self),
        mock.patch.object(limits, 'ELEMENTS', most),
        mock.patch.object(limits, '_TILE', 1),
        in_parts as parts,
    ):
      self.compare(case, TOLERANCE[case.dtype])
    self.assertEqual(parts.called, abstract_gpu.RUNS)


class ConfigTest(parameterized.TestCase):
  """Every cut fits the GPU and covers the work once."""

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  @parameterized.product(
      batch=(1, 63, 128, 500, 2048, 16384),
      size=(64, 192, 768, 1856, 2048),
      adjoint=(False, True),
  )
  def test_fits(self, batch, size, adjoint):
    facts = {'batch': batch, 'heads': 1, 'size': size, 'target': H200}
    for recurrent in (1, 3, 4):
      config = tuning.choose(recurrent=recurrent, adjoint=adjoint, **facts)
      columns = config.units * (1 if adjoint else recurrent)
      stage = 2 * limits.DEPTH * (config.rows + columns)
      sums = 4 * config.sum_words
      self.assertLessEqual(config.stages * stage + sums, SHARED_MEMORY)
      self.assertGreaterEqual(config.stages, 2)
      self.assertLessEqual(columns, 256)
      tiles = cut_lib.Tiles(config=config, batch=batch, heads=1, size=size)
      self.assertLessEqual(tiles.ctas, H200.cores)
      members = config.members
      if members > 1:  # Each team has one tile, and members the same turns.
        self.assertEqual(tiles.teams, tiles.total)
        self.assertEqual(size * recurrent % (limits.DEPTH * members), 0)
        self.assertEqual(config.parts * members, 2 * config.groups)
      self.assertEqual(tiles.unit_blocks * config.units, size)
      self.assertGreaterEqual(tiles.row_blocks * config.rows, batch)

  @parameterized.parameters((1024, 768, 4), (3072, 768, 3))
  def test_depth_of_a_projection_counts(self, batch, size, recurrent):
    facts = {'batch': batch, 'size': size, 'recurrent': recurrent}
    facts |= {'heads': 1, 'adjoint': False, 'target': H200}
    cut = lambda depth: tuning.choose(depth=depth, **facts)
    self.assertEqual(cut(0).warpgroups, 1)
    self.assertEqual((cut(size).warpgroups, cut(size).groups), (2, 2))

  @parameterized.product(
      batch=(1, 63, 128, 250, 512),
      size=(64, 192, 768, 832, 1024, 1536),
      cores=(78, 114, 132),
  )
  def test_on_chip_fits(self, batch, size, cores):
    slot = 2 * cut_lib.ROWS * limits.DEPTH
    target = devices.Target(cores, False)
    for recurrent in (1, 2, 3, 4):
      facts = {'batch': batch, 'heads': 1, 'size': size, 'target': target}
      facts['recurrent'] = recurrent
      if config := tuning.choose_resident(**facts):
        tiles = on_chip.Tiles(config=config, batch=batch, size=size)
        self.assertLessEqual(tiles.ctas, cores)
        self.assertLessEqual(config.parts, {1: 5, 2: 3}.get(recurrent, 2))
        self.assertEqual(tiles.unit_blocks * config.units, size)
        self.assertGreaterEqual(tiles.row_blocks * config.rows, batch)
        used = 2 * size * config.columns + config.stages * slot
        self.assertLess(used, SHARED_MEMORY)
        # Sums lie where slices were.
        sums = config.sum_bytes
        self.assertLessEqual(sums, config.stages * slot)
        self.assertGreaterEqual(
            config.parts * 2 * 128, config.rows * config.per_row
        )
      if config := tuning.choose_team(**facts):
        tiles = on_chip.Tiles(config=config, batch=batch, size=size)
        # Clusters of four, with two multiprocessors left over in 8 groups.
        self.assertLessEqual(tiles.total * on_chip.MEMBERS, cores - 16)
        self.assertLessEqual(config.parts, {1: 5, 2: 3}.get(recurrent, 2))
        self.assertGreaterEqual(tiles.unit_blocks * config.units, size)
        self.assertLess((tiles.unit_blocks - 1) * config.units, size)
        depth = recurrent * size // on_chip.MEMBERS
        self.assertEqual(depth % limits.DEPTH, 0)
        used = 2 * depth * config.units + config.stages * slot
        used += 4 * config.sum_words
        self.assertLess(used, SHARED_MEMORY)
        self.assertLessEqual(config.sum_bytes, config.stages * slot)
        self.assertGreaterEqual(config.parts * 2 * 4, 2 * config.groups)

  @parameterized.product(
      batch=(1, 17, 32),
      size=(64, 192, 1024, 1280, 1536, 1600, 1792, 2048),
      recurrent=(1, 2, 3, 4),
  )
  def test_low_fit(self, batch, size, recurrent):
    facts = {'heads': 1, 'size': size, 'recurrent': recurrent, 'target': H200}
    slot = 2 * low_tiles.ROWS * limits.DEPTH
    with tiled_loops.low():
      forward = tuning.choose_resident(batch=batch, **facts)
      adjoint = tuning.choose_team(batch=batch, **facts)
    if forward:
      tiles = on_chip.Tiles(config=forward, batch=batch, size=size)
      self.assertLessEqual(tiles.ctas, H200.cores)
      self.assertEqual((tiles.unit_blocks * 16, forward.parts), (size, 1))
      used = 2 * size * forward.columns + forward.stages * slot
      used -= 2 * slot * forward.held
      self.assertLess(used, SHARED_MEMORY)
      self.assertEqual(forward.stages % on_chip_products.TURNS, 0)
      self.assertEqual(forward.held % on_chip_products.TURNS, 0)
      sums = forward.sum_bytes
      self.assertLessEqual(sums, forward.stages * slot)
    if adjoint:
      tiles = on_chip.Tiles(config=adjoint, batch=batch, size=size)
      self.assertLessEqual(tiles.total * on_chip.MEMBERS, H200.cores - 16)
      self.assertEqual((tiles.unit_blocks * 64, adjoint.parts), (size, 1))
      used = 2 * recurrent * size // on_chip.MEMBERS * adjoint.units
      used += adjoint.stages * slot + 4 * adjoint.sum_words
      used -= 2 * slot * adjoint.held
      self.assertLess(used, SHARED_MEMORY)
      self.assertLessEqual(adjoint.sum_bytes, slot)

  def test_on_chip_cuts(self):
    gates, team = tuning.choose_resident, tuning.choose_team
    low, forward = {'rows': 32, 'held': 4}, {'units': 16, 'gates': 4}
    facts = {'heads': 1, 'recurrent': 4, 'target': H200}
    for choose, batch, size, want in (
        (team, 32, 1536, on_chip.TeamConfig(units=64, stages=12, **low)),
        (gates, 32, 1536, on_chip.GateConfig(stages=16, **forward, **low)),
        (team, 256, 768, on_chip.TeamConfig(units=112, stages=4)),
        (gates, 128, 768, on_chip.GateConfig(stages=12, **forward)),
        (team, 2048, 768, None),
        (gates, 2048, 768, None),
    ):
      self.assertEqual(choose(batch=batch, size=size, **facts), want)
    for choose in (gates, team):
      self.assertIsNone(choose(batch=128, size=768, **(facts | {'heads': 2})))

  def test_no_tile(self):
    with self.assertRaisesRegex(NotImplementedError, 'multiple of 64 units'):
      tuning.choose(
          batch=8, heads=1, size=96, recurrent=4, adjoint=False, target=H200
      )


def handed_over(product):
  """Returns what each lane of a warp gets of a product [16 columns, 8 rows].

  As `low_tiles.words` leaves it and `low_tiles.read` finds it, [32, 4].
  """
  place = lambda lane: int(low_tiles._place(jnp.int32(lane))) // 4
  left = [None] * 128
  for lane in range(32):
    column, row = lane >> 2, 2 * (lane & 3)
    for i, j in itertools.product(range(2), range(2)):
      left[place(lane) + 2 * i + j] = product[column + 8 * j, row + i]
  results = []
  for lane in range(32):
    row, quarter, found = lane >> 2, lane & 3, []
    for half in range(2):
      at = place(quarter * 8 + half * 4 + (row >> 1)) + (row & 1) * 2
      found += left[at : at + 2]
    results.append(found)
  return results


class FragmentsTest(parameterized.TestCase):

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  @parameterized.parameters((16, 4), (32,))
  def test_threads_have_units_in_sequence(self, count, *of_a_thread):
    units = np.asarray(fragments.permute(jnp.arange(count), *of_a_thread))
    each = count // 4
    for quarter in range(4):
      own = [8 * j + 2 * quarter + i for j in range(count // 8) for i in (0, 1)]
      want = np.arange(each * quarter, each * (quarter + 1))
      np.testing.assert_array_equal(units[own], want)

  def test_low_tiles_hand_over_four_units_in_sequence(self):
    columns = np.repeat(np.asarray(low_tiles.order(jnp.arange(16))), 8)
    columns = columns.reshape(16, 8)
    rows = np.tile(np.arange(8), (16, 1))
    for lane, found in enumerate(handed_over(np.stack([columns, rows], -1))):
      row, first = lane >> 2, 4 * (lane & 3)
      want = [[first + i, row] for i in range(4)]
      np.testing.assert_array_equal(found, want)

  @pytest.mark.slow
  def test_products_of_low_tiles(self):
    size, rng = 128, np.random.default_rng(0)
    kernel = rng.integers(-4, 5, (4, 1, size, size))
    config = on_chip.TeamConfig(units=64, stages=4, rows=32)
    plan: Any = types.SimpleNamespace(config=config, dtype=jnp.int32)
    matrix = np.asarray(on_chip.AdjointPlan.arrange(plan, jnp.array(kernel)))
    d_gates = rng.integers(-4, 5, (32, 4 * size))
    want = np.einsum('bgk,guk->bu', d_gates.reshape(32, 4, size), kernel[:, 0])
    for block, unit in itertools.product(range(2), range(0, 64, 16)):
      start = block * 64 + unit
      product = matrix[start : start + 16] @ d_gates.T
      for octet in range(0, 32, 8):
        all_found = handed_over(product[:, octet : octet + 8])
        for lane, found in enumerate(all_found):
          first = start + 4 * (lane & 3)
          own = want[octet + (lane >> 2), first : first + 4]
          np.testing.assert_array_equal(found, own)

  @pytest.mark.slow
  def test_products_of_low_tiles_with_gates(self):
    size, rng = 128, np.random.default_rng(0)
    kernel = rng.integers(-4, 5, (3, 1, size, size))
    config = on_chip.GateConfig(units=16, gates=3, stages=4, rows=32)
    plan: Any = types.SimpleNamespace(
        config=config, dtype=jnp.int32, columns=config.columns
    )
    matrix = np.asarray(on_chip.ForwardPlan.arrange(plan, jnp.array(kernel)))
    self.assertEqual(matrix.shape, (size // 16 * 64, size))
    h = rng.integers(-4, 5, (8, size))
    want = np.einsum('bk,gku->gbu', h, kernel[:, 0])
    for block, gate in itertools.product(range(size // 16), range(4)):
      start = block * 64 + gate * 16
      product = matrix[start : start + 16] @ h.T
      if gate == 3:
        self.assertFalse(product.any())
        continue
      for lane, found in enumerate(handed_over(product)):
        first = block * 16 + 4 * (lane & 3)
        own = want[gate, lane >> 2, first : first + 4]
        np.testing.assert_array_equal(found, own)


if __name__ == '__main__':
  absltest.main()
