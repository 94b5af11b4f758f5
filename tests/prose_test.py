"""The words of docstrings, comments and documents: bounds on tics.

Per 1,000 words of a folder: clauses with 'what', and words that stand for a
noun of another sentence. A change that needs more names the noun. In documents
few sentences are long.
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
FRONTED = re.compile(r'(?m:^|(?<=[.;] ))(?:Of (?!course)|What )[a-z]')


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


def paragraphs(path: pathlib.Path) -> list[str]:
  """Returns the text of a document, without code and tables."""
  text = re.sub('```.*?```', '', path.read_text('utf-8'), flags=re.DOTALL)
  code = '|', '    ', '<!--'
  lines = [line for line in text.split('\n') if not line.startswith(code)]
  parts = re.split(r'\n\s*\n|\n\s*[-*] ', '\n'.join(lines))
  return [' '.join(part.split()) for part in parts]


class ProseTest(parameterized.TestCase):

  @parameterized.parameters('rnnzoo', 'pallas_kernels', 'benchmarks')
  def test_bounds(self, folder):
    self.check({path: prose(path) for path in (ROOT / folder).rglob('*.py')})

  def test_documents(self):
    paths = [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
    found = {p: paragraphs(p) for p in paths if '_build' not in p.parts}
    self.check({path: '\n'.join(parts) for path, parts in found.items()})
    parts = [part for own in found.values() for part in own]
    ends = r'(?<=[.:;!?])\s+(?=[A-Z`])'
    sentences = [s for part in parts for s in re.split(ends, part)]
    sentences = [s for s in sentences if len(s.split()) > 2]
    long = [s for s in sentences if len(s.split()) > 30]
    self.assertLessEqual(len(long), 0.04 * len(sentences), long)

  def check(self, texts):
    """Checks texts by path for words and openings to avoid."""
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
