"""Which devices train, and which part of each batch a device has.

Training is data parallel. All devices are in a mesh with one axis, 'data', of
type Auto: the model is written for one device, and XLA splits the program as
the arrays are split. Batches are split over the axis; parameters, statistics
and the optimiser's state are whole on every device. One device has no mesh, and
its program knows nothing of all this.

Dimensions: N examples of a split, S batches, B examples of the global batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

T = TypeVar('T')

_AXIS = 'data'


# Bytes of a piece of a split that is too large for the device.
_PIECE_BYTES = 2**26


class Placement(NamedTuple):
  """The devices of a run."""

  mesh: Mesh | None = None  # The devices; None for JAX's default device alone.
  text: str = ''  # The devices in words.

  @property
  def num_devices(self) -> int:
    """How many devices there are, other processes included."""
    return self.mesh.size if self.mesh else 1

  def outputs(self) -> dict[str, Any]:
    """Returns arguments of `jax.jit` by which all devices have its results."""
    if self.mesh is None:
      return {}
    return {'out_shardings': NamedSharding(self.mesh, PartitionSpec())}

  def replicate(self, tree: T) -> T:
    """Returns a tree of arrays, equal in all processes, on all devices."""
    if self.mesh is None:
      return tree
    return jax.jit(lambda leaves: leaves, **self.outputs())(tree)

  def split(self, batch: T) -> T:
    """Returns a traced batch, arrays [B, ...], split over the devices."""
    if self.mesh is None:
      return batch
    sharding = NamedSharding(self.mesh, PartitionSpec(_AXIS))
    return jax.lax.with_sharding_constraint(batch, sharding)

  def batches(
      self, examples: Mapping[str, Any], order: np.ndarray
  ) -> dict[str, jax.Array]:
    """Returns arrays [S, B, ...] by name, split over the devices.

    A process reads the rows of its devices only; the host gathers them.

    Examples are arrays [N, ...] by name; the order is int [S, B].
    """
    if self.mesh is None:
      rows = {name: np.asarray(x[order]) for name, x in examples.items()}
      return jax.device_put(rows)
    sharding = NamedSharding(self.mesh, PartitionSpec(None, _AXIS))

    def place(array):
      array = np.asarray(array)
      # JAX's own dtype, as `jax.device_put` would have it.
      array = array.astype(
          jax.dtypes.canonicalize_dtype(array.dtype), copy=False
      )
      return jax.make_array_from_callback(
          order.shape + array.shape[1:],
          sharding,
          lambda index: array[order[index[:2]]],  # type: ignore[index]
      )

    return {name: place(array) for name, array in examples.items()}


ONE_DEVICE = Placement()


def batches_of_piece(
    examples: Mapping[str, Any], num_batches: int, batch_size: int
) -> int:
  """Returns how many of S batches of B are sent to the devices at once."""
  batch = batch_size * sum(array[0].nbytes for array in examples.values())
  return min(max(_PIECE_BYTES // batch, 1), num_batches)


def rows_of_piece(order: np.ndarray, first: int, length: int) -> np.ndarray:
  """Returns so many rows of an order, the last one again beyond its end.

  So all pieces have one shape, and one program is compiled for all.
  """
  return order[np.minimum(np.arange(first, first + length), len(order) - 1)]


def choose(
    batch_size: int, num_devices: int | None, seeds_at_once: int = 1
) -> Placement:
  """Returns the devices that a run takes: as many of each process.

  Args:
    batch_size: examples of the global batch, which the number of devices
      divides.
    num_devices: devices over all processes; None for as many as there are and
      the batch can be split over, or one for several seeds at once.
    seeds_at_once: the number of seeds in one call, which has one device.
  """
  devices, processes = jax.devices(), jax.process_count()
  there = len(devices)
  counts = range(processes, there + 1, processes)
  fitting = [count for count in counts if batch_size % count == 0]
  if num_devices is None and seeds_at_once > 1 and processes == 1:
    count, reason = 1, f'{seeds_at_once} seeds at once have one'
  elif num_devices is None:
    if not fitting:
      raise ValueError(
          f'the batch of {batch_size} examples cannot be split over'
          f' {processes} processes; choose config.batch_size as a multiple of'
          f' {processes}'
      )
    count = fitting[-1]
    reason = f'a batch of {batch_size} cannot be split evenly over more'
  else:
    count, reason = num_devices, f'config.num_devices is {num_devices}'
    if count > there:
      raise ValueError(
          f'config.num_devices must be at most {there}, the number of devices'
          f' here; got {count}'
      )
    if count not in fitting:
      of = f' of a run with {processes} processes' if processes > 1 else ''
      raise ValueError(
          f'config.num_devices must divide the batch of {batch_size} examples'
          f'{of}; got {count}; possible are {fitting or "none"}'
      )
  text = jax.local_devices()[0].device_kind
  if count > 1:
    text = f'{count} x {text}, {batch_size // count} of {batch_size} on each'
  if processes > 1:
    text += f', in {processes} processes'
  if count < there:
    text += f' ({count} of {there} devices: {reason})'
  if count == 1:
    return Placement(None, text)
  chosen: list[jax.Device] = []
  for process in range(processes):
    own = [d for d in devices if d.process_index == process]
    chosen += own[: count // processes]
  mesh = Mesh(np.array(chosen), (_AXIS,), axis_types=(AxisType.Auto,))
  return Placement(mesh, text)
