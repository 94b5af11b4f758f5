"""Images for trained models: which are taken, and what errors say."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks.images import image_inputs

PIXELS = np.arange(3 * 20, dtype=np.uint8).reshape(3, 4, 5)


def check(given, white=255):
  return image_inputs.check(given, (4, 5), (20, 1), white)


class ImageInputsTest(parameterized.TestCase):

  @parameterized.parameters(np.uint8, np.int32, np.int64, np.uint16)
  def test_integers(self, dtype):
    for given in (
        PIXELS.astype(dtype),
        jnp.asarray(PIXELS.astype(dtype)),
        PIXELS.astype(dtype).reshape(3, 20, 1),
    ):
      found = check(given)
      self.assertEqual(found.dtype, np.uint8)
      np.testing.assert_array_equal(found, given)

  @parameterized.parameters(
      (PIXELS / 255, r'float64; np.round\(255 \* inputs\)'),
      (jnp.ones((3, 4, 5), jnp.bfloat16), 'bfloat16; np.round'),
      (PIXELS > 9, 'got bool'),
      (PIXELS.astype(complex), 'got complex128'),
      (np.int16(PIXELS) - 5, 'got -5 to 54'),
      (np.int16(PIXELS) + 236, 'got 236 to 295'),
      (PIXELS[0], r'shape \[4, 5\]'),
      (PIXELS[..., None], r'\[3, 4, 5, 1\]'),
      (PIXELS[:0], r'shape \[0, 4, 5\]$'),
      ({'inputs': PIXELS}, 'got a dict'),
  )
  def test_what_is_refused(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      check(given)

  def test_the_message_says_what_would_work(self):
    message = r'from 0 to 16, \[B, 4, 5\] or \[B, 20, 1\]; got 0 to 59'
    with self.assertRaisesRegex(ValueError, message):
      check(PIXELS, 16)
    with self.assertRaisesRegex(ValueError, 'got key'):
      check(jax.random.key(0)[None])


if __name__ == '__main__':
  absltest.main()
