"""Figures: what stands on them is drawn as it is."""

import pathlib

from absl.testing import absltest
import numpy as np
import pytest

from rnnzoo.tasks import figures

# In matplotlib, two dollars are a formula; this one cannot be parsed.
FORMULA = r'$\frac$'


class FiguresTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'figure.png'

  @pytest.mark.slow
  def test_no_name_is_a_formula(self):
    figures.plot_confusions(
        self.path, FORMULA, [[3, 1], [0, 2]], (FORMULA, 'a$b$')
    )
    self.assertStartsWith(self.path.read_bytes(), b'\x89PNG')

  def test_no_token_is_a_formula(self):
    weights = np.ones((1, 2))
    figures.plot_attention(
        self.path, 'title', [(weights, (FORMULA, '$'), ('$$',))]
    )
    self.assertStartsWith(self.path.read_bytes(), b'\x89PNG')

  @pytest.mark.slow
  def test_dollars_are_drawn(self):
    figure, ((axis,),) = figures.make_figure(1, (2.0, 2.0), 'a$b$')
    axis.set_xticks([0], [figures.plain('a$b$')])
    figure.canvas.draw()
    for text in (figure._suptitle, axis.get_xticklabels()[0]):
      drawn, is_formula = text._preprocess_math(text.get_text())
      self.assertEqual((drawn, is_formula), ('a$b$', False))


if __name__ == '__main__':
  absltest.main()
