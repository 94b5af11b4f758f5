"""One layer on one path, forward and every gradient, against float64.

Weights and carries are random, biases included: zeros hide differences between
formulas.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
from typing import Any

from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from tests.testing import random_layers
from tests.testing import reference


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer, how it is made, and what it is run on: a row of a table of tests.

  Attributes:
    layer: class of the layer.
    options: of its constructor.
    path: the implementation.
    dtype: of the computation.
    sizes: number of sequences, of steps and of features.
    in_features: size of the input.
    reset: whether some steps restart.
    mask: whether some steps are padding.
    lengths: whether sequences end early.
    reverse: whether to run from the last step to the first.
    time_major: whether arrays are given as [time, batch, features].
    scale: standard deviation of the parameters.
  """

  layer: Any
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  path: Any = 'scan'
  dtype: str = 'float32'
  sizes: tuple[int, int, int] = (3, 7, 8)
  in_features: int = 4
  reset: bool = False
  mask: bool = False
  lengths: bool = False
  reverse: bool = False
  time_major: bool = False
  scale: float = 0.4

  @property
  def batch(self) -> int:
    return self.sizes[0]

  @property
  def time(self) -> int:
    return self.sizes[1]

  @property
  def features(self) -> int:
    return self.sizes[2]

  @property
  def name(self) -> str:
    """A name for a test of this case."""
    options = (f'{key}_{value}' for key, value in self.options.items())
    size = 'x'.join(map(str, self.sizes))
    flags = ('reset', 'mask', 'lengths', 'reverse', 'time_major')
    given = (flag for flag in flags if getattr(self, flag))
    return '_'.join((self.layer.__name__, *options, self.dtype, size, *given))


def named(cases: Iterable[Case]) -> Iterator[tuple[str, Case]]:
  """Yields names and cases, for `parameterized.named_parameters`."""
  for case in cases:
    yield case.name, case


def table(case: Any, text: str) -> tuple[Case, ...]:
  """Returns cases, one a line, such as 'LSTM 3x7x64 float16 reset num_heads=2'.

  Args:
    case: makes one, such as `Case` with defaults.
    text: lines of a layer's name, its sizes, and words for all that is not by
      default: a dtype, flags, and options, `in_features` or `keep` with values.
      Lines that begin with # are comments.
  """
  found = []
  for line in text.strip().splitlines():
    if line.strip().startswith('#'):
      continue
    name, sizes, *words = line.split()
    fields = {'sizes': tuple(map(int, sizes.split('x')))}
    options = {}
    for word in words:
      key, equals, value = word.partition('=')
      if not equals:
        fields |= {word: True} if hasattr(Case, word) else {'dtype': word}
      elif key == 'in_features':
        fields[key] = int(value)
      elif key == 'keep':
        fields['path'] = rnnzoo.Pallas(keep=value)
      else:
        options[key] = _VALUES.get(value, value)
        if value.replace('.', '').isdigit():
          options[key] = float(value) if '.' in value else int(value)
    found.append(case(rnnzoo.LAYERS[name], options, **fields))
  return tuple(found)


_VALUES = {'True': True, 'False': False}


def abstract(case, **options):
  """The case's layer with shapes in place of arrays."""

  def make():
    return case.layer(
        case.in_features,
        case.features,
        rngs=nnx.Rngs(0),
        **(case.options | options),
    )

  return nnx.eval_shape(make)


def abstract_gradient(case):
  """Returns a function with the layer's gradients, and its arguments' shapes.

  The function takes (state, x, reset, seq_lengths, mask), of which the last
  three are None where the case has none.
  """
  dtype = jnp.dtype(case.dtype)
  layer = abstract(
      case, implementation=case.path, learn_initial_carry=True, dtype=dtype
  )
  graphdef, state = nnx.split(layer)
  lead = (case.batch, case.time)
  if case.time_major:
    lead = lead[::-1]
  flags = jax.ShapeDtypeStruct(lead, bool)
  x = jax.ShapeDtypeStruct((*lead, case.in_features), dtype)
  lengths = jax.ShapeDtypeStruct((case.batch,), jnp.int32)

  def loss(state, x, reset, lengths, mask):
    final, y = nnx.merge(graphdef, state).unroll(
        x,
        reset=reset,
        mask=mask,
        seq_lengths=lengths,
        reverse=case.reverse,
        time_major=case.time_major,
    )
    return sum(jnp.sum(v.astype(jnp.float32) ** 2) for v in (y, *final))

  args = (
      state,
      x,
      flags if case.reset else None,
      lengths if case.lengths else None,
      flags if case.mask else None,
  )
  return jax.grad(loss, (0, 1)), args


def mapped_gradients(case):
  """Yields `abstract_gradient` over rows of x, and over rows of parameters."""
  f, (state, x, *rest) = abstract_gradient(case)
  many = lambda tree: jax.tree.map(
      lambda v: jax.ShapeDtypeStruct((3, *v.shape), v.dtype), tree
  )
  yield jax.vmap(f, (None, 0, None, None, None)), (state, many(x), *rest)
  yield jax.vmap(f, (0, None, None, None, None)), (many(state), x, *rest)


def randomize(tree, seed, dtype, scale=0.4):
  """Replaces every array by random numbers that `dtype` can hold.

  In numpy, as all that surrounds the functions under test: an operation of
  jax.numpy would be compiled for each shape and dtype.
  """
  leaves, treedef = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  made = [(scale * rng.standard_normal(x.shape)).astype(dtype) for x in leaves]
  return jax.tree.unflatten(treedef, made)


def relative_error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


def assert_near(got, want, limit):
  """Fails unless ||got - want|| <= limit ||want|| for each array of trees."""
  for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    if x.dtype != jax.dtypes.float0:
      x, y = np.asarray(x, np.complex128), np.asarray(y, np.complex128)
      error, most = np.linalg.norm(x - y), limit * np.linalg.norm(y) + 1e-30
      if x.shape != y.shape or not error <= most:
        raise AssertionError(f'{error} is above {most}: {x} and {y}')


class ComparisonTestCase(parameterized.TestCase):
  """Has the comparison as a method."""

  def compare(self, case, tolerances, context=contextlib.nullcontext):
    """Fails unless the case is as close to float64 as is asked for.

    Args:
      case: the case.
      tolerances: largest ||out - ref|| / ||ref|| of outputs and of gradients.
      context: makes the context manager that the layer runs in.
    """
    rng = np.random.default_rng(1)
    batch, time = case.batch, case.time
    reset = mask = None
    if case.reset:
      reset = rng.random((batch, time)) < 0.3
    if case.mask:
      mask = rng.random((batch, time)) < 0.6
      mask[0] = True  # One sequence without padding, one that is all padding.
      mask[1:2] = False
    padding = {}
    if case.lengths:  # From all of a sequence to nothing.
      seq_lengths = np.linspace(time, 0, batch).astype(np.int32)
      mask = np.arange(time) < seq_lengths[:, None]
      padding = {'seq_lengths': seq_lengths}
      reset = None if reset is None else reset & mask
    wide = jnp.promote_types(case.dtype, jnp.float32)
    dtype = jnp.dtype(case.dtype)
    layer = abstract(
        case,
        implementation=case.path,
        learn_initial_carry=True,
        dtype=dtype,
        param_dtype=wide,
    )
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(
        lambda x: x.astype(wide), randomize(state, 2, dtype, case.scale)
    )
    # sLSTM's n is 0 or at least 1; a learned one starts at 0 and is tested so.
    if 'n' in layer.cell.carry_names:
      state['learned_carry'] = jax.tree.map(
          np.zeros_like, state['learned_carry']
      )
    x = randomize(np.zeros((batch, time, case.in_features)), 3, dtype, 1.0)
    last = (batch, case.features)
    carries = [np.zeros(last)] * len(layer.cell.carry_names)
    carry = random_layers.as_carry(layer.cell, randomize(carries, 4, wide))
    weights = tuple(
        randomize(np.zeros(shape), 5 + i, wide, 1.0)
        for i, shape in enumerate(
            [(batch, time, case.features)] + [last] * len(carry)
        )
    )

    # Batch and time are swapped where the case has them the other way.
    turns = lambda x: x is not None and case.time_major
    given = lambda x: x.swapaxes(0, 1) if turns(x) else x
    if case.mask:
      padding = {'mask': given(mask)}

    @reference.jit
    def run(state, x, carry):
      def loss(state, x, carry):
        final, y = nnx.merge(graphdef, state).unroll(
            given(x),
            initial_carry=carry,
            reset=given(reset),
            **padding,
            reverse=case.reverse,
            time_major=case.time_major,
        )
        y = given(y)
        outputs = (y, *final)
        total = sum(
            jnp.sum(w * o.astype(w.dtype))
            for w, o in zip(weights, outputs, strict=True)
        )
        return total, (final, y)

      return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(state, x, carry)

    with context():
      (_, (final, y)), (d_state, d_x, d_carry) = run(state, x, carry)
      jax.block_until_ready(d_carry)
    chex.assert_tree_all_finite((y, final, d_state, d_x, d_carry))
    self.assertEqual(y.dtype, dtype)
    self.assertEqual(final[0].dtype, wide)

    made = nnx.merge(graphdef, state)
    double = functools.partial(jax.tree.map, np.float64)
    pure = lambda v: None if v is None else v[...]
    modules, states = [], {}
    for name in ('input_map', 'readout'):
      graph = None
      if getattr(made, name) is not None:
        graph, states[name] = nnx.split(getattr(made, name))
      modules.append(graph)
    arrays = double(
        {
            'x': x,
            **states,
            'kernel': pure(made.kernel),
            'bias': np.zeros((layer.cell.input_gates, case.features))
            if made.bias is None
            else made.bias[...],
            'recurrent_kernel': pure(made.recurrent_kernel),
            # One number for all features is given to each, see `_close`.
            'cell_params': {
                k: v[...] if v.ndim else np.full(case.features, v[...])
                for k, v in made.cell_params.items()
            },
            'carry': carry,
            'restart': tuple(
                np.broadcast_to(c[...], last) for c in made.learned_carry
            ),
        }
    )
    none = lambda flags, value: (
        np.full((batch, time), value) if flags is None else flags
    )
    with jax.enable_x64(True):
      (want_final, want_y), want = reference.layer_value_and_grad(
          layer.cell,
          layer.recurrent_structure,
          case.reverse,
          arrays,
          none(reset, False),
          none(mask, True),
          double(weights),
          tuple(modules),
      )

    matrices = 'kernel', 'bias', 'recurrent_kernel'
    got = {
        'x': d_x,
        'carry': d_carry,
        **{name: d_state[name] for name in states},
        **{name: d_state.get(name) for name in matrices},
        'cell_params': dict(d_state.get('cell_params', {})),
        'restart': d_state['learned_carry'],
    }
    if reset is None:
      del got['restart']
    if made.bias is None:
      del got['bias']
    want['restart'] = jax.tree.map(
        lambda g: np.asarray(g).sum(0), want['restart']
    )
    forward, backward = tolerances
    self._close('y', y, want_y, forward)
    names = layer.cell.carry_names
    for name, a, b in zip(names, final, want_final, strict=True):
      self._close(f'final {name}', a, b, forward)
    for name, gradient in got.items():
      a = jax.tree.leaves(gradient)
      b = jax.tree.leaves(want[name])
      self.assertEqual(len(a), len(b), name)
      for i, (a_i, b_i) in enumerate(zip(a, b, strict=True)):
        self._close(f'd {name} {i}', a_i, b_i, backward)

  def _close(self, name, got, want, tolerance):
    if got.ndim == 0:
      # A sum over features may cancel, while its error is that of its terms.
      scale = np.linalg.norm(want)
      error = abs(np.float64(got) - np.sum(want)) / scale
    else:
      self.assertEqual(got.shape, want.shape, name)
      error = relative_error(got, want)
    self.assertLessEqual(error, tolerance, name)
