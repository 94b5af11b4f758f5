"""Heads of models that answer with numbers: points and distributions.

A head reads `size` outputs of a model for each number it is asked for, in
deviations from the mean or in units of the scale of a series:

  point      the number itself; squared error
  quantiles  its quantiles at LEVELS; pinball loss
  gaussian   mean and deviation; negative log-likelihood
  student    location, scale and degrees of freedom; negative log-likelihood

The CRPS is twice the pinball loss, a mean over LEVELS.

Dimensions: D numbers of an answer.

References:
  Koenker and Bassett, Regression quantiles, 1978: the pinball loss.
  Salinas et al., DeepAR, 2017: heads with a likelihood.
  Gneiting and Raftery, Strictly proper scoring rules, 2007: the CRPS.
"""

from collections.abc import Mapping
import math
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LEVELS = np.arange(1, 20, dtype=np.float32) / 20
# Outputs of a model for a number.
SIZES: Mapping[str, int] = types.MappingProxyType(
    {'point': 1, 'quantiles': len(LEVELS), 'gaussian': 2, 'student': 3}
)
_LEAST_SCALE = 1e-4
# Beyond, Student's t is a normal distribution, and float32 has no digits left.
_MOST_FREEDOM = 300.0


class Distribution(NamedTuple):
  """The distribution of each number of an answer.

  Attributes:
    mean: float32 [..., D]; the median of 'quantiles' and 'student'.
    quantiles: float32 [..., D, 19].
    levels: the levels of the quantiles, .05 to .95, [19].
  """

  mean: jax.Array
  quantiles: jax.Array
  levels: np.ndarray = LEVELS

  def squeezed(self) -> 'Distribution':
    """Returns the distributions of answers of one number, without D."""
    return self._replace(
        mean=self.mean[..., 0], quantiles=self.quantiles[..., 0, :]
    )


def _parts(outputs: jax.Array, head: str) -> jax.Array:
  """Returns outputs [..., D size] as float32 [..., D, size]."""
  outputs = outputs.astype(jnp.float32)
  return outputs.reshape(*outputs.shape[:-1], -1, SIZES[head])


def _scale(raw: jax.Array) -> jax.Array:
  return jax.nn.softplus(raw) + _LEAST_SCALE


def losses(outputs: jax.Array, y: jax.Array, head: str) -> jax.Array:
  """Returns the loss of each number, [..., D].

  The model's outputs are [..., D size], the true numbers [..., D].
  """
  parts = _parts(outputs, head)
  if head == 'point':
    return (parts[..., 0] - y) ** 2
  if head == 'quantiles':
    return pinball(jnp.sort(parts, axis=-1), y)
  scale = _scale(parts[..., 1])
  z = (y - parts[..., 0]) / scale
  if head == 'gaussian':
    return jnp.log(scale) + (z**2 + math.log(2 * math.pi)) / 2
  return jnp.log(scale) - jax.scipy.stats.t.logpdf(z, _freedom(parts))


def _freedom(parts: jax.Array) -> jax.Array:
  """Returns degrees of freedom, beyond 2: the variance is finite."""
  return jnp.minimum(2 + _scale(parts[..., 2]), _MOST_FREEDOM)


def pinball(quantiles: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the mean pinball loss of quantiles [..., 19] for numbers [...]."""
  above = y[..., None] - quantiles
  return jnp.mean(jnp.maximum(LEVELS * above, (LEVELS - 1) * above), axis=-1)


def distribution(outputs: jax.Array, head: str) -> Distribution:
  """Returns the distribution that outputs [..., D size] stand for."""
  parts = _parts(outputs, head)
  centre = parts[..., :1]
  if head == 'point':
    return Distribution(centre[..., 0], jnp.repeat(centre, len(LEVELS), -1))
  if head == 'quantiles':
    quantiles = jnp.sort(parts, axis=-1)
    return Distribution(quantiles[..., len(LEVELS) // 2], quantiles)
  if head == 'gaussian':
    z = jax.scipy.stats.norm.ppf(LEVELS)
  else:
    z = _student_quantiles(_freedom(parts)[..., None])
  return Distribution(centre[..., 0], centre + _scale(parts[..., 1:2]) * z)


def _student_quantiles(freedom: jax.Array) -> jax.Array:
  """Returns quantiles of Student's t at LEVELS, for freedom [..., 1]."""
  # P(T > t) = I(n / (n + t^2); n / 2, 1 / 2) / 2, halved in log t.
  upper = LEVELS[len(LEVELS) // 2 + 1 :]
  low = jnp.full(jnp.broadcast_shapes(freedom.shape, upper.shape), -12.0)
  high = jnp.full_like(low, 12.0)

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    x = freedom / (freedom + jnp.exp(2 * middle))
    is_low = jax.scipy.special.betainc(freedom / 2, 0.5, x) / 2 > 1 - upper
    return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

  low, high = jax.lax.fori_loop(0, 30, halve, (low, high))
  found = jnp.exp((low + high) / 2)
  zero = jnp.zeros_like(found[..., :1])
  return jnp.concatenate([-found[..., ::-1], zero, found], axis=-1)


def sample(outputs: jax.Array, head: str, key: jax.Array) -> jax.Array:
  """Returns one random number of each distribution, [..., D].

  A 'point' has only itself, and 'quantiles' have their median.
  """
  parts = _parts(outputs, head)
  if head in ('point', 'quantiles'):
    return distribution(outputs, head).mean
  centre, scale = parts[..., 0], _scale(parts[..., 1])
  if head == 'gaussian':
    return centre + scale * jax.random.normal(key, centre.shape)
  return centre + scale * jax.random.t(key, _freedom(parts), centre.shape)


def of_samples(samples: jax.Array) -> Distribution:
  """Returns the distribution of samples [S, ...]."""
  quantiles = jnp.moveaxis(jnp.quantile(samples, LEVELS, axis=0), 0, -1)
  return Distribution(jnp.mean(samples, axis=0), quantiles)
