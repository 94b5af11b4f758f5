"""Tracks of persons: exchanged ids, new ids, ghosts, absent bodies."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from rnnzoo.tasks.motion import ntu_tracks


class FollowTest(parameterized.TestCase):

  @parameterized.parameters(
      'exchanged',
      'new ids too',
      'exchanged in a gap',
      'one id, any order',
      'jumps beside the other',
  )
  def test_ids_that_change_persons(self, how):
    rng = np.random.RandomState(0)
    walk = np.cumsum(rng.uniform(0, 0.04, (30, 1, 3)), axis=0)
    persons = np.zeros((30, 2, 25, 3))
    persons[:, 0] = rng.rand(25, 3) + walk + (0, 0, 3)
    persons[:, 1] = 0.5 * rng.rand(25, 3) + (2, 0, 3)
    if how == 'jumps beside the other':
      to = persons[15, 1].mean(0) - persons[15, 0].mean(0) + (0.3, 0, 0)
      persons[15:, 0] += to
    frames = []
    for frame, bodies in enumerate(persons.round(4)):
      ids, order = ['1', '2'], [0, 1]
      if how == 'one id, any order':
        ids, order = ['7', '7'], rng.permutation(2)
      elif how == 'jumps beside the other':
        order = [1, 0]
      elif frame >= 15:
        ids = ['3', '1'] if how == 'new ids too' else ['2', '1']
      if how == 'exchanged in a gap' and frame in (14, 15):
        order = [1] if frame == 15 else []
        bodies *= bool(order)
      persons[frame] = bodies
      taken = [ids[n] for n in order]
      frames.append(
          {
              (ids[n], taken[:place].count(ids[n])): bodies[n].ravel().tolist()
              for place, n in enumerate(order)
          }
      )
      persons[frame, [n for n in (0, 1) if n not in order]] = 0
    found, _ = ntu_tracks.arrange(ntu_tracks.follow(frames), 30)
    shown = persons[persons.any(axis=(1, 2, 3))]
    np.testing.assert_allclose(found, shown, atol=1e-6)


class ArrangeTest(absltest.TestCase):

  def test_a_body_that_lingers_beside_its_new_id(self):
    rng = np.random.RandomState(0)
    walk = np.cumsum(rng.uniform(0, 0.01, (30, 1, 3)), axis=0)
    joints = (rng.rand(25, 3) + walk).astype(np.float32)
    old = ntu_tracks.Body(np.arange(17), joints[np.minimum(np.arange(17), 15)])
    new = ntu_tracks.Body(np.arange(15, 30), joints[15:])
    for bodies in ((old, new), (new, old)):
      frames, dropped = ntu_tracks.arrange(bodies, 30)
      np.testing.assert_array_equal(frames[:, 0], joints)
      self.assertFalse(frames[:, 1].any())
      self.assertEqual(dropped, '')

  def test_main_body_is_the_one_that_varies_most(self):
    rng = np.random.RandomState(0)
    bodies = [
        ntu_tracks.Body(
            np.array([1, 3]), scale * rng.randn(2, 25, 3).astype(np.float32)
        )
        for scale in (0.1, 3.0, 0.2)
    ]
    bodies[2] = bodies[2]._replace(frames=np.array([0, 3]))
    frames, _ = ntu_tracks.arrange(bodies, 5)
    self.assertEqual(frames.shape, (3, 2, 25, 3))
    np.testing.assert_array_equal(frames[1:, 0], bodies[1].joints)
    np.testing.assert_array_equal(frames[[0, 2], 1], bodies[2].joints)
    self.assertFalse(frames[0, 0].any() or frames[1, 1].any())

  def test_absent_bodies_are_in_no_frame(self):
    still = np.full((9, 25, 3), 3.6, np.float32)
    moves = still + np.linspace(0, 0.5, 9, dtype=np.float32)[:, None, None]
    still[::2] = 0
    still[:, :, 0] *= -1
    moves[:4] = 0
    bodies = [ntu_tracks.Body(np.arange(9), x) for x in (still, moves)]
    frames, dropped = ntu_tracks.arrange(bodies, 11)
    self.assertEqual(dropped, '4 of 11 frames, which show nobody')
    shown = [1, 3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(frames[:, 0], moves[shown])
    np.testing.assert_array_equal(frames[:, 1], still[shown])

  def test_persons_that_get_new_ids(self):
    rng = np.random.RandomState(0)
    # Three walk side by side, 0.7 m apart, the third as the least active.
    walk = np.cumsum(rng.uniform(0, 0.02, (60, 1, 3)), axis=0)
    place = lambda person: [[[0.7 * person, 0, 3]]]
    size = lambda person: rng.rand(1, 25, 3) * (1, 0.8, 0.3)[person]
    persons = [(size(n) + place(n) + walk).astype(np.float32) for n in range(3)]
    cut = lambda person, *frames: ntu_tracks.Body(
        np.array(frames), persons[person][list(frames)]
    )
    bodies = (
        cut(0, *range(20)),
        cut(1, *range(20), *range(50, 55)),  # It gets its first id again.
        cut(1, *range(23, 50)),
        cut(0, *range(23, 60)),
        cut(2, *range(23, 60)),
    )
    frames, dropped = ntu_tracks.arrange(bodies, 60)
    gone = '3 of 60 frames, which show nobody; '
    self.assertEqual(dropped, gone + '1 of 3 persons')
    shown = [*range(20), *range(23, 60)]
    np.testing.assert_array_equal(frames[:, 0], persons[0][shown])
    np.testing.assert_array_equal(frames[:-5, 1], persons[1][shown[:-5]])
    self.assertFalse(frames[-5:, 1].any())
    frames, dropped = ntu_tracks.arrange((*bodies[:2], bodies[-1]), 60)
    self.assertEqual(
        dropped,
        gone
        + '32 of 60 frames, which show neither main person; 1 of 3 persons',
    )
    self.assertLen(frames, 25)


if __name__ == '__main__':
  absltest.main()
