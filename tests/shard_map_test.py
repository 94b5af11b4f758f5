"""Layers under `jax.shard_map`, the batch spread over devices."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
import flax_modes_test

HERE = pathlib.Path(__file__).resolve().parent


class ShardMapTest(absltest.TestCase):

  def test_two_devices(self):
    # The number of devices is fixed once in a process: this takes another.
    path = [str(HERE), str(HERE.parent), os.environ.get('PYTHONPATH')]
    done = subprocess.run(
        [sys.executable, str(HERE / 'shard_map_program.py')],
        env=os.environ
        | {
            'JAX_PLATFORMS': 'cpu',
            'PYTHONPATH': os.pathsep.join(filter(None, path)),
            'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
        },
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    for variant in flax_modes_test.LAYERS:
      self.assertIn(f'{variant} is the same on two devices', done.stdout)


if __name__ == '__main__':
  absltest.main()
