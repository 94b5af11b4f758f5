"""Trains stacks with one process a device; a process may be late.

  python benchmarks/processes.py --output=benchmarks/processes_2_h200.json
  python benchmarks/processes.py --stacks='2 x LSTM' --late=300
  JAX_PLATFORMS=cpu python benchmarks/processes.py --small

Starts a process for each of two GPUs. Both run the training step of the suite
'devices' (`rnnzoo.benchmark.devices`): each has a batch of its own, and the
gradients are summed. `weak_scaling` is the time of a step of one process alone,
while its peer trains alone too, over the time of both together.

With `--late` the last process sleeps so many seconds in the middle of its
steps; its peer waits for it in the sum of the gradients. Then all parameters
have to equal, bit by bit, the parameters of a run in which nobody slept.
"""

import datetime
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
from jax.experimental import multihost_utils
import numpy as np

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import command_line
from rnnzoo.benchmark import devices
from rnnzoo.benchmark import report
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing

PROCESSES = 2

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_STACKS = flags.DEFINE_list('stacks', list(devices.STACKS), 'Stacks by name.')
_LATE = flags.DEFINE_float('late', 0, 'Seconds for which the last one sleeps.')
_SMALL = flags.DEFINE_bool('small', False, 'Small sizes, to try it.')
_STEPS = flags.DEFINE_integer('steps', 30, 'Steps of a sample.', lower_bound=1)
_SAMPLES = flags.DEFINE_integer('samples', 9, 'Samples.', lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer('process_id', -1, 'Set for each process.')
_ADDRESS = flags.DEFINE_string('address', '', 'Set for each process.')


def case(stack: str) -> cases.Case:
  """Returns the case of a stack, as in the suite 'devices'."""
  name = '12x64' if stack == '4 x GRU' else '768'
  name = 'small_step' if _SMALL.value else name
  shape = suites.SUITES['devices'].shapes[name]
  return cases.Case(stack, name, shape, cases.BF16, 'with', ())


def run(step, parameters, x, steps: int, late: float = 0.0):
  """Returns the parameters after some steps, and seconds a step.

  Args:
    step: the compiled step.
    parameters: the first parameters.
    x: a batch.
    steps: the number of steps.
    late: seconds for which this process sleeps in the middle.
  """
  start = time.perf_counter()
  for i in range(steps):
    if late and i == steps // 2:
      jax.block_until_ready(parameters)
      time.sleep(late)
    parameters = step(parameters, x)
  jax.block_until_ready(parameters)
  return parameters, (time.perf_counter() - start) / steps


def digest(parameters) -> str:
  """Returns a checksum of this process's copy of all parameters."""
  leaves = jax.tree.leaves(parameters)
  copies = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in leaves]
  return hashlib.sha256(b''.join(copies)).hexdigest()


def measure(stack: str) -> list[dict[str, Any]]:
  """Returns the rows of a stack: alone, and together."""
  own = case(stack)
  step, parameters = devices.training_step(own)
  shape = own.shape
  batch = shape.batch * jax.process_count()
  size = (batch, shape.time, shape.in_features)
  x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
  here = jax.local_devices()[0]
  for_parameters, for_x = devices.shardings('Explicit')
  places = {
      'alone': (here, here, x[: shape.batch]),
      'together': (for_parameters, for_x, x),
  }
  calls = {}
  for name, (for_parameters, for_x, x) in places.items():
    arguments = (
        jax.device_put(parameters, for_parameters),
        jax.device_put(x, for_x),
    )
    program = jax.jit(step).lower(*arguments).compile()
    calls[name] = functools.partial(run, program, *arguments)
    calls[name](2)
  multihost_utils.sync_global_devices(stack)
  samples = [
      {name: call(_STEPS.value)[1] for name, call in calls.items()}
      for _ in range(_SAMPLES.value)
  ]
  median = lambda name: float(np.median([row[name] for row in samples]))
  alone, together = (
      own.row(name, devices.STEP)
      | {
          'processes': jax.process_count(),
          'steps': _STEPS.value,
          'ms': 1e3 * median(name),
      }
      for name in calls
  )
  together['weak_scaling'] = alone['ms'] / together['ms']
  if _LATE.value:
    punctual, _ = calls['together'](_STEPS.value)
    last = jax.process_index() == jax.process_count() - 1
    late, seconds = calls['together'](
        _STEPS.value, _LATE.value if last else 0.0
    )
    together |= {
        'late_s': _LATE.value,
        'seconds_with_late': _STEPS.value * seconds,
        'same_bits': digest(punctual) == digest(late),
    }
  return [alone, together]


def work() -> None:
  """One process: measures all stacks, and prints a row a line."""
  jax.distributed.initialize(_ADDRESS.value, PROCESSES, _PROCESS_ID.value)
  for stack in _STACKS.value:
    for row in measure(stack):
      if jax.process_index() == 0 or not row.get('same_bits', True):
        row['device'] = jax.devices()[0].device_kind
        print(json.dumps(row), flush=True)
  multihost_utils.sync_global_devices('end')


def main(argv) -> None:
  """Starts a process for each device, and writes the first one's results."""
  command_line.flags_alone(argv)
  if _PROCESS_ID.value >= 0:
    work()
    return
  command_line.writable(_OUTPUT.value)
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  workers = []
  for i in range(PROCESSES):
    own = [f'--process_id={i}', f'--address={address}']
    workers.append(
        subprocess.Popen(
            [sys.executable, *sys.argv, *own],
            env=os.environ | {'CUDA_VISIBLE_DEVICES': str(i)},
            stdout=None if i else subprocess.PIPE,
            text=True,
        )
    )
  rows = []
  for line in workers[0].stdout:
    print(line, end='', flush=True)
    if line.startswith('{'):
      rows.append(json.loads(line))
  codes = [worker.wait() for worker in workers]
  if any(codes):
    sys.exit(f'processes ended with {codes}')
  if _OUTPUT.value:
    result = {
        'command': 'python benchmarks/processes.py',
        # This process leaves the devices to its children.
        'date': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
        'commit': timing.commit(),
        'device': {'kind': rows[0]['device'], 'count': PROCESSES},
        'versions': {'jax': jax.__version__},
        'rows': rows,
    }
    report.write(result, _OUTPUT.value)


if __name__ == '__main__':
  app.run(main)
