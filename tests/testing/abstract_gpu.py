"""GPU kernels on a machine without a GPU: interpreted, or lowered for one.

Pallas can do neither before jax 0.11. A test written with these functions then
passes if the first kernel says so.
"""

from collections.abc import Iterator
import contextlib
import functools
import os
from unittest import mock

import jax

from pallas_kernels import devices

# Interpreted warpgroups wait for each other in threads of XLA's CPU backend, of
# which it makes one a core. With too few they wait for ever. Read when the
# first array is made, so this module is to be imported before.
os.environ.setdefault('NPROC', '16')

RUNS = jax.__version_info__ >= (0, 11)


@contextlib.contextmanager
def interpreted(test) -> Iterator[None]:
  """Runs kernels inside on the CPU; around all of a test's computation."""
  if not RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield
    return
  try:
    with devices.interpreted():
      yield
  except BaseException:
    # An interrupted kernel would make those after it fail.
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
    raise


@contextlib.contextmanager
def without_races(test) -> Iterator[None]:
  """`interpreted`, failing if threads of the last kernel inside race."""
  if not RUNS:
    with interpreted(test):
      yield
    return
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
  from jax.experimental.pallas import mosaic_gpu as plgpu

  careful = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
  with mock.patch.object(plgpu, 'InterpretGPUParams', careful):
    with interpreted(test):
      yield
  test.assertFalse(interpret_pallas_call.get_races().races_found)


@contextlib.contextmanager
def device(test, kind: str) -> Iterator[None]:
  """Compiles for a GPU that is not there, 'NVIDIA H200' for instance."""
  if not RUNS:
    with test.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
      yield
    return
  with jax.sharding.use_abstract_mesh(one(kind)):
    yield


def one(kind: str) -> jax.sharding.AbstractMesh:
  """Returns such a GPU, along no axis."""
  return jax.sharding.AbstractMesh((), (), abstract_device=_describe(kind))


def mesh(kind: str, axis: str = 'Auto') -> jax.sharding.AbstractMesh:
  """Returns two such GPUs along the axis 'data', of a type."""
  if not RUNS:
    return jax.sharding.AbstractMesh((2,), ('data',))
  return jax.sharding.AbstractMesh(
      (2,),
      ('data',),
      axis_types=(getattr(jax.sharding.AxisType, axis),),
      abstract_device=_describe(kind),
  )


def _describe(kind: str) -> jax.sharding.AbstractDevice:
  return jax.sharding.AbstractDevice(
      device_kind=kind, num_cores=132, platform='cuda'
  )


def lower(f, *args) -> str:
  """Returns what a function becomes for CUDA, as text."""
  lowered = jax.jit(f).trace(*args).lower(lowering_platforms=('cuda',))
  return lowered.as_text()
