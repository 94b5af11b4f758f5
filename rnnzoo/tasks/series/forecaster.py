"""Models that forecast a series some steps ahead: DeepAR, encoder and decoder.

Both see windows: y [B, C], the last C steps with NaN for a missing one, and x
[B, C + H, F], what is known beforehand. They count y in units of each window,
(y - centre) / scale.

    autoregressive   h_t = layer(h_t-1, [y_t-1, is y_t-1 known, x_t, log scale])
                     y_t ~ head(h_t); paths are drawn step by step
    seq2seq          h_t = encoder([y_t, is y_t known, x_t, log scale]), t < C
                     y_t ~ head(decoder([x_t, log scale])), which starts from h

Dimensions: B windows, C steps of context, H of horizon, F features, S paths.

References:
  Salinas et al., DeepAR: probabilistic forecasting with autoregressive
  recurrent networks, 2017.
  Sutskever et al., Sequence to sequence learning with neural networks, 2014.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo.layers import sequence_layer
from rnnzoo.tasks.series import heads

# Features beside x: y, whether it is known, and the scale.
OWN_FEATURES = 3


def units(past: jax.Array, scaling: str) -> tuple[jax.Array, jax.Array]:
  """Returns (centre [B, 1], scale [B, 1]) of windows [B, C].

  Args:
    past: the context, NaN where a step is missing.
    scaling: 'mean' for the mean of |y|, about zero; 'standard' for mean and
      standard deviation.
  """
  known = ~jnp.isnan(past)
  count = jnp.maximum(jnp.sum(known, axis=1, keepdims=True), 1)
  mean = lambda x: jnp.sum(jnp.where(known, x, 0), 1, keepdims=True) / count
  centre = jnp.zeros_like(past[:, :1])
  if scaling == 'standard':
    centre = mean(past)
    scale = jnp.sqrt(mean((past - centre) ** 2))
  else:
    scale = mean(jnp.abs(past))
  return centre, jnp.where(scale > 0, scale, 1)


class Forecaster(nnx.Module):
  """Layers and a head that forecast.

  Attributes:
    encoder: the layer over the context; of an autoregressive model, over all.
    decoder: the layer over the horizon; None for an autoregressive model.
    output: linear map to the numbers that the head reads.
  """

  def __init__(
      self,
      encoder: sequence_layer.SequenceLayer,
      decoder: sequence_layer.SequenceLayer | None,
      head: str,
      horizon: int,
      *,
      rngs: nnx.Rngs,
  ):
    self.encoder, self.decoder = encoder, decoder
    self.output = nnx.Linear(
        (decoder or encoder).out_features, heads.SIZES[head], rngs=rngs
    )
    self._head, self._horizon = head, horizon

  def losses(
      self,
      y: jax.Array,
      x: jax.Array,
      scale: jax.Array,
      rngs: nnx.Rngs | None = None,
  ) -> jax.Array:
    """Returns the loss of each step that is told apart, [B, C + H] or [B, H].

    `y` has context and horizon in units of the window, NaN where a step is
    missing, whose loss means nothing; `x` is known beforehand, [B, C + H, F],
    and `scale` is [B, 1].
    """
    if self.decoder is None:
      before = jnp.pad(y[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.nan)
      hidden = self.encoder(_features(before, x, scale), rngs=rngs)
    else:
      hidden = self._decoded(y[:, : -self._horizon], x, scale, rngs)
      y = y[:, -self._horizon :]
    y = jnp.where(jnp.isnan(y), 0, y)
    outputs = self.output(hidden)
    return heads.losses(outputs, y[..., None], self._head)[..., 0]

  def forecast(
      self,
      past: jax.Array,
      x: jax.Array,
      scale: jax.Array,
      key: jax.Array,
      num_paths: int,
  ) -> heads.Distribution:
    """Returns the distributions of the horizon, [B, H], in units of windows.

    Args:
      past: the context in units of the window, [B, C].
      x: what is known beforehand, [B, C + H, F].
      scale: the scale of each window, [B, 1].
      key: the key of random paths.
      num_paths: how many paths an autoregressive model draws, S; one for a head
        without a likelihood.
    """
    if self.decoder is not None:
      outputs = self.output(self._decoded(past, x, scale, None))
      return heads.distribution(outputs, self._head).squeezed()
    is_random = self._head in ('gaussian', 'student')
    count = num_paths if is_random else 1
    steps, before = past.shape[1], past[:, :-1]
    before = jnp.pad(before, ((0, 0), (1, 0)), constant_values=jnp.nan)
    carry, _ = self.encoder.unroll(_features(before, x[:, :steps], scale))
    repeat = lambda x: jnp.repeat(x, count, axis=0)
    carry, x, scale = jax.tree.map(repeat, (carry, x[:, steps:], scale))

    def step(state, given):
      (carry, y), (x, key) = state, given
      features = _features(y[:, None], x[:, None], scale)[:, 0]
      carry, hidden = self.encoder.step(carry, features)
      outputs = self.output(hidden)
      # Paths of all windows have the same keys: a forecast does not depend on
      # the others of its batch.
      rows = outputs.reshape(-1, count, outputs.shape[-1])
      draw = jax.vmap(lambda row: heads.sample(row, self._head, key))
      y = draw(rows).reshape(-1)
      return (carry, y), y if is_random else outputs

    keys = jax.random.split(key, self._horizon)
    start = carry, repeat(past[:, -1])
    _, found = jax.lax.scan(step, start, (jnp.moveaxis(x, 1, 0), keys))
    found = jnp.moveaxis(found, 0, 1)
    if not is_random:
      return heads.distribution(found, self._head).squeezed()
    paths = found.reshape(-1, count, self._horizon)
    return heads.of_samples(jnp.moveaxis(paths, 1, 0))

  def _decoded(self, past, x, scale, rngs) -> jax.Array:
    steps = past.shape[1]
    given = _features(past, x[:, :steps], scale)
    carry, _ = self.encoder.unroll(given, rngs=rngs)
    decoder: Any = self.decoder
    ahead = _features(None, x[:, steps:], scale)
    return decoder(ahead, initial_carry=carry, rngs=rngs)


def _features(y: jax.Array | None, x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the inputs of a layer, [B, T, F + 3], or F + 1 without y."""
  size = jnp.broadcast_to(jnp.log(scale)[..., None], (*x.shape[:2], 1))
  parts = [x, size]
  if y is not None:
    known = ~jnp.isnan(y)
    parts = [jnp.where(known, y, 0)[..., None], known[..., None], *parts]
  return jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=-1)
