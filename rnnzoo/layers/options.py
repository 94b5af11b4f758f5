"""The options of `RecurrentLayer` as types, for `**options` of the layers.

A layer names the options that its paper sets, passes the others on, and says
which ones those are: `**options: Unpack[Options]`. So an editor completes them,
and mypy and pyright find a name or a type that is wrong. The docstring of
`RecurrentLayer` explains each of them.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

import jax

from rnnzoo.engines import selection
from rnnzoo.layers import initializers

Initializer = initializers.Initializer


class Options(TypedDict, total=False):
  """Options that no layer names itself: how it computes and learns."""

  use_bias: bool
  learn_initial_carry: bool
  recurrent_gradient_clip: float | None
  stop_recurrent_gradient: bool
  dtype: jax.typing.DTypeLike | None
  implementation: selection.Implementation


class ParamDtype(TypedDict, total=False):
  """The dtype of parameters."""

  param_dtype: jax.typing.DTypeLike


class KernelInit(TypedDict, total=False):
  """The initialiser of W."""

  kernel_init: Initializer


class BiasInit(TypedDict, total=False):
  """The initialisers of b."""

  bias_init: Initializer | Sequence[Initializer]


class RecurrentKernel(TypedDict, total=False):
  """Initialisers, a bound and a form of R."""

  recurrent_kernel_init: Initializer | Sequence[Initializer]
  max_abs: float | None
  recurrent_structure: Callable[[jax.Array], jax.Array] | None


class NoMore(TypedDict):
  """No option at all: a type checker finds every one that is left."""
