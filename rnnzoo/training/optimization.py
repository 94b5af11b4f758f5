"""Optimisers, learning-rate schedules and the plateau rule, from a config.

`make_optimizer` chains optax transformations in the order that the recipes
need: clip the gradient, add L2 weight decay (or, for 'adamw', decay apart from
the moments), scale by the optimiser's moments, scale by the learning rate.
`make_plateau` is kept apart: it moves once an epoch, on the host, while the
optimiser moves once a step.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import re
from typing import Any

from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import ml_collections
import optax
from optax import contrib

from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields

# Each takes `config.optimizer` and returns the scaling by its moments.
_adam = lambda config: optax.scale_by_adam(config.b1, config.b2)
_MOMENTS: Mapping[
    str, Callable[[ml_collections.ConfigDict], optax.GradientTransformation]
] = {
    'adam': _adam,
    'adamw': _adam,
    'adagrad': lambda config: optax.scale_by_rss(),
    'rmsprop': lambda config: optax.scale_by_rms(config.b2),
    'sgd': lambda config: optax.trace(config.b1),
}

RULES: fields.Rules = {
    'name': fields.one_of(_MOMENTS),
    'learning_rate': fields.number(0, above=True),
    'b1': fields.number(0, 1, below=True),
    'b2': fields.number(0, 1, below=True),
    'weight_decay': fields.number(0),
    'weight_decay_exclude': fields.pattern(),
    'rate_factors': fields.pairs(
        'pairs of a regular expression and a factor of at least 0, as'
        " (('backbone', 0.1),)",
        fields.pattern(),
        fields.number(0),
    ),
    'clip_norm': fields.number(0),
    'clip_value': fields.number(0),
    'schedule': fields.one_of(('constant', 'cosine', 'step')),
    'warmup_steps': fields.integer(0),
    'plateau_factor': fields.number(0, 1, above=True),
    'plateau_patience': fields.integer(0),
    'plateau_min_delta': fields.number(0),
    'plateau_floor': fields.number(0),
    'stop_rate': fields.number(0),
    'average_patience': fields.integer(0),
    'step_factor': fields.number(0, 1, above=True),
    'step_epochs': fields.integer(1),
    'loss_scale_interval': fields.integer(1),
}


def make_optimizer(
    config: ml_collections.ConfigDict, num_steps: int, steps_per_epoch: int = 1
) -> optax.GradientTransformation:
  """Returns the optimiser that `config.optimizer` describes.

  The schedule needs the steps of the whole training, and of an epoch.
  """
  fields.check(config, RULES, 'config.optimizer')
  together = {
      'plateau_floor': fields.Rule(
          f'at most config.optimizer.learning_rate, {config.learning_rate}',
          lambda floor: floor <= config.learning_rate,
      ),
  }
  fields.check(config, together, 'config.optimizer')
  transformations = []
  if config.clip_value:
    transformations.append(optax.clip(config.clip_value))
  if config.clip_norm:
    transformations.append(optax.clip_by_global_norm(config.clip_norm))
  steps = [
      optax.add_decayed_weights(
          config.weight_decay, mask=decay_mask(config.weight_decay_exclude)
      ),
      _MOMENTS[config.name](config),
  ]
  if not config.weight_decay:
    del steps[0]
  elif config.name == 'adamw':
    steps.reverse()
  schedule = make_schedule(config, num_steps, steps_per_epoch)
  steps.append(optax.scale_by_learning_rate(schedule))
  if config.rate_factors:
    factors = rate_factors(config.rate_factors)
    multiply = lambda x, _: jax.tree.map(lambda f, u: f * u, factors(x), x)
    steps.append(optax.stateless(multiply))
  return optax.chain(*transformations, *steps)


def make_schedule(
    config: ml_collections.ConfigDict, num_steps: int, steps_per_epoch: int = 1
) -> optax.Schedule:
  """Returns the learning rate as a function of the step.

  A cosine ends at zero after `num_steps`, the steps of the whole training.
  """
  if config.schedule == 'constant':
    after_warmup = optax.constant_schedule(config.learning_rate)
  elif config.schedule == 'step':
    # Epochs count from the first step, warm or not. Steps have 32 bits.
    every = min(config.step_epochs * steps_per_epoch, 2**31 - 1)
    after_warmup = lambda step: config.learning_rate * config.step_factor ** (
        (step + config.warmup_steps) // every
    )
  else:
    after_warmup = optax.cosine_decay_schedule(
        config.learning_rate, max(num_steps - config.warmup_steps, 1)
    )
  if not config.warmup_steps:
    return after_warmup
  warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
  return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def decay_mask(exclude: str) -> Callable[[optax.Params], optax.Params]:
  """Returns a function from parameters to a mask, True if one decays.

  `exclude` is a regular expression, searched for in the path of each parameter,
  as in "['backbone']['layers'][0]['bias']"; '' excludes none.
  """
  decays = lambda path, _: not (exclude and re.search(exclude, name_of(path)))
  return lambda params: jax.tree_util.tree_map_with_path(decays, params)


def rate_factors(
    pairs: Sequence[tuple[str, float]],
) -> Callable[[optax.Params], Any]:
  """Returns a function from parameters to the factors of their rates.

  `pairs` are `config.optimizer.rate_factors`. The function raises ValueError if
  one of them is of no parameter, or no parameter is trained.
  """

  def factors(params):
    names = jax.tree_util.tree_map_with_path(lambda p, _: name_of(p), params)
    rules = [*enumerate(pairs), (len(pairs), ('', 1.0))]
    rule = lambda name: next(i for i, (p, _) in rules if re.search(p, name))
    found = jax.tree.map(rule, names)
    for index, (pattern, _) in rules[:-1]:
      if index not in jax.tree.leaves(found):
        raise ValueError(
            f'config.optimizer.rate_factors: {pattern!r} is found in no path,'
            ' or where an earlier one is; paths are'
            f' {", ".join(jax.tree.leaves(names)[:3])}, ...'
        )
    found = jax.tree.map(lambda index: rules[index][1][1], found)
    if not any(jax.tree.leaves(found)):
      raise ValueError('config.optimizer.rate_factors freezes all parameters')
    return found

  return factors


def name_of(path: Any) -> str:
  """Returns the path of a parameter, as regular expressions see it."""
  return jax.tree_util.keystr(path).removesuffix('.value')


def make_plateau(
    config: ml_collections.ConfigDict,
) -> optax.GradientTransformationExtraArgs | None:
  """Returns the rule that lowers the learning rate on a plateau, or None.

  Its state's `scale` multiplies the learning rate. Give it the monitored value
  once an epoch with `update_plateau`. The epoch after `plateau_patience` epochs
  without improvement lowers the rate, as in torch's ReduceLROnPlateau.
  """
  fields.check(config, RULES, 'config.optimizer')
  if fields.float32(config.plateau_factor) == 1.0:
    return None
  # optax lowers at the last tolerated epoch, torch at the one after it.
  rule = contrib.reduce_on_plateau(
      config.plateau_factor,
      patience=config.plateau_patience + 1,
      rtol=0.0 if config.plateau_min_delta else 1e-4,
      atol=config.plateau_min_delta,
      min_scale=config.plateau_floor / config.learning_rate,
  )
  # Uncompiled, its lax.cond would be traced and compiled anew each epoch.
  return rule._replace(update=jax.jit(rule.update))


def make_loss_scale(
    config: ml_collections.ConfigDict,
) -> dynamic_scale.DynamicScale | None:
  """Returns the factor of the loss before the first step; None for none.

  Small gradients are zero in float16, large ones are infinite. So the loss is
  multiplied by a factor, and the gradients are divided by it in float32. A step
  whose gradients are not finite is skipped, and halves the factor. The factor
  doubles after `optimizer.loss_scale_interval` steps that were not skipped.

  References:
    Micikevicius et al., Mixed precision training, 2018, section 3.2.
  """
  model = config.get('model', {})
  if 'dtype' not in model or backbones.find_dtype(model) != jnp.float16:
    return None
  return dynamic_scale.DynamicScale(
      # flax doubles in the step after so many.
      growth_interval=config.optimizer.loss_scale_interval - 1,
      fin_steps=jnp.zeros((), jnp.int32),  # type: ignore[arg-type]
      scale=jnp.asarray(2.0**16, jnp.float32),  # type: ignore[arg-type]
  )


def update_plateau(
    plateau: optax.GradientTransformationExtraArgs,
    state: optax.OptState,
    value: float,
) -> optax.OptState:
  """Returns the state after an epoch whose monitored value is `value`."""
  _, state = plateau.update({}, state, value=finite(value))
  return state


def finite(value: float) -> float:
  """Returns a monitored value, or a huge one in place of no finite number.

  Such a value has not improved, but rules that compare would take NaN for an
  improvement, or remember an infinity as the average.
  """
  return value if math.isfinite(value) else 1e30
