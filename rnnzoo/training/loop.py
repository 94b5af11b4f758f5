"""The loop: seeds, epochs, validation, checkpoints, the final test.

All randomness is a function of (seed, epoch, step). That, and checkpoints that
hold all the rest, is why a run that was killed and resumed gives, on CPU,
bitwise what an uninterrupted run gives.
"""

from collections.abc import Mapping, Sequence
import contextlib
import functools
from typing import Any

import jax

from pallas_kernels import promotion
from rnnzoo.tasks import protocol
from rnnzoo.training import best_models
from rnnzoo.training import epochs
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import files
from rnnzoo.training import pieces
from rnnzoo.training import processes
from rnnzoo.training import records as records_lib
from rnnzoo.training import reporting
from rnnzoo.training import run_directory
from rnnzoo.training import samples
from rnnzoo.training import seed_state


@promotion.of_dtypes
@promotion.of_ranks
def train_and_evaluate(experiment: experiments.Experiment) -> dict[str, Any]:
  """Trains and tests all seeds, and returns the report.

  Args:
    experiment: what `prepare` returned. Seeds that are done are not run again.

  Returns:
    The content of report.json: ['test'][metric]['mean'] is the result, and
    ['diverged'] says for which seeds it is worth nothing.

  Raises:
    RunFileError: a file in the run directory is not what was written there.
    OSError: a file cannot be written.
  """
  config, task = experiment.config, experiment.task
  workdir = experiment.workdir
  processes.say(
      f'run directory: {workdir} (to resume after a kill, pass it as --workdir)'
  )
  placement = experiment.placement
  label = 'device' if placement.num_devices == 1 else 'devices'
  processes.say(f'{label}: {placement.text}')
  train = task.splits['train']
  if isinstance(train, protocol.Generator) and (
      train.lesson(config.num_epochs) < len(train.lessons)
  ):
    processes.say(
        f'WARNING: all {config.num_epochs} epochs are lessons that come first'
        ' (of a curriculum, or without noise): none trains on what comes after'
        ' these'
    )
  splits: dict[str, Any] = {
      name: experiment.program.load(task.splits[name])
      for name in ('train', 'validation', 'test')
      if name != 'train' or _is_on_device(experiment)
  }
  splits.setdefault('train', task.splits['train'])
  seeds = range(config.seed, config.seed + config.num_seeds)
  paths = {s: workdir / f'seed_{s}' / 'result.json' for s in seeds}
  for first in range(0, len(seeds), config.seeds_at_once):
    group = [
        seed
        for seed in seeds[first : first + config.seeds_at_once]
        if not processes.from_first(paths[seed].exists)
    ]
    if group:
      run_seeds(experiment, splits, group)
  results = []
  for seed in seeds:
    read = functools.partial(reporting.read_result, workdir, seed, task.dataset)
    results.append(processes.from_first(read))
  metrics = protocol.all_metrics(task)
  own = task.report(
      results, functools.partial(best_models.best_model, experiment)
  )
  report = files.signed(
      reporting.summarize(
          experiment.name, experiment.changed, results, metrics, own.numbers
      )
  )
  processes.from_first(
      lambda: reporting.write_report(
          workdir, report, results, metrics, own.files
      )
  )
  processes.say(
      reporting.format_report(report, metrics)
      + reporting.format_numbers(own.numbers),
      end='',
  )
  return report


def _is_on_device(experiment: experiments.Experiment) -> bool:
  """Returns whether one device holds the whole training split."""
  on_device = experiment.config.keep_data_on == 'device'
  return on_device and experiment.placement.mesh is None


def run_seeds(
    experiment: experiments.Experiment,
    splits: Mapping[str, Any],
    seeds: Sequence[int],
) -> None:
  """Trains seeds, tests their best parameters and writes their result.json.

  Several seeds train in one compiled call. One that has stopped takes part in
  it until the last one stops, and nothing comes of it: so the others' numbers
  are the same whenever it stops. So does one that waits for the others' lesson
  to end.

  Args:
    experiment: what `prepare` returned.
    splits: what `program.load` made of the task's splits; the one to train on
      as the feed takes it.
    seeds: which ones.
  """
  with contextlib.ExitStack() as stack:
    group = [_begin(experiment, splits, seed, stack) for seed in seeds]
    while active := epochs.find_active(experiment, group):
      for one in active:
        one.records.start(epochs.lesson(experiment, one))
      trained = epochs.train(experiment, group, active)
      for one in active:
        one.records.lap('training')
      validations = epochs.validate(
          experiment, group, trained, splits['validation']
      )
      for one in active:
        is_best = epochs.conclude(experiment, one.run, validations[one.seed])
        one.records.lap('validation')
        _record(experiment, one, is_best)
  for one in group:
    tests = best_models.evaluate(experiment, one.run.best, splits['test'])
    finish = functools.partial(_finish, experiment, one, tests)
    processes.from_first(finish)


def _begin(
    experiment: experiments.Experiment,
    splits: Mapping[str, Any],
    seed: int,
    stack: contextlib.ExitStack,
) -> epochs.Seed:
  """Returns a seed as its last checkpoint has it, or at its start."""
  config, placement = experiment.config, experiment.placement
  directory = experiment.workdir / f'seed_{seed}'
  processes.from_first(lambda: directory.mkdir(exist_ok=True))
  keys = jax.random.split(jax.random.key(seed), 3)
  run = seed_state.begin(experiment, keys[0])
  checkpoints = stack.enter_context(
      run_directory.checkpoints(experiment.workdir, seed)
  )
  if run.restore(checkpoints):
    processes.say(f'seed {seed}: resumed after epoch {len(run.history)}')
    if run.num_devices != placement.num_devices:
      processes.say(
          f'seed {seed}: devices so far {run.num_devices}, from here'
          f' {placement.num_devices}; the last bits of the results may differ'
          ' from those of a run on either number'
      )
  run.num_devices = placement.num_devices
  is_host = config.keep_data_on == 'host' and not isinstance(
      splits['train'], protocol.Generator
  )
  feed = (pieces.Pieces if is_host else feeds.Feed)(
      experiment.program, placement, splits['train'], keys[1], config.num_epochs
  )
  records = stack.enter_context(
      records_lib.Records(
          directory,
          experiment.task.dataset,
          seed,
          config.num_epochs,
          experiment.steps_per_epoch,
          experiment.task.batch_size,
          protocol.epoch_metrics(experiment.task),
          len(run.history),
      )
  )
  return epochs.Seed(seed, run, feed, keys[2], checkpoints, records)


def _finish(
    experiment: experiments.Experiment, one: epochs.Seed, tests: dict[str, Any]
) -> None:
  """Writes the result of a seed, given those of the test and other splits."""
  task, seed, run, records = experiment.task, one.seed, one.run, one.records
  # Once more: this process may have had no epoch to run.
  records.write_metrics(run.history)
  test, main = tests.pop('test'), task.metrics[0]
  records.close(f'test {main.name} {main.text(test[main.name])}, {run.stopped}')
  reporting.write_result(
      experiment.workdir / f'seed_{seed}' / 'result.json',
      {
          **run_directory.owner(experiment.workdir, seed),
          'dataset': task.dataset,
          'test': test,
          **({'splits': tests} if tests else {}),
          'best_epoch': run.best_epoch,
          'num_epochs': len(run.history),
          'stopped': run.stopped,
          'diverged': run.diverged,
          'num_parameters': sum(
              leaf.size for leaf in jax.tree.leaves(run.state.params)
          ),
          'history': run.history,
      },
  )


def _record(
    experiment: experiments.Experiment, one: epochs.Seed, is_best: bool
) -> None:
  """Writes an epoch's results, and its sample and checkpoint if due."""
  config, run, records = experiment.config, one.run, one.records
  epoch = len(run.history)
  if config.sample_every and epoch % config.sample_every == 0:
    trained = run.state.params, run.state.statistics
    records.sample(
        epoch, lambda: samples.make(experiment.task, trained, one.key, epoch)
    )
  unsaved_seconds = records.epoch(run.history, is_best)
  if run.stopped or (
      len(run.history) % config.checkpoint_every == 0
      and unsaved_seconds >= config.checkpoint_seconds
  ):
    run.save(one.checkpoints)
    records.saved()
  records.epoch_done()
