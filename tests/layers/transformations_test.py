"""Every transformation of JAX on every layer and path; see docs/choosing.md.

  python tests/layers/transformations_test.py --write

writes docs/transformations.json anew; that needs jax 0.11 or newer. A
transformation works if its program can be traced and lowered. Other tests
compare numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import json
import pathlib
import sys

from absl.testing import absltest
from flax import nnx
import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import rnnzoo
from tests.testing import abstract_gpu

PATH = pathlib.Path(__file__).resolve().parents[2] / 'docs/transformations.json'
BATCH, TIME, FEATURES = 4, 6, 8

# A function of parameters and x, and those.
Call = Callable[[nnx.State, jax.Array], jax.Array]


class Programs:
  """Transformed programs of one layer, each a method that lowers it."""

  def __init__(self, call: Call, params, platform: str):
    self.call = call
    self.params = params
    self.platform = platform
    self.x = jax.ShapeDtypeStruct((BATCH, TIME, FEATURES), jnp.float32)

  def loss(self, params, x):
    return (self.call(params, x) ** 2).sum()

  def lower(self, f, *arguments, **options):
    traced = jax.jit(f, **options).trace(*arguments)
    traced.lower(lowering_platforms=(self.platform,))

  def two(self, tree):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), tree
    )

  def export(self, f, x, platforms=None):
    export.export(
        jax.jit(f),
        platforms=platforms or (self.platform,),
        disabled_checks=[
            export.DisabledSafetyCheck.custom_call('mosaic_gpu_v2')
        ],
    )(self.params, x)

  def jit(self):
    self.lower(self.call, self.params, self.x)

  def vmap_over_x(self):
    f = jax.vmap(self.call, (None, 0))
    self.lower(f, self.params, self.two(self.x))

  def vmap_over_parameters(self):
    f = jax.vmap(self.call, (0, None))
    self.lower(f, self.two(self.params), self.x)

  def grad(self):
    self.lower(jax.grad(self.loss, (0, 1)), self.params, self.x)

  def jvp(self):
    f = lambda p, x: jax.jvp(self.call, (p, x), (p, x))
    self.lower(f, self.params, self.x)

  def linearize(self):
    f = lambda p, x: jax.linearize(lambda x: self.call(p, x), x)[1](x)
    self.lower(f, self.params, self.x)

  def hessian(self):
    x = jax.ShapeDtypeStruct((1, 2, FEATURES), jnp.float32)
    self.lower(jax.hessian(self.loss, 1), self.params, x)

  def grad_of_grad(self):
    first = jax.grad(self.loss, 1)
    f = jax.grad(lambda p, x: (first(p, x) ** 2).sum(), 1)
    self.lower(f, self.params, self.x)

  def jvp_of_grad(self):
    f = lambda p, x: jax.jvp(lambda x: jax.grad(self.loss, 1)(p, x), (x,), (x,))
    self.lower(f, self.params, self.x)

  def checkpoint(self):
    f = jax.grad(jax.checkpoint(self.loss), (0, 1))
    self.lower(f, self.params, self.x)

  def scan_over_layers(self):
    def stack(params, x):
      level = lambda x, p: (self.call(p, x), None)
      return (jax.lax.scan(level, x, params)[0] ** 2).sum()

    self.lower(jax.grad(stack), self.two(self.params), self.x)

  def shard_map(self):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2,), ('data',), axis_types=(auto,))
    if self.platform == 'cuda':
      mesh = abstract_gpu.mesh('NVIDIA H200')
    part = lambda p, x: jax.grad(self.loss, 1)(p, x)
    f = jax.shard_map(
        part, mesh=mesh, in_specs=(P(), P('data')), out_specs=P('data')
    )
    with jax.sharding.use_abstract_mesh(mesh):
      self.lower(f, self.params, self.x)

  def export_of_known_sizes(self):
    self.export(jax.grad(self.loss, (0, 1)), self.x)

  def export_of_any_batch(self):
    (batch,) = export.symbolic_shape('b')
    x = jax.ShapeDtypeStruct((batch, TIME, FEATURES), jnp.float32)
    self.export(jax.grad(self.loss, (0, 1)), x)

  def export_of_any_length(self):
    (time,) = export.symbolic_shape('t')
    x = jax.ShapeDtypeStruct((BATCH, time, FEATURES), jnp.float32)
    self.export(jax.grad(self.loss, (0, 1)), x)

  def export_for_cpu_and_gpu(self):
    self.export(jax.grad(self.loss, (0, 1)), self.x, ('cpu', 'cuda'))

  def donation(self):
    self.lower(self.call, self.params, self.x, donate_argnums=1)

  def eval_shape(self):
    jax.eval_shape(self.call, self.params, self.x)


TRANSFORMATIONS: Mapping[str, Callable[[Programs], None]] = {
    name.replace('_', ' '): method
    for name, method in vars(Programs).items()
    if not name.startswith('_')
    and name not in ('loss', 'lower', 'two', 'export')
}


def split(make: Callable[[], nnx.Module]) -> tuple[Call, nnx.State]:
  # flax's layer holds random state as well, and needs variables of each trace.
  graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
  copy = lambda state: jax.tree.map(lambda a: a, state)
  call = lambda params, x: nnx.merge(graphdef, copy(params), copy(rest))(x)
  return call, params


def of_layers(
    names: Sequence[str], path, platform: str
) -> Iterator[tuple[str, Programs]]:
  for name in names:
    make = lambda name=name: rnnzoo.LAYERS[name](
        FEATURES, FEATURES, implementation=path, rngs=nnx.Rngs(0)
    )
    yield name, Programs(*split(make), platform)


def of_flax() -> Iterator[tuple[str, Programs]]:
  def make():
    rngs = nnx.Rngs(0)
    return nnx.RNN(nnx.GRUCell(FEATURES, FEATURES, rngs=rngs), rngs=rngs)

  yield 'GRU', Programs(*split(make), 'cpu')


def outcome(transform, programs: Programs) -> str:
  """Returns 'yes', or the first sentence of the error."""
  try:
    transform(programs)
  except Exception as error:  # Whatever JAX or flax raise.
    text = ' '.join(str(error).split())
    return text.split('. ')[0].split('; ')[0][:200]
  return 'yes'


def column(several: Iterator[tuple[str, Programs]]) -> dict[str, str]:
  """Returns for each transformation 'yes', or what failed for which layers."""
  found: dict[str, dict[str, list[str]]] = {}
  for name, programs in several:
    for transformation, transform in TRANSFORMATIONS.items():
      told = outcome(transform, programs)
      found.setdefault(transformation, {}).setdefault(told, []).append(name)
  cells = {}
  for transformation, outcomes in found.items():
    if len(outcomes) == 1:
      (cells[transformation],) = outcomes
    else:
      cells[transformation] = '; '.join(
          f'{", ".join(names)}: {told}' for told, names in outcomes.items()
      )
  return cells


def zoo_columns(
    names: Sequence[str], paths: Sequence[str] = ('scan', 'associative_scan')
) -> dict[str, dict[str, str]]:
  """Returns the columns of some layers that this jax can find."""
  columns = {path: column(of_layers(names, path, 'cpu')) for path in paths}
  if abstract_gpu.RUNS:
    mesh = abstract_gpu.one('NVIDIA H200')
    for title, path in (('pallas', 'pallas'), ('None, on a GPU', None)):
      with jax.sharding.use_abstract_mesh(mesh):
        columns[title] = column(of_layers(names, path, 'cuda'))
  return columns


class TransformationsTest(absltest.TestCase):

  @pytest.mark.slow
  def test_as_documented(self):
    wanted = json.loads(PATH.read_text(encoding='utf-8'))
    # newton_rows_test.py transforms 'associative_scan', which takes longest.
    for title, cells in zoo_columns(('IndRNN',), ('scan',)).items():
      self.assertEqual(cells, wanted[title], msg=title)


if __name__ == '__main__':
  if '--write' in sys.argv:
    found = zoo_columns(list(rnnzoo.LAYERS))
    found['flax nnx.RNN'] = column(of_flax())
    PATH.write_text(json.dumps(found, indent=2) + '\n', encoding='utf-8')
  else:
    absltest.main()
