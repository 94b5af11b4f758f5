"""Records what haiku's modules compute, for convert_test.py.

pip install dm-haiku jax
JAX_ENABLE_X64=1 python tests/convert/record_haiku.py
"""

import pathlib

import haiku as hk
import jax
import numpy as np

BATCH, TIME, IN, FEATURES = 2, 5, 3, 4

rng = np.random.default_rng(0)


def record(make):
  x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)

  @hk.without_apply_rng
  @hk.transform
  def run(x):
    core = make()
    return hk.dynamic_unroll(
        core, x, core.initial_state(BATCH), time_major=False
    )

  params = run.init(jax.random.key(0), x)
  params = jax.tree.map(
      lambda p: (0.5 * rng.standard_normal(p.shape)).astype(np.float32), params
  )
  wide = jax.tree.map(np.float64, params)
  y, carry = run.apply(wide, x.astype(np.float64))
  arrays = {'x': x, 'y': y}
  for module, entries in params.items():
    arrays |= {f'weights/{module}:{k}': v for k, v in entries.items()}
  return arrays | {
      f'carry/{i}': c for i, c in enumerate(jax.tree.leaves(carry))
  }


for name, make in {
    'lstm': lambda: hk.LSTM(FEATURES),
    'vanilla_rnn': lambda: hk.VanillaRNN(FEATURES, double_bias=True),
    'vanilla_rnn_one_bias': lambda: hk.VanillaRNN(FEATURES, double_bias=False),
}.items():
  path = pathlib.Path(__file__).parent / f'haiku_{name}.npz'
  np.savez(path, **{k: np.float32(v) for k, v in record(make).items()})
