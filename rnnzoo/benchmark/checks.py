"""Compares results with a reference, and says how large an error may be.

The reference is the 'scan' path in float64, on the result's rounded inputs and
on its device.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import problems

# Parts of names of layers whose derivative jumps, by a relu.
KINKED = ('IndRNN', 'IRevRNN')

# By name of an array: ||y - expected|| / ||expected||, and its size.
Errors = Mapping[str, tuple[float, int]]

# Errors of arrays of fewer elements are chance, and a sum of all steps may
# cancel.
_FEW = 16


@dataclasses.dataclass(frozen=True)
class Limits:
  """Largest relative errors of a correct result.

  Attributes:
    outputs: limit for arrays that the forward pass returns.
    few: factor of both limits for arrays of few elements.
    ratio: the error over the error of 'scan' in the case's dtype; None where
      'scan' is no yardstick.
  """

  outputs: float
  gradients: float
  few: float = 1.0
  ratio: float | None = None


def limits(problem: problems.Problem, implementation: str) -> Limits:
  """Returns how large errors may be that only rounding makes.

  Rounding errors of a thousand dependent steps cannot be derived closely. If
  parameters are drawn such that errors do not grow, the error of 'scan' in the
  case's dtype is the yardstick, beside fixed limits.
  """
  case = problem.case
  wide = case.dtype == 'float32'
  kinked = any(name in case.layer for name in KINKED)
  if problem.traffic and not case.drawn:
    # No products; state and sums are float32. Results in bfloat16 are rounded
    # by up to 2^-9, and gradients are of a rounded h; 'scan' of a diagonal cell
    # rounds h at each step, and a memory of hundreds of steps adds that up.
    smooth, jump = (2e-5, 2e-3) if wide else (1e-2, 0.15)
    return Limits(smooth, jump if kinked else smooth)
  smooth = rounding(case.dtype, case.shape.time)
  baseline = implementation in baselines.NAMES
  if case.layer.endswith(problems.STEP):
    # The answer is the next input: roundings of both layers. A carry of other
    # people's cells has 16 bits.
    smooth *= 4 if baseline else 2
  if not case.drawn:
    return Limits(smooth, rounding(case.dtype, case.shape.time, kinked))
  # A layer's kernels keep its input gates in 16 bits; 'scan' computes them in
  # float32.
  comparable = not baseline and (wide or case.projection == 'without')
  ratio = 1.25 if comparable else None
  if wide:
    return Limits(smooth, smooth, 5, ratio)
  if 'IRevRNN' in case.layer:  # Forgets nothing, so roundings add up over time.
    return Limits(smooth, smooth, 5, 1.25)
  # Other people's loops add up the recurrent kernel's gradient in 16 bits.
  outputs, gradients = (2e-2, 0.2) if baseline else (1e-2, 2e-2)
  return Limits(outputs, gradients, 5, ratio)


def rounding(dtype: str, terms: int, kinked: bool = False) -> float:
  """Returns the largest relative error that rounding explains.

  A wrong equation is off by much more, and the tests are stricter. State and
  sums are float32: some ten roundings a step, each of at most 2^-24, add up
  like a random walk where a cell keeps its memory, and gradients cancel: 50
  2^-23 sqrt(T), where T may be the `terms` of a sum. Operands of products may
  have fewer digits, and h is rounded anew at each step: 4 of their units, u. In
  the gradient of a `kinked` layer, a share of about u of all elements falls on
  the wrong side of a jump: its relative error is the root of that share.
  """
  state = 50 * 2.0**-23 * terms**0.5
  unit = float(jnp.finfo(dtype).eps)
  # For float32 operands, JAX's default precision is TF32 on a GPU and bfloat16
  # on a TPU.
  if dtype == 'float32':
    unit = 2.0 ** -{'cpu': 23, 'gpu': 10}.get(jax.default_backend(), 7)
  return state + ((4 * unit) ** 0.5 if kinked else 4 * unit)


def errors(results: Sequence[Any], expected: Mapping[str, Any]) -> Errors:
  """Returns the error of each array, the largest one of several results.

  All are trees of arrays by name; arrays of `expected` have float64.
  """
  found: dict[str, tuple[float, int]] = {}
  with jax.enable_x64(True):
    for got in results:
      leaves = jax.tree_util.tree_leaves_with_path(got)
      others = jax.tree.leaves({name: expected[name] for name in got})
      for (path, a), b in zip(leaves, others, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        before, _ = found.get(name, (0.0, 0))
        # Unlike max(), keeps NaN.
        error = np.maximum(before, problems.relative_error(a, b))
        found[name] = float(error), a.size
  return found


def judge(
    problem: problems.Problem, implementation: str, found: Errors, scan: Errors
) -> tuple[dict[str, Any], bool, list[str]]:
  """Compares errors with their limits, and with errors of 'scan' if given.

  Returns:
    Fields of a row; whether errors are within their limits; and sentences that
    say why not, or that an error exceeds the error of 'scan'.
  """
  limit = limits(problem, implementation)
  bounds = {
      name: (limit.gradients if name.startswith('gradient') else limit.outputs)
      * (limit.few if size < _FEW else 1)
      for name, (_, size) in found.items()
  }
  reasons = [
      f'the relative error of {name} from the float64 scan, {error:.1e}, is'
      f' above {bounds[name]:.1e}'
      for name, (error, _) in found.items()
      if not error <= bounds[name]  # NaN too.
  ]
  right = not reasons
  fields: dict[str, Any] = {
      'error': float(np.max([error for error, _ in found.values()])),
      'tolerance': max(bounds.values()),
      'errors': {name: error for name, (error, _) in found.items()},
  }
  # Errors below 1/16 unit of rounding are no worse than any other.
  least = float(jnp.finfo(problem.case.dtype).eps) / 16
  ratios = {
      name: error / max(scan[name][0], least)
      for name, (error, size) in found.items()
      if name in scan and size >= _FEW
  }
  if ratios:
    worst = max(ratios, key=lambda n: np.nan_to_num(ratios[n], nan=np.inf))
    fields['scan_errors'] = {name: scan[name][0] for name in found}
    fields |= {'ratio': ratios[worst], 'worst': worst}
    if limit.ratio is not None and not ratios[worst] <= limit.ratio:
      reasons.append(
          f'the error of {worst}, {found[worst][0]:.1e}, is'
          f" {ratios[worst]:.2f} times that of 'scan'"
      )
  return fields, right, reasons
