"""`python -m rnnzoo`: the console script."""

from rnnzoo.command import program

if __name__ == '__main__':
  program.main()
