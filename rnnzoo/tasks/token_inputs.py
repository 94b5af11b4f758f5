"""Tokens for a trained model, checked before it answers.

Dimensions: B batch, T time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import array_inputs


def check(given: Any, num_tokens: int, least: int = 1) -> np.ndarray:
  """Returns tokens as int32 [B, T].

  Args:
    given: the tokens, as a user gave them.
    num_tokens: upper bound of tokens, excluded.
    least: the least T.

  Raises:
    ValueError: the tokens are something else.
  """
  rule = f'inputs must be tokens, integers [B, T] from 0 to {num_tokens - 1}'
  if isinstance(given, np.ma.MaskedArray):
    raise ValueError(f'{rule}, without a mask of numpy, which would be ignored')
  try:
    tokens = np.asarray(given)
  except ValueError as error:
    raise ValueError(f'{rule}; got rows of several lengths') from error
  if tokens.dtype.kind not in 'iu':
    got = settings.a(type(given))
    if hasattr(given, 'dtype'):
      got = str(given.dtype)
    raise ValueError(f'{rule}; got {got}')
  if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < least:
    raise ValueError(
        f'{rule}, with B at least 1 and T at least {least}; their shape is'
        f' {list(tokens.shape)}'
    )
  low, high = int(tokens.min()), int(tokens.max())
  if low < 0 or high >= num_tokens:
    raise ValueError(f'{rule}; got values from {low} to {high}')
  return tokens.astype(np.int32)


def check_with_length(given: Any, num_tokens: int) -> dict[str, np.ndarray]:
  """Returns {'tokens': int32 [B, T], 'length': int32 [B]}.

  Args:
    given: such a mapping, as a user gave it; or tokens alone, all of which
      count.
    num_tokens: upper bound of tokens, excluded.

  Raises:
    ValueError: the mapping is something else.
  """
  if hasattr(given, 'dtype'):
    tokens = check(given, num_tokens)
    length = np.full(len(tokens), tokens.shape[1], np.int32)
    return {'tokens': tokens, 'length': length}
  if not isinstance(given, Mapping) or set(given) != {'tokens', 'length'}:
    raise ValueError(
        "inputs must be a dict of 'tokens' [B, T] and 'length' [B]; got"
        f' {array_inputs.kind(given)}'
    )
  tokens = check(given['tokens'], num_tokens)
  length = array_inputs.counts(
      given['length'],
      'length',
      *tokens.shape,
      of='the steps of tokens',
      row='row',
  )
  return {'tokens': tokens, 'length': length}
