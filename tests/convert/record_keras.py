"""Records what keras 3's layers compute, for convert_test.py.

pip install keras jax
KERAS_BACKEND=jax JAX_ENABLE_X64=1 python tests/convert/record_keras.py
"""

import pathlib

import keras
import numpy as np

BATCH, TIME, IN, FEATURES = 2, 5, 3, 4

rng = np.random.default_rng(0)


def record(layer):
  x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
  layer(x)
  layer.set_weights(
      [
          (0.5 * rng.standard_normal(w.shape)).astype(np.float32)
          for w in layer.get_weights()
      ]
  )
  y, *carry = layer(x)
  arrays = {'x': x, 'y': y}
  arrays |= {f'weights/{i}': w for i, w in enumerate(layer.get_weights())}
  return arrays | {f'carry/{i}': c for i, c in enumerate(carry)}


def make(kind, **options):
  return getattr(keras.layers, kind)(
      FEATURES,
      return_sequences=True,
      return_state=True,
      **options,
  )


for name, keras_layer in {
    'simplernn': make('SimpleRNN'),
    'lstm': make('LSTM'),
    'gru': make('GRU'),
    'gru_no_bias': make('GRU', use_bias=False),
    'bidirectional': keras.layers.Bidirectional(make('GRU')),
}.items():
  path = pathlib.Path(__file__).parent / f'keras_{name}.npz'
  np.savez(
      path,
      **{k: np.float32(np.asarray(v)) for k, v in record(keras_layer).items()},
  )
