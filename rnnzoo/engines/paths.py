"""Runs a cell over time: the one place that knows all three paths.

`run` takes the first path that can run; layers call it. `unroll` does so for
input gates, with checks. The paths go from `Operands` to carries:

  'scan'              `lax.scan`; every cell, every device, the reference
  'associative_scan'  parallel in time: one pass for a cell that is linear in
                      its carry, else Newton's method; if Newton ends in
                      another trajectory than 'scan', the steps run in turn
  'pallas'            GPU kernels; dense, diagonal and linear recurrences,
                      first derivatives

`None` takes the fastest that can run here. A path that cannot run raises
`NotImplementedError`; where others are left to try, the reason is logged once.
Only 'pallas' takes arrays in the caller's layout; the others are time-major.
`recurrent_gradient_clip` and `stop_recurrent_gradient` are options of all but
'pallas' for a diagonal recurrent kernel.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import contract
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import choice as choice_lib
from rnnzoo.engines import products
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices
from rnnzoo.engines.time import linear_parts
from rnnzoo.engines.time import maps
from rnnzoo.engines.time import path as newton_path
from rnnzoo.engines.time import plan as newton_plan

Array = jax.Array
Call = call_lib.Call
Carry = cell_lib.Carry
Implementation = selection.Implementation
Operands = call_lib.Operands

_DEFAULTS = selection.AssociativeScan()
_SCAN_DEFAULTS = selection.Scan()
_PALLAS_DEFAULTS = selection.Pallas()


def run(
    cell: cell_lib.Cell,
    projection: call_lib.Projection,
    operands: Operands,
    call: Call,
    implementation: selection.Implementation,
    over: time_devices.Names = (),
) -> tuple[Carry, Carry]:
  """Runs a cell over time, without checks.

  Args:
    cell: the equations.
    projection: map from `operands.x` to the input gates.
    operands: the arrays; a carry has the dtype of all state, which is float32
      or wider. Gates that are given may have any batch axes.
    call: static options. `call.out_dtype` is the dtype that the caller will
      cast the outputs to: a kernel writes it, any other path returns state.
    implementation: paths to try, as `unroll` takes them.
    over: the mesh axes that time is over, inside `jax.shard_map`; for a linear
      cell only.

  Returns:
    The final carry, each [B, F], and `call.outputs` arrays of the carry for all
    steps, [B, T, F], or [T, B, F] if `call.time_major`.

  Raises:
    NotImplementedError: the implementation named cannot run this.
  """
  axis = 0 if call.time_major else 1
  if sharding.is_sharded(operands):
    return _over_devices(cell, projection, operands, call, implementation)
  if isinstance(projection, call_lib.Given) and operands.x.ndim != 4:
    return _as_one_batch(cell, operands, call, implementation, over)
  operands = devices.alike(operands)
  if operands.x.shape[axis] == 0:
    batch = operands.x.shape[1 - axis]
    carry = with_carries(cell, projection, operands, batch).carry
    shape = list(carry[0].shape)
    shape.insert(axis, 0)
    return carry, (jnp.zeros(shape, carry[0].dtype),) * call.outputs
  if over and isinstance(cell, cell_lib.LinearCell):
    operands = with_carries(
        cell, projection, operands, operands.x.shape[1 - axis]
    )
    return linear_parts.run(
        cell, projection, operands, call, implementation, over
    )
  if operands.reset is not None:
    ways = (call.reverse, not call.reverse)[: 1 + call.both_directions]
    resets = [scan_steps.boundary(operands.reset, way, axis) for way in ways]
    reset = jnp.stack(resets) if call.both_directions else resets[0]
    operands = operands._replace(reset=reset)
  if getattr(cell, 'reads_starts', False):
    starts = scan_steps.with_starts(operands, call, axis)
    operands = operands._replace(reset=starts)
  # Equal runs share a compilation.
  call = dataclasses.replace(call, starts=False)

  linear = isinstance(cell, cell_lib.LinearCell)
  slower_kernel = ''
  if implementation is None and linear:
    lead = operands.x.shape[1 - axis], operands.x.shape[axis]
    features = projection.features(operands.weights, operands.x)
    slower_kernel = choice_lib.slower_linear_kernel(*lead, features)
  elif implementation is None:
    slower_kernel = choice_lib.slower_kernel(cell, operands, call)
  x = choice_lib.marked(operands.x, implementation)
  choice = choice_lib.Run(
      names=selection.names(implementation, linear),
      paths=(scan, associative_scan, pallas),
      static=(cell, projection, call),
      label=type(cell).__name__,
      kind=_kind(operands.recurrent_kernel),
      slower_kernel=slower_kernel,
      kernel_or_none=call.both_directions,
  )
  return choice(operands._replace(x=x), x.shape)


def _kind(recurrent_kernel: jax.Array | None) -> str:
  """Returns the kind of kernels that would run."""
  if recurrent_kernel is None:
    return 'linear'
  return 'diagonal' if recurrent_kernel.shape[-1] == 1 else 'dense'


def run_levels(
    cell: cell_lib.Cell,
    operands: Operands,
    call: Call,
    implementation: selection.Implementation,
) -> tuple[Carry, Carry]:
  """Runs several layers at once, in one GPU kernel.

  Args:
    cell: the equations.
    operands: x is gates without their bias, [L, B, T, G, F / L] with L =
      `call.levels`, zero where masked; weights are the bias, ([G, F] or None,).
      Flags are [L, B, T], resets in the order of the loop.
    call: static options.
    implementation: paths to try, as `unroll` takes them, a kernel first.

  Returns:
    The final carry, each [B, F], and an array of all steps, [L, B, T, F / L].

  Raises:
    NotImplementedError: no kernel can run this.
  """
  operands = devices.alike(operands)
  x = choice_lib.marked(operands.x, implementation)
  choice = choice_lib.Run(
      names=selection.names(implementation, linear=False),
      paths=(scan, associative_scan, pallas),
      static=(cell, call_lib.Biased(), call),
      label=type(cell).__name__,
      kind='dense',
      kernel_or_none=True,
  )
  return choice(operands._replace(x=x))


def _as_one_batch(cell, operands, call, implementation, over):
  """`run` of gates that are given, with no batch axis or several."""
  *batch_shape, time, gates, features = operands.x.shape
  batch = math.prod(batch_shape)
  rows = lambda c: c.reshape(batch, features)
  operands = operands._replace(
      x=operands.x.reshape(batch, time, gates, features),
      carry=jax.tree.map(rows, operands.carry),
      restart=jax.tree.map(rows, operands.restart),
      reset=jax.tree.map(lambda f: f.reshape(batch, time), operands.reset),
      mask=jax.tree.map(lambda f: f.reshape(batch, time), operands.mask),
  )
  results = run(cell, call_lib.Given(), operands, call, implementation, over)
  shaped = lambda x: x.reshape(*batch_shape, *x.shape[1:])
  return jax.tree.map(shaped, results)


def _over_devices(cell, projection, operands, call, implementation):
  """`run`, each device with its part of the batch, of heads or features."""
  linear = isinstance(cell, cell_lib.LinearCell)
  is_given = isinstance(projection, call_lib.Given)
  lead = operands.x.shape[: -2 if is_given else 2]
  axes = sharding.axes_of_run(lead, call.time_major, linear)
  # In the order of Operands.
  positions = (
      *(axes.parameters, axes.parameters),
      *(axes.gates if is_given else axes.flags, axes.heads),
      *(axes.carry, axes.carry, axes.flags, axes.flags),
  )
  heads = projection.features(operands.weights, operands.x)
  if operands.recurrent_kernel is not None:
    heads = operands.recurrent_kernel.shape[1]
  over = sharding.choose(operands, positions, heads)
  return sharding.spread(
      lambda own: run(
          cell, projection, Operands(*own), call, implementation, over[-2]
      ),
      operands,
      positions=positions,
      out_positions=(axes.carry, axes.steps),
      over=over,
  )


def scan(
    cell,
    projection,
    call: Call,
    operands: Operands,
    options: selection.Scan = _SCAN_DEFAULTS,
):
  """Runs a cell by `lax.scan`, over time-major arrays."""
  operands = _cast_kernel(operands, call)
  if call.groups > 1:
    path = functools.partial(scan, options=options)
    return _in_turn(path, cell, projection, call, operands)
  if not call.time_major:
    operands = operands._replace(x=products.settled(operands.x))
  operands = _swap(operands, call)
  operands = with_carries(cell, projection, operands, operands.x.shape[1])
  if isinstance(cell, cell_lib.LinearCell):
    if len(cell.carry_names) > 1 or cell.reads_starts:
      return _linear(maps.step_scan, cell, projection, call, operands)
    # All of a linear cell's equations are free of h: only a h + b is left for
    # the loop.
    projection = call_lib.Coefficients(cell, projection)
    weights = operands.params, operands.weights
    operands = operands._replace(params={}, weights=weights)
    cell = _Affine()
  plan = scan_loop.make_plan(
      cell, projection, operands, call, **dataclasses.asdict(options)
  )
  carry, carries = scan_loop.unroll(plan, operands)
  return carry, _swap(carries, call)


def associative_scan(
    cell,
    projection,
    call: Call,
    operands: Operands,
    options: selection.AssociativeScan = _DEFAULTS,
):
  """Runs a cell in parallel over time."""
  operands = _cast_kernel(operands, call)
  if call.groups > 1:
    path = functools.partial(associative_scan, options=options)
    return _in_turn(path, cell, projection, call, operands)
  operands = _swap(operands, call)
  operands = with_carries(cell, projection, operands, operands.x.shape[1])
  if isinstance(cell, cell_lib.LinearCell):
    return _linear(maps.compose_scan, cell, projection, call, operands)
  plan = newton_plan.make_plan(cell, projection, operands, call, options)
  carry, carries = newton_path.unroll(plan, operands)
  return carry, _swap(carries, call)


def _linear(solve, cell, projection, call: Call, operands: Operands):
  """Runs a linear cell over time-major arrays, by a function of `maps`."""
  h = maps.unroll(cell, projection, operands, call.reverse, solve)
  last = tuple(x[0 if call.reverse else -1] for x in h)
  return last, _swap(h[: call.outputs], call)


def _in_turn(path, cell, projection, call: Call, operands: Operands):
  """Runs directions, or levels, of a call in turn."""
  results = []
  for i in range(call.groups):
    features = lambda x, i=i: jnp.split(x, call.groups, axis=-1)[i]
    heads = lambda x, i=i: jnp.split(x, call.groups, axis=1)[i]
    ith = lambda x, i=i: x[i]
    own = operands._replace(
        params=jax.tree.map(features, operands.params),
        weights=jax.tree.map(features, operands.weights),
        recurrent_kernel=jax.tree.map(heads, operands.recurrent_kernel),
        carry=jax.tree.map(features, operands.carry),
        restart=jax.tree.map(features, operands.restart),
        reset=jax.tree.map(ith, operands.reset),
    )
    alone = dataclasses.replace(call, both_directions=False, levels=1)
    if call.levels > 1:
      own = own._replace(x=own.x[i], mask=jax.tree.map(ith, own.mask))
    elif i:
      alone = dataclasses.replace(alone, reverse=not call.reverse)
    results.append(path(cell, projection, alone, own))
  side_by_side = lambda *xs: jnp.concatenate(xs, axis=-1)
  if call.levels == 1:
    return jax.tree.map(side_by_side, *results)
  carries, steps = zip(*results, strict=True)
  stack = lambda *xs: jnp.stack(xs)
  return jax.tree.map(side_by_side, *carries), jax.tree.map(stack, *steps)


def pallas(
    cell,
    projection,
    call: Call,
    operands: Operands,
    options: selection.Pallas = _PALLAS_DEFAULTS,
):
  """Runs a cell by a GPU kernel, in the layout that the arrays have."""
  x, mask, reset = operands.x, operands.mask, operands.reset
  selection.check_known(x.shape)
  if mask is not None and call.levels == 1:
    x = scan_steps.where(mask, x, 0)
  if call.time_major:
    # The kernels read flags by sequence in either layout.
    mask, reset = (
        None if flag is None else jnp.swapaxes(flag, -2, -1)
        for flag in (mask, reset)
    )
  call = dataclasses.replace(call, keep_gates=options.keep == 'gates')
  inputs = projection.for_kernels(operands.weights, x)
  if call.out_dtype is None:
    dtype = promotion.wide(x.dtype)
    call = dataclasses.replace(call, out_dtype=dtype)
  params, inputs, recurrent_kernel, carry, restart = selection.for_kernel(
      (
          operands.params,
          inputs,
          operands.recurrent_kernel,
          operands.carry,
          operands.restart,
      )
  )
  with selection.in_reverse_mode():
    return pallas_kernels.recurrence(
        cell,
        params,
        inputs.x,
        recurrent_kernel,
        carry,
        input_kernel=inputs.input_kernel,
        bias=inputs.bias,
        restart=restart,
        reset=reset,
        mask=mask,
        call=call,
    )


def _cast_kernel(operands: Operands, call: Call) -> Operands:
  """Returns operands with R in the dtype of x, where the call says so."""
  if not call.cast_kernel:
    return operands
  kernel = jax.tree.map(
      lambda k: k.astype(operands.x.dtype), operands.recurrent_kernel
  )
  return operands._replace(recurrent_kernel=kernel)


def _swap(tree, call: Call):
  """Turns [B, T, ...] into [T, B, ...] and back where `call` is batch-major.

  Args:
    tree: arrays, or `Operands`, of which x and the flags have a time axis.
    call: says how the caller's arrays lie.
  """
  if call.time_major:
    return tree
  if isinstance(tree, call_lib.Operands):
    return tree.swapped()
  return jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)


def with_carries(cell, projection, operands: Operands, batch: int) -> Operands:
  """Returns operands whose carry and restart are arrays, of zeros for None."""
  x, given = operands.x, (operands.carry, operands.restart)
  if all(carry is not None for carry in given):
    return operands
  shape = (batch, projection.features(operands.weights, x))
  dtype = promotion.wide(x.dtype)
  zeros = (jnp.zeros(shape, dtype),) * len(cell.carry_names)
  zeros = jax.tree.map(lambda zero: devices.like(zero, x), zeros)
  carry, restart = (zeros if carry is None else carry for carry in given)
  return operands._replace(carry=carry, restart=restart)


@dataclasses.dataclass(frozen=True)
class _Affine(cell_lib.LinearCell):
  """h' = a h + b, with the coefficients as input gates."""

  input_gates = 2

  def coefficients(self, params, x_gates):
    del params
    return x_gates

  def update(self, params, x_gates, h_gates, carry):
    a, b = x_gates
    return maps.affine(a, (b,), carry)


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
    x_gates: W x_t + b, [..., time, input_gates, features], with any batch axes
      or none.
    recurrent_kernel: R, [recurrent_gates, heads, head_dim, head_dim] indexed
      [gate, head, from, to], with heads * head_dim = features; None for a cell
      without recurrent gates. The product's operands have its dtype; sums and
      state are float32 or wider.
    carry: state before the first step, one array [..., features] for each
      of `cell.carry_names`.
    reset: bool [..., time]; where true, the carry restarts before this step.
      It is the boundary between t-1 and t: a reversed run restarts when it goes
      from t to t-1.
    restart_carry: state after a reset, shaped as `carry`; zeros if None.
    mask: bool [..., time]; where false, the carry is held over the step and
      the inputs there have no effect. A reset still acts.
    reverse: run from the last step to the first; h stays in the order of x.
    recurrent_gradient_clip: c > 0: in the backward pass, the cotangent of the
      recurrent kernel's operand, R^T dgates, is clipped elementwise to [-c, c]
      before it is added to the rest of the carry's. None: unclipped.
    stop_recurrent_gradient: the recurrent kernel's operand counts as a
      constant: its cotangent is zero. The recurrent kernel still has its
      gradient, and `cell.update` is differentiated as ever.
    implementation: 'scan', 'associative_scan', 'pallas', a sequence of paths to
      try in turn, or None for the fastest that can run. 'scan' can run
      everything; this module's first lines name the cells of each path. An
      `rnnzoo.AssociativeScan` is 'associative_scan' with settings; an
      `rnnzoo.Scan` is 'scan' and an `rnnzoo.Pallas` is 'pallas' with settings
      of memory.

  Returns:
    The final carry, each [..., features] and with the type of `carry`, and h
    after every step, [..., time, features]; float32 or wider.

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

  Arguments and errors are as in `unroll`; `outputs` is the number of the
  carry's arrays to return for every step, all if None.

  Returns:
    The final carry, each [..., features], and the first `outputs` arrays of
    the carry after every step, each [..., time, features].
  """
  contract.check(cell, params)
  x_gates = checks.input_gates(cell, x_gates)
  lead, features = x_gates.shape[:-2], x_gates.shape[-1]
  shape, names = (*lead[:-1], features), cell.carry_names
  recurrent_kernel = checks.kernel(cell, recurrent_kernel, features)
  params = checks.params(cell, params, features)
  outputs = checks.outputs(outputs, len(names))
  settings.boolean(reverse, 'reverse')
  arrays = checks.carry(names, carry, shape, 'carry')
  reset = checks.flags(reset, lead, 'reset')
  mask = checks.flags(mask, lead, 'mask')
  recurrent_gradient_clip = checks.recurrent_gradient(
      cell, recurrent_gradient_clip, stop_recurrent_gradient
  )
  dtype = promotion.wide(x_gates.dtype)
  if restart_carry is not None:
    restart_carry = checks.carry(names, restart_carry, shape, 'restart_carry')
    restart_carry = tuple(c.astype(dtype) for c in restart_carry)
  operands = Operands(
      params=params,
      weights=(),
      x=x_gates,
      recurrent_kernel=recurrent_kernel,
      carry=tuple(c.astype(dtype) for c in arrays),
      restart=restart_carry,
      reset=reset,
      mask=mask,
  )
  call = Call(
      reverse=reverse,
      outputs=outputs,
      recurrent_gradient_clip=recurrent_gradient_clip,
      stop_recurrent_gradient=stop_recurrent_gradient,
  )
  with promotion.ranks_allowed():
    last, steps = run(cell, call_lib.Given(), operands, call, implementation)
  if outputs == len(names):
    steps = cell_lib.like(carry, steps)
  return cell_lib.like(carry, last), steps
