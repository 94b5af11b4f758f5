"""A layer of another project: registered, swept over, loaded."""

import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import numpy as np
import pytest

import rnnzoo
from rnnzoo import training
from rnnzoo.tasks import backbones

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONFIG = """
import rnnzoo
from configs import gru_smnist

class Own(rnnzoo.GRU):
  '''A layer of another project.'''

rnnzoo.register(Own)

def get_config():
  config = gru_smnist.get_config()
  config.model.update(layer='Own', features=4, num_layers=1)
  config.model.options.Own = {'num_heads': 1}
  config.data.source = 'digits'
  config.num_epochs = 1
  return config
"""


class Own(rnnzoo.GRU):
  """A layer of another project."""


class OwnLayerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(rnnzoo._LAYERS))

  def test_what_cannot_be_registered(self):
    with self.assertRaisesRegex(TypeError, 'subclass of rnnzoo.Recurrent'):
      rnnzoo.register('GRU')
    with self.assertRaisesRegex(ValueError, "'GRU' is a layer of rnnzoo"):
      rnnzoo.register(type('GRU', (rnnzoo.LSTM,), {}))
    with self.assertRaisesRegex(ValueError, 'needs rnnzoo.register'):
      backbones.find_layer('Own')
    rnnzoo.register(Own)
    self.assertIs(backbones.find_layer('Own'), Own)

  @pytest.mark.slow
  def test_is_swept_over_and_loaded(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / 'own.py').write_text(CONFIG)
    subprocess.run(
        [
            *(sys.executable, '-m', 'rnnzoo', 'sweep', directory / 'own.py'),
            f'--workdir={directory / "runs"}',
            '--grid=config.model.options.Own.num_heads=2',
        ],
        cwd=ROOT,
        check=True,
    )
    with self.assertRaisesRegex(ValueError, "unknown layer 'Own'"):
      training.load(directory / 'runs/num_heads=2')
    rnnzoo.register(Own)
    loaded = training.load(directory / 'runs/num_heads=2')
    self.assertEqual(loaded.model.backbone.layers[0].num_heads, 2)
    found = loaded.predict(np.zeros((2, 8, 8), np.uint8))
    self.assertEqual(found.shape, (2,))


if __name__ == '__main__':
  absltest.main()
