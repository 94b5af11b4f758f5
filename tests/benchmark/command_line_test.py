"""Programs that measure refuse what they cannot obey before they begin."""

import pathlib

from absl import app
from absl.testing import absltest

from rnnzoo.benchmark import command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]


class CommandLineTest(absltest.TestCase):

  def test_flags_alone(self):
    command_line.flags_alone(['program'])
    with self.assertRaisesRegex(app.UsageError, "unknown argument 'GRU'"):
      command_line.flags_alone(['program', 'GRU'])

  def test_writable(self):
    command_line.writable(None)
    folder = pathlib.Path(self.create_tempdir().full_path) / 'new'
    path = folder / 'out.json'
    command_line.writable(str(path))
    self.assertEmpty(list(folder.iterdir()))
    path.write_text('earlier')
    command_line.writable(str(path))
    self.assertEqual(path.read_text(), 'earlier')
    self.assertLen(list(folder.iterdir()), 1)

  def test_nothing_can_be_written(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'file').touch()
    for path, expected in (
        (folder, 'Is a directory'),
        (folder / 'file' / 'out.json', 'would work'),
        ('/proc/no/out.json', 'would work'),
    ):
      with self.subTest(path):
        with self.assertRaisesRegex(app.UsageError, expected):
          command_line.writable(str(path))

  def test_programs_ask(self):
    asked = set()
    for path in (ROOT / 'benchmarks').glob('*.py'):
      text = path.read_text(encoding='utf-8')
      if "DEFINE_string('output'" in ' '.join(text.split()).replace('( ', '('):
        asked.add(path.name)
        with self.subTest(path.name):
          self.assertIn('command_line.writable(_OUTPUT.value)', text)
          if path.name != 'collect_runs.py':  # It takes directories of runs.
            self.assertIn('command_line.flags_alone(argv)', text)
    self.assertContainsSubset({'agru_ladder.py', 'processes.py'}, asked)


if __name__ == '__main__':
  absltest.main()
