"""Settings for a pytest run of the whole suite.

A test file does not depend on them: `python tests/x_test.py` runs it alone.
"""

import atexit
import gc
import os
import shutil
import tempfile

from absl import flags
import pytest

from tests.testing import compilation

# The workers of pytest-xdist share one accelerator where there is one, and JAX
# by default takes most of its memory for the first process.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

# See abstract_gpu.py, which comes too late where another test came first.
os.environ.setdefault('NPROC', '16')

# Tracing and lowering take most of the time. They make many objects that live
# on, and note for each operation which lines it came from.
gc.set_threshold(100_000, 50, 1_000)
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')

# Programs that tests start inherit this too.
os.environ.setdefault('XLA_FLAGS', compilation.XLA_FLAGS)

# Workers, and programs that tests start, compile many functions that are the
# same, most of them in less time than a default cache keeps. Where Python may
# not write bytecode beside sources, each program would parse all of JAX, which
# takes longer than what most of them are for. .ci/run has one directory for all
# of its runs.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _CACHE = tempfile.mkdtemp(prefix='jax_cache_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = os.path.join(_CACHE, 'jax')
  if os.environ.pop('PYTHONDONTWRITEBYTECODE', None):
    os.environ['PYTHONPYCACHEPREFIX'] = os.path.join(_CACHE, 'bytecode')
  atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')

# absltest keeps its settings (its temporary directory, say) in absl flags,
# which nothing parses under pytest. The defaults are right.
flags.FLAGS.mark_as_parsed()


def pytest_addoption(parser):
  parser.addoption(
      '--fail_on_skip',
      action='store_true',
      help='A skipped test fails: nothing is passed over in silence.',
  )


def _fail_if_skipped(report, config):
  if report.skipped and config.getoption('--fail_on_skip'):
    report.outcome = 'failed'
    report.longrepr = (
        f'Skipped, which --fail_on_skip forbids: {report.longrepr}'
    )
  return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
  report = yield
  return _fail_if_skipped(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
  report = yield
  return _fail_if_skipped(report, collector.config)


def pytest_ignore_collect(collection_path):
  """Skips helper files, which --doctest-modules would import otherwise."""
  if collection_path.suffix == '.py':
    if not collection_path.name.endswith('_test.py'):
      return True
  return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Makes all but a few cases exhaustive, where a test is marked `few`."""
  groups = {}
  for item in items:
    mark = item.get_closest_marker('few')
    if mark is not None:
      groups.setdefault((item.cls, id(mark)), (mark, []))[1].append(item)
  for mark, cases in groups.values():
    (count,) = mark.args
    # Spread over the list: first and last cases differ in most parameters.
    step = (len(cases) - 1) / max(1, count - 1)
    kept = {round(i * step) for i in range(count)}
    for i, item in enumerate(cases):
      if i not in kept:
        item.add_marker('exhaustive')
