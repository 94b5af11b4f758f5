"""The error for a second, or a forward-mode, derivative of a kernel."""

import jax


@jax.custom_jvp
def differentiable_once(operands):
  """Returns the operands; differentiating it raises NotImplementedError."""
  return operands


@differentiable_once.defjvp
def _differentiable_once_jvp(primals, tangents):
  del primals, tangents
  raise NotImplementedError(
      "GPU kernels have first derivatives only, in reverse mode."
      " A loop by implementation='scan' has second derivatives too, in both"
      " modes."
  )
