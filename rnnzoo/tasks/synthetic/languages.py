"""Regular languages and word problems, each as a finite automaton.

An automaton goes from state to state, one token at a time; every state has
the label of the strings that end there. Tokens are the integers from 0.

  parity              0, 1: is the number of ones odd?
  modular_counting    0, 1: the number of ones, modulo 5
  cycle_navigation    stay, a step forward, a step back on a cycle of 5 places:
                      the place at the end
  even_pairs          a, b: is the number of pairs ab and ba odd? It is where
                      the first and the last token differ.
  modular_arithmetic  digits 0 to 4; +, -, *; =: the value modulo 5 of a sum of
                      products without brackets, such as 3 - 2 * 4 =
  S3, A5, S5          a token is an element of the group of permutations of so
                      many things, of the even ones for A5: the product, from
                      left to right

Dimensions: S states, V tokens, T time.

References:
  G. Delétang et al., 2023, "Neural networks and the Chomsky hierarchy" (all but
  the groups and modular_counting).
  W. Merrill, J. Petty and A. Sabharwal, 2024, "The illusion of state in
  state-space models" (groups).
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MODULUS = 5

# The label of a state in which no string ends.
NO_LABEL = -1


class Language(NamedTuple):
  """A finite automaton, and the strings that it may meet."""

  transitions: np.ndarray  # int [S, V], the state after a state and a token.
  labels: np.ndarray  # int [S], the label of a string that ends in a state.
  start: int  # The state before the first token.
  # (position, length) -> (low, high), the tokens that may stand at a position
  # of a string of a length, high excluded. It takes numbers and arrays, traced
  # ones too.
  ranges: Callable[[Any, Any], tuple[Any, Any]]
  length_multiple: int = 1  # Strings have lengths that are multiples of it.

  @property
  def num_tokens(self) -> int:
    """V."""
    return self.transitions.shape[1]

  @property
  def num_classes(self) -> int:
    """How many labels there are."""
    return int(self.labels.max()) + 1


def counting(modulus: int, steps: Sequence[int]) -> Language:
  """Returns the language of sums of steps, one a token, modulo a number."""
  state = np.arange(modulus)[:, None]
  return _with_all_tokens((state + np.array(steps)) % modulus, state[:, 0])


def even_pairs() -> Language:
  """Returns the language whose label is whether first and last token differ.

  States: 0, nothing; 1 + 2 * first + last.
  """
  first, last = np.divmod(np.arange(4), 2)
  after = 1 + 2 * first[:, None] + np.arange(2)
  labels = np.array([NO_LABEL, *(first != last)])
  return _with_all_tokens(np.array([[1, 4], *after]), labels)


def modular_arithmetic() -> Language:
  """Returns the language of sums of products of digits, modulo 5.

  States, with s the sum of the terms that are complete and p, with its sign,
  the product that is not: after a digit (s, p), labelled s + p; after an
  operator (s, p, operator), where p is 0 if that is + or -; after = the value.
  Transitions that no string takes stay where they are.
  """
  numbers = range(MODULUS)
  plus, minus, times, equals = range(MODULUS, MODULUS + 4)
  states: list[tuple[int, ...]] = [(s, p) for s in numbers for p in numbers]
  states += [(s, 0, sign) for s in numbers for sign in (plus, minus)]
  states += [(s, p, times) for s in numbers for p in numbers]
  states += [(value,) for value in numbers]

  def after(state, token):
    if len(state) == 3 and token < MODULUS:
      s, p, operator = state
      factor = {plus: 1, minus: -1, times: p}[operator]
      return s, factor * token % MODULUS
    if len(state) == 2 and token >= MODULUS:
      s, p = state
      if token == times:
        return s, p, times
      total = (s + p) % MODULUS
      return (total,) if token == equals else (total, 0, token)
    return state

  index = {state: place for place, state in enumerate(states)}
  labels = [NO_LABEL if len(s) == 3 else sum(s) % MODULUS for s in states]

  def ranges(position, length):
    is_operator, is_end = position % 2, position == length - 1
    low = MODULUS * is_operator + 3 * is_end
    return low, low + MODULUS - 2 * is_operator - 2 * is_end

  return Language(
      np.array(
          [[index[after(s, t)] for t in range(equals + 1)] for s in states]
      ),
      np.array(labels),
      start=index[(0, 0, plus)],
      ranges=ranges,
      length_multiple=2,
  )


def word_problem(size: int, even: bool) -> Language:
  """Returns the language of products of permutations of so many things.

  The first element is the identity. A state is the product so far, and the
  product a b applies a first. If `even`, there are even permutations only.
  """
  elements = np.array(list(itertools.permutations(range(size))))
  if even:
    pairs = itertools.combinations(range(size), 2)
    swapped = sum(elements[:, i] > elements[:, j] for i, j in pairs)
    elements = elements[swapped % 2 == 0]
  digits = size ** np.arange(size)
  index = np.empty(size**size, int)
  index[elements @ digits] = np.arange(len(elements))
  # products[a, b, i] = elements[b, elements[a, i]].
  products = elements[:, elements].swapaxes(0, 1)
  return _with_all_tokens(index[products @ digits], np.arange(len(elements)))


def _with_all_tokens(transitions: np.ndarray, labels: np.ndarray) -> Language:
  """Returns a language in which any token may stand anywhere, from state 0."""

  def ranges(position, length):
    none = 0 * (position + length)
    return none, none + transitions.shape[1]

  return Language(transitions, labels, 0, ranges)


LANGUAGES: Mapping[str, Callable[[], Language]] = types.MappingProxyType(
    {
        'parity': functools.partial(counting, 2, (0, 1)),
        'modular_counting': functools.partial(counting, MODULUS, (0, 1)),
        'cycle_navigation': functools.partial(counting, MODULUS, (0, 1, -1)),
        'even_pairs': even_pairs,
        'modular_arithmetic': modular_arithmetic,
        'S3': functools.partial(word_problem, 3, even=False),
        'A5': functools.partial(word_problem, 5, even=True),
        'S5': functools.partial(word_problem, 5, even=False),
    }
)


def tokens_from(
    uniform: Any, language: Language, lengths: Any, array: types.ModuleType = np
) -> Any:
  """Returns random strings, uint8 [N, T], each filled up with tokens 0.

  Lengths are int [N] or [1]. Random numbers are float32 [N, T] in [0, 1), of
  numpy, or with `array=jnp` of JAX.
  """
  position, lengths = np.arange(uniform.shape[1]), lengths[:, None]
  low, high = language.ranges(position, lengths)
  tokens = low + array.floor(uniform * (high - low))
  return array.where(position < lengths, tokens, 0).astype(array.uint8)


def prefix_labels(language: Language, tokens: Any) -> jax.Array:
  """Returns the labels of all prefixes of strings [N, T], int32 [N, T]."""
  transitions = jnp.asarray(language.transitions, jnp.int32)
  labels = jnp.asarray(language.labels, jnp.int32)

  def step(state, token):
    state = transitions[state, token]
    return state, state

  start = jnp.full(len(tokens), language.start, jnp.int32)
  # A step is so little that a device would spend its time between steps.
  _, states = jax.lax.scan(step, start, tokens.T, unroll=8)
  return labels[states.T]


def balanced(
    labels: np.ndarray, num_examples: int, num_classes: int
) -> np.ndarray:
  """Returns which N examples to take so that all classes are as frequent.

  If the classes do not divide N, the first have one more. Indices ascend, and
  are fewer than N where a class is too rare.
  """
  each, more = divmod(num_examples, num_classes)
  chosen = [
      np.flatnonzero(labels == c)[: each + (c < more)]
      for c in range(num_classes)
  ]
  return np.sort(np.concatenate(chosen))
