"""The commands of `rnnzoo`, each a function of the rest of its words."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import shlex
import signal
import sys
import types

from absl import app
import jax

import rnnzoo
from rnnzoo import tasks
from rnnzoo.command import comparison
from rnnzoo.command import sweep
from rnnzoo.training import command_line
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import run_directory
from rnnzoo.training import trained

# Where the run goes, as soon as that is known.
_WORKDIR_FOUND: list[str] = []


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command that the words of the command line name.

  Args:
    argv: the words after the program's name; None for those of this process.
  """
  words = list(sys.argv[1:] if argv is None else argv)
  processes.set_name('rnnzoo')
  parser = argparse.ArgumentParser(
      'rnnzoo',
      description='Recurrent networks in JAX.',
      epilog=_HELP,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--version', action='version', version=_version())
  parser.add_argument('command', choices=COMMANDS)
  # The command's own words come after it, whatever they are.
  parsed = parser.parse_args(words[:1])
  try:
    COMMANDS[parsed.command](words[1:])
    if sys.stdout is not None:  # A shell's `>&-` closes it.
      sys.stdout.flush()
  except MemoryError as error:
    processes.give_up(processes.needs_memory(error))
  except BrokenPipeError:
    processes.stop_printing()  # Whoever reads has enough, as `head`.


def _version() -> str:
  return f'rnnzoo {rnnzoo.__version__}, jax {jax.__version__}'


def _train(words: list[str]) -> None:
  """Trains a config: its name or its file first, then flags as of train.py."""
  if words in (['--help'], ['-h']):
    print(_TRAIN_HELP)
    return
  if words and not words[0].startswith('-'):
    words = [f'--config={words[0]}', *words[1:]]
  for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
      signal.signal(number, lambda number, _: _interrupt(words, number))
  app.run(
      lambda argv: command_line.main(argv, _WORKDIR_FOUND.append),
      argv=['rnnzoo train', *words],
      flags_parser=command_line.parse_flags,
  )


def _interrupt(words: Sequence[str], number: int) -> None:
  """Ends at once, as a kill would, with a line that says how to go on."""
  if _WORKDIR_FOUND and not any('-workdir' in word for word in words):
    words = [*words, f'--workdir={_WORKDIR_FOUND[0]}']
  command = shlex.join(['rnnzoo', 'train', *words])
  os.write(2, f'\nrnnzoo: interrupted; to go on: {command}\n'.encode())
  os._exit(128 + number)


def _list(words: list[str]) -> None:
  """Prints the configs by task, with the first lines of their docstrings."""
  argparse.ArgumentParser('rnnzoo list').parse_args(words)
  command_line.make_importable()
  by_task: dict[str, list[str]] = {}
  for name in command_line.config_names():
    task, title = command_line.describe_config(name)
    by_task.setdefault(task, []).append(f'  {name:<32} {title}')
  for task, lines in sorted(by_task.items()):
    print(f'{task}:', *sorted(lines), sep='\n')
  print(f'layers: {", ".join(rnnzoo.LAYERS)}')
  print(f'tasks: {", ".join(tasks.known())}')


def _experiment(directory: str) -> experiments.Experiment:
  """Returns the experiment of a run directory, from its files."""
  with _one_sentence():
    path = files.expand(directory)
    config, run = run_directory.read(path)
    name = run.get('experiment', path.name)
    try:
      # Output is for results alone.
      with contextlib.redirect_stdout(sys.stderr):
        return experiments.prepare(config, str(path), name, mode='evaluate')
    except (FileNotFoundError, ConnectionError) as error:
      processes.give_up(processes.needs_data(error))


def _load(directory: str, seed: int | None) -> trained.Trained:
  """Returns the model of a run directory."""
  with _one_sentence(), contextlib.redirect_stdout(sys.stderr):
    return trained.load(directory, seed)


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
  try:
    yield
  except BrokenPipeError:
    raise
  except (OSError, NotImplementedError, ValueError) as error:
    processes.give_up(error)


def _run_parser(name: str, text: str) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(f'rnnzoo {name}', description=text)
  parser.add_argument('run', help='the run directory')
  parser.add_argument(
      '--model_seed',
      type=int,
      help='whose model, of a run of several seeds; the first by default, and'
      ' all are tested',
  )
  return parser


def _evaluate(words: list[str]) -> None:
  """Tests the best models of a run once more."""
  parser = _run_parser(
      'evaluate', 'Tests the best model of each seed, or of one.'
  )
  parsed = parser.parse_args(words)
  experiment = _experiment(parsed.run)
  with _one_sentence():
    print(trained.evaluate(experiment, parsed.model_seed))


def _predict(words: list[str]) -> None:
  """Prints a line for each line of stdin."""
  parser = _run_parser('predict', 'Prints a line for each line of stdin.')
  parsed = parser.parse_args(words)
  loaded = _load(parsed.run, parsed.model_seed)
  with _one_sentence():
    for line in loaded.predict_lines(command_line.read_stdin()):
      print(line, flush=True)


def _sample(words: list[str]) -> None:
  """Prints text that goes on from a prompt."""
  parser = _run_parser('sample', 'Prints text that goes on from a prompt.')
  parser.add_argument('--prompt', default='', help='how the text begins')
  parser.add_argument(
      '--length', type=int, help="characters; the config's by default"
  )
  parser.add_argument(
      '--temperature',
      type=float,
      help="divides logits, 0 for the most likely; the config's by default",
  )
  parser.add_argument(
      '--seed', type=int, help="of the random choices; the model's by default"
  )
  parsed = parser.parse_args(words)
  loaded = _load(parsed.run, parsed.model_seed)
  with _one_sentence():
    pieces = command_line.sample(
        loaded,
        parsed.prompt,
        parsed.seed,
        length=parsed.length,
        temperature=parsed.temperature,
    )
    for piece in pieces:
      print(piece, end='', flush=True)
    print()


def _compare(words: list[str]) -> None:
  """Compares finished runs: a table, and a figure."""
  parser = argparse.ArgumentParser(
      'rnnzoo compare', description='Compares finished runs.'
  )
  parser.add_argument('runs', nargs='+', help='run directories')
  parser.add_argument(
      '--output',
      default='comparison',
      help='directory for comparison.md and comparison.png',
  )
  parsed = parser.parse_args(words)
  with _one_sentence():
    print(comparison.compare(parsed.runs, parsed.output))
    print(f'written: comparison.md and comparison.png in {parsed.output}')


def _sweep(words: list[str]) -> None:
  """Trains a config with all combinations of values, and compares the runs."""
  try:
    failed = sweep.main(words)
  except (OSError, ValueError, files.RunFileError) as error:
    processes.give_up(error)
  sys.exit(3 if failed else 0)


COMMANDS: Mapping[str, Callable[[list[str]], None]] = types.MappingProxyType(
    {
        'train': _train,
        'list': _list,
        'evaluate': _evaluate,
        'predict': _predict,
        'sample': _sample,
        'compare': _compare,
        'sweep': _sweep,
    }
)

_TRAIN_HELP = """usage: rnnzoo train CONFIG [--config.FIELD=VALUE ...] [flags]

CONFIG is a name, as `rnnzoo list` prints them, or a file. Its fields are in the
file and in configs/base.py. Flags:

  --workdir=DIRECTORY       of the run; a run that is there goes on
  --config.num_seeds=5      any field of the config
  --helpfull                all flags, those for several processes too"""

_HELP = '\n'.join(
    [
        'commands:',
        *(
            f'  {name:<10}{(function.__doc__ or "").splitlines()[0]}'
            for name, function in COMMANDS.items()
        ),
    ]
)
