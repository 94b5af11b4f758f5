"""Entry point of `python -m rnnzoo.benchmark`."""

from absl import app

from rnnzoo.benchmark import program

if __name__ == '__main__':
  app.run(program.main, flags_parser=program.parse_flags)
