"""The loop: seeds, epochs, validation, checkpoints, the final test.

All randomness is a function of (seed, epoch, step). That, and checkpoints that
hold all the rest, is why a run that was killed and resumed gives, on CPU,
bitwise what an uninterrupted run gives.
"""

from collections.abc import Mapping
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.training import checkpointing
from rnnzoo.training import experiment as experiments
from rnnzoo.training import feed as feeds
from rnnzoo.training import processes
from rnnzoo.training import program as programs
from rnnzoo.training import records as records_lib
from rnnzoo.training import reporting
from rnnzoo.training import seed_state


def train_and_evaluate(experiment: experiments.Experiment) -> dict[str, Any]:
  """Trains and tests all seeds, and returns the report.

  Args:
    experiment: what `prepare` returned. Seeds that are done are not run again.

  Returns:
    What report.json holds; ['test']['accuracy']['mean'] is the main result, and
    ['diverged'] says for which seeds it is worth nothing.

  Raises:
    RunFileError: a file in the run directory is not what was written there.
    OSError: a file cannot be written.
  """
  config, task = experiment.config, experiment.task
  processes.say(
      f'run directory: {experiment.workdir} (to resume after a kill, pass it as'
      ' --workdir)'
  )
  placement = experiment.placement
  label = 'device' if placement.num_devices == 1 else 'devices'
  processes.say(f'{label}: {placement.text}')
  splits: dict[str, Any] = {
      name: experiment.program.load(split)
      for name, split in task.splits.items()
      if name != 'train' or placement.mesh is None
  }
  splits.setdefault('train', task.splits['train'])
  results = []
  for seed in range(config.seed, config.seed + config.num_seeds):
    path = experiment.workdir / f'seed_{seed}' / 'result.json'
    if not processes.from_first(path.exists):
      run_seed(experiment, splits, seed)
    read = functools.partial(reporting.read_result, path, seed, task.dataset)
    results.append(processes.from_first(read))
  report = reporting.summarize(
      experiment.name, experiment.changed, task.dataset, results
  )
  processes.from_first(
      lambda: reporting.write_report(
          experiment.workdir, report, results, task.class_names
      )
  )
  processes.say(reporting.format_report(report), end='')
  return report


def run_seed(
    experiment: experiments.Experiment,
    splits: Mapping[str, Any],
    seed: int,
) -> None:
  """Trains one seed, tests its best parameters and writes its result.json.

  Args:
    experiment: what `prepare` returned.
    splits: what `program.load` made of the task's splits; the one to train on
      as the feed takes it.
    seed: of initialisation, shuffling and dropout.
  """
  config, program, task = experiment.config, experiment.program, experiment.task
  placement = experiment.placement
  directory = experiment.workdir / f'seed_{seed}'
  processes.from_first(lambda: directory.mkdir(exist_ok=True))
  keys = jax.random.split(jax.random.key(seed), 3)
  run = seed_state.begin(experiment, keys[0])
  with checkpointing.Checkpoints(directory / 'checkpoints') as checkpoints:
    if run.restore(checkpoints):
      processes.say(f'seed {seed}: resumed after epoch {len(run.history)}')
      if run.num_devices != placement.num_devices:
        processes.say(
            f'seed {seed}: devices so far {run.num_devices}, from here'
            f' {placement.num_devices}; the last bits of the results may differ'
            ' from those of a run on either number'
        )
    run.num_devices = placement.num_devices
    feed = feeds.Feed(
        program, placement, splits['train'], keys[1], config.num_epochs
    )
    with records_lib.Records(
        directory,
        task.dataset,
        seed,
        config.num_epochs,
        experiment.steps_per_epoch,
        len(run.history),
    ) as records:
      while not run.stopped:
        records.start()
        learning_rate = _train_epoch(experiment, run, feed, keys[2], records)
        records.lap('training')
        is_best = _validate(experiment, run, splits, learning_rate)
        records.lap('validation')
        unsaved_seconds = records.epoch(run.history, is_best)
        if run.stopped or (
            len(run.history) % config.checkpoint_every == 0
            and unsaved_seconds >= config.checkpoint_seconds
        ):
          run.save(checkpoints)
          records.saved()
        records.epoch_done()
  losses, predictions = program.evaluate(*run.best, splits['test'])
  processes.from_first(
      lambda: _finish(experiment, run, records, seed, losses, predictions)
  )


def _finish(
    experiment: experiments.Experiment,
    run: seed_state.SeedState,
    records: records_lib.Records,
    seed: int,
    losses: np.ndarray,
    predictions: np.ndarray,
) -> None:
  """Writes the result of a seed, given those of the test's examples."""
  task = experiment.task
  # Once more: this process may have had no epoch to run.
  records.write_metrics(run.history)
  test = reporting.classification_metrics(
      np.asarray(task.splits['test']['label']),
      predictions,
      len(task.class_names),
  )
  test['loss'] = float(np.mean(losses, dtype=np.float64))
  records.close(f'test accuracy {test["accuracy"]:.4f}, {run.stopped}')
  reporting.write_result(
      experiment.workdir / f'seed_{seed}' / 'result.json',
      {
          'seed': seed,
          'dataset': task.dataset,
          'test': test,
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


def best_model(experiment: experiments.Experiment, seed: int) -> nnx.Module:
  """Returns the model of a seed's best epoch so far.

  Args:
    experiment: what `prepare` returned for the run directory.
    seed: which of its seeds.

  Raises:
    FileNotFoundError: the seed has no checkpoint.
  """
  directory = experiment.workdir / f'seed_{seed}' / 'checkpoints'
  abstract = nnx.eval_shape(lambda: experiment.task.build_model(nnx.Rngs(seed)))
  graphdef, *state = programs.split(abstract)
  with checkpointing.Checkpoints(directory) as checkpoints:
    best = checkpoints.restore_best(tuple(state))
  if best is None:
    raise FileNotFoundError(f'there is no checkpoint in {directory}')
  return nnx.merge(graphdef, *best)


def _train_epoch(
    experiment: experiments.Experiment,
    run: seed_state.SeedState,
    feed: feeds.Feed,
    key: jax.Array,
    records: records_lib.Records,
) -> float:
  """Trains for one epoch, and returns the learning rate of its first step."""
  done = len(run.history)
  scale = run.plateau.scale if experiment.plateau else jnp.ones(())
  learning_rate = float(experiment.schedule(run.state.step) * scale)
  examples, order = feed.epoch(done + 1)
  run.state = programs.run_epoch(
      experiment.program,
      run.state,
      examples,
      order,
      scale,
      key,
      lambda step: records.update(done * experiment.steps_per_epoch + step),
  )
  return learning_rate


def _validate(
    experiment: experiments.Experiment,
    run: seed_state.SeedState,
    splits: Mapping[str, Any],
    learning_rate: float,
) -> bool:
  """Validates, draws the conclusions, and returns whether it is the best."""
  config, epoch = experiment.config, len(run.history) + 1
  losses, predictions = experiment.program.evaluate(
      run.state.params, run.state.statistics, splits['validation']
  )
  labels = experiment.task.splits['validation']['label']
  mean = lambda total: float(total) / experiment.steps_per_epoch
  row = {
      'epoch': epoch,
      # Without the digits that float32 makes up.
      'learning_rate': float(f'{learning_rate:.6g}'),
      'train_loss': mean(run.state.loss),
      'train_accuracy': mean(run.state.accuracy),
      'gradient_norm': mean(run.state.gradient_norm),
      'validation_loss': float(np.mean(losses, dtype=np.float64)),
      'validation_accuracy': float(np.mean(predictions == labels)),
  }
  run.history.append(row)
  return run.conclude(config, experiment.plateau)
