"""The program of step_products_test.py, on two CPU devices.

  python -m tests.testing.step_products_program

The products of one step and their gradients are those of one device: of arrays
on a mesh with Explicit and with Auto axes, and in `jax.shard_map`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from rnnzoo.engines import products
from tests.testing import comparison

# Of h [B, F] and of R [G, N, D, D]: the batch, a gate's inputs, its outputs.
SPECS = {
    'batch': (P('a'), P()),
    'inputs': (P(None, 'a'), P(None, None, 'a')),
    'outputs': (P(), P(None, None, None, 'a')),
}


def loss(kernel, h):
  gates = products.multiply(products.pack(kernel), h)
  back = products.multiply_transposed(
      products.transpose(products.pack(kernel)), gates
  )
  return jnp.sum(jnp.sin(back))


def main():
  rng = np.random.default_rng(0)
  kernel = jnp.asarray(rng.standard_normal((4, 1, 16, 16)) / 8, jnp.float32)
  h = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
  gradients = jax.value_and_grad(loss, (0, 1))
  want = jax.jit(gradients)(kernel, h)

  check = lambda got: comparison.assert_near(got, want, 1e-5)

  for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((2,), ('a',), axis_types=(kind,))
    put = lambda x, spec, mesh=mesh: jax.device_put(
        x, NamedSharding(mesh, spec)
    )
    for name, (h_spec, kernel_spec) in SPECS.items():
      if kind == AxisType.Explicit and name != 'batch':
        continue  # The engine gathers these first: `sharding`.
      check(jax.jit(gradients)(put(kernel, kernel_spec), put(h, h_spec)))
      print(kind, name)
  for check_vma in (True, False):
    per_device = jax.shard_map(
        lambda kernel, h: loss(kernel, h)[None],
        mesh=mesh,
        in_specs=(P(), P('a')),
        out_specs=P('a'),
        check_vma=check_vma,
    )
    total = lambda kernel, h, run=per_device: jnp.sum(run(kernel, h))
    check(jax.jit(jax.value_and_grad(total, (0, 1)))(kernel, h))


if __name__ == '__main__':
  main()
