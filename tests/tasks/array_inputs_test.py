"""Arrays for trained models: which are taken, and what errors say."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import array_inputs

ARRAY = np.ones((2, 3), np.uint8)


class ArrayInputsTest(parameterized.TestCase):

  def test_arrays(self):
    for given in (ARRAY, jnp.ones(2, bool), jnp.ones((2, 3), jnp.bfloat16)):
      self.assertIs(array_inputs.check(given), given)
    given = {'x': ARRAY, 'y': jax.random.key(0)[None], 'more': ARRAY}
    self.assertIs(array_inputs.check(given, ('x', 'y')), given)

  @parameterized.parameters(
      ([[1, 2]], 'got an int; np.asarray makes an array of a list'),
      (3.0, 'got a float'),
      (np.float32(3), r'got float32 of shape \[\]'),
      (ARRAY.astype(object), r'got object of shape \[2, 3\]'),
      (ARRAY.astype('U3'), r'got <U3 of shape \[2, 3\]'),
  )
  def test_what_is_no_array(self, given, message):
    with self.assertRaisesRegex(ValueError, f'arrays of numbers.* {message}'):
      array_inputs.check(given)

  @parameterized.parameters(
      (ARRAY, 'an ndarray'), ({}, 'the keys none'), ({'y': ARRAY}, "keys 'y'")
  )
  def test_names(self, given, got):
    message = f"inputs must be a dict of 'x' and 'y', as in .* got .*{got}"
    with self.assertRaisesRegex(ValueError, message):
      array_inputs.check(given, ('x', 'y'))


if __name__ == '__main__':
  absltest.main()
