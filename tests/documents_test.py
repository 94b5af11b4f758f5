"""The documents are true: examples run, tables come from the committed JSON."""

import ast
import json
import pathlib
import re
import sys
import tomllib
import types
from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax.numpy as jnp
import pytest

from benchmarks import pivots
from benchmarks import score_tables
from benchmarks import tables
import rnnzoo
from tests.testing import several_devices

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read(name):
  return (ROOT / name).read_text(encoding='utf-8')


def python_blocks(name):
  return re.findall(r'```python\n(.*?)```', read(name), re.DOTALL)


def exists(name, folders=('.',)):
  """Whether a path, which may have a *, is one below any of the folders."""
  return any(any((ROOT / folder).glob(name)) for folder in folders)


def map_entries():
  """Yields (folder that holds them, names) of WORKSPACE.md's map.

  An entry is a line that starts with paths, in its folder or two spaces further
  in, and the lines after it that start further to the right.
  """
  (block,) = re.findall(
      '# Where things live\n\n```\n(.*?)```', read('WORKSPACE.md'), re.DOTALL
  )
  top = '.'
  for entry in re.findall(r'^ {0,2}\S.*(?:\n {3,}.*)*', block, re.MULTILINE):
    indent, names = re.match(r'( *)((?:[\w./]+?(?:/|\.py) +)+)', entry).groups()
    names = names.split()
    if not indent:
      top = '.'
    yield top, names
    if not indent and names[0].endswith('/'):
      top = names[0]


def unknown_commits(data):
  """Yields rows of a result whose commit is missing, or in no history."""
  head, rows = ({}, data) if isinstance(data, list) else (data, [])
  for row in rows or data.get('rows', [{}]):
    commit = str(row.get('commit', head.get('commit')))
    if not re.fullmatch('[0-9a-f]{7,40}', commit):
      yield row


class DocumentsTest(absltest.TestCase):

  @pytest.mark.slow
  def test_readme_example_runs(self):
    (example,) = python_blocks('README.md')
    names = {}
    exec(compile(example, 'README.md', 'exec'), names)
    self.assertEqual(names['y'].shape, (8, 100, 128))
    self.assertEqual(names['y_t'].shape, (8, 128))

  @pytest.mark.slow
  def test_examples_on_devices_run(self):
    printed = several_devices.run(self, 'document_program')
    self.assertIn('5 examples ran', printed)

  def test_readme_names_every_layer(self):
    for name in rnnzoo.LAYERS:
      self.assertIn(f'| `{name}` |', read('README.md'))

  def test_new_cell_of_the_walk_through_runs(self):
    example, *_ = python_blocks('docs/own_cell.md')
    names = {'__name__': 'rnnzoo.cells.mgu'}
    exec(compile(example, 'docs/own_cell.md', 'exec'), names)
    layer = names['MGU'](3, 8, num_heads=2, rngs=nnx.Rngs(0))
    self.assertEqual(layer(jnp.ones((2, 5, 3))).shape, (2, 5, 8))

  @pytest.mark.slow
  def test_new_task_of_the_walk_through_runs(self):
    example, base, config = python_blocks('docs/own_task.md')[:3]
    names = {'__name__': 'rnnzoo.tasks.parity'}
    exec(compile(example, 'docs/own_task.md', 'exec'), names)
    base_parity = types.ModuleType('configs.base_parity')
    exec(compile(base, 'docs/own_task.md', 'exec'), vars(base_parity))
    made: dict = {}
    with mock.patch.dict(sys.modules, {'configs.base_parity': base_parity}):
      exec(compile(config, 'docs/own_task.md', 'exec'), made)
    config = made['get_config']()
    config.model.features = 4
    task = names['Parity'](config)
    batch = {name: x[:8] for name, x in task.splits['train'].items()}
    result = task.evaluate(task.build_model(nnx.Rngs(0)), batch)
    self.assertEqual(config.task, 'parity')
    self.assertEqual(result.losses.shape, (8,))
    self.assertEqual(result.scores.keys(), {'accuracy'})
    self.assertTrue(jnp.isfinite(result.losses).all())
    restored = names['Parity'].restore(config, task.describe())
    model = restored.build_model(nnx.Rngs(0))
    self.assertEqual(restored.predict(model, batch['inputs']).shape, (8,))
    for label in ('Published: ', 'Measured: '):
      self.assertIn(label, made['__doc__'])

  def test_paths_of_the_map_exist(self):
    for top, names in map_entries():
      for name in names:
        self.assertTrue(exists(name, (top,)), f'{top}/{name}')

  def test_paths_in_documents_exist(self):
    documents = ['CONTRIBUTING.md', 'README.md', 'WORKSPACE.md']
    for path in (ROOT / 'docs').rglob('*.md'):
      if '_build' not in path.parts:
        documents.append(path.relative_to(ROOT))
    for package in ('pallas_kernels', 'rnnzoo'):
      for path in (ROOT / package).rglob('__init__.py'):
        documents.append(path.relative_to(ROOT))
    for document in documents:
      text = re.sub('```python.*?```', '', read(document), flags=re.DOTALL)
      own = pathlib.Path(document).parent
      folders = ('.', 'benchmarks', 'pallas_kernels', 'rnnzoo', 'tests')
      folders = (*folders, 'docs', 'docs/benchmarks', 'docs/drawings', own)
      for name in re.findall(r'(?<![\w<>./=])[\w/.]+\.(?:py|md|toml)\b', text):
        with self.subTest(f'{name} in {document}'):
          self.assertTrue(exists(name, folders))

  def test_tables_come_from_json(self):
    for document in tables.TABLES:
      with self.subTest(document):
        self.assertEqual(
            tables.render(document, read(document)),
            read(document),
            'run python -m benchmarks.tables',
        )

  def test_every_table_of_a_document_is_made(self):
    documents = [*(ROOT / 'docs').rglob('*.md'), ROOT / 'README.md']
    for path in documents:
      document = path.relative_to(ROOT).as_posix()
      found = re.findall('<!-- begin (.*?) -->', read(document))
      self.assertEqual(found, list(tables.TABLES.get(document, ())), document)

  def test_links_of_the_readme_are_absolute_in_a_wheel(self):
    hooks = tomllib.loads(read('pyproject.toml'))['tool']['hatch']['metadata']
    text = read('README.md')
    for rule in hooks['hooks']['fancy-pypi-readme']['substitutions']:
      text = re.sub(rule['pattern'], rule['replacement'], text)
    links = re.findall(r'\[[^]]*\]\(([^)]*)\)', text)
    self.assertNotEmpty(links)
    self.assertEqual([x for x in links if not x.startswith('https://')], [])

  def test_citation_names_this_version(self):
    self.assertIn(f'\nversion: {rnnzoo.__version__}\n', read('CITATION.cff'))

  def test_results_name_commits_and_are_named(self):
    documents = [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
    for folder in ('benchmarks', 'docs', 'pallas_kernels', 'rnnzoo', 'tests'):
      documents += (ROOT / folder).rglob('*.py')
    texts = ' '.join(path.read_text('utf-8') for path in documents)
    patterns = re.findall(r'[\w.*{}]+\.json', texts)
    patterns = {re.sub(r'\{\w+\}', '*', name) for name in patterns} - {'*.json'}
    # Tables and a test name them without the ending.
    for path in (ROOT / 'benchmarks').glob('*.py'):
      names = re.findall(r"'(\w+)'", path.read_text('utf-8'))
      patterns |= {f'{name}.json' for name in names}
    patterns |= {'time_series.json'}
    for path in (ROOT / 'benchmarks').glob('*.json'):
      with self.subTest(path.name):
        self.assertTrue(any(path.match(name) for name in patterns))
        data = json.loads(path.read_text('utf-8'))
        self.assertEmpty([*unknown_commits(data)])

  def test_results_have_one_layout(self):
    for path in (ROOT / 'benchmarks').glob('*.json'):
      data = json.loads(path.read_text('utf-8'))
      if isinstance(data, list) or path.stem == 'error_over_time':
        continue
      with self.subTest(path.name):
        self.assertContainsSubset(('date', 'device', 'versions'), data)
        self.assertIn('kind', data['device'])
        for row in data['rows']:
          if 'ms' in row:
            self.assertIn(row['status'], ('ok', 'cannot', 'failed'))
            self.assertIsInstance(row['ms'], float)
          others = {'median_ms', 'implementation', 'path', 'temp_bytes'}
          self.assertEmpty(others & row.keys())

  @pytest.mark.slow
  def test_decimals_of_prose_have_a_row(self):
    used, load = set(), pivots.load
    noted = lambda name: used.add(name) or load(name)
    self.enter_context(mock.patch.object(pivots, 'load', noted))
    number = r'(?<![\w.,-])\d*\.\d+(?!\.?\d)'
    version = (
        r'[\d.]+ or newer|'
        r'(?i:jax|python|since|from|>=) \d[\d.]*(?: (?:and|to|or) \d[\d.]*)?'
    )
    for path in [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]:
      document, text = path.relative_to(ROOT).as_posix(), path.read_text(
          'utf-8'
      )
      prose = re.sub(r'<!-- begin.*?<!-- end', '', text, flags=re.DOTALL)
      prose = re.sub(r'```.*?```|`[^`]*`', '', prose, flags=re.DOTALL)
      used.clear()
      names = re.findall(r'\w[\w.]*\.json', text)
      used.update(f'benchmarks/{name}' for name in names)
      made = [table() for table in tables.TABLES.get(document, {}).values()]
      results = [ROOT / name for name in used]
      made += [path.read_text('utf-8') for path in results if path.exists()]
      given = {float(x) for x in re.findall(r'\d*\.?\d+', ' '.join(made))}
      for found in set(re.findall(number, re.sub(version, '', prose))):
        digits = len(found.split('.')[1])
        if len(found.replace('.', '').lstrip('0')) > 1:
          # MiB are MB and GB in some sentences.
          scales = 1, 100, 1e3, 1e-3, 1e-6, 2**20 / 1e6, 2**20 / 1e9
          near = {round(x * scale, digits) for x in given for scale in scales}
          with self.subTest(f'{found} in {document}'):
            self.assertIn(float(found), near)

  def test_published_numbers_name_their_source(self):
    source = (
        r'(et al\.|and\s[A-Z]\w+),\s20\d\d|agru_benchmark|\w+/[\w-]+,\snote'
    )
    for path in (ROOT / 'configs').glob('*.py'):
      text = ast.get_docstring(ast.parse(path.read_text('utf-8')))
      if re.search(r'\d', score_tables.published(path.stem)):
        with self.subTest(path.name):
          self.assertRegex(text, source)

  def test_configs_state_the_measured_accuracy(self):
    rows = [
        row
        for name in ('smnist', 'time_series')
        for row in json.loads(read(f'benchmarks/{name}.json'))
        # Runs with other fields are not the config's.
        if ' with ' not in row['experiment']
    ]
    for row in rows:
      text = ast.get_docstring(
          ast.parse(read(f'configs/{row["experiment"]}.py'))
      )
      metrics = 'accuracy', 'mase', 'mse'
      metric = next(name for name in metrics if name in row)
      score = f'{row[metric]["mean"]:.4f}'
      seeds = '1 seed'
      if len(row['seeds']) > 1:
        score += f' +- {row[metric]["std"]:.4f}'
        seeds = f'{len(row["seeds"])} seeds'
      if metric != 'accuracy':
        score = f'{metric.upper()} {score}'
      self.assertIn(
          f'Measured: {score} ({seeds}, {row["device"]},'
          f' commit {row["commit"]}).',
          text,
      )


if __name__ == '__main__':
  absltest.main()
