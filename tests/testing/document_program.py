"""Runs the examples of docs/devices.md on the devices that are there."""

import re

from tests.testing import several_devices


def main() -> None:
  text = (several_devices.ROOT / 'docs' / 'devices.md').read_text('utf-8')
  count = 0
  for block in re.findall('```python\n(.*?)```', text, re.DOTALL):
    if block.startswith('import jax'):
      exec(block, {})
      count += 1
  print(f'{count} examples ran')


if __name__ == '__main__':
  main()
