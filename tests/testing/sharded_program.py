"""The program of devices_test.py, on eight devices that a CPU pretends to be.

Its arguments are 'Explicit' or 'Auto', then cases of sharded_cases.py, or
'functions' for public functions, or 'stacks' for stacks with all options. A
case prints a line once loss and gradients of a batch that is sharded over the
devices, under plain `jit`, equal those of one device, with one reduction and no
other collective in the compiled program.
"""

import contextlib
import dataclasses
import functools
import re
import sys
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import random_layers
from tests.testing import reference
from tests.testing import several_devices
from tests.testing import sharded_cases
from tests.testing import streaming_loops

DEVICES = 8
OTHERS = re.compile(
    r' (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\('
)


def compiled(loss, *args):
  """Returns a loss's value and gradients as a compiled program."""
  f = jax.value_and_grad(loss, (0, 1), allow_int=True)
  return reference.jit(f).lower(*args).compile()


def programs(case, put, **sizes):
  """Returns results of one device, a program for several, and its arrays.

  Args:
    case: of sharded_cases.py.
    put: (params, data) -> the same, sharded.
    **sizes: of the problem.
  """
  params, data, loss = case.problem(**sizes)
  with contextlib.ExitStack() as stack:
    on_one = loss
    if case.is_kernel:
      by_scan = dataclasses.replace(case, implementation='scan')
      on_one = by_scan.problem(**sizes)[2]
    want = compiled(on_one, params, data)(params, data)
    if case.is_kernel:
      stack.enter_context(streaming_loops.instead())
      stack.enter_context(dense_loops.instead())
    spread = put(params, data)
    return want, compiled(loss, *spread), spread


def same_results(case, got, want):
  """Fails unless the results of a case are those of one device."""
  # Either result is within 2e-6 of the exact one, see flax_modes_test. Dense
  # kernels multiply float32 in two bfloat16 parts, as 'scan' does not.
  limit = 1e-5 if case.is_kernel else 4e-6
  comparison.assert_near(got, want, limit)


class Given(NamedTuple):
  """What public functions take."""

  a: Any
  b: Any
  h0: Any
  reset: Any
  kernel: Any
  gates: Any
  params: Any


def functions(mesh):
  """Yields names and results of public functions, sharded and on one device."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  given = Given(
      *(draw(8, 5, 4), draw(8, 5, 4), draw(8, 4)),
      rng.random((8, 5)) < 0.3,
      *(draw(3, 1, 4, 4), draw(8, 5, 3, 4), {'recurrent_bias': draw(4)}),
  )
  gru = rnnzoo.GRU(4, 4, rngs=nnx.Rngs(0))
  block = rnnzoo.SLSTMBlock(4, 4, rngs=nnx.Rngs(0))

  def scan(given):
    return rnnzoo.linear_scan(given.a, given.b, given.h0, reset=given.reset)

  def unroll(given):
    arrays = given.params, given.gates, given.kernel, (given.h0,)
    return rnnzoo.unroll(rnnzoo.GRUCell(), *arrays, reset=given.reset)

  def several_axes(given):
    # Sharded along the second of two batch axes.
    shared = {'kernel': given.kernel, 'params': given.params}
    own = jax.tree.map(lambda x: x[None], given)._replace(**shared)
    return scan(own), unroll(own)

  def two_axes(given):
    return gru(given.a.reshape(8, 1, 5, 4))

  def block_step(given):
    h0 = given.h0
    window = jax.numpy.stack([h0] * 3, axis=1)
    carry = (h0, h0, 1 + h0 * h0, h0, window)
    return block.step(carry, given.a[:, 0], reset=given.reset[:, 0])

  def block_reversed(given):
    two_axes = given.a.reshape(8, 1, 5, 4)
    reset = given.reset.reshape(8, 1, 5)
    return block.unroll(two_axes, reset=reset, mask=~reset, reverse=True)

  over_batch = NamedSharding(mesh, P('data'))
  names = 'a', 'b', 'h0', 'reset', 'gates'
  spread = given._replace(
      **{k: jax.device_put(getattr(given, k), over_batch) for k in names}
  )
  over_features = NamedSharding(mesh, P(None, None, 'data'))
  wide = tuple(np.tile(x, (1, 1, 2)) for x in (given.a, given.b))
  for f in (scan, several_axes, two_axes, block_step, block_reversed):
    want = jax.jit(f)(given)
    yield f.__name__, jax.jit(f)(spread), want
    if f is scan:
      yield f'{f.__name__} without jit', f(spread), want
  yield (
      'linear_scan over features',
      jax.jit(rnnzoo.linear_scan)(*jax.device_put(wide, over_features)),
      rnnzoo.linear_scan(*wide),
  )
  # Time is gathered, with a warning.
  over_time = NamedSharding(mesh, P(None, 'data'))
  long = draw(2, 8, 4)
  found = jax.jit(gru)(jax.device_put(long, over_time))
  yield 'time', found, jax.jit(gru)(long)
  # Parameters that are sharded as well, as fully sharded data parallelism has.
  loss, state = random_layers.squares(rnnzoo.AGRU(4, 8, rngs=nnx.Rngs(0)))
  last = lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 1), 'data'))
  sharded = jax.tree.map(
      lambda x: jax.device_put(x, last(x)) if x.ndim else x, state
  )
  gradient = jax.grad(loss, (0, 1), allow_int=True)
  yield (
      'sharded parameters',
      jax.jit(gradient)(sharded, spread.a),
      jax.jit(gradient)(state, given.a),
  )
  if abstract_gpu.RUNS:
    short = rnnzoo.LSTM(
        *(4, 8), dtype='bfloat16', implementation='pallas', rngs=nnx.Rngs(0)
    )
    slope = jax.jit(jax.grad(lambda x: (short(x) ** 2).astype('float32').sum()))
    with dense_loops.instead():
      yield 'a kernel in bfloat16', slope(spread.a), slope(given.a)


def stacks(mesh):
  """Yields names and results of stacks, sharded and on one device."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((8, 5, 4)).astype(np.float32)
  reset = rng.random((8, 5)) < 0.3
  lengths = np.arange(8) % 6
  over_batch = NamedSharding(mesh, P('data'))
  second = NamedSharding(mesh, P(None, 'data'))

  def results(
      stack, *, time_major=False, reverse=False, trains=False, slopes=False
  ):
    """Returns results and gradients on one device and on several."""
    graphdef, state = nnx.split(stack)
    turn = lambda a: np.swapaxes(a, 0, 1)
    given = {'x': x, 'reset': reset}
    if time_major:
      given = {key: turn(a) for key, a in given.items()}
    given['seq_lengths'] = lengths

    def loss(state, given):
      own = nnx.merge(graphdef, state, copy=True)
      rngs = nnx.Rngs(dropout=0) if trains else None
      out = own.unroll(
          **given, time_major=time_major, reverse=reverse, rngs=rngs
      )
      return sum(jax.numpy.sin(a).sum() for a in jax.tree.leaves(out)), out

    def slope(state, given):
      moved = jax.tree.map(jax.numpy.ones_like, state)
      steepness = lambda state: jax.jvp(
          lambda s: loss(s, given)[0], (state,), (moved,)
      )
      grads = jax.grad(lambda state: loss(state, given)[0])(state)
      size = sum(jax.numpy.sum(g**2) for g in jax.tree.leaves(grads))
      return size + steepness(state)[1], steepness(state)

    run = jax.jit(
        jax.value_and_grad(slope, has_aux=True)
        if slopes
        else jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)
    )
    spread = {
        key: jax.device_put(
            a, second if time_major and key != 'seq_lengths' else over_batch
        )
        for key, a in given.items()
    }
    return run(state, spread), run(state, given)

  make = functools.partial(
      rnnzoo.Stack, features=4, in_features=4, num_layers=2, rngs=nnx.Rngs(0)
  )
  mixed = make([rnnzoo.MinGRU, rnnzoo.AGRU], norm='layer', residual=True)
  yield 'mixed', *results(mixed, reverse=True, time_major=True)
  options = {'norm': 'batch', 'dropout_rate': 0.5, 'rngs': nnx.Rngs(0)}
  averages = rnnzoo.DenseStack(rnnzoo.GRU, 4, 4, num_layers=2, **options)
  yield 'batch norm and dropout', *results(averages, trains=True)
  learned = make(rnnzoo.Elman, learn_initial_carry=True)
  yield 'slopes', *results(learned, time_major=True, slopes=True)
  layer = rnnzoo.MinGRU(4, 4, rngs=nnx.Rngs(0))
  rest = {
      'initial_carry': (jax.numpy.asarray(x[:, 0]),),
      'reset': reset,
      'seq_lengths': lengths,
  }
  yield (
      'only x on the mesh, without jit',
      layer.unroll(jax.device_put(x, over_batch), **rest),
      layer.unroll(x, **rest),
  )
  # Time is over the caller's axis, and each part over an Explicit one.
  nested = jax.make_mesh((4, 2), ('time', 'inner'))
  gates = rng.standard_normal((4, 8, 4)).astype(np.float32)
  wide = NamedSharding(nested, P(None, ('time', 'inner')))
  graphdef, state = nnx.split(
      rnnzoo.MinGRU(4, 4, time_axis_name='time', rngs=nnx.Rngs(0))
  )

  def run(state, x):
    y = nnx.merge(graphdef, state)(x, seq_lengths=np.array([3, 8, 0, 5]))
    return y, rnnzoo.linear_scan(x, x, time_axis_name='time')

  mapped = jax.shard_map(
      run,
      mesh=nested,
      in_specs=(P(), P(None, 'time')),
      out_specs=P(None, 'time'),
      axis_names={'time'},
  )
  yield (
      'parts of parts of time',
      jax.jit(mapped)(
          jax.device_put(state, NamedSharding(nested, P())),
          jax.device_put(gates, wide),
      ),
      (
          layer(gates, seq_lengths=np.array([3, 8, 0, 5])),
          rnnzoo.linear_scan(gates, gates),
      ),
  )


def main(kind, names):
  several_devices.expect(DEVICES)
  mesh = jax.make_mesh(
      (DEVICES,), ('data',), axis_types=(jax.sharding.AxisType[kind],)
  )
  over_batch = NamedSharding(mesh, P('data'))
  whole = NamedSharding(mesh, P())
  for name in names:
    if name in ('functions', 'stacks'):
      for function, got, want in globals()[name](mesh):
        # Three levels round more than one does.
        limit = 1e-5 if name == 'stacks' else 4e-6
        comparison.assert_near(got, want, limit)
        print(f'{function} is the same on {DEVICES} devices')
      continue
    case = sharded_cases.Case.named(name)
    put = lambda params, data: (
        jax.device_put(params, whole),
        jax.device_put(data, over_batch),
    )
    want, program, spread = programs(case, put, batch=DEVICES)
    found = OTHERS.findall(program.as_text())
    if found:
      raise AssertionError(f'{name}: the program has {sorted(set(found))}.')

    same_results(case, program(*spread), want)
    print(f'{name} is the same on {DEVICES} devices')


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2:])
