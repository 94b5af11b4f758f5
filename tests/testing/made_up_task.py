"""A task for tests of training: tiny, and with all that a step can carry."""

import importlib
import pathlib
import sys

import ml_collections
import numpy as np

import rnnzoo
from rnnzoo import models
from rnnzoo.tasks import classification

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))


def base_config() -> ml_collections.ConfigDict:
  config = importlib.import_module('configs.base_smnist').get_config()
  config.optimizer.update(plateau_floor=0.0, plateau_min_delta=0.0)
  return config


class SignTask(classification.Classification):
  """Of which sign is the sum of a sequence? 50 + 11 + 7 examples."""

  dataset = 'made up'
  class_names = ('minus', 'plus')
  batch_size = 8

  def __init__(self, config=None, **stack):
    self.stack = stack
    inputs = np.random.RandomState(0).randn(68, 5, 2).astype(np.float32)
    label = (inputs.sum((1, 2)) > 0).astype(np.int32)
    bounds = {'train': (0, 50), 'validation': (50, 61), 'test': (61, 68)}
    self.splits = {
        name: {'inputs': inputs[a:b], 'label': label[a:b]}
        for name, (a, b) in bounds.items()
    }

  def build_model(self, rngs):
    backbone = rnnzoo.Stack(
        rnnzoo.IndRNN, 2, 4, max_abs=0.5, rngs=rngs, **self.stack
    )
    return models.SequenceClassifier(backbone, 2, rngs=rngs)

  def evaluate(self, model, examples, rngs=None):
    logits = model(examples['inputs'], rngs=rngs)
    return classification.evaluation(logits, examples['label'])


class DescribedTask(SignTask):
  """The same, with names and a number that `restore` needs."""

  def describe(self):
    return {'class_names': list(self.class_names), 'mean': [0.5, 1e-17]}

  @classmethod
  def restore(cls, config, described):
    task = cls(config)
    task.class_names = tuple(described['class_names'])
    return task

  def predict(self, model, inputs):
    return model(inputs).argmax(-1)
