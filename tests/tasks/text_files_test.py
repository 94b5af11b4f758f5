"""Files of text: one reader, whatever the task."""

import bz2
import codecs
import gzip
import pathlib
import tracemalloc
from unittest import mock

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
      form=(
          (b'', 'utf-8'),
          (codecs.BOM_UTF8, 'utf-8'),
          (codecs.BOM_UTF16_LE, 'utf-16-le'),
          (codecs.BOM_UTF16_BE, 'utf-16-be'),
          (codecs.BOM_UTF32_LE, 'utf-32-le'),
          (codecs.BOM_UTF32_BE, 'utf-32-be'),
      ),
      pack=(bytes, gzip.compress),
      end=('\n', '\r\n'),
  )
  def test_reads(self, form, pack, end):
    mark, encoding = form
    content = mark + TEXT.replace('\n', end).encode(encoding)
    lines = TEXT.split('\n')[:-1]
    self.assertEqual(self.read(pack(content)), (TEXT, lines))
    # Two such files, joined by cat.
    self.assertEqual(self.read(pack(2 * content)), (2 * TEXT, 2 * lines))

  @parameterized.parameters(
      (b'one\nt\xffo\n', 'line 2, is not UTF-8: byte 2 of the line is 0xff'),
      (
          b'\xff\xfea\0\n\0b\0\0\xdc',
          'line 2, is not UTF-16-LE: byte 3 of the line is 0x00',
      ),
      ('ab\n'.encode('utf-16-be'), 'is full of zeros, as UTF-16 without its'),
      (b'one\ntwo\rthree\n', ', line 2, has a carriage return without'),
      (b'one\r\r\n', ', line 1, has a carriage return without'),
      (gzip.compress(b'one\ntwo\n')[:-9], 'is not a whole .gz file'),
      (bz2.compress(b'one\n'), 'what is packed; .* as a plain text or .gz'),
      (b'PK\3\4', 'what is packed; .* as a plain text or .gz'),
      (
          gzip.compress(gzip.compress(b'one\n')),
          'what is packed; .* as a plain text',
      ),
  )
  def test_refuses(self, content, message):
    self.path.write_bytes(content)
    path = str(self.path)
    for read in (language.read, lambda path: text_files._read(path, 'a')):
      with self.assertRaisesRegex(ValueError, f'{path}.*{message}'):
        read(path)

  def test_a_device_is_no_file(self):
    with self.assertRaisesRegex(FileNotFoundError, "a: there is no file '/dev"):
      text_files.read('/dev/zero', 'a')

  def test_a_packed_text_is_read_up_to_a_bound(self):
    self.path.write_bytes(gzip.compress(bytes(2**26), 1))
    self.enter_context(mock.patch.object(text_files, '_MOST_BYTES', 2**22))
    tracemalloc.start()
    with self.assertRaisesRegex(ValueError, 'more than .* bytes; a part of it'):
      text_files._read(str(self.path), 'a')
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    self.assertLess(most, 2**25 + 2**24)


if __name__ == '__main__':
  absltest.main()
