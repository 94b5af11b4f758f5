"""The program of devices_test.py, on four devices that a CPU pretends to be.

Its arguments are cases by name. Each prints a line once loss and gradients of
a batch that is spread over the devices equal those of one device.
"""

import sys

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from tests.layers import flax_modes_test
from tests.testing import reference
from tests.testing import several_devices
from tests.testing import sharded_cases

DEVICES = 4


def main(names):
  several_devices.expect(DEVICES)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
  for name in names:
    case = sharded_cases.Case.named(name)
    params, data, loss = case.problem(batch=DEVICES)

    def over_devices(params, data, loss=loss):
      return jax.lax.psum(loss(params, data), 'data')

    sharded = jax.shard_map(
        over_devices, mesh=mesh, in_specs=(P(), P('data')), out_specs=P()
    )
    run = lambda f, params=params, data=data: reference.jit(
        jax.value_and_grad(f, (0, 1), allow_int=True)
    )(params, data)
    flax_modes_test.close(run(sharded), run(loss))
    print(f'{name} is the same on {DEVICES} devices')


if __name__ == '__main__':
  main(sys.argv[1:])
