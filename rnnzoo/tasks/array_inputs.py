"""Arrays for a trained model, checked before it answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rnnzoo import settings


def check(given: Any, names: Sequence[str] = ()) -> Any:
  """Returns inputs of a trained model as they are.

  Args:
    given: arrays [B, ...], as a user gave them.
    names: of arrays that must be among them; none for arrays without names.

  Raises:
    ValueError: they are something else.
  """
  if names and not (isinstance(given, Mapping) and set(names) <= set(given)):
    got = settings.a(type(given))
    if isinstance(given, Mapping):
      got = f'the keys {", ".join(map(repr, given)) or "none"}'
    raise ValueError(
        f'inputs must be a dict of {" and ".join(map(repr, names))}, as in the'
        f' splits of the task; got {got}'
    )
  for leaf in jax.tree.leaves(given):
    rule = 'inputs must be arrays of numbers, [B, ...]'
    if not hasattr(leaf, 'dtype'):
      raise ValueError(
          f'{rule}, got {settings.a(type(leaf))}; np.asarray makes an array of'
          ' a list'
      )
    if not leaf.ndim or getattr(leaf.dtype, 'kind', '') in ('O', 'S', 'U'):
      raise ValueError(f'{rule}, got {leaf.dtype} of shape {list(leaf.shape)}')
  return given
