"""Runs the kernel of a wavefront on a CPU, with numpy in place of PTX.

Builds on `dense_emulation`, which says how. A warpgroup is a thread of Python,
and so is each warp of the last one. Copies by TMA and products take their data
at once. Registers are not counted, and the swizzle of shared memory is left
out.
"""

import collections
import contextlib
import functools
import threading
import time

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from tests.testing import abstract_gpu
from tests.testing import dense_emulation

if abstract_gpu.RUNS:
  from jax.experimental.pallas import mosaic_gpu as plgpu

  from pallas_kernels.mosaic import instructions
  from pallas_kernels.mosaic import ptx
  from pallas_kernels.mosaic import sync
  from pallas_kernels.wavefront import chunks
  from pallas_kernels.wavefront import gate_products
  from pallas_kernels.wavefront import plan as plan_lib

# Seconds after which a thread that waits fails: one runs all steps meanwhile.
_PATIENCE = 600
_local = dense_emulation._local


def _wait_for(condition):
  """Waits until a condition is true; fails as soon as another thread has."""
  end = time.monotonic() + _PATIENCE
  while not condition():
    assert not _local.failures, 'another thread has failed'
    assert time.monotonic() < end, 'nobody did what this thread waits for'
    time.sleep(2e-4)


class _Array(dense_emulation.Memory):
  """An array in device memory."""

  def __init__(self, data):
    data = np.asarray(data)
    super().__init__(0)
    self.bytes = np.frombuffer(data.tobytes(), np.uint8).copy()
    self.shape, self.dtype = data.shape, data.dtype

  @property
  def at(self):
    return _Window(self, ())

  @property
  def array(self):
    return self.bytes.view(self.dtype).reshape(self.shape)


class _Window:
  """A part of an array; zeros where it reaches beyond."""

  def __init__(self, array, index):
    self._array, self._index = array, index

  def __getitem__(self, index):
    index = index if isinstance(index, tuple) else (index,)
    return _Window(self._array, (*self._index, *index))

  @property
  def at(self):
    return self

  def read(self):
    array, taken = self._array.array, []
    for place, size in zip(self._index, array.shape, strict=True):
      if isinstance(place, pl.Slice):
        place = int(place.start) + np.arange(place.size)
      else:
        place = np.atleast_1d(np.asarray(place))
      taken.append((place, (place >= 0) & (place < size)))
    places = np.ix_(*[np.where(inside, p, 0) for p, inside in taken])
    # `np.ix_` takes bools for what they select.
    inside = np.ix_(*[inside.astype(int) for _, inside in taken])
    exists = functools.reduce(np.multiply, inside) != 0
    data = np.where(exists, array[places], np.zeros((), array.dtype))
    return data.reshape(
        [i.size for i in self._index if isinstance(i, pl.Slice)]
    )


class _Matrices:
  """Matrices in shared memory, and the bytes that they lie in."""

  def __init__(self, shape, dtype):
    self.shape, self.dtype = shape, np.dtype(dtype)
    self.ref = dense_emulation.Memory(int(np.prod(shape)) * self.dtype.itemsize)

  @property
  def array(self):
    return self.ref.bytes.view(self.dtype).reshape(self.shape)

  @property
  def at(self):
    return _Part(self, ())


class _Part:
  """One of some matrices, or some rows of one."""

  def __init__(self, matrices, index):
    self._matrices, self._index = matrices, index

  def __getitem__(self, index):
    index = index if isinstance(index, tuple) else (index,)
    return _Part(self._matrices, index)

  def __setitem__(self, index, value):
    assert index is Ellipsis
    self._matrices.array[self._places()] = value

  def _places(self):
    return tuple(
        slice(int(i.start), int(i.start) + i.size)
        if isinstance(i, pl.Slice)
        else int(i)
        for i in self._index
    )

  def read(self):
    with self._matrices.ref.whole:
      return self._matrices.array[self._places()].astype(np.float32)

  @property
  def T(self):  # noqa: N802
    return _Transposed(self)


class _Transposed:

  def __init__(self, part):
    self._part = part

  def read(self):
    return self._part.read().T


class _Barriers:
  """mbarriers that bytes arrive at, one arrival each."""

  def __init__(self, count):
    self._lock = threading.Lock()
    self._missing = [1] * count
    self._bytes, self._phases = [0] * count, [0] * count
    self._seen = collections.Counter()

  @property
  def at(self):
    return self

  def __getitem__(self, slot):
    return self, int(slot)

  def count(self, slot, arrivals, size):
    with self._lock:
      self._missing[slot] -= arrivals
      self._bytes[slot] += size
      assert self._missing[slot] >= 0, 'two phases at once'
      if self._missing[slot] == 0 and self._bytes[slot] == 0:
        self._phases[slot] += 1
        self._missing[slot] = 1

  def wait(self, slot):
    key = threading.get_ident(), slot
    _wait_for(lambda: self._phases[slot] & 1 != self._seen[key] & 1)
    self._seen[key] += 1


class _Accumulator:

  def __init__(self, shape):
    self.value = np.zeros(shape, np.float32)

  def __getitem__(self, index):
    assert index is Ellipsis
    return self.value


class _Place:
  """In place of `ptx.Place`."""

  def __init__(self, ref, offset):
    self._ref, self._offset = ref, int(offset)

  def load(self, at, size):
    return self._ref.load(np.asarray(at) + self._offset, size)

  def store(self, at, data):
    self._ref.store(np.asarray(at) + self._offset, data)


def _copy(source, target, barrier, collective_axes):
  """Copies this CTA's part of a slice to all CTAs of the cluster."""
  assert collective_axes == 'member'
  barriers, slot = barrier
  matrices, place = target
  data = source.read()
  rows = data.shape[0]
  data = data.reshape(matrices.shape[1:])
  own, peers = _local.cta, _local.cta.peers
  assert rows % len(peers) == 0
  part = len(data) // len(peers)
  first = own.place['member'] * part
  taken = slice(first, first + part)
  barriers.count(slot, 1, data.nbytes)
  index = [
      next(i for i, ref in enumerate(own.refs) if ref is each)
      for each in (barriers, matrices)
  ]
  for peer in peers:
    signals, slices = (peer.refs[i] for i in index)
    with slices.ref.whole:
      slices.array[place, taken] = data[taken]
    signals.count(slot, 0, -data[taken].nbytes)


def _multiply(total, a, b):
  a = a if isinstance(a, np.ndarray) else a.read()
  total.value += a.astype(np.float32) @ b.read()


def _coordinates():
  """Returns rows and columns of a warpgroup's words, [words, 2, 128]."""
  thread = np.arange(128)
  row = 16 * (thread >> 5) + ((thread & 31) >> 2)
  column = 2 * (thread & 3)
  rows, columns = [], []
  for octet in range(8):
    for half in range(2):
      rows.append([row + 8 * half] * 2)
      columns.append([8 * octet + column + i for i in range(2)])
  return np.array(rows), np.array(columns)


def _inline_mgpu(arg_types, return_type):
  """In place of the two functions of `operands`."""
  rows, columns = _coordinates()
  is_load = not isinstance(return_type, tuple)

  def load(*words):
    assert len(words) == len(arg_types)
    factor = np.zeros((64, 64), np.dtype(return_type.dtype))
    for i, word in enumerate(words):
      pair = np.asarray(word).view(factor.dtype).reshape(128, 2).T
      factor[rows[i], columns[i]] = pair
    return factor

  def elements(product):
    found = product[rows, columns].reshape(-1, 128)
    assert len(found) == len(return_type)
    return tuple(map(jnp.asarray, found))

  return lambda _: load if is_load else elements


def _transpose(word):
  pairs = np.asarray(word).view(np.int16).reshape(-1, 8, 8)
  turned = np.ascontiguousarray(pairs.swapaxes(1, 2))
  return jnp.asarray(turned.reshape(-1).view(np.int32))


def _arrive_at_all(signals, signal, lane, ctas):
  del signals
  peers = _local.cta.peers
  assert len(peers) == ctas
  for peer in peers:
    peer.count(int(signal), len(np.asarray(lane)) // 32, 0)


def _number(ref, index):
  return int(ref.bytes.view(np.int32)[int(index)])


def _until(ref, index, value):
  _wait_for(lambda: _number(ref, index) >= int(value))


def _await_signal(signals, signal, turn, busy=False, scope='cluster'):
  del signals, busy, scope
  cta, signal, turn = _local.cta, int(signal), int(turn)
  _wait_for(lambda: cta.phases[signal] & 1 != turn)


def _add(counters, index):
  with counters.ref.whole:
    counters.ref.bytes.view(np.int32)[int(index)] += 1


def _put(words, word, value):
  words.ref.bytes.view(np.int32)[int(word)] = int(value)


def _put_by(words, where, word, value):
  if np.asarray(where).any():
    _put(words, word, value)


def _meet(warpgroups, number=15):
  if warpgroups == 1:
    return
  with _local.cta.changed:
    barriers = _local.cta.__dict__.setdefault('barriers', {})
    found = barriers.setdefault(int(number), threading.Barrier(warpgroups))
  found.wait(_PATIENCE)


def _axis_index(name):
  if name == 'warpgroup':
    return jnp.int32(_local.first >> 7)
  if name == 'warp':
    return jnp.int32((_local.first >> 5) & 3)
  return jnp.int32(_local.cta.place[name])


def _scratch(kind):
  if isinstance(kind, plgpu.Barrier):
    return _Barriers(int(np.prod(kind.num_barriers)))
  if kind.dtype == jnp.int32:
    return dense_emulation.Memory(4 * kind.shape[0])
  return _Matrices(kind.shape, kind.dtype)


def _kernel(
    body,
    *,
    out_type,
    grid,
    grid_names,
    cluster,
    cluster_names,
    num_threads,
    scratch_types,
    **_,
):
  """In place of `plgpu.kernel`."""
  warpgroups = [128 * i for i in range(num_threads - 1)]
  warps = [128 * (num_threads - 1) + 32 * i for i in range(4)]
  workers = [(first, 128) for first in warpgroups]
  workers += [(first, 32) for first in warps]

  def run(*arrays):
    inputs = [_Array(x) for x in arrays]
    rng = np.random.default_rng(0)
    empty = lambda t: rng.integers(0, 99, t.shape).astype(t.dtype)
    outputs = [_Array(empty(t)) for t in out_type]
    ctas = []
    for place in np.ndindex(*grid, *cluster):
      names = dict(zip((*grid_names, *cluster_names), place, strict=True))
      refs = [_scratch(kind) for kind in scratch_types]
      ctas.append(dense_emulation.Cta(names, refs, len(workers)))
    (size,) = cluster
    for first in range(0, len(ctas), size):
      peers = ctas[first : first + size]
      meeting = threading.Barrier(size * len(workers))
      for cta in peers:
        cta.peers, cta.cluster_barrier = peers, meeting
    everyone = threading.Barrier(len(ctas) * len(workers))
    failures = []

    def work(cta, first, lanes):
      _local.cta, _local.everyone = cta, everyone
      _local.first, _local.lanes = first, lanes
      _local.failures = failures
      try:
        body(*inputs, *outputs, *cta.refs)
      except BaseException as error:  # pylint: disable=broad-except
        failures.append(error)
        everyone.abort()
        for each in ctas:
          each.cluster_barrier.abort()

    threads = [
        threading.Thread(target=work, args=(cta, *worker))
        for cta in ctas
        for worker in workers
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if failures:
      raise failures[0]
    return tuple(jnp.asarray(array.array) for array in outputs)

  return run


@contextlib.contextmanager
def emulated():
  """The kernel runs inside, without `jax.jit`."""
  nothing = lambda *args, **kwargs: None
  each = lambda first, end: lambda f: dense_emulation.fori_loop(
      first, end, lambda i, _: f(i), None
  )
  fakes = {
      ptx: {'Place': _Place},
      instructions: {
          'transpose': _transpose,
          'shuffle_word': dense_emulation.shuffle,
      },
      sync: {
          'arrive_at_all': _arrive_at_all,
          'await_signal': _await_signal,
          'barrier': _meet,
          'cluster_barrier': lambda: _local.cta.cluster_barrier.wait(_PATIENCE),
          'fence_copies': nothing,
      },
      chunks.Counters: {'add': _add, 'wait': lambda c, *a: _until(c.ref, *a)},
      chunks.Words: {
          'put': _put,
          'put_by': _put_by,
          'wait': lambda w, word, value, nap=0: _until(w.ref, word, value),
      },
      gate_products.Products: {
          '_slot': lambda self, slot: (self.buffers.slices, int(slot)),
      },
      plgpu: {
          'kernel': _kernel,
          'inline_mgpu': _inline_mgpu,
          'set_max_registers': nothing,
          'commit_smem': nothing,
          'copy_gmem_to_smem': _copy,
          'barrier_wait': lambda barrier: barrier[0].wait(barrier[1]),
          'wgmma': _multiply,
          'wgmma_wait': nothing,
      },
      pl: {
          'loop': each,
          'kernel': lambda f, mesh: f,
          'run_scoped': lambda f, acc: f(_Accumulator(acc.shape)),
      },
      lax: {'axis_index': _axis_index},
  }
  assert plan_lib.WARPGROUPS == 4
  with dense_emulation.emulated(), dense_emulation.replaced(fakes):
    yield
