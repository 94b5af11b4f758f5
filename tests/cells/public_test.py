"""Layers against public packages; record_public.py made the record of them.

LinOSS of discretax has a complex B and C, and so two oscillators of ours for
each; its damping, which the paper lacks, is off. The complex HGRN, by the
paper's authors, ran with an RMS norm for its LayerNorm, and fewer biases.
"""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import numpy as np

import rnnzoo
from tests.testing import reference

RECORD = dict(np.load(pathlib.Path(__file__).parent / 'public.npz'))


def lru(p):
  for name in ('nu', 'theta', 'gamma'):
    yield f'cell_params/{name}', p[f'{name}_log']
  for name, letter in (('kernel', 'B'), ('readout/kernel', 'C')):
    yield name, [p[f'{letter}_re'].T, p[f'{letter}_im'].T]
  yield 'readout/skip', p['D']


def s5(p):
  yield 'cell_params/log_step', p['log_step'][:, 0]
  for name in ('re', 'im'):
    yield f'cell_params/{name}', p[f'Lambda_{name}']
  yield 'kernel', p['B'].T
  yield 'readout/kernel', p['C'].T
  yield 'readout/skip', p['D']


def linoss(p):
  yield 'cell_params/stiffness', np.tile(p['A_diag'], 2)
  yield 'cell_params/step', np.tile(p['steps'], 2)
  yield 'kernel', [np.concatenate(p['B'].T, axis=1)]
  yield 'readout/kernel', [np.concatenate([p['C'].T[0], -p['C'].T[1]])]
  yield 'readout/skip', p['D']


def hgrn(p):
  yield 'kernel', [p['f_proj.weight'].T, p['i_proj.weight'].T]
  yield 'readout/gate', p['g_proj.weight'].T
  yield 'readout/scale', p['g_norm.weight']
  yield 'readout/kernel', p['o_proj.weight'].T


def hgrn_complex(p):
  for ours, name in (('kernel', 'weight'), ('bias', 'bias')):
    i = p[f'input_proj.{name}']  # Real and imaginary rows in turn.
    yield ours, [a.T for a in (p[f'lambda_proj.{name}'], i[::2], i[1::2])]
  yield 'cell_params/theta', p['theta'][0, 0]
  yield 'readout/gate', p['gate.weight'].T
  yield 'readout/scale', p['norm.weight']
  yield 'readout/kernel', p['out_proj.weight'].T


def cfc(p):
  of = lambda kind: [v.T for k, v in p.items() if k.endswith(kind)]
  both = np.stack(of('.weight'))
  yield 'input_map/kernel', both[:, :3]
  yield 'input_map/bias', of('.bias')
  yield 'recurrent_kernel', both[:, None, 3:]
  if len(both) == 1:
    yield 'cell_params/w', p['rnn_cell.w_tau'][0]
    yield 'cell_params/A', p['rnn_cell.A'][0]


THREE, SIX, WAY = {'state_features': 3}, {'state_features': 6}, 'discretization'
TIMED, BOUND = {'timespans': True}, {'lower_bound': RECORD['bound']}
CASES = {  # Layer, mapping, options.
    'lru_discretax': (rnnzoo.LRU, lru, THREE),
    'lru_memax': (rnnzoo.LRU, lru, {}),
    's5_zoh': (rnnzoo.S5, s5, THREE),
    's5_bilinear': (rnnzoo.S5, s5, THREE | {WAY: 'bilinear'}),
    's5_authors_zoh': (rnnzoo.S5, s5, THREE),
    's5_authors_bilinear': (rnnzoo.S5, s5, THREE | {WAY: 'bilinear'}),
    'linoss_IM': (rnnzoo.LinOSS, linoss, SIX),
    'linoss_IMEX': (rnnzoo.LinOSS, linoss, SIX | {WAY: 'implicit_explicit'}),
    'hgrn': (rnnzoo.HGRN, hgrn, BOUND | {'use_bias': False}),
    'hgrn_complex': (rnnzoo.HGRN, hgrn_complex, BOUND | {'complex': True}),
    'cfc_default': (rnnzoo.CfC, cfc, TIMED),
    'cfc_no_gate': (rnnzoo.CfC, cfc, TIMED | {'mode': 'no_gate'}),
    'cfc_pure': (rnnzoo.CfC, cfc, TIMED | {'mode': 'pure'}),
}


class PublicTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in CASES)
  def test_agrees(self, name):
    make, mapping, options = CASES[name]
    x, y, dx = (RECORD[f'{name}/{key}'] for key in ('x', 'y', 'dx'))
    start = f'{name}/params/'
    given = {k.removeprefix(start): v for k, v in RECORD.items() if start in k}
    flat = {k: nnx.Param(np.asarray(v)) for k, v in mapping(given)}
    new = nnx.from_flat_state({tuple(k.split('/')): v for k, v in flat.items()})

    @reference.jit
    def run(layer, x):
      y, pull = jax.vjp(layer, x)
      return y, *pull(2 * y)

    for path in ('scan', 'associative_scan'):
      layer = make(4, 4, implementation=path, rngs=nnx.Rngs(0), **options)
      graphdef, old, rest = nnx.split(layer, nnx.Param, ...)
      shapes = lambda state: jax.tree.map(np.shape, nnx.to_pure_dict(state))
      self.assertEqual(shapes(new), shapes(old))
      layer = nnx.merge(graphdef, new, rest)
      for got, want in zip(run(layer, x), (y, dx), strict=True):
        error = np.max(np.abs(got - want)) / np.max(np.abs(want))
        self.assertLess(error, 2e-6, path)


if __name__ == '__main__':
  absltest.main()
