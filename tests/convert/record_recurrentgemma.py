"""Records what recurrentgemma's block computes, for griffin_block_test.py.

pip install recurrentgemma jax
JAX_ENABLE_X64=1 python tests/convert/record_recurrentgemma.py
"""

import pathlib

from flax import traverse_util
import jax
import numpy as np
from recurrentgemma import common
from recurrentgemma.jax import modules

BATCH, TIME, FEATURES, STATE, HEADS = 2, 9, 6, 8, 2

rng = np.random.default_rng(0)
block = modules.RecurrentBlock(
    width=FEATURES,
    num_heads=HEADS,
    lru_width=STATE,
    scan_type=common.ScanType.LINEAR_NATIVE,
)
x = rng.standard_normal((BATCH, TIME, FEATURES)).astype(np.float32)
position = np.tile(np.arange(TIME), (BATCH, 1))
position[0, 5:] -= 5  # A document starts.
params = block.init(jax.random.key(0), x, position)
params = jax.tree.map(
    lambda p: (0.5 * rng.standard_normal(p.shape)).astype(np.float32), params
)
wide = jax.tree.map(np.float64, params)
y, cache = block.apply(wide, x.astype(np.float64), position)
arrays = traverse_util.flatten_dict(params['params'], sep=':')
np.savez(
    pathlib.Path(__file__).parent / 'recurrentgemma_block.npz',
    position=position,
    **{f'weights/{name}': value for name, value in arrays.items()},
    **{
        name: np.float32(value)
        for name, value in {
            'x': x,
            'y': y,
            'carry/h': cache.rg_lru_state,
            'carry/window': cache.conv1d_state,
        }.items()
    },
)
