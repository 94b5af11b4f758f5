"""The commands of `rnnzoo`, each a function of the rest of its words."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import functools
import io
import os
import shlex
import signal
import sys

from absl import app
import jax
import ml_collections

import rnnzoo
from rnnzoo import tasks
from rnnzoo.command import answers
from rnnzoo.command import comparison
from rnnzoo.command import sweep
from rnnzoo.tasks import fields
from rnnzoo.tasks.text import files as text_files
from rnnzoo.training import command_line
from rnnzoo.training import experiment as experiments
from rnnzoo.training import processes
from rnnzoo.training import profile
from rnnzoo.training import run_directory
from rnnzoo.training import trained

# The directory of the run, as soon as it is known.
_WORKDIR_FOUND: list[str] = []


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command that the words of the command line name.

  Without words they are this process's, after the program's name.
  """
  words = list(sys.argv[1:] if argv is None else argv)
  processes.set_name('rnnzoo')
  parser = argparse.ArgumentParser(
      'rnnzoo',
      description='Recurrent networks in JAX.',
      epilog=_HELP,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  version = f'rnnzoo {rnnzoo.__version__}, jax {jax.__version__}'
  parser.add_argument('--version', action='version', version=version)
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
  except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)


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


def _run_parser(name: str, text: str) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(f'rnnzoo {name}', description=text)
  parser.add_argument('run', help='the run directory')
  parser.add_argument(
      '--model_seed',
      type=int,
      help='whose model, of a run of several seeds; by default the first'
      ' answers, and all are tested',
  )
  return parser


def _add_profile(parser: argparse.ArgumentParser, lines: str) -> None:
  parser.add_argument(
      '--profile',
      action='store_true',
      help=f'translates {lines}, and prints where the time goes',
  )


def _load(parsed: argparse.Namespace) -> trained.Trained:
  """Returns the model of the run that the words name."""
  # Output is for results alone.
  with processes.one_sentence(), contextlib.redirect_stdout(sys.stderr):
    return trained.load(parsed.run, parsed.model_seed)


def _evaluate(words: list[str]) -> None:
  """Tests the best models of a run once more."""
  parser = _run_parser(
      'evaluate', 'Tests the best model of each seed, or of one.'
  )
  parser.add_argument('--text', help='a file to test on in place of the data')
  parser.add_argument('--input', help='an .npz file with y to test on')
  _add_profile(parser, 'the sources of the test')
  parsed = parser.parse_args(words)
  if parsed.text is not None and parsed.input is not None:
    parser.error('give --text or --input, not both')
  with processes.one_sentence():
    path = fields.expand(parsed.run)
    config, run = run_directory.read(path)
    if parsed.text is not None or parsed.input is not None:
      _evaluate_file(parsed, config)
      return
    name = run.get('experiment', path.name)
    try:
      with contextlib.redirect_stdout(sys.stderr):
        found = experiments.prepare(config, str(path), name, mode='evaluate')
    except (FileNotFoundError, ConnectionError) as error:
      processes.give_up(processes.needs_data(error))
    if parsed.profile:
      seed = config.seed if parsed.model_seed is None else parsed.model_seed
      model = trained.best_model(found, seed)
      processes.say(profile.of_decoding(found.task, model, path / 'profile'))
      return
    print(trained.evaluate(found, parsed.model_seed))


def _evaluate_file(
    parsed: argparse.Namespace, config: ml_collections.ConfigDict
) -> None:
  """Prints how well the best models of a run do on other data."""
  if parsed.text is not None:
    text = text_files.read(parsed.text, '--text')
    score = lambda found: found.perplexity(text)
  else:
    inputs = answers.read(fields.expand(parsed.input, '--input'))
    score = functools.partial(answers.score, inputs)
  seeds = [parsed.model_seed]
  if parsed.model_seed is None:
    seeds = [*range(config.seed, config.seed + config.num_seeds)]
  for parsed.model_seed in seeds:
    found = score(_load(parsed))
    form = lambda x: f'{x:,}' if isinstance(x, int) else f'{x:.4g}'
    numbers = (f'{name} {form(value)}' for name, value in found.items())
    print(f'seed {parsed.model_seed}: {", ".join(numbers)}')


def _predict(words: list[str]) -> None:
  """Answers the arrays of a file, or each line of stdin."""
  parser = _run_parser(
      'predict',
      'Answers the arrays of --input or, without it, each line of stdin.',
  )
  parser.add_argument('--input', help='arrays in an .npz or .csv file')
  parser.add_argument(
      '--output', help='a .csv file; the standard output by default'
  )
  parser.add_argument(
      '--proba', action='store_true', help='the probability of each class, too'
  )
  _add_profile(parser, 'the lines of stdin')
  parsed = parser.parse_args(words)
  if parsed.profile:
    found = _load(parsed)
    with processes.one_sentence():
      path = fields.expand(parsed.run) / 'profile'
      lines = found.checked_lines(_read_stdin())
      processes.say(profile.of_decoding(found.task, found.model, path, lines))
    return
  if parsed.input is None:
    if parsed.output or parsed.proba:
      parser.error('--output and --proba are for the arrays of --input')
    found = _load(parsed)
    with processes.one_sentence():
      for line in found.predict_lines(_read_stdin()):
        processes.say(line)
    return
  with processes.one_sentence():
    inputs = answers.read(fields.expand(parsed.input, '--input'))
    output = parsed.output and fields.expand(parsed.output, '--output')
    answers.write(output, _load(parsed), inputs, parsed.proba)


def _read_stdin() -> Iterable[str]:
  """Returns the lines of stdin; `predict_lines` tells which is not UTF-8."""
  if isinstance(sys.stdin, io.TextIOWrapper):
    # Without the mark that some editors begin a file with. A carriage return
    # inside of a line ends none.
    sys.stdin.reconfigure(
        encoding='utf-8-sig', errors='surrogateescape', newline='\n'
    )
  return sys.stdin or ()


def _sample(words: list[str]) -> None:
  """Prints text that goes on from a prompt."""
  parser = _run_parser('sample', 'Prints text that goes on from a prompt.')
  parser.add_argument(
      '--prompt', action='append', help='how a text begins; once for each text'
  )
  for flag, kind, text in (
      ('length', int, "tokens; the config's by default"),
      (
          'temperature',
          float,
          "divides logits, 0 for the most likely; the config's by default",
      ),
      ('top_k', int, 'choose from so many of the most likely tokens'),
      ('top_p', float, 'choose from tokens of this probability'),
      ('seed', int, "of the random choices; the model's by default"),
  ):
    parser.add_argument(f'--{flag}', type=kind, help=text)
  options = vars(parser.parse_args(words))
  model = _load(argparse.Namespace(**options))
  for name in ('run', 'model_seed'):
    del options[name]
  prompts, seed = options.pop('prompt') or [''], options.pop('seed')
  with processes.one_sentence():
    rule = fields.seed()
    if seed is not None and not rule.allows(seed):
      raise ValueError(f'seed must be {rule.text}; got {seed}')
    key = None if seed is None else jax.random.key(seed)
    if len(prompts) > 1:  # They have an empty line between.
      processes.say('\n\n'.join(model.sample_many(prompts, key, **options)))
      return
    for piece in model.sample(prompts[0], key, **options):
      processes.say(piece, end='')
    processes.say('')


def _compare(words: list[str]) -> None:
  """Compares finished runs: tables, paired tests, and a figure."""
  parser = argparse.ArgumentParser(
      'rnnzoo compare', description='Compares finished runs.'
  )
  parser.add_argument(
      'runs', nargs='+', help='run directories, or folders of a sweep'
  )
  parser.add_argument(
      '--output',
      default='comparison',
      help=f'directory for {", ".join(comparison.FILES)}',
  )
  parsed = parser.parse_args(words)
  with processes.one_sentence():
    print(comparison.compare(parsed.runs, parsed.output))
    print(f'written to {parsed.output}: {", ".join(comparison.FILES)}')


def _sweep(words: list[str]) -> None:
  """Trains a config with all combinations of values, and compares the runs."""
  with processes.one_sentence():
    failed = sweep.main(words)
  sys.exit(3 if failed else 0)


_FUNCTIONS = (_train, _list, _evaluate, _predict, _sample, _compare, _sweep)
COMMANDS: Mapping[str, Callable[[list[str]], None]] = {
    function.__name__.removeprefix('_'): function for function in _FUNCTIONS
}

_TRAIN_HELP = """usage: rnnzoo train CONFIG [--config.FIELD=VALUE ...] [flags]

CONFIG is a name, as `rnnzoo list` prints them, or a file. Its fields are in the
file and in configs/base.py. Flags:

  --workdir=DIRECTORY       of the run; a run that is there goes on
  --config.num_seeds=5      any field of the config
  --helpfull                all flags, those for several processes too"""

_HELP = 'commands:' + ''.join(
    f'\n  {name:<10}{(function.__doc__ or "").splitlines()[0]}'
    for name, function in COMMANDS.items()
)
