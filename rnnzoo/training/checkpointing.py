"""Checkpoints of a training run: one orbax directory an epoch, all or nothing.

A checkpoint holds everything that the rest of the run depends on: parameters,
statistics, the optimiser's and the plateau's state, the best parameters so far,
and the history of all metrics. It is written as a whole, and random numbers
depend on (seed, epoch, step) only, so a killed run that goes on from it gives
the numbers of an uninterrupted run.

Several processes write a checkpoint together: orbax shares the arrays out among
them. The first one alone does the rest.

The last two are kept. A checkpoint has orbax's files and a manifest.json, with
the version of its contents, its owner (config, data and seed) and the digest of
each file. It is written last and read first: orbax never sees a file that has
changed.
"""

from collections.abc import Mapping
import contextlib
import errno
import functools
import hashlib
import os
import pathlib
import shutil
import types
from typing import Any

import jax
import orbax.checkpoint as ocp

from rnnzoo.training import files
from rnnzoo.training import processes

# Whoever changes the contents of a checkpoint, or their meaning, counts up.
VERSION = 3

MANIFEST = 'manifest.json'

# In the name of a checkpoint that orbax has not written to its end.
_PARTIAL = '.orbax-checkpoint-tmp'

# Errors that tell nothing of the files, which may be whole.
_NO_ACCESS = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
}


class ForeignError(files.RunFileError):
  """The checkpoint is whole, but of another run, seed or version."""


class Checkpoints(contextlib.AbstractContextManager):
  """The checkpoints of one seed. Use as a context manager.

  `directory`, which need not exist, has one subdirectory an epoch. `owner` has
  entries of their manifests: the digests of config and data, and the seed.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      owner: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    self.directory = pathlib.Path(directory).absolute()
    self._owner = owner
    # Without orbax's manager, which reads all checkpoints when it is made and
    # fails if any is damaged. And not asynchronous: the training loop donates
    # its buffers to the next step, so they must be on disk before.
    self._checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler('state', 'best', 'progress')
    )

  def __exit__(self, *unused_exception) -> None:
    self._checkpointer.close()

  def save(self, epoch: int, state: Any, best: Any, progress: dict) -> None:
    """Writes the checkpoint of `epoch`, and removes the last but one.

    `state` and `best` are pytrees of arrays, for the next step and for the
    test; `progress` holds numbers and texts, as JSON can.
    """
    target = self.directory / str(epoch)
    try:
      processes.from_first(self._make_room)
      self._checkpointer.save(
          target,
          ocp.args.Composite(
              state=ocp.args.StandardSave(by_path(state)),
              best=ocp.args.StandardSave(by_path(best)),
              progress=ocp.args.JsonSave(progress),
          ),
      )
      processes.from_first(lambda: self._seal(epoch))
    except Exception as error:  # orbax and TensorStore raise many kinds.
      if isinstance(error, MemoryError) or processes.is_loss(error):
        raise
      raise OSError(
          f'cannot write the checkpoint of epoch {epoch} to'
          f' {self.directory}: {error}'
      ) from error

  def _make_room(self) -> None:
    """Makes the directory, and removes a killed process's remains."""
    self.directory.mkdir(parents=True, exist_ok=True)
    for path in self.directory.glob(f'*{_PARTIAL}*'):
      shutil.rmtree(path)

  def _seal(self, epoch: int) -> None:
    """Writes the manifest of a checkpoint, and removes the last but one."""
    target = self.directory / str(epoch)
    manifest = {
        'version': VERSION,
        'epoch': epoch,
        **self._owner,
        'files': {
            str(path.relative_to(target)): _digest(path)
            for path in sorted(target.rglob('*'))
            if path.is_file()
        },
    }
    files.write_json(target / MANIFEST, files.signed(manifest))
    # One more than is needed, should the last one be damaged.
    for old in self._epochs()[2:]:
      shutil.rmtree(self.directory / str(old))

  def restore(self, state: Any, best: Any) -> tuple[Any, Any, dict] | None:
    """Returns (state, best, progress) of the latest good checkpoint, or None.

    Later ones, which are damaged, are moved out of the way with a warning.

    `state` and `best` are pytrees like the saved ones, of arrays or shapes.

    Raises:
      RunFileError: there are checkpoints, but no good one, or one that cannot
        be read here, or one of another run, seed or version.
    """
    found = self._restore(repair=True, state=state, best=best)
    return (found['state'], found['best'], found['progress']) if found else None

  def restore_best(self, best: Any = None) -> tuple[Any, dict] | None:
    """Returns (best, progress) of the latest good checkpoint; see `restore`.

    None for `best` asks for all of its arrays, by their paths.
    """
    found = self._restore(repair=False, best=best)
    return (found['best'], found['progress']) if found else None

  def _restore(self, repair: bool, **like: Any) -> dict[str, Any] | None:
    """Returns the items of the latest good checkpoint, or None.

    Damaged ones are moved out of the way if `repair`. `like` has a tree like
    the one to restore for each item.
    """
    damaged: dict[int, str] = {}
    if repair:
      processes.from_first(self._move_unsealed)
    for epoch in processes.from_first(self._epochs):
      path = self.directory / str(epoch)
      is_whole = False
      try:
        processes.from_first(functools.partial(_check, path, self._owner))
        is_whole = True
        restored = self._read(path, like)
      except (ForeignError, MemoryError):
        raise
      except Exception as error:  # Anything can be wrong with damaged files.
        if processes.is_loss(error):
          raise
        reason = ' '.join(str(error).split())[:200]
        if is_whole or getattr(error, 'errno', None) in _NO_ACCESS:
          raise files.RunFileError(
              f'the checkpoint {path} cannot be read here ({reason}); nothing'
              ' says that it is damaged, so mend the cause and start again'
          ) from error
        damaged[epoch] = reason
        continue
      for bad, reason in damaged.items():
        processes.say(
            f'WARNING: the checkpoint {self.directory / str(bad)} is damaged'
            f' ({reason}); going on from that of epoch {epoch}.'
        )
        if repair:
          processes.from_first(functools.partial(self._move_away, bad))
      return restored
    if damaged:
      epoch, reason = next(iter(damaged.items()))
      raise files.RunFileError(
          f'the checkpoint {self.directory / str(epoch)} is damaged'
          f' ({reason}), and there is no older good one; delete'
          f' {self.directory.parent} to train this seed from its start'
      )
    return None

  def _epochs(self) -> list[int]:
    """Returns the epochs that have a checkpoint, damaged or not, last first."""
    return list_epochs(self.directory)

  def _move_unsealed(self) -> None:
    """Makes room where a process was killed before it wrote a manifest."""
    for epoch in self._epochs():
      path = self.directory / str(epoch)
      if not (path / MANIFEST).exists():
        print(f'WARNING: {path} was not written to its end; it is moved away.')
        self._move_away(epoch)

  def _read(self, path: pathlib.Path, like: dict[str, Any]) -> dict[str, Any]:
    """Returns the items of a checkpoint, and 'progress' in any case."""
    named = {
        name: _stored(path / name) if tree is None else by_path(tree)
        for name, tree in like.items()
    }
    items: dict[str, Any] = {
        name: ocp.args.StandardRestore(jax.tree.map(_placed, tree))
        for name, tree in named.items()
    }
    restored = self._checkpointer.restore(
        path, ocp.args.Composite(progress=ocp.args.JsonRestore(), **items)
    )
    trees = {
        name: restored[name]
        if tree is None
        else jax.tree_util.tree_map_with_path(
            lambda path, _, name=name: restored[name][_name(path)], tree
        )
        for name, tree in like.items()
    }
    return trees | {'progress': restored['progress']}

  def _move_away(self, epoch: int) -> None:
    """Makes room for a new checkpoint of this epoch, and deletes nothing."""
    name, count = f'damaged_checkpoint_{epoch}', 1
    while (target := self.directory.parent / name).exists():
      count += 1
      name = f'damaged_checkpoint_{epoch}_{count}'
    (self.directory / str(epoch)).rename(target)


def list_epochs(directory: pathlib.Path, file: str = '') -> list[int]:
  """Returns the epochs with a checkpoint that has this file, last first."""
  if not directory.is_dir():
    return []
  names = [p.name for p in directory.iterdir() if (p / file).exists()]
  # Not 007, which nobody wrote.
  epochs = (int(n) for n in names if n.isdecimal() and n == str(int(n)))
  return sorted(epochs, reverse=True)


def _stored(path: pathlib.Path) -> dict[str, Any]:
  """Returns the shapes of the arrays that an item of a checkpoint has."""
  found = dict(ocp.StandardCheckpointHandler().metadata(path))
  return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in found.items()}


def _check(path: pathlib.Path, owner: Mapping[str, Any]) -> None:
  """Raises ForeignError unless a checkpoint is ours, ValueError if damaged."""
  manifest = files.read_signed(path / MANIFEST)
  if manifest['version'] != VERSION:
    raise ForeignError(
        f'the checkpoint {path} is of version {manifest["version"]}, but this'
        f' rnnzoo reads version {VERSION}; go on with the rnnzoo that wrote it,'
        ' or pass another --workdir'
    )
  for name, value in owner.items():
    if manifest.get(name) != value:
      whose = {
          'seed': f'seed {manifest.get(name)}, not {value}',
          'config': 'a run with another config',
      }.get(name, 'a run on other data')
      raise ForeignError(
          f'the checkpoint {path} is of {whose}; move it away, and this seed'
          ' begins anew'
      )
  if manifest['epoch'] != int(path.name):
    raise ValueError(f'it is that of epoch {manifest["epoch"]}')
  for name, digest in manifest['files'].items():
    if not (path / name).is_file():
      raise ValueError(f'{name} is gone')
    if _digest(path / name) != digest:
      raise ValueError(f'{name} is not what was written')


def _digest(path: pathlib.Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves by name: files on disk know no class of ours."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {_name(path): leaf for path, leaf in leaves}


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path)


def _placed(leaf: Any) -> Any:
  """Returns a leaf; a shape without a device gets one of this process."""
  if getattr(leaf, 'sharding', None):
    return leaf
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
