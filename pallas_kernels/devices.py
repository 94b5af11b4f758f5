"""The device that kernels are compiled for, and whether it can run them.

The kernels are written for Mosaic GPU, Pallas's compiler for Hopper and newer.
On any other device `current` raises `NotImplementedError` while tracing, so
that the caller can take another path.
"""

from collections.abc import Iterator
import contextlib
import sys
from typing import Any, NamedTuple

import jax
from jax import lax

# Beginnings of the names of devices that are not there, for lowering, and the
# major number of their compute capability.
_KINDS = {
    'NVIDIA H100': 9,
    'NVIDIA H200': 9,
    'NVIDIA GH200': 9,
    'NVIDIA B200': 10,
    'NVIDIA GB200': 10,
}

# Compute capabilities 9.x and 10.x have the shared memory that blocks need.
_MAJORS = (9, 10)

_interpreting = False


class Target(NamedTuple):
  """A device to compile for.

  Attributes:
    cores: number of multiprocessors.
    interpret: whether kernels are interpreted on a CPU, for tests.
    wgmma: whether warpgroups multiply matrices as on Hopper.
  """

  cores: int
  interpret: bool
  wgmma: bool = False


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Runs kernels that are traced inside on a CPU: slow, for tests."""
  global _interpreting
  before, _interpreting = _interpreting, True
  try:
    yield
  finally:
    _interpreting = before


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
    if device.platform == 'gpu' and _major(device) not in _MAJORS:
      raise NotImplementedError(_unsupported(device.device_kind))
    raise NotImplementedError(
        'GPU kernels need jax >= 0.11, and this is jax'
        f' {jax.__version__} on Python {sys.version.split()[0]}. On Python'
        " 3.12 or newer, pip install 'jax[cuda13]>=0.11,<0.13' brings them."
    )
  if _interpreting:
    return Target(4, True, True)
  kind, backend, cores, major = _describe()
  if backend not in ('gpu', 'cuda') or major not in _MAJORS:
    raise NotImplementedError(_unsupported(kind))
  return Target(cores or 132, False, major == 9)


def _describe() -> tuple[str, str, int | None, int]:
  """Returns kind, platform, number of cores and major compute capability."""
  device = default_device()
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.device_kind != device.device_kind:
    # Compiled for a device that is not here.
    kind = described.device_kind
    known = (m for name, m in _KINDS.items() if kind.startswith(name))
    return kind, described.platform, described.num_cores, next(known, 0)
  cores = getattr(device, 'core_count', None)
  return device.device_kind, device.platform, cores, _major(device)


def _major(device: Any) -> int:
  """Returns the major compute capability of a device, 0 where it has none."""
  # 'gfx942' on an AMD GPU.
  capability = str(getattr(device, 'compute_capability', '0')).split('.')[0]
  return int(capability) if capability.isdigit() else 0


def _unsupported(kind: str) -> str:
  return (
      'GPU kernels need an NVIDIA GPU of compute capability 9.0 (H100, H200) or'
      f' 10.0 (B200), and the device here is {kind!r}.'
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
