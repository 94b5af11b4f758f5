r"""Fields of all configs of skeleton action recognition.

The numbers are the recipe of the IndRNN paper (Li et al., 2018, section 5.4)
and its authors' published code: 20 frames, batch 128, Adam at 2e-4, a tenth of
that after a plateau of 100 epochs, until the rate is below 1e-6; 5 samplings of
a recording validate, 20 test; a twentieth of the training data validates. They
watch the accuracy of validation; here it is the loss, which still changes where
all answers are right.

`configs/base.py` explains all fields but those of `config.data`. To train on
NTU RGB+D, convert its `.skeleton` files, and name the result and the authors'
list of recordings to leave out (https://github.com/shahroudy/NTURGB-D):

  python -m rnnzoo.tasks.motion.ntu_conversion nturgb+d_skeletons ntu60
  python train.py --config=configs/indrnn_ntu.py --config.data.source=ntu60 \
      --config.data.data_dir=ntu60 \
      --config.data.missing_list=NTU_RGBD_samples_with_missing_skeletons.txt

NTU RGB+D 120 likewise, with --config.data.source=ntu120 and protocols
'cross_subject' and 'cross_setup'.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'skeletons'
  config.num_epochs = 1000
  config.eval_batch_size = 100
  config.optimizer.learning_rate = 2e-4
  config.optimizer.plateau_factor = 0.1
  config.optimizer.plateau_patience = 100
  config.optimizer.stop_rate = 1e-6

  data = config.data
  data.unlock()
  # 'ntu60', 'ntu120', or 'motions' for synthetic ones, made when training
  # starts.
  data.source = 'motions'
  # The folder that `python -m rnnzoo.tasks.motion.ntu_conversion` made.
  data.data_dir = ''
  # File of recordings to leave out, as the data set's authors publish it; ''
  # for none.
  data.missing_list = ''
  # The batch size for synthetic motions, if that is less than batch_size.
  data.motions_batch_size = 32
  # How training and test are told apart: 'cross_subject', 'cross_view' (not in
  # 'ntu120') or 'cross_setup' (not in 'ntu60').
  data.protocol = 'cross_subject'
  # Frames that a model sees of a recording, one of each of as many segments.
  data.num_steps = 20
  # Of longer recordings this many frames are kept. No file of NTU RGB+D has
  # more than 300.
  data.max_frames = 300
  # In which all frames are kept in memory: 'float16' or 'float32'.
  data.frames_dtype = 'float16'
  # The origin, the middle of the main body's spine: in the first frame
  # ('sequence'), in each ('frame'); that of each body's own spine in each frame
  # ('body'); or 'none' for the camera.
  data.centre = 'sequence'
  # Training turns recordings about each of three axes by up to so many degrees
  # to either side.
  data.rotation = 0.0
  # Training changes sizes by up to this share.
  data.scale = 0.0
  # Random samplings of a recording whose logits are averaged in validation; 0
  # for one, of the middle of each segment.
  data.validation_samplings = 5
  # The same in the test.
  data.test_samplings = 20
  # Chooses these samplings; the same for all seeds and epochs.
  data.sampling_seed = 0
  # The part of the training data that validates.
  data.validation_fraction = 0.05
  # Chooses that part, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()

  return config
