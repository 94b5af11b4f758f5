"""Parts of time that run side by side, step by step within a part.

A run over all parts takes as many steps in turn as a part has, whatever T is,
and no more arithmetic than all steps at once. It leaves steps that do not
follow from each other only at the joints, where one part ends and the next
begins.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import branches

Array = jax.Array
Carry = cell_lib.Carry

# A part has about as many steps as there are parts, up to this.
_LONGEST = 32


class Parts:
  """Steps of a window, cut into parts of time.

  The carries that parts end with are [count, B, F], in the order of the loop.

  Attributes:
    length: steps of a part.
    count: of parts.
  """

  def __init__(
      self,
      body: Callable[[Carry, Any], tuple[Carry, Any]],
      init: Carry,
      xs: Any,
      reverse: bool,
  ):
    """Cuts time.

    Args:
      body: (carry, x) -> (carry, y), one step, as for `lax.scan`.
      init: the carry before the first step, each [B, F].
      xs: the steps' own arrays, [T, ...].
      reverse: whether time runs from the last step to the first.
    """
    self._time = jax.tree.leaves(xs)[0].shape[0]
    self._init, self._reverse = init, reverse
    self.length = min(_LONGEST, math.isqrt(self._time - 1) + 1)
    self.count = -(-self._time // self.length)
    self._xs = xs
    self._step = jax.vmap(lambda carry, x: body(carry, x)[0])

  def ends(self, s: Carry) -> Carry:
    """Returns the ends of parts, of carries after all steps [T, B, F]."""
    return self.at(self.length - 1, s)

  def run(self, ends: Carry) -> Carry:
    """Runs all parts once, each from the end of the one before it.

    Args:
      ends: the carries that parts begin with; the last one has no effect.

    Returns:
      The carries that parts end with.
    """
    body = lambda i, carry: self._step(carry, self.at(i, self._xs))
    return lax.fori_loop(0, self.length, body, self._begun(ends))

  def run_often(self, ends: Carry, times: Array) -> Carry:
    """Runs all parts so many times, each time from the ends that were found."""
    _, ends = lax.while_loop(
        lambda state: ~branches.for_all_mapped(state[0] <= 0),
        lambda state: (state[0] - 1, self.run(state[1])),
        (times, ends),
    )
    return ends

  def carries(self, ends: Carry) -> Carry:
    """Runs all parts once, like `run`.

    Returns:
      The carries after all steps, each [T, B, F].
    """
    body = lambda carry, i: (self._step(carry, self.at(i, self._xs)),) * 2
    steps = jnp.arange(self.length)
    _, found = lax.scan(body, self._begun(ends), steps)
    return tuple(map(self._joined, found))

  def with_ends(self, s: Carry, ends: Carry) -> Carry:
    """Returns carries with others where parts end, but for the last part.

    Args:
      s: after all steps, each [T, B, F].
      ends: as for `run`.
    """
    at = jnp.arange(1, self.count) * self.length - 1
    at = self._time - 1 - at if self._reverse else at
    return tuple(x.at[at].set(e[:-1]) for x, e in zip(s, ends, strict=True))

  def _begun(self, ends):
    return tuple(
        jnp.concatenate([c[None], e[:-1]])
        for c, e in zip(self._init, ends, strict=True)
    )

  def at(self, i, tree):
    """Returns step i of every part, [count, ...], of arrays [T, ...]."""
    # Not all steps in another order at once: that copy would stay in memory.
    steps = jnp.arange(self.count) * self.length + i
    steps = jnp.minimum(steps, self._time - 1)
    steps = self._time - 1 - steps if self._reverse else steps
    return jax.tree.map(lambda x: x[steps], tree)

  def _joined(self, x):
    """Returns [T, ...] of [length, count, ...]."""
    x = jnp.swapaxes(x, 0, 1)
    x = x.reshape(self.count * self.length, *x.shape[2:])[: self._time]
    return jnp.flip(x, 0) if self._reverse else x
