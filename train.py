"""Trains a model of the zoo as a config says, and prints its test accuracy.

  python train.py --config=configs/agru_smnist.py
  python train.py --config=configs/gru_smnist.py --config.num_epochs=3
  python train.py --config=configs/gru_smnist.py --workdir=runs/mine

Every field of the config can be overridden as in the second line. The run goes
into a directory under runs/, or into --workdir; a run that was killed goes on
where its --workdir is passed again. The last line printed is the test accuracy,
the mean over the seeds: `test accuracy: 0.9863`.

Several devices share each batch; README.md says how several processes do.

Exit codes: 0, done; 2, something that was given cannot be, and one sentence on
stderr says what; 3, the loss of a seed was not finite; 4 or 134, another
process of the run has ended; 130, Ctrl-C.
"""

import os
import shlex
import signal
import sys

# Where the run goes, as soon as that is known.
_WORKDIR_FOUND: list[str] = []


def _interrupt(unused_signal, unused_frame) -> None:
  """Ends the process with one line that says how to go on.

  At once, as a kill: an exception could be raised anywhere, by imports and
  destructors which swallow it. Nothing is lost but the epochs since the last
  checkpoint.
  """
  command = sys.argv
  if _WORKDIR_FOUND and not any('-workdir' in word for word in command):
    command = [*command, f'--workdir={_WORKDIR_FOUND[0]}']
  line = f'train.py: interrupted; to go on: python {shlex.join(command)}\n'
  os.write(2, f'\n{line}'.encode() if os.isatty(2) else line.encode())
  os._exit(130)


# Before the imports that take a while; nohup, which ignores it, is left alone.
if __name__ == '__main__' and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
  signal.signal(signal.SIGINT, _interrupt)

from absl import app
from absl import flags

from rnnzoo.training import command_line
from rnnzoo.training import processes

flags.adopt_module_key_flags(command_line)  # --help explains them.


def main(unused_argv: list[str]) -> None:
  experiment = command_line.prepare()
  _WORKDIR_FOUND.append(str(experiment.workdir))
  report = command_line.train(experiment)
  processes.say(f'test accuracy: {report["test"]["accuracy"]["mean"]:.4f}')
  if report['diverged']:
    if processes.is_first():
      print(
          'train.py: the loss of seed'
          f' {", ".join(map(str, report["diverged"]))} was not finite; a'
          ' smaller --config.optimizer.learning_rate or'
          ' --config.optimizer.clip_norm may help',
          file=sys.stderr,
      )
    sys.exit(3)


if __name__ == '__main__':
  app.run(main, flags_parser=command_line.parse_flags)
