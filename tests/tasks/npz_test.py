"""Sequences in .npz files: forms, splits, and errors that name the place."""

import contextlib
import io
import pathlib
import random
import tracemalloc

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequences
from tests.testing import sequence_files

CLASSES = npz.Form('classification')
NUMBERS = npz.Form('regression')
CLASSES_STEP = npz.Form('classification', every_step=True)
NUMBERS_STEP = npz.Form('regression', every_step=True)

X = np.arange(12.0).reshape(2, 3, 2)
NAN = X.copy()
NAN[1, 2, 0] = np.nan


class NpzTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.directory / 'mine.npz'

  def write(self, **arrays):
    np.savez(self.path, **arrays)
    return self.path

  def printed(self, **arrays):
    """Returns what is printed when these arrays are read."""
    if arrays:
      self.write(**arrays)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      npz.read(self.path, CLASSES)
    return printed.getvalue()

  def refuses(self, message, form=CLASSES):
    with self.assertRaisesRegex(ValueError, f'{self.path}.*{message}'):
      npz.read(self.path, form)

  def test_padded(self):
    y = np.array(['b', 'a'])
    found = npz.read(self.write(x=X, y=y, lengths=np.array([1, 3])), CLASSES)
    np.testing.assert_array_equal(found.lengths, [1, 3])
    np.testing.assert_array_equal(found.x[0], [[0, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(found.x[1], X[1])
    np.testing.assert_array_equal(found.y, y)
    # Beyond a sequence's end anything may stand.
    found = npz.read(self.write(x=NAN, y=[0, 1], lengths=[3, 2]), CLASSES)
    self.assertEqual(found.x[1, 2, 0], 0.0)
    found = npz.read(
        self.write(x=NAN, y=[0, 1]), CLASSES._replace(missing='zero')
    )
    self.assertTrue(np.isnan(found.x[1, 2, 0]))
    # One column, and no lengths.
    found = npz.read(self.write(x=X[..., 0], y=[0, 1]), CLASSES)
    self.assertEqual(found.x.shape, (2, 3, 1))
    np.testing.assert_array_equal(found.lengths, [3, 3])

  @parameterized.parameters(
      (NUMBERS, (2,), (2, 1)),
      (NUMBERS, (2, 4), (2, 4)),
      (NUMBERS_STEP, (2, 3), (2, 3, 1)),
      (NUMBERS_STEP, (2, 3, 4), (2, 3, 4)),
  )
  def test_numbers(self, form, shape, expected):
    found = npz.read(self.write(x=X, y=np.ones(shape, np.int64)), form)
    self.assertEqual(found.y.shape, expected)

  @parameterized.parameters(
      ({'x': None, 'X': X}, 'must hold .* it holds y$'),
      ({'y': None, 'labels': [0]}, 'and y, the answers; it holds x$'),
      ({'x': X[0, 0]}, r'\[N, T, F\] or \[N, T\], .*\[2\]'),
      ({'x': np.array([X, 1], object)}, 'padded to one length: Object arrays '),
      ({'x': NAN}, "x must .*step 2, column 0 is nan .*missing='zero'"),
      ({}, r'\[2, 3\] for config.*step=True', CLASSES_STEP),
      ({'y': [0.5, 1]}, 'kind=.regression'),
      ({'y': [b'a', b'b']}, r'booleans or text \[2\].*; got \|S1'),
      ({'y': np.array([0, 2**63], np.uint64)}, 'integers below .*36854775808'),
      ({'y': X}, r'\[2, D\] or \[2\] for', NUMBERS),
      ({'y': 1e39 * X[..., 0]}, 'y must .*step 1, .* is inf', NUMBERS_STEP),
      ({'y': [[1] * 3, [np.nan] * 3]}, 'sequence 1 has none', NUMBERS_STEP),
      ({'lengths': [1, 4]}, 'to 3; sequence 1 has 4'),
      ({'x': None, 'steps': X[0]}, r'must hold x \[N, T, F\], with lengths '),
  )
  def test_refuses(self, arrays, message, form=CLASSES):
    arrays = {'x': X, 'y': [0, 1], **arrays}
    self.write(**{k: v for k, v in arrays.items() if v is not None})
    self.refuses(message, form)

  def test_files_that_are_none(self):
    with self.assertRaisesRegex(FileNotFoundError, 'mine.npz does not exist'):
      npz.read(self.path, CLASSES)
    # numpy calls a table of text a pickle, and says how to load it unsafely.
    for content, begin in ((b'a,b,c\r\n1,2,3\r\n', 'a,b,c'), (b'', "'")):
      self.path.write_bytes(content)
      self.refuses(f"not a whole .npz file.*begins with b'{begin}.*savez")
    with self.path.open('wb') as file:
      np.save(file, X)
    self.refuses('begins with .*NUMPY')

  def test_damaged_in_any_way(self):
    whole = self.write(x=X, y=[0, 1]).read_bytes()
    rng = random.Random(0)
    for _ in range(300):
      content = bytearray(whole)
      for _ in range(rng.choice((1, 3))):
        content[rng.randrange(len(content))] = rng.randrange(256)
      self.path.write_bytes(content[: rng.choice((len(whole), 200))])
      try:
        self.printed()
      except ValueError as error:
        self.assertIn(str(self.path), str(error))

  def test_an_array_that_nothing_reads_is_named(self):
    told = self.printed(x=X, y=[0, 1], mask=np.ones((2, 3)))
    self.assertIn("its array 'mask', only x, y, lengths", told)

  @parameterized.parameters(0, np.nan)
  def test_padding_without_lengths_is_told(self, value):
    lengths = np.array([3, 5, 4, 8, 2])
    x = 1 + np.random.RandomState(0).rand(5, 8, 2)
    x[np.arange(8) >= lengths[:, None]] = value
    x[0, 1] = value  # In the middle, which is no padding.
    form = CLASSES._replace(missing='zero')

    def told(x, **more):
      self.write(x=x, y=np.arange(5), **more)
      with contextlib.redirect_stdout(io.StringIO()) as printed:
        npz.read(self.path, form)
      return printed.getvalue()

    self.assertIn('4 of 5 sequences end in steps of zeros or NaN, 18', told(x))
    self.assertEqual(told(x, lengths=lengths), '')
    self.assertEqual(told(x[:, -1:]), '')  # One step is no padding.
    x[:, -1] = 1
    self.assertEqual(told(x), '')

  def test_chance_is_no_padding(self):
    rng = np.random.RandomState(0)
    for x in (
        rng.randint(0, 9, (200, 9)),
        np.eye(5)[rng.randint(0, 5, (200, 9))],
        np.repeat(rng.randint(0, 50, (200, 5)), 4, axis=1),
    ):
      self.assertEqual(self.printed(x=x, y=np.arange(len(x)) % 2), '')

  def test_nothing_is_read_that_is_not_used(self):
    np.savez_compressed(self.path, x=X, y=[0, 1], more=np.zeros(10**7))
    tracemalloc.start()
    self.assertIn("array 'more'", self.printed())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    self.assertLess(peak, 2**22)


class FolderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def write(self, name, **more):
    sequence_files.write_npz(self.directory / f'{name}.npz', **more)

  def encoded(self):
    splits = sequences.read_splits(self.directory, CLASSES)
    return sequences.encode(splits, every_step=False)

  def test_splits_in_several_files(self):
    for name in ('train-0', 'train-1', 'validation'):
      self.write(name)
    self.write('test', **sequence_files.arrays(4, 9))
    path = self.directory / 'test.npz'
    path.rename(path.with_suffix('.NPZ'))
    found = sequences.read_splits(self.directory, CLASSES)
    sizes = {name: split.x.shape[:2] for name, split in found.items()}
    self.assertEqual(
        sizes, {'train': (48, 6), 'validation': (24, 6), 'test': (4, 9)}
    )

  def test_shards(self):
    with self.assertRaisesRegex(FileNotFoundError, 'no .npz file'):
      sequences.read_splits(self.directory, CLASSES)
    self.write('a')
    self.write('b', **sequence_files.arrays(4, 9))
    found = sequences.read_splits(self.directory, CLASSES)
    self.assertEqual(found['train'].x.shape, (28, 9, 2))
    np.testing.assert_array_equal(found['train'].x[:24, 6:], 0)

  @parameterized.parameters(
      (('train', 'more'), {}, 'must hold train.npz'),
      (('test',), {}, 'must hold train.npz'),
      (('test', 'train'), {'x': np.zeros((24, 6, 3))}, 'it has 3 columns'),
      (('Train', 'Test'), {}, 'must hold train.npz'),
      (('train', 'Test'), {}, 'must hold train.npz'),
      (('training', 'more'), {}, 'must hold train.npz'),
      (('a', 'val'), {}, 'must hold train.npz'),
      (('mine_TRAIN', 'mine_TEST'), {}, 'must hold train.npz'),
      (('test', 'train'), {'y': ['a', 'b'] * 12}, 'text .. as y'),
      (
          ('test', 'train'),
          {'y': np.zeros((24, 3))},
          r'numbers \[3\] as y',
          NUMBERS,
      ),
  )
  def test_refuses(self, names, arrays, message, form=CLASSES):
    for name in names[:-1]:
      self.write(name)
    self.write(names[-1], **arrays)
    with self.assertRaisesRegex(ValueError, message):
      sequences.read_splits(self.directory, form)

  def test_labels_of_any_kind(self):
    for labels, names in (
        ([3, -1], ('-1', '3')),
        ([True, False], ('False', 'True')),
        (['wal', 'sit'], ('sit', 'wal')),
    ):
      self.write('train', y=np.array(labels * 12))
      encoded, kind = self.encoded()
      self.assertEqual(kind.names, names)
      np.testing.assert_array_equal(encoded['train'].y, [1, 0] * 12)
    self.write('train', y=np.ones(24, int))
    with self.assertRaisesRegex(ValueError, "classes at least; all are '1'"):
      self.encoded()

  def test_labels_of_two_types(self):
    large, word = 2**53, 'läuft'
    for train, test, names, train_y, test_y in (
        (
            np.array([large, large + 1], np.uint64),
            np.array([large + 1, large + 2], np.int64),
            (str(large), str(large + 1), str(large + 2)),
            [0, 1],
            [1, 2],
        ),
        (
            np.array(['sit', 'to']),
            np.array([word, 'sit']),
            (word, 'sit', 'to'),
            [1, 2],
            [0, 1],
        ),
    ):
      self.write('train', y=np.tile(train, 12))
      self.write('train_2', y=np.tile(test, 12))
      self.write('test', y=np.tile(test, 12))
      encoded, kind = self.encoded()
      self.assertEqual(kind.names, names)
      np.testing.assert_array_equal(encoded['train'].y[:2], train_y)
      np.testing.assert_array_equal(encoded['test'].y[:2], test_y)


if __name__ == '__main__':
  absltest.main()
