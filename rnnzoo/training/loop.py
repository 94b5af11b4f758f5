"""The loop: seeds, epochs, validation, checkpoints, the final test.

All randomness is a function of (seed, epoch, step). That, and checkpoints that
hold all the rest, is why a run that was killed and resumed gives, on CPU,
bitwise the results of an uninterrupted run.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo.tasks import protocol
from rnnzoo.training import checkpointing
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import records as records_lib
from rnnzoo.training import report as report_lib
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from rnnzoo.training import trained as trained_lib


@dataclasses.dataclass(eq=False)
class Seed:
  """One of the seeds that train at once."""

  seed: int  # Seeds initialisation, shuffling and dropout.
  run: seed_state.SeedState  # The state of its training.
  feed: feeds.Feed  # Its training examples.
  key: jax.Array  # The key of dropout.
  checkpoints: checkpointing.Checkpoints  # Its checkpoints.
  records: records_lib.Records  # Its lines on the terminal and its files.


def find_active(
    experiment: experiments.Experiment, group: Sequence[Seed]
) -> list[Seed]:
  """Returns the seeds that train next, in one compiled call; [] at the end.

  A call has one lesson of a `Generator`. A process that was killed may have
  left some seeds an epoch ahead of others: the seeds in the next lesson wait.
  """
  going = [one for one in group if not one.run.stopped]
  lessons = [lesson(experiment, one) for one in going]
  pairs = zip(going, lessons, strict=True)
  return [one for one, own in pairs if own == min(lessons)]


def lesson(experiment: experiments.Experiment, one: Seed) -> int:
  """Returns the index of the lesson that a seed's next epoch has."""
  split = experiment.task.splits['train']
  if not isinstance(split, protocol.Generator):
    return 0
  return split.lesson(len(one.run.history) + 1)


def _train(
    experiment: experiments.Experiment,
    group: Sequence[Seed],
    active: Sequence[Seed],
) -> tuple[Any, Any]:
  """Trains active seeds for one epoch; returns parameters and statistics.

  Those of several seeds have a leading axis, one entry a seed of the group.
  """
  program, steps = experiment.program, experiment.steps_per_epoch

  def tell(done):
    active[0].records.update(len(active[0].run.history) * steps + done)

  # Inactive seeds take part in an epoch of the active ones.
  pieces = [
      one.feed.epoch(len((one if one in active else active[0]).run.history) + 1)
      for one in group
  ]
  states = [one.run.state for one in group]
  scales = [one.run.scale(experiment) for one in group]
  keys = [one.key for one in group]
  if len(group) == 1:
    state = feeds.run_epoch(
        program, states[0], pieces[0], scales[0], keys[0], tell
    )
    group[0].run.state = state
    return state.tested
  # Each seed's epoch is one piece, of examples that all seeds share.
  whole = [next(piece) for piece in pieces]
  together = whole[0]._replace(order=_stack([piece.order for piece in whole]))
  state = feeds.run_epoch(
      program.at_once,
      _stack(states),
      [together],
      _stack(scales),
      _stack(keys),
      tell,
  )
  states = jax.jit(_unstack, static_argnums=1)(state, len(group))
  for one, own in zip(group, states, strict=True):
    if one in active:
      one.run.state = own
      one.records.update((len(one.run.history) + 1) * steps)
  return state.tested


@jax.jit
def _stack(trees: Sequence[Any]) -> Any:
  """Returns trees of arrays as one, with a leading axis."""
  return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def _unstack(tree: Any, count: int) -> list[Any]:
  """Returns the entries of a tree of arrays with a leading axis."""
  return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


def _validate(
    experiment: experiments.Experiment,
    group: Sequence[Seed],
    trained: tuple[Any, Any],
    split: Any,
) -> list[protocol.Evaluation]:
  """Returns the results of the validation of each seed."""
  program = experiment.program
  if len(group) == 1:
    return [program.evaluate(*trained, split)]
  return _unstack(program.at_once.evaluate(*trained, split), len(group))


@promotion.of_dtypes
@promotion.of_ranks
def train_and_evaluate(experiment: experiments.Experiment) -> dict[str, Any]:
  """Trains and tests all seeds, and returns the report.

  Args:
    experiment: the experiment from `prepare`; seeds that are done are not run
      again.

  Returns:
    The content of report.json: ['test'][metric]['mean'] is the result, and
    ['diverged'] says for which seeds it is worth nothing.

  Raises:
    RunFileError: a file in the run directory is damaged.
    OSError: a file cannot be written.
  """
  config, task = experiment.config, experiment.task
  workdir = experiment.workdir
  _tell_start(experiment)
  splits = {
      name: experiment.program.load(task.splits[name])
      for name in ('validation', 'test')
  } | {'train': feeds.training_split(experiment)}
  seeds = range(config.seed, config.seed + config.num_seeds)
  for first in range(0, len(seeds), config.seeds_at_once):
    group = [
        seed
        for seed in seeds[first : first + config.seeds_at_once]
        if not processes.from_first(
            (workdir / f'seed_{seed}' / 'result.json').exists
        )
    ]
    if group:
      run_seeds(experiment, splits, group)
  read = lambda: [
      report_lib.read_result(workdir, seed, task.dataset) for seed in seeds
  ]
  results = processes.from_first(read)
  metrics = protocol.all_metrics(task)
  own = task.report(
      results, functools.partial(trained_lib.best_model, experiment)
  )
  summary = report_lib.summarize(
      experiment.name, experiment.changed, results, metrics, own.numbers
  )
  report = files.signed(summary)
  processes.from_first(
      lambda: report_lib.write_report(
          workdir, report, results, metrics, own.files
      )
  )
  text = report_lib.format_report(report, metrics)
  processes.say(text + report_lib.format_numbers(own.numbers), end='')
  return report


def _tell_start(experiment: experiments.Experiment) -> None:
  """Prints where the run is, and which devices train."""
  placement, train = experiment.placement, experiment.task.splits['train']
  label = 'device' if placement.num_devices == 1 else 'devices'
  processes.say(
      f'run directory: {experiment.workdir} (to resume after a kill, pass it as'
      f' --workdir)\n{label}: {placement.text}'
  )
  num_epochs = experiment.config.num_epochs
  if isinstance(train, protocol.Generator) and (
      train.lesson(num_epochs) < len(train.lessons)
  ):
    processes.say(
        f'WARNING: all {num_epochs} epochs are lessons that come first (of a'
        ' curriculum, or without noise): none trains on what comes after these'
    )


def run_seeds(
    experiment: experiments.Experiment,
    splits: Mapping[str, Any],
    seeds: Sequence[int],
) -> None:
  """Trains seeds, tests their best parameters and writes their result.json.

  Several seeds train in one compiled call. A seed that has stopped takes part
  until the last one stops, and its results are dropped: no other seed's numbers
  depend on when it stops. This also holds for a seed that waits for a lesson of
  other seeds to end. The training split is as the feed takes it, all further
  ones are from `Program.load`.
  """
  with contextlib.ExitStack() as stack:
    group = [_begin(experiment, splits, seed, stack) for seed in seeds]
    while active := find_active(experiment, group):
      for one in active:
        one.records.start(lesson(experiment, one))
      trained = _train(experiment, group, active)
      for one in active:
        one.records.lap('training')
      results = _validate(experiment, group, trained, splits['validation'])
      for one, result in zip(group, results, strict=True):
        if one in active:
          one.run.add_row(experiment, result)
          is_best = one.run.conclude(experiment)
          one.records.lap('validation')
          _record(experiment, one, is_best)
  for one in group:
    tests = trained_lib.evaluate_best(experiment, one.run.best, splits['test'])
    processes.from_first(functools.partial(_finish, experiment, one, tests))


def _begin(
    experiment: experiments.Experiment,
    splits: Mapping[str, Any],
    seed: int,
    stack: contextlib.ExitStack,
) -> Seed:
  """Returns a seed as its last checkpoint has it, or at its start."""
  config, placement = experiment.config, experiment.placement
  directory = experiment.workdir / f'seed_{seed}'
  processes.from_first(lambda: directory.mkdir(exist_ok=True))
  keys = jax.random.split(jax.random.key(seed), 3)
  taken = experiment.taken.get(seed)
  run = seed_state.begin(experiment, keys[0], taken and taken.arrays)
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
    # It may go on to another number of epochs.
    run.stopped = run.find_end(experiment)
  elif taken:
    processes.say(f'seed {seed}: {taken.text}')
  run.num_devices = placement.num_devices
  rest = splits['train'], keys[1], config.num_epochs, config.keep_data_on
  feed = feeds.Feed(experiment.program, placement, *rest)
  records = stack.enter_context(
      records_lib.Records(experiment, seed, done=len(run.history))
  )
  return Seed(seed, run, feed, keys[2], checkpoints, records)


def _finish(
    experiment: experiments.Experiment, one: Seed, tests: dict[str, Any]
) -> None:
  """Writes the result of a seed, with its results on the test splits."""
  task, seed, run, records = experiment.task, one.seed, one.run, one.records
  test, main = tests.pop('test'), task.metrics[0]
  init_from = experiment.config.init_from
  records.close(f'test {main.name} {main.text(test[main.name])}, {run.stopped}')
  result = {
      **run_directory.owner(experiment.workdir, seed),
      'dataset': task.dataset,
      **({'init_from': init_from} if init_from else {}),
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
  }
  path = experiment.workdir / f'seed_{seed}' / 'result.json'
  files.write_json(path, files.signed(result))
  # It may be lost if this process trained no epoch.
  files.write_csv(path.with_name('metrics.csv'), task.dataset, run.history)


def _record(
    experiment: experiments.Experiment, one: Seed, is_best: bool
) -> None:
  """Writes an epoch's results, and its sample and checkpoint if due."""
  config, run, records = experiment.config, one.run, one.records
  epoch = len(run.history)
  if config.sample_every and epoch % config.sample_every == 0:
    records.sample(epoch, run.state.tested, one.key)
  unsaved_seconds = records.epoch(run.history, is_best)
  if run.stopped or unsaved_seconds >= config.checkpoint_seconds:
    run.save(one.checkpoints)
    records.saved(epoch)
