"""Flags of blocks are those of their steps, wherever a block lies."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks as blocks_lib
from pallas_kernels.streaming import kernel_call


class BlockFlagsTest(parameterized.TestCase):

  @parameterized.product(
      cut=((5, 1, 1), (16, 2, 1), (17, 1, 2), (40, 1, 4), (64, 4, 1)),
      time=(1, 64, 301),
      reverse=(False, True),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_each_step_has_its_flags(self, cut, time, reverse):
    rows, warpgroups, segments = cut
    config = blocks_lib.Config(rows, warpgroups, segments, stages=2)
    layout = blocks_lib.Layout(2, time, 128)
    plan = mock.Mock(layout=layout, config=config, has_flags=True)
    flags = np.random.default_rng(0).integers(0, 4, (2, time), np.int32)
    words = np.asarray(kernel_call.pack(plan, jnp.asarray(flags)))
    first = blocks_lib.Walk(layout, config, reverse, 1, None)
    seen = []
    for segment in range(segments):
      for warpgroup in range(warpgroups):
        walk = dataclasses.replace(first, segment=segment, warpgroup=warpgroup)
        for wave in range(walk.waves):
          block = kernel_call.BlockFlags(walk, words, wave)
          for i in range(rows):
            at = walk.time(wave, i)
            code = flags[1, at] if at < time else step_flags.HOLD
            self.assertEqual(block.restarts(i), code & step_flags.RESET != 0)
            self.assertEqual(block.idle(i), code & step_flags.HOLD != 0)
            seen.append(at)
    self.assertSequenceEqual(sorted(seen), range(first.steps))

  def test_a_block_without_flags_is_left_as_it_is(self):
    config = blocks_lib.Config(4, 1, 1, stages=2)
    layout = blocks_lib.Layout(1, 8, 128)
    plan = mock.Mock(layout=layout, config=config, has_flags=True)
    flags = jnp.zeros((1, 8), jnp.int32).at[0, 5].set(step_flags.RESET)
    words = kernel_call.pack(plan, flags)
    walk = blocks_lib.Walk(layout, config, False, 0, None)
    blocks = [kernel_call.BlockFlags(walk, words, wave) for wave in range(2)]
    taken = [int(b.either(lambda: 1, lambda: 0)) for b in blocks]
    self.assertSequenceEqual(taken, [0, 1])


if __name__ == '__main__':
  absltest.main()
