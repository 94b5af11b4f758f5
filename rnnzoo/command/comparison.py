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

# Names that a sweep or a comparison writes beside runs.
_BESIDE_RUNS = re.compile(rf'comparisons?|{"|".join(FILES)}|.*\.log')

# Lower is better, where the report is of a version that does not say so.
_LOWER = 'loss', 'perplexity', 'bits_per_character', 'mse', 'mae'

# What LaTeX would not take for text, or for the start of a row.
_IN_TEX = str.maketrans(
    {letter: f'\\{letter}' for letter in '&%$#_{}'}
    | {letter: f'{{{letter}}}' for letter in '[*'}
    | {
        '\\': r'\textbackslash{}',
        '~': r'\textasciitilde{}',
        '^': r'\textasciicircum{}',
        '<': r'\textless{}',
        '>': r'\textgreater{}',
        '|': r'\textbar{}',
        '±': r'$\pm$',
        '–': '--',
    }
)

# Markers of runs in a figure; nine of them with ten colours.
_MARKERS = 'osD^v<>PX'

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

  @property
  def ends(self) -> tuple[float | None, float | None]:
    """The ends of the interval."""
    if self.interval is None or self.mean is None:
      return None, None
    return self.mean - self.interval, self.mean + self.interval


def compare(directories: Sequence[str], output: str) -> str:
  """Returns a table of runs in Markdown, and writes all `FILES`.

  Args:
    directories: finished runs, and folders of runs as a sweep leaves them. Runs
      in a folder that are not finished are left out, and named on stderr.
    output: the directory for the files.

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
  if (path / 'report.json').exists() or not path.is_dir():
    return [directory]
  # Numbers in names count as such: 8 comes before 16.
  order = lambda run: [
      (int(part) if part.isdecimal() else 0, part)
      for part in re.split(r'(\d+)', run.name)
  ]
  inside = sorted((p for p in path.iterdir() if p.is_dir()), key=order)
  done = [run for run in inside if (run / 'report.json').exists()]
  others = [
      run.name
      for run in inside
      if run not in done and not _BESIDE_RUNS.fullmatch(run.name)
  ]
  if done and others:
    print(
        f'left out of {directory}, since not finished: {", ".join(others)}',
        file=sys.stderr,
    )
  return [str(run) for run in done] or [directory]


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
    _table([run])
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
  interval = float(_half_interval(np.array(values))) if count > 1 else None
  mean, std = float(np.mean(values)), float(np.std(values))
  return Statistics(count, mean, std, interval, min(values), max(values))


def _half_interval(values: np.ndarray) -> np.ndarray:
  """Returns half the interval of the mean over the first axis, by Student's t.

  It is masked where fewer than two values are not masked.
  """
  from scipy import stats  # Slow to import.

  count = np.ma.count(values, axis=0)
  quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)
  return quantile * np.ma.std(values, axis=0, ddof=1) / np.sqrt(count)


def _table(runs: Sequence[Run]) -> tuple[list[list[str]], list[str]]:
  """Returns rows of cells, the heads first, and what is to be read with it."""
  main = main_metric(runs[0])
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
  columns = {'run': [run.name for run in runs]} | facts
  for metric in dict.fromkeys(m for run in runs for m in run.report['test']):
    found = [
        statistics(run, metric) if metric in run.report['test'] else None
        for run in runs
    ]
    columns[metric] = [
        _text(' ± ', of.mean, of.std) if of else '–' for of in found
    ]
    if metric == main:
      columns['95 % interval'] = [
          '–' if of.interval is None else _text(' to ', *of.ends)
          for of in found
          if of
      ]
  alike = {
      head: cells[0]
      for head, cells in facts.items()
      if len(runs) > 1 and len(set(cells)) == 1
  }
  table = {head: cells for head, cells in columns.items() if head not in alike}
  datasets = sorted({run.report['dataset'] for run in runs})
  lines = [
      f'Data: {", ".join(datasets)}. Scores of the test: mean ± standard'
      " deviation of the population; the 95 % interval is the mean's, by"
      " Student's t."
  ]
  if alike:
    facts_text = ', '.join(f'{head} {cell}' for head, cell in alike.items())
    lines.append(f'Alike in all runs: {facts_text}.')
  for run in runs:
    if run.report['diverged']:
      diverged = ', '.join(map(str, run.report['diverged']))
      lines.append(f'{run.name}: the loss of seed {diverged} was not finite.')
  if len(datasets) > 1:
    lines.append('These runs are of different data. No test is made.')
  else:
    lines += _tests(runs)
  return [list(table), *map(list, zip(*table.values(), strict=True))], lines


def _is_higher_better(run: Run) -> bool:
  return run.report.get('higher_is_better', main_metric(run) not in _LOWER)


def _tests(runs: Sequence[Run]) -> list[str]:
  """Returns sentences on paired t-tests of all runs against the best one."""
  from scipy import stats  # Slow to import.

  metric, higher = main_metric(runs[0]), _is_higher_better(runs[0])
  means = [statistics(run, metric).mean for run in runs]
  finite = [mean for mean in means if mean is not None]
  if len(runs) < 2 or not finite:
    return []
  best = runs[means.index(max(finite) if higher else min(finite))]
  by_seed = lambda run: {
      seed['seed']: seed['test'][metric] for seed in run.report['seeds']
  }
  ours, found, p_values = by_seed(best), {}, {}
  for run, mean in zip(runs, means, strict=True):
    theirs = by_seed(run)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    count = f'{len(pairs)} pair{"s" * (len(pairs) != 1)}'
    if run is best:
      continue
    if mean is None:
      found[run.name] = 'no p-value, since a seed has no finite value'
    elif len(pairs) < 2:
      found[run.name] = f'no p-value, since a test needs 2 pairs; {count}'
    elif np.ptp(np.diff(pairs)) <= 1e-12 * np.max(np.abs(pairs)):
      found[run.name] = f'no p-value, since all differences are equal; {count}'
    else:
      p_values[run.name] = float(stats.ttest_rel(*np.transpose(pairs)).pvalue)
      found[run.name] = count
  corrected = _holm(p_values)
  for name, p in corrected.items():
    found[name] = f'p = {p:.3g}, {found[name]}'
  holm = f" Holm's correction is for {len(corrected)} tests."
  return [
      f'Paired t-tests on test {metric}, two-sided, over the seeds that both'
      f' runs have, against {best.name}, which has the'
      f' {"highest" if higher else "lowest"} mean.'
      + holm * (len(corrected) > 1),
      *(f'{name}: {text}.' for name, text in found.items()),
  ]


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
  """Returns p-values by Holm's correction for so many tests."""
  least, corrected = 0.0, {}
  for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
    least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
    corrected[name] = least
  return corrected


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
  return '\n'.join(
      [
          '% The preamble needs \\usepackage{booktabs}.',
          *(f'% {line}' for text in sentences for line in text.splitlines()),
          rf'\begin{{tabular}}{{{"l" * len(rows[0])}}}',
          r'\toprule',
          head,
          r'\midrule',
          *body,
          r'\bottomrule',
          '\\end{tabular}\n',
      ]
  )


def _csv(runs: Sequence[Run]) -> str:
  """Returns a row for each run and metric, with numbers as they are."""
  heads = 'run', 'metric', 'seeds', 'mean', 'std', 'low', 'high'
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow([*heads, 'least', 'greatest'])
  for run in runs:
    for metric in run.report['test']:
      of = statistics(run, metric)
      numbers = of.mean, of.std, *of.ends, of.least, of.greatest
      writer.writerow([run.name, metric, of.num_seeds, *numbers])
  return text.getvalue()


def _text(between: str, *values: float | None) -> str:
  """Returns numbers with as many decimals each."""
  finite = [value for value in values if value is not None]
  if len(finite) < len(values):
    return between.join(['none'] * len(values))
  form = '.3g' if 0 < max(map(abs, finite)) < 0.01 else '.4f'
  return between.join(format(value, form) for value in finite)


def plot(paths: Sequence[pathlib.Path], runs: Sequence[Run]) -> None:
  """Draws validation curves, and the test below them, as wide as a column.

  Above is the mean over the seeds that have an epoch, in a band of its 95 %
  interval where they are two or more; bands far from all means are cut. Below
  are a point a seed, and the mean with its interval.

  Args:
    paths: files to write, each in the format of its suffix.
    runs: runs with one main metric.
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
  style = {'font.size': 8, 'axes.grid': True, 'grid.alpha': 0.3}
  with matplotlib.rc_context(style | {'pdf.fonttype': 42}):
    figure = mpl_figure.Figure((3.4, sum(heights)), layout='constrained')
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    curves, points = above.subplots(), below.subplots()
    looks = [
        {'color': f'C{i % 10}', 'marker': _MARKERS[i % 9]}
        for i in range(len(runs))
    ]
    _plot_curves(curves, runs, quantity, looks)
    for index, (run, look) in enumerate(zip(runs, looks, strict=True)):
      of = statistics(run, metric)
      values = [seed['test'][metric] for seed in run.report['seeds']]
      rows = np.full(len(values), index + 0.3)
      points.scatter(np.array(values, float), rows, s=3, color=look['color'])
      if of.mean is not None:
        points.errorbar(
            of.mean, index, xerr=of.interval, capsize=2, markersize=4, **look
        )
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
    epochs = range(1, len(mean) + 1)
    axis.plot(epochs, mean, markevery=[-1], markersize=4, linewidth=1, **look)
    bands.append((epochs, mean - half, mean + half))
  axis.margins(y=0.15)
  axis.set_ylim(axis.get_ylim())
  for band, look in zip(bands, looks, strict=True):
    axis.fill_between(*band, color=look['color'], alpha=0.15, linewidth=0)
  axis.set_xlabel('epoch')
  axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  axis.set_ylabel(quantity.replace('_', ' '))
