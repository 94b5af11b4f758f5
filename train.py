"""Trains a model of the zoo as a config says, and prints its test result.

  python train.py --config=configs/agru_smnist.py
  python train.py --config=configs/gru_smnist.py --config.num_epochs=3
  python train.py --config=configs/gru_smnist.py --workdir=runs/mine
  python train.py --config=... --workdir=runs/mine --mode=evaluate

Every field of the config can be overridden as in the second line. The run goes
into a directory under runs/, or into --workdir; a run that was killed goes on
where its --workdir is passed again. With --mode=evaluate its best models are
tested once more. The last line printed is the task's main metric on the test,
the mean over the seeds: `test accuracy: 0.9863`.

Several devices share each batch; docs/devices.md says how several processes do.

Exit codes: 0, done; 2, something that was given cannot be, and one sentence on
stderr says what; 3, the loss of a seed was not finite; 4 or 134, another
process of the run has ended; 130, Ctrl-C; 143, SIGTERM.
"""

import os
import shlex
import signal
import sys

# Where the run goes, as soon as that is known.
_WORKDIR_FOUND: list[str] = []


def _interrupt(number, unused_frame) -> None:
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
  os._exit(128 + number)


# Before the imports that take a while; nohup, which ignores it, is left alone.
if __name__ == '__main__':
  for _number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is not signal.SIG_IGN:
      signal.signal(_number, _interrupt)

from absl import app
from absl import flags

from rnnzoo.training import command_line

flags.adopt_module_key_flags(command_line)  # --help explains them.


def main(argv: list[str]) -> None:
  command_line.main(argv, _WORKDIR_FOUND.append)


if __name__ == '__main__':
  app.run(main, flags_parser=command_line.parse_flags)
