"""QRNN: gates from the input, and a pooling over time between them."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh

POOLINGS = ('f', 'fo', 'ifo')


@dataclasses.dataclass(frozen=True)
class QRNNCell(cell.LinearCell):
  """Gates in the order z, f; carry (h,).

  h' = σ(f) h + (1 - σ(f)) tanh(z)
  """

  input_gates = 2

  def coefficients(self, params, x_gates):
    del params
    z, f = x_gates
    # 1 - σ(f) = σ(-f), which keeps its digits where f is large.
    return sigmoid(f), sigmoid(-f) * tanh(z)


@dataclasses.dataclass(frozen=True)
class IfoQRNNCell(cell.LinearCell):
  """Gates in the order z, f, i; carry (h,).

  h' = σ(f) h + σ(i) tanh(z)
  """

  input_gates = 3

  def coefficients(self, params, x_gates):
    del params
    z, f, i = x_gates
    return sigmoid(f), sigmoid(i) * tanh(z)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that QRNN passes on."""


class QRNN(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Quasi-recurrent network whose convolution sees one step.

      z_t = tanh(W_z x_t + b_z)
      f_t = σ(W_f x_t + b_f)
      o_t = σ(W_o x_t + b_o)
      h_t = f_t (.) h_{t-1} + (1 - f_t) (.) z_t          the paper's c
      y_t = o_t (.) h_t                                  the paper's h

  With pooling='ifo' i_t = σ(W_i x_t + b_i) stands in place of 1 - f_t. For a
  window of more steps, put a causal convolution in front.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.QRNN(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h and of the output.
    pooling: 'fo', 'ifo' for an input gate of its own, or 'f' for y_t = h_t.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init and bias_init (of z, f and i), learn_initial_carry, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    J. Bradbury, S. Merity, C. Xiong and R. Socher, 2016, "Quasi-recurrent
    neural networks", equations 1 and 3 to 5.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      pooling: str = 'fo',
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.choice(pooling, POOLINGS, 'pooling')
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    dtype = parameters.dtype_of(options, rngs)
    readout = None
    if pooling != 'f':
      shape = in_features, features
      kernel = initializers.lecun_normal(rngs.params(), shape, dtype)
      bias = jnp.zeros((features,), dtype)
      readout = readouts.OutputGate(
          kernel, bias if options.get('use_bias', True) else None
      )
    super().__init__(
        IfoQRNNCell() if pooling == 'ifo' else QRNNCell(),
        in_features,
        features,
        state_features=None,
        input_map=None,
        readout=readout,
        rngs=rngs,
        **options,
    )
