"""Models over any layer; no cell is named here."""

from rnnzoo.models.language import LanguageModel
from rnnzoo.models.seq2seq import Seq2Seq
from rnnzoo.models.sequence import SequenceClassifier
from rnnzoo.models.sequence import SequenceModel
from rnnzoo.models.tied_language import TiedLanguageModel

__all__ = (
    'LanguageModel',
    'Seq2Seq',
    'SequenceClassifier',
    'SequenceModel',
    'TiedLanguageModel',
)
