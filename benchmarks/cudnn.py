"""Times cuDNN's LSTM and GRU, as torch calls it, beside the suite 'batches'.

  python benchmarks/cudnn.py --output=runs/cudnn.json --time_limit=40

Rows that the file has of this GPU and these versions are kept.
The shapes are those with one head, in the suite's order. x is time-major and
contiguous, in float16, as is best for cuDNN; gradients are by x and all
parameters. A sample is calls in flight of 20 ms, and a time the median of
three. Without a GPU it is torch's own loop, and says so.
"""

from collections.abc import Callable, Iterator
import dataclasses
import datetime
import itertools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

from absl import app
from absl import flags
import torch

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import program
from rnnzoo.benchmark import report
from rnnzoo.benchmark import sweeps
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', 'runs/cudnn.json', 'The JSON file.')
_TIME_LIMIT = flags.DEFINE_float(
    'time_limit', float('inf'), 'Seconds after which no layer is begun.'
)
_SHAPE = flags.DEFINE_multi_string(
    'shape', [], "batch,time,in_features,features; by default the suite's."
)

LAYERS = ('LSTM', 'GRU')
_SAMPLES = 3
_SAMPLE_S = 0.02

# Calls in flight.
_MOST = 20

Row = dict[str, Any]


def on_gpu() -> bool:
  """Returns whether torch has a GPU."""
  return torch.cuda.is_available()


def wait() -> None:
  """Waits for all calls in flight."""
  if on_gpu():
    torch.cuda.synchronize()


def seconds(call: Callable[[], Any], count: int) -> float:
  """Returns seconds of a call, of `count` that are in flight together."""
  start = time.perf_counter()
  for _ in range(count):
    call()
  wait()
  return (time.perf_counter() - start) / count


def times(call: Callable[[], Any]) -> Row:
  """Returns fields of a row: the median of samples, and their range."""
  seconds(call, 1)  # cuDNN makes its plan.
  once = seconds(call, 1)
  count = max(1, min(_MOST, round(_SAMPLE_S / once)))
  samples = [1e3 * seconds(call, count) for _ in range(_SAMPLES)]
  return {
      'median_ms': statistics.median(samples),
      'low_ms': min(samples),
      'high_ms': max(samples),
      'samples': _SAMPLES,
      'calls': count,
  }


def measure(layer: str, name: str, shape: cases.Shape) -> Iterator[Row]:
  """Yields a row for each direction of a layer."""
  dtype = torch.float16 if on_gpu() else torch.float32
  options: Any = {'device': 'cuda' if on_gpu() else 'cpu', 'dtype': dtype}
  module = getattr(torch.nn, layer)(shape.in_features, shape.features)
  module.to(**options)
  size = shape.time, shape.batch
  x = torch.randn(*size, shape.in_features, **options)
  weights = torch.randn(*size, shape.features, **options)
  inputs = [x, *module.parameters()]

  def forward():
    with torch.no_grad():
      return module(x)[0]

  def both():
    x.requires_grad_(True)
    y = module(x)[0]
    return y, torch.autograd.grad(y, inputs, weights)

  for direction, call in zip(cases.DIRECTIONS, (forward, both), strict=True):
    row = {
        'shape': name,
        'dtype': str(dtype).removeprefix('torch.'),
        'layer': layer,
        'implementation': 'cudnn' if on_gpu() else 'torch',
        'projection': 'with',
        'direction': direction,
        'status': 'ok',
        'reason': '',
    }
    try:
      row |= times(call)
    except RuntimeError as error:  # Out of memory, say.
      row |= {'status': 'failed', 'reason': str(error)[:300]}
    yield row


def new_result(shapes: dict[str, cases.Shape]) -> Row:
  """Returns a result without rows."""
  cudnn = torch.backends.cudnn.version() if on_gpu() else None
  now = datetime.datetime.now(datetime.UTC)
  return {
      'suite': 'cudnn',
      'date': now.isoformat(timespec='seconds'),
      'commit': timing.commit(),
      'device': {'kind': torch.cuda.get_device_name() if on_gpu() else 'cpu'},
      'versions': {'torch': torch.__version__, 'cudnn': cudnn},
      'shapes': {name: dataclasses.asdict(s) for name, s in shapes.items()},
      'rows': [],
  }


def resume(result: Row, path: pathlib.Path) -> None:
  """Adds the rows of an earlier run, where it is there and like this one."""
  if path.exists():
    earlier = json.loads(path.read_text(encoding='utf-8'))
    if all(earlier[fact] == result[fact] for fact in ('device', 'versions')):
      own = {key: earlier[key] for key in ('date', 'commit')}
      result['rows'] += [own | row for row in earlier['rows']]
      result['shapes'] = earlier['shapes'] | result['shapes']
      print(f'{len(earlier["rows"])} rows of {path} are kept', flush=True)


def main(argv) -> None:
  """Times all shapes, or as many as the time allows."""
  program.flags_alone(argv)
  program.writable(_OUTPUT.value)
  end = time.monotonic() + _TIME_LIMIT.value
  path = pathlib.Path(_OUTPUT.value)
  shapes = dict(map(cases.parse_shape, _SHAPE.value))
  shapes = shapes or sweeps.SUITES['batches'].shapes
  shapes = {k: v for k, v in shapes.items() if v.num_heads == 1}
  result = new_result(shapes)
  resume(result, path)
  known = {(row['layer'], row['shape']) for row in result['rows']}
  for name, layer in itertools.product(shapes, LAYERS):
    if (layer, name) in known:
      continue
    if time.monotonic() > end:
      print(f'--time_limit={_TIME_LIMIT.value:g}: some layers are left')
      break
    rows = list(measure(layer, name, shapes[name]))
    result['rows'] += rows
    report.write(result, str(path))
    for row in rows:
      print(layer, name, row['direction'], row.get('median_ms', row['reason']))
    sys.stdout.flush()
  report.write(result, str(path))


if __name__ == '__main__':
  app.run(main)
