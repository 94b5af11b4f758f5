"""Truncated backpropagation: one long sequence, learned a chunk at a time.

    python examples/truncated_backprop.py
    python examples/truncated_backprop.py --layer=LSTM --chunk=50 --delay=15

The sequence is a stream of random bits, and the answer to each step is the bit
of `delay` steps before. The stream is too long to be differentiated whole. So
each update takes the next chunk, starts from the carry that the chunk before
left, and differentiates through the steps of this chunk alone:

  carry, y = layer.unroll(x, initial_carry=carry)   inside of the loss
  jax.value_and_grad(loss, has_aux=True)            with respect to parameters

The carry comes in as a number, with no past to differentiate, so memory does
not grow with the stream. It still brings what earlier chunks saw: the first
answers of a chunk are bits of the one before. The parameters change between two
chunks, so a carry is always slightly older than the parameters that use it.

Needs optax: pip install -e '.[train]'.
"""

import dataclasses
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import optax

import rnnzoo

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes; the defaults learn a delay of 5 steps."""

  layer: str = 'GRU'
  features: int = 32
  batch: int = 32
  delay: int = 5
  chunk: int = 25
  num_chunks: int = 800
  learning_rate: float = 5e-3
  seed: int = 0


class Echo(nnx.Module):
  """A recurrent layer, and a logit for the bit to name.

  Attributes:
    layer: the recurrent layer.
    head: from its output to the logit.
  """

  def __init__(self, config: Config, rngs: nnx.Rngs):
    layer: Any = rnnzoo.LAYERS[config.layer]
    self.layer = layer(1, config.features, rngs=rngs)
    self.head = nnx.Linear(config.features, 1, rngs=rngs)

  def unroll(self, carry: Any, x: Array) -> tuple[Any, Array]:
    """Returns the last carry, and logits [batch, chunk] of x [batch, chunk]."""
    carry, y = self.layer.unroll(x[..., None], initial_carry=carry)
    return carry, self.head(y)[..., 0]


def stream(config: Config) -> tuple[Array, Array]:
  """Returns bits as -1 and 1, and the answers, each [chunks, batch, chunk].

  The first `delay` answers are 0: there is no bit to name, and none is right.
  """
  steps = config.num_chunks * config.chunk
  key = jax.random.key(config.seed)
  x = jax.random.rademacher(key, (config.batch, steps), float)
  answers = jnp.pad(x, ((0, 0), (config.delay, 0)))[:, :steps]

  def chunks(a):
    parts = a.reshape(config.batch, config.num_chunks, config.chunk)
    return jnp.swapaxes(parts, 0, 1)

  return chunks(x), chunks(answers)


def chunk_loss(
    model: Echo, carry: Any, x: Array, answers: Array
) -> tuple[Array, tuple[Any, Array]]:
  """Returns the mean loss of a chunk, its last carry and the accuracy."""
  carry, logits = model.unroll(carry, x)
  loss = optax.sigmoid_binary_cross_entropy(logits, (answers > 0).astype(float))
  right = jnp.sign(logits) == answers
  return loss.mean(), (carry, right.mean())


def train(config: Config) -> tuple[Echo, Array]:
  """Learns from the stream, once.

  Args:
    config: sizes.

  Returns:
    The model, and the accuracy in each chunk before its update, [chunks].
  """
  model = Echo(config, nnx.Rngs(config.seed))
  graphdef, params = nnx.split(model)
  optimizer = optax.adam(config.learning_rate)

  def update(state, chunk):
    params, moments, carry = state

    def loss(params):
      return chunk_loss(nnx.merge(graphdef, params), carry, *chunk)

    gradient, (carry, accuracy) = jax.grad(loss, has_aux=True)(params)
    step, moments = optimizer.update(gradient, moments, params)
    return (optax.apply_updates(params, step), moments, carry), accuracy

  state = (
      params,
      optimizer.init(params),
      model.layer.initial_carry((config.batch,)),
  )
  run = jax.jit(lambda state, chunks: jax.lax.scan(update, state, chunks))
  state, accuracies = run(state, stream(config))
  nnx.update(model, state[0])
  return model, accuracies


def main(argv: list[str]) -> None:
  """Trains by the flags and says how well."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  fields = [field.name for field in dataclasses.fields(Config)]
  values: dict[str, Any] = {n: flags.FLAGS[n].value for n in fields}
  config = Config(**values)
  _, accuracies = train(config)
  tenth = max(len(accuracies) // 10, 1)
  print(
      f'{config.num_chunks} chunks of {config.chunk} steps: the first tenth is'
      f' {accuracies[:tenth].mean():.3f} right, the last one'
      f' {accuracies[-tenth:].mean():.3f}.'
  )


def define_flags() -> None:
  """Defines a flag for each field of `Config`."""
  for field in dataclasses.fields(Config):
    kinds: dict[Any, Any] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
    }
    define = kinds[type(field.default)]
    define(field.name, field.default, f'Config.{field.name}.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
