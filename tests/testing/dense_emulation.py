"""Runs the dense kernels on a CPU, with numpy in place of PTX.

Pallas cannot interpret these kernels, since they place every value themselves.
`emulated` puts numpy functions where `pallas_kernels.mosaic` has instructions,
and a thread of Python where there is a CTA, or a warp. These run side by side:
they poll each other's data in device memory and wait for each other's sums as
on a GPU, in any order. What one stores the others see at once, and copies from
device memory arrive at once, so missing fences are not found.
"""

import collections
from collections.abc import Callable
import contextlib
import threading
import time
from unittest import mock

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from jax.experimental.pallas import mosaic_gpu as plgpu

  from pallas_kernels.mosaic import instructions
  from pallas_kernels.mosaic import mailbox
  from pallas_kernels.mosaic import memory
  from pallas_kernels.mosaic import ptx
  from pallas_kernels.mosaic import sync

# Seconds after which a CTA that waits fails.
PATIENCE = 120

_local = threading.local()
_lockstep = 1024


class Memory:
  """Bytes of device memory, or of the shared memory of one CTA."""

  def __init__(self, size: int):
    # numpy releases Python's lock while it copies many elements.
    self.whole = threading.Lock()
    # Nobody may read what nobody has written.
    self.bytes = np.random.default_rng(0).integers(0, 256, size, np.uint8)

  @classmethod
  def of(cls, array):
    """Returns a copy of an array."""
    memory = cls(0)
    memory.bytes = np.frombuffer(np.asarray(array).tobytes(), np.uint8).copy()
    return memory

  def load(self, at, size: int):
    """Returns [n, size] bytes that start at n places."""
    index = np.asarray(at, np.int64)[:, None] + np.arange(size)
    assert index.min() >= 0
    with self.whole:
      return self.bytes[index]

  def store(self, at, data):
    """Stores [n, size] bytes at n places."""
    index = np.asarray(at, np.int64)[:, None] + np.arange(data.shape[1])
    assert not index.size or index.min() >= 0
    with self.whole:
      self.bytes[index] = data


class Cta:
  """A CTA: where it is in the grid, its shared memory and mbarriers.

  Attributes:
    place: index in the grid by name of the axis.
    refs: its shared memory.
    peers: CTAs of its cluster, itself included, by rank.
    workers: the threads of Python that it is made of.
    barrier: where these meet.
    cluster_barrier: where those of all peers meet.
  """

  def __init__(self, place, refs, workers: int):
    self.place, self.refs, self.workers = place, refs, workers
    self.peers: list[Cta] = []
    self.barrier = threading.Barrier(workers)
    self.cluster_barrier = self.barrier
    self.changed = threading.Condition()
    self.needed: list[int] = []
    self.missing: dict[int, int] = {}
    self.bytes: collections.Counter[int] = collections.Counter()
    self.phases: collections.Counter[int] = collections.Counter()

  def make_signals(self, arrivals):
    self.needed = list(arrivals)
    self.missing = dict(enumerate(arrivals))

  def count(self, signal: int, arrivals: int, size: int):
    """Counts arrivals and bytes, those that are expected as negative."""
    with self.changed:
      self.missing[signal] -= arrivals
      self.bytes[signal] += size
      if self.missing[signal] == 0 and self.bytes[signal] == 0:
        self.phases[signal] += 1
        self.missing[signal] = self.needed[signal]
      assert self.missing[signal] >= 0
      self.changed.notify_all()

  def wait(self, signal: int, turn: int):
    """Waits until the phase of an mbarrier with this parity is over."""
    with self.changed:
      over = lambda: self.phases[signal] & 1 != turn
      assert self.changed.wait_for(over, PATIENCE), 'a signal did not come'


def _lanes() -> int:
  """Returns the threads that run in lockstep here."""
  return _local.lanes


def _spread(x, count: int = 1):
  """Returns a value of every element of every thread."""
  x = np.asarray(x).reshape(-1)
  return np.tile(x, max(1, count * _lanes() // x.size))


def _where(where):
  return _spread(1 if where is None else where) != 0


def _typed(data, dtype):
  """Returns the elements of bytes as kernels see them."""
  dtype = jnp.dtype(dtype)
  found = np.ascontiguousarray(data).view(dtype)
  return found if dtype == jnp.int32 else found.astype(np.float32)


def _raw(x, dtype):
  x = np.asarray(x).reshape(-1, 1).astype(jnp.dtype(dtype))
  return np.ascontiguousarray(x).view(np.uint8)


def _load(scale):
  def load(ref, offset, dtype, count=1):
    size = jnp.dtype(dtype).itemsize
    at = _spread(offset, count) * (size if scale else 1)
    return jnp.asarray(_typed(ref.load(at, size), dtype)[:, 0])

  return load


def _store(scale):
  def store(ref, offset, value, dtype, where=None):
    data = _raw(value, dtype)
    count = len(data) // _lanes()
    at = _spread(offset, count) * (data.shape[1] if scale else 1)
    where = np.ones(len(data), bool) if where is None else _spread(where) != 0
    where = np.resize(where, len(data))
    ref.store(at[where], data[where])

  return store


def _words(data):
  words = np.ascontiguousarray(data).view(np.int32)
  return [jnp.asarray(words[:, i]) for i in range(words.shape[1])]


def _load_words(ref, at, where, count):
  where = _where(where)
  found = np.zeros((_lanes(), 4 * count), np.uint8)
  found[where] = ref.load(at[where], 4 * count) if where.any() else 0
  return _words(found)


def load_words_smem(ref, offset, where=None):
  return _load_words(ref, _spread(offset), where, 4)


def load_words_gmem(ref, offset, size, where=None, count=4):
  return _load_words(ref, _spread(offset) * size, where, count)


def _store_words(ref, at, words, where):
  data = np.stack([_spread(w) for w in words], 1)
  data = np.ascontiguousarray(data).view(np.uint8)
  where = _where(where)
  ref.store(at[where], data[where])


def store_words_smem(ref, offset, words, where=None):
  _store_words(ref, _spread(offset), words, where)


def store_words_gmem(ref, offset, words, size, where=None):
  _store_words(ref, _spread(offset) * size, words, where)


def _matrix_rows(offset, count):
  """Returns where the rows of matrices start, [warps * 8 count]."""
  return _spread(offset).reshape(-1, 32)[:, : 8 * count].reshape(-1)


def load_matrices(ref, offset, count):
  rows = ref.load(_matrix_rows(offset, count), 16)
  # Lane 4 q + p has column q of rows 2 p and 2 p + 1.
  halves = rows.view(np.uint16).reshape(-1, count, 8, 8).swapaxes(2, 3)
  words = np.ascontiguousarray(halves).view(np.int32).reshape(-1, count, 32)
  return [jnp.asarray(words[:, i].reshape(-1)) for i in range(count)]


def store_matrices(ref, offset, words, where):
  count = len(words)
  words = np.stack([_spread(w).reshape(-1, 32) for w in words], 1)
  halves = words.view(np.uint16).reshape(-1, count, 8, 8).swapaxes(2, 3)
  rows = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 16)
  stored = _where(where).reshape(-1, 32)[:, : 8 * count].reshape(-1)
  ref.store(_matrix_rows(offset, count)[stored], rows[stored])


def fetch(shared_ref, shared_offset, ref, offset, size, where):
  where = _spread(where)
  words = load_words_gmem(ref, offset, size, where > 1)
  store_words_smem(shared_ref, shared_offset, words, where > 0)


def fill(ref, offset, size, where):
  where = _where(where)
  at = _spread(offset)[where] * size
  ref.store(at, np.full((len(at), 16), 255, np.uint8))


def _until_published(read: Callable[[], np.ndarray], size: int):
  """Reads [n, 16] bytes until no element is the sentinel."""
  kind = np.uint16 if size == 2 else np.uint32
  start = time.monotonic()
  while True:
    found = read()
    if not (found.view(kind) == np.iinfo(kind).max).any():
      return found
    assert time.monotonic() < start + PATIENCE, 'nothing was published'
    time.sleep(0.001)


def poll(places, size, seen=None, in_pairs=True):
  assert seen is None
  words = []
  for ref, offset, *others in places:
    ats = [_spread(offset)] + [_spread(o) for _, _, o in others]
    chosen = np.zeros(_lanes(), int)
    for i, (condition, _, _) in enumerate(others, 1):
      chosen[_where(condition)] = i
    refs = [ref, *(r for _, r, _ in others)]

    def read(refs=refs, ats=ats, chosen=chosen):
      found = np.zeros((_lanes(), 16), np.uint8)
      for i, (ref, at) in enumerate(zip(refs, ats, strict=True)):
        mine = chosen == i
        if mine.any():
          found[mine] = ref.load(at[mine] * size, 16)
      return found

    words += _words(_until_published(read, size))
  return words


def look(lines, pieces):
  del lines
  return [None] * (4 * len(pieces))


def await_pieces(lines, pieces, seen):
  assert len(seen) == 4 * len(pieces)
  words = []
  for piece in pieces:
    line = lines[piece.line]
    exists = np.ones(_lanes(), bool)
    if piece.exists is not None:
      mask, bit = piece.exists
      exists = (_spread(mask) >> bit) & 1 != 0

    def read(ref, offset, mine, piece=piece):
      found = np.zeros((_lanes(), 16), np.uint8)
      at = 2 * _spread(offset) + piece.distance
      if mine.any():
        found[mine] = ref.load(at[mine], 16)
      return found

    published = lambda line=line, exists=exists, read=read: read(
        line.ref, line.offset, exists
    )
    found = _until_published(published, 2)
    if line.instead is not None:
      condition, ref, offset = line.instead
      mine = exists & _where(condition)
      found[mine] = read(ref, offset, mine)[mine]
    words += _words(found)
  return words


def mma(acc, a, b, dtype):
  """The product of fragments, of all warps at once."""

  def pairs(word):
    data = np.ascontiguousarray(_spread(word))
    return _typed(data.view(np.uint8).reshape(-1, 4), dtype).reshape(
        -1, 8, 4, 2
    )

  warps = _lanes() // 32
  left = np.zeros((warps, 16, 16), np.float32)
  for i, word in enumerate(a):
    rows, columns = 8 * (i & 1), 8 * (i >> 1)
    part = pairs(word).reshape(warps, 8, 8)
    left[:, rows : rows + 8, columns : columns + 8] = part
  right = np.concatenate([pairs(w).reshape(warps, 8, 8) for w in b], 2)
  product = np.einsum('wik,wjk->wij', left, right)
  results = []
  for i, x in enumerate(acc):
    rows = product[:, 8 * (i >> 1) :][:, :8, i & 1 :: 2]
    with np.errstate(invalid='ignore'):  # After the last step nobody reads it.
      results.append(jnp.asarray(_spread(x) + rows.reshape(-1)))
  return tuple(results)


def shuffle(x, distance):
  # Each lane gets the value of the lane whose number differs in one bit.
  lanes = np.arange(_lanes()) ^ distance
  return jnp.asarray(_spread(x).reshape(-1, _lanes())[:, lanes].reshape(-1))


def narrow(low, high, dtype):
  halves = [_raw(_spread(x), dtype) for x in (low, high)]
  return _words(np.concatenate(halves, 1))[0]


def _half(i):
  def half(word, dtype=jnp.bfloat16):
    data = np.ascontiguousarray(_spread(word)).view(np.uint8).reshape(-1, 4)
    return jnp.asarray(_typed(data, dtype)[:, i])

  return half


def send(ref, offset, words, signals, signal, rank, where):
  del signals
  own = _local.cta
  index = next(i for i, each in enumerate(own.refs) if each is ref)
  where, rank = _where(where), _spread(rank)
  for i, peer in enumerate(own.peers):
    mine = where & (rank == i)
    if mine.any():
      _store_words(peer.refs[index], _spread(offset), words, mine)
      peer.count(int(signal), 0, 16 * int(mine.sum()))


def make_signals(signals, arrivals, where):
  del signals
  if _where(where).any():
    _local.cta.make_signals(arrivals)


def expect(signals, signal, size, where):
  del signals
  if _where(where).any():
    _local.cta.count(int(signal), 1, -int(size))


def arrive(signals, signal, lane):
  del signals
  _local.cta.count(int(signal), int((_spread(lane) == 0).sum()), 0)


def await_signal(signals, signal, turn, busy=False, scope='cluster'):
  del signals, busy, scope
  _local.cta.wait(int(signal), int(turn))


def stack(arrays):
  return jnp.concatenate([jnp.asarray(_spread(x)) for x in arrays])


def _when(condition):
  return lambda f: f() if np.any(condition) else None


def fori_loop(first, end, body, init):
  state = init
  for step in range(int(first), int(end)):
    state = body(jnp.int32(step), state)
  return state


def kernel(
    body,
    out_type,
    grid,
    grid_names,
    scratch_types,
    num_threads=1,
    cluster=(),
    cluster_names=(),
    **_,
):
  """In place of `plgpu.kernel`: a thread of Python for each CTA."""

  def run(*arrays):
    inputs = [Memory.of(x) for x in arrays]
    sizes = [int(np.prod(t.shape)) * t.dtype.itemsize for t in out_type]
    outputs = [Memory(size) for size in sizes]
    lanes = min(_lockstep, 128 * num_threads)
    workers = 128 * num_threads // lanes
    ctas = []
    for index in np.ndindex(*grid, *cluster):
      place = dict(zip((*grid_names, *cluster_names), index, strict=True))
      refs = [Memory(4 * t.shape[0]) for t in scratch_types]
      ctas.append(Cta(place, refs, workers))
    size = int(np.prod(cluster)) if cluster else 1
    for first in range(0, len(ctas), size):
      peers = ctas[first : first + size]
      meeting = threading.Barrier(size * workers)
      for cta in peers:
        cta.peers, cta.cluster_barrier = peers, meeting
    everyone = threading.Barrier(len(ctas) * workers)
    failures = []

    def work(cta, first):
      _local.cta, _local.everyone = cta, everyone
      _local.first, _local.lanes = first, lanes
      try:
        body(*inputs, *outputs, *cta.refs)
      except BaseException as error:  # pylint: disable=broad-except
        failures.append(error)

    threads = [
        threading.Thread(target=work, args=(cta, lanes * i))
        for cta in ctas
        for i in range(workers)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if failures:
      raise failures[0]
    return tuple(
        jnp.asarray(m.bytes.view(t.dtype).reshape(t.shape))
        for m, t in zip(outputs, out_type, strict=True)
    )

  return run


def _open_all(mailboxes, ctas, warpgroups):
  del warpgroups
  for each in mailboxes:
    each.clear()
  assert _local.everyone.parties == ctas * _local.cta.workers
  _local.everyone.wait(PATIENCE)


def _index():
  """Returns each thread's index in its CTA."""
  return _local.first + jnp.arange(_lanes(), dtype=jnp.int32)


def _axis_index(name):
  if name == 'warpgroup':
    return _index() >> 7
  return jnp.int32(_local.cta.place[name])


@contextlib.contextmanager
def replaced(fakes):
  """Puts functions in place of those of modules or classes, by name."""
  with contextlib.ExitStack() as patches:
    for owner, names in fakes.items():
      for name, fake in names.items():
        patches.enter_context(mock.patch.object(owner, name, fake))
    yield


@contextlib.contextmanager
def emulated(lockstep: int = 1024):
  """Kernels that are built inside run here; without `jax.jit`.

  Args:
    lockstep: threads of a CTA that run together: all by default, 32 for warps.
  """
  global _lockstep
  before, _lockstep = _lockstep, lockstep
  nothing = lambda *args, **kwargs: None
  view = lambda dtype: lambda x: jnp.asarray(_spread(x).view(dtype))
  fakes = {
      ptx: {
          'full': lambda n, x, dtype=jnp.float32: jnp.full(
              n * _lanes(), x, dtype
          ),
          'per_thread': lambda x: x.size // _lanes(),
          'stack': stack,
          'unstack': lambda x: list(x.reshape(-1, _lanes())),
          'thread': lambda: _index() & 127,
      },
      memory: {
          'load_smem': _load(False),
          'load_gmem': _load(True),
          'store_smem': _store(False),
          'store_gmem': _store(True),
          'store_relaxed': _store(True),
          'load_words_smem': load_words_smem,
          'load_words_gmem': load_words_gmem,
          'store_words_smem': store_words_smem,
          'store_words_gmem': store_words_gmem,
          'store_pair_smem': store_words_smem,
          'load_matrices': load_matrices,
          'store_matrices': store_matrices,
          'fetch': fetch,
          'fetch_commit': nothing,
          'fetch_wait': nothing,
      },
      mailbox: {
          'publish': _store(True),
          'fill': fill,
          'poll': poll,
          'open_all': _open_all,
          'one_at_a_time': lambda run: run,
          'look': look,
          'await_pieces': await_pieces,
      },
      instructions: {
          'reciprocal': lambda x: 1 / x,
          'as_float': view(np.float32),
          'as_word': view(np.int32),
          'narrow': narrow,
          'shuffle': shuffle,
          'lower': _half(0),
          'upper': _half(1),
          'mma': mma,
      },
      sync: {
          'barrier': lambda *_: _local.cta.barrier.wait(PATIENCE),
          'cluster_barrier': lambda: _local.cta.cluster_barrier.wait(PATIENCE),
          'fence': nothing,
          'delay': nothing,
          'make_signals': make_signals,
          'send': send,
          'expect': expect,
          'arrive': arrive,
          'await_signal': await_signal,
      },
      plgpu: {'kernel': kernel, 'layout_cast': lambda x, _: x},
      pl: {'when': _when},
      lax: {'axis_index': _axis_index, 'fori_loop': fori_loop},
  }
  try:
    with replaced(fakes):
      yield
  finally:
    _lockstep = before
