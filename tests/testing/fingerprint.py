"""Fingerprints of all programs: shows that a change of structure changes none.

The SHA-256 of every program that the lowering tests lower for a GPU (StableHLO,
and the MLIR of each kernel without locations), and of the jaxpr of every layer
on every path, forward and gradient. Needs jax >= 0.11.

    python tests/testing/fingerprint.py --write=/tmp/before.json
    python tests/testing/fingerprint.py --compare=/tmp/before.json
    python tests/testing/fingerprint.py --compare=/tmp/before.json --only=Dense

For a program that differs, the operations that it has more or fewer of are
printed. `--texts=DIR` writes the programs themselves, for `diff`.
"""

import collections
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import re
import sys
import unittest
from unittest import mock

from absl import app
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# Both are read when jax is imported.
os.environ.setdefault('NPROC', '16')
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')

LOWERING = (
    'tests.pallas_kernels.streaming.lowering_test',
    'tests.pallas_kernels.dense.lowering_test',
    'tests.pallas_kernels.tiled.lowering_test',
)

_WRITE = flags.DEFINE_string('write', None, 'File for the fingerprints.')
_COMPARE = flags.DEFINE_string('compare', None, 'File to compare with.')
_ONLY = flags.DEFINE_string('only', '', 'Regular expression of names.')
_TEXTS = flags.DEFINE_string('texts', None, 'Folder for the programs.')

# Names in a jaxpr or in StableHLO that are those of Python functions.
_NAMES = (
    (re.compile(r'<function [^>]*>|<bound method [^>]*>'), 'function'),
    (re.compile(r'\b(name|fun_name|debug_info|debug)=[^\s\]]+'), 'name'),
    (re.compile(r'(call|func\.func private) @[\w.]+'), 'call'),
    (re.compile(r'0x[0-9a-f]{6,}'), 'address'),
    (re.compile(r'(pallas_kernels|rnnzoo)(\.\w+)+'), 'module'),
)
_BLOB = re.compile(r'(kernel_hash|module) = "(?:[^"\\]|\\.)*"')
_OPERATION = re.compile(r'= "?([a-z_]+\.?[a-z_.]*)')


def _scrub(text: str) -> str:
  text = _BLOB.sub('', text)
  for pattern, word in _NAMES:
    text = pattern.sub(word, text)
  return text


class Programs:
  """Texts become hashes and counts of operations, by name."""

  def __init__(self):
    self.found = {}

  def add(self, name: str, text: str, operations=None):
    text = _scrub(text)
    count = sum(key.split('#')[0] == name for key in self.found)
    name = f'{name}#{count}'
    if operations is None:
      operations = collections.Counter(_OPERATION.findall(text))
    self.found[name] = {
        'sha256': hashlib.sha256(text.encode()).hexdigest(),
        'operations': dict(sorted(operations.items())),
    }
    if _TEXTS.value:
      folder = pathlib.Path(_TEXTS.value)
      folder.mkdir(parents=True, exist_ok=True)
      (folder / re.sub(r'\W+', '_', name)).write_text(text)


def lowered(programs: Programs, only: re.Pattern):
  """Runs the lowering tests, and takes each program that they lower."""
  from jax.experimental.mosaic.gpu import core

  from tests.testing import abstract_gpu as gpu

  kernels = []
  serialize, lower = core._run_serde_pass, gpu.lower

  def note(module, **options):
    if options.get('serialize'):
      kernels.append(str(module))
    return serialize(module, **options)

  for name in LOWERING:
    cases = unittest.defaultTestLoader.loadTestsFromModule(
        importlib.import_module(name)
    )
    for case in itertools.chain.from_iterable(cases):
      label = case.id().split(' ')[0]
      label = '.'.join(label.split('.')[-2:])
      if not only.search(label):
        continue

      def noted(f, *args, label=label):
        kernels.clear()
        text = lower(f, *args)
        programs.add(label, '\n'.join([text, *kernels]))
        return text

      result = unittest.TestResult()
      with mock.patch.object(core, '_run_serde_pass', note):
        with mock.patch.object(gpu, 'lower', noted):
          case.run(result)
      for _, message in result.errors + result.failures:
        print(f'{label} FAILED\n{message}', file=sys.stderr)
      print('.', end='', flush=True, file=sys.stderr)


def _run(graphdef, state, x, reset, mask):
  """Returns the sum of all that a layer returns."""
  import flax.nnx
  import jax
  import jax.numpy as jnp

  layer = flax.nnx.merge(graphdef, state)
  given = {} if mask is None else {'mask': mask, 'reverse': True}
  carry, y = layer.unroll(x, reset=reset, **given)
  return sum(jnp.sum(v) for v in jax.tree.leaves((carry, y)))


def _operations(jaxpr) -> collections.Counter:
  """Counts primitives, within all inner jaxprs as well."""
  import jax

  counts = collections.Counter()
  for equation in jaxpr.eqns:
    counts[equation.primitive.name] += 1
    for inner in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr'),
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        counts += _operations(inner)
  return counts


def traced(programs: Programs, only: re.Pattern):
  """Traces every layer on every path, forward and gradient."""
  from flax import nnx
  import jax
  import jax.numpy as jnp

  import rnnzoo
  from tests.testing import abstract_gpu as gpu

  x = jax.ShapeDtypeStruct((3, 5, 4), jnp.float32)
  reset = jax.ShapeDtypeStruct((3, 5), bool)
  paths = ('scan', 'associative_scan', 'pallas')
  wholes = {
      'alone': lambda make: make,
      'stack': lambda make: lambda *a, **k: rnnzoo.Stack(
          make, *a, num_layers=2, **k
      ),
      'both': lambda make: lambda *a, **k: rnnzoo.Bidirectional(make, *a, **k),
  }
  for (name, cls), path, form in itertools.product(
      rnnzoo.LAYERS.items(), paths, wholes
  ):
    label = f'{name}-{path}-{form}'
    if not only.search(label):
      continue
    factory = functools.partial(
        wholes[form](cls), 4, 8, implementation=path, learn_initial_carry=True
    )
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda factory=factory: factory(rngs=nnx.Rngs(0)))
    )
    run = functools.partial(_run, graphdef)
    device = gpu.mesh('NVIDIA H200') if path == 'pallas' else None
    for flags_given in ((None, None), (reset, reset)):
      for f in (run, jax.grad(run, (0, 1))):
        try:
          if device is not None:
            with gpu.device(unittest.TestCase(), 'NVIDIA H200'):
              jaxpr = jax.make_jaxpr(f)(state, x, *flags_given)
          else:
            jaxpr = jax.make_jaxpr(f)(state, x, *flags_given)
        except NotImplementedError:
          continue
        programs.add(label, str(jaxpr), _operations(jaxpr.jaxpr))


def main(argv):
  del argv
  only = re.compile(_ONLY.value)
  programs = Programs()
  traced(programs, only)
  lowered(programs, only)
  if _WRITE.value:
    pathlib.Path(_WRITE.value).write_text(json.dumps(programs.found, indent=1))
  if not _COMPARE.value:
    print(f'{len(programs.found)} programs')
    return
  before = json.loads(pathlib.Path(_COMPARE.value).read_text())
  before = {k: v for k, v in before.items() if only.search(k)}
  other = [k for k in before if k not in programs.found]
  other += [k for k in programs.found if k not in before]
  differ = 0
  for name, now in programs.found.items():
    then = before.get(name, now)
    if then['sha256'] != now['sha256']:
      differ += 1
      change = collections.Counter(now['operations'])
      change.subtract(then['operations'])
      print(name, {k: v for k, v in change.items() if v} or 'same operations')
  same = len(programs.found) - differ
  print(f'{same} programs are equal, {differ} differ, on one side: {other}')
  if differ or other:
    sys.exit(1)


if __name__ == '__main__':
  app.run(main)
