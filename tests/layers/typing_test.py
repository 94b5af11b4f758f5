"""A type checker finds options and carries that a layer does not have."""

import pathlib
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# A line that ends in a comment has an error, which names this first.
SNIPPET = """
from flax import nnx
import jax.numpy as jnp
import rnnzoo

rngs = nnx.Rngs(0)
zeros = nnx.initializers.zeros

class Mine(rnnzoo.RecurrentLayer):

  def __init__(self, in_features: int, features: int, **options):
    super().__init__(rnnzoo.LSTMCell(), in_features, features, **options)

Mine(3, 8, use_bias=False, rngs=rngs)
rnnzoo.LSTM(3, 8, forget_bias=1.0, dtype=jnp.bfloat16, max_abs=1.0, rngs=rngs)
rnnzoo.MinGRU(3, 8, implementation=('pallas', 'scan'), rngs=rngs)
rnnzoo.AGRU(3, 8, kernel_init=zeros, bias_init=zeros, rngs=rngs)
rnnzoo.Stack(rnnzoo.LSTM, 3, 8, forget_bias=1.0, rngs=rngs)
carry, _ = rnnzoo.LSTM(3, 8, rngs=rngs).unroll(jnp.ones((2, 5, 3)))
carry.c.shape
carry.no_such_part  # LSTMCarry
rnnzoo.LSTM(3, 8, no_such_option=3, rngs=rngs)  # no_such_option
rnnzoo.GRU(3, 8, use_bias='yes', rngs=rngs)  # use_bias
rnnzoo.MinGRU(3, 8, implementation=3, rngs=rngs)  # implementation
rnnzoo.SLSTM(3, 8, bias_init=zeros, rngs=rngs)  # bias_init
rnnzoo.RecurrentLayer(rnnzoo.LSTMCell(), 3, 8, no_such=3, rngs=rngs)  # no_such
"""


class TypingTest(absltest.TestCase):

  @pytest.mark.exhaustive
  def test_mypy_finds_wrong_options(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'snippet.py')
      path.write_text(SNIPPET)
      command = [sys.executable, '-m', 'mypy', '--config-file=pyproject.toml']
      result = subprocess.run(
          [*command, '--no-color-output', str(path)],
          cwd=ROOT,
          capture_output=True,
          text=True,
          check=False,
      )
    found = re.findall(r'snippet\.py:(\d+): error: .*?"(\w+)"', result.stdout)
    expected = [
        (str(number), line.rpartition('  # ')[2])
        for number, line in enumerate(SNIPPET.split('\n'), 1)
        if '  # ' in line
    ]
    self.assertEqual(found, expected, result.stdout + result.stderr)


if __name__ == '__main__':
  absltest.main()
