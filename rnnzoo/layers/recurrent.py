"""Layers: cells with parameters, over whole sequences.

`RecurrentLayer` is one cell with its parameters: it projects the input, unrolls
the cell and takes care of batch axes, carries, resets, masks and dtypes. The
layers themselves (`rnnzoo.GRU`, ...) add the parts that their papers name: the
cell, initialisers and options.

Layers hold parameters and static configuration, never random state and nothing
that a call changes, so they work with `nnx.jit`, with `nnx.split` and plain
`jax.jit`, under `jax.vmap` and `jax.checkpoint`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Generic, TypeVar, Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import contract
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths
from rnnzoo.engines import products
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import regularisation
from rnnzoo.layers import sequence_layer

Array = jax.Array
Carry = cell_lib.Carry
Initializer = initializers.Initializer

# The class of a layer's carries, as type checkers know it.
OwnT = TypeVar('OwnT', bound=tuple[Array, ...])


class Constant(nnx.Variable):
  """A number that a cell needs and that training leaves alone."""


class RecurrentLayer(regularisation.Regularised, Generic[OwnT]):
  """One cell with its parameters: project the input, unroll the cell.

  Attributes:
    cell: the equations, static.
    in_features: size of the input's last axis.
    out_features: size of the output's last axis.
    state_features: size of a carry's last axis, the cell's features F below;
      `out_features` unless there is a readout.
    num_heads: number of diagonal blocks of the recurrent kernel.
    kernel: W, [input_gates, in_features, features].
    bias: b, [input_gates, features], or None.
    recurrent_kernel: [recurrent_gates, heads, head_dim, head_dim], or None for
      a cell without recurrent gates.
    cell_params: the cell's own parameters by name, each [..., features].
    input_map: a module that makes the input gates in place of W and b, or None.
    readout: a module that makes the output of x and the carry, or None.
    learned_carry: one array [features] for each of the cell's carries where the
      initial carry is learned; empty where it is zero.
  """

  def __init_subclass__(cls, **arguments):
    super().__init_subclass__(**arguments)
    init = cls.__init__

    @functools.wraps(init)
    def named(self, *given, **options):
      try:
        init(self, *given, **options)
      except TypeError as error:
        if 'RecurrentLayer.__init__() got multiple values' not in str(error):
          raise
        name = str(error).split()[-1]
        raise TypeError(
            f'{cls.__name__} sets {name} itself; leaving it out would work, or'
            ' an rnnzoo.RecurrentLayer of the cell, which takes it.'
        ) from error

    cls.__init__ = named  # type: ignore[method-assign]

  def __init__(
      self,
      cell: cell_lib.Cell,
      in_features: int,
      features: int,
      *,
      num_heads: int = 1,
      use_bias: bool = True,
      cell_params: Mapping[str, nnx.Variable] | None = None,
      recurrent_structure: Callable[[Array], Array] | None = None,
      kernel_init: (
          Initializer | Sequence[Initializer]
      ) = initializers.lecun_normal,
      recurrent_kernel_init: (
          Initializer | Sequence[Initializer]
      ) = initializers.orthogonal,
      max_abs: float | None = None,
      bias_init: Initializer | Sequence[Initializer] = initializers.zeros,
      learn_initial_carry: bool = False,
      state_features: int | None = None,
      input_map: Callable[[Array], cell_lib.Gates] | None = None,
      readout: Callable[[Array, Carry], Array] | None = None,
      zoneout_rate: float | Sequence[float] = 0.0,
      recurrent_dropout_rate: float = 0.0,
      recurrent_dropout_per_step: bool = False,
      recurrent_gradient_clip: float | None = None,
      stop_recurrent_gradient: bool = False,
      dtype: jax.typing.DTypeLike | None = None,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      implementation: selection.Implementation = None,
      time_axis_name: str | Sequence[str] | None = None,
      rngs: nnx.Rngs,
      **unknown: Unpack[sequence_layer.NoMore],
  ):
    """Creates the parameters.

    Args:
      cell: the equations.
      in_features: size of the input's last axis.
      features: size of the carry and of the output.
      num_heads: number of diagonal blocks of the recurrent kernel, each of size
        features / num_heads; `features` for a diagonal recurrence.
      use_bias: whether the input gates have a bias.
      cell_params: the cell's own parameters by name, each an `nnx.Param` of
        [..., features]; another `nnx.Variable` is kept and not learned.
      recurrent_structure: a hashable function from the stored recurrent kernel
        to the one that is used, for instance an antisymmetric one; applied once
        a call, outside the time loop.
      kernel_init: initialiser of W, called for each gate with shape
        (in_features, features).
      recurrent_kernel_init: initialiser of R, called for each gate and head
        with shape (head_dim, head_dim); a sequence has one for each gate.
      max_abs: bound of the recurrent kernel's elements: they start within it,
        and a training loop that calls `rnnzoo.constrain` after each update
        keeps them there. It is metadata of the `nnx.Param`; None for none.
      bias_init: initialiser of b, called for each gate with shape (features,);
        a sequence has one for each gate.
      learn_initial_carry: learn the initial carry, from zero, instead of always
        starting from zero.
      state_features: size of the carry where a readout makes the output; None
        for `features`.
      input_map: an `nnx.Module` that makes the input gates in place of W and b:
        x [..., in_features] -> a tuple of arrays [..., state_features].
      readout: an `nnx.Module` that makes the output: x [..., in_features] and a
        tuple of the carry's arrays [..., state_features] -> [..., features].
        None: the output is the carry's first array.
      zoneout_rate: share of a carry's numbers that keep their old value in each
        step of a call with `rngs`; other calls mix both by the rate (Krueger et
        al., 2017). One for all carries, or one for each. `step` and
        `unroll_carries` always evaluate.
      recurrent_dropout_rate: share of h that the recurrent kernel does not see
        in a call with `rngs`, by one mask a sequence (Gal and Ghahramani,
        2016).
      recurrent_dropout_per_step: draw a mask of its own for each step.
      recurrent_gradient_clip: c > 0, against gradients that grow over time: in
        the backward pass, the cotangent that comes back through each product
        with the recurrent kernel is clipped elementwise to [-c, c] before it is
        added to the rest of the carry's. None: unclipped.
      stop_recurrent_gradient: make that cotangent zero: the recurrent kernel's
        operand counts as a constant. The kernel is still learned, and
        gradients still reach the past by the rest of the cell, as through an
        LSTM's c. A gate that acts on this operand only, A-GRU's r, then has no
        gradient.
      dtype: dtype of inputs, gates, products and outputs; None for the one that
        x and the parameters promote to. State and sums are float32 or wider.
      param_dtype: dtype of the parameters.
      implementation: 'scan' (everything, everywhere; `rnnzoo.Scan` sets the
        arrays kept in memory), 'associative_scan' (all steps at once; settings
        in `rnnzoo.AssociativeScan`), 'pallas' (GPU kernels, first derivatives;
        `rnnzoo.Pallas` sets the arrays kept), a sequence of paths to try in
        turn, or None for the fastest that can run.
      time_axis_name: mesh axis that time is sharded over, or several, major to
        minor, for a linear cell inside `jax.shard_map`. x, reset and mask
        are then this device's steps; seq_lengths and carries belong to the
        whole sequence. Under plain `jax.jit`, the type of x says so instead.
      rngs: `nnx.Rngs` with a `params` or default stream.
      **unknown: names of no option; an error lists the options there are.

    Raises:
      ValueError: a size is not a positive int, num_heads does not divide
        features, the cell breaks the contract of `rnnzoo.Cell`, or an option is
        not one for this cell.
      TypeError: there is no option of that name.
    """
    settings.no_more(unknown, type(self).__name__)
    contract.check(cell, cell_params)
    if state_features is not None:
      settings.positive(state_features, 'state_features')
      if readout is None and state_features != features:
        raise ValueError(
            f'state_features={state_features} without a readout must be'
            f' features={features}: the output is the state then.'
        )
    state = state_features or features
    parameters.check_cell_params(cell_params, state)
    initializers.check_rngs(rngs, 'params', required=True)
    settings.boolean(use_bias, 'use_bias')
    settings.function(recurrent_structure, 'recurrent_structure')
    settings.function(input_map, 'input_map')
    settings.function(readout, 'readout')
    settings.boolean(learn_initial_carry, 'learn_initial_carry')
    if max_abs is not None:
      settings.within(max_abs, 'max_abs', above=0)
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    settings.heads(state, num_heads, cell.recurrent_gates > 0)
    checks.floating(param_dtype, 'param_dtype')
    if dtype is not None:
      checks.floating(dtype, 'dtype')
    parameters.check_kernel_options(
        cell,
        recurrent_kernel_init=None
        if recurrent_kernel_init is initializers.orthogonal
        else recurrent_kernel_init,
        recurrent_structure=recurrent_structure,
        max_abs=max_abs,
    )
    recurrent_gradient_clip = checks.recurrent_gradient(
        cell, recurrent_gradient_clip, stop_recurrent_gradient
    )
    over = settings.axis_names(time_axis_name, 'time_axis_name')
    if over and not isinstance(cell, cell_lib.LinearCell):
      raise ValueError(
          f'time_axis_name={time_axis_name!r} is for linear cells, such as'
          f' MinGRU and LRU; {type(cell).__name__} runs its steps in turn and'
          ' needs time whole. Shard the batch, or gather time by'
          ' jax.lax.all_gather(x, axis_name, axis=1, tiled=True).'
      )
    if input_map is not None:
      own = initializers.lecun_normal, initializers.zeros
      if kernel_init is not own[0] or bias_init is not own[1]:
        raise ValueError(
            'kernel_init and bias_init are for W and b, which input_map'
            ' replaces; leaving them out would work.'
        )
    self.cell = cell
    self.time_axis_name = over
    self.state_features = state
    self.input_map = input_map
    self.readout = readout
    self._regularise(
        zoneout_rate, recurrent_dropout_rate, recurrent_dropout_per_step
    )
    self.in_features = in_features
    self.out_features = features
    self.num_heads = num_heads
    self.recurrent_structure = recurrent_structure
    self.recurrent_gradient_clip = recurrent_gradient_clip
    self.stop_recurrent_gradient = bool(stop_recurrent_gradient)
    self.dtype = dtype
    self.param_dtype = param_dtype
    self.implementation = selection.checked(implementation)

    self.cell_params = nnx.Dict(cell_params or {})
    self.learned_carry = nnx.List(
        nnx.Param(jnp.zeros((state,), param_dtype))
        for _ in (cell.carry_names if learn_initial_carry else ())
    )
    self._draw(rngs, kernel_init, bias_init if use_bias else None)
    self._draw_recurrent(rngs, recurrent_kernel_init, max_abs)

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> OwnT:
    """Returns the carry that a sequence starts from, and restarts from.

    Args:
      batch_shape: leading axes of the input, before time.

    Returns:
      One array [*batch_shape, features] for each of `cell.carry_names`, float32
      or wider: a named tuple, `carry.h` and so on.
    """
    batch_shape = checks.shape(batch_shape, 'batch_shape')
    settings.numbers_of((*batch_shape, self.state_features), 'The carry')
    carry = self._initial_carry(batch_shape, self._state_dtype())
    # A learned one is no parameter's own array: a step may be given it to keep.
    return self._named(tuple(map(jnp.copy, carry)))

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
  ) -> tuple[OwnT, Array]:
    # Documented in SequenceLayer.unroll, as `help` shows.
    call = self._call(reverse, time_major, self._reads())
    masks = self._masks(x, time_major, rngs)
    given = x, initial_carry, reset, seq_lengths, mask
    with promotion.ranks_allowed():
      carry, (y,) = self._run(given, call, masks=masks)
    return self._named(carry, initial_carry), y

  def unroll_carries(
      self,
      x: Array,
      *,
      initial_carry: Carry | None = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
  ) -> tuple[OwnT, OwnT]:
    """Like `unroll`, but returns the whole carry after every step.

    Arguments and errors are as in `unroll`.

    Returns:
      The final carry, each [..., features], and the carry after every step,
      each [..., time, features] in the carry's dtype, float32 or wider; both
      in the order of `cell.carry_names`, with the type of `initial_carry`.
    """
    call = self._call(reverse, time_major, len(self.cell.carry_names))
    given = x, initial_carry, reset, seq_lengths, mask
    with promotion.ranks_allowed():
      carry, steps = self._run(given, call, is_output=False)
    return self._named(carry, initial_carry), self._named(steps, initial_carry)

  def _call(
      self, reverse: bool, time_major: bool, outputs: int = 1
  ) -> call_lib.Call:
    """Returns the static options of a run, checked."""
    settings.boolean(reverse, 'reverse')
    settings.boolean(time_major, 'time_major')
    return call_lib.Call(
        reverse=reverse,
        time_major=time_major,
        outputs=outputs,
        recurrent_gradient_clip=self.recurrent_gradient_clip,
        stop_recurrent_gradient=self.stop_recurrent_gradient,
    )

  def _run_over_devices(
      self, given, call: call_lib.Call, is_output: bool, masks
  ) -> tuple[Carry, Carry]:
    """`_run`, each device with its part of the batch, of time or features."""
    linear = isinstance(self.cell, cell_lib.LinearCell)
    axes = sharding.axes_of_run(given[0].shape[:-1], call.time_major, linear)
    flags, lengths = axes.flags, axes.lengths
    per_step = self.recurrent_dropout_per_step
    return self._over_devices(
        lambda layer, given: layer._run(
            given[:5], call, is_output, regularisation.Masks(*given[5:])
        ),
        (*given, *masks),
        axes,
        positions=(
            *(flags, axes.carry, flags, lengths, flags),
            *(axes.gates, axes.gates if per_step else axes.carry),
        ),
        out_positions=(axes.carry, axes.steps),
    )

  def _run(
      self,
      given: tuple[Any, ...],
      call: call_lib.Call,
      is_output: bool = True,
      masks: regularisation.Masks = regularisation.NONE,
  ) -> tuple[Carry, Carry]:
    """Returns the final carry, and arrays of all steps.

    Args:
      given: x, initial_carry, reset, seq_lengths and mask, as in `unroll`.
      call: static options.
      is_output: whether these are the layer's output alone, or the carry.
      masks: those of zoneout and dropout.
    """
    given = self._checked(given, call)
    if sharding.is_sharded(self, given):
      return self._run_over_devices(given, call, is_output, masks)
    x, initial_carry, *_ = given
    lead, dtype = x.shape[:-1], self._dtype(x)
    kept = dtype if is_output else self._state_dtype(x)
    x, projection, operands, masks = self._flat(given, call, masks)
    mask = operands.mask
    # Outputs are the layer's, in its dtype; carries are as they are held.
    call = dataclasses.replace(
        call,
        out_dtype=dtype if is_output else None,
        starts=initial_carry is None,
    )
    over = self.time_axis_name
    with jax.named_scope('recurrence'):
      if masks.zoneout or masks.dropout is not None:
        carry, steps = self._recur(masks, projection, operands, call, over)
      else:
        path = self.implementation
        carry, steps = paths.run(
            self._cell(), projection, operands, call, path, over
        )
    if is_output and self.readout is not None:
      x = x if mask is None else jnp.where(mask[..., None], x, 0)
      steps = (self._read(x, tuple(h.astype(dtype) for h in steps)),)
    if is_output and mask is not None:
      steps = tuple(jnp.where(mask[..., None], h, 0) for h in steps)
    reshaped = lambda a, lead: a.reshape(*lead, a.shape[-1])
    _, batch_shape = sequence_layer.time_and_batch(lead, call.time_major)
    carry = tuple(reshaped(c, batch_shape) for c in carry)
    return carry, tuple(reshaped(s.astype(kept), lead) for s in steps)

  def _checked(self, given: tuple[Any, ...], call: call_lib.Call):
    """Returns the arrays of `_run`, or raises ValueError."""
    x, carry, reset, seq_lengths, mask = given
    self._check_input(x, '[..., time, in_features]')
    lead, over = x.shape[:-1], self.time_axis_name
    time, batch_shape = sequence_layer.time_and_batch(lead, call.time_major)
    if carry is not None:
      carry = self._check_carry(carry, batch_shape, 'initial_carry')
    time_devices.check_names(over, (x, carry, reset, seq_lengths, mask))
    reset = checks.flags(reset, lead, 'reset')
    mask = checks.flags(mask, lead, 'mask')
    whole = time_devices.whole(time, over)
    seq_lengths = checks.lengths(seq_lengths, batch_shape, whole)
    return x, carry, reset, seq_lengths, mask

  def _flat(self, given, call: call_lib.Call, masks: regularisation.Masks):
    """Returns x, its projection, operands and masks, of one batch axis."""
    x, initial_carry, reset, seq_lengths, mask = given
    lead, dtype, state = x.shape[:-1], self._dtype(x), self._state_dtype(x)
    time, batch_shape = sequence_layer.time_and_batch(lead, call.time_major)
    # Not -1, which has no meaning where there are no steps.
    batch = math.prod(batch_shape)
    flat_lead = (time, batch) if call.time_major else (batch, time)

    def flat(a):
      return None if a is None else a.reshape(*flat_lead, *a.shape[len(lead) :])

    rows = lambda c: c.reshape(batch, self.state_features)
    reset, mask = flat(reset), flat(mask)
    dropout = masks.dropout
    if dropout is not None:
      per_step = self.recurrent_dropout_per_step
      dropout = flat(dropout) if per_step else rows(dropout)
    masks = regularisation.Masks(tuple(map(flat, masks.zoneout)), dropout)
    if seq_lengths is not None:
      steps = time_devices.steps(time, self.time_axis_name)
      valid = steps < seq_lengths.reshape(batch, 1)
      valid = valid.T if call.time_major else valid
      mask = valid if mask is None else mask & valid
      reset = None if reset is None else reset & valid
    carry = restart = None
    if self.learned_carry:
      restart = tuple(map(rows, self._initial_carry(batch_shape, state, x)))
      carry = restart
    if initial_carry is not None:
      carry = tuple(rows(c.astype(state)) for c in initial_carry)
    x = flat(x.astype(dtype))
    if mask is not None and self.input_map is not None:
      x = jnp.where(mask[..., None], x, 0)
    projection, weights, inputs = self._inputs(x)
    operands = call_lib.Operands(
        params=self._cell_params(state, x),
        weights=weights,
        x=inputs,
        recurrent_kernel=self._recurrent_kernel(dtype, x),
        carry=carry,
        restart=restart,
        reset=reset,
        mask=mask,
    )
    return x, projection, operands, masks

  @promotion.of_ranks
  def step(
      self, carry: cell_lib.CarryT, x: Array, *, reset: Array | None = None
  ) -> tuple[cell_lib.CarryT, Array]:
    # Documented in SequenceLayer.step; the carry keeps its type.
    self._check_input(x, '[..., in_features]')
    batch_shape = x.shape[:-1]
    arrays = self._check_carry(carry, batch_shape, 'carry')
    reset = checks.flags(reset, batch_shape, 'reset')
    given = x, carry, reset
    if sharding.is_sharded(self, given):
      axes = sharding.axes_of_run((*batch_shape, 1))
      return self._over_devices(
          lambda layer, given: layer.step(given[1], given[0], reset=given[2]),
          given,
          axes,
          positions=(axes.lengths, axes.carry, axes.lengths),
          out_positions=(axes.carry, axes.carry),
      )
    dtype = self._dtype(x)
    state = self._state_dtype(x)
    arrays = tuple(c.astype(state) for c in arrays)
    if reset is not None:
      restart = self._initial_carry(batch_shape, state)
      arrays = jax.tree.map(
          lambda a, b: jnp.where(reset[..., None], a, b), restart, arrays
      )
    x = x.astype(dtype)
    if self.input_map is None:
      gates = products.project_step(self._weights(), x)
      stored = products.as_stored(self.kernel[...], x)
    else:
      gates, stored = self._mapped(x), False
    if getattr(self.cell, 'reads_starts', False):
      starts = jnp.zeros((), bool) if reset is None else reset
      gates += (jnp.broadcast_to(starts, batch_shape)[..., None],)
    kernels = scan_steps.pack(
        self.cell,
        self._recurrent_kernel(dtype, x),
        functools.partial(products.pack_step, stored),
    )
    arrays, _ = scan_steps.step(
        self._cell(),
        self._cell_params(state),
        kernels,
        tuple(gate.astype(state) for gate in gates),
        arrays,
        clip=self.recurrent_gradient_clip,
        stop=self.stop_recurrent_gradient,
    )
    y = arrays[0].astype(dtype)
    if self.readout is not None:
      y = self._read(x, tuple(h.astype(dtype) for h in arrays)).astype(dtype)
    return cell_lib.like(carry, arrays), y


def is_plain(layer: sequence_layer.SequenceLayer) -> bool:
  """Whether a layer runs over a sequence as `RecurrentLayer` does.

  One that drops does so in training only: see `regularisation.drops`.
  """
  return (
      isinstance(layer, RecurrentLayer)
      and type(layer).unroll is RecurrentLayer.unroll
      and layer.readout is None
      and layer.input_map is None
      and layer.zoneout_rate is None
  )
