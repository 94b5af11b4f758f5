"""The code of the kernels as one number, for results that follow from it."""

import ast
import hashlib
import pathlib


def digest() -> str:
  """Returns the SHA-256 of pallas_kernels, but for comments and docstrings."""
  root = pathlib.Path(__file__).parents[1] / 'pallas_kernels'
  found = hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    text = path.read_text('utf-8')
    lines = dict(enumerate(text.splitlines(), 1))
    for node in ast.walk(ast.parse(text)):
      value = getattr(node, 'value', None)
      if isinstance(node, ast.Expr) and isinstance(value, ast.Constant):
        for line in range(node.lineno, node.end_lineno + 1):
          del lines[line]
    code = [line for line in map(str.strip, lines.values()) if line]
    code = [line for line in code if not line.startswith('#')]
    found.update('\n'.join([path.relative_to(root).as_posix(), *code]).encode())
  return found.hexdigest()
