"""The same layers as flax.linen modules.

>>> import jax, jax.numpy as jnp
>>> from rnnzoo import linen
>>> layer = linen.GRU(in_features=3, features=8)
>>> variables = layer.init(jax.random.key(0), jnp.ones((2, 5, 3)))
>>> layer.apply(variables, jnp.ones((2, 5, 3))).shape
(2, 5, 8)
>>> carry, y = layer.apply(variables, jnp.ones((2, 5, 3)), nnx_method='unroll')
>>> y.shape
(2, 5, 8)

Arguments are those of the layers in `rnnzoo`, by keyword and without `rngs`,
which linen passes itself; so are the methods, by `nnx_method='unroll'`,
`'step'` or `'initial_carry'`. Parameters have the same names and shapes.
Dropout in a `Stack` is on where the call has an `rngs=nnx.Rngs(...)`, which a
linen module that contains the stack can pass; `apply(..., rngs={...})` is
linen's own argument and does not reach it. Bounds (`max_abs`) are metadata of
nnx parameters: `rnnzoo.constrain` does not see them here.
"""

import functools

from flax import nnx

import rnnzoo

Elman = functools.partial(nnx.bridge.to_linen, rnnzoo.Elman)
LSTM = functools.partial(nnx.bridge.to_linen, rnnzoo.LSTM)
GRU = functools.partial(nnx.bridge.to_linen, rnnzoo.GRU)
SLSTM = functools.partial(nnx.bridge.to_linen, rnnzoo.SLSTM)
AGRU = functools.partial(nnx.bridge.to_linen, rnnzoo.AGRU)
AntisymmetricRNN = functools.partial(
    nnx.bridge.to_linen, rnnzoo.AntisymmetricRNN
)
IndRNN = functools.partial(nnx.bridge.to_linen, rnnzoo.IndRNN)
IRevRNN = functools.partial(nnx.bridge.to_linen, rnnzoo.IRevRNN)
MinGRU = functools.partial(nnx.bridge.to_linen, rnnzoo.MinGRU)
MinLSTM = functools.partial(nnx.bridge.to_linen, rnnzoo.MinLSTM)
Stack = functools.partial(nnx.bridge.to_linen, rnnzoo.Stack)
Bidirectional = functools.partial(nnx.bridge.to_linen, rnnzoo.Bidirectional)
