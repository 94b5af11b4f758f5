"""How far the training of one seed has come, and when it ends.

Several processes draw equal conclusions, since they have equal numbers.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from flax.training import early_stopping
import jax
import jax.numpy as jnp
import ml_collections
import optax

from rnnzoo.tasks import protocol
from rnnzoo.training import checkpointing
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import metrics as metrics_lib
from rnnzoo.training import optimization
from rnnzoo.training import step


@dataclasses.dataclass
class SeedState:
  """The training of one seed so far; all of it is in a checkpoint."""

  state: step.TrainState  # The arrays that the next step needs.
  plateau: optax.OptState  # The plateau rule's state, or ().
  best: Any  # (params, statistics) of the best epoch so far.
  # The state of early stopping, which also knows the best value.
  stopper: early_stopping.EarlyStopping
  best_epoch: int = 0  # The best epoch's number.
  # Rows of numbers, one an epoch.
  history: list[files.Row] = dataclasses.field(default_factory=list)
  stopped: str = ''  # Why training has ended, '' while it goes on.
  diverged: bool = False  # Whether it has ended by a loss that is not finite.
  num_devices: int = 1  # The number of devices that did the last epoch.

  def save(self, checkpoints: checkpointing.Checkpoints) -> None:
    """Writes the checkpoint of the last epoch."""
    arrays = self.state, self.plateau
    checkpoints.save(len(self.history), arrays, self.best, self._progress())

  def _progress(self) -> dict[str, Any]:
    """Returns all but arrays, by the name of its field."""
    return {
        'best_epoch': self.best_epoch,
        'history': self.history,
        'stopped': self.stopped,
        'diverged': self.diverged,
        'stopper': dataclasses.asdict(self.stopper),
        'num_devices': self.num_devices,
    }

  def restore(self, checkpoints: checkpointing.Checkpoints) -> bool:
    """Returns whether there was a checkpoint to go on from."""
    restored = checkpoints.restore((self.state, self.plateau), self.best)
    if restored is None:
      return False
    (self.state, self.plateau), self.best, progress = restored
    self.stopper = self.stopper.replace(**progress.pop('stopper'))
    vars(self).update(progress)
    return True

  def learning_rate(
      self, experiment: experiments.Experiment, offset: int = 0
  ) -> float:
    """Returns the learning rate of the next step, or so many steps later."""
    # The optimiser knows of no step that was skipped.
    known = self.state.step - self.state.skipped
    rate = experiment.schedule(jnp.maximum(known + offset, 0))
    return float(rate * self.scale(experiment))

  def scale(self, experiment: experiments.Experiment) -> jax.Array:
    """Returns the plateau rule's factor of the learning rate."""
    return self.plateau.scale if experiment.plateau else jnp.ones(())

  def add_row(
      self, experiment: experiments.Experiment, evaluation: protocol.Evaluation
  ) -> None:
    """Adds the numbers of an epoch, with its validation, to the history."""
    state, num_steps = self.state, experiment.steps_per_epoch
    metrics = protocol.epoch_metrics(experiment.task)
    validation = metrics_lib.of_examples(evaluation, metrics)
    totals = state.scores | {'loss': state.loss}
    train = metrics_lib.of_means(
        {name: float(total) / num_steps for name, total in totals.items()},
        metrics,
    )
    before = sum(row.get('skipped_steps', 0) for row in self.history)
    skipped = int(state.skipped) - before
    row = {
        'epoch': len(self.history) + 1,
        # The last step's, without the digits that float32 makes up.
        'learning_rate': float(f'{self.learning_rate(experiment, -1):.6g}'),
        **{f'train_{name}': value for name, value in train.items()},
        'gradient_norm': float(state.gradient_norm)
        / max(num_steps - skipped, 1),
        **{f'validation_{name}': value for name, value in validation.items()},
        **learned_numbers(state.params),
    }
    if state.loss_scale is not None:
      row['skipped_steps'] = skipped
      row['loss_scale'] = float(state.loss_scale.scale)
    self.history.append(row)

  def conclude(self, experiment: experiments.Experiment) -> bool:
    """Draws the conclusions of the last epoch; returns whether it is the best.

    No patience counts the epochs of lessons, which come first, and once they
    are over none of them is the best.
    """
    config, plateau = experiment.config, experiment.plateau
    row, epoch = self.history[-1], len(self.history)
    train = experiment.task.splits['train']
    lessons = train.lessons if isinstance(train, protocol.Generator) else ()
    lesson_epochs = sum(num_epochs for num_epochs, _ in lessons)
    is_lesson = epoch <= lesson_epochs
    if epoch == lesson_epochs + 1:
      self.stopper = self.stopper.reset()
    metrics = protocol.epoch_metrics(experiment.task)
    value = metrics_lib.monitored(config.monitor, row[config.monitor], metrics)
    if plateau and not is_lesson:
      self.plateau = optimization.update_plateau(plateau, self.plateau, value)
    self.stopper = self.stopper.update(optimization.finite(value))
    if is_lesson:
      self.stopper = self.stopper.replace(patience_count=0, should_stop=False)
    # A value that is not finite is no improvement, not even over nothing: if
    # no epoch was finite, the parameters of the start are tested.
    is_best = self.stopper.has_improved and math.isfinite(value)
    if is_best:
      self.best_epoch = epoch
      self.best = copy(self.state.tested)
    self._begin_mean(experiment)
    self.diverged = not all(
        math.isfinite(row[name]) for name in ('train_loss', 'validation_loss')
    )
    self.stopped = self.find_end(experiment)
    return is_best

  def _begin_mean(self, experiment: experiments.Experiment) -> None:
    """Begins the mean of parameters, which the last step's are the first of.

    It begins once the validation loss is above the least one of all epochs but
    the last `average_patience`.
    """
    patience = experiment.config.optimizer.average_patience
    losses = [row['validation_loss'] for row in self.history]
    if self.state.mean is None or len(losses) <= patience:
      return
    count = self.state.mean[1]
    if count == 0 and losses[-1] > min(losses[:-patience]):
      begun = self.state.params, jnp.ones_like(count)
      self.state = self.state._replace(mean=copy(begun))

  def find_end(self, experiment: experiments.Experiment) -> str:
    """Returns why training ends after the last epoch; '' if it goes on."""
    optimizer, epoch = experiment.config.optimizer, len(self.history)
    if self.diverged:
      return f'the loss was not finite in epoch {epoch}'
    if self.stopper.should_stop:
      return f'early stopping after epoch {epoch}'
    if epoch == experiment.config.num_epochs:
      return f'all {epoch} epochs'
    is_warm = self.state.step - self.state.skipped >= optimizer.warmup_steps
    least = optimizer.stop_rate * (1 - 1e-6)
    if is_warm and self.learning_rate(experiment) < least:
      return f'learning rate below {optimizer.stop_rate:g} after epoch {epoch}'
    return ''


def learned_numbers(params: Any) -> dict[str, float]:
  """Returns the parameters that are one number, A-GRU's ε say, by path."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='.')
  return {
      name(path).removesuffix('.value'): float(leaf)
      for path, leaf in jax.tree.leaves_with_path(params)
      if leaf.ndim == 0
  }


def begin(
    experiment: experiments.Experiment,
    key: jax.Array,
    taken: Mapping[str, Any] | None = None,
) -> SeedState:
  """Returns the state before the first epoch; see `Program.init`."""
  state, rule = experiment.program.init(key, taken), experiment.plateau
  plateau = rule.init(state.params) if rule else ()
  return SeedState(
      state=state,
      plateau=experiment.placement.replicate(plateau),
      best=copy((state.params, state.statistics)),
      stopper=make_stopper(experiment.config.early_stopping),
  )


def make_stopper(
    config: ml_collections.ConfigDict,
) -> early_stopping.EarlyStopping:
  """Returns the rule of `config.early_stopping`, of none if patience is 0.

  Patience is the number of epochs in a row without improvement that ends
  training.
  """
  # flax's rule stops at the epoch after the tolerated ones.
  patience = config.patience - 1 if config.patience else 2**31
  return early_stopping.EarlyStopping(
      min_delta=config.min_delta, patience=patience
  )


def copy(tree: Any) -> Any:
  """Returns a copy that survives when the next step donates the original."""
  return jax.tree.map(jnp.copy, tree)
