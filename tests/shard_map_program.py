"""What shard_map_test.py runs, on two devices that a CPU pretends to be."""

from flax import nnx
import flax_modes_test
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import reference

x, reset = flax_modes_test.x, flax_modes_test.reset


def main():
  if jax.device_count() != 2:
    raise RuntimeError(f'Expected two devices, got {jax.devices()}.')
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
  for variant in flax_modes_test.LAYERS:
    layer = flax_modes_test.make(variant, learn_initial_carry=True)
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def f(params, x, reset, graphdef=graphdef, rest=rest):
      return nnx.merge(graphdef, params, rest)(x, reset=reset)

    sharded = jax.shard_map(
        f, mesh=mesh, in_specs=(P(), P('data'), P('data')), out_specs=P('data')
    )

    def run(f, params=params):
      loss = lambda params, x: (f(params, x, reset) ** 2).sum()
      return reference.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    jax.tree.map(flax_modes_test.close, run(sharded), run(f))
    print(f'{variant} is the same on two devices')


if __name__ == '__main__':
  main()
