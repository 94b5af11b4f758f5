"""Names of the references that the kernel `projected` is given."""

from typing import Any, NamedTuple

Ref = Any


class Buffers(NamedTuple):
  """Shared memory of a CTA.

  Attributes:
    x_ring: [stages, block, depth].
    kernel_ring: [stages, depth, G LANES].
    gates_buffer: pre-activations of both halves of a block.
    h_buffer: h of half a block.
    arrived: mbarriers, a slot of both rings is full.
    consumed: mbarriers, a slot of both rings is free.
    computed: mbarriers, half of `gates_buffer` is full.
    scanned: mbarriers, half of `gates_buffer` is free.
  """

  x_ring: Ref
  kernel_ring: Ref
  gates_buffer: Ref
  h_buffer: Ref
  arrived: Ref
  consumed: Ref
  computed: Ref
  scanned: Ref


class Operands(NamedTuple):
  """References to device memory that are read.

  Attributes:
    theta: [rows, Fp].
    x: [B, T, I].
    kernel: W, as `projected` arranges it.
    carry: [B, Fp].
    restart: [B, Fp].
    flags: int32 [B, T].
  """

  theta: Ref
  x: Ref
  kernel: Ref
  carry: Ref
  restart: Ref
  flags: Ref


class Results(NamedTuple):
  """References to device memory that are written.

  Attributes:
    h: [B, T, F].
    last: h after the last step, [B, Fp].
    chain: h after every block, for `projected_blocks.Chain`.
    gates: the pre-activations, [B, T, G, F], or None.
  """

  h: Ref
  last: Ref
  chain: Ref
  gates: Ref | None = None
