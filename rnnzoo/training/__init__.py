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
(`config.seeds_at_once`). Mistakes of a user raise errors as in `rnnzoo.tasks`;
a damaged file of a run raises a `RunFileError`, which is a ValueError. The
modules, in the order in which a run meets them:

  command_line    flags -> config; a mistake is told in one sentence
  processes       several that train together; how a program ends
  experiment      config -> checked experiment with its data
  run_directory   the directory of a run: new, or resumed
  warm_start      weights that a new run takes of a trained one
  run_data        tells whether the data are unchanged
  placement       the devices, and which part of a batch each has
  visits          which examples each step sees
  step            the compiled functions: initialise, train, evaluate
  optimization    optimiser, schedule, plateau rule, loss scale
  feed            the examples of each epoch, on the devices
  loop            seeds, epochs, validation, the final test
  seed_state      how far a seed has come, and when it ends
  metrics         from results of examples to numbers of an epoch
  checkpointing   the state that a killed run goes on from
  records         progress, events, seconds and samples of each epoch
  report          results of seeds, the final report, curves
  trained         the trained model of a run; streams: its answers step by step
  files           the files of a run directory: written whole, read with care
  profile         where the time of a step goes
"""

from rnnzoo import settings

settings.require('rnnzoo.training', 'train', ('orbax', 'tensorboardX', 'tqdm'))

from rnnzoo.training.experiment import Experiment
from rnnzoo.training.experiment import prepare
from rnnzoo.training.files import RunFileError
from rnnzoo.training.loop import train_and_evaluate
from rnnzoo.training.streams import Stream
from rnnzoo.training.trained import best_model
from rnnzoo.training.trained import load
from rnnzoo.training.trained import Trained

__all__ = (
    'Experiment',
    'RunFileError',
    'Stream',
    'Trained',
    'best_model',
    'load',
    'prepare',
    'train_and_evaluate',
)
