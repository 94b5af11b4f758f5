"""Turns a config into an experiment that is ready to run.

Everything that can be wrong with a config, the data or the run directory is
found here, before any training, and told in one sentence.
"""

from collections.abc import Mapping
import os
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
import optax

from pallas_kernels import promotion
from rnnzoo import settings
from rnnzoo import tasks
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.training import files
from rnnzoo.training import optimization
from rnnzoo.training import placement as placements
from rnnzoo.training import processes
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from rnnzoo.training import step
from rnnzoo.training import visits
from rnnzoo.training import warm_start

# Rules for the fields that training itself reads; tasks check their sections.
_RULES: fields.Rules = {
    'task': fields.text(),
    'seed': fields.seed(),
    'init_from': fields.text(),
    'init_exclude': fields.pattern(),
    'num_seeds': fields.integer(1),
    'seeds_at_once': fields.integer(1),
    'num_epochs': fields.integer(1),
    'batch_size': fields.integer(1),
    'num_devices': fields.optional(fields.integer(1)),
    'eval_batch_size': fields.integer(1),
    'monitor': fields.text(),
    'checkpoint_seconds': fields.number(0),
    'sample_every': fields.integer(0),
    'keep_data_on': fields.one_of(('device', 'host')),
    'optimizer': fields.section(),
    'early_stopping': fields.section(),
}
_STOPPING_RULES: fields.Rules = {
    'patience': fields.integer(0),
    'min_delta': fields.number(0),
}

# A config with other values here is still the experiment of its file's name.
_NOT_IN_THE_NAME = (
    'seed',
    'num_seeds',
    'seeds_at_once',
    'eval_batch_size',
    'checkpoint_seconds',
    'sample_every',
    'data.source',
)


class Experiment(NamedTuple):
  """A config that was found to be in order, ready to run.

  Attributes:
    config: the resolved config.
    workdir: the run directory, which belongs to this config.
    name: the name of the experiment, with the changed fields in it.
    changed: the fields with other values than in the config's file.
    task: the task with its data.
    placement: the devices.
    program: the compiled functions.
    schedule: the learning rate as a function of the step.
    plateau: the rule that lowers the learning rate, or None.
    steps_per_epoch: steps in which each example is seen.
    taken: what seeds that have not begun take of `config.init_from`.
  """

  config: ml_collections.ConfigDict
  workdir: pathlib.Path
  name: str
  changed: Mapping[str, Any]
  task: tasks.Task
  placement: placements.Placement
  program: step.Program
  schedule: optax.Schedule
  plateau: optax.GradientTransformationExtraArgs | None
  steps_per_epoch: int
  taken: Mapping[int, Any]


@promotion.of_dtypes
@promotion.of_ranks
def prepare(
    config: ml_collections.ConfigDict,
    workdir: str,
    name: str = 'experiment',
    defaults: ml_collections.ConfigDict | None = None,
    mode: str = 'train',
) -> Experiment:
  """Reads the data and checks all that can be checked before training.

  Args:
    config: the config; `configs/base.py` explains the fields.
    workdir: the run directory, which is resumed if it holds a run; '' for a
      new one under runs/. No other process can use it while this one lives.
    name: the name of the experiment, for the report.
    defaults: the config that has this name. The report says where `config`
      differs.
    mode: 'train', or 'evaluate' for a run that is there, to be tested alone;
      fields that only say how that is done, as `eval_batch_size`, may differ.

  Raises:
    ValueError: a field's value cannot be, the run directory belongs to another
      config or is in use, or a file in it is damaged.
    NotImplementedError: the implementation that the config names cannot run.
    OSError: data are missing, or the run directory cannot be made.
  """
  if mode not in ('train', 'evaluate'):
    raise ValueError(f"mode must be 'train' or 'evaluate'; got {mode!r}")
  _check(config)
  plateau = optimization.make_plateau(config.optimizer)
  optimization.make_optimizer(config.optimizer, 1)  # Before the data.
  changed = {} if defaults is None else _changes(config, defaults)
  task = processes.one_after_first(lambda: tasks.find(config.task)(config))
  data = run_data.of_task(task)
  _check_same(config, data.digest)
  _check_task(config, task)
  placement = placements.choose(
      task.batch_size, config.num_devices, config.seeds_at_once
  )
  train = task.splits['train']
  _check_seeds(config, train, placement)
  seen = visits.Visits(train, task.batch_size, placement)
  steps_per_epoch = seen.steps_per_epoch
  _check_steps(config, steps_per_epoch)
  rates = config.optimizer, config.num_epochs * steps_per_epoch, steps_per_epoch
  program = step.Program(
      task,
      optimization.make_optimizer(*rates),
      config.eval_batch_size,
      placement,
      optimization.make_loss_scale(config),
      config.keep_data_on,
      config.get('model', {}).get('dropconnect_rate', 0.0),
      config.optimizer.rate_factors,
      config.optimizer.average_patience > 0,
  )
  _check_program(program, train, config.optimizer)
  full_name, prefix = _names(name, changed)
  seeds = processes.from_first(lambda: _fresh_seeds(config, workdir))
  taken = warm_start.take(config, task, seeds if mode == 'train' else ())
  data = data._replace(taken={str(k): one.digest for k, one in taken.items()})
  path = processes.from_first(
      lambda: run_directory.open_or_create(
          config, data, workdir, full_name, prefix, mode
      )
  )
  return Experiment(
      config=config,
      workdir=path,
      name=full_name,
      changed=changed,
      task=task,
      placement=placement,
      program=program,
      schedule=optimization.make_schedule(*rates),
      plateau=plateau,
      steps_per_epoch=steps_per_epoch,
      taken=taken,
  )


def _names(name: str, changed: Mapping[str, Any]) -> tuple[str, str]:
  """Returns an experiment's name, and the start of its directory's name."""
  if differs := [key for key in changed if key not in _NOT_IN_THE_NAME]:
    values = ', '.join(f'{k}={changed[k]}' for k in differs)
    return f'{name} with {values}', f'{name}-changed'
  return name, name


def _fresh_seeds(config: ml_collections.ConfigDict, workdir: str) -> list[int]:
  """Returns the seeds of a run that have no checkpoint yet."""
  path = fields.expand(workdir)
  begun = lambda seed: run_directory.last_epoch(path / f'seed_{seed}')
  seeds = range(config.seed, config.seed + config.num_seeds)
  return [seed for seed in seeds if not (workdir and begun(seed))]


def _check_task(config: ml_collections.ConfigDict, task: tasks.Task) -> None:
  """Raises ValueError for fields that do not fit the task or its data."""
  if not {'train', 'validation', 'test'} <= task.splits.keys():
    raise ValueError(
        f'{type(task).__name__}.splits must have train, validation and test;'
        f' got {", ".join(task.splits)}'
    )
  monitors = [f'validation_{m.name}' for m in protocol.epoch_metrics(task)]
  makes_text = type(task).sample is not protocol.Task.sample
  for_task = f'for the task {config.task!r}, which'
  rules = {
      'monitor': fields.one_of(monitors),
      'sample_every': fields.Rule(
          f'0 {for_task} makes no text', lambda every: makes_text or not every
      ),
  }
  fields.check(config, rules, 'config')
  model = config.get('model', {})
  for name, none, without in (
      ('label_smoothing', '0', 'smooths no labels'),
      ('pooling', "'last'", 'names no class for a whole sequence'),
  ):
    allowed = getattr(task, name)
    if model.get(name, allowed) != allowed:
      raise ValueError(
          f'config.model.{name} must be {none} {for_task} {without}; got'
          f' {model[name]!r}'
      )
  train = task.splits['train']
  if not isinstance(train, protocol.Generator):
    num_examples = sum(map(protocol.num_examples, protocol.buckets(train)))
    if task.batch_size > num_examples:
      raise ValueError(
          f'config.batch_size must be at most {num_examples}, the number of'
          f' training examples; got {task.batch_size}'
      )


def _check_steps(
    config: ml_collections.ConfigDict, steps_per_epoch: int
) -> None:
  """Raises ValueError for a number of steps that cannot be."""
  num_steps = config.num_epochs * steps_per_epoch
  in_32_bits = fields.Rule(
      f'below {2**31 // steps_per_epoch}, since steps are counted in 32 bits',
      lambda _: num_steps < 2**31,
  )
  fields.check(config, {'num_epochs': in_32_bits}, 'config')
  if config.optimizer.warmup_steps >= num_steps:
    settings.warn(
        f'config.optimizer.warmup_steps={config.optimizer.warmup_steps} is not'
        f' over at the end of training, after {num_steps} steps, so the'
        ' learning rate never arrives'
    )


def _check_program(
    program: step.Program,
    train: protocol.Split,
    optimizer: ml_collections.ConfigDict,
) -> None:
  """Raises ValueError if a step of training cannot be made or held."""
  key = jax.random.key(0)
  state = jax.eval_shape(program.init, key)
  _check_memory(state)
  exclude = optimizer.weight_decay_exclude
  if optimizer.weight_decay and exclude:
    decays = jax.tree.leaves(optimization.decay_mask(exclude)(state.params))
    if all(decays) or not any(decays):
      settings.warn(
          f'config.optimizer.weight_decay_exclude={exclude!r} excludes'
          f' {"no parameter" if all(decays) else "every parameter"} from decay'
      )
  kinds: list[Any] = [train]
  if isinstance(train, protocol.Generator):
    lengths = [num_epochs for num_epochs, _ in train.lessons] + [1]
    kinds = [visits.Lesson(i) for i, length in enumerate(lengths) if length]
  # Tracing one step, without running it, finds inputs that the model refuses.
  order = jax.eval_shape(program.shuffle, key, 0)
  for examples in kinds:
    jax.eval_shape(program.train_steps, state, examples, order, 0, 1.0, key)


def _check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if a field that training itself reads cannot be."""
  fields.check(config, _RULES, 'config')
  fields.check(config.early_stopping, _STOPPING_RULES, 'config.early_stopping')
  if (last := config.seed + config.num_seeds - 1) >= 2**32:
    raise ValueError(
        'config.seed + config.num_seeds - 1 must be a seed below 2^32; got'
        f' {last}'
    )
  tasks.find(config.task)
  if config.init_exclude and not config.init_from:
    raise ValueError(
        'config.init_exclude would be ignored without config.init_from; got'
        f' {fields.shorten(config.init_exclude)}'
    )
  # Here, since the run directory needs it as well.
  run_directory.as_json(config)


def _check_seeds(
    config: ml_collections.ConfigDict,
    train: protocol.Split,
    placement: placements.Placement,
) -> None:
  """Raises ValueError if several seeds cannot train at once."""
  is_generator = isinstance(train, protocol.Generator)
  count = placement.num_devices
  for reason, is_so in {
      f'on {count} devices; config.num_devices=1 would do': count > 1,
      "with config.keep_data_on='host'": config.keep_data_on == 'host',
      f'for the task {config.task!r}, whose batches are of different lengths in'
      ' each seed': not is_generator
      and len(protocol.buckets(train)) > 1,
  }.items():
    if is_so:
      rule = fields.Rule(f'1 {reason}', lambda at_once: at_once == 1)
      fields.check(config, {'seeds_at_once': rule}, 'config')


def _check_same(config: ml_collections.ConfigDict, digest: str) -> None:
  """Raises ValueError if config or data differ between processes."""
  if jax.process_count() == 1:
    return
  here = run_directory.flatten(run_directory.as_json(config))
  elsewhere = set(run_directory.NOT_COMPARED) - {'num_devices'}
  compared = {k: v for k, v in here.items() if k not in elsewhere}
  processes.check_same(files.digest(compared), 'a config')
  processes.check_same(digest, 'data')


def _check_memory(state: step.TrainState) -> None:
  """Raises ValueError if the device cannot even hold the parameters."""
  needed = sum(
      leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
  )
  stats = jax.local_devices()[0].memory_stats() or {}
  there = stats.get(
      'bytes_limit', os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  )
  if needed > there:
    raise ValueError(
        f'the parameters and the state of the optimizer take {needed:,} bytes,'
        f' but the device has {there:,}; choose a smaller'
        ' config.model.features or config.model.num_layers'
    )


def _changes(
    config: ml_collections.ConfigDict, defaults: ml_collections.ConfigDict
) -> dict[str, Any]:
  """Returns the fields of `config` with values other than the defaults."""
  here, there = (
      run_directory.flatten(run_directory.as_json(x))
      for x in (config, defaults)
  )
  for key in here.keys() - there.keys():
    if not key.startswith(('model.options.', 'model.last_layer_options.')):
      raise ValueError(
          f'the config has no field {key!r}; nothing would read it'
      )
  changed = {
      key: value
      for key, value in here.items()
      if key not in run_directory.NOT_COMPARED
      and (key not in there or value != there[key])
  }
  for key in changed:
    section, _, option = key.rpartition('options.')
    is_option = section in ('model.', 'model.last_layer_')
    if is_option and option.split('.')[0] != config.model.layer:
      raise ValueError(
          f'config.{key} would be ignored: config.model.layer is'
          f' {config.model.layer!r}'
      )
  return changed
