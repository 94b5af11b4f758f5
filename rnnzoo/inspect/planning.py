"""`rnnzoo.dryrun`: kernels and messages of a layer, without running anything.

The layer is traced, and compiled where its devices are here. The choice of a
path is noted where it is made, in `engines/choice.py`; messages between
devices are read from the compiled program.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import math
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import choice as choice_lib
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

_KERNELS = ('mpmd_map', 'core_map', 'pallas_call')
# Names of a collective in a traced program and in a compiled one.
_TRACED = {
    'psum': 'all-reduce',
    'psum_invariant': 'all-reduce',
    'pmax': 'all-reduce',
    'all_gather': 'all-gather',
    'all_to_all': 'all-to-all',
    'ppermute': 'collective-permute',
    'reduce_scatter': 'reduce-scatter',
}
_COMPILED = sorted(set(_TRACED.values()))
_BITS = {'pred': 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
  """A collective of a program.

  Attributes:
    kind: 'all-reduce', 'all-gather', 'all-to-all', 'collective-permute' or
      'reduce-scatter'.
    bytes: size of its result on a device.
    in_loop: whether it is inside of a loop or branch, and may be sent often.
  """

  kind: str
  bytes: int
  in_loop: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
  """The plan of a layer's run. `str` of it is the text to read.

  Attributes:
    title: first line of the text: layer, devices and mesh.
    inputs: type of x, and the shape of a device's part.
    choices: the path of every recurrence, from the input up.
    kernels: GPU kernels by name, each with how often a device runs it.
    messages: messages that devices send to each other.
    compiled: whether `messages` were read from a compiled program. Otherwise
      they come from the traced program: XLA may join or drop some, and on Auto
      axes it adds its own.
    temp_bytes: memory that the program needs on a device besides its arguments
      and results; None where it was not compiled.
  """

  title: str
  inputs: str
  choices: tuple[choice_lib.Choice, ...]
  kernels: dict[str, int]
  messages: tuple[Message, ...]
  compiled: bool
  temp_bytes: int | None

  def __str__(self) -> str:
    lines = [self.title, self.inputs, 'Paths, from the input up:']
    for choice in self.choices:
      layers = f', {choice.at_once} layers at the same time'
      over = (f', {part} over {axes}' for part, axes in choice.over)
      lines.append(
          f'  {choice.cell} over {list(choice.shape)} on each device:'
          f' {choice.path!r}{layers * (choice.at_once > 1)}{"".join(over)}'
      )
      lines += [
          f'    {path!r} is passed over: {reason}'
          for path, reason in choice.passed_over
      ]
    where = ' on each device:' if self.kernels else ': none.'
    lines.append(f'GPU kernels{where}')
    lines += [f'  {n} x {name}' for name, n in self.kernels.items()]
    where = f'in the {"compiled" if self.compiled else "traced"} program'
    where = f', {where}:' if self.messages else f': none {where}.'
    lines.append(f'Messages between devices{where}')
    for message in self.messages:
      often = ', inside of a loop or branch' if message.in_loop else ''
      lines.append(f'  {message.kind} of {message.bytes:,} bytes{often}')
    if not self.compiled:
      lines.append(
          '  The devices are not here to compile for. XLA may join or drop'
          ' messages, and adds its own on Auto axes.'
      )
    if self.temp_bytes is not None:
      lines.append(
          f'Memory besides arguments and results: {self.temp_bytes:,} bytes on'
          ' each device.'
      )
    return '\n'.join(lines)


def dryrun(
    layer: sequence_layer.SequenceLayer,
    x: Any,
    *,
    gradient: bool = True,
    **call: Any,
) -> DryRun:
  """Says which paths and kernels a layer would run, and the messages sent.

  Nothing is computed and no array is made.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> stack = rnnzoo.Stack(rnnzoo.GRU, 3, 8, num_layers=2, rngs=nnx.Rngs(0))
  >>> x = jax.ShapeDtypeStruct((2, 5, 3), jnp.float32)
  >>> print(rnnzoo.dryrun(stack, x, gradient=False))   # doctest: +ELLIPSIS
  Stack, forward, on 1 ...
  x: float32[2,5,3]
  Paths, from the input up:
    GRUCell over [2, 5, 3] on each device: 'scan'
    GRUCell over [2, 5, 8] on each device: 'scan'
  GPU kernels: none.
  Messages between devices: none in the compiled program.
  Memory besides arguments and results: ... bytes on each device.

  Args:
    layer: a layer, a `Stack`, a `Bidirectional`. Parameters that are sharded
      over x's mesh, or a mesh with its axes, stay so; all others count as
      replicated.
    x: an array, or a `jax.ShapeDtypeStruct`, [..., time, in_features]; its
      sharding, if any, names the mesh. Devices that are not here may be in a
      `jax.sharding.AbstractMesh`, whose `abstract_device` says which they are.
      An x without a mesh is replicated over the mesh around this call.
    gradient: include the backward pass, of parameters and x.
    **call: further arguments of the layer's call: initial_carry, reset and so
      on, arrays or `jax.ShapeDtypeStruct`; bools as they are.

  Returns:
    The plan. Print it.

  Raises:
    ValueError: layer, x or an argument is not valid.
    NotImplementedError: the layer's implementation cannot run this.
  """
  if not isinstance(layer, sequence_layer.SequenceLayer):
    raise ValueError(
        f'layer must be an rnnzoo.SequenceLayer, got {checks.describe(layer)}.'
    )
  settings.boolean(gradient, 'gradient')
  initializers.check_rngs(call.get('rngs'), None)
  flags = {k: v for k, v in call.items() if isinstance(v, bool)}
  arrays = {k: v for k, v in call.items() if not isinstance(v, bool)}
  for name, value in {'x': x, **arrays}.items():
    if not all(hasattr(leaf, 'shape') for leaf in jax.tree.leaves(value)):
      raise ValueError(
          f'{name} must be an array or a jax.ShapeDtypeStruct, or a tree of'
          f' them, got {checks.describe(value)}.'
      )
  mesh = _target(x)
  graphdef, *states = nnx.split(layer, nnx.Param, ...)
  params, rest, arrays = jax.tree.map(
      lambda a: _struct(a, mesh), (*states, arrays)
  )
  x = _struct(x, mesh)

  def forward(params, x, rest, arrays):
    # Variables of this trace: a call may change averages and random numbers.
    rest, arrays = jax.tree.map(lambda a: a, (rest, arrays))
    model: Any = nnx.merge(graphdef, params, rest)
    return model(x, **arrays, **flags)

  def loss(*operands):
    return jnp.sum(forward(*operands).astype(jnp.float32))

  function = jax.grad(loss, (0, 1)) if gradient else forward
  with contextlib.ExitStack() as stack:
    if isinstance(mesh, AbstractMesh):
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    choices = stack.enter_context(choice_lib.noted())
    traced: Any = jax.jit(function).trace(params, x, rest, arrays)
  messages, kernels = _read(traced.jaxpr.jaxpr)
  temp_bytes = None
  is_here = not isinstance(mesh, AbstractMesh)
  if is_here:
    compiled = traced.lower().compile()
    messages = list(sent(compiled.as_text()))
    memory = compiled.memory_analysis()
    temp_bytes = getattr(memory, 'temp_size_in_bytes', None)
  return DryRun(
      title=_title(layer, mesh, gradient),
      inputs=_inputs(x),
      choices=tuple(choices),
      kernels=kernels,
      messages=tuple(messages),
      compiled=is_here,
      temp_bytes=temp_bytes,
  )


def _mesh(x: Any) -> Any:
  """Returns the mesh that x is sharded over, or None."""
  sharding = getattr(x, 'sharding', None)
  return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _target(x: Any) -> Any:
  """Returns the mesh that x is sharded over, with its devices, or None."""
  try:
    here = jax.sharding.get_mesh()  # By `jax.set_mesh`: its devices are here.
  except ValueError as error:
    raise ValueError(
        'dryrun traces a program of its own, which it cannot inside of jax.jit,'
        ' jax.grad and jax.vmap; a call outside would work, with x as a'
        ' jax.ShapeDtypeStruct.'
    ) from error
  mesh, around = _mesh(x), jax.sharding.get_abstract_mesh()
  if mesh is None and around != here.abstract_mesh:
    return around
  return mesh


def _struct(array: Any, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns the type of an array, replicated unless it is over the mesh."""
  sharding: Any = None
  if mesh is not None:
    own = _mesh(array)
    alike = own is not None and _axes(own) == _axes(mesh)
    # One of the two meshes may have no devices.
    spec = array.sharding.spec if alike else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _axes(mesh: Any) -> list[tuple[str, int, AxisType]]:
  """Returns name, size and type of the axes of a mesh."""
  sizes = mesh.shape.items()
  pairs = zip(sizes, mesh.axis_types, strict=True)
  return [(name, size, axis_type) for (name, size), axis_type in pairs]


def _title(layer: Any, mesh: Any, gradient: bool) -> str:
  """Names the layer, the direction, the devices and the mesh."""
  way = 'forward and backward' if gradient else 'forward'
  abstract = mesh.abstract_device if isinstance(mesh, AbstractMesh) else None
  kind = abstract.device_kind if abstract else jax.devices()[0].device_kind
  title = f'{type(layer).__name__}, {way}, on'
  if mesh is None or not mesh.axis_names:
    return f'{title} 1 x {kind}'
  axes = ', '.join(f'{name}={size} ({t.name})' for name, size, t in _axes(mesh))
  return f'{title} {mesh.size} x {kind}, mesh {axes}'


def _inputs(x: jax.ShapeDtypeStruct) -> str:
  """Describes x, and a device's part of it."""
  text = f'x: {x.dtype}[{",".join(map(str, x.shape))}]'
  if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh.empty:
    return text
  own = list(x.sharding.shard_shape(x.shape))
  return f'{text} as {x.sharding.spec}, {own} on each device'


def _read(jaxpr: Any) -> tuple[list[Message], dict[str, int]]:
  """Returns the messages and the kernels of a traced program."""
  messages: list[Message] = []
  kernels: dict[str, int] = {}

  def visit(jaxpr, in_loop):
    for equation in jaxpr.eqns:
      name = equation.primitive.name
      if name in _KERNELS:
        kernel = str(equation.params.get('name') or 'kernel')
        kernels[kernel] = kernels.get(kernel, 0) + 1
        continue
      if name in _TRACED:
        size = sum(
            math.prod(v.aval.shape) * v.aval.dtype.itemsize
            for v in equation.outvars
        )
        messages.append(
            Message(kind=_TRACED[name], bytes=size, in_loop=in_loop)
        )
      inside = in_loop or name in ('scan', 'while', 'cond')
      for inner in jax.tree.leaves(
          list(equation.params.values()),
          is_leaf=lambda p: hasattr(p, 'eqns') or hasattr(p, 'jaxpr'),
      ):
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          visit(inner, inside)

  visit(jaxpr, False)
  return messages, kernels


def sent(text: str) -> Iterator[Message]:
  """Yields the messages of a compiled program."""
  in_loop = False
  for line in text.splitlines():
    if line and not line[0].isspace():
      # Loops and branches are computations of their own.
      in_loop = not line.startswith('ENTRY')
    match = re.search(rf' ({"|".join(_COMPILED)})(-start)?\(', line)
    if not match:
      continue
    types = r'([a-z]+(\d*)\w*)\[([\d,]*)\]'
    shapes = re.findall(types, line[: match.start()])
    if match[2] and match[1] in ('all-gather', 'collective-permute'):
      shapes = shapes[len(shapes) // 2 :]  # The first half is the operands.
    # The bits of a number are the first digits of its type, 'f32' for instance.
    size = sum(
        _BITS.get(dtype, int(f'0{bits}'))
        * math.prod(map(int, filter(None, dims.split(','))))
        for dtype, bits, dims in shapes
    )
    yield Message(kind=match[1], bytes=size // 8, in_loop=in_loop)
