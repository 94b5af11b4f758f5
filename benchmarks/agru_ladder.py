"""Times one A-GRU in seven ways on a CPU, from a Python loop to the layer.

  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python benchmarks/agru_ladder.py

Times are processor times, of one thread, so that other programs on the machine
change them little; alone on a core, they equal a clock's times.

Forward and backward in float32: the gradients of sum(y * w) by the parameters
and by x. All ways share weights and inputs, are checked to compute one
function, and take turns.

Dimensions: B batch, T time, I features of x, F features of h.
"""

import functools
import os
import statistics
import time
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import report
from rnnzoo.benchmark import timing

# Name: (batch, time, in_features, features).
SHAPES = {'row_mnist': (128, 28, 28, 128), 'pixel_mnist': (16, 784, 1, 128)}
REPEATS = 11
GAMMA = 2.0
# Longer Python loops take minutes, to run or to compile.
LONGEST_LOOP = 100
ONE_THREAD = '--xla_cpu_multi_thread_eigen=false'
# Float32 results of T steps in another order of summation.
TOLERANCE = 1e-3

_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/agru_ladder.json', 'The JSON file to write.'
)


def antisymmetric(w):
  """A [F, F] of W."""
  return w - w.T - GAMMA * jnp.eye(len(w))


# begin step
def gates_of(p, x):
  """V x + b of the gates r, z and d: [3, ..., F] of x [..., I]."""
  return jnp.einsum('...i,gif->g...f', x, p['V']) + p['b'].reshape(
      3, *[1] * (x.ndim - 1), -1
  )


def step(p, h, gates, a):
  """One step: h [B, F], gates [3, B, F], a [F, F]."""
  r = jax.nn.sigmoid(gates[0] + h @ p['Ur'])
  z = jax.nn.sigmoid(gates[1] + h @ p['Uz'])
  d = jnp.tanh(gates[2] + (r * h) @ a)
  return h + p['epsilon'] * z * d


# end step


def start(p, x):
  """Returns h before the first step."""
  return jnp.zeros((len(x), p['Ur'].shape[0]))


# begin loop
def python_loop(p, x, step=step):
  """All h [B, T, F], one operation after another."""
  h, ys = start(p, x), []
  for t in range(x.shape[1]):
    h = step(p, h, gates_of(p, x[:, t]), antisymmetric(p['W']))
    ys.append(h)
  return jnp.stack(ys, axis=1)


# end loop


# begin scan
def scan(p, x):
  """All h [B, T, F], in one compiled loop."""

  def body(h, x):
    h = step(p, h, gates_of(p, x), antisymmetric(p['W']))
    return h, h

  _, ys = jax.lax.scan(body, start(p, x), x.swapaxes(0, 1))
  return ys.swapaxes(0, 1)


# end scan


# begin hoisted
def scan_with_a_built_once(p, x):
  """A = W - W^T - gamma I before the loop."""
  a = antisymmetric(p['W'])

  def body(h, x):
    h = step(p, h, gates_of(p, x), a)
    return h, h

  _, ys = jax.lax.scan(body, start(p, x), x.swapaxes(0, 1))
  return ys.swapaxes(0, 1)


def scan_with_all_hoisted(p, x):
  """A, and V x + b of all steps as one product, before the loop."""
  a = antisymmetric(p['W'])
  gates = jnp.einsum('bti,gif->tgbf', x, p['V']) + p['b'][:, None]

  def body(h, gates):
    h = step(p, h, gates, a)
    return h, h

  _, ys = jax.lax.scan(body, start(p, x), gates)
  return ys.swapaxes(0, 1)


# end hoisted


def programs(shape):
  """Returns functions of (p, x) by name: (loss, gradients); and (p, x)."""
  batch, steps, in_features, features = shape
  rng = np.random.default_rng(0)
  draw = lambda *size: jnp.asarray(rng.standard_normal(size), jnp.float32)
  layer = rnnzoo.AGRU(
      in_features,
      features,
      gamma=GAMMA,
      implementation='scan',
      bias_init=nnx.initializers.normal(0.1),
      rngs=nnx.Rngs(0),
  )
  ur, uz, w = layer.recurrent_kernel[:, 0]
  p = {
      'V': layer.kernel[...],
      'b': layer.bias[...],
      'Ur': ur,
      'Uz': uz,
      'W': w,
      'epsilon': layer.cell_params['epsilon'][...],
  }
  x, weights = draw(batch, steps, in_features), draw(batch, steps, features)
  graphdef = nnx.graphdef(layer)

  def with_layer(p, x):
    kernel = jnp.stack([p['Ur'], p['Uz'], p['W']])[:, None]
    state = {'kernel': p['V'], 'bias': p['b'], 'recurrent_kernel': kernel}
    state['cell_params'] = {'epsilon': p['epsilon']}
    return nnx.merge(graphdef, state)(x)

  def gradient(forward):
    loss = lambda given: jnp.sum(forward(*given) * weights)
    return jax.value_and_grad(loss)

  compiled_step = functools.partial(python_loop, step=jax.jit(step))
  by_name = {
      'Python loop': gradient(python_loop),
      'Python loop, `jax.jit` of the step': gradient(compiled_step),
      '`jax.jit` of the Python loop': jax.jit(gradient(python_loop)),
      '`lax.scan`': jax.jit(gradient(scan)),
      '`lax.scan`, A built once': jax.jit(gradient(scan_with_a_built_once)),
      '`lax.scan`, A and V x built once': jax.jit(
          gradient(scan_with_all_hoisted)
      ),
      "`rnnzoo.AGRU`, `'scan'`": jax.jit(gradient(with_layer)),
  }
  if steps > LONGEST_LOOP:
    by_name = {k: v for k, v in by_name.items() if 'loop' not in k}
  return by_name, (p, x)


def processor_ms(calls):
  """Returns a list of milliseconds for each call, which take turns."""
  samples = [[] for _ in calls]
  for _ in range(REPEATS):
    for call, own in zip(calls, samples, strict=True):
      began = time.process_time()
      jax.block_until_ready(call())
      own.append(1e3 * (time.process_time() - began))
  return samples


def main(unused_argv: list[str]) -> int:
  """Prints and writes the times; returns the exit code."""
  if jax.default_backend() != 'cpu':
    raise app.UsageError('this times a CPU: set JAX_PLATFORMS=cpu')
  if ONE_THREAD not in os.environ.get('XLA_FLAGS', ''):
    raise app.UsageError(f'this times one thread: set XLA_FLAGS={ONE_THREAD}')
  rows: list[dict[str, Any]] = []
  for name, shape in SHAPES.items():
    sizes = zip(
        ('batch', 'time', 'in_features', 'features'), shape, strict=True
    )
    case = {'shape': name, **dict(sizes)}
    by_name, given = programs(shape)
    outputs, first = [], []
    for call in by_name.values():
      began = time.process_time()
      outputs.append(jax.block_until_ready(call(given)))
      first.append(time.process_time() - began)
    calls = [functools.partial(call, given) for call in by_name.values()]
    times = processor_ms(calls)
    for way, (_, gradients), seconds, measured in zip(
        by_name, outputs, first, times, strict=True
    ):
      errors = jax.tree.map(
          lambda a, b: float(problems.relative_error(a, b)),
          *(gradients, outputs[-1][1]),
      )
      rows.append(
          case
          | {
              'program': way,
              'ms': statistics.median(measured),
              'error': max(jax.tree.leaves(errors)),
              'status': 'ok',
              'least_ms': min(measured),
              'samples': len(measured),
              'first_call_processor_s': seconds,
          }
      )
      print(rows[-1], flush=True)
  command = f'XLA_FLAGS={ONE_THREAD} python benchmarks/agru_ladder.py'
  result = {'command': command, **timing.environment(), 'rows': rows}
  report.write(result, _OUTPUT.value)
  print(_OUTPUT.value)
  return int(any(row['error'] > TOLERANCE for row in rows))


if __name__ == '__main__':
  app.run(main)
