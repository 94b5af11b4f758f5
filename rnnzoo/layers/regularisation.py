"""Zoneout and dropout of the recurrent state, as options of every layer.

Both are a cell around the layer's own, whose masks are further input gates. So
every path runs them, and no engine knows of them:

  zoneout  c' = z c + (1 - z) update(c); z is a mask, in evaluation its rate
  dropout  R multiplies u' = d h' / (1 - rate), a carry before h; d is a mask

The layer's public carry is that of its own cell.
"""

from collections.abc import Sequence
import dataclasses
import numbers
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import sequence_layer

Array = jax.Array
Carry = cell_lib.Carry


class Masks(NamedTuple):
  """The masks of one call, all bool; none in evaluation.

  Attributes:
    zoneout: [..., time, F] for each carry that has a rate; where true, the
      carry is held.
    dropout: [..., F], or [..., time, F] with a mask for each step, or None;
      where true, the recurrent kernel sees h.
  """

  zoneout: tuple[Array, ...] = ()
  dropout: Array | None = None


NONE = Masks()


@dataclasses.dataclass(frozen=True)
class RegularisedCell(cell_lib.Cell):
  """A cell with zoneout, and with dropout of what its kernel multiplies.

  Attributes:
    cell: the equations.
    zoneout: the rate of each of its carries.
    draws: whether masks of zoneout are input gates; else carries are mixed by
      their rates.
    dropout: the rate of dropout, or None; with it, a mask is the last gate.
  """

  cell: cell_lib.Cell
  zoneout: tuple[float, ...]
  draws: bool
  dropout: float | None

  @property
  def input_gates(self) -> int:  # type: ignore[override]
    masks = sum(rate > 0 for rate in self.zoneout) if self.draws else 0
    return self.cell.input_gates + masks + (self.dropout is not None)

  @property
  def recurrent_gates(self) -> int:  # type: ignore[override]
    return self.cell.recurrent_gates

  @property
  def carry_names(self) -> tuple[str, ...]:  # type: ignore[override]
    dropped = ('dropped',) if self.dropout is not None else ()
    return dropped + self.cell.carry_names

  @property
  def param_names(self) -> tuple[str, ...]:  # type: ignore[override]
    return self.cell.param_names

  def update(self, params, x_gates, h_gates, carry):
    own, masks = self._split(x_gates)
    old = self._own(carry)
    new = list(self.cell.update(params, own, h_gates, old))
    for i, rate in enumerate(self.zoneout):
      # By products, not `jnp.where`: a gate whose cotangent is the constant 0
      # is none that dense kernels can write.
      z = masks.pop(0) if rate and self.draws else rate
      if rate:
        new[i] = z * old[i] + (1 - z) * new[i]
    if self.dropout is not None:
      new.insert(0, drop(new[0], masks.pop(), self.dropout))
    return tuple(new)

  def _split(self, x_gates):
    count = self.cell.input_gates
    return x_gates[:count], list(x_gates[count:])

  def _own(self, carry: Carry) -> Carry:
    return carry if self.dropout is None else carry[1:]


@dataclasses.dataclass(frozen=True)
class RegularisedTwoStageCell(RegularisedCell, cell_lib.TwoStageCell):
  """The same around a cell of two stages: its operand is dropped like h."""

  def operand(self, params, x_gates, h_gates, carry):
    own, masks = self._split(x_gates)
    cell: Any = self.cell
    operand = cell.operand(params, own, h_gates, self._own(carry))
    if self.dropout is None:
      return operand
    return drop(operand, masks[-1], self.dropout)


def drop(h: Array, mask: Array, rate: float) -> Array:
  """Returns h where the mask is 1, scaled so that its mean stays, else 0."""
  return h * (mask * (1 / (1 - rate)))


class Regularised(parameters.CellParameters):
  """The options of `RecurrentLayer`, which documents them."""

  zoneout_rate: tuple[float, ...] | None
  recurrent_dropout_rate: float | None
  recurrent_dropout_per_step: bool

  def _regularise(self, zoneout: Any, dropout: Any, per_step: bool) -> None:
    """Checks both rates and keeps those that are not zero."""
    settings.boolean(per_step, 'recurrent_dropout_per_step')
    rates = _zoneout_rates(self.cell, zoneout)
    settings.dropout_rate(dropout, 'recurrent_dropout_rate')
    if (any(rates) or dropout) and not self.cell.recurrent_gates:
      raise ValueError(
          'zoneout_rate and recurrent_dropout_rate are for cells with a'
          f' recurrent kernel, and {type(self.cell).__name__} has none;'
          ' rnnzoo.Stack(..., dropout_rate=...) would work.'
      )
    self.zoneout_rate = rates if any(rates) else None
    self.recurrent_dropout_rate = float(dropout) or None
    self.recurrent_dropout_per_step = per_step
    if any(rates) or dropout:
      self.deterministic: bool | None = None

  def set_view(self, deterministic: bool | None = None) -> None:
    """Takes part in `nnx.view`; None leaves the attribute as it is."""
    if deterministic is not None and hasattr(self, 'deterministic'):
      self.deterministic = deterministic

  def _masks(self, x: Array, time_major: bool, rngs: nnx.Rngs | None) -> Masks:
    """Returns new masks for a call that trains."""
    is_regularised = hasattr(self, 'deterministic')
    initializers.check_rngs(rngs, 'dropout' if is_regularised else None)
    if not is_regularised:
      return NONE
    if self.deterministic is False and rngs is None:
      raise ValueError(
          f'After train(), this {type(self).__name__} needs random numbers for'
          ' its masks in each call: layer(x, rngs=nnx.Rngs(dropout=key)), with'
          ' a new key for each training step. After eval() it needs none.'
      )
    if self.deterministic or rngs is None:
      return NONE
    self._check_input(x, '[..., time, in_features]')
    time, batch = sequence_layer.time_and_batch(x.shape[:-1], time_major)
    shape = *batch, self.state_features
    key = rngs.dropout()

    def draw(place: int, share: float, per_step: bool = True) -> Array:
      own = jax.random.fold_in(key, place)
      if not per_step:
        return jax.random.bernoulli(own, share, shape)
      # A key for each step: longer padding changes no mask.
      of_step = lambda t: jax.random.fold_in(own, t)
      step = lambda t: jax.random.bernoulli(of_step(t), share, shape)
      mask = jax.vmap(step)(jnp.arange(time))
      return mask if time_major else jnp.moveaxis(mask, 0, -2)

    rates = enumerate(self.zoneout_rate or (), 1)
    zoneout = tuple(draw(i, rate) for i, rate in rates if rate > 0)
    if self.recurrent_dropout_rate is None:
      return Masks(zoneout)
    keep = 1 - self.recurrent_dropout_rate
    return Masks(zoneout, draw(0, keep, self.recurrent_dropout_per_step))

  def _cell(self, masks: Masks = NONE) -> cell_lib.Cell:
    """Returns the cell that a run with these masks has."""
    rates = self.zoneout_rate
    if rates is None and masks.dropout is None:
      return self.cell
    make = RegularisedCell
    if isinstance(self.cell, cell_lib.TwoStageCell):
      make = RegularisedTwoStageCell
    return make(
        self.cell,
        zoneout=rates or (0.0,) * len(self.cell.carry_names),
        draws=bool(masks.zoneout),
        dropout=None if masks.dropout is None else self.recurrent_dropout_rate,
    )

  def _recur(
      self,
      masks: Masks,
      projection: call_lib.Projection,
      operands: call_lib.Operands,
      call: call_lib.Call,
      over: tuple[str, ...],
  ) -> tuple[Carry, Carry]:
    """Runs the cell with masks; all else is as in `paths.run`."""
    cell, implementation = self._cell(masks), self.implementation
    operands, masks = devices.alike((operands, masks))
    x, mask = operands.x, operands.mask
    if mask is not None:
      x = scan_steps.where(mask, x, 0)
    gates = list(projection(operands.weights, x)) + list(masks.zoneout)
    rate = self.recurrent_dropout_rate
    if rate is None or masks.dropout is None:
      first = lambda carry: carry
    else:
      axis, start = (0 if call.time_major else 1), masks.dropout
      if self.recurrent_dropout_per_step:
        gates.append(masks.dropout)
        # A carry before the first step has the mask of the first one.
        start = jax.lax.index_in_dim(
            masks.dropout, -1 if call.reverse else 0, axis, keepdims=False
        )
      else:
        dropout = jnp.expand_dims(masks.dropout, axis)
        gates.append(jnp.broadcast_to(dropout, gates[0].shape))
      dropped = lambda h: drop(h, start.astype(h.dtype), rate)
      first = lambda carry: carry and (dropped(carry[0]), *carry)
      call = dataclasses.replace(call, outputs=call.outputs + 1)
    operands = operands._replace(
        weights=(),
        x=jnp.stack([gate.astype(x.dtype) for gate in gates], axis=-2),
        carry=first(operands.carry),
        restart=first(operands.restart),
    )
    given = call_lib.Given()
    carry, steps = paths.run(cell, given, operands, call, implementation, over)
    added = len(cell.carry_names) - len(self.cell.carry_names)
    return carry[added:], steps[added:]


def drops(layer: sequence_layer.SequenceLayer) -> bool:
  """Whether a layer drops what its recurrent kernel multiplies, in training."""
  return getattr(layer, 'recurrent_dropout_rate', None) is not None


def _zoneout_rates(cell: cell_lib.Cell, given: Any) -> tuple[float, ...]:
  """Returns a rate for each carry, or raises ValueError."""
  names = cell.carry_names
  rates = (given,) * len(names)
  if isinstance(given, Sequence) and not isinstance(given, str):
    rates = tuple(given)
  if len(rates) != len(names) or any(
      not isinstance(rate, numbers.Real) for rate in rates
  ):
    raise ValueError(
        f'zoneout_rate must be a number, or one for each of the carries {names}'
        f' of {type(cell).__name__}, got {given!r}.'
    )
  for rate in rates:
    settings.dropout_rate(rate, 'zoneout_rate')
  return tuple(map(float, rates))
