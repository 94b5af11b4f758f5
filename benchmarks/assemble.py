"""Compiles kernels for cards that are not here: assembled.json.

No GPU is needed: XLA's compiler for CUDA, Mosaic and ptxas run on any machine
with jax's plugin, for a device that is described. Nothing runs.

  uv run --extra cuda13 python -m benchmarks.assemble
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
DUMP = tempfile.mkdtemp()
os.environ |= {'MOSAIC_GPU_DUMP_PTXAS': '1', 'MOSAIC_GPU_DUMP_TO': DUMP}

# pylint: disable=wrong-import-position
from flax import nnx  # noqa: E402
import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks import sources  # noqa: E402
from rnnzoo import LAYERS  # noqa: E402
from rnnzoo.benchmark import timing  # noqa: E402

# Compute capability: multiprocessors, KiB of shared memory of one and of a CTA.
DEVICES = {
    '8.0': (108, 164, 163),  # A100
    '8.6': (84, 100, 99),  # RTX A6000
    '8.9': (58, 100, 99),  # L4
    '9.0': (132, 228, 227),  # H200
    '12.0': (170, 100, 99),  # RTX 5090
}

# Family: layer, batch x time x features, dtype, options.
CASES = {
    'dense, a head in one CTA': """
      LSTM 3x13x64 float32
      LSTM 512x13x64 bfloat16
      GRU 64x13x768 bfloat16 num_heads=12
      SLSTM 3x13x48 bfloat16 num_heads=3
      AGRU 16x13x128 bfloat16""",
    'dense, a head over CTAs': """
      LSTM 16x13x256 bfloat16
      GRU 16x13x512 float32
      GRU 16x13x1024 bfloat16""",
    'diagonal': """
      IndRNN 2x40x130 float32
      IndRNN 64x40x64 bfloat16""",
    'linear': """
      MinGRU 2x40x256 float32
      MinGRU 2x4096x130 bfloat16
      MinLSTM 1x4096x64 float16
      LRU 2x4096x64 bfloat16
      HGRN 2x4096x64 float32
      RGLRU 2x300x64 bfloat16
      QRNN 2x300x64 bfloat16""",
}

_DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {core}
  shared_memory_per_block_optin: {block} threads_per_core_limit: 1536
  core_count: {count} fpus_per_core: 128 clock_rate_ghz: 1.8
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 768096000000
  l2_cache_size: 6291456 device_memory_size: 51041271808
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {features}
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  dnn_version: "8.9.4" thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
device_description_str: "compute capability {major}.{minor}"
"""


def device(capability: str) -> jax.Device:
  """Returns a device of a compute capability that is not here."""
  count, core, block = DEVICES[capability]
  major, minor = capability.split('.')
  text = _DEVICE.format(
      count=count,
      core=1024 * core,
      block=1024 * block,
      major=major,
      minor=minor,
      features='NONE' if major == '8' else 'ACCELERATED_FEATURES',
  )
  topology = topologies.get_topology_desc(
      'x', platform='cuda', target_config=text, topology='1x1x1'
  )
  return topology.devices[0]


def compile_for(card: jax.Device, case: str) -> None:
  """Compiles a layer's gradient, by kernels alone."""
  name, shape, dtype, *options = case.split()
  batch, time, features = map(int, shape.split('x'))
  given = {k: int(v) for k, v in (option.split('=') for option in options)}
  layer = nnx.eval_shape(
      lambda: LAYERS[name](
          16, features, rngs=nnx.Rngs(0), implementation='pallas', **given
      )
  )
  graphdef, state = nnx.split(layer)

  def loss(state, x, reset):
    y = nnx.merge(graphdef, state)(x, reset=reset)
    return jnp.sum(y.astype(jnp.float32))

  x = jax.ShapeDtypeStruct((batch, time, 16), dtype)
  arguments = state, x, jax.ShapeDtypeStruct((batch, time), bool)
  sharding = jax.sharding.SingleDeviceSharding(card)
  types = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      arguments,
  )
  with jax.default_device(card):
    jax.jit(jax.grad(loss, (0, 1))).trace(*types).lower().compile()


def rows_of(capability: str, family: str, case: str) -> list[dict]:
  """Returns a row for each kernel of a layer's gradient."""
  for path in pathlib.Path(DUMP).iterdir():
    path.unlink()
  row = {'capability': capability, 'family': family, 'layer': case}
  try:
    compile_for(device(capability), case)
  except Exception as error:  # pylint: disable=broad-exception-caught
    refused = isinstance(error, NotImplementedError)
    status = 'refused' if refused else 'failed'
    return [row | {'status': status, 'reason': str(error)[:200]}]
  found = []
  for path in sorted(pathlib.Path(DUMP).glob('*.ptxas')):
    text = path.read_text('utf-8')
    of = lambda pattern, text=text: int(re.search(pattern, text)[1])
    found.append(
        row
        | {
            'program': re.sub(r'_\d+$', '', path.stem),
            'registers': of(r'Used (\d+) registers'),
            'spill_bytes': of(r'(\d+) bytes spill stores'),
            'status': 'ok',
        }
    )
  return found


def of(capability: str) -> list[dict]:
  """Returns the rows of a capability, from a process of its own.

  In one process ptxas takes all devices for the first one.
  """
  command = [sys.executable, '-m', 'benchmarks.assemble', capability]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
  return [json.loads(x) for x in done.stdout.splitlines() if x[0] == '{']


def main() -> None:
  """Compiles all cases for all devices, or prints the rows of one."""
  for capability in sys.argv[1:]:
    for family, cases in CASES.items():
      for case in map(str.strip, cases.strip().splitlines()):
        for row in rows_of(capability, family, case):
          print(json.dumps(row), flush=True)
  if sys.argv[1:]:
    return
  data = {
      'about': 'Kernels compiled, and not run, for cards that were not there.',
      'command': 'python -m benchmarks.assemble',
      'date': datetime.date.today().isoformat(),
      'commit': timing.commit(),
      'sources': sources.digest(),
      'device': {'kind': 'compiled, not run'},
      'versions': {'jax': jax.__version__},
      'rows': [row for capability in DEVICES for row in of(capability)],
  }
  path = pathlib.Path(__file__).parent / 'assembled.json'
  path.write_text(json.dumps(data, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
  main()
