"""How far data parallelism carries: steps of three models on up to 1,024 GPUs.

The time of a step on one device and on two, the bytes of its gradients and the
number of its sums are measured (`devices_2_h200.json`), and so are steps on
four, which are compared (`devices_4_h200.json`). All else is arithmetic on the
assumptions below. A step on n devices, each with a batch of its own, is

    step(n) = step(1) + sums * overhead + reduction(gradient bytes, n)

without any overlap of the sums with the backward pass. `overhead` is fitted to
the steps on two devices. Bytes and latency of a reduction of G bytes by a ring
and by a tree (Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective
communication operations in MPICH"; Sanders, Speck and Traff, 2009, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan"):

    ring(G, n) = 2 (n - 1) / n G / bandwidth + 2 (n - 1) latency
    tree(G, n) = 2 G / bandwidth + 2 log2(n) latency

Above 8 GPUs, a host's 8 GPUs reduce by a ring over NVLink first, and then each
GPU sums its eighth of the gradients over all hosts.
"""

import dataclasses
import math

from benchmarks import pivots

COUNTS = (2, 8, 16, 64, 256, 1024)
HOST = 8

# A step pays where it has this share of one device's throughput a device.
PAYS = 0.8


@dataclasses.dataclass(frozen=True)
class Link:
  """Assumptions about a link; no measurement of ours.

  Attributes:
    gb_per_s: bandwidth of a GPU in one direction.
    latency_us: latency of one message.
  """

  gb_per_s: float
  latency_us: float


# NVLink 4 has 450 GB/s in each direction; a network card of 400 Gb/s a GPU has
# 50. Four fifths of either are taken to be usable.
NVLINK = Link(gb_per_s=360, latency_us=2)
NETWORK = Link(gb_per_s=40, latency_us=10)


def ring_ms(size: float, n: int, link: Link) -> float:
  """Returns milliseconds of a sum of `size` bytes over n devices."""
  bytes_ms = 2 * (n - 1) / n * size / link.gb_per_s / 1e6
  return bytes_ms + 2 * (n - 1) * link.latency_us / 1e3


def tree_ms(size: float, n: int, link: Link) -> float:
  """`ring_ms` by a pair of trees."""
  if n == 1:
    return 0.0
  bytes_ms = 2 * size / link.gb_per_s / 1e6
  return bytes_ms + 2 * math.log2(n) * link.latency_us / 1e3


@dataclasses.dataclass(frozen=True)
class Model:
  """A training step as it was measured.

  Attributes:
    name: the layers' name.
    one_ms: the time on one device.
    many_ms: the time on several devices, each with a batch of its own, on Auto
      axes, where layers of a stack run in turn, as on one device of a host.
    gradient_bytes: bytes of gradients that all devices sum.
    sums: the number of sums that XLA makes of the gradients.
  """

  name: str
  one_ms: float
  many_ms: float
  gradient_bytes: int
  sums: int


def models(count: int = 2) -> list[Model]:
  """Returns the models that were measured on a number of devices."""
  rows = [
      row
      for row in pivots.timed(f'devices_{count}_h200')
      if row.get('param_dtype', 'float32') == 'float32'
  ]
  found = []
  index = 'layer', 'batch', 'time', 'in_features'
  for item in pivots.pivot(rows, index, ['program']):
    one = item['own'].pop('one device')
    many = item['own']['Auto']
    # Arguments are the parameters and x, both float32.
    x_bytes = 4 * item['batch'] * item['time'] * item['in_features']
    size = int(one['argument_mib'] * 2**20) - x_bytes
    sums = many['collectives']['all-reduce']
    found.append(Model(item['layer'], one['ms'], many['ms'], size, sums))
  return found


def overhead_ms(measured: list[Model]) -> float:
  """Returns the overhead of a sum: least squares over the measured models."""
  rest = [
      m.many_ms - m.one_ms - ring_ms(m.gradient_bytes, 2, NVLINK)
      for m in measured
  ]
  products = sum(r * m.sums for r, m in zip(rest, measured, strict=True))
  return products / sum(m.sums**2 for m in measured)


def step_ms(model: Model, n: int, overhead: float, by) -> float:
  """Returns the milliseconds of a step on n devices.

  Args:
    model: a step as measured on one device.
    n: number of devices.
    overhead: milliseconds of a sum besides its bytes and messages.
    by: `ring_ms` or `tree_ms`, between hosts.
  """
  size = model.gradient_bytes / model.sums
  one_sum = ring_ms(size, min(n, HOST), NVLINK) + overhead
  if n > HOST:
    one_sum += by(size / HOST, n // HOST, NETWORK)
  return model.one_ms + model.sums * one_sum


def table() -> str:
  """Returns the table of docs/benchmarks/planning.md."""
  measured = models()
  overhead = overhead_ms(measured)
  items = []
  for model in measured:
    for name, by in (('ring', ring_ms), ('tree', tree_ms)):
      steps = {n: step_ms(model, n, overhead, by) for n in COUNTS}
      paying = [n for n, ms in steps.items() if model.one_ms >= PAYS * ms]
      cells = [f'{ms:.2f} ({model.one_ms / ms:.2f})' for ms in steps.values()]
      items.append(
          {'model': model, 'mb': model.gradient_bytes / 1e6, 'by': name}
          | {'cells': ' | '.join(cells), 'most': max(paying, default=1)}
      )
  lines = pivots.made(
      'layers | gradients, MB | sums | one GPU, ms | between hosts |'
      f' {" | ".join(map(str, COUNTS))} | pays up to',
      '{model.name} | {mb:.1f} | {model.sums} | {model.one_ms:.2f} | {by} |'
      ' {cells} | {most:,}',
      items,
  )
  checks = [
      ', '.join(
          f'{m.name} {m.many_ms:.2f} measured,'
          f' {step_ms(m, count, overhead, ring_ms):.2f} by the formula'
          for m in models(count)
      )
      for count in (2, 4)
  ]
  lines += [
      '',
      'Milliseconds a training step on this many GPUs (in brackets: throughput'
      ' a GPU over one GPU alone). Assumed: NVLink'
      f' {NVLINK.gb_per_s:g} GB/s a direction and {NVLINK.latency_us:g} us a'
      f' message, a network of {NETWORK.gb_per_s:g} GB/s a GPU and'
      f' {NETWORK.latency_us:g} us a message, {HOST} GPUs a host. Fitted to two'
      f' GPUs: {overhead:.3f} ms for each sum. Two GPUs, ms: {checks[0]}.'
      f' Four GPUs, ms: {checks[1]}.',
  ]
  return '\n'.join(lines)


if __name__ == '__main__':
  print(table())
