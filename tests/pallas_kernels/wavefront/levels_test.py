"""Levels in one kernel: plans, what surrounds it, and its code for a GPU.

The kernel cannot be interpreted. A loop takes its place here; benchmarks run
it on a GPU and compare it with layers in turn.
"""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import call as call_lib
from pallas_kernels import recurrence_op
from pallas_kernels import targets
import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops

if abstract_gpu.RUNS:
  from pallas_kernels.wavefront import forward

H200 = 'NVIDIA H200'
aval = jax.ShapeDtypeStruct


def arguments(layer, depth, batch, time, inputs, features, heads, **options):
  """Returns a cell, types of `recurrence_op.levels`, and options of the run.

  Args:
    layer: class.
    depth: number of levels.
    batch: B.
    time: T.
    inputs: I.
    features: F.
    heads: N.
    **options: of the run, and dtype.
  """
  dtype = options.pop('dtype', 'bfloat16')
  one = layer(inputs, features, num_heads=heads, rngs=nnx.Rngs(0))
  call = call_lib.Call(levels=depth, **options)
  lead = (time, batch) if call.time_major else (batch, time)
  size = features // heads
  cell = one.cell
  width = cell.input_gates * features
  params = {
      name: aval((*v.shape[:-1], depth * features), jnp.float32)
      for name, v in one._cell_params(jnp.float32).items()
  }
  types = (
      params,
      aval((cell.input_gates, depth * features), jnp.float32),
      aval((*lead, inputs), dtype),
      [aval((max(inputs, features), width), jnp.float32)] * depth,
      aval((cell.recurrent_gates, depth * heads, size, size), jnp.float32),
  )
  return cell, types, call


def rest(cell, types, call, flags):
  """Returns the types of a carry, a restart and flags."""
  _, _, x, _, kernel = types
  batch, time = x.shape[:2][::-1] if call.time_major else x.shape[:2]
  carry = (len(cell.carry_names), batch, kernel.shape[1] * kernel.shape[2])
  flag = aval((batch, time), bool) if flags else None
  return *[aval(carry, jnp.float32)] * 2, flag, flag


def loop(plan, inputs):
  """In place of `forward.forward`."""
  dense, count = plan.dense, plan.levels
  x, lasts = inputs.x, []
  for level, kernel in enumerate(inputs.kernels):
    split = lambda v, axis, i=level: jnp.split(v, count, axis)[i]
    depth = min(x.shape[-1], kernel.shape[1])
    gates = jnp.einsum(
        'abi,fi->abf',
        x[..., :depth],
        kernel[:, :depth],
        preferred_element_type=jnp.float32,
    )
    gates = gates.astype(dense.x_dtype)
    shape = dense.shape
    alone = dataclasses.replace(
        dense,
        shape=dataclasses.replace(shape, heads=shape.heads // count, levels=1),
        call=dataclasses.replace(dense.call, levels=1),
    )
    flags = inputs.flags
    carries, last, *_ = dense_loops.forward_loop(
        alone,
        split(inputs.theta, -1),
        gates.reshape(*gates.shape[:2], dense.gates, -1),
        (split(inputs.matrix, 1),),
        split(inputs.carry, -1),
        split(inputs.restart, -1),
        None if flags is None else split(flags, 1),
    )
    x = carries[0]
    lasts.append(last)
  return jnp.concatenate(lasts, -1), x


def in_turn(cell, call, params, bias, x, kernels, kernel, *state_and_flags):
  """Levels one after the other, in float32 but for outputs."""
  carry, restart, reset, mask = state_and_flags
  y = x if call.time_major else jnp.swapaxes(x, 0, 1)
  count, lasts = call.levels, []
  flip = lambda v: v[::-1] if call.reverse else v
  flags = [None if f is None else flip(f.T) for f in (reset, mask)]
  dtype = x.dtype
  for level in range(count):
    split = lambda v, axis, i=level: jnp.split(v, count, axis)[i]
    w = kernels[level][: y.shape[-1]].astype(dtype)
    gates = jnp.einsum('tbi,if->tbf', y, w, preferred_element_type=jnp.float32)
    gates = gates.astype(dtype).astype(jnp.float32)
    gates = gates.reshape(*gates.shape[:2], cell.input_gates, -1)
    gates = gates + split(bias, -1)
    r = split(kernel, 1).astype(dtype).astype(jnp.float32)
    start_again = tuple(split(restart, -1))
    own = {name: split(v, -1) for name, v in params.items()}

    def step(state, xs, r=r, start_again=start_again, own=own):
      row, reset, mask = xs
      if reset is not None:
        choose = lambda a, b: jnp.where(reset[:, None], a, b)
        state = tuple(map(choose, start_again, state))
      h = state[0].astype(dtype).astype(jnp.float32)
      h = h.reshape(len(h), *r.shape[1:3])
      h_gates = jnp.einsum('bnd,gnde->gbne', h, r)
      h_gates = tuple(h_gates.reshape(*h_gates.shape[:2], -1))
      new = cell.update(own, tuple(jnp.moveaxis(row, 1, 0)), h_gates, state)
      if mask is not None:
        choose = lambda a, b: jnp.where(mask[:, None], a, b)
        new = tuple(map(choose, new, state))
      return new, new[0]

    last, hs = jax.lax.scan(
        step, tuple(split(carry, -1)), (flip(gates), *flags)
    )
    lasts.append(jnp.stack(last))
    y = flip(hs).astype(dtype)
  return jnp.concatenate(lasts, -1), (
      y if call.time_major else jnp.swapaxes(y, 0, 1)
  )


class LevelsTest(parameterized.TestCase):

  def drawn(self, types):
    rng = np.random.default_rng(0)

    def draw(t):
      if t.dtype == bool:
        return jnp.asarray(rng.random(t.shape) < 0.7)
      return jnp.asarray(0.5 * rng.standard_normal(t.shape), t.dtype)

    return jax.tree.map(draw, types)

  @parameterized.parameters(
      (rnnzoo.LSTM, 3, 8, 9, 20, 32, 2, False, {}),
      (rnnzoo.GRU, 2, 9, 5, 64, 32, 1, True, {'time_major': True}),
      (rnnzoo.Elman, 4, 16, 6, 12, 64, 1, True, {'reverse': True}),
  )
  def test_around_the_kernel(self, layer, *sizes):
    *sizes, flags, options = sizes
    cell, types, call = arguments(layer, *sizes, **options)
    arrays = self.drawn((*types, *rest(cell, types, call, flags)))
    if not abstract_gpu.RUNS:
      with self.assertRaises(NotImplementedError):
        recurrence_op.levels(cell, *types, call, flags=flags)
      return
    target = targets.Target(132, False, True)
    with (
        mock.patch.object(targets, 'current', lambda: target),
        mock.patch.object(forward, 'forward', loop),
    ):
      run = recurrence_op.levels(cell, *types, call, flags=flags)
      got = jax.jit(run)(*arrays)
    want = in_turn(cell, call, *arrays)
    for x, y in zip(got, want, strict=True):
      self.assertEqual((x.shape, x.dtype), (y.shape, y.dtype))
      self.assertLess(comparison.relative_error(x, y), 4e-3)

  @parameterized.parameters(
      (rnnzoo.LSTM, 4, 16, 1024, 768, 768, 12, False, {}),
      (rnnzoo.GRU, 3, 24, 500, 100, 128, 2, True, {'time_major': True}),
      (rnnzoo.LSTM, 2, 9, 13, 28, 64, 1, True, {'reverse': True}),
      (rnnzoo.SLSTM, 2, 16, 3, 256, 256, 4, False, {'dtype': 'float16'}),
  )
  def test_lowers_for_a_gpu(self, layer, *sizes):
    *sizes, flags, options = sizes
    cell, types, call = arguments(layer, *sizes, **options)
    types = (*types, *rest(cell, types, call, flags))
    with abstract_gpu.device(self, H200):
      run = recurrence_op.levels(cell, *types[:5], call, flags=flags)
      text = abstract_gpu.lower(run, *types)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 1)

  @parameterized.parameters(
      ('first', 132, 4, 16, 768, 768, 12, (96, 128, 7, 16)),
      # Two rows of the batch that no copy has for itself.
      ('octets', 132, 2, 24, 64, 64, 1, (64, 12, 12, 8)),
      ('fewer multiprocessors', 78, 2, 16, 512, 256, 4, (64, 32, 12, 16)),
      # Eleven slices of inputs, and not twelve slots.
      ('slots', 132, 2, 16, 700, 512, 8, (64, 64, 11, 16)),
  )
  def test_plans(self, _, cores, depth, batch, inputs, features, heads, want):
    if not abstract_gpu.RUNS:
      return
    cell, types, call = arguments(
        rnnzoo.LSTM, depth, batch, 400, inputs, features, heads
    )
    target = targets.Target(cores, False, True)
    with mock.patch.object(targets, 'current', lambda: target):
      plan = recurrence_op.levels(cell, *types, call, flags=False).args[0]
    self.assertEqual((plan.columns, plan.ctas, plan.stages, plan.rows), want)
    self.assertLessEqual(plan.ctas, cores)

  @parameterized.parameters(
      ('Fewer than 8 rows', 7, 64, 64, 1, {}),
      ('A head of several CTAs', 16, 128, 128, 1, {}),
      ('Too many rows', 64, 768, 768, 12, {}),
      ('Too wide', 16, 4096, 768, 12, {}),
      ('Heads of no octets', 16, 12, 12, 1, {}),
      ('32 bits', 16, 64, 64, 1, {'dtype': 'float32'}),
      ('Long', 128, 64, 256, 4, {'time': 100_000}),
      ('Few multiprocessors', 8, 512, 512, 8, {'cores': 30}),
  )
  def test_others_are_refused(self, _, batch, inputs, features, heads, options):
    options = {'time': 400, 'cores': 132, **options}
    time, cores = options.pop('time'), options.pop('cores')
    cell, types, call = arguments(
        rnnzoo.LSTM, 2, batch, time, inputs, features, heads, **options
    )
    target = targets.Target(cores, False, True)
    with mock.patch.object(targets, 'current', lambda: target):
      with self.assertRaises(NotImplementedError):
        recurrence_op.levels(cell, *types, call, flags=False)

  def test_other_devices_are_refused(self):
    cell, types, call = arguments(rnnzoo.LSTM, 2, 16, 400, 64, 64, 1)
    for target in (targets.Target(132, False), targets.Target(132, True)):
      with mock.patch.object(targets, 'current', lambda t=target: t):
        with self.assertRaises(NotImplementedError):
          recurrence_op.levels(cell, *types, call, flags=False)


if __name__ == '__main__':
  absltest.main()
