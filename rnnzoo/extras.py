"""Says which extra to install for a part that needs more packages."""

from collections.abc import Sequence
import importlib.util


def require(part: str, extra: str, packages: Sequence[str]) -> None:
  """Raises ModuleNotFoundError unless packages of an extra are installed.

  Args:
    part: of the library, as 'rnnzoo.training'.
    extra: of pyproject.toml, which has the packages.
    packages: their names as they are imported.
  """
  missing = [name for name in packages if not importlib.util.find_spec(name)]
  if missing:
    raise ModuleNotFoundError(
        f"{part} needs {', '.join(missing)}: pip install 'rnnzoo[{extra}]'",
        name=missing[0],
    )
