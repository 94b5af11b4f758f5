"""Tracks of persons: exchanged ids, new ids, ghosts, absent bodies."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from rnnzoo.tasks.motion import ntu_tracks


class TracksTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('exchanged', lambda t: '12' if t < 15 else '21'),
      ('new_ids_too', lambda t: '12' if t < 15 else '31'),
      (
          'exchanged_in_a_gap',
          lambda t: {14: '  ', 15: ' 1'}.get(t, '12' if t < 14 else '21'),
      ),
      ('one_id_in_any_order', lambda t: '77'),
      ('jumps_beside_the_other', lambda t: '12'),
  )
  def test_ids_that_change_persons(self, ids):
    """`ids` has the ids of both persons in a frame, ' ' for an absent one."""
    rng = np.random.RandomState(0)
    walk = np.cumsum(rng.uniform(0, 0.04, (30, 1, 3)), axis=0)
    persons = np.zeros((30, 2, 25, 3))
    persons[:, 0] = rng.rand(25, 3) + walk + (0, 0, 3)
    persons[:, 1] = 0.5 * rng.rand(25, 3) + (2, 0, 3)
    if 'jumps' in self.id():
      to = persons[15, 1].mean(0) - persons[15, 0].mean(0) + (0.3, 0, 0)
      persons[15:, 0] += to
    persons = persons.round(4)
    frames = []
    for frame, bodies in enumerate(persons):
      frames.append({})
      for person in rng.permutation(2):
        name = ids(frame)[person]
        if name == ' ':
          bodies[person] = 0
          continue
        key = (name, sum(name == other for other, _ in frames[-1]))
        frames[-1][key] = bodies[person].ravel().tolist()
    found, _ = ntu_tracks.arrange(ntu_tracks.follow(frames), 30)
    shown = persons[persons.any(axis=(1, 2, 3))]
    np.testing.assert_allclose(found, shown, atol=1e-6)

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
    shown = ([1, 3], [1, 2, 3], [0, 2, 3])
    bodies = []
    for frames, scale in zip(shown, (0.1, 3.0, 0.2), strict=True):
      joints = scale * rng.randn(len(frames), 25, 3).astype(np.float32)
      bodies.append(ntu_tracks.Body(np.array(frames), joints))
    # All joints zero: they are absent, and in no frame.
    bodies[1].joints[1] = bodies[2].joints[1] = 0
    frames, dropped = ntu_tracks.arrange(bodies, 5)
    gone = '2 of 5 frames, which show nobody; 1 of 3 persons'
    self.assertEqual(dropped, gone)
    np.testing.assert_array_equal(frames[1:, 0], bodies[1].joints[::2])
    np.testing.assert_array_equal(frames[::2, 1], bodies[2].joints[::2])
    self.assertFalse(frames[0, 0].any() or frames[1, 1].any())

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
    gone += '32 of 60 frames, which show neither main person; '
    self.assertEqual(dropped, gone + '1 of 3 persons')
    self.assertLen(frames, 25)


if __name__ == '__main__':
  absltest.main()
