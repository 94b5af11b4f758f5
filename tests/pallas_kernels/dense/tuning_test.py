"""How dense recurrences are cut: every cut fits the GPU and covers the work."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import call as call_lib
from pallas_kernels import devices
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import dense_loops

if abstract_gpu.RUNS:
  from pallas_kernels.dense import cut
  from pallas_kernels.dense import operand
  from pallas_kernels.dense import plan as plan_lib
  from pallas_kernels.dense import product as product_lib
  from pallas_kernels.dense import ring

CORES = 132
SHARED_MEMORY = 227 * 1024  # Bytes of a CTA on Hopper and Blackwell.
SIZES = (8, 24, 40, 64, 72, 96, 128, 200, 256, 264, 384, 512, 720, 768, 1024)
FEW_SIZES = (40, 264, 720, 1024)
BATCHES = (1, 9, 64, 256)


class TwoEarlyGates(rnnzoo.TwoStageCell):
  """A cell whose operand needs two gates, and whose third one is late."""

  input_gates = recurrent_gates = 4
  carry_names = ('h',)

  def operand(self, params, x_gates, h_gates, carry):
    del params
    return (x_gates[0] + h_gates[0]) * (x_gates[1] + h_gates[1]) * carry[0]

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    return (jnp.tanh(x_gates[2] + h_gates[2] + x_gates[3] + h_gates[3]),)


class FiveGates(rnnzoo.Cell):

  input_gates = recurrent_gates = 5
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    return (jnp.tanh(sum(x_gates) + sum(h_gates)),)


CELLS = {
    'FiveGates': FiveGates(),
    'LSTM': rnnzoo.LSTMCell(),
    'GRU': rnnzoo.GRUCell(),
    'AGRU': rnnzoo.AGRUCell(),
    'Elman': rnnzoo.ElmanCell(),
    'TwoEarlyGates': TwoEarlyGates(),
}


def plans(cell, dtype, batch, heads, size, *, cores=CORES, **options):
  """Returns the plans of a batch's pieces; options as for `plan_pieces`."""
  recurrence = plan_lib.Recurrence(
      **dense_loops.unpacked(cell),
      shape=(batch, 10, heads, size),
      call=call_lib.Call(out_dtype=jnp.dtype(dtype)),
      target=devices.Target(cores, False, (10, 0)),
  )
  gates = cell.input_gates
  x = jax.ShapeDtypeStruct((batch, 10, gates, heads * size), dtype)
  kernel = jax.ShapeDtypeStruct(
      (cell.recurrent_gates, heads, size, size), dtype
  )
  options |= {'states': len(cell.carry_names), 'flags': True}
  found = plan_lib.plan_pieces(recurrence, x, kernel, **options)
  return [piece.plan for piece in found]


class CutsTest(parameterized.TestCase):

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  def check(self, plan):
    config, shape = plan.config, plan.shape
    products = plan.products(config)
    registers, size = plan_lib.resources(plan, config)
    self.assertLessEqual(size, SHARED_MEMORY)
    # Each thread has 65536 / threads registers, and needs some for the rest.
    threads = 128 * config.warpgroups
    self.assertLessEqual(registers, min(255, 65536 // threads) - 32)
    self.assertTrue(config.columns == 4 or config.columns % 8 == 0)
    self.assertEqual(config.units % 8, 0)
    self.assertGreaterEqual(config.stages, 5)
    # All elements that a product sums over have to lie in its operand.
    for i, product in enumerate(products):
      if product.late or config.direct:
        continue
      sharing = product_lib.sharing(products, i)
      words = operand.Operand.words(config, shape, sharing, False)
      for each in sharing:
        parts = each.parts(config, shape)
        elements = 32 * parts * each.blocks(config, shape)
        self.assertLessEqual(
            2 * elements * config.columns, 4 * words // config.slots
        )
    self.assertEqual(4 * config.warpgroups % config.sums, 0)
    parts = shape.parts(config)
    self.assertEqual(parts % config.cluster, 0)
    self.assertGreaterEqual(parts * config.units, shape.size)
    # Of each cluster at least one CTA has units: the others are waited for.
    self.assertLess((parts - config.cluster) * config.units, shape.size)
    if config.exchange == 'shared':
      self.assertEqual(parts, 1)
    elif config.exchange == 'cluster':
      # More than 8 are not portable, and these GPUs have up to 16.
      self.assertEqual(parts, config.cluster)
      self.assertLessEqual(config.cluster, 16)
    else:
      # Clusters of more than two leave some multiprocessors over.
      most = CORES if config.cluster <= 2 else CORES * 8 // 11
      self.assertLessEqual(shape.ctas(config), most)
      self.assertLessEqual(config.cluster, 4)
      self.assertEqual(config.columns % 8, 0)
      # Between a product and the next operand all threads meet.
      self.assertGreater(config.sums, 1)
    return config.exchange

  @parameterized.parameters(
      *itertools.product(('LSTM', 'AGRU'), SIZES),
      *itertools.product(('Elman', 'TwoEarlyGates'), FEW_SIZES),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_fits(self, cell, size):
    found = set()
    for dtype, batch in itertools.product(('float32', 'bfloat16'), BATCHES):
      for heads in (1, 4) if size < 512 else (1,):
        found |= self._check_plans(CELLS[cell], dtype, batch, heads, size)
    if size <= 64:
      self.assertEqual(found, {'shared'})
    elif size > 512:
      self.assertLessEqual(found, {'cluster', 'device'})

  @parameterized.parameters(
      ('AGRU', 128, 16, 'shared'),
      ('LSTM', 768, 256, 'device'),
      ('AGRU', 768, 16, 'cluster'),
      ('Elman', 1024, 16, 'cluster'),
      # Three heads would leave much of the device idle.
      ('LSTM', 768, 256, 'cluster', 3),
      ('LSTM', 768, 256, 'device', 4),
      ('FiveGates', 600, 256, 'cluster', 4),
  )
  def test_exchange(self, cell, size, batch, expected, heads=1):
    plan = plans(CELLS[cell], 'bfloat16', batch, heads, size, save=True)[0]
    self.assertEqual(plan.config.exchange, expected)

  @parameterized.product(
      cell=('LSTM', 'GRU'),
      size=(1536, 1544, 1792, 2000, 2048, 2112),
      batch=(1, 5, 16, 31),
  )
  @pytest.mark.few(5)
  def test_large_heads(self, cell, size, batch):
    for options in ({'save': True}, {'adjoint': True}):
      for plan in plans(CELLS[cell], 'bfloat16', batch, 1, size, **options):
        self.assertEqual(self.check(plan), 'device')
        is_small = size == 1536 and batch <= 16
        self.assertEqual(
            bool(plan.config.direct), 'adjoint' in options or not is_small
        )
        self.assertLessEqual(plan.config.columns, 32)

  @parameterized.parameters(('LSTM', 16, 2048), ('LSTM', 32, 1536))
  def test_large_heads_in_one_piece(self, cell, batch, size):
    for options in ({'save': True}, {'adjoint': True}):
      found = plans(CELLS[cell], 'bfloat16', batch, 1, size, **options)
      self.assertLen(found, 1)

  @parameterized.parameters(
      ('LSTM', 'float32', 1, 1536, 132),
      ('LSTM', 'bfloat16', 1, 2120, 132),
      # Not all CTAs would be resident at once.
      ('LSTM', 'bfloat16', 1, 2048, 120),
  )
  def test_larger_heads_are_refused(self, cell, dtype, batch, size, cores):
    with self.assertRaisesRegex(NotImplementedError, f'1 heads of {size}'):
      plans(CELLS[cell], dtype, batch, 1, size, cores=cores)

  def test_other_recurrences_stay(self):
    for cell, heads, size in (('Elman', 1, 1536), ('LSTM', 1, 1528)):
      plan = plans(CELLS[cell], 'bfloat16', 16, heads, size, save=True)[0]
      self.assertFalse(plan.config.direct)

  @parameterized.parameters(
      ('GRU', False, 'cluster', 6),
      ('GRU', True, 'device', 1),
      ('LSTM', False, 'device', 1),
      ('AGRU', False, 'cluster', 8),
  )
  def test_float32_is_resident_at_once(self, cell, adjoint, exchange, cluster):
    (plan,) = plans(CELLS[cell], 'float32', 128, 1, 256, adjoint=adjoint)
    self.check(plan)
    self.assertEqual(plan.config.exchange, exchange)
    self.assertEqual(plan.config.cluster, cluster)

  @parameterized.product(cores=(16, 78, 100, 120, 148), size=(24, 40, 72, 200))
  def test_fits_other_devices(self, cores, size):
    for batch in range(8, 520, 40):
      for plan in plans(CELLS['GRU'], 'float32', batch, 1, size, cores=cores):
        shape, config = plan.shape, plan.config
        self.assertGreaterEqual(shape.parts(config) * config.units, shape.size)
        if config.exchange == 'device':
          self.assertLessEqual(shape.ctas(config), cores)

  def _check_plans(self, cell, dtype, batch, heads, size):
    """Checks the plans of a batch; returns the kinds of their exchanges."""
    try:
      given = cell, dtype, batch, heads, size
      both = plans(*given, save=True), plans(*given, adjoint=True)
    except NotImplementedError:
      # Only 1024 units in float32 are too many for a GPU.
      self.assertEqual((size, dtype), (1024, 'float32'))
      return set()
    for parts in both:
      self.assertEqual(sum(plan.shape.batch for plan in parts), batch)
    # All but the last piece are alike.
    return {
        self.check(plan) for parts in both for plan in (parts[0], parts[-1])
    }


# Lanes of a warp, and of the quarter of one that moves 16 bytes each at once.
LANES, QUARTER = np.arange(32), np.arange(8)


def ways(first_bytes, size):
  """Returns how many of a warp's accesses meet in one bank of shared memory."""
  words = first_bytes[:, None] // 4 + np.arange(max(1, size // 4))
  return np.bincount(np.unique(words) % 32).max()


class TilesTest(parameterized.TestCase):

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  def tile(self, units, columns, size):
    """Returns a function (column, unit) -> byte, and the bytes of a tile."""
    config = cut.Config(
        exchange='shared', columns=columns, units=units, warpgroups=1
    )
    place = lambda column, unit: ring.place(config, size, column, unit)
    return place, ring.tile_bytes(config, size)

  @parameterized.product(
      units=(*range(8, 72, 8), 104, 128), columns=(4, 8, 16, 64), size=(2, 4)
  )
  def test_places_are_distinct(self, units, columns, size):
    place, total = self.tile(units, columns, size)
    column, unit = np.indices((columns, units))
    at = place(column, unit)
    self.assertLen(np.unique(at), at.size)
    self.assertGreaterEqual(at.min(), 0)
    self.assertLessEqual(at.max() + size, total)
    # 16 bytes of a column stay together, for copies.
    starts = at[:, :: 16 // size]
    np.testing.assert_array_equal(starts % 16, 0)
    np.testing.assert_array_equal(
        at, np.repeat(starts, 16 // size, 1) + unit * size % 16
    )

  @parameterized.product(units=(*range(8, 72, 8), 104, 128), size=(2, 4))
  def test_banks(self, units, size):
    place, _ = self.tile(units, 16, size)
    most = {'fragment': 0, 'octet': 0, 'chunk': 0}

    def see(name, at, size):
      most[name] = max(most[name], ways(at, size))

    # As tensor cores leave sums: 8 units of 4 columns.
    for unit, pair in itertools.product(range(0, units, 8), range(2)):
      at = place(2 * (LANES & 3) + pair, unit + (LANES >> 2))
      see('fragment', at, size)
    # As they are dealt to threads else: 4 units of 8 columns.
    for unit in range(0, units, 4):
      see('octet', place(LANES & 7, unit + (LANES >> 3)), size)
    # As they are copied.
    row = -(-units * size // 16)
    for first in range(0, 8 * row, 8):
      chunk = first + QUARTER
      at = place(chunk // row, chunk % row * (16 // size))
      see('chunk', at, 16)
    # Two at most; columns of 64 or 128 bytes have none, but for fragments that
    # are 32 bytes long.
    self.assertLessEqual(max(most.values()), 2)
    if units in (32, 64):
      self.assertEqual(most['octet'], 1)
      self.assertEqual(most['chunk'], 1)
    if units in (32, 64) and size == 2:
      self.assertEqual(most['fragment'], 1)


if __name__ == '__main__':
  absltest.main()
