"""Checks of the settings of a layer: sizes, flags, names, numbers with bounds.

`checks.py` has the checks of arrays and their dtypes.
`warn` names the caller's line.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import importlib.util
import inspect
import math
import numbers
from typing import Any
import warnings

import numpy as np

# Letters whose names begin with a vowel, as in 'an LSTM'.
_SPOKEN_WITH_VOWEL = frozenset('AEFHILMNORSX')
# Packages between a user's line and a warning about it.
_BETWEEN = frozenset({'rnnzoo', 'pallas_kernels', 'jax', 'flax', 'contextlib'})


def warn(message: str) -> None:
  """Warns at the caller's line: the first outside of rnnzoo, JAX and flax."""
  # Since Python 3.12, `skip_file_prefixes` does this.
  frame, level = inspect.currentframe(), 0
  while frame and frame.f_globals.get('__name__', '').split('.')[0] in _BETWEEN:
    frame, level = frame.f_back, level + 1
  warnings.warn(message, stacklevel=level + 1)


def a(thing: type | str) -> str:
  """Returns the name of a class with its article: 'an LSTM', 'a GRU'."""
  name = thing if isinstance(thing, str) else thing.__name__
  # Spelt: LSTM, S5, ndarray.
  if name[1:2].isupper() or name[1:2].isdigit() or name.startswith('nd'):
    is_vowel = name[0].upper() in _SPOKEN_WITH_VOWEL
  else:
    is_vowel = name[:1].upper() in set('AEIOU') and not name.startswith('uint')
  return f'{"an" if is_vowel else "a"} {name}'


def choice(value: Any, options: Iterable[Any], label: str) -> None:
  """Raises ValueError unless `value` is one of the options."""
  options = tuple(options)
  if not isinstance(value, str | None) or value not in options:
    raise ValueError(f'{label} must be one of {options}, got {value!r}.')


def function(value: Any, label: str) -> None:
  """Raises ValueError unless `value` is None or can be called."""
  if value is not None and not callable(value):
    raise ValueError(f'{label} must be a function or None, got {value!r}.')


def boolean(value: Any, label: str) -> None:
  """Raises ValueError unless `value` is True or False."""
  if not isinstance(value, (bool, np.bool_)):
    raise ValueError(f'{label} must be a bool, got {value!r}.')


def within(
    value: Any,
    label: str,
    *,
    above: float | None = None,
    below: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> None:
  """Raises ValueError unless `value` is a finite number between bounds.

  Args:
    value: the caller's.
    label: the argument's name.
    above: a bound that the number is greater than.
    below: a bound that the number is less than.
    least: a lower bound that the number may be equal to.
    most: an upper bound that the number may be equal to.
  """
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if (
      is_number
      and _is_finite(value)
      and (above is None or value > above)
      and (below is None or value < below)
      and (least is None or value >= least)
      and (most is None or value <= most)
  ):
    return
  bounds = {'above': above, 'from': least, 'below': below, 'up to': most}
  text = ''.join(f' {k} {v}' for k, v in bounds.items() if v is not None)
  raise ValueError(f'{label} must be a finite number{text}, got {value!r}.')


def dropout_rate(value: Any, label: str = 'dropout_rate') -> None:
  """Raises ValueError unless it is a share from 0, below 1."""
  within(value, label, least=0, below=1)


def norm_momentum(value: Any, norm: str | None) -> float:
  """Returns the momentum of batch normalisation's running averages.

  Args:
    value: the caller's; None for 0.9.
    norm: the normalisation that the caller chose, or None.

  Raises:
    ValueError: it is not between 0 and 1, or nothing would read it.
  """
  if value is None:
    return 0.9
  if norm != 'batch':
    raise ValueError(
        f"norm_momentum={value!r} needs norm='batch', whose running averages it"
        f' is of; got norm={norm!r}.'
    )
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  # As float32 has it: 1 would keep the averages of the start for ever.
  if not is_number or not 0 < np.float32(value) < 1:
    raise ValueError(
        f'norm_momentum must be above 0 and below 1, got {value!r}; 0.9 would'
        ' work.'
    )
  return float(value)


def axis_names(value: Any, label: str) -> tuple[str, ...]:
  """Returns one name of a mesh axis, several, or none, as a tuple."""
  if value is None:
    return ()
  names = (value,) if isinstance(value, str) else value
  if not isinstance(names, Sequence) or not all(
      isinstance(name, str) for name in names
  ):
    raise ValueError(
        f'{label} must be the name of a mesh axis, a sequence of names or None,'
        f' got {value!r}.'
    )
  if len(set(names)) < len(names):
    raise ValueError(f'{label} must name each mesh axis once, got {value!r}.')
  return tuple(names)


def bias_of_gate(forget_bias: float, options: Mapping[str, Any]) -> None:
  """Raises ValueError for a forget_bias of a layer without biases."""
  if forget_bias and not options.get('use_bias', True):
    raise ValueError(
        f'forget_bias={forget_bias} needs use_bias=True: it shifts the initial'
        ' bias of f, and this layer has none.'
    )


def _is_finite(value: Any) -> bool:
  """Returns whether a number is finite as a float; an integer may be larger."""
  try:
    return math.isfinite(value)
  except OverflowError:
    return False


def range_within(
    value: Any, label: str, most: float | None, default: tuple[float, float]
) -> tuple[float, float]:
  """Returns the range (low, high) that parameters start in.

  Args:
    value: the caller's pair of numbers.
    label: the argument's name.
    most: the bound `max_abs` of the parameters, or None.
    default: the range of a caller that gave none; it is cut at the bound.

  Raises:
    ValueError: it is no range, or reaches beyond the bound.
  """
  if not isinstance(value, (tuple, list)) or len(value) != 2:
    raise ValueError(f'{label} must be a pair (low, high), got {value!r}.')
  low, high = value
  within(low, label)
  within(high, label, least=low)
  # As float32 has it: they are drawn by their distance.
  if high - low > 3e38:
    raise ValueError(
        f'{label} must be at most 3e38 wide, got {value!r}: float32 has no'
        ' larger numbers.'
    )
  if most is None:
    return low, high
  within(most, 'max_abs', above=0)
  if (low, high) == default:
    return max(low, -most), min(high, most)
  if max(-low, high) > most:
    clipped = tuple(max(-most, min(bound, most)) for bound in value)
    raise ValueError(
        f'{label} must be within max_abs={most}, got {value!r}; {clipped} would'
        ' work.'
    )
  return low, high


# Names of options in other libraries, and their names here.
_ELSEWHERE = {
    'activation_fn': 'activation',
    'batch_first': 'time_major in each call; time is the second axis otherwise',
    'bias': 'use_bias',
    'bidirectional': 'rnnzoo.Bidirectional(rnnzoo.LSTM, ...)',
    'dropout': 'rnnzoo.Stack(..., dropout_rate=...)',
    'dropout_rate': 'rnnzoo.Stack(..., dropout_rate=...)',
    'hidden_size': 'features',
    'input_size': 'in_features',
    'nonlinearity': 'activation',
    'norm': 'rnnzoo.Stack(..., norm=...)',
    'num_layers': 'rnnzoo.Stack(rnnzoo.LSTM, ..., num_layers=...)',
    'recurrent_dropout': 'recurrent_dropout_rate',
    'proj_size': 'rnnzoo.LSTM(..., projection=...)',
    'residual': 'rnnzoo.Stack(..., residual=...)',
}


# XLA and the loops of JAX count elements of an axis and steps in int32.
_GREATEST = 2**31 - 1


def no_more(unknown: Mapping[str, Any], layer: str) -> None:
  """Raises TypeError if options are left that no layer has."""
  if not unknown:
    return
  name = next(iter(unknown))
  hint = f'help({layer}) lists its options'
  if name in _ELSEWHERE:
    hint = f'there is {_ELSEWHERE[name]}'
  raise TypeError(f'{layer} has no argument {name!r}; {hint}.')


def positive(value: object, label: str) -> None:
  """Raises ValueError unless `value` is an int from 1 to 2^31 - 1."""
  is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_int or not 1 <= value <= _GREATEST:  # type: ignore[operator]
    raise ValueError(
        f'{label} must be a positive int up to {_GREATEST}, got {value!r}.'
    )


# XLA aborts the process where int64 cannot count an array's elements.
MOST_NUMBERS = 2**48


def numbers_of(shape: Sequence[int], label: str) -> None:
  """Raises ValueError for an array of more numbers than any machine holds."""
  # Symbolic sizes may be small. XLA cannot take a size that is too large beside
  # a 0 either, so a 0 counts as 1.
  sizes = (max(int(n), 1) for n in shape if isinstance(n, numbers.Integral))
  if math.prod(sizes) > MOST_NUMBERS:
    raise ValueError(
        f'{label} must have at most 2^48 numbers, and a shape of'
        f' {tuple(shape)} has more.'
    )


def heads(features: int, num_heads: int, has_kernel: bool) -> None:
  """Raises ValueError unless the features can be divided into heads."""
  positive(features, 'features')
  positive(num_heads, 'num_heads')
  if features % num_heads:
    raise ValueError(
        'features must be divisible by num_heads, got'
        f' features={features} and num_heads={num_heads}.'
    )
  if num_heads > 1 and not has_kernel:
    raise ValueError(
        'A layer without a recurrent kernel has no heads: num_heads must be 1,'
        f' got {num_heads}.'
    )


def factories(
    given: Sequence[Any], base: type, argument: str = 'layer'
) -> None:
  """Raises ValueError unless each is a layer class or a function making one.

  Args:
    given: the caller's.
    base: class of all layers.
    argument: its name.
  """
  for factory in given:
    inner = factory.func if isinstance(factory, functools.partial) else factory
    is_class = isinstance(inner, type)
    cls = inner if is_class else type(inner)
    is_other = isinstance(factory, type) and not issubclass(factory, base)
    # A module of rnnzoo.linen, class or instance, has the class of its layer.
    is_module = isinstance(inner, base) or hasattr(cls, 'layer_class')
    if not callable(factory) or is_other or is_module:
      got = 'the class' if is_class else 'an instance of'
      raise ValueError(
          f'{argument} must be a layer class such as rnnzoo.GRU, or a function'
          f' with its signature, got {got} {cls.__module__}.{cls.__name__}.'
      )


# Says which extra to install for a part that needs more packages.


def require(part: str, extra: str, packages: Sequence[str]) -> None:
  """Raises ModuleNotFoundError unless packages of an extra are installed.

  Args:
    part: part of the library, as 'rnnzoo.training'.
    extra: extra of pyproject.toml, which has the packages.
    packages: their names as they are imported.
  """
  missing = [name for name in packages if not importlib.util.find_spec(name)]
  if missing:
    raise ModuleNotFoundError(
        f"{part} needs {', '.join(missing)}: pip install 'rnnzoo[{extra}]'",
        name=missing[0],
    )
