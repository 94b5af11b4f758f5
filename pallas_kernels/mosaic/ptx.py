"""PTX for single threads, where Pallas speaks of whole warpgroups.

Kernels for dense recurrences place every value themselves: which thread holds
which unit of which batch row follows from the tensor cores' fragments. To
Pallas, a value is an array [n * 128] of a warpgroup, thread i holding elements
i, 128 + i and so on, so that `jnp` works on it. What Pallas has no word for is
PTX here: a template with %0, %1, ... for the results and then the operands,
emitted once for each of the n elements of a thread. The templates are in
`instructions.py` and `waiting.py`.
"""

from collections.abc import Sequence
import math
import re
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import vector
import numpy as np

Array = jax.Array
Ref = Any

# Threads of a warpgroup.
LANES = 128


def layout(count: int) -> Any:
  """Returns the layout of `count` elements a thread."""
  return plgpu.Layout.WG_STRIDED((count * LANES,), vec_size=1)


def per_thread(x: Array) -> int:
  """Returns how many elements each thread holds."""
  return math.prod(x.shape) // LANES if x.ndim else 0


def full(count: int, value, dtype=jnp.float32) -> Array:
  """Returns `count` elements a thread, all equal."""
  return plgpu.layout_cast(
      jnp.full((count * LANES,), value, dtype), layout(count)
  )


def emit(
    template: str,
    results: Sequence[Any],
    *operands: Array | Ref | int,
    count: int = 1,
    pure: bool = False,
) -> tuple[Array, ...]:
  """Emits PTX for every element of a thread.

  Args:
    template: the code; %0, %1, ... are the results, then the operands. %% is a
      label that is unique to each copy.
    results: dtypes, float32 or int32.
    *operands: arrays [count * 128], [128] or [] of float32 or int32, which are
      repeated as needed; references, which become addresses; or numbers.
    count: elements a thread.
    pure: whether it may be dropped, merged and moved.

  Returns:
    Arrays [count * 128], one for each of `results`.
  """
  kinds: list[str] = []
  given: list[Any] = []
  types: list[Any] = []
  for x in operands:
    if isinstance(x, (int, np.integer)):
      x = jnp.int32(x)
    given.append(x)
    if _is_ref(x):
      kinds.append('ref')
      types.append(plgpu.RefType())
    elif not x.ndim:
      kinds.append('scalar')
      types.append(plgpu.Layout.WG_SPLAT)
    else:
      kinds.append('array')
      types.append(layout(per_thread(x)))
  types = [t(()) if t is plgpu.Layout.WG_SPLAT else t for t in types]
  out = tuple(
      plgpu.ShapeDtypeStruct((count * LANES,), d, layout=layout(count))
      for d in results
  )

  @plgpu.inline_mgpu(arg_types=tuple(types), return_type=out)
  def inline(_, *args):
    values = [_scalars(x, kind) for x, kind in zip(args, kinds, strict=True)]
    columns: list[list[ir.Value]] = [[] for _ in results]
    for i in range(count):
      row = [v[i % len(v)] for v in values]
      outs = _inline(template, [_type(d) for d in results], row, pure)
      for column, x in zip(columns, outs, strict=True):
        column.append(x)
    return tuple(
        _array(column, dtype)
        for column, dtype in zip(columns, results, strict=True)
    )

  return inline(*given)


def _is_ref(x) -> bool:
  # Under vmap it is one with an index applied, which has no type of its own.
  return hasattr(x, 'transforms') or hasattr(jax.typeof(x), 'inner_aval')


def _type(dtype) -> ir.Type:
  if jnp.dtype(dtype) == jnp.float32:
    return ir.F32Type.get()
  return ir.IntegerType.get_signless(32)


def _scalars(x, kind: str) -> list[ir.Value]:
  """Returns the values of one operand, one for each element of a thread."""
  if kind == 'ref':
    pointer = mgpu_utils.memref_ptr(x)
    shared = mgpu_utils.is_smem_ref(x)
    bits = ir.IntegerType.get_signless(32 if shared else 64)
    return [llvm.ptrtoint(bits, pointer)]
  values = []
  for register in x.registers.flat:
    if isinstance(register.type, ir.VectorType):
      register = vector.extract(
          register,
          dynamic_position=[],
          static_position=ir.DenseI64ArrayAttr.get([0]),
      )
    values.append(register)
  return values


def _inline(template, result_types, operands, pure) -> list[ir.Value]:
  constraints = ['=' + _letter(t) for t in result_types]
  constraints += [_letter(x.type) for x in operands]
  if not pure:
    constraints.append('~{memory}')
  text = re.sub(r'%(\d+)', r'$\1', template).replace('%%', '${:uid}')
  if not result_types:
    llvm.inline_asm(
        ir.Type.parse('!llvm.void'),
        operands,
        text,
        ','.join(constraints),
        has_side_effects=True,
    )
    return []
  struct = result_types[0]
  if len(result_types) > 1:
    struct = llvm.StructType.get_literal(result_types)
  out: Any = llvm.inline_asm(
      struct,
      operands,
      text,
      ','.join(constraints),
      has_side_effects=not pure,
  )
  if len(result_types) == 1:
    return [out]
  return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(result_types)]


def _letter(t: ir.Type) -> str:
  if isinstance(t, ir.F32Type):
    return 'f'
  return 'l' if ir.IntegerType(t).width == 64 else 'r'


def _array(values: Sequence[ir.Value], dtype) -> mgpu.FragmentedArray:
  element = _type(dtype)
  registers = [
      vector.broadcast(ir.VectorType.get((1,), element), x) for x in values
  ]
  is_float = jnp.dtype(dtype) == jnp.float32
  return mgpu.FragmentedArray(
      _registers=np.asarray(registers, dtype=object),
      _layout=mgpu.WGStridedFragLayout((len(values) * LANES,), 1),
      _is_signed=None if is_float else True,
  )


def stack(arrays: Sequence[Array]) -> Array:
  """Joins what threads hold, one array after the other."""
  counts = [per_thread(x) for x in arrays]
  if len(arrays) == 1:
    return arrays[0]
  total = sum(counts)
  dtype = arrays[0].dtype

  @plgpu.inline_mgpu(
      arg_types=tuple(layout(n) for n in counts),
      return_type=plgpu.ShapeDtypeStruct(
          (total * LANES,), dtype, layout=layout(total)
      ),
  )
  def inline(_, *args):
    values = [v for x in args for v in _scalars(x, 'array')]
    return _array(values, dtype)

  return inline(*arrays)


def unstack(array: Array) -> list[Array]:
  """Returns the elements that threads hold, each [128]; undoes `stack`."""
  count = per_thread(array)
  if count == 1:
    return [array]

  @plgpu.inline_mgpu(
      arg_types=(layout(count),),
      return_type=tuple(
          plgpu.ShapeDtypeStruct((LANES,), array.dtype, layout=layout(1))
          for _ in range(count)
      ),
  )
  def inline(_, x):
    return tuple(_array([v], array.dtype) for v in _scalars(x, 'array'))

  return list(inline(array))


def thread() -> Array:
  """Returns each thread's index in its warpgroup, int32 [128]."""
  code = '{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 %0, t, 127; }'
  return emit(code, [jnp.int32], pure=True)[0]
