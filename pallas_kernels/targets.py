"""Where a kernel is to run, and whether it can.

The kernels are written for Mosaic GPU, Pallas's compiler for Hopper and newer.
Whoever calls one learns by `NotImplementedError`, while tracing, that another
path has to be taken.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import NamedTuple

import jax

# Kinds of devices that are known without being there, for lowering: their
# compute capability.
_KINDS = {'NVIDIA H100': 9, 'NVIDIA H200': 9, 'NVIDIA B200': 10}

_OTHERWISE = (
    "implementation='scan' runs everywhere; 'associative_scan' runs linear"
    ' cells; None takes the fastest that can run.'
)

_interpreting = False


class Target(NamedTuple):
  """A device to compile for.

  Attributes:
    kind: its name, for instance 'NVIDIA H200'.
    cores: number of multiprocessors.
    interpret: whether kernels are interpreted on a CPU, for tests.
  """

  kind: str
  cores: int
  interpret: bool


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Runs kernels that are traced inside on a CPU: slow, for tests."""
  global _interpreting
  before, _interpreting = _interpreting, True
  try:
    yield
  finally:
    _interpreting = before


def current() -> Target:
  """Returns the device that kernels are compiled for here.

  Raises:
    NotImplementedError: this jax or this device cannot run the kernels.
  """
  version = jax.__version_info__
  if version < (0, 11):
    raise NotImplementedError(
        f'GPU kernels need jax >= 0.11, and this is jax {jax.__version__}.'
        f' {_OTHERWISE}'
    )
  if _interpreting:
    return Target('interpreter', 4, True)
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None:
    kind, platform = described.device_kind, described.platform
    cores, major = described.num_cores, _KINDS.get(kind, 0)
  else:
    device = jax.devices()[0]
    kind, platform = device.device_kind, device.platform
    cores = getattr(device, 'core_count', None)
    major = int(getattr(device, 'compute_capability', '0').split('.')[0])
  if platform not in ('gpu', 'cuda') or major < 9:
    raise NotImplementedError(
        'GPU kernels need an NVIDIA GPU of compute capability 9.0 or newer'
        f' (H100, H200, B200), and the device here is {kind!r}. {_OTHERWISE}'
    )
  return Target(kind, cores or 132, False)


_DTYPES = ('float32', 'bfloat16', 'float16')


def check_dtypes(name: str, arrays: Sequence[jax.Array]) -> None:
  """Raises NotImplementedError unless kernels can read the arrays."""
  given = sorted({x.dtype.name for x in arrays})
  if not set(given) <= set(_DTYPES):
    raise NotImplementedError(
        f'{name} on the GPU takes {_DTYPES}, got {given}. {_OTHERWISE}'
    )


def check_sizes(name: str, batch: int, time: int, features: int) -> None:
  """Raises NotImplementedError where there is nothing to compute."""
  if not batch or not time or not features:
    raise NotImplementedError(
        f'{name} on the GPU needs batch, time and features above 0, got'
        f' {(batch, time, features)}. {_OTHERWISE}'
    )
