"""Files of text: one reader, whatever the task."""

import bz2
import codecs
import gzip
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from rnnzoo.tasks.text import files as text_files
from rnnzoo.tasks.text import language

TEXT = 'eins\u2028x\nzw\xf6lf\n\ndrei\n'


class TextFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'a.txt'

  def read(self, content):
    """Returns the text as one task reads it, and the lines of another."""
    self.path.write_bytes(content)
    lines, _ = text_files.read_parallel(*[str(self.path)] * 2, ('a', 'b'))
    return language.read(str(self.path))[1], lines

  @parameterized.product(
      mark=(b'', codecs.BOM_UTF8),
      pack=(bytes, gzip.compress),
      end=('\n', '\r\n', '\r'),
  )
  def test_reads(self, mark, pack, end):
    content = mark + TEXT.replace('\n', end).encode()
    lines = TEXT.split('\n')[:-1]
    self.assertEqual(self.read(pack(content)), (TEXT, lines))
    # Two such files, joined by cat.
    self.assertEqual(self.read(pack(2 * content)), (2 * TEXT, 2 * lines))

  @parameterized.parameters(
      (b'one\nt\xffo\n', 'line 2, is not UTF-8; iconv'),
      ('a\n'.encode('utf-16'), 'line 1, is not UTF-8'),
      (b'a\0\n\0b\0', 'has zeros, as UTF-16'),
      (gzip.compress(b'one\ntwo\n')[:-9], 'is not a whole .gz file'),
      (bz2.compress(b'one\n'), 'line 1, is not UTF-8'),
  )
  def test_refuses(self, content, message):
    self.path.write_bytes(content)
    path = str(self.path)
    for read in (language.read, lambda path: text_files._read(path, 'a')):
      with self.assertRaisesRegex(ValueError, f'{path}.*{message}'):
        read(path)

  def test_a_device_is_no_file(self):
    with self.assertRaisesRegex(
        FileNotFoundError, "^a must name .* is no file '/dev"
    ):
      text_files.read('/dev/zero', 'a')


if __name__ == '__main__':
  absltest.main()
