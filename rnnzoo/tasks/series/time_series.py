"""Classification or regression of time series: the UEA and UCR archives.

JapaneseVowels (nine speakers, 12 columns, 7 to 29 steps) is the default:
sequences end at different steps, so it shows lengths and masks. BasicMotions
(four motions, 6 columns, 100 steps) is the second that needs no network; of
regressions, Covid3Month and CardanoSentiment need none.
"""

import ml_collections

from rnnzoo.tasks import fields
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_task
from rnnzoo.tasks.series import sequences
from rnnzoo.tasks.series import uea

_RULES: fields.Rules = {
    **sequence_task.RULES,
    'name': fields.text(),
    'manual_dir': fields.text(),
    'kind': fields.one_of(('classification', 'regression')),
    'split': fields.one_of(('archive', 'pooled')),
    'test_fraction': fields.number(0, 1, above=True, below=True),
}


class TimeSeries(sequence_task.SequenceTask):
  """A data set of the archives; a class or a number a sequence."""

  rules = _RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_time_series.py`.

    Raises:
      ModuleNotFoundError: the extra 'timeseries' is not installed.
      ConnectionError: the data could not be downloaded.
    """
    self._set_up(config)
    data = config.data
    if data.split == 'archive':
      fields.check_unread(data, {'test_fraction': 0.15}, 'split')
    parts = uea.read(data.name, data.manual_dir, data.kind)
    if data.split == 'pooled':
      parts = {'train': sequence_arrays.concatenate(parts.values(), False)}
    super().__init__(config, data.name, *sequences.divided(parts, data))
