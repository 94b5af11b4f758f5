"""Mutation run: does a test notice when one line of the code is wrong?

    python tests/mutants.py                     # all, some seconds each
    python tests/mutants.py --only=layers/stack # those of files with this name
    python tests/mutants.py --check             # only that each can be applied

Each mutant replaces one text of one file in a copy of the checkout, and the
tests named beside it have to fail. Exit status 0: none survived. This is no
part of .ci/run.
"""

from collections.abc import Iterator
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from absl import app
from absl import flags

_ONLY = flags.DEFINE_string('only', '', 'Part of the name of a file to mutate.')
_CHECK = flags.DEFINE_bool('check', False, 'Apply the mutants, run no test.')

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
  """One wrong line.

  Attributes:
    path: of the file, from the root of the checkout.
    old: a text that occurs once in it.
    new: what replaces it.
    test: the test file that has to fail.
    select: which of its tests, as pytest's -k takes it.
  """

  path: str
  old: str
  new: str
  test: str
  select: str


# A path and the test file that finds its mutants; for each of them the right
# text, the wrong one, and, after an @, which tests find it.
_TABLE = r"""
rnnzoo/doors/scanned.py tests/scanned_test.py
  - resets != 0 if
  + resets > 0 if  @ resets_of_any_dtype
  - _check_start(made)
  + pass  @ learned_carry_is_refused
rnnzoo/linen.py tests/linen_test.py
  - part.use_running_average = True
  + pass  @ dropout_by_rngs
  - part.dropout_rate = False, 0.0
  + x = False, 0.0  @ dropout_by_rngs
rnnzoo/layers/levels.py tests/layers/wavefront_test.py
  - valid if mask is None else mask & valid
  + mask  @ agrees_with_layers
  - y_i = above(i, waiting[i], y_i, valid)
  + pass  @ agrees_with_layers
  - turns = -(-len(levels) // number)
  + turns = 1  @ turns
pallas_kernels/dense/forward.py tests/pallas_kernels/dense/gate_sums_test.py
  - if len(found) != 1 or gate in jaxpr.outvars:
  + if not found or gate in jaxpr.outvars:  @ update
rnnzoo/cells/lstm.py tests/cells/cells_test.py
  - initializers.shifted(bias_init, forget_bias)
  + initializers.shifted(bias_init, -forget_bias)  @ ForgetBias
  - bias_init=(bias_init, forget_init, bias_init, bias_init)
  + bias_init=(forget_init, bias_init, bias_init, bias_init)  @ ForgetBias
rnnzoo/cells/lstm.py tests/cells/golden_test.py
  - h_gates)\n    c = sigmoid(f)
  + h_gates)\n    c = sigmoid(i)  @ test_agrees
rnnzoo/cells/minlstm.py tests/cells/cells_test.py
  - initializers.shifted(bias_init, forget_bias)
  + initializers.shifted(bias_init, -forget_bias)  @ ForgetBias
  - jnp.where(x < -_LARGE, -_LARGE, x) for x in (f, i)
  + x for x in (f, i)  @ MinLSTMTest
  - jnp.maximum(jnp.maximum(-f, -i), 0)
  + 0 * f  @ saturated
rnnzoo/cells/minlstm.py tests/cells/equations_test.py
  - forget, admit = one + exp_i
  + forget, admit = one + exp_f  @ MinLSTM
rnnzoo/cells/mingru.py tests/cells/equations_test.py
  - x + 0.5, sigmoid
  + x + 0.25, sigmoid  @ MinGRU
rnnzoo/cells/agru.py tests/cells/equations_test.py
  - params['epsilon'] * z * d
  + params['epsilon'] * d  @ AGRU
rnnzoo/cells/antisymmetric.py tests/cells/equations_test.py
  - w - jnp.swapaxes(w, -1, -2) -
  + w + jnp.swapaxes(w, -1, -2) -  @ Anti
  - - float(self.gamma)
  + + float(self.gamma)  @ Anti
rnnzoo/cells/irevrnn.py tests/cells/equations_test.py
  - return h + b * phi(c), c
  + return h + a * phi(c), c  @ IRev
rnnzoo/cells/irevrnn.py tests/cells/cells_test.py
  - inner[name].set_metadata(max_abs=max_abs)
  + pass  @ clips_what
rnnzoo/cells/slstm.py tests/cells/cells_test.py
  - exponent = 0.3 + 1.3
  + exponent = 0.3 - 1.3  @ forget_bias
  - return jnp.tile(5 - 12
  + return jnp.tile(5 + 12  @ forget_bias
rnnzoo/cells/slstm.py tests/cells/derivatives_test.py
  - -scale * c, g
  + scale * (g * t - (c + g * t)), g  @ each_element
  - larger * d_i + (1 - larger) * d_l
  + d_l + larger * d  @ each_element
  - _reciprocal(n), _re
  + 1 / n, _re  @ second
rnnzoo/layers/xlstm_parts.py tests/layers/slstm_block_test.py
  - normal(2 / num_blocks / math
  + normal(2 / math  @ test_start
rnnzoo/engines/paths.py tests/layers/leading_axes_test.py
  - x.reshape(*batch_shape, *x.shape[1:])
  + x.reshape(*batch_shape[::-1], *x.shape[1:])  @ unroll
rnnzoo/engines/time/maps.py tests/engines/linear_scan_test.py
  - return _beside(y, x) * _beside(x, y)
  + return x * _beside(x, y)  @ overflow
  - return _beside(y, x) * _beside(x, y)
  + return _beside(y, x) * y  @ nothing_passes
  - is_lost = is_zero(product) & ~is_zero(a1) & ~is_zero(a2)
  + is_lost = is_zero(product)  @ nothing_passes or forgets
  - jnp.where(is_lost, tiny, x)
  + x  @ no_product
  - jnp.copysign(tiny, x)
  + tiny  @ no_product
  - forcing = affine(back, jax.tree.map(jnp.zeros_like, g), g)
  + forcing = linear_maps.times(back, g)  @ nothing_passes
  - (factor == 0) & ~jnp.isfinite(x)
  + factor == 0  @ second
  - x[-1 if reverse else 0], mu
  + x[0 if reverse else -1], mu  @ agrees_with_loop
  - adjoint, scan_steps.shifted(before, h, reverse))
  + adjoint, h)  @ agrees_with
  - return factor * _beside(factor, x)
  + return factor * x  @ forgets_an_infinity
  - linear_maps.where(reset, again, b)
  + b  @ nothing_passes_a_reset_of_a_layer or agrees
rnnzoo/engines/time/maps.py tests/engines/pairs_test.py
  - back = linear_maps.transposed(a)
  + back = a  @ by_xla
  - h = affine(powers, h
  + h = affine(always, h  @ by_xla
pallas_kernels/linear_maps.py tests/engines/pairs_test.py
  - return p * re + q * im, q * re - p * im
  + return p * re + q * im, p * im - q * re  @ by_xla
rnnzoo/engines/products.py tests/cells/new_cell_test.py
  - jnp.transpose(kernel, (1, 2, 0, 3))
  + jnp.transpose(kernel, (1, 3, 0, 2))  @ CIFG and scan and float32
rnnzoo/engines/scan/derivatives.py tests/cells/new_cell_test.py
  - d_restart = scan_steps.select(reset, d_start, _zeros(d_start))
  + d_restart = d_start  @ CIFG and reset and float32
  - held = scan_steps.select(mask, _zeros(d_carry), d_carry)
  + held = _zeros(d_carry)  @ CIFG and mask and float32
rnnzoo/engines/scan/derivatives.py tests/engines/recurrent_gradient_test.py
  - jnp.clip(d, -clip, clip)
  + jnp.clip(d, 0, clip)  @ test_gradients
rnnzoo/engines/scan/steps.py tests/cells/new_cell_test.py
  - is_first = entry == (time if reverse else -1)
  + is_first = entry == -1  @ CIFG and reverse and float32
  - jnp.concatenate([rest, last], axis=axis)
  + reset  @ CIFG and reset and reverse and float32
rnnzoo/engines/selection.py tests/layers/errors_test.py
  - != 'cpu' else ()
  + == 'cpu' else ()  @ warns_once
rnnzoo/engines/selection.py tests/engines/pallas_settings_test.py
  - return name_of(names(
  + return (names(  @ name_of_its_path
pallas_kernels/projection.py tests/engines/pallas_settings_test.py
  - lax.optimization_barrier((
  + ((  @ waits_for
rnnzoo/engines/choice.py tests/layers/errors_test.py
  - warn_once(f
  + log_once(f  @ warns_once
rnnzoo/engines/platforms.py tests/engines/platforms_test.py
  - selection.warn_once(
  + selection.log_once(  @ NoGpu
pallas_kernels/dense/tuning.py tests/pallas_kernels/capabilities_test.py
  - candidate.cluster > target.largest_cluster
  + candidate.cluster > 16  @ dense_plans
pallas_kernels/streaming/tuning.py tests/pallas_kernels/capabilities_test.py
  - or not target.has_tma
  + or False  @ streaming_plans
rnnzoo/engines/choice.py tests/engines/first_use_test.py
  - reason or first_use.doubt(self.kind)
  + reason  @ another_path
rnnzoo/checks.py tests/fuzz_test.py
  - is_complex > or_complex
  + False  @ AllTest and functions
  - (low >= least and high <= most)
  + (low >= least)  @ AllTest and calls
  - 'recurrent_gradient_clip', above=0)
  + 'recurrent_gradient_clip')  @ AllTest and constructors
  - if known.itemsize == 8 and not config.jax_enable_x64
  + if False  @ AllTest and constructors
rnnzoo/settings.py tests/fuzz_test.py
  - math.isfinite(value)
  + True  @ AllTest and constructors
rnnzoo/contract.py tests/cells/contract_test.py
  -     'cumsum',\n
  +   @ refuses
  - (-2, _BATCH)
  + (-1, _FEATURES)  @ refuses
  - early = h_gates[:-1]
  + early = h_gates  @ refuses
  - settings.frozen if settings
  + True if settings  @ refuses
rnnzoo/models/sequence.py tests/layers/stack_test.py
  - x, reset=reset, seq_lengths
  + x, seq_lengths  @ SequenceModel
  - step(carry, x, reset=reset)
  + step(carry, x)  @ SequenceModel
  - valid & (steps >= last)
  + valid  @ means
rnnzoo/engines/sharding.py tests/planning_test.py
  - _over.reset(token)
  + pass  @ over_devices
  - *batch, time, features = over
  + *batch, features, time = over  @ devices
rnnzoo/layers/stack.py tests/layers/stack_test.py
  - stored = not train or
  + stored = True or  @ Norm
  - and train and not is_last
  + and train  @ Dropout
  - return not self.deterministic
  + return rngs is not None  @ Modes
  - if self.residual and x
  + if x  @ StackTest
  - y = jnp.where(valid[..., None], y, 0)
  + y = y  @ test_padding
rnnzoo/layers/dense_stack.py tests/layers/stack_test.py
  - x = jnp.where(valid[..., None], x, 0)
  + x = x  @ padding
rnnzoo/layers/dense_stack.py tests/layers/dense_stack_test.py
  - if 'residual' in options
  + if False  @ refused
rnnzoo/layers/bidirectional.py tests/layers/stack_test.py
  - initial_carry[1], not reverse
  + initial_carry[1], reverse  @ two_layers
rnnzoo/layers/initializers.py tests/cells/cells_test.py
  - -bound, bound)
  + 0, bound)  @ Constrain or clips
rnnzoo/checks.py tests/layers/stack_test.py
  - 1, time) - 1
  + 1, time)  @ Classifier
rnnzoo/convert/torch_modules.py tests/cells/golden_test.py
  - bias, extra = bias_ih + bias_hh, None
  + bias, extra = bias_ih - bias_hh, None  @ test_agrees
rnnzoo/tasks/series/lorenz.py tests/tasks/lorenz_test.py
  - 2 * k2 + 2 * k3
  + 2 * k2 + 1 * k3  @ fourth_order
  - k3 = velocity(state + step / 2
  + k3 = velocity(state + step / 3  @ fourth_order
  - k4 = velocity(state + step *
  + k4 = velocity(state + .9 * step *  @ fourth_order
rnnzoo/tasks/images/cifar.py tests/tasks/cifar_test.py
  - transpose(0, 2, 3, 1)
  + transpose(0, 3, 2, 1)  @ reads
rnnzoo/tasks/series/sequence_arrays.py tests/tasks/sequence_task_test.py
  - deviation <= rounding
  + deviation <= 20 * rounding  @ rounding
  - deviation <= rounding
  + deviation <= .01 * rounding  @ rounding
  - found = (values.astype(np.float64)
  + found = (values.astype(np.float32)  @ columns
  - return np.sort(chosen[size:])
  + return np.sort(chosen[1:])  @ every_class
rnnzoo/tasks/series/sequence_checks.py tests/tasks/npz_test.py
  - or 2 * total < is_blank.sum()
  +   @ chance
rnnzoo/tasks/series/npz.py tests/tasks/npz_test.py
  - if known is None or name in known
  + if file[name] is not None  @ that_is_not_used
  - not known.any(1).all()
  + False  @ refuses
  - not head.startswith(b'PK')
  + False  @ that_are_none
rnnzoo/tasks/images/smnist.py tests/tasks/smnist_test.py
  - .reshape(count, height * width, -1)
  + [..., :1]  @ sequences
  - return np.random.RandomState(seed).permutation(num_pixels)
  + return np.random.RandomState(seed + 1).permutation(num_pixels)  @ permut
rnnzoo/training/optimization.py tests/training/training_test.py
  - optax.clip(config.clip_value)
  + optax.clip(1e9)  @ first_update
  - elif config.name == 'adamw'
  + elif False  @ first_update
  - patience=config.plateau_patience + 1
  + patience=config.plateau_patience  @ plateau
pallas_kernels/tiled/tuning.py tests/pallas_kernels/tiled/tiled_test.py
  - tiles.total <= most and not uneven
  + tiles.total <= most  @ fits
rnnzoo/training/seed_state.py tests/training/training_test.py
  - config.patience - 1
  + config.patience  @ stops_after_patience
  - (1 - 1e-6)
  + 0.0  @ stops_at_a_learning_rate
  - (experiment, -1)
  + (experiment)  @ of_the_last_step
  - max(num_steps - skipped, 1)
  + num_steps  @ of_the_last_step
rnnzoo/training/metrics.py tests/training/protocol_test.py
  - metric.greatest - value
  + value  @ direction
  - np.sum(x * weights) / np.sum(weights)
  + np.mean(x)  @ test_run
rnnzoo/training/visits.py tests/training/protocol_test.py
  - fold_in(order, step)
  + fold_in(order, 0)  @ depend_on_seed
rnnzoo/training/step.py tests/training/protocol_test.py
  - jnp.sum(weights * x) / jnp.sum(weights)
  + jnp.mean(x)  @ weighted_mean
rnnzoo/tasks/motion/skeleton_frames.py tests/tasks/skeletons_test.py
  - from_euler('xyz', angles)
  + from_euler('XYZ', angles)  @ turns_about
  - origin[[present.any(axis=1).argmax()]]
  + origin[:1]  @ centres
rnnzoo/tasks/motion/ntu_files.py tests/tasks/ntu_files_test.py
  - if any(joints):
  + if joints:  @ test_rejects
rnnzoo/tasks/motion/ntu_tracks.py tests/tasks/ntu_tracks_test.py
  - seen = body.joints.any(axis=(1, 2))
  + seen = np.ones(len(body.frames), bool)  @ main_body
  - or _are_apart(persons[i], persons[j])
  +   @ new_ids
  -  and not stays:
  + :  @ change_persons
  - in sorted(_links(shown))
  + in _links(shown)  @ new_ids
rnnzoo/tasks/classification.py tests/training/training_test.py
  - (predictions == labels)
  + (predictions >= labels)  @ metrics_are
rnnzoo/training/run_directory.py tests/training/training_test.py
  - NOT_COMPARED = (
  + NOT_COMPARED = ('seed',   @ another_config
rnnzoo/training/run_directory.py tests/training/run_files_test.py
  - _outcomes(path) + there
  + there  @ must_be_put_back
rnnzoo/training/run_directory.py tests/training/warm_start_test.py
  - [seed / 'result.json' for seed in seeds]
  + []  @ of_so_many
  - if done > num_epochs
  + if False  @ refused
rnnzoo/training/step.py tests/training/warm_start_test.py
  - params = self._freeze(params, state.params)
  + pass  @ frozen
rnnzoo/training/run_data.py tests/training/run_files_test.py
  - if not text and not goes_on
  + if not goes_on  @ other
rnnzoo/training/checkpointing.py tests/training/run_files_test.py
  - if manifest.get(name) != value
  + if False  @ another_seed
  - and n == str(int(n))
  +   @ before_the_first
rnnzoo/training/records.py tests/training/training_test.py
  - [1 : done + 1]
  + [1:]  @ resumed
"""


def _parsed(table: str) -> Iterator[Mutant]:
  """Yields the mutants of a table."""
  path = test = ''
  lines = iter(table.strip().splitlines())
  text = lambda line: line[4:].replace('\\n', '\n')
  for line in lines:
    if line.startswith('  - '):
      old = text(line)
      new, select = text(next(lines)).rsplit('  @ ', 1)
      yield Mutant(path, old, new, test, select)
    else:
      path, test = line.split()


MUTANTS = tuple(_parsed(_TABLE))


def applied(mutant: Mutant, root: pathlib.Path = ROOT) -> str:
  """Returns the text of the mutated file.

  Raises:
    ValueError: the file does not have the text once.
  """
  text = (root / mutant.path).read_text()
  if text.count(mutant.old) != 1:
    raise ValueError(
        f'{mutant.path} must have this text once, and has it'
        f' {text.count(mutant.old)} times: {mutant.old!r}'
    )
  return text.replace(mutant.old, mutant.new)


def survives(mutant: Mutant, copy: pathlib.Path) -> bool:
  """Returns whether the tests pass with a mutant, in a copy of the checkout."""
  path = copy / mutant.path
  right = path.read_text()
  path.write_text(applied(mutant, copy))
  command = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:xdist', '-o']
  command += ['addopts=--import-mode=importlib', '-k', mutant.select]
  try:
    result = subprocess.run(
        [*command, mutant.test], cwd=copy, capture_output=True, check=False
    )
  finally:
    path.write_text(right)
  if result.returncode not in (0, 1):  # For instance, no test was selected.
    raise RuntimeError(f'{mutant}: {result.stdout.decode()[-2000:]}')
  return result.returncode == 0


def main(argv):
  del argv
  chosen = [m for m in MUTANTS if _ONLY.value in m.path]
  for mutant in chosen:
    applied(mutant)
  if _CHECK.value:
    print(f'{len(chosen)} mutants can be applied')
    return
  found = []
  with tempfile.TemporaryDirectory() as directory:
    copy = pathlib.Path(directory) / 'copy'
    ignore = shutil.ignore_patterns('.git', '.venv*', 'runs', '__pycache__')
    shutil.copytree(ROOT, copy, ignore=ignore)
    for i, mutant in enumerate(chosen, 1):
      start = time.monotonic()
      survived = survives(mutant, copy)
      found += [mutant] if survived else []
      verdict = 'SURVIVED' if survived else 'killed'
      seconds = time.monotonic() - start
      print(
          f'{i}/{len(chosen)} {verdict} in {seconds:.0f} s:'
          f' {mutant.path}: {mutant.old!r} -> {mutant.new!r}',
          flush=True,
      )
  print(f'{len(chosen) - len(found)} of {len(chosen)} mutants were killed')
  sys.exit(1 if found else 0)


if __name__ == '__main__':
  app.run(main)
