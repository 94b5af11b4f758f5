"""Entry point of `python -m rnnzoo.benchmark`."""

from absl import app
from absl import flags

from rnnzoo.benchmark import program

flags.adopt_module_key_flags(program)  # --help explains them.

if __name__ == '__main__':
  app.run(program.main, flags_parser=program.parse_flags)
