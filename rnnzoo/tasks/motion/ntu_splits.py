"""The official splits of NTU RGB+D 60 and 120, and recordings to leave out.

  cross_subject   half of the persons train, the second half tests (both);
  cross_view      cameras 2 and 3 train, camera 1 tests (60 only);
  cross_setup     even setups train, odd ones test (120 only).

References:
  Shahroudy et al., 2016, section 4.1 (cross-subject, cross-view).
  Liu et al., 2019 (cross-subject with 106 subjects, cross-setup).
"""

from collections.abc import Mapping, Sequence
import os
import types
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_files

PROTOCOLS = ('cross_subject', 'cross_view', 'cross_setup')


class Dataset(NamedTuple):
  """Counts of a data set.

  Attributes:
    classes: number of actions.
    files: number of recordings.
    missing: length of the authors' list of recordings whose skeletons are
      missing or incomplete.
    protocols: names of the protocols that its authors define.
  """

  classes: int
  files: int
  missing: int
  protocols: tuple[str, str]


DATASETS: Mapping[str, Dataset] = types.MappingProxyType(
    {
        'ntu60': Dataset(60, 56_880, 302, ('cross_subject', 'cross_view')),
        'ntu120': Dataset(120, 114_480, 535, ('cross_subject', 'cross_setup')),
    }
)

# The 20 subjects up to number 40 train in NTU RGB+D 60 as well.
TRAINING_SUBJECTS = frozenset(
    (1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38)
    + (45, 46, 47, 49, 50, 52, 53, 54, 55, 56, 57, 58, 59, 70, 74, 78, 80, 81)
    + (82, 83, 84, 85, 86, 89, 91, 92, 93, 94, 95, 97, 98, 100, 103)
)
TRAINING_CAMERAS = frozenset((2, 3))


def is_training(name: ntu_files.Name, protocol: str) -> bool:
  """Returns whether a recording trains; else it tests.

  Args:
    name: name of the recording.
    protocol: a name in `PROTOCOLS`.
  """
  return {
      'cross_subject': name.subject in TRAINING_SUBJECTS,
      'cross_view': name.camera in TRAINING_CAMERAS,
      'cross_setup': name.setup % 2 == 0,
  }[protocol]


def training_mask(names: Sequence[ntu_files.Name], protocol: str) -> np.ndarray:
  """Returns bool [N], which recordings train.

  Raises:
    ValueError: no recording trains, or none tests.
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
  """Raises ValueError unless one of `DATASETS` has the protocol."""
  known = DATASETS[dataset].protocols
  if protocol not in known:
    raise ValueError(
        f'{dataset} has no {protocol!r} protocol; it has'
        f' {" and ".join(map(repr, known))}'
    )


def read_missing(path: str | os.PathLike[str]) -> frozenset[str]:
  """Returns the names in a list of recordings to leave out.

  The authors publish two such lists,
  NTU_RGBD_samples_with_missing_skeletons.txt and
  NTU_RGBD120_samples_with_missing_skeletons.txt, at
  https://github.com/shahroudy/NTURGB-D. Other text in the file is ignored.

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
