"""The calls of compiled functions in which an epoch is trained."""

from collections.abc import Callable, Iterable
import time
from typing import Any

import jax

from rnnzoo.training import pieces as pieces_lib
from rnnzoo.training import program as programs

# Seconds that one compiled call should take on a CPU: long enough for Python's
# share to vanish, short enough for the progress bar to move.
_SHORT_CALL, _LONG_CALL = 0.3, 1.5


def run_epoch(
    program: programs.Program,
    state: programs.TrainState,
    examples: Any,
    order: Any,
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> programs.TrainState:
  """Returns the state an epoch later: after one call, or on a CPU several.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    examples: the training split, on the devices, as the feed gives it.
    order: of the epoch, likewise.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  num_steps = program.steps_per_epoch
  # Several processes have to make the same calls, however long these take.
  if jax.default_backend() != 'cpu' or jax.process_count() > 1:
    state = jax.block_until_ready(
        program.train_epoch(state, examples, order, scale, key)
    )
    on_progress(num_steps)
    return state
  # An epoch may take minutes here, and another call costs next to nothing.
  done, call_steps = 0, 1
  while done < num_steps:
    call_steps = min(call_steps, num_steps - done)
    start = time.monotonic()
    state = jax.block_until_ready(
        program.train_steps(state, examples, order, call_steps, scale, key)
    )
    seconds = time.monotonic() - start
    done += call_steps
    on_progress(done)
    if seconds < _SHORT_CALL:
      call_steps *= 2
    elif seconds > _LONG_CALL:
      call_steps = max(call_steps // 2, 1)
  return state


def run_pieces(
    program: programs.Program,
    state: programs.TrainState,
    pieces: Iterable[pieces_lib.Piece],
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> programs.TrainState:
  """Returns the state an epoch later, after one call for each of its pieces.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    pieces: of the epoch.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  done = 0
  for piece in pieces:
    # The next pieces are on their way meanwhile, and no more than these.
    state = jax.block_until_ready(
        program.train_steps(
            state, piece.examples, piece.order, piece.num_steps, scale, key
        )
    )
    done += piece.num_steps
    on_progress(done)
  return state
