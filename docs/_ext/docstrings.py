"""Google-style docstrings in plain text, as Sphinx wants to read them.

Docstrings here are written for `help()`: equations stand as they are, on lines
of their own, and one backtick marks code. This extension makes literal blocks
of the equations, links of public names in backticks, and escapes characters
that reStructuredText would take for markup.
"""

from collections.abc import Iterator, Sequence
import inspect
import itertools
import re

import public_names

_SECTION = re.compile(
    r'(Args|Attributes|Raises|Returns|Yields|References|Notes?|Examples?):$'
)
_CODE = re.compile(r'(`[^`]+`)')
# Lines in a section that stand further in than an argument's text.
_NESTED = re.compile(r' {6}')


def paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
  """Yields runs of lines without a blank one, and the blank ones as []."""
  part: list[str] = []
  for line in [*lines, '']:
    if line.strip():
      part.append(line.rstrip())
    elif part:
      yield part
      yield []
      part = []


def is_equations(part: Sequence[str]) -> bool:
  """Whether a paragraph before the first section is not prose."""
  if part[0].startswith('>>>'):
    return False
  if part[0].startswith('  '):
    return True
  return all(re.match(r'\S+(, \S+)* += ', line) for line in part)


def markup(text: str, names: dict[str, str]) -> str:
  """Returns prose with roles instead of backticks, and the rest escaped.

  Args:
    text: one line or several.
    names: the link's target for each text that is one.
  """
  parts = _CODE.split(text)
  for k, part in enumerate(parts):
    if k % 2:
      code = part[1:-1]
      target = names.get(code.removesuffix('()'))
      parts[k] = f':py:obj:`{code} <{target}>`' if target else f'``{code}``'
      # Inline markup ends at a word's end.
      if k + 1 < len(parts) and re.match(r'\w', parts[k + 1]):
        parts[k] += r'\ '
    else:
      part = re.sub(r'([*|])', r'\\\1', part)
      parts[k] = re.sub(r'(?<=\w)_(?!\w)', r'\_', part)
  return ''.join(parts)


def convert(lines: Sequence[str], names: dict[str, str]) -> list[str]:
  """Returns a docstring's lines as reStructuredText that napoleon reads."""
  found: list[str] = []
  in_sections = False
  for part in paragraphs(lines):
    if not part:
      found.append('')
      continue
    in_sections = in_sections or bool(_SECTION.match(part[0]))
    if part[0].startswith('>>>'):
      found += part
    elif in_sections:
      found += section(part, names)
    elif is_equations(part):
      found += ['.. code-block:: text', '', *(f'   {line}' for line in part)]
    else:
      found += markup('\n'.join(part), names).split('\n')
  return found


def section(part: Sequence[str], names: dict[str, str]) -> list[str]:
  """Returns a paragraph of a section, with literal blocks of nested lines."""
  found: list[str] = []
  for nested, run in itertools.groupby(part, lambda x: bool(_NESTED.match(x))):
    if nested:
      found += ['', '    .. code-block:: text', '']
      found += [f'    {line}' for line in run]
      found.append('')
    else:
      for line in markup('\n'.join(run), names).split('\n'):
        # napoleon escapes the names of arguments itself.
        found.append(re.sub(r'^( +)((?:\\\*){1,2})(\w+:)', _plain, line))
  return found


def _plain(match):
  stars = match[2].replace('\\', '')
  return f'{match[1]}{stars}{match[3]}'


def default(value: object) -> str:
  """Returns a parameter's default as one would write it."""
  if callable(value) and not isinstance(value, type):
    return '...'
  return getattr(value, '__name__', None) or repr(value)


def signature(cls: type) -> str:
  """Returns the arguments of a class's constructor, without types."""
  parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
  plain = []
  for p in parameters:
    p = p.replace(annotation=inspect.Parameter.empty)
    if p.default is not inspect.Parameter.empty:
      p = p.replace(default=_Text(default(p.default)))
    plain.append(p)
  return str(inspect.Signature(plain))


class _Text(str):
  """A string whose repr has no quotes."""

  def __repr__(self):
    return str(self)


def setup(app):
  """Registers the conversion, before napoleon's own."""
  names = {}
  for name in public_names.names():
    names[name] = name
    if name.startswith('rnnzoo.') and name.count('.') == 1:
      names.setdefault(name.removeprefix('rnnzoo.'), name)

  def process(app, what, name, thing, options, lines):
    del app, what, name, thing, options
    lines[:] = convert(list(lines), names)

  def sign(app, what, name, thing, options, text, annotation):
    del app, name, options
    # The metaclass of flax's modules hides the arguments.
    if what == 'class' and text == '(*args, **kwargs)':
      return signature(thing), annotation
    return None

  app.connect('autodoc-process-docstring', process, priority=400)
  app.connect('autodoc-process-signature', sign)
  return {'parallel_read_safe': True}
