"""Tokens: every text and back, words as published numbers count them."""

import json

from absl.testing import absltest
from absl.testing import parameterized

from rnnzoo.tasks.text import tokens

TEXT = ''.join(
    f' {first}ing  {second}\u00e4\n\n {first}{second}\r\n'
    for first in ('cook', 'work', 'walk', 'talk', 'look')
    for second in ('er', 'man', 'book', 'out')
)
OTHER = '\u4e2d\U0001f600\t\u00e4\n\n\r  z</s><unk>'


class TokensTest(parameterized.TestCase):

  @parameterized.parameters(*tokens.KINDS)
  def test_text_and_back(self, kind):
    size = 300 if kind in tokens.SUBWORDS else None
    made = tokens.make(kind, [TEXT, OTHER], size)
    found = made.encode(TEXT + OTHER)
    if kind != 'words':
      self.assertEqual(made.text(found), TEXT + OTHER)
      num_bytes = len((TEXT + OTHER).encode())
      self.assertEqual(made.sizes[found].sum(), num_bytes)
      share = 0.8 if kind in tokens.SUBWORDS else 1.0
      self.assertLessEqual(len(found), share * num_bytes)
    described = json.loads(json.dumps(made.described))
    restored = tokens.restore(kind, described)
    self.assertEqual(restored.pieces, made.pieces)
    self.assertEqual(
        restored.encode(OTHER).tolist(), made.encode(OTHER).tolist()
    )
    # A run goes on with equal tokens only.
    again = tokens.make(kind, [TEXT, OTHER], size)
    self.assertEqual(again.described, made.described)

  @parameterized.parameters(*tokens.SUBWORDS, 'words')
  def test_are_of_the_part_to_train_on(self, kind):
    made = tokens.make(kind, [TEXT, ' other' * 50, ''], None)
    self.assertIn(b' cook', [piece[:5] for piece in made.pieces])
    self.assertNotIn(b' other', made.pieces)

  def test_words(self):
    made = tokens.make('words', [' a b a \n a <unk> \n c', ''], None)
    expected = [b' <unk>', b' a', b'\n', b' b', b' c']
    self.assertEqual(made.pieces, expected)
    found = made.encode('a d\n\nb')
    self.assertEqual(found.tolist(), [1, 0, 2, 2, 3])
    self.assertEqual(made.text(found), ' a <unk>\n\n b')
    few = tokens.make('words', [' a b a \n a <unk> \n c', ''], 3)
    self.assertEqual(few.pieces, expected[:3])

  def test_what_cannot_be(self):
    made = tokens.make('characters', ['ab'], None)
    with self.assertRaisesRegex(ValueError, "^'!z' is not in the text"):
      made.encode('z!a')
    with self.assertRaisesRegex(ValueError, 'part .* to train on is empty'):
      tokens.make('unigram', ['', 'a'], None)


if __name__ == '__main__':
  absltest.main()
