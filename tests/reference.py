"""An independent reference: a Python-simple scan, differentiated by autodiff.

Shares nothing with the engines but the cells' equations: gates are formed for
one step at a time, the recurrent product is an einsum over [G, N, D, D], and
every derivative is JAX's own. Run it in float64.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

import rnnzoo


# Compile time is most of a test's time; speed of the result is of no interest.
FAST_COMPILE = {'xla_backend_optimization_level': 0}


def products(kernel, h):
  """Returns R_g h for every gate; h [B, F], kernel [G, N, D, D]."""
  _, heads, size, _ = kernel.shape
  y = jnp.einsum('bnd,gnde->gbne', h.reshape(-1, heads, size), kernel)
  return tuple(gate.reshape(h.shape) for gate in y)


def step(cell, params, kernel, x_gates, carry):
  """One step of any cell."""
  h_gates = ()
  if isinstance(cell, rnnzoo.TwoStageCell):
    h_gates = products(kernel[:-1], carry[0])
    operand = cell.operand(params, x_gates, h_gates, carry)
    h_gates += products(kernel[-1:], operand)
  elif kernel is not None:
    h_gates = products(kernel, carry[0])
  return cell.update(params, x_gates, h_gates, carry)


def unroll(cell, params, x_gates, kernel, carry, restart, reset, mask, reverse):
  """Runs a cell over x_gates [B, T, G, F].

  `restart` is a carry; `reset` and `mask` are bool [B, T].

  Returns:
    The final carry and all carries, each [B, T, F].
  """
  if reverse:  # A boundary is between t-1 and t, whatever the direction.
    flip = lambda x: jnp.flip(x, axis=1)
    boundary = jnp.roll(flip(reset), 1, axis=1).at[:, 0].set(False)
    final, carries = unroll(
        cell,
        params,
        flip(x_gates),
        kernel,
        carry,
        restart,
        boundary,
        flip(mask),
        False,
    )
    return final, tuple(map(flip, carries))

  def body(carry, xs):
    x_t, reset_t, mask_t = xs
    choose = lambda c, a, b: tuple(
        jnp.where(c[:, None], x, y) for x, y in zip(a, b)
    )
    start = choose(reset_t, restart, carry)
    x_t = tuple(jnp.where(mask_t[:, None], x, 0) for x in x_t)
    new = choose(mask_t, step(cell, params, kernel, x_t, start), start)
    return new, new

  time_major = lambda x: jnp.moveaxis(x, 1, 0)
  xs = (
      tuple(time_major(x_gates[:, :, g]) for g in range(x_gates.shape[2])),
      time_major(reset),
      time_major(mask),
  )
  final, carries = lax.scan(body, carry, xs)
  return final, tuple(jnp.moveaxis(c, 0, 1) for c in carries)


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), compiler_options=FAST_COMPILE
)
def layer_value_and_grad(
    cell, structure, reverse, arrays, reset, mask, weights
):
  """Value and gradients of a weighted sum of a layer's outputs and final carry.

  Args:
    cell: static.
    structure: the layer's `recurrent_structure` or None, static.
    reverse: static.
    arrays: dict with x [B, T, in], kernel, bias, recurrent_kernel (or None),
      cell_params, carry and restart; what is differentiated.
    reset: bool [B, T].
    mask: bool [B, T].
    weights: one array for h of every step [B, T, F], one for each final carry.

  Returns:
    (final carry, masked h of every step), gradients like `arrays`.
  """

  def loss(arrays):
    recurrent = arrays['recurrent_kernel']
    if structure is not None:
      recurrent = structure(recurrent)
    x_gates = jnp.einsum('bti,gif->btgf', arrays['x'], arrays['kernel'])
    final, carries = unroll(
        cell,
        arrays['cell_params'],
        x_gates + arrays['bias'],
        recurrent,
        arrays['carry'],
        arrays['restart'],
        reset,
        mask,
        reverse,
    )
    h = jnp.where(mask[..., None], carries[0], 0)
    outputs = (h, *final)
    total = sum(jnp.sum(w * y) for w, y in zip(weights, outputs))
    return total, (final, h)

  (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(arrays)
  return outputs, grads
