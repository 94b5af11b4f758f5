"""Kernels have first derivatives only, in reverse mode, and say so."""

import jax


@jax.custom_jvp
def differentiable_once(operands):
  """Returns the operands; says so where they are differentiated."""
  return operands


@differentiable_once.defjvp
def _differentiable_once_jvp(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
      "GPU kernels have first derivatives only, in reverse mode."
      " rnnzoo's implementation='scan' has second derivatives too."
  )
