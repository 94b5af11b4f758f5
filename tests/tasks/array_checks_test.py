"""Arrays that a user gives: which are taken, and what errors say."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import array_checks

ARRAY = np.ones((2, 3), np.uint8)
TOKENS = np.array([[0, 4], [1, 2]], np.uint8)
MASKED = np.ma.masked_array(TOKENS, TOKENS > 1)


class ArrayChecksTest(parameterized.TestCase):

  def test_arrays(self):
    for given in (ARRAY, jnp.ones(2, bool), jnp.ones((2, 3), jnp.bfloat16)):
      self.assertIs(array_checks.check(given), given)
    given = {'x': ARRAY, 'y': jax.random.key(0)[None]}
    self.assertIs(array_checks.check(given), given)

  @parameterized.parameters(
      ([[1, 2]], 'got an int; np.asarray makes an array of a list'),
      (np.float32(3), r'got float32 of shape \[\]'),
      (ARRAY.astype(object), r'got object of shape \[2, 3\]'),
  )
  def test_what_is_no_array(self, given, message):
    with self.assertRaisesRegex(ValueError, f'arrays of numbers.* {message}'):
      array_checks.check(given)

  @parameterized.parameters(
      (ARRAY, "'x'"), ({}, 'no keys'), ({'y': ARRAY}, 'y')
  )
  def test_names(self, given, got):
    message = f"inputs must be a dict of 'x' and 'y', as in .* got .*{got}"
    with self.assertRaisesRegex(ValueError, message):
      array_checks.by_name(given, ('x', 'y'), ('x', 'y'))

  def test_names_that_nothing_reads(self):
    given = {'lengths': ARRAY}
    self.assertIs(array_checks.by_name(given, ('x', 'lengths')), given)
    self.assertEqual(array_checks.by_name(3, ('x', 'y')), {'x': 3})
    for name, hint in (
        ('seq_lengths', "; did you mean 'lengths'.$"),
        ('z', '$'),
    ):
      with self.assertRaisesRegex(
          ValueError, f"no keys but 'x' and 'lengths'; got '{name}'{hint}"
      ):
        array_checks.by_name({name: ARRAY}, ('x', 'lengths'))

  def test_numbers(self):
    take = lambda given, **more: array_checks.numbers(
        given, 'x', ('B', 'T', 1), **more
    )
    for given in ([[[1], [2]]], np.ones((1, 2, 1)), jnp.ones((1, 2, 1), int)):
      self.assertEqual(take(given).shape, (1, 2, 1))
    found = take(jnp.ones((1, 2, 1), jnp.bfloat16))
    self.assertEqual(found.dtype, np.float32)
    self.assertEqual(take(ARRAY, needs_last=False).shape, (2, 3, 1))
    self.assertEqual(take(ARRAY[..., None] > 0, kinds='b').dtype, bool)

  @parameterized.parameters(
      (ARRAY, r'\[B, T, 1\] as in t, no axis of size 0; got uint8 .*\[2, 3\];'),
      (ARRAY, r'x\[..., None\] gives it its one column$'),
      (ARRAY[:, :1], r'x\[None\] makes a batch of one$'),
      (np.ones((2, 0, 1)), r'shape \[2, 0, 1\]$'),
      (np.array([[['a']]]), r'got <U1 of shape \[1, 1, 1\]$'),
      (np.ones((1, 1, 1), bool), r'got bool of shape \[1, 1, 1\]$'),
      (np.array([[[None]]]), 'got object of shape '),
      ([[[1]], [[1], [2]]], 'got rows of several lengths; .*arrays.pad '),
      (MASKED, 'without a mask of numpy, which would be ignored$'),
  )
  def test_what_is_no_number(self, given, message):
    with self.assertRaisesRegex(
        ValueError, f'^x must be real numbers .*{message}'
    ):
      array_checks.numbers(given, 'x', ('B', 'T', 1), why=' as in t')

  def test_integers(self):
    take = lambda given: array_checks.integers(
        given, 'length', 2, 9, of=', the steps', row='sequence'
    )
    self.assertEqual(take(np.array([9, 1], np.uint8)).dtype, np.int32)
    rule = r'length must be integers, one a sequence, \[2\], .*'
    for wrong, message in (
        ([1], rf'{rule}; got int64 of shape \[1\]'),
        ([1.0, 2], f'{rule}; got float64'),
        ([1, 0], 'length must be from 1 to 9, the steps; sequence 1 has 0'),
        ([10, 1], 'from 1 to 9, the steps; sequence 0 has 10'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        take(wrong)

  def test_finite(self):
    x = np.ones((2, 3, 1))
    x[1, 1:, 0] = np.nan, 1e39
    valid = np.arange(3) < np.array([[3], [1]])
    array_checks.finite(x, valid, 'x')
    whole = np.ones((2, 3), bool)
    hints = {'advice': 'zero it'}
    for options, message in (
        (hints, r'1, step 1, column 0 is nan \(2 such values\); zero it$'),
        ({**hints, 'allow_nan': True}, r'step 2, .* is inf \(1 such values\)$'),
    ):
      with self.assertRaisesRegex(
          ValueError, f'^x must be finite in float32; sequence .*{message}'
      ):
        array_checks.finite(x, whole, 'x', **options)
    with self.assertRaisesRegex(ValueError, 'sequence 1, column 0 is nan'):
      array_checks.finite(x[:, 1], whole[:, 0], 'y')

  @parameterized.parameters(np.asarray, np.ndarray.tolist, jnp.asarray)
  def test_tokens(self, make):
    found = array_checks.tokens(make(TOKENS), 5)
    self.assertEqual(found.dtype, np.int32)
    np.testing.assert_array_equal(found, TOKENS)

  @parameterized.parameters(
      (None, 'got object'),
      ({'tokens': TOKENS}, 'got a mapping'),
      (TOKENS * 1.0, 'got float64'),
      (TOKENS > 1, 'got bool'),
      (TOKENS[0], r'got uint8 of shape \[2\]; inputs\[None\] makes'),
      (TOKENS[:0], r'no axis of size 0; got uint8 of shape \[0, 2\]'),
      (TOKENS + 1, 'from 0 to 4, got 1 to 5'),
      (TOKENS.astype(int) - 1, 'got -1 to 3'),
  )
  def test_what_is_no_token(self, given, message):
    with self.assertRaisesRegex(
        ValueError, f'inputs must be tokens.*{message}'
    ):
      array_checks.tokens(given, 5)

  def test_tokens_with_length(self):
    given = {'tokens': TOKENS, 'length': [1, 2]}
    found = array_checks.tokens_with_length(given, 5)
    np.testing.assert_array_equal(found['length'], [1, 2])
    found = array_checks.tokens_with_length(TOKENS, 5)
    np.testing.assert_array_equal(found['length'], [2, 2])
    for wrong, message in (
        ({'tokens': TOKENS}, "a dict of 'tokens' and 'length', .* 'tokens'"),
        ({**given, 'label': TOKENS}, "no keys but .*; got 'label'"),
        ({**given, 'length': [1, 3]}, 'from 1 to 2, the steps of tokens'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        array_checks.tokens_with_length(wrong, 5)


if __name__ == '__main__':
  absltest.main()
