"""Programs of tests that need several devices, each in its own process."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
import jax

from tests.testing import compilation

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def explicit_mesh(**sizes: int) -> jax.sharding.AbstractMesh:
  """Returns a mesh of devices that are not here, of Explicit axes by name."""
  types = (jax.sharding.AxisType.Explicit,) * len(sizes)
  return jax.sharding.AbstractMesh(
      tuple(sizes.values()), tuple(sizes), axis_types=types
  )


def expect(count: int) -> None:
  """Raises RuntimeError unless this process has so many devices."""
  if jax.device_count() != count:
    raise RuntimeError(f'Expected {count} devices, got {jax.devices()}.')


def sharded(mesh, spec, shape, dtype='float32') -> jax.ShapeDtypeStruct:
  """Returns the type of an array over a mesh."""
  sharding = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def run(
    test: absltest.TestCase,
    name: str,
    *arguments: str,
    devices: int = 8,
    xla_flags: str = compilation.XLA_FLAGS,
) -> str:
  """Returns the output of a program on CPU devices, which must succeed.

  Args:
    test: the test that asks.
    name: of the program, a module of tests.testing.
    *arguments: of its command line.
    devices: how many, fixed once in a process.
    xla_flags: further flags; by default those that compile in least time.
  """
  flag = f'--xla_force_host_platform_device_count={devices} {xla_flags}'
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  done = subprocess.run(
      [sys.executable, '-m', f'tests.testing.{name}', *arguments],
      env=os.environ
      | {
          'JAX_PLATFORMS': 'cpu',
          'PYTHONPATH': os.pathsep.join(filter(None, path)),
          'XLA_FLAGS': flag,
      },
      capture_output=True,
      text=True,
      check=False,
  )
  test.assertEqual(done.returncode, 0, done.stderr[-4000:])
  return done.stdout
