"""A program of newton_joints_test.py: joints over eight devices of a CPU.

  python -m tests.testing.joints_program

The batch is over an Auto axis of a mesh, of which the types say nothing. It
prints a line for each case whose carries equal those of 'scan' and whose
compiled program sends nothing.
"""

import re

from absl.testing import absltest
import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.time import path as newton_path
from tests.engines import newton_joints_test

Case = newton_joints_test.Case
SENDS = re.compile(r' (all-\w+|collective-permute|reduce-scatter)(-start)?\(')

CASES = {
    'features': Case('IndRNN', newton_joints_test.TANH, (16, 100, 8), fewest=8),
    'flags': Case(
        'IndRNN', {}, (8, 101, 5), flags=True, reverse=True, fewest=8
    ),
    'heads': Case('GRU', newton_joints_test.HEADS, (8, 101, 4)),
}


def check(case: Case) -> None:
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  cell, operands = case.operands()
  plan = case.plan(cell, operands)
  joints = newton_path._Joints(newton_path._Windows(plan))
  by_scan = lambda operands: scan_loop.carries(plan.steps, operands)
  wanted = jax.jit(by_scan)(operands)
  axes = operands._replace(
      x=1,
      carry=jax.tree.map(lambda _: 0, operands.carry),
      restart=jax.tree.map(lambda _: 0, operands.restart),
      **{
          name: 1
          for name in ('reset', 'mask')
          if getattr(operands, name) is not None
      },
  )
  spec = lambda axis: P(*(None,) * axis, 'data') if axis != '' else P()
  place = lambda x, axis: jax.device_put(x, NamedSharding(mesh, spec(axis)))
  operands = jax.tree.map(
      place,
      operands,
      axes._replace(
          params=jax.tree.map(lambda _: '', operands.params),
          weights=jax.tree.map(lambda _: '', operands.weights),
          recurrent_kernel='',
      ),
  )
  run = jax.jit(joints).lower(operands).compile()
  sent = SENDS.findall(run.as_text())
  assert not sent, sent
  found = run(operands)
  assert len(found[1][0].sharding.device_set) == 8
  assert 'data' in str(found[1][0].sharding), found[1][0].sharding
  jax.tree.map(newton_joints_test.close, found, wanted)


def main() -> None:
  test = absltest.TestCase()
  for name, case in CASES.items():
    with newton_joints_test.on_gpu(test, case.fewest):
      check(case)
    print(f'{name}: the same, and nothing is sent')


if __name__ == '__main__':
  main()
