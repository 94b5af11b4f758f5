"""The program of devices_test.py for parameters that are sharded over devices.

  python -m tests.testing.split_program LAYOUT CASE...

A CASE of sharded_cases.py prints a line once loss, outputs and gradients under
plain `jit` equal those of one device. With Explicit axes no loop of the program
sends anything, gradients are sharded as their parameters, and nothing is said
of arrays that are gathered. The case 'functions' runs public functions; those
of `GATHERED` have one warning, and come last.
"""

import dataclasses
import logging
import re
import sys

from flax import nnx
import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import rnnzoo
from tests.testing import comparison
from tests.testing import devices_program
from tests.testing import random_layers
from tests.testing import several_devices
from tests.testing import sharded_cases
from tests.testing import sharded_program

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a layer's arrays lie.

  Attributes:
    mesh: the devices.
    data: the mesh axis of the batch, or None.
    parameters: that of heads or features, or of the kernel's inputs.
    inputs: whether it is that of the kernel's inputs.
    kind: of the axes.
  """

  mesh: tuple[int, ...]
  data: str | None
  parameters: str
  inputs: bool = False
  kind: AxisType = AxisType.Explicit


LAYOUTS = {
    'heads': Layout((8,), None, 'a'),
    'both': Layout((2, 4), 'a', 'b'),
    'saved': Layout((8,), 'a', 'a', inputs=True),
    'auto': Layout((2, 4), 'a', 'b', kind=AxisType.Auto),
}

# Layers without heads that are independent.
GATHERED = {
    'one_head': lambda: rnnzoo.Stack(
        rnnzoo.GRU, 8, 8, num_layers=2, rngs=nnx.Rngs(0)
    ),
    'block': lambda: rnnzoo.SLSTMBlock(8, 8, num_heads=4, rngs=nnx.Rngs(0)),
}


def make_mesh(layout: Layout):
  names = 'ab'[: len(layout.mesh)]
  kinds = (layout.kind,) * len(names)
  return jax.make_mesh(layout.mesh, tuple(names), axis_types=kinds)


def place(params, layout: Layout, mesh):
  """Returns parameters over heads, features or inputs."""

  def spec(path, x):
    names = [getattr(key, 'key', None) for key in path]
    if 'recurrent_kernel' in names:
      return P(None, layout.parameters)
    if layout.inputs and 'kernel' in names:
      return P(None, layout.parameters)
    # One number is shared by all features.
    return P(*[None] * (x.ndim - 1), layout.parameters) if x.ndim else P()

  put = lambda path, x: jax.device_put(x, NamedSharding(mesh, spec(path, x)))
  return jax.tree_util.tree_map_with_path(put, params)


def in_loops(text: str) -> list[tuple[str, int, str]]:
  """Returns what the loops of a compiled program send.

  Args:
    text: of the program.

  Raises:
    ValueError: it has no loop.
  """
  calls: dict[str, set[str]] = {}
  loops: set[str] = set()
  computation = ''
  for line in text.splitlines():
    if line and not line[0].isspace():
      computation = line.removeprefix('ENTRY ').split()[0]
    if ' while(' in line:
      loops |= set(re.findall(r'(?:body|condition)=(%?[\w.-]+)', line))
    names = set(re.findall(r'%[\w.-]+', line))
    calls.setdefault(computation, set()).update(names)
  if not loops:
    raise ValueError('The program has no loop.')
  inside, new = set(loops), set(loops)
  while new:
    new = set().union(*(calls.get(name, ()) for name in new)) & set(calls)
    new -= inside
    inside |= new
  return [
      found for found in devices_program.collectives(text) if found[2] in inside
  ]


def run(name: str, layout: Layout, mesh) -> None:
  """Compares a case with one device."""
  case = sharded_cases.Case.named(name)
  diagonal = case.layer in ('IndRNN', 'IRevRNN', 'MinGRU', 'MinLSTM')
  heads = {} if diagonal else {'num_heads': 8}
  batch = NamedSharding(mesh, P(layout.data))
  put = lambda params, data: (
      place(params, layout, mesh),
      jax.device_put(data, batch),
  )
  features = 8 if diagonal else 16
  sizes = {'batch': 8, 'features': features, 'in_features': 8, **heads}
  want, program, spread = sharded_program.programs(case, put, **sizes)
  got = program(*spread)
  sharded_program.same_results(case, got, want)
  if layout.kind != AxisType.Explicit:
    return
  text = program.as_text()
  # An associative scan of few steps needs no loop.
  if case.implementation != 'associative_scan' or ' while(' in text:
    sent = in_loops(text)
    if sent:
      raise AssertionError(f'{name}: a loop has {sent}.')

  def check(gradient, x):
    if gradient.dtype == jax.dtypes.float0:
      return
    if not gradient.sharding.is_equivalent_to(x.sharding, x.ndim):
      raise AssertionError(f'{gradient.sharding} is not {x.sharding}.')

  jax.tree.map(check, got[1], spread)


def functions(mesh):
  """Yields results of public functions, and how they should be sharded."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  kernel, gates, h = draw(3, 4, 2, 2), draw(4, 5, 3, 8), draw(4, 8)
  params = {'recurrent_bias': draw(8)}

  def unroll(params, gates, kernel, h):
    cell = rnnzoo.GRUCell()
    return rnnzoo.unroll(cell, params, gates, kernel, (h,))[1]

  for at, spec in enumerate([('b',), (None, None, None, 'b'), (None, 'b')]):
    given = [params, gates, kernel]
    given[at] = jax.tree.map(lambda x, spec=spec: put(x, *spec), given[at])
    yield (
        f'unroll {at}',
        jax.jit(unroll)(*given, put(h, 'a')),
        unroll(params, gates, kernel, h),
        P('a', None, 'b'),
    )
  a, b = draw(4, 4, 8), draw(4, 4, 8)
  yield (
      'linear_scan',
      jax.jit(rnnzoo.linear_scan)(put(a, None, 'a'), b, put(h, None, 'b')),
      rnnzoo.linear_scan(a, b, h),
      P(None, 'a', 'b'),
  )
  gru = rnnzoo.GRU(3, 8, num_heads=4, rngs=nnx.Rngs(0))
  step_of, state = random_layers.pure(gru, 'step')
  over = place(state, LAYOUTS['both'], mesh)
  step = lambda state, h, x: step_of(state, (h,), x)[1]
  x = draw(4, 3)
  yield (
      'step',
      jax.jit(step)(over, h, put(x, 'a')),
      step(state, h, x),
      P('a', 'b'),
  )


def gathered(mesh, layer):
  """Yields results of a layer whose parameters have to be gathered."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((4, 3, 8)).astype(np.float32)
  call, state = random_layers.pure(layer)

  def put(x):
    spec = P(*[None] * (x.ndim - 1), 'a' if x.shape[-1] % 8 == 0 else None)
    return jax.device_put(x, NamedSharding(mesh, spec))

  got = jax.jit(call)(jax.tree.map(put, state), x)
  yield type(layer).__name__, got, call(state, x), P()


def main(kind, names):
  several_devices.expect(DEVICES)
  layout = LAYOUTS[kind]
  mesh = make_mesh(layout)
  said: list[str] = []
  handler = logging.Handler(logging.WARNING)
  handler.emit = lambda record: said.append(record.getMessage())
  logging.getLogger('absl').addHandler(handler)
  for name in names:
    warnings = int(name in GATHERED)
    if name == 'functions' or name in GATHERED:
      cases = functions(mesh)
      if name in GATHERED:
        cases = gathered(mesh, GATHERED[name]())
      for label, got, want, spec in cases:
        comparison.assert_near(got, want, 4e-6)
        sharding = NamedSharding(mesh, spec)
        if not got.sharding.is_equivalent_to(sharding, got.ndim):
          raise AssertionError(f'{label} is sharded over {got.sharding.spec}.')
    else:
      run(name, layout, mesh)
    if sum(' is gathered ' in text for text in said) != warnings:
      raise AssertionError(f'{name}: warnings {said}.')
    print(f'{name} is the same on {DEVICES} devices')


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2:])
