"""The site in docs/: examples run, drawings and names are all there.

`sphinx-build -W`, which CI runs, checks the rest: references, docstrings.
"""

import contextlib
import doctest
import importlib.util
import pathlib
import re
import sys
import tempfile
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

import rnnzoo

DOCS = pathlib.Path(__file__).resolve().parent.parent / 'docs'

GUIDES = (
    'choosing',
    'converting',
    'fast_lstm_gru',
    'numerics',
    'own_cell',
    'own_task',
    'resets',
    'serving',
    'streaming',
    'tour',
)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def load(path):
  """Returns a module of docs/, which is no package."""
  folder = str((DOCS / path).parent)
  spec = importlib.util.spec_from_file_location(
      pathlib.Path(path).stem, DOCS / path
  )
  module = importlib.util.module_from_spec(spec)
  with mock.patch.object(sys, 'path', [folder, *sys.path]):
    spec.loader.exec_module(module)
  return module


def run(page):
  """Runs a page's examples in turn; returns how many, and what went wrong.

  A block of Python that begins with the name of a file is that module, too.
  """
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    with contextlib.ExitStack() as stack:
      return _run(page, stack)


def _run(page, stack):
  names, reports = {'__name__': 'guide'}, []
  runner = doctest.DocTestRunner(optionflags=_FLAGS)
  text = (DOCS / f'{page}.md').read_text(encoding='utf-8')
  blocks = re.findall(r'```(python|pycon)\n(.*?)```', text, re.DOTALL)
  for kind, code in blocks:
    if kind == 'python':
      exec(compile(code, page, 'exec'), names)
      if file := re.match(r'# (\S+)\.py\n', code):
        name = file[1].replace('/', '.')
        sys.modules[name] = module = types.ModuleType(name)
        # Other modules stay: numpy's cannot be loaded twice.
        stack.callback(sys.modules.pop, name)
        vars(module).update(names | {'__name__': name})
      continue
    test = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
    runner.run(test, out=reports.append, clear_globs=False)
    names = test.globs
  return runner.tries, ''.join(reports)


class NamesTest(absltest.TestCase):

  def test_every_public_name_has_an_entry(self):
    public_names = load('_ext/public_names.py')
    pages = ''.join(x.read_text('utf-8') for x in DOCS.glob('api/*.rst'))
    entries = re.findall(r'^\.\. auto\w+:: (\S+)$', pages, re.MULTILINE)
    self.assertEqual(len(entries), len(set(entries)))
    names = public_names.names()
    self.assertEqual(public_names.problems(names, entries), [])
    self.assertLessEqual(set(entries), names.keys())

  def test_the_check_finds_what_is_missing(self):
    public_names = load('_ext/public_names.py')

    def bare():
      pass

    names = {'a.GRU': rnnzoo.GRU, 'a.bare': bare, 'a.NUMBERS': (1, 2)}
    self.assertEqual(
        public_names.problems(names, ['a.NUMBERS', 'a.bare']),
        [
            'a.GRU is public, and no page documents it.',
            'a.bare is public, and has no docstring.',
        ],
    )


class DocstringsTest(absltest.TestCase):

  def test_plain_text_becomes_markup(self):
    docstrings = load('_ext/docstrings.py')
    lines = """A cell, `a.GRU`, with |x| and `h`s.

    h' = x
    y  = h'

Args:
  **options: those of `h`:
      one    two
""".split('\n')
    self.assertEqual(
        '\n'.join(docstrings.convert(lines, {'a.GRU': 'a.GRU'})).strip(),
        r"""A cell, :py:obj:`a.GRU <a.GRU>`, with \|x\| and ``h``\ s.

.. code-block:: text

       h' = x
       y  = h'

Args:
  **options: those of ``h``:

    .. code-block:: text

          one    two""",
    )

  def test_signatures_of_modules(self):
    docstrings = load('_ext/docstrings.py')
    self.assertEqual(
        docstrings.signature(rnnzoo.LSTM),
        '(in_features, features, *, forget_bias=0.0, num_heads=1,'
        ' chrono_steps=None, peephole=False, projection=None,'
        ' param_dtype=float32, bias_init=..., rngs, **options)',
    )


class DrawingsTest(parameterized.TestCase):

  def test_there_is_one_of_each_cell(self):
    cells = load('drawings/cells.py')
    self.assertEqual(list(cells.CELLS), list(rnnzoo.LAYERS))

  def test_they_are_as_the_programs_draw_them(self):
    cells, kernels = load('drawings/cells.py'), load('drawings/kernels.py')
    drawn = {f'cell_{name}': cells.draw(name) for name in cells.CELLS}
    for name, draw in kernels.DRAWINGS.items():
      drawn[f'kernel_{name}'] = draw().render()
    for name, text in drawn.items():
      with self.subTest(name):
        path = DOCS / 'figures' / f'{name}.svg'
        self.assertEqual(text, path.read_text(encoding='utf-8'))


class GuidesTest(parameterized.TestCase):

  @parameterized.parameters(*GUIDES)
  @pytest.mark.slow
  def test_examples_run(self, page):
    tries, reports = run(page)
    self.assertGreater(tries, 0)
    self.assertEqual(reports, '')

  def test_pages_with_examples_are_guides(self):
    # training.md has one that needs a run.
    found = {
        path.stem
        for path in DOCS.glob('*.md')
        if '```pycon' in path.read_text(encoding='utf-8')
    }
    self.assertEqual(found, set(GUIDES))


if __name__ == '__main__':
  absltest.main()
