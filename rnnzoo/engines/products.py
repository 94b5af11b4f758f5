"""Matrix products: the input projection, and those with a recurrent kernel.

A recurrent kernel `[G, N, D, D]` is packed once, outside the time loop, into
`[N, D, G D]`, so that one product serves every gate. h and the gates stay
`[..., F]` with F = N D. A diagonal kernel (D = 1) is a multiplication, never a
product of 1 x 1 matrices. Operands keep the kernel's dtype and sums are float32
or wider: a bfloat16 recurrence needs them.
"""

from collections.abc import Sequence
import functools
import math
import string

import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo.engines import autodiff
from rnnzoo.engines import step_products

Array = jax.Array


def project_forward(
    weights: tuple[Array, Array | None], x: Array
) -> tuple[Array, ...]:
  """Returns the input gates W_g x + b_g, each [..., F], float32 or wider.

  Each gate has a product of its own: XLA's CPU backend is slow to slice a joint
  one.

  Args:
    weights: W, [G, I, F], and b, [G, F], or None; W is cast to x's dtype.
    x: [..., I].
  """
  kernel, bias = weights
  wide = promotion.wide(x.dtype)
  operand = kernel.astype(x.dtype)
  gates = [contract('...i,if->...f', x, w, wide) for w in operand]
  return add_bias(gates, bias)


def add_bias(gates: Sequence[Array], bias: Array | None) -> tuple[Array, ...]:
  """Returns gates, each [..., F], plus the bias [G, F], if there is one."""
  if bias is None:
    return tuple(gates)
  return tuple(
      gate + b.astype(gate.dtype) for gate, b in zip(gates, bias, strict=True)
  )


def as_stored(kernel: Array, x: Array) -> bool:
  """Returns whether a step should multiply by parameters as they are stored.

  One product of all gates needs either a copy of x for each gate or the gates'
  matrices side by side, and a program of one step makes that copy each time.
  XLA for CPUs moves a cast of parameters out of a loop over steps, and the copy
  with it. The algorithm BF16_BF16_F32 of JAX needs no casts, but XLA rounds in
  some products and not in others then: steps would differ from sequences.

  Args:
    kernel: the parameter, [G, ..., F].
    x: the rows of the step, [..., I], in the dtype of the product.
  """
  rows = math.prod(x.shape[:-1])
  few = isinstance(rows, int) and rows < kernel.shape[-1]
  return few and kernel.dtype == x.dtype


def project_step(
    weights: tuple[Array, Array | None], x: Array
) -> tuple[Array, ...]:
  """`project_forward` for one step, by one product.

  Args:
    weights: W, [G, I, F], and b, [G, F], or None.
    x: inputs, [..., I].
  """
  kernel, bias = weights
  wide = promotion.wide(x.dtype)
  operand = kernel.astype(x.dtype)
  if as_stored(kernel, x):
    x = jnp.broadcast_to(x, (len(kernel), *x.shape))
    gates = tuple(contract('g...i,gif->g...f', x, operand, wide))
  else:
    joint = contract('...i,if->...f', x, _side_by_side(operand), wide)
    gates = split(joint, len(kernel))
  return add_bias(gates, bias)


def project(
    weights: tuple[Array, Array | None], x: Array, *, joint: bool = False
) -> tuple[Array, ...]:
  """`project_forward` with a faster backward pass, for whole sequences.

  The gradient of W is xᵀ dgates: autodiff's order, the transpose of that, is
  slower on XLA's CPU backend.

  Args:
    weights: W, [G, I, F], and b, [G, F], or None.
    x: inputs, [..., I].
    joint: all gates share each product, which leaves XLA less to compile.
  """
  return _project(joint, (weights, x))


def _project_forward(joint, operands):
  (kernel, bias), x = operands
  if not joint:
    return project_forward((kernel, bias), x), operands
  product = project_forward((_joint_kernel(kernel), None), x)[0]
  return add_bias(split(product, len(kernel)), bias), operands


def _joint_kernel(kernel: Array) -> Array:
  """W [G, I, F] -> [1, I, G F]: one product for all gates."""
  joint = jnp.moveaxis(kernel, 0, 1).reshape(kernel.shape[1], -1)
  # An axis of its own: rows of `jax.vmap` that are over devices stay so.
  return joint[None]


def join(gates: Sequence[Array]) -> Array:
  """G arrays [..., F] -> [..., G F]."""
  return jnp.concatenate(gates, axis=-1)


def split(joint: Array, gates: int) -> tuple[Array, ...]:
  """[..., G F] -> G arrays [..., F], the inverse of `join`."""
  return tuple(jnp.split(joint, gates, axis=-1))


def _project_tangent(joint, operands, tangents):
  del joint
  return autodiff.pushforward(project_forward, operands, tangents)[1]


def _project_adjoint(joint, operands, d_gates):
  (kernel, bias), x = operands
  gates, _, features = kernel.shape
  wide = d_gates[0].dtype
  operand = kernel.astype(x.dtype)
  if joint:
    d_gates, operand = (join(d_gates),), _joint_kernel(operand)
  rows = [d.astype(x.dtype) for d in d_gates]
  d_kernel = jnp.concatenate(_sum_outer(x, rows, wide), axis=0)
  if joint:
    d_kernel = d_kernel.reshape(-1, gates, features).swapaxes(0, 1)
    d_kernel = settled(d_kernel)
  d_kernel = d_kernel.reshape(kernel.shape)
  d_x = _sum(
      [
          contract('...f,if->...i', d, w, wide)
          for d, w in zip(rows, operand, strict=True)
      ]
  )
  d_bias = None
  if bias is not None:
    leading = tuple(range(x.ndim - 1))
    sums = [jnp.sum(d.astype(wide), axis=leading) for d in rows]
    d_bias = join(sums).reshape(bias.shape).astype(bias.dtype)
  return (d_kernel.astype(kernel.dtype), d_bias), d_x.astype(x.dtype)


_project = autodiff.differentiable(
    _project_forward, _project_tangent, _project_adjoint
)


def project_levels(kernels: Array, x: Array) -> Array:
  """Returns the gates of several layers in one batched product, in x's dtype.

  Args:
    kernels: W of each layer, gates side by side, [L, I, G F]; cast to x's
      dtype. Sums of their gradients are float32 or wider.
    x: the inputs of each, [L, ..., I].
  """
  return _project_levels(None, (kernels, x))


def _levels(kernels: Array, x: Array) -> Array:
  return jnp.einsum('l...i,lif->l...f', x, kernels)


def _project_levels_forward(_, operands):
  kernels, x = operands
  cast = kernels.astype(x.dtype)
  return _levels(cast, x), (kernels, cast, x)


def _project_levels_tangent(_, saved, tangents):
  kernels, _, x = saved
  product = lambda kernels, x: _levels(kernels.astype(x.dtype), x)
  return autodiff.pushforward(product, (kernels, x), tangents)[1]


def _project_levels_adjoint(_, saved, d_gates):
  kernels, cast, x = saved
  wide = promotion.wide(x.dtype)
  lead = tuple(range(1, x.ndim - 1))
  d_kernels = jax.lax.dot_general(
      x, d_gates, ((lead, lead), ((0,), (0,))), preferred_element_type=wide
  )
  d_x = jnp.einsum('l...f,lif->l...i', d_gates, cast)
  return d_kernels.astype(kernels.dtype), d_x


_project_levels = autodiff.differentiable(
    _project_levels_forward, _project_levels_tangent, _project_levels_adjoint
)


def settled(x: Array) -> Array:
  """Returns x; on a CPU, in the layout of its axes.

  XLA's CPU backend would copy a transposed result twice, once in each layout.
  """
  if jax.default_backend() != 'cpu' or x.ndim < 2:
    return x
  # Not -1: a batch may be a symbol.
  merged = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  return jax.lax.optimization_barrier(merged).reshape(x.shape)


def pack(kernel: Array) -> Array:
  """[G, N, D, D] -> [N, D, G D]."""
  gates, heads, size, _ = kernel.shape
  return jnp.transpose(kernel, (1, 2, 0, 3)).reshape(heads, size, gates * size)


def pack_step(stored: bool, kernel: Array) -> Array:
  """`pack` for one step; where it is to be as stored, nothing is packed."""
  return kernel if stored and kernel.shape[-1] > 1 else _side_by_side(kernel)


def _side_by_side(kernel: Array) -> Array:
  """[G, ..., I, F] -> [..., I, G F], in a program of one step.

  In a loop over steps the parameter does not change. XLA for CPUs moves a
  concatenation of the gates out of that loop, and no transpose. XLA for GPUs
  moves neither, so the copy runs in every step: as one kernel where it is a
  transpose, and as G + 1 where it is a concatenation.
  """
  return jax.lax.platform_dependent(
      kernel,
      cpu=lambda kernel: join(list(kernel)),
      default=lambda kernel: jnp.moveaxis(kernel, 0, -2).reshape(
          *kernel.shape[1:-1], -1
      ),
  )


def unpack(packed: Array, gates: int) -> Array:
  """[N, D, G D] -> [G, N, D, D], the inverse of `pack`."""
  heads, size, _ = packed.shape
  return jnp.transpose(packed.reshape(heads, size, gates, size), (2, 0, 1, 3))


def multiply(packed: Array, h: Array) -> tuple[Array, ...]:
  """Returns R_g h for every gate g, each [..., F], in h's dtype.

  Args:
    packed: kernel as `pack` or `pack_step` returns it.
    h: [..., F].
  """
  if packed.ndim == 4:
    return _multiply_step(packed, h)
  heads, size, width = packed.shape
  if size == 1:
    return tuple(packed[:, 0, g].astype(h.dtype) * h for g in range(width))
  operand = h.astype(packed.dtype)
  if heads == 1:
    return split(_multiply_rows(operand, packed[0], h.dtype), width // size)
  operand = operand.reshape(*h.shape[:-1], heads, size)
  out = contract('...nd,ndg->...ng', operand, packed, h.dtype)
  return tuple(gate.reshape(h.shape) for gate in split(out, width // size))


def _multiply_step(kernel: Array, h: Array) -> tuple[Array, ...]:
  gates, heads, size, _ = kernel.shape
  operand = h.astype(kernel.dtype).reshape(*h.shape[:-1], heads, size)
  operand = jnp.moveaxis(operand, -2, 0)
  operand = jnp.broadcast_to(operand, (gates, *operand.shape))
  out = contract('gn...d,gnde->gn...e', operand, kernel, h.dtype)
  return tuple(jnp.moveaxis(gate, 0, -2).reshape(h.shape) for gate in out)


def transpose(packed: Array) -> Array:
  """[N, D, G D] -> [N, G D, D], for `multiply_transposed`."""
  return settled(jnp.swapaxes(packed, 1, 2))


def multiply_transposed(transposed: Array, gates: Sequence[Array]) -> Array:
  """Returns the sum over g of R_gᵀ gates_g, [..., F]: the adjoint in h."""
  heads, _, size = transposed.shape
  shape, dtype = gates[0].shape, gates[0].dtype
  if size == 1:
    return _sum(
        [transposed[:, g, 0].astype(dtype) * x for g, x in enumerate(gates)]
    )
  if heads == 1:
    operand = join(gates).astype(transposed.dtype)
    return _multiply_rows(operand, transposed[0], dtype)
  operand = _join_heads(gates, heads, size).astype(transposed.dtype)
  out = contract('...ng,ngd->...nd', operand, transposed, dtype)
  return out.reshape(shape)


def outer(
    packed: Array, h: Array, gates: Sequence[Array], *, joint: bool = False
) -> Array:
  """Sums h gates_g^T over all leading axes: the adjoint in the packed kernel.

  Args:
    packed: [N, D, G D], for its shape and the dtype of the operands.
    h: [..., F].
    gates: cotangents of `multiply`'s result, each [..., F].
    joint: all gates have one product.

  Returns:
    [N, D, G D] in h's dtype.
  """
  heads, size, _ = packed.shape
  # No two axes are merged: time is not sharded over devices and batch may be.
  leading = tuple(range(h.ndim - 1))
  if size == 1:
    sums = [jnp.sum(h * x, axis=leading) for x in gates]
    return jnp.stack(sums, axis=-1)[:, None]
  left = h.astype(packed.dtype)
  if heads == 1:
    rows = [join(gates)] if joint else gates
    rows = [x.astype(packed.dtype) for x in rows]
    blocks = _sum_outer(left, rows, h.dtype)
    return jnp.concatenate(blocks, axis=-1)[None]
  left = left.reshape(*h.shape[:-1], heads, size)
  right = _join_heads(gates, heads, size).astype(packed.dtype)
  axes = string.ascii_lowercase[: len(leading)]
  return contract(f'{axes}ND,{axes}NG->NDG', left, right, h.dtype)


def _sum_outer(left: Array, rights: Sequence[Array], dtype) -> list[Array]:
  """Returns leftᵀ right, summed over all leading axes, for each right."""
  columns = jnp.moveaxis(left, -1, 0)
  if jax.default_backend() == 'cpu':
    # XLA's CPU backend would transpose inside each product, and slowly.
    columns = jax.lax.optimization_barrier(columns)
  axes = string.ascii_lowercase[: left.ndim - 1]
  subscripts = f'I{axes},{axes}G->IG'
  return [contract(subscripts, columns, right, dtype) for right in rights]


def _multiply_rows(x: Array, matrix: Array, dtype) -> Array:
  """[..., I] times [I, G], summed and returned in `dtype`."""
  if step_products.suits(x, matrix, dtype):
    return step_products.multiply(x.astype(dtype), matrix.astype(dtype))
  return contract('...i,ig->...g', x, matrix, dtype)


def contract(subscripts: str, a: Array, b: Array, dtype) -> Array:
  """`einsum` of two arrays, summed and returned in `dtype`."""
  if jax.default_backend() == 'cpu':
    # Compiled by jax 0.10.2 for a CPU, some products of bfloat16 operands with
    # float32 sums are not implemented. The values are exact in float32.
    a, b = a.astype(dtype), b.astype(dtype)
  return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def _sum(arrays: Sequence[Array]) -> Array:
  return functools.reduce(jnp.add, arrays)


def _join_heads(gates: Sequence[Array], heads: int, size: int) -> Array:
  """G arrays [..., F] -> [..., N, G D]."""
  return join([x.reshape(*x.shape[:-1], heads, size) for x in gates])
