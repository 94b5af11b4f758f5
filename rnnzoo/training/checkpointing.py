"""Checkpoints of a training run: one orbax directory an epoch, all or nothing.

A checkpoint holds everything that the rest of the run depends on: parameters,
statistics, the optimiser's state, the plateau's state, the best parameters so
far, and the history of all metrics. Since it is written as a whole, a killed
run finds a consistent one, and since random numbers depend on (seed, epoch,
step) only, going on from it gives what an uninterrupted run would have given.
"""

import os
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
  """The checkpoints of one run. Use as a context manager."""

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens the directory, which need not exist.

    Args:
      directory: where the checkpoints are, one subdirectory an epoch.
    """
    self._manager = ocp.CheckpointManager(
        pathlib.Path(directory).absolute(),
        item_names=('state', 'best', 'progress'),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=1,
            # The training loop donates its buffers to the next step, so they
            # must be on disk before it goes on.
            enable_async_checkpointing=False,
        ),
    )

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *unused_exception) -> None:
    self._manager.close()

  def save(self, epoch: int, state: Any, best: Any, progress: dict) -> None:
    """Writes the checkpoint of `epoch`, and then removes the previous one.

    Args:
      epoch: how many epochs are done.
      state: pytree of arrays, what the next step needs.
      best: pytree of arrays, the model to be tested.
      progress: what JSON can hold.
    """
    self._manager.save(
        epoch,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(_by_path(state)),
            best=ocp.args.StandardSave(_by_path(best)),
            progress=ocp.args.JsonSave(progress),
        ),
    )

  def restore(self, state: Any, best: Any) -> tuple[Any, Any, dict] | None:
    """Returns (state, best, progress) of the latest checkpoint, or None.

    Args:
      state: pytree like the one that was saved, of arrays or their shapes.
      best: the same.
    """
    restored = self._restore(
        state=ocp.args.StandardRestore(_by_path(state)),
        best=ocp.args.StandardRestore(_by_path(best)),
        progress=ocp.args.JsonRestore(),
    )
    if restored is None:
      return None
    return (
        _from_paths(restored['state'], state),
        _from_paths(restored['best'], best),
        restored['progress'],
    )

  def restore_best(self, best: Any) -> Any | None:
    """Returns `best` of the latest checkpoint, or None; as `restore`."""
    restored = self._restore(best=ocp.args.StandardRestore(_by_path(best)))
    return restored and _from_paths(restored['best'], best)

  def _restore(self, **items: ocp.args.CheckpointArgs) -> Any | None:
    epoch = self._manager.latest_step()
    if epoch is None:
      return None
    return self._manager.restore(epoch, args=ocp.args.Composite(**items))


def _by_path(tree: Any) -> dict[str, jax.Array]:
  """Returns the leaves by name: what is on disk knows no class of ours."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _from_paths(leaves: dict[str, jax.Array], like: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
      lambda path, _: leaves[jax.tree_util.keystr(path)], like
  )
