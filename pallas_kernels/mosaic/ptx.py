"""PTX for single threads, where Pallas speaks of whole warpgroups.

Kernels for dense recurrences place every value themselves: the tensor cores'
fragments decide which thread holds which unit of which batch row. To Pallas, a
value is an array [n * 128] of a warpgroup, and thread i holds the elements i,
128 + i and so on; `jnp` works on it. Pallas has no name for many instructions.
These are PTX: code with a %name for each result and operand, emitted once for
each of the n elements of a thread. The code is in `memory`, `instructions`,
`sync` and `mailbox`.
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import memref
from jaxlib.mlir.dialects import vector
import numpy as np

Array = jax.Array
Ref = Any

# Threads of a warpgroup.
LANES = 128

# Names of the 16-bit types in PTX.
SHORT = {'bfloat16': 'bf16', 'float16': 'f16'}

# Names with % that are PTX's own.
_SPECIAL_REGISTERS = ('clock', 'tid')


def layout(count: int) -> Any:
  """Returns the layout of `count` elements a thread."""
  return plgpu.Layout.WG_STRIDED((count * LANES,), vec_size=1)


def per_thread(x: Array) -> int:
  """Returns the number of elements of each thread."""
  return math.prod(x.shape) // LANES if x.ndim else 0


def full(count: int, value, dtype=jnp.float32) -> Array:
  """Returns `count` elements a thread, all equal."""
  return spread(jnp.full((count * LANES,), value, dtype), count)


def spread(x: Array, count: int) -> Array:
  """Returns x, `count` elements a thread, in the layout of threads."""
  return plgpu.layout_cast(x, layout(count))


def emit(
    code: str,
    results: Mapping[str, Any],
    operands: Mapping[str, Array | Ref | int],
    *,
    count: int = 1,
    pure: bool = False,
) -> tuple[Array, ...]:
  """Emits PTX for every element of a thread.

  Args:
    code: PTX, with %name for results and operands. %% stands for a number that
      is unique to each copy, for labels.
    results: dtypes by name, float32 or int32.
    operands: by name: arrays [count * 128], [128] or [] of float32 or int32,
      which are repeated as needed; references, which become addresses; or
      numbers.
    count: elements a thread.
    pure: whether the compiler may drop, merge and move the code.

  Returns:
    Arrays [count * 128], one for each of `results`.
  """
  code = _numbered(code, (*results, *operands))
  dtypes = list(results.values())
  kinds: list[str] = []
  given: list[Any] = []
  types: list[Any] = []
  for x in operands.values():
    if isinstance(x, (int, np.integer)):
      x = jnp.int32(x)
    given.append(x)
    if _is_ref(x):
      kinds.append('ref')
      types.append(plgpu.RefType())
    elif x.dtype not in (jnp.float32, jnp.int32):
      raise TypeError(f'PTX got {x.dtype}, want float32 or int32, in {code!r}.')
    elif not x.ndim:
      kinds.append('scalar')
      types.append(plgpu.Layout.WG_SPLAT)
    else:
      kinds.append('array')
      types.append(layout(per_thread(x)))
  types = [t(()) if t is plgpu.Layout.WG_SPLAT else t for t in types]
  out = tuple(
      plgpu.ShapeDtypeStruct((count * LANES,), d, layout=layout(count))
      for d in dtypes
  )

  @plgpu.inline_mgpu(arg_types=tuple(types), return_type=out)
  def inline(_, *args):
    values = [_scalars(x, kind) for x, kind in zip(args, kinds, strict=True)]
    columns: list[list[ir.Value]] = [[] for _ in dtypes]
    for i in range(count):
      row = [v[i % len(v)] for v in values]
      outs = _inline(code, [_type(d) for d in dtypes], row, pure)
      for column, x in zip(columns, outs, strict=True):
        column.append(x)
    return tuple(
        fragmented(column, dtype)
        for column, dtype in zip(columns, dtypes, strict=True)
    )

  return inline(*given)


def _numbered(code: str, names: Sequence[str]) -> str:
  """Replaces %name by the position of that operand, as LLVM writes it."""

  def replace(match):
    name = match[1]
    if name is None:
      return '${:uid}'
    if name in _SPECIAL_REGISTERS:
      return match[0]
    if name not in names:
      raise ValueError(f'%{name} must be one of {tuple(names)}, in {code!r}.')
    return f'${names.index(name)}'

  return re.sub(r'%(?:%|([a-z_]\w*))', replace, code)


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
    if isinstance(x.type.element_type, ir.ComplexType):
      # Mosaic knows no complex numbers; in device memory they are pairs.
      address = memref.extract_aligned_pointer_as_index(x)
      _, offset, *_ = memref.extract_strided_metadata(x)
      size = mgpu_utils.c(8, ir.IndexType.get())
      address = arith.addi(address, arith.muli(offset, size))
      return [arith.index_cast(ir.IntegerType.get_signless(64), address)]
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


def _inline(code, result_types, operands, pure) -> list[ir.Value]:
  constraints = ['=' + _letter(t) for t in result_types]
  constraints += [_letter(x.type) for x in operands]
  if not pure:
    constraints.append('~{memory}')
  if not result_types:
    llvm.inline_asm(
        ir.Type.parse('!llvm.void'),
        operands,
        code,
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
      code,
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


def fragmented(values: Sequence[ir.Value], dtype) -> mgpu.FragmentedArray:
  """Returns an array of a thread's own elements, inside `inline_mgpu`."""
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
  """Joins the elements of each thread, array by array."""
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
    return fragmented(values, dtype)

  return inline(*arrays)


def unstack(array: Array) -> list[Array]:
  """Returns each element of a thread as an array [128]; undoes `stack`."""
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
    return tuple(fragmented([v], array.dtype) for v in _scalars(x, 'array'))

  return list(inline(array))


def thread() -> Array:
  """Returns each thread's index in its warpgroup, int32 [128]."""
  code = '{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 %lane, t, 127; }'
  return emit(code, {'lane': jnp.int32}, {}, pure=True)[0]
