"""Finished runs side by side: a table in Markdown, curves and bars."""

from collections.abc import Sequence
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import figures
from rnnzoo.training import files
from rnnzoo.training import report as report_lib
from rnnzoo.training import run_directory

# Names that a sweep or a comparison writes beside runs.
_BESIDE_RUNS = re.compile(r'comparisons?|comparison\.(md|png)|.*\.log')

# The level of the two-sided interval of the mean.
_CONFIDENCE = 0.95


class Run(NamedTuple):
  """A finished run.

  Attributes:
    name: the name of its directory.
    report: the content of report.json.
    histories: the epochs of each seed.
  """

  name: str
  report: dict[str, Any]
  histories: list[list[dict[str, Any]]]


class Statistics(NamedTuple):
  """A metric over the seeds of a run; None where a seed has no finite value.

  Attributes:
    num_seeds: the number of seeds.
    mean: the mean over the seeds.
    std: the standard deviation of the population, as in report.json.
    interval: half the width of the 95 % confidence interval of the mean, by
      Student's t; None for one seed.
    least: the smallest value.
    greatest: the greatest value.
  """

  num_seeds: int
  mean: float | None = None
  std: float | None = None
  interval: float | None = None
  least: float | None = None
  greatest: float | None = None


def compare(directories: Sequence[str], output: str) -> str:
  """Returns a table of runs in Markdown, and writes it with a figure.

  Args:
    directories: finished runs.
    output: the directory for comparison.md and comparison.png.

  Raises:
    RunFileError: a run is not finished, or one of its files is damaged, or the
      runs have different main metrics.
    OSError: a file cannot be read or written.
  """
  # Files of a sweep or a comparison beside its runs, as a shell's * names them.
  others = [
      path
      for path in directories
      if _BESIDE_RUNS.fullmatch(pathlib.Path(path).name)
      and not (fields.expand(path) / 'report.json').exists()
  ]
  if others and len(others) < len(directories):
    print(f'passed over, since no runs: {", ".join(others)}', file=sys.stderr)
    directories = [path for path in directories if path not in others]
  paths = [fields.expand(path) for path in directories]
  if len({path.resolve() for path in paths}) < len(paths):
    raise files.RunFileError(
        f'a run must be named once, got {", ".join(map(str, directories))}'
    )
  runs = [read(path) for path in paths]
  if len({run.name for run in runs}) < len(runs):
    # Different sweeps, say: then by their paths.
    names = map(str, map(pathlib.Path, directories))
    runs = [r._replace(name=n) for r, n in zip(runs, names, strict=True)]
  metrics = {main_metric(run): run.name for run in runs}
  if len(metrics) > 1:
    named = ', '.join(f'{key} ({name})' for key, name in metrics.items())
    raise files.RunFileError(
        f'runs can be compared by one main metric; these have {named}'
    )
  text = markdown(runs)
  path = files.make_directory(output, '--output')
  files.write_atomically(path / 'comparison.md', text)
  figure = path / 'comparison.png'
  with files.naming(figure):
    plot(figure, runs)
  return text


def read(path: pathlib.Path) -> Run:
  """Returns a finished run.

  Raises:
    RunFileError: it is not finished, or a file of it is damaged.
  """
  file = path / 'report.json'
  if not file.is_file():
    raise files.RunFileError(
        f'{path} holds no finished run: it has no report.json'
    )
  try:
    run_directory.read(path)
    report = files.read_signed(file)
    results = [
        report_lib.read_result(path, seed['seed'], report['dataset'])
        for seed in report['seeds']
    ]
    if report['seeds'] != [report_lib.of_seed(result) for result in results]:
      raise files.RunFileError(f'{file} is not the report of the results there')
    run = Run(path.name, report, [result['history'] for result in results])
    markdown([run])
  except files.RunFileError:
    raise
  except FileNotFoundError as error:
    raise files.RunFileError(
        f'{path} is no whole run: {error.filename or error} is missing'
    ) from error
  except (KeyError, TypeError, IndexError, StopIteration, ValueError) as error:
    raise files.RunFileError(
        f'{file} is not what a run wrote: {error!r}'
    ) from error
  return run


def main_metric(run: Run) -> str:
  """Returns the name of the metric that stands first."""
  return next(iter(run.report['test']))


def statistics(run: Run, metric: str) -> Statistics:
  """Returns a metric of the test over the seeds of a run."""
  values = [seed['test'][metric] for seed in run.report['seeds']]
  if not values:
    raise ValueError('it has no seeds')
  count = len(values)
  if None in values:
    return Statistics(count)
  interval = None
  if count > 1:
    from scipy import stats  # Slow to import.

    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))
    interval = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
  mean, std = float(np.mean(values)), float(np.std(values))
  return Statistics(count, mean, std, interval, min(values), max(values))


def markdown(runs: Sequence[Run]) -> str:
  """Returns the table, and sentences that must not be overlooked."""
  metric = main_metric(runs[0])
  names = ('run', 'experiment', 'seeds', 'parameters', f'test {metric}')
  heads = (*names, '95 % interval', 'least', 'greatest', 'epochs')
  rows = [heads, ('---',) * len(heads)]
  for run in runs:
    of = statistics(run, metric)
    seeds = run.report['seeds']
    interval = '–'
    if of.interval is not None and of.mean is not None:
      interval = f'{of.mean - of.interval:.4f} to {of.mean + of.interval:.4f}'
    rows.append(
        (
            run.name,
            run.report['experiment'],
            str(of.num_seeds),
            f'{seeds[0]["num_parameters"]:,}',
            f'{_text(of.mean)} ± {_text(of.std)}',
            interval,
            _text(of.least),
            _text(of.greatest),
            ', '.join(str(seed['num_epochs']) for seed in seeds),
        )
    )
  # A | in a name would be two cells.
  escaped = [[cell.replace('|', r'\|') for cell in row] for row in rows]
  lines = [f'| {" | ".join(row)} |' for row in escaped]
  datasets = sorted({run.report['dataset'] for run in runs})
  lines += ['', f'Data: {", ".join(datasets)}. Mean ± standard deviation.']
  if len(datasets) > 1:
    lines.append('These runs are of different data.')
  for run in runs:
    if run.report['diverged']:
      seeds = ', '.join(map(str, run.report['diverged']))
      lines.append(f'{run.name}: the loss of seed {seeds} was not finite.')
  return '\n'.join(lines) + '\n'


def _text(value: float | None) -> str:
  return 'none' if value is None else f'{value:.4f}'


def plot(path: pathlib.Path, runs: Sequence[Run]) -> None:
  """Draws validation curves, one line a seed, and bars with the intervals."""
  metric = main_metric(runs[0])
  title = f'test {metric}: {", ".join(run.name for run in runs)}'
  figure, ((curves, bars),) = figures.make_figure(2, (11.0, 4.5), title)
  quantity = f'validation_{metric}'
  if not all(quantity in run.histories[0][0] for run in runs):
    quantity = 'validation_loss'
  for index, run in enumerate(runs):
    for number, history in enumerate(run.histories):
      curves.plot(
          [row['epoch'] for row in history],
          np.array([row[quantity] for row in history], float),
          color=f'C{index % 10}',
          linewidth=1.0,
          marker='.' if len(history) == 1 else None,
          label=figures.plain(run.name) if not number else None,
      )
    of = statistics(run, metric)
    if of.mean is not None:
      bars.bar(
          figures.plain(run.name),
          of.mean,
          yerr=of.interval,
          capsize=4,
          color=f'C{index % 10}',
      )
  curves.set_xlabel('epoch')
  curves.set_ylabel(quantity.replace('_', ' '))
  curves.grid(alpha=0.3)
  curves.legend(fontsize='small')
  bars.set_ylabel(f'test {metric}, 95 % interval')
  bars.tick_params(axis='x', labelrotation=30)
  figure.savefig(path, dpi=120)
