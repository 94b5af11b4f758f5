"""The console script `rnnzoo`, and `python -m rnnzoo`."""

import sys


def main() -> None:
  """Runs the command line; one sentence says which extra it needs."""
  try:
    # Here, since it needs packages that may not be installed.
    from rnnzoo.command import program
  except ModuleNotFoundError as error:
    if (error.name or 'rnnzoo').split('.')[0] in ('rnnzoo', 'pallas_kernels'):
      raise
    print(f'rnnzoo: {error}', file=sys.stderr)
    sys.exit(2)
  program.main()


if __name__ == '__main__':
  main()
