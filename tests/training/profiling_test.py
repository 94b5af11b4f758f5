"""The trace of a few steps: its operators, their parts, and the table."""

import gzip
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from rnnzoo.training import profile
from tests.testing import made_up_data
from tests.testing import made_up_task
from tests.training import made_up_runs

HLO = """
HloModule jit_f
  %dot.1 = f32[2] dot(%a), metadata={op_name="f/jvp(recurrence)/projection/d"}
  ROOT %add.2 = f32[2] add(%a), metadata={op_name="transpose(recurrence)/add"}
  %copy.3 = f32[2] copy(%a)
  %topk.4 = f32[2] custom-call(%a, %dot.1), metadata={scheduling_name="topk.4"}
"""


def event(name, begin, duration, tid=7, pid=1, **args):
  return {
      'ph': 'X',
      'pid': pid,
      'tid': tid,
      'ts': begin,
      'dur': duration,
      'name': name,
      'args': {'hlo_module': 'jit_f', 'hlo_op': name} | args,
  }


def named(kind, name, pid=1, tid=7):
  args = {'name': name}
  return {'ph': 'M', 'pid': pid, 'tid': tid, 'name': kind, 'args': args}


class TraceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def read(self, *events):
    path = self.directory / 'plugins' / 'here.trace.json.gz'
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, 'wt') as file:
      json.dump({'traceEvents': [*events, {}]}, file)
    return profile.read(self.directory, HLO)

  def test_on_a_cpu(self):
    found, span, gaps = self.read(
        named('process_name', '/host:CPU'),
        event('while.4', 0.0, 100.0),
        event('dot.1', 10.0, 5.0),
        event('dot.1', 40.0, 7.0),
        event('add.2', 42.0, 30.0),
        event('copy.3', 90.0, 1.0),
        event('topk.4', 91.0, 0.5),
    )
    self.assertSequenceEqual(
        found,
        [
            profile.Operator('add.2', 'recurrence', 'backward', 1, 30.0),
            profile.Operator('dot.1', 'projection', 'forward', 2, 12.0),
            profile.Operator('copy.3', 'other', 'forward', 1, 1.0),
            profile.Operator('topk.4', 'projection', 'forward', 1, 0.5),
        ],
    )
    # Operators run from 10 to 15, 40 to 72 and 90 to 91.5.
    self.assertEqual((span, gaps), (81.5, 25.0 + 18.0))
    lines = profile.table(found, span, gaps, num_steps=2)
    self.assertEqual(
        lines[0],
        'traced: 0.041 ms a step, of which 0.021 ms (53%) without an operator;'
        ' 2 operators a step',
    )
    self.assertRegex(lines[3], r'^recurrence +backward +0.5 +0.0150 +69.0%$')

  def test_on_a_gpu_kernels_count_once(self):
    found, *rest = self.read(
        named('process_name', '/host:CPU'),
        named('process_name', '/device:GPU:0', pid=2),
        named('thread_name', 'Stream #13(Compute)', pid=2, tid=5),
        named('thread_name', 'XLA Ops', pid=2, tid=6),
        event('dot.1', 0.0, 9.0),
        event('gemm_kernel', 0.0, 4.0, pid=2, tid=5, hlo_op='dot.1'),
        event('dot.1', 0.0, 4.0, pid=2, tid=6),
    )
    self.assertSequenceEqual(
        found,
        [profile.Operator('gemm_kernel', 'projection', 'forward', 1, 4.0)],
    )
    self.assertIn('1 operators a step', profile.table(found, *rest, 1)[0])

  def test_nothing_to_read(self):
    with self.assertRaisesRegex(ValueError, 'holds no .*trace.json.gz'):
      profile.read(self.directory, '')
    with self.assertRaisesRegex(ValueError, 'has no operator'):
      self.read(event('while.1', 0.0, 1.0))


@pytest.mark.slow
class ProfileTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': made_up_task.SignTask, 'sum': made_up_data.SumTask}

  @parameterized.parameters(
      ('sign', 'device'), ('sign', 'host'), ('sum', 'device')
  )
  @pytest.mark.few(2)
  def test_parts_of_a_model(self, task, keep_data_on):
    text = profile.profile(self.prepare(task, keep_data_on=keep_data_on))
    # The compiler may merge the directions of a part.
    for part in ('projection', 'recurrence', 'logits'):
      self.assertRegex(text, rf'\n{part} +(forward|backward) ')
    self.assertRegex(text, r'\noptimizer +forward ')
    self.assertRegex(text, r'\na step takes [\d.]+ ms')
    traces = self.workdir.rglob('run/profile/**/*.trace.json.gz')
    self.assertNotEmpty([*traces])
    self.assertFalse((self.workdir / 'run/seed_0').exists())


if __name__ == '__main__':
  absltest.main()
