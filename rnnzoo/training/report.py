"""The outcome of a training run: the results of seeds, and their report.

Every file names the data set that the numbers come from, so that a result on a
stand-in cannot be taken for the real one.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

import numpy as np

from rnnzoo.tasks import figures
from rnnzoo.tasks import protocol
from rnnzoo.training import files
from rnnzoo.training import run_directory


def plot_curves(
    path: pathlib.Path,
    title: str,
    histories: Mapping[str, Sequence[files.Row]],
    quantities: Sequence[str],
) -> None:
  """Draws quantities over the epochs, all seeds in one figure.

  Histories are of seeds by name. The quantity 'loss' gets a logarithmic axis
  beyond a factor of ten.
  """
  count = len(quantities)
  size = 5.0 * count, 4.0 + 0.2 * len(histories)
  figure, (axes,) = figures.make_figure(count, size, title)
  for quantity, axis in zip(quantities, axes, strict=True):
    for index, (name, history) in enumerate(histories.items()):
      epochs = [row['epoch'] for row in history]
      for split, style in (('train', 'x--'), ('validation', 'o-')):
        axis.plot(
            epochs,
            # None, which becomes NaN, leaves a gap.
            np.array([row[f'{split}_{quantity}'] for row in history], float),
            style if len(epochs) == 1 else style[1:],
            color=f'C{index % 10}',
            label=f'{name} {split}',
        )
    axis.set_xlabel('epoch')
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.set_ylabel(quantity)
    axis.grid(alpha=0.3)
    drawn = np.concatenate([line.get_ydata() for line in axis.lines])
    drawn = drawn[np.isfinite(drawn)]
    if quantity == 'loss' and drawn.size and 0 < 10 * drawn.min() < drawn.max():
      axis.set_yscale('log')
  figure.legend(
      *axes[-1].get_legend_handles_labels(),
      loc='outside lower center',
      ncols=2 * count,
      fontsize='small',
  )
  figure.savefig(path, dpi=120)


# In result.json, and not in report.json.
_IN_RESULTS_ALONE = ('config', 'data', 'history')


def read_result(
    directory: pathlib.Path, seed: int, dataset: str
) -> dict[str, Any]:
  """Returns the content of result.json of a seed of a run on a data set."""
  path = directory / f'seed_{seed}' / 'result.json'
  wanted = run_directory.owner(directory, seed) | {'dataset': dataset}
  try:
    result = files.read_signed(path)
    if {name: result.get(name) for name in wanted} != wanted:
      raise files.RunFileError(
          f'{path} is not the result of seed {seed} of this run on {dataset}'
      )
  except files.RunFileError as error:
    raise files.RunFileError(
        f'{error}; delete it, and the seed is tested again from its checkpoint'
    ) from error
  return result


def summarize(
    name: str,
    changed: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    metrics: Sequence[protocol.Metric],
    numbers: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the report over all seeds: each number's mean and std.

  The std is the population's (divided by the number of seeds), as in the
  published tables that we compare with. If a seed has no finite number, mean
  and std are None. 'diverged' lists the seeds whose training ended with a loss
  that was not finite. 'higher_is_better' is about the first metric. 'splits'
  has the entries of 'test' for each further split, if there are any. The task
  adds its own numbers.
  """
  splits = {
      split: summary([result['splits'][split] for result in results], metrics)
      for split in results[0].get('splits', {})
  }
  return {
      'experiment': name,
      'changed': dict(changed),
      'dataset': results[0]['dataset'],
      'num_seeds': len(results),
      'higher_is_better': metrics[0].higher_is_better,
      'diverged': [result['seed'] for result in results if result['diverged']],
      'test': summary([result['test'] for result in results], metrics),
      **({'splits': splits} if splits else {}),
      **numbers,
      'seeds': [of_seed(result) for result in results],
  }


def of_seed(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the part of a seed's result that is in report.json."""
  return {k: result[k] for k in result if k not in _IN_RESULTS_ALONE}


def summary(
    tests: Sequence[Mapping[str, Any]], metrics: Sequence[protocol.Metric]
) -> dict[str, Any]:
  """Returns mean and std of each metric over the results of seeds."""
  return {
      metric.name: _mean_and_std([test[metric.name] for test in tests])
      for metric in metrics
  }


def _mean_and_std(values: Sequence[float | None]) -> dict[str, float | None]:
  if None in values:
    return {'mean': None, 'std': None}
  array = np.array(values, np.float64)
  return {'mean': float(np.mean(array)), 'std': float(np.std(array))}


def main_result(
    report: Mapping[str, Any], metrics: Sequence[protocol.Metric]
) -> str:
  """Returns the last line of a run: 'test accuracy: 0.9863'."""
  main = metrics[0]
  return f'test {main.name}: {main.text(report["test"][main.name]["mean"])}'


def format_report(
    report: Mapping[str, Any], metrics: Sequence[protocol.Metric]
) -> str:
  """Returns the report as text for people."""
  main = metrics[0]
  lines = [f'{name}: {report[name]}' for name in ('experiment', 'dataset')]
  for seed in report['seeds']:
    lines.append(
        f'seed {seed["seed"]}: test'
        f' {main.name} {main.text(seed["test"][main.name])}'
        f' after epoch {seed["best_epoch"]} of {seed["num_epochs"]}'
        f' ({seed["stopped"]}), {seed["num_parameters"]:,} parameters'
    )
  width = max(10, *(len(metric.name) + 1 for metric in metrics))
  tests = {'test': report['test'], **report.get('splits', {})}
  for split, values in tests.items():
    lines.append(f'{split}, mean +- std of {report["num_seeds"]} seed(s):')
    for metric in metrics:
      value = values[metric.name]
      lines.append(
          f'  {metric.name:<{width}}{metric.text(value["mean"])} +-'
          f' {metric.text(value["std"])}'
      )
  return '\n'.join(lines) + '\n'


def format_numbers(numbers: Mapping[str, Any]) -> str:
  """Returns the single numbers that a task adds to a report, one a line."""
  return ''.join(
      f'{name}: {value:.4g}\n'
      for name, value in numbers.items()
      if isinstance(value, int | float) and not isinstance(value, bool)
  )


def write_report(
    directory: pathlib.Path,
    report: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    metrics: Sequence[protocol.Metric],
    more: Mapping[str, Callable[[pathlib.Path, str], None]],
) -> None:
  """Writes figures and report, unless it is there: a copy may be read-only.

  The report is from `summarize`, with these results. `more` are the task's own
  files.
  """
  title = f'{report["experiment"]}, {report["dataset"]}'
  path, text = directory / 'report.json', files.json_text(report)
  if path.exists() and path.read_bytes() == text.encode():
    return
  histories = {f'seed {one["seed"]}': one['history'] for one in results}
  names = dict.fromkeys(['loss', *(m.name for m in metrics if not m.at_test)])
  draw_curves = lambda path, title: plot_curves(
      path, title, histories, [*names]
  )
  for name, draw in {'curves.png': draw_curves, **more}.items():
    with files.naming(directory / name):
      draw(directory / name, title)
  told = format_report(report, metrics)
  files.write_atomically(directory / 'report.txt', told)
  files.write_atomically(path, text)
