"""Unrolls a cell over time: the one place that knows all three paths.

`unroll` is public; layers call `run`, which also fuses the input projection
into the loop where the path can. The names of the paths:

  'scan'              `lax.scan`; every cell, every device, the reference
  'associative_scan'  parallel in time; cells that are linear in their carry
  'pallas'            GPU kernels; cells with recurrent gates, and linear ones,
                      first derivatives

`None` takes the fastest that can run here. A path that cannot run raises
`NotImplementedError`; where others are left to try, the reason is logged once.
`recurrent_gradient_clip` and `stop_recurrent_gradient` are options of 'scan'
and, unless the recurrent kernel is diagonal, of 'pallas'.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import sharding
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import contract
from rnnzoo import settings
from rnnzoo.engines import associative
from rnnzoo.engines import products
from rnnzoo.engines import scan
from rnnzoo.engines import scan_steps
from rnnzoo.engines import selection

Array = jax.Array
Carry = cell_lib.Carry
Implementation = selection.Implementation


def unroll(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    x_gates: Array,
    recurrent_kernel: Array | None,
    carry: Carry,
    *,
    reset: Array | None = None,
    restart_carry: Carry | None = None,
    mask: Array | None = None,
    reverse: bool = False,
    recurrent_gradient_clip: float | None = None,
    stop_recurrent_gradient: bool = False,
    implementation: Implementation = None,
) -> tuple[Carry, Array]:
  """Runs a cell over a sequence of input gates.

  For a layer's parameters, projection and batch axes around this, see
  `rnnzoo.RecurrentLayer`.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> x_gates = jnp.ones((2, 5, 3, 8))        # batch, time, gates, features
  >>> kernel = 0.1 * jnp.ones((3, 1, 8, 8))   # gates, heads, from, to
  >>> carry = (jnp.zeros((2, 8)),)
  >>> params = {'recurrent_bias': jnp.zeros(8)}
  >>> carry, h = rnnzoo.unroll(rnnzoo.GRUCell(), params, x_gates, kernel, carry)
  >>> h.shape, carry[0].shape
  ((2, 5, 8), (2, 8))

  Args:
    cell: the equations, for instance `rnnzoo.LSTMCell()`.
    params: the cell's own parameters by name, each [..., features]; {} for a
      cell that has none.
    x_gates: W x_t + b, [batch, time, input_gates, features].
    recurrent_kernel: R, [recurrent_gates, heads, head_dim, head_dim] indexed
      [gate, head, from, to], with heads * head_dim = features; None for a cell
      without recurrent gates. Its dtype is that of the product's operands; sums
      and state are float32 or wider.
    carry: what the first step starts from, one array [batch, features] for each
      of `cell.carry_names`.
    reset: bool [batch, time]; where true, the carry restarts before this step.
      It is the boundary between t-1 and t: a reversed run restarts when it goes
      from t to t-1.
    restart_carry: what a reset restarts from, shaped as `carry`; zeros if None.
    mask: bool [batch, time]; where false, the carry is held over the step and
      the inputs there have no effect. A reset acts all the same.
    reverse: run from the last step to the first; h stays in the order of x.
    recurrent_gradient_clip: c > 0: in the backward pass, the cotangent of what
      the recurrent kernel multiplies, R^T dgates, is clipped elementwise to
      [-c, c] before it is added to the rest of the carry's. None: unclipped.
    stop_recurrent_gradient: what the recurrent kernel multiplies counts as a
      constant: that cotangent is zero. The recurrent kernel has its gradient
      all the same, and what `cell.update` does with the carry is differentiated
      as ever.
    implementation: 'scan', 'associative_scan', 'pallas', a sequence of these to
      try in turn, or None for the fastest that can run. 'scan' can run
      everything; what the others can, this module's first lines say.

  Returns:
    The final carry, each [batch, features], and h after every step,
    [batch, time, features]; float32 or wider.

  Raises:
    ValueError: an argument has the wrong shape or dtype, or a cell without
      recurrent gates was given an option for their gradient.
    NotImplementedError: the implementation named cannot run this cell, these
      options, sizes or dtypes, or not on this device or with this jax.
  """
  carry, carries = unroll_carries(
      cell,
      params,
      x_gates,
      recurrent_kernel,
      carry,
      reset=reset,
      restart_carry=restart_carry,
      mask=mask,
      reverse=reverse,
      recurrent_gradient_clip=recurrent_gradient_clip,
      stop_recurrent_gradient=stop_recurrent_gradient,
      implementation=implementation,
      outputs=1,
  )
  return carry, carries[0]


def unroll_carries(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    x_gates: Array,
    recurrent_kernel: Array | None,
    carry: Carry,
    *,
    reset: Array | None = None,
    restart_carry: Carry | None = None,
    mask: Array | None = None,
    reverse: bool = False,
    recurrent_gradient_clip: float | None = None,
    stop_recurrent_gradient: bool = False,
    implementation: Implementation = None,
    outputs: int | None = None,
) -> tuple[Carry, Carry]:
  """Like `unroll`, returning more of the carry than h for every step.

  Args:
    cell: as for `unroll`, and so are the arguments up to `implementation`.
    params: as for `unroll`.
    x_gates: as for `unroll`.
    recurrent_kernel: as for `unroll`.
    carry: as for `unroll`.
    reset: as for `unroll`.
    restart_carry: as for `unroll`.
    mask: as for `unroll`.
    reverse: as for `unroll`.
    recurrent_gradient_clip: as for `unroll`.
    stop_recurrent_gradient: as for `unroll`.
    implementation: as for `unroll`.
    outputs: how many of the carry's arrays to return; all if None.

  Returns:
    The final carry, each [batch, features], and the first `outputs` arrays of
    the carry after every step, each [batch, time, features].

  Raises:
    ValueError: as for `unroll`.
    NotImplementedError: the implementation named cannot run this.
  """
  contract.check(cell, params)
  x_gates = checks.array(x_gates, 'x_gates')
  checks.real(x_gates, 'x_gates')
  if x_gates.ndim != 4 or x_gates.shape[2] != cell.input_gates:
    raise ValueError(
        'x_gates must be [batch, time, input_gates, features] with'
        f' {cell.input_gates} input gates for {type(cell).__name__}, got shape'
        f' {x_gates.shape}.'
    )
  batch, time, _, features = x_gates.shape
  recurrent_kernel = checks.kernel(cell, recurrent_kernel, features)
  params = checks.params(cell, params, features)
  outputs = checks.outputs(outputs, len(cell.carry_names))
  settings.boolean(reverse, 'reverse')
  carry = checks.carry(cell.carry_names, carry, (batch, features), 'carry')
  reset = checks.flags(reset, (batch, time), 'reset')
  mask = checks.flags(mask, (batch, time), 'mask')
  recurrent_gradient_clip = checks.recurrent_gradient(
      cell, recurrent_gradient_clip, stop_recurrent_gradient
  )
  dtype = jnp.promote_types(x_gates.dtype, jnp.float32)
  if restart_carry is None:
    restart_carry = tuple(jnp.zeros((batch, features), dtype) for _ in carry)
  else:
    restart_carry = checks.carry(
        cell.carry_names, restart_carry, (batch, features), 'restart_carry'
    )

  def time_major(x: Any) -> Any:
    return None if x is None else jnp.swapaxes(x, 0, 1)

  carry, carries = run(
      cell,
      params,
      _split_gates,
      (),
      time_major(x_gates),
      recurrent_kernel,
      tuple(c.astype(dtype) for c in carry),
      restart=tuple(c.astype(dtype) for c in restart_carry),
      reset=time_major(reset),
      mask=time_major(mask),
      reverse=reverse,
      recurrent_gradient_clip=recurrent_gradient_clip,
      stop_recurrent_gradient=stop_recurrent_gradient,
      implementation=implementation,
      outputs=outputs,
      time_major=False,
  )
  return carry, tuple(map(time_major, carries))


def run(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    project: Callable[[Any, Any], cell_lib.Gates],
    weights: Any,
    inputs: Any,
    recurrent_kernel: Array | None,
    carry: Carry,
    *,
    restart: Carry,
    reset: Array | None,
    mask: Array | None,
    reverse: bool,
    both_directions: bool = False,
    recurrent_gradient_clip: float | None = None,
    stop_recurrent_gradient: bool = False,
    implementation: Implementation,
    outputs: int = 1,
    time_major: bool = True,
    out_dtype: jax.typing.DTypeLike | None = None,
    from_zero: bool = False,
) -> tuple[Carry, Carry]:
  """Runs a cell over projected inputs, time-major and without checks.

  Args:
    cell: the equations.
    params: the cell's own parameters.
    project: a module-level function (weights, inputs) -> x_gates.
    weights: parameters of the projection.
    inputs: [time, batch, ...].
    recurrent_kernel: [gates, heads, head_dim, head_dim] or None.
    carry: each [batch, features], in the dtype of all state.
    restart: what a reset restarts from, as `carry`.
    reset: bool [time, batch] or None.
    mask: bool [time, batch] or None.
    reverse: run from the last step to the first.
    both_directions: run the other way for the second half of the heads, which
      'pallas' can if the recurrent kernel is not diagonal.
    recurrent_gradient_clip: as for `unroll`.
    stop_recurrent_gradient: as for `unroll`.
    implementation: as for `unroll`.
    outputs: how many of the carry's arrays to return for all steps.
    time_major: whether inputs lie in memory as they are given; otherwise they
      were transposed from [batch, time, ...] and the outputs will be back. A
      kernel then works on the original.
    out_dtype: what the outputs will be cast to, which a kernel does itself;
      None for the carry's dtype.
    from_zero: whether carry and restart are known to be zeros, which a kernel
      then need not read.

  Returns:
    The final carry and `outputs` arrays [time, batch, features].
  """
  operands = scan_steps.Operands(
      params, weights, inputs, recurrent_kernel, carry, restart, reset, mask
  )
  operands = sharding.alike(operands)
  params, weights, inputs, _, carry, restart, reset, mask = operands
  time = jax.tree.leaves(inputs)[0].shape[0]
  batch, features = carry[0].shape
  if time == 0:
    empty = jnp.zeros((0, batch, features), carry[0].dtype)
    return carry, (empty,) * outputs
  if reset is not None and both_directions:
    ways = [
        scan_steps.boundary(reset, way, axis=0)
        for way in (reverse, not reverse)
    ]
    reset = jnp.stack(ways)
  elif reset is not None:
    reset = scan_steps.boundary(reset, reverse, axis=0)

  recurrent_gradient: dict[str, Any] = {}
  if recurrent_gradient_clip is not None:
    recurrent_gradient['recurrent_gradient_clip'] = recurrent_gradient_clip
  if stop_recurrent_gradient:
    recurrent_gradient['stop_recurrent_gradient'] = True

  def steps_of(cell, params, project, weights):
    plan = scan.make_plan(
        cell,
        project,
        time,
        batch * features,
        reverse=reverse,
        outputs=outputs,
        **recurrent_gradient,
    )
    return scan.unroll(
        plan, operands._replace(params=params, weights=weights, reset=reset)
    )

  def attempt(name):
    if both_directions and name != 'pallas':
      raise NotImplementedError(
          f'implementation={name!r} runs in one direction at a time.'
      )
    if name == 'scan' and isinstance(cell, cell_lib.LinearCell):
      # All of a linear cell's equations are free of h: only a h + b is left for
      # the loop.
      return steps_of(
          _Affine(), {}, _Coefficients(cell, project), (params, weights)
      )
    if name == 'scan':
      return steps_of(cell, params, project, weights)
    if name == 'pallas':
      return _run_kernel(
          cell,
          project,
          operands._replace(params=params, weights=weights, reset=reset),
          reverse=reverse,
          both_directions=both_directions,
          time_major=time_major,
          outputs=outputs,
          out_dtype=out_dtype,
          from_zero=from_zero,
          **recurrent_gradient,
      )
    if recurrent_gradient:
      raise NotImplementedError(
          "implementation='associative_scan' cannot take"
          f' {" and ".join(recurrent_gradient)}: it needs an adjoint that is'
          " linear, and a clipped one is not. implementation='scan' works."
      )
    if not isinstance(cell, cell_lib.LinearCell):
      raise NotImplementedError(
          f"implementation='associative_scan' cannot run {type(cell).__name__}:"
          ' it is not linear in its carry, and the Newton iteration for such'
          " cells is not written yet. implementation='scan' works."
      )
    x_gates = scan_steps.project(project, carry, mask, weights, inputs)
    h = associative.unroll(
        cell, params, x_gates, carry, restart, reset, mask, reverse
    )
    return (h[0] if reverse else h[-1],), (h,)

  linear = isinstance(cell, cell_lib.LinearCell)
  return selection.first_that_can(attempt, implementation, linear)


def _run_kernel(
    cell,
    project,
    operands,
    *,
    reverse,
    both_directions,
    time_major,
    outputs,
    out_dtype,
    from_zero,
    **recurrent_gradient,
) -> tuple[Carry, Carry]:
  """Runs a cell by `pallas_kernels.recurrence`; arguments as for `run`."""
  params, weights, inputs, kernel, carry, restart, reset, mask = operands
  if mask is not None:
    inputs = jax.tree.map(lambda x: scan_steps.where(mask, x, 0), inputs)

  def swap(x):
    return None if x is None else jnp.swapaxes(x, 0, 1)

  # A transpose of a transpose is nothing to the compiler.
  own = (lambda x: x) if time_major else swap
  x_gates: Any
  input_kernel, bias = None, None
  if project is products.project:
    x_gates = own(inputs)
    input_kernel, bias = weights
  elif project is _split_gates:
    x_gates = own(inputs)
  else:
    x_gates = tuple(own(gate) for gate in project(weights, inputs))
  carry, carries = pallas_kernels.recurrence(
      cell,
      params,
      x_gates,
      kernel,
      None if from_zero else carry,
      input_kernel=input_kernel,
      bias=bias,
      restart=None if from_zero else restart,
      reset=None if reset is None else jnp.swapaxes(reset, -2, -1),
      mask=swap(mask),
      reverse=reverse,
      both_directions=both_directions,
      time_major=time_major,
      outputs=outputs,
      out_dtype=out_dtype or carry[0].dtype,
      **recurrent_gradient,
  )
  return carry, tuple(map(own, carries))


@dataclasses.dataclass(frozen=True)
class _Affine(cell_lib.LinearCell):
  """h' = a h + b, with the coefficients as input gates."""

  input_gates = 2

  def coefficients(self, params, x_gates):
    del params
    return x_gates

  def update(self, params, x_gates, h_gates, carry):
    return (associative.affine(*x_gates, *carry),)


@dataclasses.dataclass(frozen=True)
class _Coefficients:
  """A projection to a linear cell's coefficients instead of its gates."""

  cell: cell_lib.LinearCell
  project: Callable[[Any, Any], cell_lib.Gates]

  def __call__(self, weights: Any, inputs: Any) -> cell_lib.Gates:
    params, weights = weights
    x_gates = self.project(weights, inputs)
    dtype = jnp.promote_types(x_gates[0].dtype, jnp.float32)
    x_gates = tuple(gate.astype(dtype) for gate in x_gates)
    coefficients = self.cell.coefficients(params, x_gates)
    # One may be free of the input, a learned decay for instance.
    return tuple(jnp.broadcast_to(c, x_gates[0].shape) for c in coefficients)


def _split_gates(weights: tuple[()], x_gates: Array) -> cell_lib.Gates:
  """The projection of `unroll`, whose input is projected already."""
  del weights
  return tuple(x_gates[:, :, g] for g in range(x_gates.shape[2]))
