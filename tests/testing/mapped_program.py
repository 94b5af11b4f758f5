"""Rows of `jax.vmap` over devices, on eight that a CPU pretends to be.

Its arguments are cases, each LAYER:WAY. Each prints a line once
'associative_scan' on all devices equals 'scan' on one.
"""

import functools
import sys

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from tests.testing import reference
from tests.testing import several_devices

DEVICES = 8
ROWS, BATCH, TIME, IN = 4, 2, 11, 3


def _layers(name):
  """Returns functions of (path, parameters, ...) and the parameters."""
  layers = {
      path: rnnzoo.LAYERS[name](
          IN, 4, param_dtype=jnp.float64, implementation=path, rngs=nnx.Rngs(0)
      )
      for path in ('scan', 'associative_scan')
  }
  graphs = {path: nnx.split(layer)[0] for path, layer in layers.items()}
  call = lambda path, state, x, reset=None: nnx.merge(graphs[path], state)(
      x, reset=reset
  )
  return call, nnx.split(layers['scan'])[1]


def cases(name):
  """Returns (function of (path, *arrays), arrays with their spec) by name."""
  call, state = _layers(name)
  rng = np.random.default_rng(0)
  x = rng.standard_normal((ROWS, BATCH, TIME, IN))
  reset = rng.random((ROWS, BATCH, TIME)) < 0.2
  states = jax.tree.map(
      lambda p: jnp.stack([p * (1 + i / 9) for i in range(ROWS)]), state
  )

  def rows(path, x, reset):
    return jax.vmap(lambda x, reset: call(path, state, x, reset))(x, reset)

  def loss(path, state, x):
    return jnp.sum(jnp.sin(call(path, state, x)))

  def gradient(path, x):
    total = lambda state, x: jnp.sum(
        jax.vmap(lambda x: loss(path, state, x))(x)
    )
    return jax.grad(total, (0, 1))(state, x)

  def gradients(path, states, x):
    own = lambda state, x: jax.grad(lambda *a: loss(path, *a), (0, 1))(state, x)
    return jax.vmap(own)(states, x)

  def shared(path, states, x):
    return jax.vmap(lambda state: call(path, state, x[0]))(states)

  def nested(path, x):
    x = x[:, :, None]
    return jax.vmap(jax.vmap(lambda x: call(path, state, x)))(x)

  def tangent(path, x):
    f = lambda x: jax.vmap(lambda x: call(path, state, x))(x)
    return jax.jvp(f, (x,), (jnp.cos(x),))

  def in_shard_map(path, states, x):
    both = lambda state, x: jax.grad(lambda s: loss(path, s, x))(state)
    return jax.shard_map(
        jax.vmap(both), in_specs=(P('a'), P('a')), out_specs=P('a')
    )(states, x)

  return {
      'rows_and_batch': (rows, (x, P('a', 'b')), (reset, P('a', 'b'))),
      'gradient_both': (gradient, (x, P('a', 'b'))),
      'gradients': (gradients, (states, P('a')), (x, P('a'))),
      'shared': (shared, (states, P('a')), (x, P(None, 'b'))),
      'nested': (nested, (x, P('a', 'b'))),
      'tangent': (tangent, (x, P('a'))),
      'in_shard_map': (in_shard_map, (states, P('a')), (x, P('a'))),
  }


def main(names):
  several_devices.expect(DEVICES)
  jax.config.update('jax_enable_x64', True)
  mesh = jax.make_mesh((4, 2), ('a', 'b'))
  find = functools.cache(cases)
  for name in names:
    layer, way = name.split(':')
    known = find(layer)
    function, *given = known[way]

    def run(path, arrays, function=function):
      return reference.jit(lambda *arrays: function(path, *arrays))(*arrays)

    with jax.set_mesh(mesh):
      put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
      got = run('associative_scan', [put(x, spec) for x, spec in given])
    whole = [x for x, _ in given]
    if way == 'in_shard_map':
      function, _, _ = known['gradients']
      want = run('scan', whole, function)[0]
    else:
      want = run('scan', whole)
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=1e-10)
    print(f'{name} is the same on {DEVICES} devices')


if __name__ == '__main__':
  main(sys.argv[1:])
