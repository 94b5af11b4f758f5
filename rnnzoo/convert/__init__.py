"""Weights from other libraries, and back.

`from_*` fills a layer in place, as `nnx.update` does, and returns nothing: the
layer decides, so weights of another shape, entries that are missing and entries
that are left over are errors. A layer changes only if all of its weights were
found. `to_*` returns arrays that another library loads, as numpy arrays of
float32 or wider, and refuses a layer that computes something that library
cannot.

| library | functions | cells |
|---|---|---|
| torch | `from_torch`, `to_torch`, `fold_projection` | RNN, LSTM, GRU, *Cell |
| flax.nnx | `from_flax`, `to_flax` | SimpleCell, LSTMCell, GRUCell |
| flax.linen | `from_linen`, `to_linen` | as flax.nnx |
| haiku | `from_haiku`, `to_haiku` | LSTM, VanillaRNN |
| keras 3 | `from_keras`, `to_keras` | SimpleRNN, LSTM, GRU |
| FlashRNN | `from_flashrnn`, `to_flashrnn` | elman, lstm, gru, slstm |
| recurrentgemma | `{from,to}_recurrentgemma` | RGLRU, RecurrentBlock |
| xLSTM, TiRex | `from_xlstm`, `to_xlstm` | sLSTMBlock, sLSTMLayer |

No other library is needed: its arrays are read through numpy.
`save_safetensors` and `load_safetensors` write and read any `nnx.Module` by the
package safetensors, and `to_onnx` writes a graph for other runtimes by the
package onnx.
"""

from rnnzoo.convert.flashrnn_arrays import from_flashrnn
from rnnzoo.convert.flashrnn_arrays import to_flashrnn
from rnnzoo.convert.flax_cells import from_flax
from rnnzoo.convert.flax_cells import from_linen
from rnnzoo.convert.flax_cells import to_flax
from rnnzoo.convert.flax_cells import to_linen
from rnnzoo.convert.haiku_params import from_haiku
from rnnzoo.convert.haiku_params import to_haiku
from rnnzoo.convert.keras_weights import from_keras
from rnnzoo.convert.keras_weights import to_keras
from rnnzoo.convert.onnx_graphs import to_onnx
from rnnzoo.convert.recurrentgemma_params import from_recurrentgemma
from rnnzoo.convert.recurrentgemma_params import to_recurrentgemma
from rnnzoo.convert.safetensors_files import load_safetensors
from rnnzoo.convert.safetensors_files import save_safetensors
from rnnzoo.convert.torch_modules import fold_projection
from rnnzoo.convert.torch_modules import from_torch
from rnnzoo.convert.torch_modules import to_torch
from rnnzoo.convert.xlstm_cells import from_xlstm
from rnnzoo.convert.xlstm_cells import to_xlstm
