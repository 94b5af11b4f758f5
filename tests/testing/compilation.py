"""Options under which XLA compiles in least time.

Compile time is most of a test's time; speed of the result is of no interest.
"""

from importlib import metadata

OPTIONS: dict[str, int | bool] = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
}

# XLA's older emitters, which jax 0.10 still has, compile these programs four
# times faster than the new ones.
if tuple(map(int, metadata.version('jax').split('.')[:2])) < (0, 11):
  OPTIONS['xla_cpu_use_fusion_emitters'] = False

# The options of users, for tests that compare the bits of two programs.
USUAL = {
    name: 3 if name == 'xla_backend_optimization_level' else not value
    for name, value in OPTIONS.items()
}

# `OPTIONS` for the environment.
XLA_FLAGS = ' '.join(
    f'--{name}={str(value).lower()}' for name, value in OPTIONS.items()
)
