"""Skeleton action recognition: classifies motions of one or two persons.

Data are NTU RGB+D 60 or 120, converted by `ntu_conversion`, or synthetic
motions, which stand in for them. A model sees T frames of a recording as
vectors of 150 numbers: 2 bodies x 25 joints x (x, y, z).

`accuracy` takes the mean logits of all samplings of a recording;
`sampling_accuracy` is the mean accuracy of one sampling.
"""

from collections.abc import Iterable, Iterator
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import backbones
from rnnzoo.tasks import classification
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_motions
from rnnzoo.tasks.motion import ntu_tracks
from rnnzoo.tasks.motion import skeleton_frames
from rnnzoo.tasks.motion import skeleton_inputs
from rnnzoo.tasks.series import sequence_arrays

SOURCES = ('motions', *ntu_files.DATASETS)

IN_FEATURES = math.prod(ntu_tracks.FRAME)


class SkeletonActions(protocol.ConfigTask, classification.Classification):
  """Classifies recordings of skeletons.

  Attributes:
    splits: 'train', 'validation', 'test', each with 'frames'
      [N, L, 2, 25, 3], 'length' int32 [N] and 'label' int32 [N], the last two
      also with 'offsets' float32 [N, S, T], the samplings.
    batch_size: `config.batch_size`, or less for synthetic motions.
  """

  rules: fields.Rules = {
      'source': fields.one_of(SOURCES),
      'data_dir': fields.text(),
      'missing_list': fields.text(),
      'motions_batch_size': fields.integer(1),
      'protocol': fields.one_of(ntu_files.PROTOCOLS),
      'num_steps': fields.integer(1, 10**4),
      'max_frames': fields.integer(1, 10**6),
      'frames_dtype': fields.one_of(('float16', 'float32')),
      'centre': fields.one_of(skeleton_frames.CENTRES),
      'rotation': fields.number(0, 180),
      'scale': fields.number(0, 1, below=True),
      'validation_samplings': fields.integer(0, 1000),
      'test_samplings': fields.integer(0, 1000),
      'sampling_seed': fields.seed(),
      'validation_fraction': fields.number(0, 1, above=True, below=True),
      'split_seed': fields.seed(),
  }
  model_rules = classification.RULES
  metrics = (*classification.METRICS, protocol.Metric('sampling_accuracy'))

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_skeletons.py`."""
    data = config.data
    self._set_up(config)
    if data.source == 'motions':
      fields.check_unread(data, ('data_dir', 'missing_list'), 'source')
      recordings = ntu_motions.generate()
      self.dataset = f'{ntu_motions.DATASET}, {data.protocol}'
      self.class_names = ntu_motions.CLASS_NAMES
      self.batch_size = min(self.batch_size, data.motions_batch_size)
    else:
      recordings = _read(data)
      count = ntu_files.DATASETS[data.source].classes
      self.dataset = f'NTU RGB+D {count}, {data.protocol}'
      self.class_names = tuple(f'A{i:03}' for i in range(1, count + 1))
    print(
        f'data: {self.dataset}, {len(recordings.names):,} recordings, in'
        f' batches of {self.batch_size}',
        flush=True,
    )
    self.splits = self._splits(recordings)

  def describe(self):
    return {'class_names': list(self.class_names)}

  def _restore(self, described):
    self.class_names = tuple(described['class_names'])

  def _splits(
      self, recordings: ntu_arrays.Recordings
  ) -> dict[str, protocol.Examples]:
    data = self._data
    trains = ntu_files.training_mask(recordings.names, data.protocol)
    # Names count classes from 1.
    labels = np.array([name.action - 1 for name in recordings.names], np.int32)
    if labels.max() >= len(self.class_names):
      raise ValueError(
          f'config.data.source={data.source} has {len(self.class_names)}'
          f' classes, but {data.data_dir} has A{labels.max() + 1:03}'
      )
    (training,) = np.nonzero(trains)
    size = round(len(training) * data.validation_fraction)
    train, validation = sequence_arrays.split_off(
        np.zeros(len(training), bool), size, data.split_seed
    )
    splits: dict[str, protocol.Examples] = {}
    for split, indices, samplings in (
        ('train', training[train], None),
        ('validation', training[validation], data.validation_samplings),
        ('test', np.nonzero(~trains)[0], data.test_samplings),
    ):
      examples = skeleton_frames.pad(
          [recordings.frames[index] for index in indices], data
      )
      examples['label'] = labels[indices]
      if samplings is not None:
        examples['offsets'] = skeleton_frames.offsets(
            len(indices), samplings, data
        )
      splits[split] = examples
    return splits

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    backbone = backbones.build(self._model, IN_FEATURES, rngs)
    return models.SequenceClassifier(
        backbone, len(self.class_names), pooling=self.pooling, rngs=rngs
    )

  def evaluate(
      self,
      model: nnx.Module,
      examples: protocol.Examples,
      rngs: nnx.Rngs | None = None,
  ) -> protocol.Evaluation:
    """Returns cross entropies, hits and predicted classes of a batch.

    In training `rngs` is the source of samplings and augmentation as well as of
    dropout masks; in evaluation `examples` have 'offsets'.
    """
    labels = examples['label']
    smoothing = 0.0 if rngs is None else self.label_smoothing
    if rngs is None:
      logits = self._logits(model, examples)
    else:
      logits = model(self._augmented(examples, rngs), rngs=rngs)[:, np.newaxis]
    evaluate = lambda x: classification.evaluation(x, labels, smoothing)
    each, whole = jax.vmap(evaluate, 1)(logits), evaluate(jnp.mean(logits, 1))
    return whole._replace(
        losses=jnp.mean(each.losses, axis=0),
        scores={
            'accuracy': whole.scores['accuracy'],
            'sampling_accuracy': jnp.mean(each.scores['accuracy'], axis=0),
        },
    )

  def check_inputs(self, inputs: Any) -> Any:
    """Returns inputs of `predict`: 'frames', 'length' and 'offsets'.

    Args:
      inputs: B recordings, each [frames, 2, 25, 3], as `skeleton_inputs.read`
        reads them from `.skeleton` files: x, y, z in metres, of two bodies, the
        main one first, zeros where one is absent. The task thins them out and
        moves their origin as `config.data` says. Or a dict of 'frames'
        [B, L, 2, 25, 3], which have that origin, and 'length' int [B], how many
        of the L frames are valid. All are seen by the same
        `config.data.test_samplings` samplings.
    """
    return skeleton_inputs.check(inputs, self._data)

  def logits(self, model, inputs) -> jax.Array:
    """Returns logits [B, classes], the mean over the samplings of each."""
    return jnp.mean(self._logits(model, inputs), axis=1)

  def predict_lines(
      self, model: nnx.Module, lines: Iterable[str]
  ) -> Iterator[str]:
    """Returns the name of a class for each line, the path of a file."""
    predict = nnx.jit(self.predict)
    for number, line in enumerate(lines, 1):
      if not line.strip():
        raise ValueError(f'line {number} is empty; name a .skeleton file')
      inputs = self.check_inputs(skeleton_inputs.read(line))
      # Few sizes, so that few are compiled.
      length = inputs['frames'].shape[1]
      padding = 2 ** (length - 1).bit_length() - length
      widths = ((0, 0), (0, padding), *((0, 0),) * 3)
      inputs['frames'] = np.pad(inputs['frames'], widths)
      yield self.class_names[int(predict(model, inputs)[0])]

  def _augmented(
      self, examples: protocol.Examples, rngs: nnx.Rngs
  ) -> jax.Array:
    """Returns one random sampling of each recording, [B, T, 150]."""
    data, frames = self._data, examples['frames']
    shape = (len(frames), 1, data.num_steps)
    where = jax.random.uniform(rngs.dropout(), shape)
    x = skeleton_frames.sample(frames, examples['length'], where)[:, 0]
    x = x.astype(jnp.float32)
    if data.rotation or data.scale:
      x = skeleton_frames.turn_and_scale(
          x, rngs.dropout(), data.rotation, data.scale
      )
    return x.reshape(*shape[::2], IN_FEATURES)

  def _logits(self, model: nnx.Module, inputs: protocol.Examples) -> jax.Array:
    """Returns the logits of all samplings, float32 [B, S, classes]."""
    logits = model(self.model_inputs(inputs)).astype(jnp.float32)
    return logits.reshape(*inputs['offsets'].shape[:2], -1)

  def model_inputs(self, inputs) -> jax.Array:
    """Returns all samplings of each recording, float32 [B S, T, 150]."""
    where = inputs['offsets']
    x = skeleton_frames.sample(inputs['frames'], inputs['length'], where)
    return x.reshape(-1, where.shape[2], IN_FEATURES).astype(jnp.float32)


def _read(data: ml_collections.ConfigDict) -> ntu_arrays.Recordings:
  """Returns the recordings of NTU RGB+D that a config names."""
  published = ntu_files.DATASETS[data.source]
  if data.protocol not in published.protocols:
    raise ValueError(
        f'{data.source} has no protocol {data.protocol!r}; it has'
        f' {" and ".join(map(repr, published.protocols))}'
    )
  folder = fields.expand(data.data_dir, 'config.data.data_dir')
  recordings = ntu_arrays.read(folder)
  if data.missing_list:
    missing = ntu_files.read_missing(data.missing_list)
    names, frames = recordings.names, recordings.frames
    kept = [n for n, name in enumerate(names) if name.text() not in missing]
    print(
        f'data: {len(names) - len(kept)} of the {len(missing)} recordings of'
        f' {data.missing_list} were there, and are left out',
        flush=True,
    )
    recordings = ntu_arrays.Recordings(
        [names[n] for n in kept], [frames[n] for n in kept]
    )
  expected = published.files - published.missing
  if len(recordings.names) != expected:
    print(
        f'WARNING: there are {len(recordings.names):,} recordings; published'
        f' results are of {expected:,}: {published.files:,} files without'
        f' {published.missing} that --config.data.missing_list should name.',
        flush=True,
    )
  return recordings
