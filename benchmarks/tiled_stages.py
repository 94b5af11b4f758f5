"""Times kernels in tiles by slots of their ring buffers, and with W x in them.

  python benchmarks/tiled_stages.py --output=runs/tiled_stages.json
  python benchmarks/tiled_stages.py --stages=6 --projected=no,yes

A layer with its projection in bfloat16, time-major, forward and with its
gradient, beside the error of 'scan' in bfloat16; both errors are from 'scan' in
float32. R streams from device memory, also where it would be kept on the chip,
and shapes below the size from which tiles pay are measured all the same. Where
shared memory holds no more slots the kernels are those of a smaller number, and
are not measured again. Programs of the next shape are compiled in other threads
meanwhile. Without a GPU the kernels are only lowered, for an H200.
"""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import pathlib
import time
from typing import Any
from unittest import mock

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels.tiled import choice
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import products
from pallas_kernels.tiled import tuning
import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')
_STAGES = flags.DEFINE_list(
    'stages', ['6', '8', '10', '12', '14'], 'The most slots, one after another.'
)
_PROJECTED = flags.DEFINE_list(
    'projected',
    ['rule'],
    "Whether the forward kernel multiplies W x, one after another: 'yes'; 'no';"
    " or 'rule', as the library does.",
)
_TILES = flags.DEFINE_list(
    'tiles',
    ['rule'],
    'Warpgroups and groups of units of the forward kernel, as 3x2, one after'
    " another, where a layer can have them; 'rule' is the library's choice.",
)
_SHAPES = flags.DEFINE_multi_string(
    'shape',
    None,
    'Layer, batch, time and features, as LSTM,2048,64,768; and behind them the'
    ' features of x, if these are others.',
)
_THREADS = flags.DEFINE_integer(
    'compile_threads', 8, 'Threads that compile.', lower_bound=1
)
_TIME_LIMIT = flags.DEFINE_float(
    'time_limit', None, 'Seconds after which no further row is begun.'
)

# Layer, batch, time, features, and those of x if these are others.
SHAPES = (
    ('LSTM', 128, 1024, 768),
    ('LSTM', 256, 256, 768),
    ('GRU', 2048, 64, 768),
    ('LSTM', 2048, 64, 768),
    ('LSTM', 4096, 64, 512),
    ('LSTM', 4096, 64, 256),
    ('LSTM', 1024, 64, 512),
    ('LSTM', 512, 64, 768),
    ('LSTM', 512, 64, 1024),
)
DIRECTIONS = ('forward', 'forward+backward')
GATES = {'LSTM': 4, 'GRU': 3, 'Elman': 1}
ROWS_TO_PROJECT = {'no': 2**31, 'yes': 0}

# Of a CTA on Hopper.
SHARED_BYTES = 227 * 1024


@dataclasses.dataclass(eq=False)
class Program:
  """A program, its row, and its compilation in another thread."""

  row: dict[str, Any]
  finish: Any
  compiling: futures.Future[timing.Program] | None = None


@contextlib.contextmanager
def variant(
    count: int, projected: str = 'rule', tile: str = 'rule'
) -> Iterator[None]:
  """Sets how many slots kernels have, whether they multiply W x, and a tile."""
  rows = ROWS_TO_PROJECT.get(projected, limits.ROWS_TO_PROJECT)
  every = tuning._configs

  def with_tile(size, gates, target):
    for config in every(size, gates, target):
      own = f'{config.warpgroups}x{config.groups}'
      # An adjoint, and Elman, have the columns of one gate.
      if tile in ('rule', own) or gates == 1:
        yield config

  with (
      mock.patch.object(tuning, '_MOST_STAGES', count),
      mock.patch.object(tuning, '_configs', with_tile),
      mock.patch.object(limits, 'ROWS_TO_PROJECT', rows),
      mock.patch.object(choice, 'WORK', 0),
      mock.patch.object(tuning, 'choose_resident', lambda **_: None),
      mock.patch.object(tuning, 'choose_team', lambda **_: None),
  ):
    yield


def configs(shape, direction: str) -> tuple[cut.Config, ...]:
  """Returns how the kernels of a program are cut, the adjoint last."""
  layer, batch, _, size, *_ = shape
  facts: dict[str, Any] = {'batch': batch, 'heads': 1, 'size': size}
  facts |= {'recurrent': GATES[layer], 'target': devices.current()}
  depth = shape[-1] if batch >= limits.ROWS_TO_PROJECT else 0
  cuts = [tuning.choose(adjoint=False, depth=depth, **facts)]
  if direction == DIRECTIONS[1]:
    cuts.append(tuning.choose(adjoint=True, **facts))
  return tuple(cuts)


def shared_bytes(layer: str, config: cut.Config, adjoint: bool) -> int:
  """Returns the bytes of a CTA's buffers."""
  columns = config.units * (1 if adjoint else GATES[layer])
  buffers = products.Buffers.types(config, columns, jnp.bfloat16)
  slots = [buffers[name] for name in ('operand', 'matrix')]
  elements = sum(math.prod(slot.shape) for slot in slots)
  # Each slot has two mbarriers of 8 bytes.
  return 2 * elements + 16 * config.stages


def make(shape, **options: Any) -> Any:
  """Returns the layer of a shape."""
  layer, _, _, features, *_ = shape
  new = rnnzoo.LAYERS[layer]
  return new(shape[-1], features, rngs=nnx.Rngs(0), **options)


def function(shape, path: str, dtype: str, direction: str):
  """Returns a function of a layer's state, x and cotangents, and the types."""
  options = {'dtype': jnp.dtype(dtype), 'implementation': path}
  # Parameters are drawn once a shape: caches of compilations are cleared.
  abstract = nnx.eval_shape(lambda: make(shape, **options))
  graphdef, state = nnx.split(abstract)

  def run(state, x, weights):
    call = lambda state, x: nnx.merge(graphdef, state)(x, time_major=True)
    if direction == DIRECTIONS[0]:
      return call(state, x), ()
    y, pull = jax.vjp(call, state, x)
    return y, pull(weights.astype(y.dtype))

  return run, state


def types(shape) -> tuple[Any, ...]:
  """Returns the types of x and of the cotangents."""
  _, batch, steps, features, *_ = shape
  sizes = shape[-1], features
  return tuple(
      jax.ShapeDtypeStruct((steps, batch, size), jnp.bfloat16) for size in sizes
  )


@contextlib.contextmanager
def gpu() -> Iterator[None]:
  """Describes an H200 where there is no GPU."""
  if jax.default_backend() == 'gpu':
    yield
    return
  device = jax.sharding.AbstractDevice(
      device_kind='NVIDIA H200', num_cores=132, platform='cuda'
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def lower(shape, path: str, dtype: str, direction: str) -> Any:
  """Traces a program for a GPU; returns its compilation.

  Without a GPU it returns the number of kernels.
  """
  run, state = function(shape, path, dtype, direction)
  # A trace with another number of slots would be taken again.
  jax.clear_caches()
  if jax.default_backend() == 'gpu':
    return timing.lower(run, state, *types(shape))
  traced = jax.jit(run).trace(state, *types(shape))
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  return text.count('custom_call @mosaic_gpu')


def programs(shape) -> Iterator[Program]:
  """Traces all programs of a shape that differ."""
  layer, batch, steps, features, *_ = shape
  facts = {'layer': layer, 'batch': batch, 'time': steps, 'features': features}
  facts['in_features'] = shape[-1]
  for direction in DIRECTIONS:
    if jax.default_backend() == 'gpu':
      row = facts | {'path': 'scan', 'direction': direction}
      yield Program(row, lower(shape, 'scan', 'bfloat16', direction))
    seen = set()
    counts = map(int, _STAGES.value)
    for count, projected, tile in itertools.product(
        counts, _PROJECTED.value, _TILES.value
    ):
      with variant(count, projected, tile), gpu():
        try:
          taken = configs(shape, direction)
        except NotImplementedError:
          continue  # The tile is none of this layer.
        if (taken, projected) in seen:
          continue
        seen.add((taken, projected))
        sizes = [
            shared_bytes(layer, config, adjoint=bool(i))
            for i, config in enumerate(taken)
        ]
        if max(sizes) > SHARED_BYTES:
          raise ValueError(f'{taken} take {max(sizes)} bytes of shared memory')
        finish = lower(shape, 'pallas', 'bfloat16', direction)
      row = facts | {
          'path': 'pallas',
          'direction': direction,
          'most_stages': count,
          'projected': projected,
          'tile': tile,
          'stages': [config.stages for config in taken],
          'configs': [dataclasses.asdict(config) for config in taken],
          'shared_bytes': sizes,
      }
      yield Program(row, finish)


def errors(got, exact) -> dict[str, float]:
  """Returns relative errors of y and of each gradient."""
  norm = jnp.linalg.norm
  wide = lambda a: a.astype(jnp.float32).ravel()
  found = {}
  leaves = jax.tree_util.tree_leaves_with_path(exact)
  by_path = dict(jax.tree_util.tree_leaves_with_path(got))
  for path, value in leaves:
    if path in by_path:
      name = jax.tree_util.keystr(path, simple=True, separator='.')
      error = norm(wide(by_path[path]) - wide(value)) / norm(wide(value))
      found[name] = float(error)
  return found


def measure(own: list[Program], shape, reference) -> Iterator[dict[str, Any]]:
  """Yields the rows of a shape, each checked and timed."""
  draw = lambda seed, like: jax.random.normal(
      jax.random.key(seed), like.shape, like.dtype
  )
  arrays = [draw(i, like) for i, like in enumerate(types(shape))]
  state = nnx.state(make(shape))
  exact = reference.result().call(state, *arrays)
  for program in own:
    row = program.row
    try:
      compiled = program.compiling.result()
      call = functools.partial(compiled.call, state, *arrays)
      found = errors(call(), exact)
      (times,) = timing.interleave([call], 15)
      yield row | {
          'status': 'ok',
          'errors': found,
          'error': max(found.values()),
          'compile_s': compiled.compile_s,
          'temp_bytes': compiled.memory['temp_bytes'],
          **dataclasses.asdict(times),
      }
    except Exception as error:  # A kernel that does not fit, say.
      yield row | {'status': 'failed', 'reason': repr(error)[:500]}


def line(row: dict[str, Any]) -> str:
  """Returns a row as text."""
  size = f'{row["batch"]}x{row["time"]}x{row["features"]}'
  if row['in_features'] != row['features']:
    size += f' of {row["in_features"]}'
  parts = f'{row["layer"]:5} {size:12} {row["direction"]:17} {row["path"]:7}'
  if 'stages' in row:
    tile = '{warpgroups}x{groups}'.format(**row['configs'][0])
    parts += f'W x: {row["projected"]:4} {tile} most {row["most_stages"]:2},'
    parts += f' slots {row["stages"]},'
    parts += f' {max(row["shared_bytes"]) / 1024:.0f} KiB'
  if 'median_ms' in row:
    parts += f' {row["median_ms"]:8.3f} ms, error {row["error"]:.1e}'
  return f'{parts} {row.get("reason", "")}'.rstrip()


def main(argv) -> None:
  """Lowers all programs, and on a GPU measures them."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  start = time.perf_counter()
  shapes: tuple[Any, ...] = SHAPES
  if _SHAPES.value:
    words = [shape.split(',') for shape in _SHAPES.value]
    shapes = tuple((layer, *map(int, sizes)) for layer, *sizes in words)
  if jax.default_backend() != 'gpu':
    for shape in shapes:
      for program in programs(shape):
        print(f'{line(program.row)}: {program.finish} kernels', flush=True)
    return
  result: dict[str, Any] = {
      'device': jax.devices()[0].device_kind,
      'jax': jax.__version__,
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': _COMMIT.value,
      'rows': [],
  }
  # The main thread traces: what it patches, all threads see.
  with futures.ThreadPoolExecutor(_THREADS.value) as pool:

    def submit(shape):
      with jax.default_matmul_precision('highest'):
        reference = lower(shape, 'scan', 'float32', DIRECTIONS[1])
      reference = pool.submit(reference)
      own = list(programs(shape))
      for program in own:
        program.compiling = pool.submit(program.finish)
      return own, shape, reference

    following = submit(shapes[0])
    for index in range(len(shapes)):
      current = following
      if index + 1 < len(shapes):
        following = submit(shapes[index + 1])
      for row in measure(*current):
        print(line(row), flush=True)
        result['rows'].append(row)
        if _OUTPUT.value:
          text = json.dumps(result, indent=2) + '\n'
          pathlib.Path(_OUTPUT.value).write_text(text, encoding='utf-8')
        used = time.perf_counter() - start
        if _TIME_LIMIT.value and used > _TIME_LIMIT.value:
          print(f'ended after {used:.0f} s, as --time_limit asks')
          pool.shutdown(wait=False, cancel_futures=True)
          return


if __name__ == '__main__':
  app.run(main)
