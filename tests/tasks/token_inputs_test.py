"""Tokens for trained models: which are taken, and what errors say."""

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import token_inputs

TOKENS = np.array([[0, 4], [1, 2]], np.uint8)


class TokenInputsTest(parameterized.TestCase):

  @parameterized.parameters(np.asarray, np.ndarray.tolist, jnp.asarray)
  def test_tokens(self, make):
    found = token_inputs.check(make(TOKENS), 5)
    self.assertEqual(found.dtype, np.int32)
    np.testing.assert_array_equal(found, TOKENS)

  @parameterized.parameters(
      (None, 'got a NoneType'),
      ('text', 'got a str'),
      ({'tokens': TOKENS}, 'got a dict'),
      ([[1], [1, 2]], 'got rows of several lengths'),
      (TOKENS * 1.0, 'got float64'),
      (TOKENS > 1, 'got bool'),
      (TOKENS[0], r'their shape is \[2\]'),
      (TOKENS[:0], r'B at least 1 and T at least 1; .*\[0, 2\]'),
      (TOKENS[:, :0], r'\[2, 0\]'),
      (TOKENS + 1, 'from 0 to 4; got values from 1 to 5'),
      (TOKENS.astype(int) - 1, 'got values from -1 to 3'),
      (np.ma.masked_array(TOKENS, TOKENS > 1), 'without a mask of numpy'),
  )
  def test_what_is_no_token(self, given, message):
    with self.assertRaisesRegex(
        ValueError, f'inputs must be tokens.*{message}'
    ):
      token_inputs.check(given, 5)

  def test_with_length(self):
    given = {'tokens': TOKENS, 'length': [1, 2]}
    found = token_inputs.check_with_length(given, 5)
    np.testing.assert_array_equal(found['length'], [1, 2])
    found = token_inputs.check_with_length(TOKENS, 5)
    np.testing.assert_array_equal(found['length'], [2, 2])
    for wrong, message in (
        (TOKENS.tolist(), "a dict of 'tokens' .* and 'length' .*; got a"),
        ({'tokens': TOKENS}, "got the keys 'tokens'"),
        ({'tokens': TOKENS + 1, 'length': [1, 2]}, 'got values from 1 to 5'),
        ({'tokens': TOKENS, 'length': [0, 2]}, 'from 1 to 2, the steps'),
        ({'tokens': TOKENS, 'length': [1, 3]}, 'from 1 to 2, the steps'),
        ({'tokens': TOKENS, 'length': [1]}, r'here \[2\].*of shape \[1\]'),
        ({'tokens': TOKENS, 'length': [1.0, 2]}, 'got float64'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        token_inputs.check_with_length(wrong, 5)


if __name__ == '__main__':
  absltest.main()
