"""Levels of a wavefront for tests: arguments, a loop, and what is right."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import call as call_lib
from tests.testing import dense_loops

aval = jax.ShapeDtypeStruct


def arguments(layer, depth, batch, time, inputs, features, heads, **options):
  """Returns a cell, types of `recurrence_op.levels`, and options of the run.

  Args:
    layer: class.
    depth: number of levels.
    batch: B.
    time: T.
    inputs: I.
    features: F.
    heads: N.
    **options: of the run, dtype, and kernel_dtype, that of W.
  """
  dtype = options.pop('dtype', 'bfloat16')
  of_w = options.pop('kernel_dtype', 'float32')
  one = layer(inputs, features, num_heads=heads, rngs=nnx.Rngs(0))
  call = call_lib.Call(levels=depth, **options)
  lead = (time, batch) if call.time_major else (batch, time)
  size = features // heads
  cell = one.cell
  params = {
      name: aval((*v.shape[:-1], depth * features), jnp.float32)
      for name, v in one._cell_params(jnp.float32).items()
  }
  types = (
      params,
      aval((cell.input_gates, depth * features), jnp.float32),
      aval((*lead, inputs), dtype),
      [
          aval((cell.input_gates, i, features), of_w)
          for i in (inputs, *[features] * (depth - 1))
      ],
      aval((cell.recurrent_gates, depth * heads, size, size), jnp.float32),
  )
  return cell, types, call


def rest(cell, types, call, flags):
  """Returns the types of a carry, a restart and flags."""
  _, _, x, _, kernel = types
  batch, time = x.shape[:2][::-1] if call.time_major else x.shape[:2]
  carry = (len(cell.carry_names), batch, kernel.shape[1] * kernel.shape[2])
  flag = aval((batch, time), bool) if flags else None
  return *[aval(carry, jnp.float32)] * 2, flag, flag


def loop(plan, inputs):
  """In place of `forward.forward`."""
  dense, count = plan.dense, plan.levels
  x, lasts = inputs.x, []
  for level, kernel in enumerate(inputs.kernels):
    split = lambda v, axis, i=level: jnp.split(v, count, axis)[i]
    gates = jnp.einsum(
        'abi,gif->abgf',
        x[..., : kernel.shape[1]],
        kernel.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    gates = gates.astype(dense.x_dtype)
    shape = dense.shape
    alone = dataclasses.replace(
        dense,
        shape=dataclasses.replace(shape, heads=shape.heads // count, levels=1),
        call=dataclasses.replace(dense.call, levels=1),
    )
    flags = inputs.flags
    carries, last, *_ = dense_loops.forward_loop(
        alone,
        split(inputs.theta, -1),
        gates,
        (split(inputs.matrix, 1),),
        split(inputs.carry, -1),
        split(inputs.restart, -1),
        None if flags is None else split(flags, 1),
    )
    x = carries[0]
    lasts.append(last)
  return jnp.concatenate(lasts, -1), x


def in_turn(cell, call, params, bias, x, kernels, kernel, *state_and_flags):
  """Levels one after the other, in float32 but for outputs."""
  carry, restart, reset, mask = state_and_flags
  y = x if call.time_major else jnp.swapaxes(x, 0, 1)
  count, lasts = call.levels, []
  flip = lambda v: v[::-1] if call.reverse else v
  flags = [None if f is None else flip(f.T) for f in (reset, mask)]
  dtype = x.dtype
  for level in range(count):
    split = lambda v, axis, i=level: jnp.split(v, count, axis)[i]
    w = kernels[level].astype(dtype)
    gates = jnp.einsum(
        'tbi,gif->tbgf', y, w, preferred_element_type=jnp.float32
    )
    gates = gates.astype(dtype).astype(jnp.float32) + split(bias, -1)
    r = split(kernel, 1).astype(dtype).astype(jnp.float32)
    start_again = tuple(split(restart, -1))
    own = {name: split(v, -1) for name, v in params.items()}

    def step(state, xs, r=r, start_again=start_again, own=own):
      row, reset, mask = xs
      if reset is not None:
        choose = lambda a, b: jnp.where(reset[:, None], a, b)
        state = tuple(map(choose, start_again, state))
      h = state[0].astype(dtype).astype(jnp.float32)
      h = h.reshape(len(h), *r.shape[1:3])
      h_gates = jnp.einsum('bnd,gnde->gbne', h, r)
      h_gates = tuple(h_gates.reshape(*h_gates.shape[:2], -1))
      new = cell.update(own, tuple(jnp.moveaxis(row, 1, 0)), h_gates, state)
      if mask is not None:
        choose = lambda a, b: jnp.where(mask[:, None], a, b)
        new = tuple(map(choose, new, state))
      return new, new[0]

    last, hs = jax.lax.scan(
        step, tuple(split(carry, -1)), (flip(gates), *flags)
    )
    lasts.append(jnp.stack(last))
    y = flip(hs).astype(dtype)
  return jnp.concatenate(lasts, -1), (
      y if call.time_major else jnp.swapaxes(y, 0, 1)
  )


def drawn(types):
  """Returns arrays of some types: normal numbers, and flags."""
  rng = np.random.default_rng(0)

  def draw(t):
    if t.dtype == bool:
      return jnp.asarray(rng.random(t.shape) < 0.7)
    return jnp.asarray(0.5 * rng.standard_normal(t.shape), t.dtype)

  return jax.tree.map(draw, types)
