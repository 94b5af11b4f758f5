"""The languages, by definitions that know no automaton."""

import collections
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from rnnzoo.tasks.synthetic import languages


def cycle(string):
  place = 0
  for token in string:
    place += {0: 0, 1: 1, 2: -1}[token]
  return place % 5


def even_pairs(string):
  pairs = zip(string, string[1:], strict=False)
  return sum(pair in ((0, 1), (1, 0)) for pair in pairs) % 2


def arithmetic(string):
  text = ''.join('01234+-*='[token] for token in string)
  return eval(text.rstrip('=')) % 5


def product(size, even):
  """Returns the definition of a word problem, by matrices."""
  order = itertools.permutations(range(size))
  matrices = [np.eye(size, dtype=int)[list(p)] for p in order]
  if even:
    matrices = [m for m in matrices if np.linalg.det(m) > 0]
  index = {m.tobytes(): i for i, m in enumerate(matrices)}

  def label(string):
    whole = np.eye(size, dtype=int)
    for token in string:
      whole = whole @ matrices[token]
    return index[whole.tobytes()]

  return label


DEFINITIONS = {
    'parity': lambda string: string.count(1) % 2,
    'modular_counting': lambda string: string.count(1) % 5,
    'cycle_navigation': cycle,
    'even_pairs': even_pairs,
    'modular_arithmetic': arithmetic,
    'S3': product(3, even=False),
    'A5': product(5, even=True),
    'S5': product(5, even=False),
}
SIZES = {'S3': 6, 'A5': 60, 'S5': 120, 'parity': 2, 'even_pairs': 2}


class LanguagesTest(parameterized.TestCase):

  @parameterized.parameters(*languages.LANGUAGES)
  def test_labels(self, name):
    language = languages.LANGUAGES[name]()
    self.assertEqual(language.num_classes, SIZES.get(name, 5))
    rng = np.random.default_rng(0)
    multiple = language.length_multiple
    for length in (1, 2, 3, 4, 7, 20, 31):
      length *= multiple
      uniform = rng.random((60, length), np.float32)
      tokens = languages.tokens_from(uniform, language, np.full(60, length))
      labels = np.asarray(languages.prefix_labels(language, tokens))
      for string, label in zip(tokens.tolist(), labels, strict=True):
        for end in range(1, length + 1):
          if label[end - 1] != languages.NO_LABEL:
            want = DEFINITIONS[name](string[:end])
            self.assertEqual(label[end - 1], want)
        self.assertNotEqual(label[-1], languages.NO_LABEL)

  def test_labels_of_prefixes_of_sums(self):
    # 3 - 2 * 4 =
    language = languages.modular_arithmetic()
    labels = languages.prefix_labels(language, np.array([[3, 6, 2, 7, 4, 8]]))
    none = languages.NO_LABEL
    self.assertSequenceEqual(labels.tolist(), [[3, none, 1, none, 0, 0]])

  @parameterized.parameters(*languages.LANGUAGES)
  def test_strings(self, name):
    language = languages.LANGUAGES[name]()
    multiple = language.length_multiple
    lengths = multiple * np.array([1, 2, 3] * 400)
    uniform = np.random.default_rng(1).random((1200, 10), np.float32)
    # The greatest that float32 has below 1.
    uniform[0] = 1 - 2.0**-24
    tokens = languages.tokens_from(uniform, language, lengths)
    self.assertEqual(tokens.dtype, np.uint8)
    self.assertTrue((tokens[np.arange(10) >= lengths[:, None]] == 0).all())
    strings = collections.Counter(
        tuple(string[:length])
        for string, length in zip(tokens.tolist(), lengths, strict=True)
        if length == multiple
    )
    if name == 'modular_arithmetic':
      self.assertCountEqual(strings, [(digit, 8) for digit in range(5)])
      self.assertContainsSubset({5, 6, 7}, tokens[lengths == 4, 1])
    else:
      several = language.num_tokens
      self.assertContainsSubset(strings, {(t,) for t in range(several)})
      if several < 10:
        self.assertLen(strings, several)

  def test_balanced(self):
    labels = np.array([0, 0, 0, 1, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(
        languages.balanced(labels, 7, 3), [0, 1, 2, 3, 4, 5, 8]
    )
    self.assertLen(languages.balanced(labels, 9, 3), 8)


if __name__ == '__main__':
  absltest.main()
