"""Runs the examples of docs/devices.md on the devices that are there."""

import re
import textwrap

from tests.testing import several_devices

# Lines that are indented by 4, and blank lines between such lines.
_BLOCK = re.compile(r'(?:^    .*\n(?:\n(?=    ))?)+', re.MULTILINE)


def main() -> None:
  text = (several_devices.ROOT / 'docs' / 'devices.md').read_text('utf-8')
  count = 0
  for block in map(textwrap.dedent, _BLOCK.findall(text)):
    if block.startswith('import jax'):
      exec(block, {})
      count += 1
  print(f'{count} examples ran')


if __name__ == '__main__':
  main()
