"""The program of time_parts_test.py: time over devices that a CPU pretends.

  python -m tests.testing.time_parts_program CASE...

A case is FUNCTION-WAY-IMPLEMENTATION. FUNCTION is 'linear_scan', 'forgetful',
which has parts that forget all that is before them, 'infinities', or one of
`LAYERS`. WAY is 'jit', where types say how x is sharded, 'auto', where XLA
knows, or 'shard_map'. It prints a line for each case whose results and
gradients equal those of one device. But for 'auto', the compiled program sends
nothing but maps, flags and sums of parameters' gradients.
"""

import contextlib
import functools
import itertools
import sys
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from rnnzoo.engines.time import linear_parts
from tests.testing import comparison
from tests.testing import devices_program
from tests.testing import random_layers
from tests.testing import reference
from tests.testing import streaming_loops

# Batch and time are over a mesh of 2 x 4; each device has T / 4 steps.
MESH = (2, 4)
B, T, IN, F = 4, 24, 3, 5
OVER_TIME = P('data', 'time')

LAYERS = {
    'MinGRU': rnnzoo.MinGRU,
    'MinLSTM': rnnzoo.MinLSTM,
    'Stack': functools.partial(rnnzoo.Stack, rnnzoo.MinGRU, num_layers=2),
    'Bidirectional': functools.partial(rnnzoo.Bidirectional, rnnzoo.MinGRU),
}


def draw(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


def linear_scan(implementation, axis_name):
  """Returns (function, operands, their specs, the results' specs)."""
  rng = np.random.default_rng(3)
  a = rng.random((B, T, F)).astype(np.float32)
  # A reset in front of an infinity, and parts with none, some and many zeros.
  a[0, 5:8] = 0
  data = {'a': a, 'b': draw(B, T, F), 'h0': draw(B, F)}
  reset = rng.random((B, T)) < 0.15
  reset[:, 6] = True

  path = {'time_axis_name': axis_name, 'implementation': implementation}

  def loss(params, data):
    del params
    total = 0
    for reverse in (False, True):
      for own in (None, data['reset']):
        options = {'reset': own, 'reverse': reverse, **path}
        h = rnnzoo.linear_scan(data['a'], data['b'], data['h0'], **options)
        total += jnp.sum(jnp.sin(h))
    return total

  specs = dict.fromkeys(('a', 'b', 'reset'), OVER_TIME) | {'h0': P('data')}
  return loss, {}, data | {'reset': reset}, specs


def in_turn(*groups):
  """Returns the combinations of choices whose indices have an even sum.

  Of three groups of two choices or more, they have every pair.
  """
  found = itertools.product(*(enumerate(group) for group in groups))
  return [
      tuple(choice for _, choice in combination)
      for combination in found
      if sum(i for i, _ in combination) % 2 == 0
  ]


def forgetful(implementation, axis_name):
  """Like `linear_scan`: parts of 64 steps that forget after 4, 32 or never."""
  rng = np.random.default_rng(5)
  size = B, 64 * MESH[1], F
  a = rng.uniform(0.5, 1, size).astype(np.float32)
  b = draw(*size)
  infinite = b.copy()
  infinite[0, 70, 1], infinite[1, 190, 2] = np.inf, np.nan
  reset = rng.random(size[:2]) < 0.02
  data = {'a': a, 'b': b, 'infinite': infinite, 'h0': draw(B, F)}

  def loss(params, data):
    del params
    scan = functools.partial(
        rnnzoo.linear_scan,
        h0=data['h0'],
        time_axis_name=axis_name,
        implementation=implementation,
    )
    a = data['a']
    mixed = a * jnp.where(jnp.arange(F) == 1, 1, 2.0**-80)
    total = 0
    owns = a, 2.0**-80 * a, 2.0**-12 * a, mixed, -mixed
    resets = None, data['reset']
    for own, reverse, reset in in_turn(owns, (False, True), resets):
      h = scan(own, data['b'], reverse=reverse, reset=reset)
      total += jnp.sum(jnp.sin(h))
    for reverse in (False, True):
      for own in (a, 2.0**-12 * a):
        h = scan(
            jax.lax.stop_gradient(own),
            jax.lax.stop_gradient(data['infinite']),
            reverse=reverse,
            reset=data['reset'],
        )
        here = jnp.where(jnp.isfinite(h), 1 + h, 0)
        total += jnp.sum(jax.lax.stop_gradient(here))
    return total

  specs = dict.fromkeys(('a', 'b', 'infinite', 'reset'), OVER_TIME)
  return loss, {}, data | {'reset': reset}, specs | {'h0': P('data')}


def infinities(implementation, axis_name):
  """Parts of 8 steps with infinities, and sums of where h is none."""
  rng = np.random.default_rng(6)
  size = B, 8 * MESH[1], F
  a = rng.uniform(0.5, 1, size).astype(np.float32)
  b = draw(*size)
  place = rng.random(size)
  b[place < 0.02] = np.nan
  b[place > 0.98] = np.inf
  data = {
      'a': a,
      'b': b,
      'h0': np.where(rng.random((B, F)) < 0.2, np.inf, draw(B, F)),
      'reset': rng.random(size[:2]) < 0.1,
      'weights': rng.random(size).astype(np.float32),
  }
  path = {'time_axis_name': axis_name, 'implementation': implementation}
  scan = functools.partial(rnnzoo.linear_scan, **path)
  # With this bias it forgets at once.
  path['bias_init'] = nnx.initializers.constant(60.0)
  made = rnnzoo.MinGRU(F, F, rngs=nnx.Rngs(0), **path)
  call, state = random_layers.pure(made)

  def loss(params, data):
    del params
    a, reset, h0 = data['a'], data['reset'], data['h0']
    b, weights = data['b'], data['weights']
    mixed = a * jnp.where(jnp.arange(F) % 2, 1, 2.0**-80)
    total = 0
    # Parts that remember and whose product underflows, that forget, and both.
    owns = 2.0**-12 * a, 2.0**-80 * a, mixed
    for own, reverse, flags in in_turn(owns, (False, True), (None, reset)):
      h = scan(own, b, h0, reset=flags, reverse=reverse)
      total += _of_kinds(h, weights)
    h = scan(jnp.where(weights < 0.05, 0, mixed), b, h0)
    total += _of_kinds(h, weights)
    y = call(state, b, reset=reset)
    return total + _of_kinds(y, weights)

  specs = dict.fromkeys(('a', 'b', 'reset', 'weights'), OVER_TIME)
  return loss, {}, data, specs | {'h0': P('data')}


def _of_kinds(h, weights):
  """Returns a number that says where h is finite, infinite or NaN."""
  kinds = jnp.where(jnp.isnan(h), 2, jnp.where(jnp.isinf(h), 1, 0))
  return jax.lax.stop_gradient(jnp.sum(weights * kinds))


def layer(name, implementation, axis_name):
  """Like `linear_scan`: all calls of a layer."""
  made = random_layers.make(
      LAYERS[name],
      IN,
      F,
      learn_initial_carry=True,
      implementation=implementation,
      time_axis_name=axis_name,
  )
  unroll, params = random_layers.pure(made, 'unroll')
  rng = np.random.default_rng(4)
  carry = jax.tree.map(
      lambda c: draw(*c.shape, seed=2), made.initial_carry((B,))
  )
  data = {
      'x': draw(B, T, IN),
      'carry': carry,
      'reset': rng.random((B, T)) < 0.1,
      'mask': rng.random((B, T)) < 0.8,
      'lengths': np.array([0, 5, 17, T], np.int32)[:B],
  }

  def loss(params, data):
    calls = (
        {},
        {'reset': data['reset'], 'mask': data['mask']},
        {
            'initial_carry': data['carry'],
            'seq_lengths': data['lengths'],
            'reset': data['reset'],
            'reverse': True,
        },
    )
    total = 0
    for call in calls:
      last, y = unroll(params, data['x'], **call)
      total += jnp.sum(jnp.sin(y))
      parts = 1 if axis_name is None else MESH[1]
      # Every device of the time axis has the final carry.
      total += sum(jnp.sum(c**2) for c in jax.tree.leaves(last)) / parts
    return total

  specs = dict.fromkeys(('x', 'reset', 'mask'), OVER_TIME)
  specs['carry'] = jax.tree.map(lambda _: P('data'), carry)
  specs['lengths'] = P('data')
  return loss, params, data, specs


def run(name: str) -> None:
  """Raises AssertionError unless a case is right."""
  function, way, implementation = name.split('-')
  kind = AxisType.Auto if way == 'auto' else AxisType.Explicit
  mesh = jax.make_mesh(MESH, ('data', 'time'), axis_types=(kind, kind))
  made = {
      'linear_scan': linear_scan,
      'forgetful': forgetful,
      'infinities': infinities,
  }
  forgets = function in ('forgetful', 'infinities')
  make = made.get(function, functools.partial(layer, function))
  oracle = 'scan' if implementation == 'pallas' else implementation
  loss, params, data, specs = make(oracle, None)
  value = lambda f: reference.jit(jax.value_and_grad(f, (0, 1), allow_int=True))
  want = value(loss)(params, data)
  loss = make(implementation, 'time' if way == 'shard_map' else None)[0]
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  if way == 'shard_map':

    def over_devices(params, data, loss=loss):
      return jax.lax.psum(loss(params, data), ('data', 'time'))

    loss = jax.shard_map(
        over_devices, mesh=mesh, in_specs=(P(), specs), out_specs=P()
    )
  spread = (
      jax.tree.map(lambda x: put(x, P()), params),
      jax.tree.map(put, data, specs),
  )
  with contextlib.ExitStack() as stack:
    if forgets:
      stack.enter_context(mock.patch.object(linear_parts, 'FEW', 4))
    if implementation == 'pallas':
      stack.enter_context(streaming_loops.instead())
    program = value(loss).lower(*spread).compile()
  got = program(*spread)

  comparison.assert_near(got, want, 4e-6)
  if way != 'auto':
    sent = devices_program.collectives(program.as_text())
    if forgets:  # A second run has an exchange of its own.
      check_sent(sent, params, calls=16, in_branches=True)
    else:
      check_sent(sent, params, calls=4)
  print(f'{name} is the same on 8 devices')


def check_sent(sent, params, calls, in_branches=False) -> None:
  """Raises AssertionError if devices exchange more than they must."""
  own_batch = B // MESH[0]
  # A part of more than FEW steps sends the h that its last steps end with,
  # [batch, features], in a place of its own among those of all parts.
  ends = MESH[1] * own_batch * F if in_branches else 0
  limits = {
      # Maps of the parts: (a, b), each [batch, features].
      'all-gather': 2 * MESH[1] * own_batch * F,
      # Resets at the boundaries between parts.
      'collective-permute': own_batch,
      # Gradients of parameters, final carries and cotangents of given ones.
      'all-reduce': calls
      * (
          sum(x.size for x in jax.tree.leaves(params))
          + 2 * own_batch * F
          + ends
      ),
  }
  for kind, size, computation in sent:
    is_outside = computation == 'ENTRY' or in_branches
    if size > limits.get(kind, 0) or not is_outside:
      raise AssertionError(f'{kind} of {size} numbers in {computation}')


if __name__ == '__main__':
  for case in sys.argv[1:]:
    run(case)
