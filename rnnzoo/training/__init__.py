"""Training: any task, any model, one config, one run directory.

    experiment = training.prepare(config, workdir='runs/mine')
    report = training.train_and_evaluate(experiment)
    model = training.best_model(experiment, seed=0)
    trained = training.load('runs/mine')  # Its model, config and predict.

The data set lives on the device and one compiled call does many steps, so that
small recurrent models are not bound by Python. After each epoch the model is
validated; plateau rule, early stopping and the choice of the best parameters
follow the monitored value; a checkpoint is written if the last one is old
enough. At the end the best parameters are tested. Several seeds run one after
another and share all compiled code, or at once, in one compiled call
(`config.seeds_at_once`). The modules, in the order in which a run
meets them:

  command_line    flags -> config; mistakes in one sentence
  endings         that sentence, and exit codes
  processes       several that train together, and what they agree on
  experiment      config -> checked experiment with its data
  run_directory   the directory of a run: new, or resumed
  data_summaries  by which it tells other data
  placement       the devices, and which part of a batch each has
  visits          which examples each step sees
  program         the compiled functions: initialise, train, evaluate
  calls           of these in an epoch
  loss_scaling    for float16
  optimization    optimiser, schedule, plateau rule
  loop            seeds, epochs, validation, the final test
  metrics         from results of examples to numbers of an epoch
  best_models     of best epochs: read and tested
  seed_state      how far a seed has come, and when it ends
  feed            the examples of each epoch, on the devices
  pieces          likewise, of data that stay on the host
  checkpointing   what a killed run goes on from
  records         what is told and written after each epoch
  samples         of text, while a model trains
  progress        the bar on the terminal
  timing          the seconds of each epoch
  files           the files of a run directory: written whole, read with care
  events          for TensorBoard
  figures         curves
  reporting       the results of seeds, the final report
  profiling       where the time of a step goes; trace reads JAX's profiler
  trained         the trained model of a run
"""

from rnnzoo import settings

settings.require('rnnzoo.training', 'train', ('orbax', 'tensorboardX', 'tqdm'))

from rnnzoo.training.experiment import Experiment
from rnnzoo.training.experiment import prepare
from rnnzoo.training.files import RunFileError
from rnnzoo.training.loop import train_and_evaluate
from rnnzoo.training.trained import best_model
from rnnzoo.training.trained import load
from rnnzoo.training.trained import Trained

__all__ = (
    'Experiment',
    'RunFileError',
    'Trained',
    'best_model',
    'load',
    'prepare',
    'train_and_evaluate',
)
