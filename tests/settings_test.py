"""Words of errors about settings."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

import rnnzoo
from rnnzoo import settings


class ArticleTest(parameterized.TestCase):

  @parameterized.parameters(
      (rnnzoo.LSTM, 'an LSTM'),
      (rnnzoo.SLSTM, 'an SLSTM'),
      (rnnzoo.S5, 'an S5'),
      (rnnzoo.GRU, 'a GRU'),
      (rnnzoo.IndRNN, 'an IndRNN'),
      (rnnzoo.MinGRU, 'a MinGRU'),
      (int, 'an int'),
      (dict, 'a dict'),
      (np.ndarray, 'an ndarray'),
      (np.uint8, 'a uint8'),
      ('Optimizer', 'an Optimizer'),
      ('sLSTMLayer', 'an sLSTMLayer'),
  )
  def test_as_it_is_spoken(self, thing, words):
    self.assertEqual(settings.a(thing), words)


if __name__ == '__main__':
  absltest.main()
