"""Answers of a trained model step by step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import checks
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields


class Stepping:
  """A model of sequences as a task calls it, which takes one step of them.

  Attributes:
    carry: the carry before the step, and after it is called.
  """

  def __init__(self, model: Any, carry: Any, reset: Any):
    self._model, self.carry, self._reset = model, carry, reset

  def __call__(self, x: jax.Array, **unused_options: Any) -> jax.Array:
    carry, reset = self.carry, self._reset
    if carry is None:
      carry = self._model.initial_carry(x.shape[:1])
      reset = jnp.ones(x.shape[:1], bool)  # A cell may read that it starts.
    self.carry, y = self._model.step(carry, x[:, 0], reset=reset)
    return y[:, None] if getattr(self._model, 'every_step', True) else y


class Stream:
  """Answers after each step, from the memory of all steps since a reset.

      stream = trained.stream()
      for x_t in steps:             # [B, F], in the units of the data
        answers = stream.step(x_t)

  An answer is equal, to rounding, to the last one that `predict` gives for all
  these steps at once. `Trained.stream` makes it.
  """

  def __init__(self, step: Callable[[Any, Any, np.ndarray], tuple[Any, Any]]):
    """Keeps (carry, reset, x [B, 1, ...]) -> (carry, answers)."""
    self._step = step
    self._carry: Any = None
    self._reset: Any = None

  def step(self, x: Any) -> Any:
    """Returns the answers after one more step.

    Args:
      x: one step of the inputs of `predict`, without the axis of time: numbers
        [B, F], or tokens [B].

    Raises:
      ValueError: the task cannot use this step, or B has changed.
    """
    x = array_checks.one(x, 'x must be one array')
    if not x.ndim:
      got = fields.shorten(x) if x.dtype.kind != 'O' else 'no array'
      raise ValueError(
          f'x must be one step of several sequences, [B, ...], got {got}'
      )
    if self._carry is not None and len(x) != (count := self._count()):
      raise ValueError(
          f'x must have {count} sequences, as the step before, got {len(x)};'
          ' reset() allows another number'
      )
    self._carry, answers = self._step(self._carry, self._reset, x[:, None])
    self._reset = None
    return answers

  def reset(self, rows: Any = None) -> None:
    """Forgets the steps so far.

    Args:
      rows: bool [B], the sequences that begin anew; None for all, after which B
        may be another.

    Raises:
      ValueError: rows have another shape or dtype.
    """
    if rows is None:
      self._carry = self._reset = None
      return
    count = np.size(rows) if self._carry is None else self._count()
    rows = checks.flags(
        array_checks.one(rows, 'rows must be bool [B]'), (count,), 'rows'
    )
    if self._carry is not None:
      self._reset = rows if self._reset is None else self._reset | rows

  def _count(self) -> int:
    """Returns the number of sequences, B."""
    return jax.tree.leaves(self._carry)[0].shape[0]
