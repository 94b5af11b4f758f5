"""The words of docstrings and comments: bounds on what a reader has to decode.

Per 1,000 words of a folder: clauses with 'what', and words that stand for a
noun of another sentence. A change that needs more names the noun.
"""

import ast
import io
import pathlib
import re
import tokenize

from absl.testing import absltest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).resolve().parent.parent

WHAT = re.compile(r'\bwhat\b', re.IGNORECASE)
STAND_IN = re.compile(
    r'\b(that|those) (of|before|after|above|below|from|which|that)\b'
    r'|\bone of (these|those|them)\b|\blikewise\b|\bas for `'
    r'|\bthe (others?|same)\b|\bof (these|those|them)\b',
    re.IGNORECASE,
)
# A sentence that opens so is decoded from its end.
FRONTED = re.compile(r'(?:^|(?<=[.;] ))Of (?!course)[a-z]')


def prose(path: pathlib.Path) -> str:
  """Returns the docstrings and comments of a file."""
  text = path.read_text(encoding='utf-8')
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef
  nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
  found = [ast.get_docstring(node) or '' for node in nodes]
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      found.append(token.string.lstrip('# '))
  return ' '.join(' '.join(found).split())


class ProseTest(parameterized.TestCase):

  @parameterized.parameters('rnnzoo', 'pallas_kernels', 'benchmarks')
  def test_bounds(self, folder):
    texts = {path: prose(path) for path in (ROOT / folder).rglob('*.py')}
    words = sum(len(text.split()) for text in texts.values())
    for pattern, most in ((WHAT, 1), (STAND_IN, 3), (FRONTED, 0)):
      found = [
          f'{path.relative_to(ROOT)}: {text[m.start() - 30 : m.end() + 30]}'
          for path, text in texts.items()
          for m in pattern.finditer(text)
      ]
      self.assertLessEqual(1000 * len(found) / words, most, found[-20:])


if __name__ == '__main__':
  absltest.main()
