"""Several processes that train together: who they are, how they agree.

All processes run one program on equal numbers. The first one alone touches the
files of a run, apart from checkpoints, and talks to the terminal. If its peers
need its findings, `from_first` tells them, errors included, so that all
processes go one way.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import pickle
import sys
import threading
import time
from typing import Any, NoReturn, TypeVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

T = TypeVar('T')

# The first process serves its peers' connection. It ends this many seconds
# after a common error, so that they can tell it as well.
_LAST_SECONDS = 3.0

# How long a process waits for its peers at the start, JAX's own default.
_CONNECT_SECONDS = 300
_NOT_CONNECTED = (
    'the processes of this run cannot be connected: all of them need the same'
    ' --num_processes and the same --coordinator_address, that of the host'
    ' where the one with --process_id=0 runs'
)


def initialize(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    detect: bool,
    heartbeat_seconds: int,
) -> None:
  """Connects this process with its peers in a run, if there are any.

  The flags in `command_line` explain the arguments; `detect` is --distributed.
  """
  names = '--coordinator_address', '--num_processes', '--process_id'
  given = coordinator_address, num_processes, process_id
  missing = [n for n, value in zip(names, given, strict=True) if value is None]
  if detect and len(missing) < 3:
    raise ValueError(
        f'--distributed finds {", ".join(names)} by itself; pass either the one'
        ' or the other three'
    )
  if not detect:
    if len(missing) == 3:
      return
    if missing:
      raise ValueError(
          f'{", ".join(names)} belong together; {" and ".join(missing)}'
          f' {"is" if len(missing) == 1 else "are"} missing'
      )
    _check(*given)
    # Whoever mistyped an address would see nothing for minutes.
    print(
        f'process {process_id} of {num_processes} waits for the others at'
        f' {coordinator_address}, {_CONNECT_SECONDS} s at most',
        file=sys.stderr,
        flush=True,
    )
  # JAX would abort the process, with a trace of its own.
  timer = threading.Timer(_CONNECT_SECONDS, _end_alone)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
        *given,
        initialization_timeout=2 * _CONNECT_SECONDS,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=heartbeat_seconds,
    )
  except ValueError as error:
    raise ValueError(
        f'--distributed finds no cluster that JAX knows ({error}); pass'
        f' {", ".join(names)}'
    ) from error
  except RuntimeError as error:
    raise ConnectionError(f'{_NOT_CONNECTED} ({str(error)[:200]})') from error
  finally:
    timer.cancel()
  counts = [
      sum(d.process_index == p for d in jax.devices())
      for p in range(jax.process_count())
  ]
  if len(set(counts)) > 1:
    raise ValueError(
        'all processes must have the same number of devices; they have'
        f' {counts} (CUDA_VISIBLE_DEVICES limits them)'
    )


def _end_alone() -> NoReturn:
  """Ends this process, which its peers have not found."""
  tell(f'{_NOT_CONNECTED} ({_CONNECT_SECONDS} s have passed)')
  sys.stdout.flush()
  os._exit(2)


def _check(address: Any, num_processes: Any, process_id: Any) -> None:
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(
        '--coordinator_address must be a host and a port, as'
        f' 10.0.0.1:1234; got {address!r}'
    )
  if not 0 <= process_id < num_processes:
    raise ValueError(
        f'--process_id must be from 0, below --num_processes={num_processes};'
        f' got {process_id}'
    )


def are_connected() -> bool:
  """Returns whether this process belongs to a run with others."""
  return jax.distributed.is_initialized()


def is_first() -> bool:
  """Returns whether this process writes and talks for all."""
  return jax.process_index() == 0


def say(text: str, end: str = '\n') -> None:
  """Prints a text, once for all processes."""
  if is_first():
    print(text, end=end, flush=True)


def from_first(function: Callable[[], T]) -> T:
  """Returns in all processes the first one's value of a function.

  It alone calls the function, and sends the result, or the error, to its peers.
  """
  if jax.process_count() == 1:
    return function()
  message = b''
  if is_first():
    try:
      message = pickle.dumps((function(), None))
    except Exception as error:
      message = pickle.dumps((None, error))
  result, its_error = pickle.loads(_broadcast(message))
  if its_error is not None:
    raise its_error
  return result


def one_after_first(function: Callable[[], T]) -> T:
  """Returns this process's value of a function; the first one calls first.

  So it may leave files on a shared disk for its peers. If the function raises
  in one process, all raise.
  """
  results: list[T] = []
  from_first(lambda: results.append(function()))
  error: Exception | None = None
  if not is_first():
    try:
      results.append(function())
    except Exception as raised:
      error = raised
  failed = _gather(np.array([error is not None]))[:, 0]
  if error is not None:
    raise error
  if failed.any():
    raise ValueError(
        f'process {failed.argmax()} of this run says what is wrong'
    )
  return results[0]


def check_same(digest: str, name: str) -> None:
  """Raises ValueError in all processes if their digests, of `name`, differ."""
  if jax.process_count() == 1:
    return
  digests = _gather(np.frombuffer(bytes.fromhex(digest), np.uint8))
  for process, other in enumerate(digests):
    if (other != digests[0]).any():
      raise ValueError(
          f'process {process} has {name} other than process 0; all processes of'
          ' a run need the same'
      )


def is_loss(error: Exception) -> bool:
  """Returns whether an error most likely means that another process ended."""
  return are_connected() and isinstance(error, jax.errors.JaxRuntimeError)


def _broadcast(message: bytes) -> bytes:
  """Returns the message of the first process."""
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
  # A program is compiled for each size, so there are few.
  block = np.zeros(1 << max(size - 1, 1023).bit_length(), np.uint8)
  if is_first():
    block[:size] = np.frombuffer(message, np.uint8)
  return bytes(multihost_utils.broadcast_one_to_all(block)[:size])


def _gather(row: np.ndarray) -> np.ndarray:
  """Returns the rows of all processes."""
  rows = np.asarray(multihost_utils.process_allgather(row))
  return rows.reshape(jax.process_count(), -1)


# The name of the program, before its messages.
_NAME = ['train.py']


def name() -> str:
  """Returns the program's name, which its messages begin with."""
  return _NAME[0]


def set_name(name: str) -> None:
  """Sets it."""
  _NAME[0] = name


def give_up(message: object) -> NoReturn:
  """Ends with one sentence on stderr: the caller's mistake needs no trace.

  The message may be an error. A BrokenPipeError, nobody's mistake, is raised.
  """
  if isinstance(message, BrokenPipeError):
    raise message
  logging.info('The error was:', exc_info=True)  # For --verbosity=0.
  tell(' '.join(str(message).split()))
  _exit(2)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
  """Gives up where a caller's mistake is raised: no trace, one sentence."""
  try:
    yield
  except (OSError, NotImplementedError, ValueError) as error:
    give_up(error)


def tell_loss(error: Exception, workdir: object) -> NoReturn:
  """Ends, since another process of the run has ended."""
  tell(
      'this process lost another one of the run'
      f' ({" ".join(str(error).split())[:300]}); start all of them again with'
      f' --workdir={workdir}, and the run goes on'
  )
  _exit(4, common=False)


def tell(message: str) -> None:
  """Prints a message on stderr, after the program's name."""
  print(f'{_NAME[0]}: {message}', file=sys.stderr)


def stop_printing() -> None:
  """Lets go of stdout, which nobody reads: Python must not try once more."""
  if sys.stdout is not None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def needs_data(error: OSError) -> str:
  """Returns the message where `evaluate` does not find the data set."""
  return (
      f'{error}; evaluate tests models on the data set of their run, which'
      ' predict and sample do without'
  )


def needs_memory(error: MemoryError) -> str:
  """Returns the message where this process gets no more memory."""
  return (
      'this machine has not enough memory; less data, a smaller'
      ' --config.batch_size or --config.model.features needs less'
      f' ({error!r:.200})'
  )


def _exit(code: int, common: bool = True) -> NoReturn:
  """Ends the program; in a run with others at once, since they may wait.

  If `common`, they end by themselves, for this reason too.
  """
  if not are_connected():
    sys.exit(code)
  sys.stdout.flush()
  sys.stderr.flush()
  if common and is_first():
    time.sleep(_LAST_SECONDS)
  os._exit(code)
