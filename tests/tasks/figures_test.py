"""Figures: what stands on them is drawn as it is, whole and legible."""

import itertools
import pathlib
from unittest import mock

from absl.testing import absltest
from matplotlib import figure as mpl_figure
import numpy as np
import pytest

from rnnzoo.tasks import figures
from rnnzoo.training import report

# In matplotlib, two dollars are a formula; this one cannot be parsed.
FORMULA = r'$\frac$'


class FiguresTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'figure.png'

  def drawn(self, draw, *args):
    """Returns a figure in place of writing it, after a look at its edges."""
    with mock.patch.object(mpl_figure.Figure, 'savefig', autospec=True) as save:
      draw(self.path, *args)
    figure = save.call_args.args[0]
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    self.assertGreaterEqual(box.min.min(), 0)
    self.assertTrue((box.max <= figure.get_size_inches()).all())
    return figure

  @pytest.mark.slow
  def test_no_name_is_a_formula(self):
    names = FORMULA, 'a$b$'
    figures.plot_confusions(self.path, FORMULA, [[3, 1], [0, 2]], names)
    self.assertStartsWith(self.path.read_bytes(), b'\x89PNG')

  def test_every_count_is_visible(self):
    for matrix in ([[1, 400], [200, 0]], [[3, 3], [3, 3]]):
      (axis,) = self.drawn(figures.plot_confusions, 'title', matrix, 'ab').axes
      (image,) = axis.images
      colors = image.to_rgba(image.get_array())
      self.assertLen(axis.texts, np.count_nonzero(matrix))
      for text in axis.texts:
        column, row = text.get_position()
        light = colors[row, column, :3].mean()
        self.assertGreater(abs(light - (text.get_color() == 'white')), 0.4)

  @pytest.mark.slow
  def test_names_of_many_classes_have_room(self):
    names = [f'point to something with a finger, {i}' for i in range(70)]
    for count in (3, 60, 70):
      args = 'title', np.eye(count, dtype=int), names[:count]
      (axis,) = self.drawn(figures.plot_confusions, *args).axes
      for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        for one, other in itertools.pairwise(boxes):
          self.assertFalse(one.overlaps(other))
      self.assertEqual(not axis.texts, 'report.json' in axis.get_xlabel())

  def test_one_epoch_below_a_long_title(self):
    row = {'epoch': 1, 'train_loss': 2.0, 'validation_loss': 1.0}
    args = 'a long title, ' * 40, {'seed 0': [row]}, ['loss']
    figure = self.drawn(report.plot_curves, *args)
    (axis,) = figure.axes
    self.assertNotIn('None', [line.get_marker() for line in axis.lines])
    lowest = figure._suptitle.get_window_extent().y0
    self.assertGreater(lowest, axis.get_window_extent().y1)

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
