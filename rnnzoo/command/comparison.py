"""Finished runs side by side: tables, paired tests and a figure."""

from collections.abc import Mapping, Sequence
import csv
import io
import itertools
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

# The files of a comparison.
_TEXTS = 'comparison.md', 'comparison.tex', 'comparison.csv'
_IMAGES = 'comparison.png', 'comparison.svg', 'comparison.pdf'
FILES = (*_TEXTS, *_IMAGES)

# Letters that LaTeX takes for commands, or would print as others.
_IN_TEX = str.maketrans(
    {letter: f'\\{letter}' for letter in '&%$#_{}'}
    | {letter: f'${letter}$' for letter in '<>|[*'}
    | {'\\': r'$\backslash$', '~': r'$\sim$', '^': r'$\wedge$'}
    | {'±': r'$\pm$', '–': '--'}
)

# Markers of runs in a figure; nine of them with ten colours.
_MARKERS = 'osD^v<>PX'

# The level of the two-sided interval of the mean.
_CONFIDENCE = 0.95


class Run(NamedTuple):
  """A finished run."""

  name: str  # The name of its directory.
  report: dict[str, Any]  # The content of report.json.
  histories: list[list[dict[str, Any]]]  # The epochs of each seed.


class Statistics(NamedTuple):
  """A metric over the seeds of a run; None if a seed has no finite value."""

  num_seeds: int
  mean: float | None = None
  std: float | None = None  # The population's, as in report.json.
  # The mean's 95 % interval, by Student's t; None for one seed.
  low: float | None = None
  high: float | None = None
  least: float | None = None
  greatest: float | None = None


def compare(directories: Sequence[str], output: str) -> str:
  """Returns a table of runs in Markdown, and writes all `FILES`.

  Args:
    directories: finished runs, and folders of runs as a sweep leaves them. Runs
      in a folder that are not finished are left out, and named on stderr.
    output: the directory for the files.
  """
  directories = [run for path in directories for run in _runs_in(path)]
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
  rows, sentences = _table(runs)
  path = files.make_directory(output, '--output')
  texts = _markdown(rows, sentences), _tex(rows, sentences), _csv(runs)
  for name, text in zip(_TEXTS, texts, strict=True):
    files.write_atomically(path / name, text)
  plot([path / name for name in _IMAGES], runs)
  return texts[0]


def _runs_in(directory: str) -> list[str]:
  """Returns the finished runs in a folder that is no run; else the folder."""
  path = fields.expand(directory)
  # Numbers in names count as such: 8 comes before 16.
  order = lambda run: [
      int(part) if part.isdecimal() else part
      for part in re.split(r'(\d+)', run.name)
  ]
  is_run = (path / 'report.json').exists()
  inside = [] if is_run else sorted(path.glob('*/'), key=order)
  done = [run for run in inside if (run / 'report.json').exists()]
  others = (run for run in inside if run not in done)
  rest = [str(run) for run in others if (run / 'config.json').exists()]
  if done and rest:
    print(f'left out, since not finished: {", ".join(rest)}', file=sys.stderr)
  return [str(run) for run in done] or [directory]


def read(path: pathlib.Path) -> Run:
  """Returns a finished run."""
  file = path / 'report.json'
  if not file.is_file():
    raise files.RunFileError(
        f'{path} holds no finished run: it has no report.json'
    )
  run_directory.read(path)
  report = files.read_signed(file)
  results = [
      report_lib.read_result(path, seed['seed'], report['dataset'])
      for seed in report['seeds']
  ]
  if report['seeds'] != [report_lib.of_seed(result) for result in results]:
    raise files.RunFileError(f'{file} is not the report of the results there')
  return Run(path.name, report, [result['history'] for result in results])


def main_metric(run: Run) -> str:
  """Returns the name of the metric that stands first."""
  return next(iter(run.report['test']))


def statistics(run: Run, metric: str) -> Statistics:
  """Returns a metric of the test over the seeds of a run."""
  values = [seed['test'].get(metric) for seed in run.report['seeds']]
  count = len(values)
  if None in values:
    return Statistics(count)
  mean, std = float(np.mean(values)), float(np.std(values))
  low = high = None
  if count > 1:
    half = float(_half_interval(np.array(values)))
    low, high = mean - half, mean + half
  return Statistics(count, mean, std, low, high, min(values), max(values))


def _half_interval(values: np.ndarray) -> np.ndarray:
  """Returns half the mean's interval over axis 0; masked below two values."""
  from scipy import stats  # Slow to import.

  count = np.ma.count(values, axis=0)
  quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)
  return quantile * np.ma.std(values, axis=0, ddof=1) / np.sqrt(count)


def _table(runs: Sequence[Run]) -> tuple[list[list[str]], list[str]]:
  """Returns rows of cells, the heads first, and what is to be read with it."""
  main = main_metric(runs[0])
  scores = {}
  for metric in dict.fromkeys(m for run in runs for m in run.report['test']):
    found = [statistics(run, metric) for run in runs]
    scores[metric] = [_text(' ± ', of.mean, of.std) for of in found]
    if metric == main:
      scores['95 % interval'] = [
          '–' if of.low is None else _text(' to ', of.low, of.high)
          for of in found
      ]
  seeds = [run.report['seeds'] for run in runs]
  facts = {
      'experiment': [run.report['experiment'] for run in runs],
      'seeds': [str(len(of_run)) for of_run in seeds],
      'parameters': [f'{of_run[0]["num_parameters"]:,}' for of_run in seeds],
      'epochs': [
          ' to '.join(map(str, sorted({min(counts), max(counts)})))
          for counts in ([seed['num_epochs'] for seed in s] for s in seeds)
      ],
  }
  columns = {'run': [run.name for run in runs]} | facts | scores
  datasets = sorted({run.report['dataset'] for run in runs})
  lines = [
      f'Data: {", ".join(datasets)}. Scores of the test: mean ± standard'
      " deviation of the population; the 95 % interval is the mean's, by"
      " Student's t."
  ]
  alike = [head for head, cells in facts.items() if len({*cells}) < 2]
  if len(runs) > 1 and alike:
    same = ', '.join(f'{head} {columns.pop(head)[0]}' for head in alike)
    lines.append(f'Alike in all runs: {same}.')
  for run in runs:
    if run.report['diverged']:
      diverged = ', '.join(map(str, run.report['diverged']))
      lines.append(f'{run.name}: the loss of seed {diverged} was not finite.')
  if len(datasets) > 1:
    lines.append('These runs are of different data. No test is made.')
  else:
    lines += _tests(runs)
  return [[*columns], *map(list, zip(*columns.values(), strict=True))], lines


def _tests(runs: Sequence[Run]) -> list[str]:
  """Returns sentences on paired t-tests of all runs against the best one."""
  metric = main_metric(runs[0])
  higher = runs[0].report['higher_is_better']
  means = [statistics(run, metric).mean for run in runs]
  finite = [mean for mean in means if mean is not None]
  if len(runs) < 2 or not finite:
    return []
  from scipy import stats  # Slow to import.

  best = runs[means.index(max(finite) if higher else min(finite))]
  by_seed = lambda run: {
      seed['seed']: seed['test'][metric] for seed in run.report['seeds']
  }
  ours, found, p_values = by_seed(best), {}, {}
  for run, mean in zip(runs, means, strict=True):
    theirs = by_seed(run)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if run is best:
      continue
    if mean is None:
      text = 'no p-value, since a seed has no finite value'
    elif len(pairs) < 2:
      text = 'no p-value, since it takes two pairs'
    elif np.ptp(np.diff(pairs)) <= 1e-12 * np.max(np.abs(pairs)):
      text = 'no p-value, since all differences are equal'
    else:
      p_values[run.name] = float(stats.ttest_rel(*np.transpose(pairs)).pvalue)
      text = 'p = {:.3g}'
    found[run.name] = f'{text}; pairs: {len(pairs)}'
  ranked = sorted(p_values, key=p_values.__getitem__)
  scaled = [p_values[name] * (len(ranked) - i) for i, name in enumerate(ranked)]
  corrected = np.minimum(np.maximum.accumulate(scaled), 1)
  for name, p in zip(ranked, corrected, strict=True):
    found[name] = found[name].format(p)
  holm = f" The p-values have Holm's correction for {len(ranked)} tests."
  return [
      f'Paired t-tests on test {metric}, two-sided, over the seeds that both'
      f' runs have, against {best.name}, which has the'
      f' {"highest" if higher else "lowest"} mean.' + holm * (len(ranked) > 1),
      *(f'{name}: {text}.' for name, text in found.items()),
  ]


def _markdown(rows: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
  # A | in a name would be two cells.
  escaped = [[cell.replace('|', r'\|') for cell in row] for row in rows]
  escaped.insert(1, ['---'] * len(rows[0]))
  lines = [f'| {" | ".join(row)} |' for row in escaped]
  return '\n'.join([*lines, '', *(f'{text}  ' for text in sentences)]) + '\n'


def _tex(rows: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
  head, *body = [
      ' & '.join(cell.translate(_IN_TEX) for cell in row) + r' \\'
      for row in rows
  ]
  notes = [line for text in sentences for line in text.splitlines()]
  return '\n'.join(
      [
          r'% The preamble needs \usepackage{booktabs}.',
          *(f'% {line}' for line in notes),
          rf'\begin{{tabular}}{{{"l" * len(rows[0])}}}\toprule',
          *(head, r'\midrule', *body, r'\bottomrule'),
          '\\end{tabular}\n',
      ]
  )


def _csv(runs: Sequence[Run]) -> str:
  """Returns a row for each run and metric, with numbers as they are."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['run', 'metric', 'seeds', *Statistics._fields[1:]])
  for run in runs:
    for metric in run.report['test']:
      writer.writerow([run.name, metric, *statistics(run, metric)])
  return text.getvalue()


def _text(between: str, *values: Any) -> str:
  """Returns numbers with as many decimals each."""
  form = '{:.4f}'
  if None in values:
    form = 'none'
  elif 0 < max(map(abs, values)) < 0.01:
    form = '{:.3g}'
  return between.join(map(form.format, values))


def plot(paths: Sequence[pathlib.Path], runs: Sequence[Run]) -> None:
  """Draws validation curves, and the test below them, as wide as a column.

  Above is the mean over the seeds that have a finite value for an epoch, in a
  band of its 95 % interval where they are two or more; bands far from all means
  are cut. Below are a point a seed, and the mean with its interval.

  The paths have the formats of their suffixes, and the runs one main metric.
  """
  import matplotlib  # Slow to import.
  from matplotlib import figure as mpl_figure

  metric = main_metric(runs[0])
  quantity = f'validation_{metric}'
  if not all(quantity in run.histories[0][0] for run in runs):
    quantity = 'validation_loss'
  names = [figures.shorten(run.name) for run in runs]
  if len(set(names)) < len(names):  # The number of the row tells them apart.
    names = [f'{row}: {name}' for row, name in enumerate(names, 1)]
  heights = 2.2, 0.5 + 0.2 * len(runs)
  # Publishers refuse the default fonts of a PDF.
  style: Any = {'axes.grid': True, 'grid.alpha': 0.3, 'pdf.fonttype': 42}
  style |= {'axes.formatter.limits': (-3, 4), 'font.size': 8}
  with matplotlib.rc_context(style):
    figure: Any = mpl_figure.Figure((3.4, sum(heights)), layout='constrained')
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    curves, points = above.subplots(), below.subplots()
    looks = [
        {'color': f'C{i % 10}', 'marker': _MARKERS[i % 9], 'markersize': 4}
        for i in range(len(runs))
    ]
    _plot_curves(curves, runs, quantity, looks)
    for index, (run, look) in enumerate(zip(runs, looks, strict=True)):
      of = statistics(run, metric)
      for seed in run.report['seeds']:
        value = np.array(seed['test'][metric], float)  # NaN for None.
        points.scatter(value, index + 0.3, s=3, color=look['color'])
      if of.mean is not None:
        half = None if of.high is None else of.high - of.mean
        points.errorbar(of.mean, index, xerr=half, capsize=2, **look)
    points.locator_params(axis='x', nbins=5)
    points.set_yticks(range(len(runs)), list(map(figures.plain, names)))
    points.set_ylim(len(runs) - 0.4, -0.6)
    points.set_xlabel(f'test {metric}'.replace('_', ' '))
    for path in paths:
      with files.naming(path):
        figure.savefig(path, dpi=300)


def _plot_curves(
    axis: Any,
    runs: Sequence[Run],
    quantity: str,
    looks: Sequence[Mapping[str, Any]],
) -> None:
  """Draws a mean with a band for each run, and a marker at its end."""
  bands = []
  for run, look in zip(runs, looks, strict=True):
    of_seeds = [[row[quantity] for row in rows] for rows in run.histories]
    # None, for no finite value or no such epoch, becomes NaN.
    values = np.array([*itertools.zip_longest(*of_seeds)], float).T
    mean = np.ma.masked_invalid(values).mean(axis=0)
    half = _half_interval(np.ma.masked_invalid(values))
    if len(values) < 3:  # Two seeds' interval would cover the other runs.
      half = 0 * mean
    epochs = range(1, len(mean) + 1)
    axis.plot(epochs, mean, markevery=[-1], linewidth=1, **look)
    bands.append((epochs, mean - half, mean + half))
  low, high = axis.dataLim.intervaly
  if 0 < 100 * low < high:
    axis.set_yscale('log')
  axis.margins(y=0.15)
  axis.set_ylim(axis.get_ylim())
  for band, look in zip(bands, looks, strict=True):
    axis.fill_between(*band, color=look['color'], alpha=0.15, linewidth=0)
  axis.set_xlabel('epoch')
  axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  axis.set_ylabel(quantity.replace('_', ' '))
