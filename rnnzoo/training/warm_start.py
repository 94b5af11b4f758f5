"""A new run takes weights of a trained one, `config.init_from`.

A checkpoint names its arrays by their paths. So the model of the trained run is
not built, and its task, data and cells need not be here.
"""

from collections.abc import Mapping, Sequence
import functools
import hashlib
import re
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.training import checkpointing
from rnnzoo.training import run_directory
from rnnzoo.training import step


class Taken(NamedTuple):
  """The weights that a seed takes."""

  # Parameters and running averages by path, as the trained run has them.
  arrays: Mapping[str, np.ndarray]
  digest: str  # The SHA-256 of these.
  text: str  # A line on what was taken and what was not.


def take(
    config: ml_collections.ConfigDict, task: protocol.Task, seeds: Sequence[int]
) -> dict[int, Taken]:
  """Returns the weights that each seed takes of `config.init_from`, if any."""
  if not (config.init_from and seeds):
    return {}
  path = fields.expand(config.init_from, 'config.init_from')
  here = checkpointing.by_path(step.abstract(task)[1:])

  @functools.cache
  def read(seed):
    there = jax.tree.map(np.asarray, run_directory.restore_best(path, seed))
    return _select(here, there, config.init_exclude, f'seed {seed} of {path}')

  try:
    source, _ = run_directory.read(path)
    own = range(source.seed, source.seed + source.num_seeds)
    return {seed: read(seed if seed in own else own[0]) for seed in seeds}
  except (OSError, ValueError) as error:
    raise ValueError(
        f'config.init_from={fields.shorten(config.init_from)}: {error}'
    ) from error


def _select(
    here: Mapping[str, Any],
    there: Mapping[str, np.ndarray],
    exclude: str,
    source: str,
) -> Taken:
  """Returns the arrays of a source that fit the model here."""
  # Without the number of the tree, of parameters or of averages.
  name = lambda path: path[3:].removesuffix('.value')
  excluded = {p for p in here if exclude and re.search(exclude, name(p))}
  if exclude and not excluded:
    raise ValueError(
        f'config.init_exclude={exclude!r} is found in no path; paths are'
        f' {", ".join(map(name, [*here][:3]))}, ...'
    )
  arrays, new, digest = {}, [], hashlib.sha256()
  for path, leaf in here.items():
    array = there.get(path)
    if array is None or path in excluded:
      new.append(name(path))
    elif array.shape != leaf.shape:
      new.append(f'{name(path)} {leaf.shape}, there {array.shape}')
    else:
      arrays[path] = array
      digest.update(f'{path} {array.dtype} {array.shape}'.encode())
      digest.update(array.tobytes())
  unused = [name(path) for path in there if path not in arrays]
  text = (
      f'{sum(x.size for x in arrays.values()):,} numbers taken of {source}; new'
      f' here: {", ".join(new) or "none"}; not used of there:'
      f' {", ".join(unused) or "none"}'
  )
  if not arrays:
    raise ValueError(f'no path and shape are the same: {text}')
  return Taken(arrays, digest.hexdigest(), text)
