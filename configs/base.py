"""Fields of all configs, whatever their task; each changes a few lines.

Every field can be overridden, as in `--config.optimizer.learning_rate=3e-4` or
`--config.model.norm=None`, and so can every option of a layer, listed or not:
`--config.model.options.GRU.num_heads=4`.

The fields of `config.data` are the task's own: `configs/base_<task>.py` adds
them. No other field can be added, by accident say; a config with fields of its
own calls `config.unlock()` first.
"""

import ml_collections
from ml_collections import config_dict

import rnnzoo


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()

  # The task, a name in rnnzoo.tasks.TASKS.
  config.task = ''
  # The first seed: of initialisation, shuffling and dropout.
  config.seed = 0
  # A run directory; a new run starts from its best weights, where path and
  # shape are the same: those of the seed of equal number, else of its first.
  config.init_from = ''
  # Regular expression; parameters and running averages whose path it is found
  # in are not taken from there.
  config.init_exclude = ''
  # How many seeds are run: seed, seed + 1, ...
  config.num_seeds = 1
  # How many of these train in one compiled call, on one device. The results are
  # those of separate runs but for rounding.
  config.seeds_at_once = 1
  # Passes over the training data, at most.
  config.num_epochs = 50
  # Examples of one training step, on all devices together.
  config.batch_size = 128
  # How many devices share a batch, those of all processes counted; None for all
  # that it can be split over, one for several seeds at once. No effect on the
  # result but rounding.
  config.num_devices = config_dict.placeholder(int)
  # 'device', or 'host' for data that are larger than the device: a thread sends
  # them there in pieces. No effect on the result.
  config.keep_data_on = 'device'
  # Examples of one step of validation and test; no effect on the result.
  config.eval_batch_size = 500
  # Plateau, early stopping and the choice of the best epoch follow this:
  # 'validation_loss', or 'validation_' and a metric of the task.
  config.monitor = 'validation_loss'
  # Seconds from one checkpoint to the next, at least; a kill costs these and
  # an epoch.
  config.checkpoint_seconds = 10.0
  # Epochs from one sample of text to the next, in sample_<epoch>.txt and
  # TensorBoard, of tasks that make text; 0 for none.
  config.sample_every = 0

  # The task's own fields.
  config.data = ml_collections.ConfigDict()

  model = config.model = ml_collections.ConfigDict()
  # The layer, a name in rnnzoo.LAYERS, or 'GriffinBlock'.
  model.layer = 'GRU'
  # Features of each layer.
  model.features = 128
  # How many layers are stacked.
  model.num_layers = 1
  # The share of outputs that dropout sets to zero between layers; without
  # effect for one layer, which is warned of.
  model.dropout_rate = 0.0
  # The share of entries of the recurrent matrices that a training step drops:
  # DropConnect on R (rnnzoo.dropconnect).
  model.dropconnect_rate = 0.0
  # Whether all time steps share one dropout mask.
  model.share_dropout_over_time = False
  # The share of each label that training gives to all classes alike.
  model.label_smoothing = 0.0
  # The output that a class or number for a whole sequence is read from: the
  # 'last' one, or the 'mean' of all.
  model.pooling = 'last'
  # Normalisation of each layer's outputs: 'layer', 'batch' or None.
  model.norm = config_dict.placeholder(object)
  # The share of the old running averages that an update of norm 'batch' keeps;
  # None for 0.9.
  model.norm_momentum = config_dict.placeholder(object)
  # Whether the normalisation is of what the next layer reads, behind the sum of
  # `residual`.
  model.norm_first = False
  # Whether each layer's input is added to its output, where both are as large.
  model.residual = False
  # Whether each layer sees the input and the outputs of all layers below.
  model.dense = False
  # The dtype to compute in, 'bfloat16' or 'float16' say; None for that of the
  # parameters. For float16 the loss is scaled.
  model.dtype = config_dict.placeholder(object)
  # 'scan', 'associative_scan' or 'pallas'; None for the best on the device.
  model.implementation = config_dict.placeholder(object)
  # Keyword arguments of the layers by name, as model.options.AGRU.gamma: those
  # of model.layer are used. Initialisers are named as in jax.nn.initializers.
  model.options = ml_collections.ConfigDict(
      {name: {} for name in [*rnnzoo.LAYERS, 'GriffinBlock']}
  )
  # The same for the last layer only, where it differs.
  model.last_layer_options = model.options.copy_and_resolve_references()

  optimizer = config.optimizer = ml_collections.ConfigDict()
  # 'adam', 'adamw', 'adagrad', 'rmsprop' or 'sgd'.
  optimizer.name = 'adam'
  # The learning rate, which schedule and plateau scale.
  optimizer.learning_rate = 1e-3
  # Decay of the first moment; the momentum of 'sgd'.
  optimizer.b1 = 0.9
  # Decay of the second moment.
  optimizer.b2 = 0.999
  # Weight decay. For 'adamw' apart from the moments; else added to the gradient
  # after clipping and before the moments, as torch's Adam does.
  optimizer.weight_decay = 0.0
  # Regular expression; parameters whose path it is found in do not decay.
  optimizer.weight_decay_exclude = ''
  # Pairs of a regular expression and a factor, as (('backbone', 0.1),): of
  # parameters whose path it is found in, the learning rate is multiplied by the
  # factor; the first that fits counts. 0 freezes them: they do not change, and
  # their gradients do not count. Running averages still move.
  optimizer.rate_factors = ()
  # Greatest norm of the whole gradient; 0 for any.
  optimizer.clip_norm = 1.0
  # Greatest absolute value of a gradient's entry, cut before the norm; 0 for
  # any.
  optimizer.clip_value = 0.0
  # With model.dtype 'float16' the loss is multiplied by a factor, which doubles
  # after so many steps in a row with finite gradients. It halves after a step
  # without; that step is skipped.
  optimizer.loss_scale_interval = 2000
  # 'constant', 'cosine' down to zero at the last epoch, or 'step', by which the
  # rate is multiplied by step_factor every step_epochs epochs.
  optimizer.schedule = 'constant'
  # See schedule.
  optimizer.step_factor = 0.1
  # See schedule.
  optimizer.step_epochs = 10
  # Steps over which the learning rate first grows from zero.
  optimizer.warmup_steps = 0
  # The learning rate is multiplied by this on a plateau; 1 for never.
  optimizer.plateau_factor = 1.0
  # Epochs in a row without improvement that are tolerated before that.
  optimizer.plateau_patience = 5
  # An improvement is a change of more than this; 0 for a ten-thousandth of the
  # best value.
  optimizer.plateau_min_delta = 0.0
  # The learning rate that plateaus do not go below.
  optimizer.plateau_floor = 0.0
  # Training ends when the learning rate is below this after an epoch, warm-up
  # apart; 0 for never.
  optimizer.stop_rate = 0.0
  # The mean of the parameters of all later steps is validated and kept, once
  # the validation loss is above that of an epoch at least so long ago, as in
  # NT-ASGD; 0 for never.
  optimizer.average_patience = 0

  stopping = config.early_stopping = ml_collections.ConfigDict()
  # Epochs in a row without improvement that end the training; 0 for never.
  stopping.patience = 0
  # An improvement is a change of more than this.
  stopping.min_delta = 0.0

  config.lock()
  model.options.unlock()
  model.last_layer_options.unlock()
  return config
