"""The program of devices_test.py for `jax.shard_map` over one of two mesh axes.

  python -m tests.testing.partial_manual_program CASE...

A case is LAYER-IMPLEMENTATION-TYPE-CHECK. The caller's `jax.shard_map` is over
'data'; TYPE is that of the other axis, 'model', over which features, heads or
sequences are sharded; CHECK is 'vma' for one with `check_vma`, or 'free'. It
prints a line for each case whose outputs, tangents and gradients, taken inside
and outside of the `jax.shard_map`, equal those of one device.
"""

import sys

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from tests.layers import flax_modes_test
from tests.testing import reference

B, T, F = 4, 5, 8
BY_FEATURES = {
    'kernel': P(None, None, 'model'),
    'bias': P(None, 'model'),
    'recurrent_kernel': P(None, 'model'),
}


def draw(seed):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((B, T, F)).astype(np.float32)


def problem(name, implementation):
  """Returns (function, its two arguments, their specs over 'model')."""
  if name == 'linear_scan':
    run = lambda a, b: rnnzoo.linear_scan(
        jnp.tanh(a), b, implementation=implementation
    )
    over = P(None, None, 'model')
    return run, (draw(0), draw(1)), (over, over)
  options = {'num_heads': 2} if name == 'LSTM' else {}
  if name == 'Stack':
    layer = rnnzoo.Stack(rnnzoo.GRU, F, F, num_layers=2, rngs=nnx.Rngs(0))
  else:
    layer = rnnzoo.LAYERS[name](
        F, F, implementation=implementation, rngs=nnx.Rngs(0), **options
    )
  graphdef, params = nnx.split(layer)
  run = lambda params, x: nnx.merge(graphdef, params)(x)
  if name == 'Stack':  # Its sequences are over both axes.
    return run, (params, draw(0)), (P(), P('model'))
  specs = jax.tree.map_with_path(
      lambda path, _: BY_FEATURES[path[0].key], params
  )
  return run, (params, draw(0)), (specs, P())


def check(name, implementation, kind, check_vma):
  types = (AxisType[kind],) * 2
  mesh = jax.make_mesh((2, 2), ('data', 'model'), axis_types=types)
  run, arguments, over_model = problem(name, implementation)
  over_data = (P('data') if name == 'linear_scan' else P(), P('data'))

  def put(x, model, data):
    spec = [*model, *[None] * (x.ndim - len(model))]
    if data:
      spec[0] = 'data' if spec[0] is None else ('data', 'model')
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

  def placed(x, model, data):
    if isinstance(model, P):
      return jax.tree.map(lambda leaf: put(leaf, model, data), x)
    return jax.tree.map(lambda leaf, spec: put(leaf, spec, data), x, model)

  def loss(*arguments):
    return jnp.sum(run(*arguments) ** 3)

  def gradient(*arguments):
    return jax.grad(loss, (0, 1))(*arguments)

  def summed(*arguments):
    of_first, of_last = gradient(*arguments)
    if not check_vma and name != 'linear_scan':
      of_first = jax.lax.psum(of_first, 'data')
    return of_first, of_last

  def tangent(*arguments):
    return jax.jvp(run, arguments, jax.tree.map(jnp.cos, arguments))

  def mapped(function, out_specs):
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=over_data,
        out_specs=out_specs,
        axis_names={'data'},
        check_vma=check_vma,
    )

  def outside(*arguments):
    return jax.grad(
        lambda *own: jnp.sum(mapped(run, P('data'))(*own) ** 3), (0, 1)
    )(*arguments)

  on_mesh = tuple(map(placed, arguments, over_model, over_data))
  of_one = reference.jit(gradient)(*arguments)
  for function, want in (
      (mapped(tangent, P('data')), reference.jit(tangent)(*arguments)),
      (mapped(summed, over_data), of_one),
      (outside, of_one),
  ):
    with jax.set_mesh(mesh):
      got = reference.jit(function)(*on_mesh)
    flax_modes_test.close(got, want)


def main(names):
  for case in names:
    name, implementation, kind, checks = case.split('-')
    implementation = None if implementation == 'None' else implementation
    check(name, implementation, kind, check_vma=checks == 'vma')
    print(f'{case} is the same on 4 devices')


if __name__ == '__main__':
  main(sys.argv[1:])
