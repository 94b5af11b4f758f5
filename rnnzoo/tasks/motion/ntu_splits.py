"""The official splits of NTU RGB+D 60 and 120, and recordings to leave out.

  cross_subject   half of the persons train, the other half test (both);
  cross_view      cameras 2 and 3 train, camera 1 tests (60 only);
  cross_setup     even setups train, odd ones test (120 only).

References:
  Shahroudy et al., 2016, section 4.1 (cross-subject, cross-view).
  Liu et al., 2019 (cross-subject with 106 subjects, cross-setup).
"""

from collections.abc import Iterable, Mapping
import os
import types

import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_files

# Numbers of classes by data set.
CLASSES: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 60, 'ntu120': 120}
)
PROTOCOLS = ('cross_subject', 'cross_view', 'cross_setup')

# Those up to 40 are the 20 of NTU RGB+D 60.
TRAINING_SUBJECTS = frozenset(
    (1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38)
    + (45, 46, 47, 49, 50, 52, 53, 54, 55, 56, 57, 58, 59, 70, 74, 78, 80, 81)
    + (82, 83, 84, 85, 86, 89, 91, 92, 93, 94, 95, 97, 98, 100, 103)
)
TRAINING_CAMERAS = frozenset((2, 3))

# How many files a data set has.
FILES: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 56_880, 'ntu120': 114_480}
)

# How many of them the authors' list of missing or incomplete skeletons has.
MISSING: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 302, 'ntu120': 535}
)


def is_training(name: ntu_files.Name, protocol: str) -> bool:
  """Returns whether a recording trains; else it tests.

  Args:
    name: of the recording.
    protocol: one of `PROTOCOLS`.

  Raises:
    ValueError: there is no such protocol.
  """
  if protocol == 'cross_subject':
    return name.subject in TRAINING_SUBJECTS
  if protocol == 'cross_view':
    return name.camera in TRAINING_CAMERAS
  if protocol == 'cross_setup':
    return name.setup % 2 == 0
  raise ValueError(
      f'the protocol must be one of {", ".join(map(repr, PROTOCOLS))}; got'
      f' {protocol!r}'
  )


def training_mask(names: Iterable[ntu_files.Name], protocol: str) -> np.ndarray:
  """Returns bool [N], which recordings train.

  Raises:
    ValueError: there is no such protocol, or none of the recordings trains, or
      none tests.
  """
  mask = np.array([is_training(name, protocol) for name in names], bool)
  count = int(np.sum(mask))
  if not 0 < count < len(mask):
    raise ValueError(
        f'config.data.protocol={protocol} takes {count:,} of {len(mask):,}'
        f' recordings to train and {len(mask) - count:,} to test, and needs'
        ' some of both; convert the rest of the data set, or pass another'
        ' protocol'
    )
  return mask


def check_protocol(dataset: str, protocol: str) -> None:
  """Raises ValueError unless the data set has the protocol.

  Args:
    dataset: 'ntu60' or 'ntu120'.
    protocol: one of `PROTOCOLS`.
  """
  wrong = {'ntu60': 'cross_setup', 'ntu120': 'cross_view'}[dataset]
  if protocol == wrong:
    others = [known for known in PROTOCOLS if known != wrong]
    raise ValueError(
        f'{dataset} has no {protocol!r} protocol; it has'
        f' {" and ".join(map(repr, others))}'
    )


def read_missing(path: str | os.PathLike[str]) -> frozenset[str]:
  """Returns the names in a list of recordings to leave out.

  The authors publish two such lists, of recordings whose skeletons are missing
  or incomplete: NTU_RGBD_samples_with_missing_skeletons.txt and
  NTU_RGBD120_samples_with_missing_skeletons.txt, at
  https://github.com/shahroudy/NTURGB-D. Other text in the file is passed over.

  Args:
    path: of the list.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is no name in it.
  """
  path = fields.expand(path, 'config.data.missing_list')
  if not path.is_file():
    raise FileNotFoundError(f'the list of missing skeletons {path} is no file')
  names = ntu_files.find_names(path.read_text(errors='replace'))
  if not names:
    raise ValueError(
        f'{path} has no name like S001C002P003R002A013, so it is no list of'
        ' missing skeletons'
    )
  return names
