"""The device that kernels are compiled for, and whether it can run them.

The kernels are written for Mosaic GPU, one of Pallas's compilers. On a device
that it does not know `current` raises `NotImplementedError` while tracing, so
that the caller can take another path.
"""

from collections.abc import Iterator
import contextlib
import sys
from typing import Any, NamedTuple

import jax
from jax import lax

Capability = tuple[int, int]

# Beginnings of the names of devices that are not there, for lowering, and their
# compute capability. Mosaic GPU lowers for 9.0 whatever the name is.
_KINDS: dict[str, Capability] = {
    'NVIDIA H100': (9, 0),
    'NVIDIA H200': (9, 0),
    'NVIDIA GH200': (9, 0),
    'NVIDIA B200': (10, 0),
    'NVIDIA GB200': (10, 0),
}

# KiB of shared memory that a CTA may have, by compute capability.
_SHARED = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
    (12, 1): 99,
}

# CTAs of a cluster, by the major number. More than 8 are not portable; Hopper
# and the data centre's Blackwell have 16, and older devices no clusters.
_CLUSTERS = {8: 1, 9: 16, 10: 16, 12: 8}

# Major numbers of the devices that kernels have run on.
_TRIED = (9,)

_interpreting = False
_planned: Capability | None = None


class Target(NamedTuple):
  """A device to compile for.

  Attributes:
    cores: number of multiprocessors.
    interpret: whether kernels are interpreted on a CPU, for tests.
    capability: its compute capability.
  """

  cores: int
  interpret: bool
  capability: Capability = (9, 0)

  @property
  def wgmma(self) -> bool:
    """Whether warpgroups multiply matrices as on Hopper."""
    return self.capability[0] == 9

  @property
  def has_tma(self) -> bool:
    """Whether there are copies by TMA, and other instructions of 9.0."""
    return self.capability >= (9, 0)

  @property
  def largest_cluster(self) -> int:
    """Most CTAs of a cluster; 1 where there are none."""
    return _CLUSTERS[self.capability[0]]

  @property
  def shared(self) -> int:
    """Bytes of shared memory that a CTA may have."""
    return 1024 * _SHARED[self.capability]


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Runs kernels that are traced inside on a CPU: slow, for tests."""
  global _interpreting
  before, _interpreting = _interpreting, True
  try:
    yield
  finally:
    _interpreting = before


@contextlib.contextmanager
def planned_for(capability: Capability) -> Iterator[None]:
  """Kernels traced inside do with what an older device has, for tests.

  They run on the device that is there, which must be a newer one.

  Args:
    capability: a compute capability, (8, 6) for instance.
  """
  global _planned
  before, _planned = _planned, capability
  try:
    yield
  finally:
    _planned = before


def is_interpreting() -> bool:
  """Returns whether kernels that are traced here run on a CPU."""
  return _interpreting


def platform() -> str:
  """Returns the platform that programs are planned for: 'gpu', 'cpu', 'tpu'.

  An abstract device has precedence, if programs are traced for one.
  """
  _, backend, *_ = _describe()
  return 'gpu' if backend == 'cuda' else backend


def current() -> Target:
  """Returns the device that kernels are compiled for here.

  Raises:
    NotImplementedError: this jax or this device cannot run the kernels.
  """
  if jax.__version_info__ < (0, 11):
    device = default_device()
    if device.platform == 'gpu' and _capability(device) not in _SHARED:
      raise NotImplementedError(_unsupported(device.device_kind))
    raise NotImplementedError(
        'GPU kernels need jax >= 0.11, and this is jax'
        f' {jax.__version__} on Python {sys.version.split()[0]}. On Python'
        " 3.12 or newer, pip install 'jax[cuda13]>=0.11,<0.13' brings them."
    )
  if _interpreting:
    return Target(4, True)
  kind, backend, cores, capability = _describe()
  if backend not in ('gpu', 'cuda') or capability not in _SHARED:
    raise NotImplementedError(_unsupported(kind))
  return Target(cores or 132, False, _planned or capability)


def untried() -> str:
  """Returns the name of the GPU here if the kernels may run, but never did."""
  if jax.__version_info__ < (0, 11) or _interpreting:
    return ''
  device = default_device()
  capability = _capability(device)
  is_here = device.platform == 'gpu' and device in jax.local_devices()
  is_known = capability in _SHARED and capability[0] not in _TRIED
  is_target = _describe()[0] == device.device_kind
  return device.device_kind if is_here and is_known and is_target else ''


def _describe() -> tuple[str, str, int | None, Capability]:
  """Returns kind, platform, number of cores and compute capability."""
  device = default_device()
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.device_kind != device.device_kind:
    # Compiled for a device that is not here.
    kind = described.device_kind
    known = (m for name, m in _KINDS.items() if kind.startswith(name))
    return kind, described.platform, described.num_cores, next(known, (0, 0))
  cores = getattr(device, 'core_count', None)
  return device.device_kind, device.platform, cores, _capability(device)


def _capability(device: Any) -> Capability:
  """Returns the compute capability of a device, (0, 0) where it has none."""
  # 'gfx942' on an AMD GPU.
  major, _, minor = str(getattr(device, 'compute_capability', '')).partition(
      '.'
  )
  if not (major.isdigit() and minor.isdigit()):
    return 0, 0
  return int(major), int(minor)


def _unsupported(kind: str) -> str:
  return (
      'GPU kernels need an NVIDIA GPU of compute capability'
      f' {", ".join(f"{x}.{y}" for x, y in _SHARED)}, and the device here is'
      f' {kind!r}.'
  )


def default_device() -> jax.Device:
  """Returns the device that computations go to unless told otherwise."""
  config: Any = jax.config  # Its attributes have no types.
  default = config.jax_default_device
  if isinstance(default, str):
    return jax.local_devices(backend=default)[0]
  return default or jax.local_devices()[0]


# The mesh axes that arrays vary over, under `jax.shard_map`.
#
# There a replicated array, such as a parameter or a zero carry, has another
# type than one of which each device has its own part. Loops, kernels and
# derivatives want one type; the cast's transpose sums over the devices.


def alike(tree: Any) -> Any:
  """Makes all arrays of a tree vary over the union of their axes."""
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  return jax.tree.map(lambda x: _over(x, axes), tree)


def like(x, other):
  """Makes x vary over the axes that another array varies over."""
  return _over(x, _axes(other))


def varies(tree: Any) -> bool:
  """Returns whether any array of a tree varies over a mesh axis."""
  return any(map(_axes, jax.tree.leaves(tree)))


def _axes(x) -> frozenset[Any]:
  return jax.typeof(x).manual_axis_type.varying


def _over(x, axes: frozenset[Any]):
  missing = tuple(sorted(axes - _axes(x)))
  return lax.pcast(x, missing, to='varying') if missing else x
