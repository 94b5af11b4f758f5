"""Every config: it builds its task's model, and says where it comes from."""

import importlib
import pathlib
import re
import sys

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import ml_collections
import pytest

import rnnzoo
from rnnzoo import tasks
from rnnzoo.tasks import backbones
from rnnzoo.training import optimization
from rnnzoo.training import step
from tests.testing import sequence_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted(
    path.stem
    for path in ROOT.glob('configs/*.py')
    if path.stem not in ('__init__', 'base')
)
BASES = ['base', *(name for name in CONFIGS if name.startswith('base_'))]

# configs/ is never installed.
sys.path.insert(0, str(ROOT))


def offline(
    config: ml_collections.ConfigDict, directory: pathlib.Path
) -> dict[str, str]:
  """Returns fields by which a task's data are there, without a network.

  Args:
    config: of the task.
    directory: gets files of made-up data, where the task reads files.
  """
  if config.task in ('cifar', 'smnist'):
    return {'source': 'digits'}
  if config.task == 'translation':
    return {'source': 'dates'}
  if config.task == 'sequences':
    path = sequence_files.write_npz(directory / 'mine.npz')
    return {'path': str(path)}
  if config.task == 'time_series':
    sequence_files.write_archive(directory, config.data.name)
    return {'manual_dir': str(directory)}
  return {}


def load_config(name: str) -> ml_collections.ConfigDict:
  return importlib.import_module(f'configs.{name}').get_config()


class ConfigsTest(parameterized.TestCase):

  def test_every_layer_has_a_row_config(self):
    configs = map(load_config, CONFIGS)
    rows = [config for config in configs if config.task == 'smnist']
    layers = {config.model.layer for config in rows}
    self.assertContainsSubset(set(rnnzoo.LAYERS), layers)

  @parameterized.named_parameters(*((name, name) for name in CONFIGS))
  @pytest.mark.few(8)
  def test_builds(self, name):
    config = load_config(name)
    directory = pathlib.Path(self.create_tempdir().full_path)
    config.data.update(offline(config, directory))
    task = tasks.TASKS[config.task](config)
    backbones._warn_once.cache_clear()
    optimizer = optimization.make_optimizer(config.optimizer, num_steps=10)
    optimization.make_plateau(config.optimizer)
    init = step.Program(task, optimizer, 100).init
    with self.assertNoLogs('absl', 'WARNING'):
      state = jax.eval_shape(init, jax.random.key(0))
    self.assertNotEmpty(jax.tree.leaves(state.params))

  @parameterized.parameters(
      ('cifar', 'manual_dir'),
      ('sequences', 'data_dir', 'tfds:some'),
      ('sequences', 'path'),
      ('skeletons', 'data_dir', 'ntu60'),
      ('smnist', 'data_dir'),
      ('smnist', 'manual_dir'),
      ('text', 'path'),
      ('time_series', 'manual_dir'),
      ('translation', 'data_dir', 'tfds:some'),
      ('translation', 'train_source', 'files'),
  )
  def test_names_a_path_that_cannot_be(self, task, field, source=None):
    file = self.create_tempfile().full_path
    config = load_config(f'base_{task}')
    if source is not None:
      config.data.source = source
    cases = [('~nobody-here/a', ' begins with the home directory of nobody')]
    # Other fields name files, or folders of which something else is said.
    if field.endswith('_dir') and task != 'skeletons':
      words = 'is a file, not a directory$'
      cases += (file, f' {words}'), (
          f'{file}/a',
          f' is below {file}, which {words}',
      )
    for path, words in cases:
      config.data[field] = path
      with self.assertRaisesRegex(
          ValueError, f'^config.data.{field}={path}{words}'
      ):
        tasks.TASKS[task](config)

  @parameterized.parameters(
      ('cifar', 'sequence', 'row', 'num_steps', 2000, 1000),
      ('cifar', 'sequence', 'permuted', 'noise_seed', 1, 0),
      ('cifar', 'sequence', 'pixel', 'permutation_seed', 1, 0),
      ('cifar', 'source', 'digits', 'manual_dir'),
      ('sequences', 'source', 'files', 'sequence', 'pixel', 'row'),
      ('sequences', 'source', 'files', 'data_dir'),
      ('sequences', 'source', 'tfds:some', 'path'),
      ('skeletons', 'source', 'motions', 'data_dir'),
      ('skeletons', 'source', 'motions', 'missing_list'),
      ('smnist', 'sequence', 'row', 'permutation_seed', 1, 0),
      ('smnist', 'source', 'digits', 'data_dir'),
      ('smnist', 'manual_dir', 'elsewhere', 'data_dir'),
      ('smnist', 'source', 'digits', 'manual_dir'),
      ('time_series', 'split', 'archive', 'test_fraction', 0.2, 0.15),
      ('translation', 'source', 'dates', 'data_dir'),
      ('translation', 'source', 'files', 'data_dir'),
  )
  def test_sets_a_field_that_nothing_reads(
      self, task, choice, chosen, field, value='/nowhere', default=''
  ):
    config = load_config(f'base_{task}')
    config.data[choice] = chosen
    config.data[field] = value
    with self.assertRaisesRegex(
        ValueError,
        f'^config.data.{field} would be ignored with config.data.{choice}='
        f"'{chosen}'; it must be {default!r} there, got {value!r}$",
    ):
      tasks.TASKS[task](config)

  @parameterized.named_parameters(*((name, name) for name in CONFIGS))
  def test_has_the_fields_of_its_task(self, name):
    config = load_config(name)
    base = load_config(f'base_{config.task}')
    self.assertEqual(set(config), set(base))
    for section in ('data', 'model', 'optimizer', 'early_stopping'):
      self.assertEqual(set(config[section]), set(base[section]))
    # No field is added by accident.
    for section in (config, config.optimizer, config.data):
      with self.assertRaises(AttributeError):
        section.learning_rte = 0.1

  @parameterized.named_parameters(
      *((name, name) for name in CONFIGS if name not in BASES)
  )
  def test_says_where_the_numbers_are_from(self, name):
    text = importlib.import_module(f'configs.{name}').__doc__
    self.assertIn('Published: ', text)
    self.assertIn('Measured: ', text)
    self.assertIn(f'  python train.py --config=configs/{name}.py\n', text)

  def test_options_of_every_layer_can_be_set(self):
    config = load_config('base')
    for field in ('options', 'last_layer_options'):
      known = [*rnnzoo.LAYERS, 'GriffinBlock']
      self.assertCountEqual(config.model[field], known)

  def test_options_reach_every_layer_of_a_stack(self):
    config = load_config('irevrnn_smnist')
    config.model.options.IRevRNN.inner_activation = 'sigmoid'
    config.model.last_layer_options.IRevRNN.activation = 'tanh'
    make = lambda: backbones.build(config.model, 3, nnx.Rngs(0))
    first, last = (layer.cell for layer in nnx.eval_shape(make).layers)
    self.assertEqual(first, rnnzoo.IRevRNNCell('relu', 'sigmoid'))
    self.assertEqual(last, rnnzoo.IRevRNNCell('tanh', 'sigmoid'))
    config = load_config('base')
    config.model.update(layer='GriffinBlock', features=4, num_layers=2)
    config.model.options.GriffinBlock.num_heads = 2
    for block in nnx.eval_shape(make).layers:
      self.assertIsInstance(block, rnnzoo.GriffinBlock)
      self.assertEqual(block.recurrence.input_map.kernel.shape, (2, 2, 2, 2))

  @parameterized.parameters('irevrnn_ntu', 'irevrnn_pixel_smnist')
  def test_recurrent_weights_do_not_decay(self, name):
    config = load_config(name)
    make = lambda: backbones.build(config.model, 3, nnx.Rngs(0))
    params = nnx.state(nnx.eval_shape(make), nnx.Param)
    mask = optimization.decay_mask(config.optimizer.weight_decay_exclude)
    flat, _ = jax.tree_util.tree_flatten_with_path(mask(params))
    decays = {
        re.findall(r"'(\w+)'", jax.tree_util.keystr(path))[-1]
        for path, decay in flat
        if decay
    }
    self.assertEqual(decays, {'kernel', 'scale'})

  @parameterized.product(
      task=('adding', 'sequences', 'skeletons', 'translation'),
      case=(
          ({'norm_momentum': 0.5}, "0.5 needs config.model.norm='batch'"),
          ({'dense': True, 'residual': True}, 'dense or residual, not both'),
      ),
  )
  def test_refuses_a_model_before_data_are_read(self, task, case):
    model, message = case
    config = load_config(f'base_{task}')
    config.model.update({'norm': 'layer'} | model)
    with self.assertRaisesRegex(ValueError, message):
      tasks.TASKS[task](config)

  @parameterized.parameters(
      'adding', 'cifar', 'copying', 'lorenz', 'smnist', 'state_tracking'
  )
  def test_dense_layers(self, name):
    config = load_config(f'base_{name}')
    directory = pathlib.Path(self.create_tempdir().full_path)
    config.data.update(offline(config, directory))
    config.model.update(dense=True, num_layers=2, features=8)
    task = tasks.TASKS[config.task](config)
    model = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
    backbone = model.backbone
    self.assertIsInstance(backbone, rnnzoo.DenseStack)
    self.assertEqual(backbone.out_features, backbone.in_features + 2 * 8)
    self.assertEqual(model.head.in_features, backbone.out_features)

  @parameterized.parameters(
      ({'dropout_rate': 0.5}, '=0.5 has no effect: dropout stands between'),
      ({'dropout_rate': 0.5, 'dense': True}, 'num_layers is 1'),
      ({}, ''),
      ({'dropout_rate': 0.5, 'num_layers': 2}, ''),
  )
  def test_warns_once_of_fields_without_effect(self, given, message):
    config = load_config('base')
    config.model.update(given)
    make = lambda: backbones.build(config.model, 3, nnx.Rngs(0))
    backbones._warn_once.cache_clear()
    check = self.assertLogs if message else self.assertNoLogs
    with check('absl', 'WARNING') as logs:
      for _ in range(3):
        nnx.eval_shape(make)
    if message:
      self.assertLen(logs.output, 1)
      self.assertIn(message, logs.output[0])

  @pytest.mark.slow
  def test_layers_of_a_translation(self):
    config = load_config('base_translation')
    config.data.update(source='dates')
    config.model.dropout_rate = 0.5
    task = tasks.TASKS['translation'](config)
    backbones._warn_once.cache_clear()
    with self.assertNoLogs('absl', 'WARNING'):  # It drops embeddings.
      nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0)))
    config.model.dense = True
    with self.assertRaisesRegex(ValueError, 'dense must be False for a trans'):
      tasks.TASKS['translation'](config)

  def test_timespans_that_no_task_has(self):
    config = load_config('cfc_smnist')
    config.model.options.CfC.timespans = True
    make = lambda: backbones.build(config.model, 3, nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'timespans=False would work'):
      nnx.eval_shape(make)

  def test_momentum_reaches_every_level(self):
    config = load_config('base')
    config.model.update(num_layers=2, norm='batch')
    make = lambda: backbones.build(config.model, 3, nnx.Rngs(0))
    for momentum in (None, 0.5):
      config.model.norm_momentum = momentum
      norms = nnx.eval_shape(make).norms
      self.assertEqual([n.momentum for n in norms], [momentum or 0.9] * 2)
    for momentum in (0.0, 1.0, 1, 'much', 1 - 1e-9):
      config.model.norm_momentum = momentum
      message = 'norm_momentum must be a number above 0 and below 1'
      with self.assertRaisesRegex(ValueError, message):
        backbones.check(config.model)

  @parameterized.named_parameters(*((name, name) for name in BASES))
  def test_every_field_has_a_comment(self, name):
    lines = (ROOT / f'configs/{name}.py').read_text().splitlines()
    known = load_config('base')
    sections = {
        'config': known,
        'data': known.data,
        'model': known.model,
        'optimizer': known.optimizer,
        'stopping': known.early_stopping,
    }
    for above, line in zip(lines, lines[1:], strict=False):
      found = re.match(r'  (\w+)\.(\w+) = ', line)
      if found and found[1] in sections:
        # A base of a task explains its own fields, not those of all tasks.
        if name == 'base' or found[2] not in sections[found[1]]:
          self.assertStartsWith(above.strip(), '#', msg=line)


if __name__ == '__main__':
  absltest.main()
