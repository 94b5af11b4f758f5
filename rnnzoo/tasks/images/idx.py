"""The IDX files in which MNIST is distributed: reading, checking, fetching."""

from collections.abc import Mapping
import gzip
import hashlib
import http.client
import os
import pathlib
import types
import urllib.request

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

# The largest has 9.9 MB.
_MOST_BYTES = 16 * 2**20
_TIMEOUT = 10.0  # Seconds without an answer.


def read(
    directory: pathlib.Path, checksums: Mapping[str, str] = CHECKSUMS
) -> list[np.ndarray]:
  """Returns the arrays of the four files, uint8, in the order of `CHECKSUMS`.

  An IDX file is two zero bytes, a type byte (8 for uint8), the number of axes,
  the length of each axis as a big-endian int32, and the data in C order. A file
  that has the right checksum is one.
  """
  missing = [name for name in checksums if not (directory / name).is_file()]
  if missing:
    raise FileNotFoundError(f'{directory} lacks {", ".join(missing)}')
  arrays = []
  for name, expected in checksums.items():
    check_sum(directory / name, expected, 'MNIST')
    content = gzip.decompress((directory / name).read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, '>i4', axes, 4)
    found = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    arrays.append(found.reshape(shape))
  return arrays


def check_sum(path: pathlib.Path, expected: str, name: str) -> None:
  """Raises ValueError unless a file has the MD5 sum of a data set's file."""
  with path.open('rb') as file:
    actual = hashlib.file_digest(file, 'md5').hexdigest()
  if actual != expected:
    raise ValueError(
        f'{path} has the MD5 sum {actual}, but {name} has {expected}; the file'
        ' is damaged or is another one'
    )


def download(directory: pathlib.Path) -> None:
  """Fetches each of the four files that `directory` lacks.

  Raises:
    ConnectionError: a file could not be fetched.
  """
  directory.mkdir(parents=True, exist_ok=True)
  for name in CHECKSUMS:
    path = directory / name
    if path.exists():
      continue
    partial = path.with_suffix(f'.{os.getpid()}.part')
    try:
      partial.write_bytes(_fetch(name))
    except (OSError, http.client.HTTPException) as error:
      raise ConnectionError(
          f'could not download {URL + name} ({error}); fetch the four files by'
          ' other means and pass their directory as --config.data.manual_dir'
      ) from error
    os.replace(partial, path)


def _fetch(name: str) -> bytes:
  """Returns a file from the network, or raises OSError if it is another."""
  with urllib.request.urlopen(URL + name, timeout=_TIMEOUT) as response:
    content = response.read(_MOST_BYTES)
  if hashlib.md5(content).hexdigest() != CHECKSUMS[name]:
    raise OSError('the answer is another file')
  return content
