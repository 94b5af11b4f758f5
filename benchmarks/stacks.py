"""Times layers in depth that run at the same time, and one after the other.

  python benchmarks/stacks.py

Forward and with the gradients by x and all parameters, in bfloat16,
batch-major, from zero carries. Outputs of both ways are compared. Where torch
is installed, its LSTM and GRU, which are cuDNN's, run the same sizes with one
head, in float16, time-major.
"""

from concurrent import futures
import json
import pathlib
import time
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_REPEATS = flags.DEFINE_integer(
    'repeats', 7, 'Measurements of each program.', lower_bound=1
)
_THREADS = flags.DEFINE_integer(
    'threads', 1, 'Programs compiled at once.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/stacks_h200.json', 'The JSON file.'
)

# Layer, batch, time, in_features, features, heads, layers.
_CASES = (
    ('LSTM', 16, 1024, 768, 768, 12, 4),
    ('GRU', 16, 1024, 768, 768, 12, 4),
    ('LSTM', 32, 512, 128, 128, 1, 2),
    ('LSTM', 32, 512, 128, 128, 1, 4),
    ('LSTM', 64, 784, 28, 128, 1, 2),
    ('LSTM', 16, 2048, 256, 256, 1, 2),
    ('LSTM', 16, 1024, 512, 512, 1, 2),
)
_WAYS = {'in turn': False, 'at once': True}
_DIRECTIONS = {'forward': False, 'forward+backward': True}


def functions(case: Any, at_once: bool) -> tuple[Any, Any, tuple[Any, ...]]:
  """Returns a stack as a function, its gradient, and the arguments of both."""
  layer, batch, steps, in_features, features, heads, depth = case
  path = rnnzoo.Pallas(wavefront=at_once)
  stack = rnnzoo.Stack(
      rnnzoo.LAYERS[layer],
      in_features,
      features,
      num_layers=depth,
      num_heads=heads,
      dtype=jnp.bfloat16,
      implementation=(path, 'scan'),
      rngs=nnx.Rngs(0),
  )
  graphdef, state = nnx.split(stack)
  draw = lambda i, size: jax.random.normal(
      jax.random.key(i), (batch, steps, size), jnp.bfloat16
  )
  x, weights = draw(1, in_features), draw(2, features)

  def forward(state, x, weights):
    del weights
    return nnx.merge(graphdef, state)(x)

  def both(state, x, weights):
    run = lambda state, x: forward(state, x, weights)
    y, pull = jax.vjp(run, state, x)
    return y, pull(weights)

  return forward, both, (state, x, weights)


def build(case: Any, direction: str, way: str) -> tuple[Any, dict[str, Any]]:
  """Returns a call of a program, and how long it took to compile."""
  forward, both, arguments = functions(case, _WAYS[way])
  function = both if _DIRECTIONS[direction] else forward
  start = time.perf_counter()
  program = jax.jit(function).lower(*arguments).compile()
  facts = {
      'compile_s': round(time.perf_counter() - start, 2),
      'temp_mb': round(program.memory_analysis().temp_size_in_bytes / 1e6),
  }
  return lambda: program(*arguments), facts


def by_cudnn(case: Any) -> dict[str, float]:
  """Returns milliseconds of torch's layers of these sizes, or nothing."""
  try:
    import torch
  except ImportError:
    return {}
  layer, batch, steps, in_features, features, _, depth = case
  if layer not in ('LSTM', 'GRU') or not torch.cuda.is_available():
    return {}
  options: Any = {'device': 'cuda', 'dtype': torch.float16}
  stack = getattr(torch.nn, layer)(
      in_features, features, num_layers=depth, **options
  )
  x = torch.randn(steps, batch, in_features, requires_grad=True, **options)
  weights = torch.randn(steps, batch, features, **options)

  def forward():
    with torch.no_grad():
      stack(x)

  def both():
    y, _ = stack(x)
    torch.autograd.grad(y, (x, *stack.parameters()), weights)

  found = {}
  for direction, call in zip(_DIRECTIONS, (forward, both), strict=True):
    samples = []
    for _ in range(1 + _REPEATS.value):
      torch.cuda.synchronize()
      start = time.perf_counter()
      for _ in range(10):
        call()
      torch.cuda.synchronize()
      samples.append(1e2 * (time.perf_counter() - start))
    found[direction] = sorted(samples[1:])[_REPEATS.value // 2]
  return found


@jax.jit
def difference(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the norm of a difference beside that of y."""
  x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  return jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.sum(y**2))


def main(argv: list[str]) -> None:
  """Writes the JSON file, and prints a line for each row."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  if jax.default_backend() != 'gpu':
    raise app.UsageError('Layers run at the same time on a GPU; none is here.')
  keys = [(c, d, w) for c in _CASES for d in _DIRECTIONS for w in _WAYS]
  with futures.ThreadPoolExecutor(_THREADS.value) as pool:
    programs = pool.map(lambda key: build(*key), keys)
    built = dict(zip(keys, programs, strict=True))
  rows: list[dict[str, Any]] = []
  for case in _CASES:
    peer = by_cudnn(case)
    for direction in _DIRECTIONS:
      ways = [built[case, direction, way] for way in _WAYS]
      calls = [call for call, _ in ways]
      alone, many = (jax.tree.leaves(call()) for call in calls)
      row = {
          'layer': case[0],
          'shape': case[1:],
          'direction': direction,
          'differences': max(
              float(difference(x, y)) for x, y in zip(many, alone, strict=True)
          ),
      }
      del alone, many
      found = timing.interleave(calls, _REPEATS.value)
      for way, timed, (_, facts) in zip(_WAYS, found, ways, strict=True):
        row[way] = {'ms': round(timed.median_ms, 4), **facts}
      if peer:
        row['cudnn_ms'] = round(peer[direction], 4)
      rows.append(row)
      print(json.dumps(row), flush=True)
  result = {
      'command': 'python benchmarks/stacks.py',
      **timing.environment(),
      'rows': rows,
  }
  text = json.dumps(result, indent=2) + '\n'
  pathlib.Path(_OUTPUT.value).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
