"""Unrolls a cell over input gates: the public functions, with their checks.

Layers call `paths.run` itself, which also fuses the input projection into the
loop where the path can. The names of the paths:

  'scan'              `lax.scan`; every cell, every device, the reference
  'associative_scan'  parallel in time: one pass for a cell that is linear in
                      its carry, Newton's method for the others; where that does
                      not end in the trajectory of 'scan', the steps run in turn
  'pallas'            GPU kernels; cells with recurrent gates, and linear ones,
                      first derivatives

`None` takes the fastest that can run here. A path that cannot run raises
`NotImplementedError`; where others are left to try, the reason is logged once.
`recurrent_gradient_clip` and `stop_recurrent_gradient` are options of 'scan',
'associative_scan' and, unless the recurrent kernel is diagonal, 'pallas'.
"""

import jax

from pallas_kernels import promotion
from rnnzoo import carries as carries_lib
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import contract
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths
from rnnzoo.engines import selection

Array = jax.Array
Call = call_lib.Call
Carry = cell_lib.Carry
Implementation = selection.Implementation
Operands = call_lib.Operands


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
      without recurrent gates. Its dtype is that of the product's operands; sums
      and state are float32 or wider.
    carry: state before the first step, one array [..., features] for each
      of `cell.carry_names`.
    reset: bool [..., time]; where true, the carry restarts before this step.
      It is the boundary between t-1 and t: a reversed run restarts when it goes
      from t to t-1.
    restart_carry: state after a reset, shaped as `carry`; zeros if None.
    mask: bool [..., time]; where false, the carry is held over the step and
      the inputs there have no effect. A reset acts all the same.
    reverse: run from the last step to the first; h stays in the order of x.
    recurrent_gradient_clip: c > 0: in the backward pass, the cotangent of the
      recurrent kernel's operand, R^T dgates, is clipped elementwise to [-c, c]
      before it is added to the rest of the carry's. None: unclipped.
    stop_recurrent_gradient: the recurrent kernel's operand counts as a
      constant: its cotangent is zero. The recurrent kernel has its gradient all
      the same, and `cell.update` is differentiated as ever.
    implementation: 'scan', 'associative_scan', 'pallas', a sequence of these to
      try in turn, or None for the fastest that can run. 'scan' can run
      everything; this module's first lines say which cells the others can. An
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

  Arguments and errors are those of `unroll`; `outputs` is the number of the
  carry's arrays to return for every step, all if None.

  Returns:
    The final carry, each [..., features], and the first `outputs` arrays of
    the carry after every step, each [..., time, features].
  """
  contract.check(cell, params)
  x_gates = checks.array(x_gates, 'x_gates')
  checks.real(x_gates, 'x_gates')
  if x_gates.ndim < 3 or x_gates.shape[-2] != cell.input_gates:
    raise ValueError(
        'x_gates must be [..., time, input_gates, features] with'
        f' {cell.input_gates} input gates for {type(cell).__name__}, got shape'
        f' {x_gates.shape}.'
    )
  lead, features = x_gates.shape[:-2], x_gates.shape[-1]
  shape = (*lead[:-1], features)
  recurrent_kernel = checks.kernel(cell, recurrent_kernel, features)
  params = checks.params(cell, params, features)
  outputs = checks.outputs(outputs, len(cell.carry_names))
  settings.boolean(reverse, 'reverse')
  arrays = checks.carry(cell.carry_names, carry, shape, 'carry')
  reset = checks.flags(reset, lead, 'reset')
  mask = checks.flags(mask, lead, 'mask')
  recurrent_gradient_clip = checks.recurrent_gradient(
      cell, recurrent_gradient_clip, stop_recurrent_gradient
  )
  dtype = promotion.wide(x_gates.dtype)
  if restart_carry is not None:
    restart_carry = checks.carry(
        cell.carry_names, restart_carry, shape, 'restart_carry'
    )
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
    last, steps = paths.run(
        cell, call_lib.Given(), operands, call, implementation
    )
  if outputs == len(cell.carry_names):
    steps = carries_lib.like(carry, steps)
  return carries_lib.like(carry, last), steps
