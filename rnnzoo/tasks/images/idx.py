"""The IDX files in which MNIST is distributed: reading, checking, fetching."""

from collections.abc import Mapping
import gzip
import hashlib
import http.client
import math
import os
import pathlib
import threading
import time
import types
import urllib.request
import zlib

import numpy as np

URL = 'https://storage.googleapis.com/cvdf-datasets/mnist/'

# MD5 sums of the canonical files, as TFDS and torchvision have them too.
CHECKSUMS: Mapping[str, str] = types.MappingProxyType(
    {
        'train-images-idx3-ubyte.gz': 'f68b3c2dcbeaaa9fbdd348bbdeb94873',
        'train-labels-idx1-ubyte.gz': 'd53e105ee54ea40749a09fcbcd1e9432',
        't10k-images-idx3-ubyte.gz': '9fb629c4189551a2d022fa330f9573f3',
        't10k-labels-idx1-ubyte.gz': 'ec29112dd5afa0611ce80d1b7f02629c',
    }
)

# The greatest of the four: 60,000 images with their header.
_MAX_BYTES = 60_000 * 28 * 28 + 16

# Compressed, it has 9.9 MB.
_MAX_DOWNLOAD = 16 * 2**20
_MAX_DOWNLOAD_SECONDS = 600.0

# The smallest of the four, 4.5 kB, which the probe of the network fetches.
_SMALLEST = 't10k-labels-idx1-ubyte.gz'


def read(path: str | os.PathLike[str]) -> np.ndarray:
  """Returns the uint8 array in a gzipped IDX file.

  An IDX file is two zero bytes, a type byte (8 for uint8), the number of axes,
  the length of each axis as a big-endian int32, and the data in C order.
  """
  try:
    with gzip.open(path) as file:
      head = file.read(4)
      if len(head) < 4 or head[:3] != b'\x00\x00\x08':
        raise ValueError(f'{path} is not an IDX file of unsigned bytes')
      sizes = file.read(4 * head[3])
      if len(sizes) < 4 * head[3]:
        raise ValueError(f'{path} ends within its header')
      shape = np.frombuffer(sizes, '>i4').tolist()
      if min(shape, default=-1) < 0 or (
          math.prod(max(size, 1) for size in shape) > _MAX_BYTES
      ):
        raise ValueError(
            f'{path} says that it holds {shape}; MNIST has no such file'
        )
      expected = math.prod(shape)
      # One byte more, so that the file's end is seen, with its checksum.
      content = file.read(expected + 1)
  except (OSError, EOFError, zlib.error) as error:
    if isinstance(error, OSError) and error.errno is not None:
      raise  # The file is not there, say.
    raise ValueError(f'{path} is not a whole gzip file: {error}') from error
  if len(content) != expected:
    found = 'more' if len(content) > expected else f'{len(content)} bytes'
    raise ValueError(
        f'{path} holds {found} of data, but its header says {tuple(shape)}'
    )
  return np.frombuffer(content, np.uint8).reshape(shape)


def verify(
    directory: str | os.PathLike[str],
    checksums: Mapping[str, str] = CHECKSUMS,
) -> None:
  """Checks that the four files are in `directory`, and are the right ones."""
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f'the data directory {directory} does not exist')
  missing = [name for name in checksums if not (directory / name).is_file()]
  if missing:
    raise FileNotFoundError(f'{directory} lacks {", ".join(missing)}')
  for name, expected in checksums.items():
    check_sum(directory / name, expected, 'MNIST')


def check_sum(path: pathlib.Path, expected: str, name: str) -> None:
  """Raises ValueError unless a file has the MD5 sum of a data set's file."""
  with path.open('rb') as file:
    actual = hashlib.file_digest(file, 'md5').hexdigest()
  if actual != expected:
    raise ValueError(
        f'{path} has the MD5 sum {actual}, but {name} has {expected}; the file'
        ' is damaged or is another one'
    )


def reachable(timeout: float = 4.0) -> bool:
  """Returns whether MNIST can be downloaded from here, within `timeout` s.

  It fetches the smallest file and checks it, so that neither a dead name server
  nor a log-in page counts as a network.
  """
  answers = []

  def probe():
    try:
      with urllib.request.urlopen(URL + _SMALLEST, timeout=timeout) as response:
        answers.append(hashlib.md5(response.read(2**16)).hexdigest())
    except (OSError, http.client.HTTPException):
      pass  # No answer is the answer.

  # Looking a name up knows no timeout, so a thread that may be left behind does
  # it.
  thread = threading.Thread(target=probe, daemon=True)
  thread.start()
  thread.join(timeout)
  return answers == [CHECKSUMS[_SMALLEST]]


def download(directory: str | os.PathLike[str]) -> None:
  """Fetches each of the four files that `directory` lacks.

  Raises:
    ConnectionError: a file could not be fetched.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for name in CHECKSUMS:
    path = directory / name
    if path.exists():
      continue
    partial = path.with_suffix('.part')
    try:
      with urllib.request.urlopen(URL + name, timeout=30) as response:
        partial.write_bytes(_read_bounded(response))
    except (OSError, http.client.HTTPException) as error:
      raise ConnectionError(
          f'could not download {URL + name} ({error}); fetch the four files by'
          ' other means and pass their directory as --config.data.manual_dir'
      ) from error
    os.replace(partial, path)


def _read_bounded(response: http.client.HTTPResponse) -> bytes:
  """Returns an answer, or raises OSError if it is too long, or too slow."""
  deadline = time.monotonic() + _MAX_DOWNLOAD_SECONDS
  parts: list[bytes] = []
  size = 0
  while part := response.read1(2**16):
    parts.append(part)
    size += len(part)
    if size > _MAX_DOWNLOAD:
      raise OSError(f'the answer has more than {_MAX_DOWNLOAD:,} bytes')
    if time.monotonic() > deadline:
      raise OSError(f'it took more than {_MAX_DOWNLOAD_SECONDS:g} s')
  return b''.join(parts)
