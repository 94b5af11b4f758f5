"""The suites of `python -m rnnzoo.benchmark`: what each can be asked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import rnnzoo
from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import dense as benchmark_dense
from rnnzoo.benchmark import linear as benchmark_linear
from rnnzoo.benchmark import report
from rnnzoo.benchmark import rotation
from rnnzoo.benchmark import steps as benchmark_steps
from rnnzoo.benchmark import timing as benchmark_timing
from rnnzoo.engines import selection


def measure(
    cases: Iterable[benchmark_cases.Case], repeats: int
) -> list[dict[str, Any]]:
  """Checks every case, then times those that are right, interleaved.

  Args:
    cases: what to measure.
    repeats: number of samples of each.

  Returns:
    One row for each case: what it is, `status` and `reason`, and as far as it
    got `error`, `tolerance`, `compile_s`, XLA's view of memory, and times.
  """
  rows, right, calls = [], [], []
  for case in cases:
    row = {label: getattr(case, label) for label in report.LABELS}
    row |= {'status': 'ok', 'reason': ''}
    rows.append(row)
    try:
      program = benchmark_timing.build(case.function, *case.arguments)
      got = jax.tree.map(np.asarray, program.call(*case.arguments))
      error = benchmark_cases.relative_error(got, case.expected())
    except NotImplementedError as exception:
      row |= {'status': 'cannot', 'reason': str(exception)}
      continue
    except jax.errors.JaxRuntimeError as exception:  # Out of memory, say.
      row |= {'status': 'failed', 'reason': str(exception)}
      continue
    row |= {
        'error': error,
        'tolerance': case.tolerance,
        'compile_s': program.compile_s,
        **program.memory,
        'bytes_moved': case.bytes_moved,
    }
    if error <= case.tolerance:
      right.append(row)
      calls.append(functools.partial(program.call, *case.arguments))
    else:  # NaN too.
      row |= {
          'status': 'failed',
          'reason': (
              f'relative error {error:.1e} from the float64 scan is above'
              f' {case.tolerance:.1e}'
          ),
      }
  times = benchmark_timing.interleave(calls, repeats)
  for row, measured in zip(right, times, strict=True):
    row |= dataclasses.asdict(measured)
    if row['bytes_moved'] is not None:
      row['gb_per_s'] = row['bytes_moved'] / measured.median_ms / 1e6
  return rows


@dataclasses.dataclass(frozen=True)
class Suite:
  """What can be asked of a suite, and how it answers.

  Attributes:
    layers: names of what it measures.
    shapes: by name.
    default_shapes: names of those measured if none are named.
    dtypes: maps a shape's name to the dtypes measured if none are named.
    rows: measures (layers, implementations, shape's name, dtype, repeats,
      watchdog) and yields rows.
    copy_bandwidth: maps repeats to what a large copy does.
    implementations: names of what can run in it.
    checks: returns the table of what is only checked, or ''.
  """

  layers: Sequence[str]
  shapes: Mapping[str, benchmark_cases.Shape]
  default_shapes: Sequence[str]
  dtypes: Callable[[str], Sequence[str]]
  rows: Callable[..., Iterable[dict[str, Any]]]
  copy_bandwidth: Callable[[int], dict[str, Any]]
  implementations: Sequence[str] = selection.IMPLEMENTATIONS
  checks: Callable[[], str] = str


def _cells_rows(layers, implementations, shape, dtype, repeats, watchdog):
  del watchdog
  implementations = implementations or selection.IMPLEMENTATIONS
  sizes = benchmark_cases.SHAPES[shape]
  cases = benchmark_cases.cells(layers, implementations, sizes, dtype)
  return measure(cases, repeats)


def _linear_rows(layers, implementations, shape, dtype, repeats, watchdog):
  del watchdog
  implementations = implementations or selection.IMPLEMENTATIONS
  cases = benchmark_linear.cases(layers, implementations, shape, dtype)
  return rotation.measure(cases, repeats)


def _dense_rows(layers, implementations, shape, dtype, repeats, watchdog):
  problems = benchmark_dense.problems(layers, implementations, shape, dtype)
  return benchmark_steps.measure(problems, repeats, watchdog)


SUITES: Mapping[str, Suite] = {
    'cells': Suite(
        layers=tuple(rnnzoo.LAYERS),
        shapes=benchmark_cases.SHAPES,
        default_shapes=('row_mnist', 'pixel_mnist'),
        dtypes=lambda shape: ('float32',),
        rows=_cells_rows,
        copy_bandwidth=lambda n: benchmark_timing.copy_bandwidth(n),
    ),
    'linear': Suite(
        layers=benchmark_linear.LAYERS,
        shapes=benchmark_linear.SHAPES,
        default_shapes=tuple(benchmark_linear.SHAPES)[1:],
        dtypes=lambda shape: benchmark_cases.DTYPES,
        rows=_linear_rows,
        copy_bandwidth=rotation.copy_bandwidth,
        checks=lambda: benchmark_linear.CHECKS,
    ),
    'dense': Suite(
        layers=benchmark_dense.LAYERS,
        shapes=benchmark_dense.SHAPES,
        default_shapes=tuple(benchmark_dense.SHAPES)[1:],
        dtypes=benchmark_dense.dtypes,
        rows=_dense_rows,
        copy_bandwidth=lambda n: benchmark_timing.copy_bandwidth(n),
        implementations=benchmark_dense.IMPLEMENTATIONS,
        checks=lambda: benchmark_dense.CHECKS,
    ),
}
