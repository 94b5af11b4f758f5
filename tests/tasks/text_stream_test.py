"""Texts whose windows go on, the model of AWD-LSTM, and the mean of SGD."""

import functools
import importlib
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rnnzoo
from rnnzoo import models
from rnnzoo import training
from rnnzoo.tasks.text import text_stream
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from rnnzoo.training import visits

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))


class TextStreamTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path = pathlib.Path(self.create_tempdir().full_path, 'text.txt')
    letters = np.random.default_rng(0).integers(97, 105, 700)
    path.write_text(''.join(map(chr, letters)))
    self.config = importlib.import_module('configs.lstm_words').get_config()
    config = self.config
    config.data.update(path=str(path), tokens='characters', context=16)
    config.data.update(context_jitter=2, test_context=8)
    config.model.update(layer='GRU', features=6, embedding_features=4)
    config.model.update(num_layers=2, dropout_rate=0.0, dropconnect_rate=0.0)
    for name in ('token', 'input', 'output'):
      config.model[f'{name}_dropout_rate'] = 0.0
    config.optimizer.update(learning_rate=1.0, average_patience=0)
    config.update(batch_size=4, num_epochs=3)

  def test_windows_of_an_epoch_have_every_token_once(self):
    streams = jnp.arange(3 * 170).reshape(3, 170)
    make = jax.jit(
        lambda key, step: text_stream.next_windows(
            streams, 16, 2, 10, key, step
        )
    )
    lengths = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
      targets = []
      for step in range(10):
        batch = make(jax.random.key(seed), 10 * epoch + step)
        length = int(batch['length'][0])
        lengths.append(length)
        self.assertEqual(bool(batch['begins'].all()), step == 0)
        targets.append(batch['tokens'][:, 1 : length + 1])
      joined = np.concatenate(targets, axis=1)
      np.testing.assert_array_equal(joined, streams[:, 1:161])
    self.assertGreater(len(set(lengths)), 3)
    self.assertNotEqual(lengths[:10], lengths[10:20])

  def test_the_last_window_goes_on_where_streams_have_no_token_more(self):
    streams = jnp.arange(16 * 3 + 1)[None]
    make = jax.jit(
        lambda step: text_stream.next_windows(
            streams, 16, 2, 3, jax.random.key(0), step
        )
    )
    for epoch in range(20):
      batches = [make(3 * epoch + step) for step in range(3)]
      read = [b['tokens'][0, : int(b['length'][0])] for b in batches]
      np.testing.assert_array_equal(np.concatenate(read), np.arange(48))

  @pytest.mark.slow
  def test_a_learned_carry_is_trained_where_streams_begin(self):
    self.config.model.options.GRU.learn_initial_carry = True
    task = text_stream.TextStream(self.config)
    model = task.build_model(nnx.Rngs(0))
    batch = {
        'tokens': jnp.ones((4, 29), jnp.int32),
        'length': jnp.full(4, 16),
        'begins': jnp.full(4, True),
    }
    loss = lambda model: task.evaluate(model, batch, nnx.Rngs(0)).losses.mean()
    found = nnx.grad(loss)(model)
    for leaf in jax.tree.leaves(found['stack']['layers'][0]['learned_carry']):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)

  def test_fields_of_tests_may_differ_in_a_test(self):
    found = run_directory.of_tests('text_stream')
    self.assertEqual(found, run_directory.of_tests('text'))

  def test_a_window_goes_on_from_the_last_and_begins_anew(self):
    task = text_stream.TextStream(self.config)
    model = task.build_model(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (4, 21), 0, 8)
    model.bias.set_value(jnp.arange(8.0))

    def window(start, length, begins):
      batch = {
          'tokens': tokens[:, start : start + 13],
          'length': jnp.full(4, length),
          'begins': jnp.full(4, begins),
      }
      return task.evaluate(model, batch, nnx.Rngs(0)).losses

    window(8, 12, True)  # The memory of another text.
    losses = window(0, 8, True) + window(8, 12, False)
    carry, y, _ = model.outputs(tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(
        model.logits(y), tokens[:, 1:]
    )
    changes = jnp.square(y[:, 1:] - y[:, :-1]).mean(-1)
    # No change is counted across the edge of windows.
    changes = changes.sum(1) - changes[:, 7]
    want = nats.sum(1) + 2.0 * jnp.square(y).mean(-1).sum(1) + changes
    np.testing.assert_allclose(16 * losses, want, rtol=1e-5)
    held = jax.tree.leaves(nnx.state(model, text_stream.Memory))
    for a, b in zip(held, jax.tree.leaves(carry), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

  def test_masks_hold_for_all_steps_and_tokens_are_dropped_whole(self):
    model = models.TiedLanguageModel(
        rnnzoo.Elman,
        50,
        8,
        num_layers=1,
        token_dropout_rate=0.5,
        output_dropout_rate=0.5,
        rngs=nnx.Rngs(0),
    )
    model.stack.layers[0].bias.set_value(jnp.zeros((1, 8)))
    tokens = jnp.tile(jnp.arange(50)[:, None], 3)
    _, y, dropped = model.outputs(tokens, rngs=nnx.Rngs(dropout=1))
    silent = np.asarray((y == 0).all((1, 2)))
    self.assertBetween(silent.sum(), 10, 40)
    kept = np.asarray(dropped[~silent] != 0)
    np.testing.assert_array_equal(kept, np.tile(kept[:, :1], (1, 3, 1)))
    self.assertBetween(kept.mean(), 0.4, 0.6)
    # A step at a time, and no dropout without rngs.
    carry, logits = model.step(model.initial_carry((50,)), tokens[:, 0])
    carry, logits = model.step(carry, tokens[:, 1])
    np.testing.assert_allclose(
        logits, model(tokens[:, :2])[:, 1], rtol=1e-5, atol=1e-6
    )

  def test_the_mean_begins_late_and_is_what_is_kept(self):
    self.config.optimizer.average_patience = 1
    workdir = self.create_tempdir().full_path
    experiment = training.prepare(self.config, workdir)
    run = seed_state.begin(experiment, jax.random.key(0))
    program = experiment.program
    lesson = visits.Lesson(0)
    seen = []

    def steps(count):
      for _ in range(count):
        key = jax.random.key(1)
        run.state = program.train_steps(run.state, lesson, key, 1, 1.0, key)
        seen.append(jax.tree.map(np.asarray, run.state.params))

    def conclude(loss):
      run.history.append({'validation_loss': loss, 'train_loss': 1.0})
      run.conclude(experiment)

    steps(2)
    conclude(1.0)
    jax.tree.map(np.testing.assert_array_equal, run.state.tested[0], seen[-1])
    conclude(2.0)  # Above the loss of an epoch ago.
    steps(3)
    conclude(0.5)
    want = jax.tree.map(lambda *x: np.mean(x, axis=0), *seen[1:])
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for tree in (run.state.tested[0], run.best[0]):
      jax.tree.map(near, tree, want)

  @pytest.mark.slow
  def test_a_run_learns_samples_and_is_loaded(self):
    self.config.optimizer.average_patience = 1
    self.config.data.sample_length = 5
    workdir = self.create_tempdir().full_path
    report = training.train_and_evaluate(training.prepare(self.config, workdir))
    loss = report['test']['loss']['mean']
    self.assertLess(loss, 1.05 * np.log(8))
    trained = training.load(workdir)
    self.assertLen(''.join(trained.sample('ab')), 7)

  def test_bad_fields(self):
    for path, value, message in (
        ('data.context_jitter', 3, 'at most an eighth'),
        ('data.context', 200, 'a stream has more than config.data.context'),
        ('model.output_dropout_rate', 1.0, 'output_dropout_rate'),
        ('model.share_dropout_over_time', True, 'share_dropout_over_time'),
    ):
      config = self.config.copy_and_resolve_references()
      config.update_from_flattened_dict({path: value})
      with self.assertRaisesRegex(ValueError, message):
        text_stream.TextStream(config).build_model(nnx.Rngs(0))


if __name__ == '__main__':
  absltest.main()
