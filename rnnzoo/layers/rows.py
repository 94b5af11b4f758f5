"""Layers whose equations are written for rows, [batch, time, ...].

`RowLayer` gives them all arguments of `SequenceLayer`: any batch axes, either
order of axes and direction, lengths, and batches that are sharded over devices.
"""

import abc
from collections.abc import Callable
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

Array = jax.Array
Carry = tuple[Array, ...]


class RowLayer(sequence_layer.SequenceLayer):
  """A layer that is defined by a run over rows.

  Attributes:
    implementation: path of unroll; a step is always by 'scan'.
  """

  implementation: selection.Implementation

  @abc.abstractmethod
  def _rows(
      self,
      x: Array,
      carry: Carry,
      reset: Array | None,
      mask: Array | None,
      *,
      implementation: selection.Implementation,
  ) -> tuple[Carry, Array]:
    """Runs over x [N, T, I], from a carry [N, ...], with flags [N, T]."""

  @abc.abstractmethod
  def _check_carry(
      self, carry: Any, batch_shape: tuple[int, ...], label: str, x: Array
  ) -> Carry:
    """Returns the carry in its dtype, the layer's own for None, or raises."""

  def unroll(
      self,
      x: Array,
      *,
      initial_carry: Carry | None = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Carry, Array]:
    # Documented in SequenceLayer.unroll, as `help` shows.
    initializers.check_rngs(rngs, None)
    settings.boolean(reverse, 'reverse')
    settings.boolean(time_major, 'time_major')
    checks.inputs(
        x, '[..., time, in_features]', self.in_features, type(self).__name__
    )
    return self._run(
        x,
        initial_carry,
        reset,
        seq_lengths,
        mask,
        reverse=reverse,
        time_major=time_major,
    )

  def step(
      self, carry: Carry, x: Array, *, reset: Array | None = None
  ) -> tuple[Carry, Array]:
    # Documented in SequenceLayer.step.
    checks.inputs(
        x, '[..., in_features]', self.in_features, type(self).__name__
    )
    reset = checks.flags(reset, x.shape[:-1], 'reset')
    if reset is not None:
      reset = reset[..., None]
    x = jnp.asarray(x)[..., None, :]
    carry, y = self._run(x, carry, reset, is_step=True)
    return carry, y[..., 0, :]

  @promotion.of_ranks
  def _run(
      self,
      x: Array,
      carry: Carry | None,
      reset: Array | None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      **options: Any,
  ) -> tuple[Carry, Array]:
    """`_unroll`, each device with its part of a batch that is sharded."""
    time_major = options.get('time_major', False)
    lead = x.shape[:-1]
    time, batch_shape = sequence_layer.time_and_batch(lead, time_major)
    given = (
        jnp.asarray(x),
        carry,
        checks.flags(reset, lead, 'reset'),
        checks.lengths(seq_lengths, batch_shape, time),
        checks.flags(mask, lead, 'mask'),
    )
    if not sharding.is_sharded(self, given):
      return self._unroll(*given, **options)
    is_step = options.get('is_step', False)
    label = 'carry' if is_step else 'initial_carry'
    self._check_carry(carry, batch_shape, label, given[0])
    graphdef, state = nnx.split(self)
    axes = sharding.axes_of_run(lead, time_major)
    split = *given, state
    positions = (
        *(axes.flags, axes.lengths, axes.flags, axes.lengths, axes.flags),
        axes.whole,
    )

    def part(split):
      *given, state = split
      layer: Any = nnx.merge(graphdef, state)
      return layer._unroll(*given, **options)

    return sharding.spread(
        part,
        split,
        positions=positions,
        out_positions=(axes.lengths, axes.flags),
        over=sharding.choose(split, positions),
    )

  def _unroll(
      self,
      x: Array,
      carry: Carry | None,
      reset: Array | None,
      seq_lengths: Array | None,
      mask: Array | None,
      *,
      reverse: bool = False,
      time_major: bool = False,
      is_step: bool = False,
  ) -> tuple[Carry, Array]:
    """`_run` on one device."""
    batch_shape = x.shape[1:-1] if time_major else x.shape[:-2]
    label = 'carry' if is_step else 'initial_carry'
    return unroll(
        functools.partial(
            self._rows,
            implementation='scan' if is_step else self.implementation,
        ),
        x,
        self._check_carry(carry, batch_shape, label, x),
        reset=reset,
        seq_lengths=seq_lengths,
        mask=mask,
        reverse=reverse,
        time_major=time_major,
    )


def unroll(
    function: Callable[..., tuple[Carry, Array]],
    x: Array,
    carry: Carry,
    *,
    reset: Array | None,
    seq_lengths: Array | None,
    mask: Array | None,
    reverse: bool,
    time_major: bool,
) -> tuple[Carry, Array]:
  """Returns the final carry, and y in the order of x's axes.

  Args:
    function: (x [N, T, I], carry [N, ...], reset, mask [N, T] or None) ->
      (carry [N, ...], y [N, T, D]), from the first step to the last.
    x: [..., T, I], or [T, ..., I] if `time_major`.
    carry: arrays [..., ...] without time.
    reset: bool, x's shape without the last axis, or None.
    seq_lengths: int, the batch's shape, or None. They end in a mask.
    mask: bool, x's shape without the last axis, or None.
    reverse: whether to run from the last step to the first.
    time_major: whether time is the first axis.
  """
  lead = x.shape[:-1]
  axis = 0 if time_major else len(lead) - 1
  batch_shape = lead[:axis] + lead[axis + 1 :]
  time = lead[axis]
  batch = math.prod(batch_shape)  # Not -1, for batches that are empty.

  def rows(a):
    if a is None:
      return None
    a = jnp.moveaxis(a, axis, len(lead) - 1)
    a = a.reshape(batch, time, *a.shape[len(lead) :])
    return jnp.flip(a, axis=1) if reverse else a

  if seq_lengths is not None:
    steps = jnp.arange(time).reshape(-1, *(1,) * (len(batch_shape) - axis))
    valid = steps < jnp.expand_dims(seq_lengths, axis)
    mask = valid if mask is None else mask & valid
    reset = None if reset is None else reset & valid
  if reverse and reset is not None:
    # The boundary between t-1 and t comes before step t-1.
    index = jnp.arange(1, time + 1)
    reset = jnp.take(reset, index, axis=axis, mode='fill', fill_value=False)
  flat = tuple(c.reshape(batch, *c.shape[len(batch_shape) :]) for c in carry)
  carry, y = function(rows(x), flat, rows(reset), rows(mask))
  y = jnp.flip(y, axis=1) if reverse else y
  y = jnp.moveaxis(y.reshape(*batch_shape, *y.shape[1:]), len(lead) - 1, axis)
  return tuple(c.reshape(*batch_shape, *c.shape[1:]) for c in carry), y
