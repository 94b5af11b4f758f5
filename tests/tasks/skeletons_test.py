"""Skeleton action recognition: sampling, augmentation, the task, all of it."""

import contextlib
import io
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import base_skeletons
from rnnzoo import training
from rnnzoo.tasks.motion import ntu_conversion
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_motions
from rnnzoo.tasks.motion import skeleton_frames
from rnnzoo.tasks.motion import skeleton_inputs
from rnnzoo.tasks.motion import skeletons
from tests.testing import skeleton_files

# Compiled once for each shape.
sample = jax.jit(skeleton_frames.sample)


def make_config(**data) -> ml_collections.ConfigDict:
  config = base_skeletons.get_config()
  config.model.features = 8
  config.data.update(data)
  return config


def make_task(config) -> skeletons.SkeletonActions:
  with contextlib.redirect_stdout(io.StringIO()):
    return skeletons.SkeletonActions(config)


def numbered(*lengths) -> list[np.ndarray]:
  """Returns recordings whose frame f holds f + 1 everywhere."""
  return [
      np.tile(np.arange(1.0, n + 1).reshape(-1, 1, 1, 1), (1, 2, 25, 3))
      for n in lengths
  ]


class FramesTest(parameterized.TestCase):

  @parameterized.parameters((40, 20), (47, 20), (20, 20), (5, 4), (300, 4))
  def test_one_frame_of_each_segment(self, length, num_steps):
    data = make_config(centre='none', num_steps=num_steps).data
    padded = skeleton_frames.pad(numbered(length, 3), data)
    where = skeleton_frames.offsets(2, 50, data)
    x = sample(padded['frames'], padded['length'], where)
    self.assertEqual(x.shape, (2, 50, num_steps, 2, 25, 3))
    chosen = np.asarray(x[0, ..., 0, 0, 0]) - 1
    starts = np.arange(num_steps) * length / num_steps
    self.assertTrue((chosen >= np.floor(starts)).all())
    self.assertTrue((chosen < np.ceil(starts + length / num_steps)).all())
    self.assertTrue((np.diff(chosen) >= 0).all())
    # In 50 samplings each frame is seen, the first and the last among them.
    seen = np.unique(chosen) if length < 50 else np.arange(length)
    np.testing.assert_array_equal(seen, np.arange(length))
    # A recording of 3 frames shows each of them, and no padding.
    np.testing.assert_array_equal(np.unique(x[1]), [1, 2, 3])

  def test_middles_of_recordings_that_are_thinned_out(self):
    data = make_config(centre='none', max_frames=10, num_steps=5).data
    padded = skeleton_frames.pad(numbered(100, 8), data)
    self.assertEqual(padded['frames'].dtype, np.float16)
    np.testing.assert_array_equal(padded['length'], [10, 8])
    np.testing.assert_array_equal(
        padded['frames'][:, :, 0, 0, 0],
        [np.arange(1, 101, 10), [*range(1, 9), 0, 0]],
    )
    where = skeleton_frames.offsets(2, 0, data)
    x = sample(padded['frames'], padded['length'], where)
    np.testing.assert_array_equal(x[0, 0, :, 0, 0, 0], [11, 31, 51, 71, 91])

  def test_centres(self):
    rng = np.random.RandomState(0)
    frames = rng.randn(4, 2, 25, 3).astype(np.float32)
    frames[0, 1] = frames[2, 0] = 0  # Absent.
    pad = lambda centre: skeleton_frames.pad(
        [frames], make_config(centre=centre, frames_dtype='float32').data
    )['frames'][0]
    np.testing.assert_array_equal(pad('none'), frames)
    for centre, origins in (
        ('sequence', [frames[0, 0, 1]] * 4),
        ('frame', [frames[t, int(t == 2), 1] for t in range(4)]),
        ('body', frames[:, :, 1]),
    ):
      want = frames - np.reshape(origins, (4, -1, 1, 3))
      want[0, 1] = want[2, 0] = 0
      np.testing.assert_allclose(pad(centre), want, atol=1e-6)
    # The first frame that shows somebody has the origin.
    frames[0] = 0
    self.assertFalse(pad('sequence')[1, 0, 1].any())
    # A joint that was not seen has no place: the others have the origin.
    frames[:] = 3 + 0.1 * rng.randn(4, 2, 25, 3)
    frames[:2, 0, 1] = 0
    for centre in ('sequence', 'frame', 'body'):
      padded = pad(centre)
      self.assertLess(np.abs(padded).max(), 1)
      self.assertFalse(padded[:2, 0, 1].any())
      self.assertLess(np.abs(padded[0, 0].mean(axis=0)).max(), 1e-6)

  def test_turns_and_scales(self):
    x = np.random.RandomState(0).randn(5, 3, 2, 25, 3).astype(np.float32)
    key = jax.random.key(0)
    turn = jax.jit(skeleton_frames.turn_and_scale)
    turned = np.asarray(turn(x, key, 180.0, 0.2))
    self.assertGreater(abs(turned - x).max(), 1.0)
    scales = []
    for before, after in zip(x, turned, strict=True):
      # One matrix a recording, which keeps angles and handedness.
      flat = before.reshape(-1, 3), after.reshape(-1, 3)
      matrix = np.linalg.lstsq(*flat)[0]
      np.testing.assert_allclose(before @ matrix, after, atol=1e-4)
      scales.append(np.cbrt(np.linalg.det(matrix)))
      square = scales[-1] ** 2 * np.eye(3)
      np.testing.assert_allclose(matrix @ matrix.T, square, atol=1e-4)
    self.assertBetween(min(scales), 0.8, max(scales) - 0.01)
    self.assertLessEqual(max(scales), 1.2)
    np.testing.assert_allclose(turn(x, key, 0.0, 0.0), x, atol=1e-6)

  def test_turns_about_each_axis(self):
    # About x first, about z last.
    angles = np.float32([*np.diag([0.3] * 3), (0.3, -0.7, 1.1)])
    found = skeleton_frames._rotation(jnp.asarray(angles))
    for row, matrix in zip(angles, found, strict=True):
      x, y, z = map(ntu_motions.rotations, row, 'xyz')
      np.testing.assert_allclose(matrix, z @ y @ x, atol=1e-6)


class TaskTest(parameterized.TestCase):

  def test_splits_of_motions(self):
    task = make_task(make_config(protocol='cross_view'))
    self.assertIn('NOT NTU RGB+D', task.dataset)
    sizes = {name: len(split['label']) for name, split in task.splits.items()}
    self.assertEqual(sizes, {'train': 912, 'validation': 48, 'test': 480})
    self.assertEqual(task.splits['validation']['offsets'].shape, (48, 5, 20))
    self.assertEqual(task.splits['test']['offsets'].shape, (480, 20, 20))
    for split in task.splits.values():
      self.assertCountEqual(np.unique(split['label']), range(12))

  @pytest.mark.slow
  def test_averages_logits_of_samplings(self):
    task = make_task(make_config(test_samplings=7, num_steps=4))
    model = lambda x: 9 * jnp.sum(x[:, :, 30:42] * x[:, ::-1, 40:52], axis=1)
    batch = {name: x[:3] for name, x in task.splits['test'].items()}
    result = jax.jit(lambda batch: task.evaluate(model, batch))(batch)
    x = sample(batch['frames'], batch['length'], batch['offsets'])
    x = x.reshape(21, 4, 150).astype(jnp.float32)
    logits = model(x).reshape(3, 7, 12).swapaxes(0, 1)
    label, classes = batch['label'], logits.mean(0).argmax(-1)
    np.testing.assert_array_equal(result.predictions, classes)
    np.testing.assert_array_equal(result.scores['accuracy'], classes == label)
    hits = (logits.argmax(-1) == label).mean(0)
    np.testing.assert_allclose(result.scores['sampling_accuracy'], hits, 1e-6)
    losses = -jax.nn.log_softmax(logits)[:, np.arange(3), label].mean(0)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
    predict = jax.jit(lambda batch: task.predict(model, batch))
    np.testing.assert_array_equal(predict(batch), result.predictions)
    checked = task.check_inputs({k: batch[k] for k in ('frames', 'length')})
    self.assertEqual(set(checked), {'frames', 'length', 'offsets'})
    np.testing.assert_array_equal(predict(checked), result.predictions)

  def test_training_sees_other_frames_each_time(self):
    task = make_task(make_config(rotation=10.0))
    batch = {name: x[:3] for name, x in task.splits['train'].items()}

    @jax.jit
    def inputs(key):
      seen = []
      model = lambda x, rngs: seen.append(x) or jnp.zeros((len(x), 12))
      task.evaluate(model, batch, nnx.Rngs(dropout=key))
      return seen[0]

    seen = [inputs(jax.random.key(seed)) for seed in (0, 0, 1)]
    self.assertEqual(seen[0].shape, (3, 20, 150))
    np.testing.assert_array_equal(seen[0], seen[1])
    self.assertGreater(abs(seen[0] - seen[2]).max(), 0.01)

  @parameterized.parameters(
      ({'centre': 'joint'}, "'sequence', 'frame', 'body', 'none'"),
      (
          {'source': 'ntu60', 'protocol': 'cross_setup'},
          "no protocol 'cross_setup'; it has 'cross_subject' and 'cross_view'",
      ),
      (
          {'source': 'ntu60', 'data_dir': '/nowhere'},
          'nowhere has no index.json; config.data.data_dir must be the folder',
      ),
  )
  def test_impossible_data(self, data, message):
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      skeletons.SkeletonActions(make_config(**data))


class InputsTest(parameterized.TestCase):
  """Skeletons of a user: three recordings, of 9, 7 and 4 frames."""

  def setUp(self):
    super().setUp()
    self.data = make_config(num_steps=4, test_samplings=3).data
    rng = np.random.RandomState(0)
    draw = lambda n: 1 + rng.rand(n, 2, 25, 3).astype(np.float32)
    self.recordings = [draw(n) for n in (9, 7, 4)]
    self.recordings[2][:, 1] = 0

  def inputs(self, **data):
    config = make_config(num_steps=4, test_samplings=3, **data)
    return skeleton_inputs.check(self.recordings, config.data)

  def test_prepares(self):
    inputs = self.inputs(centre='none', frames_dtype='float32')
    self.assertEqual(inputs['frames'].shape, (3, 9, 2, 25, 3))
    self.assertEqual(inputs['offsets'].shape, (3, 3, 4))
    np.testing.assert_array_equal(inputs['length'], [9, 7, 4])
    for row, recording in enumerate(self.recordings):
      found = inputs['frames'][row, : len(recording)]
      np.testing.assert_array_equal(found, recording)
    first = self.recordings[0]
    for wrong, message in (
        (first[:, :1], r'of two bodies, .* shape \[9, 1, 25, 3\]'),
        (first[0], r'recording 0 must .* \[2, 25, 3\]$'),
        (first * np.nan, 'recording 0 must be .* has x=nan'),
        (first * 1e4, 'within 1000; frame 0, body 0, joint 0'),
        (first.astype(str), 'must be real numbers'),
        (first * (np.arange(9) > 0)[:, None, None, None], 'nobody .* frame 0'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        skeleton_inputs.check([wrong], self.data)

  def test_padded(self):
    given = self.inputs(centre='none')
    del given['offsets']
    message = "centre='sequence' says; those of recording 0 have not"
    with self.assertRaisesRegex(ValueError, message):
      skeleton_inputs.check(given, self.data)
    # The second body has the origin where the main body is absent.
    self.recordings[1][0, 0] = 0
    for centre in ('sequence', 'frame', 'body', 'none'):
      self.data.centre = centre
      want = self.inputs(centre=centre)
      # Nothing after the end counts, and what has its origin keeps it.
      padded = want['frames'].copy()
      padded[2, 4:] = np.nan
      for dtype in ('float16', 'float32', 'float64'):
        given = {
            'frames': jnp.asarray(padded.astype(dtype)),
            'length': want['length'].astype(np.uint8),
        }
        found = skeleton_inputs.check(given, self.data)
        for name, array in want.items():
          np.testing.assert_array_equal(found[name], array)
          self.assertEqual(found[name].dtype, array.dtype)

  @parameterized.parameters(
      ('length', np.array([9, 999, 4]), 'from 1 to 9.*recording 1 has 999'),
      ('length', np.array([9, 9, 4]), 'recording 1 .* nobody in its frame 7'),
      ('frames', np.full((3, 9, 2, 25, 3), np.nan), 'recording 0 .* x=nan'),
      ('frames', np.ones((3, 9, 2, 25, 3), bool), 'real numbers .*; got bool'),
      ('offsets', np.zeros(3), "no keys but .* got 'offsets'"),
  )
  def test_what_is_refused(self, name, value, message):
    given = {key: self.inputs()[key] for key in ('frames', 'length')}
    with self.assertRaisesRegex(ValueError, message):
      skeleton_inputs.check(given | {name: value}, self.data)
    with self.assertRaisesRegex(ValueError, "dict of 'frames' and 'length'"):
      skeleton_inputs.check({'length': value}, self.data)


class PipelineTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    cls.recordings = ntu_motions.generate(2)
    cls.paths = skeleton_files.write_files(
        cls.folder / 'files', cls.recordings, range(40)
    )
    # Camera 1 is the test of cross_view.
    cls.tested = sorted(path for path in cls.paths if path.stem[7] == '1')
    ntu_conversion.convert(cls.folder / 'files', cls.folder / 'ntu60', 1)
    (cls.folder / 'missing.txt').write_text(
        f'2 of the samples\n\n{cls.paths[5].stem}\nS017C003P020R001A059\n'
    )

  def config(self, **data):
    defaults = {
        'source': 'ntu60',
        'data_dir': str(self.folder / 'ntu60'),
        'missing_list': str(self.folder / 'missing.txt'),
        'protocol': 'cross_view',
        'validation_samplings': 2,
        'test_samplings': 3,
    }
    return make_config(**(defaults | data))

  def test_files_reach_the_model(self):
    task = make_task(self.config(centre='none', frames_dtype='float32'))
    self.assertEqual(task.dataset, 'NTU RGB+D 60, cross_view')
    self.assertLen(task.class_names, 60)
    names = [ntu_files.parse_name(path.name) for path in self.tested]
    test = task.splits['test']
    labels = [name.action - 1 for name in names]
    np.testing.assert_array_equal(test['label'], labels)
    sizes = [len(split['label']) for split in task.splits.values()]
    self.assertEqual(sum(sizes), 39)
    want = self.recordings.frames[self.recordings.names.index(names[3])]
    found = test['frames'][3, : len(want)]
    np.testing.assert_allclose(found, want, atol=1e-5)

  @parameterized.parameters('sequence', 'frame', 'body', 'none')
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_files_are_inputs(self, centre):
    config = self.config(centre=centre, num_steps=4, max_frames=40)
    task = make_task(config)
    test = {k: v for k, v in task.splits['test'].items() if k != 'label'}
    checked = task.check_inputs(skeleton_inputs.read(self.tested))
    for name in ('frames', 'length'):
      np.testing.assert_array_equal(checked[name], test[name])
      self.assertEqual(checked[name].dtype, test[name].dtype)
    np.testing.assert_array_equal(checked['offsets'][0], test['offsets'][0])
    # An answer does not depend on the batch.
    alone = task.check_inputs(skeleton_inputs.read(str(self.tested[5])))
    length = int(test['length'][5])
    self.assertEqual(alone['frames'].shape, (1, length, 2, 25, 3))
    np.testing.assert_array_equal(alone['frames'], test['frames'][5:6, :length])
    np.testing.assert_array_equal(alone['offsets'][0], checked['offsets'][5])
    model = task.build_model(nnx.Rngs(0))
    want = [task.class_names[i] for i in task.predict(model, checked)]
    lines = task.predict_lines(model, [*map(str, self.tested), ' '])
    self.assertEqual([next(lines) for _ in want], want)
    with self.assertRaisesRegex(ValueError, 'line 15 is empty'):
      next(lines)

  def test_files_that_are_no_inputs(self):
    whole = self.paths[0].read_text().splitlines()
    cut, more = self.folder / 'cut', self.folder / 'more'
    cut.write_text('\n'.join(whole[:9]))
    for paths, message in (
        (self.folder, 'is no regular file; name a .skeleton file'),
        (cut, 'cut is no .*: it ends early'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        skeleton_inputs.read(paths)
    with self.assertRaises(FileNotFoundError):
      skeleton_inputs.read([self.folder / 'nowhere.skeleton'])
    number = int(whole[0]) + 1
    more.write_text('\n'.join([str(number), *whole[1:], '0']))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
      skeleton_inputs.read(more)
    dropped = f'1 of {number} frames, which show nobody'
    self.assertIn(f'more: not used are {dropped}', errors.getvalue())
    with self.assertRaisesRegex(ValueError, 'one at least; got none'):
      make_task(make_config()).check_inputs([])

  def test_recordings_that_do_not_fit(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    missing = folder / 'missing.txt'
    for cameras, counts in (
        ('123', '0 of 0 .* to train and 0 to test'),
        ('1', '26 of 26 .* to train and 0 to test'),
        ('23', '0 of 14 .* to train and 14 to test'),
    ):
      stems = [path.stem for path in self.paths if path.stem[7] in cameras]
      missing.write_text('\n'.join(stems))
      with self.assertRaisesRegex(ValueError, f'=cross_view .*{counts}'):
        make_task(self.config(missing_list=str(missing)))
    shutil.copytree(self.folder / 'ntu60', folder / 'ntu60')
    index = folder / 'ntu60' / 'index.json'
    index.write_text(index.read_text().replace('A001', 'A061'))
    with self.assertRaisesRegex(ValueError, '60 classes, but .* has A061'):
      make_task(self.config(data_dir=str(folder / 'ntu60')))

  @pytest.mark.slow
  def test_trains(self):
    config = self.config()
    config.update(num_epochs=2, batch_size=8)
    workdir = self.folder / 'run'
    with contextlib.redirect_stdout(io.StringIO()) as out:
      experiment = training.prepare(config, str(workdir), 'gru_ntu')
      training.train_and_evaluate(experiment)
    self.assertIn('1 of the 2 recordings of', out.getvalue())
    self.assertIn('published results are of 56,578', out.getvalue())
    report = json.loads((workdir / 'report.json').read_text())
    self.assertEqual(report['dataset'], 'NTU RGB+D 60, cross_view')
    result = json.loads((workdir / 'seed_0/result.json').read_text())
    self.assertIn('sampling_accuracy', result['test'])
    self.assertEqual(np.sum(result['test']['confusion_matrix']), 14)


if __name__ == '__main__':
  absltest.main()
