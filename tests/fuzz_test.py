"""Bad arguments to every public callable: each is refused with a sentence.

Seeded. A case replaces one argument of a call that works by a value that cannot
be right. The call has to raise ValueError, TypeError or NotImplementedError
from code of this project, with a message that names the argument; a result is
as much a failure as an error from inside of another library.
"""

import dataclasses
import functools
import inspect
import itertools
import random
import traceback
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import convert
from rnnzoo import linen
from rnnzoo import models

BATCH, TIME, IN, FEATURES = 2, 5, 3, 4
OURS = ('/rnnzoo/', '/pallas_kernels/')

x = np.ones((BATCH, TIME, IN), np.float32)
h = np.ones((BATCH, FEATURES), np.float32)
key = jax.random.key(0)
nan, inf = float('nan'), float('inf')


class Junk:
  """An object that nothing asks for."""


# Values that are wrong for an argument of a kind.
STRANGE = ('foo', b'foo', {}, {1}, Junk(), repr, 3 + 4j, object, ...)
SIZES = (*STRANGE, None, 0, -1, 2.0, True, nan, '4', [4], np.ones(2))
FLAGS = (*STRANGE, None, 'no', 'yes', 0, 1, 1.0, [], np.ones(2, bool))
NUMBERS = (*STRANGE, True, nan, inf, -inf, '1', [1.0], np.ones(2))
POSITIVE = (*NUMBERS, -1.0, 0.0)
RANGES = (*STRANGE, None, 1.0, (1.0,), (1, 0), (0, nan), ('0', '1'), (0, 1, 2))
DTYPES = (*STRANGE[3:], 'foo', 'int32', jnp.int8, bool, complex, 'complex64')
DTYPES += ('float64', np.float64, 5, [jnp.float32], jnp.float8_e4m3fn)
INITS = ('xavier_uniform', 3, {}, [1, 2], key, np.ones(3), lambda: 0, repr)
INITS += (lambda k, s, d: None, lambda k, s, d: jnp.ones(s, jnp.complex64))
INITS += (lambda k, s, d: jnp.ones((2,), d),)
RNGS = (*STRANGE, None, 0, 7, key, np.int32(3), [1], nnx.Rngs, nnx.Rngs(data=0))
NAMES = (*STRANGE, None, 0, ['tanh'], 'TANH', '', ('linear',))
PATHS = ('cuda', (), ('scan', 'cuda'), 0, {}, 1.5, Junk(), [None], b'scan')
PATHS += (True, ['scan', 3], [np.ones(2)])
ARRAYS = (*STRANGE, None, 1, [1, 2], [[1.0], [1.0, 2.0]], np.ones(2))
ARRAYS += (np.ones((7, 7, 7, 7, 7)), np.array(['a']), np.array([None]))
X = (
    *ARRAYS,
    x.astype(np.complex64),
    x.astype(np.int32),
    x[..., :2],
    x[0, 0, 0],
    x.astype(np.longdouble),
    x.astype(jnp.float8_e4m3fn),
    np.ma.masked_array(x, x > 0),
)
BOOLS = ('foo', [['S'] * TIME] * BATCH, [[True], [True, False]], {}, Junk())
BOOLS += (
    np.ones((BATCH, TIME)),
    np.ones((BATCH, TIME + 1), bool),
    True,
    1,
    'no',
)
LENGTHS = ('foo', [1, [2]], {}, Junk(), [1.0, 2.0], [1], [-1, 2], [1, TIME + 1])
LENGTHS += (np.array([1, 2**32 + 1]), [1, 2**40])
LENGTHS += (['S', 'b'], True, 3, [True, False], np.ones((BATCH, 2), int), 1j)
CARRIES = (*STRANGE, 1, h, (h, h, h, h, h), (h[:1],), [None], ({},), ())
CARRIES += ((h + 1j,), ([[1.0], [1.0, 2.0]],), ('foo',), (h.astype(str),))
BATCHES = ('foo', None, 3, (-1,), (2.0,), ('2',), [nan], {}, Junk(), (True,))
TOKENS = ('foo', None, {}, 1.5, [[0.5]], [[1, [2]]], np.array(['a']), Junk())
TOKENS += ([[9, 1]] * BATCH, [[1, -4]] * BATCH)
LAYERS = (
    *(functools.partial(rnnzoo.GRU, **own) for own in ({'features': 3},)),
    *STRANGE[:5],
    None,
    'LSTM',
    3,
    rnnzoo.LSTMCell(),
    dict,
    lambda *a, **k: 3,
)
CELLS = (*STRANGE, None, 'LSTM', rnnzoo.LSTMCell, rnnzoo.LSTM, nnx.LSTMCell)

# The kinds of the options of layers; every layer's own are among them.
OPTIONS = {
    'in_features': SIZES,
    'features': SIZES,
    'num_heads': (*SIZES, 3),
    'inner_steps': SIZES,
    'num_blocks': SIZES,
    'block_index': (*STRANGE, None, -1, 1, nan, '0', 0.5),
    'min_normalizer': (*STRANGE, None, True, nan, inf, -0.1, 1.1, '1'),
    'max_forget': (*STRANGE, True, nan, inf, '1', [1.0], 1j),
    'use_bias': FLAGS,
    'learn_initial_carry': FLAGS,
    'stop_recurrent_gradient': FLAGS,
    'gated': FLAGS,
    'learn_epsilon': FLAGS,
    'kernel_init': INITS,
    'recurrent_kernel_init': INITS,
    'bias_init': INITS,
    'forget_bias': (*NUMBERS, None),
    'chrono_steps': (*STRANGE, True, nan, inf, -1, 0, 2, 9.5, '9'),
    'gamma': (*NUMBERS, None, -0.1),
    'epsilon': (*POSITIVE, None),
    'recurrent_scale': (*NUMBERS, None, -1.0),
    'inner_scale': (*NUMBERS, None, -1.0),
    'recurrent_range': RANGES,
    'max_abs': POSITIVE,
    'recurrent_gradient_clip': (*STRANGE, True, nan, inf, -1, 0, '1', [1.0]),
    'activation': NAMES,
    'inner_activation': NAMES,
    'candidate': NAMES,
    'pooling': NAMES,
    'mode': NAMES,
    'state_features': (*STRANGE, 0, -1, 2.0, True, nan, '4', [4], np.ones(2)),
    'min_radius': (*NUMBERS, None, -0.1, 1.1),
    'max_radius': (*POSITIVE, None, 1.1),
    'max_phase': (*POSITIVE, None),
    'signed': FLAGS,
    'peephole': FLAGS,
    'projection': tuple(v for v in SIZES if v is not None),
    'zoneout_rate': (*STRANGE, None, nan, inf, -0.1, 1.0, '1', [0.1] * 9),
    'recurrent_dropout_rate': (*STRANGE, None, nan, inf, -0.1, 1.0, '1'),
    'discretization': NAMES,
    'min_step': (*POSITIVE, None),
    'max_step': (*POSITIVE, None),
    'complex': FLAGS,
    'timespans': FLAGS,
    'lower_bound': (*STRANGE, None, True, nan, inf, '1', -0.1, 1.0, np.ones(2)),
    'dtype': DTYPES,
    'param_dtype': (*DTYPES, None),
    'implementation': PATHS,
    'rngs': RNGS,
    'proj_size': (3,),
    'bidirectional': (True,),
    'batch_first': (True,),
    'hidden_size': (4,),
}
OF_ALL = (
    'in_features',
    'features',
    'use_bias',
    'learn_initial_carry',
    'stop_recurrent_gradient',
    'recurrent_gradient_clip',
    'dtype',
    'param_dtype',
    'implementation',
    'kernel_init',
    'bias_init',
    'rngs',
    'proj_size',
    'bidirectional',
    'batch_first',
    'hidden_size',
)
# Arguments of calls that layers take.
CALLS = {
    'x': X,
    'initial_carry': CARRIES,
    'reset': BOOLS,
    'mask': BOOLS,
    'seq_lengths': LENGTHS,
    'reverse': FLAGS,
    'time_major': FLAGS,
    'rngs': tuple(r for r in RNGS[:-1] if r is not None),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A call that works, and the values that one of its arguments cannot have."""

  label: str
  call: Any
  arguments: dict[str, Any]
  name: str
  values: tuple[Any, ...]


def layer(name='LSTM'):
  return rnnzoo.LAYERS[name](IN, FEATURES, rngs=nnx.Rngs(0))


def composed():
  """Yields modules with the interface of a layer, by name."""
  make = lambda cls, *a, **k: cls(*a, IN, FEATURES, rngs=nnx.Rngs(0), **k)
  for name in rnnzoo.LAYERS:
    yield name, layer(name)
  options = {'num_layers': 2, 'dropout_rate': 0.5, 'norm': 'batch'}
  yield 'Stack', make(rnnzoo.Stack, rnnzoo.GRU, **options)
  yield 'DenseStack', make(rnnzoo.DenseStack, rnnzoo.GRU, **options)
  yield 'Bidirectional', make(rnnzoo.Bidirectional, rnnzoo.GRU)


def constructors():
  for name, cls in rnnzoo.LAYERS.items():
    # Of __init__: the signature of the class is that of nnx's metaclass.
    own = {*inspect.signature(cls.__init__).parameters} - {'self', 'options'}
    options = {*OF_ALL, *own}
    if name in ('IndRNN', 'IRevRNN', 'MinGRU', 'MinLSTM'):
      options -= {'num_heads'}
    if name == 'SLSTM':
      options -= {'bias_init'}
    good = {'in_features': IN, 'features': FEATURES, 'rngs': nnx.Rngs(0)}
    for option in sorted(options):
      yield Case(name, cls, good, option, OPTIONS[option])
  good = {'layer': rnnzoo.GRU, 'in_features': IN, 'features': FEATURES}
  good['rngs'] = nnx.Rngs(0)
  for cls in (rnnzoo.Stack, rnnzoo.DenseStack, rnnzoo.Bidirectional):
    for option in ('layer', *OF_ALL):
      values = LAYERS if option == 'layer' else OPTIONS[option]
      yield Case(cls.__name__, cls, good, option, values)
  for option, values in {
      'num_layers': SIZES,
      'dropout_rate': (*NUMBERS, None, 1.0, -0.1),
      'share_dropout_over_time': FLAGS,
      'norm': (*STRANGE, 'group', 0, True, ['layer']),
      'norm_momentum': (*NUMBERS, 1.0, -0.1),
      'residual': FLAGS,
  }.items():
    for cls in (rnnzoo.Stack, rnnzoo.DenseStack):
      if (cls, option) != (rnnzoo.DenseStack, 'residual'):
        yield Case(cls.__name__, cls, good, option, values)
  good = {'backbone': layer(), 'num_classes': 3, 'rngs': nnx.Rngs(0)}
  backbones = (*STRANGE, None, rnnzoo.GRU, nnx.LSTMCell, h)
  for option, values in {
      'backbone': backbones,
      'num_classes': SIZES,
      'rngs': RNGS,
  }.items():
    yield Case('Classifier', models.SequenceClassifier, good, option, values)
  good = {'cell': rnnzoo.ElmanCell(), 'in_features': IN, 'features': FEATURES}
  good['rngs'] = nnx.Rngs(0)
  structures = ('foo', 3, lambda k: k[0], lambda k: k * 1j, lambda k: None)
  params = ('foo', [h], 3, {1})
  cls = rnnzoo.RecurrentLayer
  yield Case('RecurrentLayer', cls, good, 'cell', CELLS)
  yield Case('RecurrentLayer', cls, good, 'cell_params', params)
  call = lambda **options: cls(**options)(x)
  yield Case('RecurrentLayer', call, good, 'recurrent_structure', structures)
  Wx, R = np.ones((2, 3, 4, 1, 2), np.float32), np.ones((4, 1, 2, 2))
  call = lambda **fields: rnnzoo.flashrnn(
      Wx, R, R[..., 0], config=rnnzoo.FlashRNNConfig(**fields)
  )
  for option, values in {
      'dtype': DTYPES,
      'gradient_recurrent_cut': FLAGS,
      'gradient_recurrent_clipval': NUMBERS,
      'initial_val': NUMBERS,
      'output_shape': NAMES,
  }.items():
    yield Case('FlashRNNConfig', call, {'backend': 'vanilla'}, option, values)


def calls():
  for label, module in composed():
    for name, values in CALLS.items():
      yield Case(label, module, {'x': x}, name, values)
      yield Case(label + '.unroll', module.unroll, {'x': x}, name, values)
    initial = module.initial_carry
    yield Case(label, initial, {}, 'batch_shape', BATCHES)
    if label == 'Bidirectional':
      continue
    good = {'x': x[:, 0], 'carry': module.initial_carry((BATCH,))}
    resets = tuple(v for v in BOOLS if not isinstance(v, np.ndarray))
    for name, values in {
        'x': (*ARRAYS, x),
        'carry': (None, *CARRIES),
        'reset': resets,
    }.items():
      yield Case(label + '.step', module.step, good, name, values)
  model = models.SequenceClassifier(layer(), 3, rngs=nnx.Rngs(0))
  for name in ('x', 'seq_lengths', 'rngs'):
    yield Case('Classifier', model, {'x': x}, name, CALLS[name])
  no_step = (x[:, :0],)
  yield Case('Classifier', model, {'x': x}, 'x', no_step)
  dropped = rnnzoo.Stack(
      rnnzoo.GRU, IN, FEATURES, num_layers=2, dropout_rate=0.5, rngs=nnx.Rngs(0)
  )
  yield Case('Stack', dropped, {'x': x}, 'rngs', (nnx.Rngs(data=0),))


def functions():
  kernel = np.ones((1, 1, FEATURES, FEATURES), np.float32)
  gates = np.ones((BATCH, TIME, 1, FEATURES), np.float32)
  good = {'cell': rnnzoo.ElmanCell(), 'params': {}, 'x_gates': gates}
  good |= {'recurrent_kernel': kernel, 'carry': (h,)}
  kernels = (*ARRAYS, kernel.astype(int), kernel * 1j, kernel.astype(bool))
  kernels += (kernel.astype(jnp.float8_e4m3fn),)
  for f in (rnnzoo.unroll, rnnzoo.unroll_carries):
    for name, values in {
        'cell': CELLS,
        'params': ('foo', [h], 3, None and 0, {'w': 'foo'}, {'w': h + 1j}),
        'x_gates': (
            *ARRAYS,
            gates.astype(int),
            gates * 1j,
            gates[:, :, 0],
            gates[..., :0],
            gates.astype(jnp.float8_e4m3fn),
        ),
        'recurrent_kernel': kernels,
        'carry': (None, *CARRIES),
        'restart_carry': CARRIES,
        'reset': BOOLS,
        'mask': BOOLS,
        'reverse': FLAGS,
        'recurrent_gradient_clip': OPTIONS['recurrent_gradient_clip'],
        'stop_recurrent_gradient': FLAGS,
        'implementation': PATHS,
    }.items():
      values = tuple(v for v in values if name != 'params' or v is not None)
      yield Case(f.__name__, f, good, name, values)
  outputs = tuple(v for v in SIZES if v is not None)
  yield Case('unroll_carries', rnnzoo.unroll_carries, good, 'outputs', outputs)
  good = {'a': x, 'b': x}
  for name, values in {
      'a': (*ARRAYS, x[0], x.astype(jnp.float8_e4m3fn)),
      'b': (*ARRAYS, x[0]),
      'h0': (*STRANGE, 1, x, [[1.0]], [[1.0], [1.0, 2.0]], x[:, 0] * 1j),
      'reset': BOOLS,
      'reverse': FLAGS,
      'implementation': PATHS,
  }.items():
    yield Case('linear_scan', rnnzoo.linear_scan, good, name, values)
  for label, values in {
      'x': (*ARRAYS, x * 1j, x[0, 0], x[None, :, :0], x[..., :2]),
      'layer': (*LAYERS, rnnzoo.GRU),
      'reverse': FLAGS,
      'implementation': (*PATHS, 'scan', rnnzoo.Scan()),
  }.items():
    good = {'layer': layer('GRU'), 'x': x[:1]}
    yield Case('verify', rnnzoo.verify, good, label, values)
  yield Case(
      'constrain',
      rnnzoo.constrain,
      {},
      'params',
      (*STRANGE, None, h, {}, layer('IndRNN')),
  )


def methods():
  """Models whose inputs are tokens."""
  rngs, tokens = nnx.Rngs(0), np.ones((BATCH, TIME), np.int32)
  gru = lambda *sizes: rnnzoo.GRU(*sizes, rngs=rngs)
  model = models.LanguageModel(rnnzoo.GRU, 9, FEATURES, rngs=rngs)
  good = {'carry': model.initial_carry((BATCH,)), 'tokens': tokens[:, 0]}
  yield Case('LanguageModel', model, {'tokens': tokens}, 'tokens', TOKENS)
  yield Case('LanguageModel.step', model.step, good, 'tokens', TOKENS)
  yield Case('LanguageModel', model, {'tokens': tokens}, 'rngs', CALLS['rngs'])
  options = {'num_tokens': 9, 'every_step': True, 'rngs': rngs}
  model = models.SequenceModel(gru(FEATURES, 4), 3, **options)
  good = {'carry': model.initial_carry((BATCH,)), 'x': tokens[:, 0]}
  yield Case('SequenceModel.step', model.step, good, 'x', TOKENS)
  good = {'params': nnx.state(layer(), nnx.Param), 'rate': 0.5, 'key': key}
  keys = (*STRANGE, None, 0, np.int32(3), [1], jax.random.split(key))
  yield Case('dropconnect', rnnzoo.dropconnect, good, 'key', keys)
  model = models.Seq2Seq(
      gru(FEATURES, 4),
      gru(4 + FEATURES, 4),
      num_source_tokens=9,
      num_target_tokens=9,
      dropout_rate=0.5,
      rngs=rngs,
  )
  good = {'source': tokens, 'target': tokens, 'rngs': nnx.Rngs(0)}
  for name, values in {
      'source': TOKENS,
      'target': (*TOKENS, tokens[0], tokens[None]),
      'source_lengths': LENGTHS,
      'teacher_forcing': (*NUMBERS, None, -0.1, 1.1, 2, jnp.float32(nan)),
      'rngs': CALLS['rngs'],
  }.items():
    yield Case('Seq2Seq', model, good, name, values)
  memory = model.encode(tokens)
  good = {'memory': memory, 'carry': model.initial_carry(memory)}
  good['tokens'] = tokens[:, 0]
  yield Case('Seq2Seq.step', model.step, good, 'tokens', TOKENS)
  good = {'source': tokens, 'max_length': 3}
  for name, values in {
      'source': TOKENS,
      'lengths': LENGTHS,
      'max_length': SIZES,
      'num_beams': SIZES,
      'length_penalty': (*NUMBERS, None, -1.0),
  }.items():
    yield Case('Seq2Seq.decode', model.decode, good, name, values)


def conversions():
  shapes = {'weight_ih_l0': (16, 3), 'weight_hh_l0': (16, 4)}
  shapes |= {'bias_ih_l0': (16,), 'bias_hh_l0': (16,)}
  weights = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
  good = {'layer': layer(), 'state_dict': weights}
  dicts = [None, 'foo', 3, [h], {1: h}, {}]
  for name, w in weights.items():
    without = {k: v for k, v in weights.items() if k != name}
    dicts.append(without)
    wrong = (
        w * 1j,
        w[:1],
        w.astype(str),
        None,
        [[1], [1, 2]],
        w.astype(object),
        np.ma.masked_array(w, w > 0),
        np.float64(1e300) * w,
    )
    dicts += [weights | {name: value} for value in wrong]
  convert_to = (*STRANGE, None, rnnzoo.LSTM, layer('MinGRU'), nnx.LSTMCell)
  for name, values in {
      'state_dict': tuple(dicts),
      'layer': convert_to,
      'prefix': (None, 3, b'', ['']),
  }.items():
    yield Case('from_torch', convert.from_torch, good, name, values)
  good = {'layer': layer('GRU'), 'cell': nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))}
  from flax import linen as nn

  cells = (*CELLS, nn.GRUCell(4), nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
  cells += (nnx.GRUCell(3, 4, param_dtype=complex, rngs=nnx.Rngs(0)),)
  for name, values in {'layer': convert_to, 'cell': cells}.items():
    yield Case('from_flax', convert.from_flax, good, name, values)
  for label in ('LSTM', 'MinGRU', 'IndRNN'):

    def init(label=label, **options):
      made = getattr(linen, label)(**options)
      return made.init(key, x)

    good = {'in_features': IN, 'features': FEATURES}
    for option in ('features', 'use_bias', 'kernel_init', 'dtype'):
      yield Case('linen.' + label, init, good, option, OPTIONS[option])


SOURCES = (constructors, calls, functions, methods, conversions)
NAMED = tuple((source.__name__, source) for source in SOURCES)


def complaint(case: Case, value: Any) -> str | None:
  """Returns how a call went wrong, or None."""
  shown = f'{case.label}({case.name}={value!r:.60})'
  try:
    case.call(**(case.arguments | {case.name: value}))
  except (ValueError, TypeError, NotImplementedError) as error:
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1].filename
    if len(frames) == 1 and case.name in str(error):
      return None  # Python's own, about the call.
    if not any(part in place for part in OURS):
      return f'{shown}: from {place}: {type(error).__name__}: {error!s:.100}'
    if not names(case.name, str(error)):
      return f'{shown}: does not name it: {error!s:.160}'
    return None
  except BaseException as error:
    return f'{shown}: {type(error).__name__}: {error!s:.100}'
  return f'{shown}: no error'


# Words for an argument in a message, beside its name.
ALSO = {
    'a': ('a and b', 'a must', 'a:'),
    'b': ('a and b', 'b must', 'b:'),
    'cell': ('kernel of GRUCell',),
    'cell_params': ('params',),
    'params': ('param', 'nnx variables'),
    'state_dict': ('state dict', '_l0'),
    'layer': ('ayer',),
    'in_features': ('expects x',),
    'implementation': ('implementation',),
    'x': ('expects x', 'x of', 'carry must', 'tokens must'),
    'source_lengths': ('seq_lengths',),
}


def names(name: str, message: str) -> bool:
  return name in message or any(n in message for n in ALSO.get(name, ()))


def run(source, every: bool) -> list[str]:
  """Returns the complaints about calls, or about one for each wrong value."""
  pairs = [(case, value) for case in source() for value in case.values]
  random.Random(0).shuffle(pairs)
  if not every:
    pairs = {(case.name, repr(v)): (case, v) for case, v in pairs}.values()
  return [text for text in itertools.starmap(complaint, pairs) if text]


class FuzzTest(parameterized.TestCase):

  @parameterized.named_parameters(*NAMED)
  @pytest.mark.slow
  def test_some(self, source):
    self.assertEmpty(run(source, every=False))

  @parameterized.named_parameters(*NAMED)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_good_calls_work(self, source):
    # Otherwise an error could be about something else.
    done = set()
    for case in source():
      if case.label not in done and case.label != 'constrain':
        done.add(case.label)
        case.call(**case.arguments)


@pytest.mark.exhaustive
class AllTest(parameterized.TestCase):

  @parameterized.named_parameters(*NAMED)
  def test_all(self, source):
    self.assertEmpty(run(source, every=True))


if __name__ == '__main__':
  absltest.main()
