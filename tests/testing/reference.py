"""An independent reference: a Python-simple scan, differentiated by autodiff.

Shares nothing with the engines but the cells' equations, and the maps of layers
that have their own from x to gates or from memory to output, which
linear_layers_test compares with their papers: gates are formed for one step at
a time, the recurrent product is an einsum over [G, N, D, D], and
every derivative is JAX's own, but for sLSTM's, which `cells_test` compares with
that of the paper's equations. Run it in float64.
"""

import functools

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from tests.testing import compilation

jit = functools.partial(jax.jit, compiler_options=compilation.OPTIONS)

# Every shorter sequence is padded to this many steps, by a mask, so that a
# cell's reference is compiled once.
MAX_TIME = 7


def products(kernel, h):
  """Returns R_g h for every gate; h [B, F], kernel [G, N, D, D]."""
  _, heads, size, _ = kernel.shape
  y = jnp.einsum('bnd,gnde->gbne', h.reshape(-1, heads, size), kernel)
  return tuple(gate.reshape(h.shape) for gate in y)


def step(cell, params, kernel, x_gates, carry, seen=lambda x: x):
  """One step of any cell; its recurrent kernel multiplies seen(h)."""
  h_gates = ()
  if isinstance(cell, rnnzoo.TwoStageCell):
    h_gates = products(kernel[:-1], seen(carry[0]))
    operand = cell.operand(params, x_gates, h_gates, carry)
    h_gates += products(kernel[-1:], seen(operand))
  elif kernel is not None:
    h_gates = products(kernel, seen(carry[0]))
  return cell.update(params, x_gates, h_gates, carry)


def unroll(
    cell,
    params,
    x_gates,
    kernel,
    carry,
    restart,
    reset,
    mask,
    seen=lambda x: x,
    reverse=False,
):
  """Runs a cell over x_gates [B, T, G, F], from the first step to the last.

  `restart` is a carry; `reset` and `mask` are bool [B, T]; `seen` is as for
  `step`; `reverse` is to run from the last step to the first.

  Returns:
    The final carry and all carries, each [B, T, F].
  """

  def body(state, xs):
    carry, waits = state  # A reset in a held step is the next step's, too.
    x_t, reset_t, mask_t = xs
    choose = lambda c, a, b: tuple(
        jnp.where(c[:, None], x, y) for x, y in zip(a, b, strict=True)
    )
    start = choose(reset_t, restart, carry)
    x_t = tuple(jnp.where(mask_t[:, None], x, 0) for x in x_t)
    if getattr(cell, 'reads_starts', False):
      x_t += ((reset_t | waits)[:, None].astype(x_t[0].dtype),)
    new = step(cell, params, kernel, x_t, start, seen)
    new = choose(mask_t, new, start)
    return (new, (reset_t | waits) & ~mask_t), new

  if reverse:  # A boundary is between t-1 and t, whatever the direction.
    reset = jnp.concatenate([reset[:, 1:], jnp.zeros_like(reset[:, :1])], 1)
  time_major = lambda x: jnp.moveaxis(x, 1, 0)
  xs = (
      tuple(time_major(x_gates[:, :, g]) for g in range(x_gates.shape[2])),
      time_major(reset),
      time_major(mask),
  )
  waits = jnp.zeros_like(mask[:, 0])
  (final, _), carries = lax.scan(body, (carry, waits), xs, reverse=reverse)
  return final, tuple(jnp.moveaxis(c, 0, 1) for c in carries)


def linear_scan(a, b, h0, reset=None, reverse=False):
  """h' = a h + b over b [B, T, F], step by step; `a` is broadcast to b."""
  time, a = b.shape[1], jnp.broadcast_to(a, b.shape)
  h, steps = h0, {}
  for t in reversed(range(time)) if reverse else range(time):
    boundary = t + 1 if reverse else t
    if reset is not None and boundary < time:
      h = jnp.where(reset[:, boundary, None], 0, h)
    steps[t] = h = a[:, t] * h + b[:, t]
  return jnp.stack([steps[t] for t in range(time)], axis=1)


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), compiler_options=compilation.OPTIONS
)
def _value_and_grad(cell, structure, modules, arrays, reset, mask, weights):
  def loss(arrays):
    recurrent = arrays['recurrent_kernel']
    if structure is not None:
      recurrent = structure(recurrent)
    x, (input_map, readout) = arrays['x'], modules
    if input_map is None:
      x_gates = jnp.einsum('bti,gif->btgf', x, arrays['kernel'])
      x_gates += arrays['bias']
    else:
      x_gates = nnx.merge(input_map, arrays['input_map'])(x)
      x_gates = jnp.stack(x_gates, axis=2)
    final, carries = unroll(
        cell,
        arrays['cell_params'],
        x_gates,
        recurrent,
        arrays['carry'],
        arrays['restart'],
        reset,
        mask,
    )
    h = carries[0]
    if readout is not None:
      h = nnx.merge(readout, arrays['readout'])(x, carries)
    h = jnp.where(mask[..., None], h, 0)
    outputs = (h, *final)
    total = sum(jnp.sum(w * y) for w, y in zip(weights, outputs, strict=True))
    return total, (final, h)

  (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(arrays)
  return outputs, grads


def layer_value_and_grad(
    cell, structure, reverse, arrays, reset, mask, weights, modules=(None, None)
):
  """Value and gradients of a weighted sum of a layer's outputs and final carry.

  Args:
    cell: static.
    structure: the layer's `recurrent_structure` or None, static.
    reverse: run from the last step to the first.
    arrays: dict with x [B, T, in], kernel, bias, recurrent_kernel (or None),
      cell_params, carry and restart; numpy arrays; what is differentiated.
    reset: bool [B, T].
    mask: bool [B, T].
    weights: one array for h of every step [B, T, F], one for each final carry.
    modules: graphs of the layer's input map and readout, or None, static; the
      states are in `arrays`.

  Returns:
    (final carry, masked h of every step), gradients like `arrays`.
  """
  time = arrays['x'].shape[1]

  def loop_order(x):
    """Flips a reversed sequence, so that the loop is always a forward one."""
    return np.flip(x, axis=1) if reverse else x

  def padded(x):
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, max(MAX_TIME, time) - time)
    return np.pad(loop_order(x), widths)

  if reverse:  # A boundary is between t-1 and t, whatever the direction.
    reset = np.roll(reset, -1, axis=1)
    reset[:, -1] = False
  (final, h), grads = _value_and_grad(
      cell,
      structure,
      modules,
      arrays | {'x': padded(arrays['x'])},
      padded(reset),
      padded(mask),
      (padded(weights[0]), *weights[1:]),
  )
  unpadded = lambda x: loop_order(np.asarray(x)[:, :time])
  return (final, unpadded(h)), grads | {'x': unpadded(grads['x'])}
