"""Draws how one step travels through the GPU: docs/figures/kernel_<name>.svg.

  python docs/drawings/kernels.py

The words are those of pallas_kernels/dense/__init__.py and
pallas_kernels/streaming/__init__.py.
"""

import pathlib

import svg

FIGURES = pathlib.Path(__file__).resolve().parent.parent / 'figures'


def cta() -> svg.Drawing:
  """Returns one CTA of a dense kernel that has all units of a head."""
  d = svg.Drawing(860, 330)
  d.box(10, 20, 130, 250, 'device memory', svg.GROUP, top=True)
  d.box(22, 60, 106, 60, ['x gates of all', 'steps'], svg.MEMORY)
  d.box(22, 190, 106, 60, ['outputs of all', 'steps'], svg.MEMORY)
  d.box(210, 20, 330, 250, 'shared memory of the CTA', svg.GROUP, top=True)
  for k, name in enumerate(('x[t]', 'x[t+1]', 'x[t+2]', '...')):
    d.box(225 + 76 * k, 62, 70, 34, name, svg.MEMORY)
  d.text(377, 114, 'ring buffer: inputs arrive steps ahead', 11)
  d.box(320, 124, 205, 32, 'operand: h[t]', svg.CARRY)
  d.box(320, 164, 205, 32, 'operand: h[t+1]', svg.CARRY)
  d.box(320, 222, 205, 32, 'staging: y[t], y[t-1]', svg.MEMORY)
  d.box(610, 20, 240, 250, 'registers of the threads', svg.GROUP, top=True)
  d.box(
      625,
      52,
      210,
      44,
      ['R, a part in each warp,', 'for the whole sequence'],
      svg.PRODUCT,
  )
  d.box(625, 108, 210, 34, 'R h[t], on tensor cores', svg.PRODUCT)
  d.box(625, 154, 210, 44, ['update: the cell in the', 'same registers'])
  d.box(625, 212, 210, 34, 'carry h, c, ... in float32', svg.CARRY)
  d.arrow((128, 80), (222, 80), 'copies', False)
  d.arrow((525, 140), (622, 126), 'fragments')
  d.arrow((622, 176), (528, 180), 'h[t+1]')
  d.arrow((622, 190), (528, 236), 'y[t]')
  d.arrow((318, 238), (131, 238), 'not waited for')
  d.text(
      430,
      295,
      'A step: multiply R h[t], gather the sums, update, h[t+1] into its slot,'
      ' one barrier. Then the next.',
  )
  d.text(
      430,
      315,
      'Copies of later inputs and of earlier outputs are under way all the'
      ' time.',
  )
  return d


def cluster() -> svg.Drawing:
  """Returns the CTAs of a cluster that share a head."""
  d = svg.Drawing(860, 310)
  for k in range(4):
    x = 15 + 212 * k
    d.box(x, 20, 195, 170, f'CTA {k}', svg.GROUP, top=True)
    d.box(
        x + 12,
        46,
        171,
        34,
        f'its rows of R: units of part {k}',
        svg.PRODUCT,
        size=11,
    )
    d.box(x + 12, 90, 171, 30, 'update: its part of h[t+1]', size=11)
    for part in range(4):
      fill = svg.CARRY if part != k else svg.PRODUCT
      d.box(x + 12 + 43 * part, 140, 41, 30, f'h {part}', fill, size=11)
    d.arrow((x + 60, 120), (x + 33 + 43 * k, 138))
  d.text(
      430,
      212,
      'each CTA holds the whole operand h[t+1], and stores its'
      ' part into the shared memory of its peers:',
      12,
  )
  for k in range(3):
    x = 15 + 212 * k
    d.arrow((x + 150, 242), (x + 270, 242), 'st.async', both=True)
  d.text(
      430,
      272,
      'A CTA waits on an mbarrier, which counts the bytes that'
      ' have arrived from its peers, and multiplies.',
  )
  d.text(
      430,
      290,
      'No h goes through device memory on its way. A cluster has'
      ' up to 16 CTAs.',
  )
  return d


def device() -> svg.Drawing:
  """Returns CTAs all over the device that share a head."""
  d = svg.Drawing(860, 330)
  for k, name in enumerate(('CTA 0', 'CTA 1', 'CTA 2', '... as many as fit')):
    x = 15 + 212 * k
    d.box(x, 20, 195, 96, name, svg.GROUP, top=True)
    d.box(x + 12, 44, 171, 28, 'its rows of R; update', svg.PRODUCT, size=11)
    d.box(x + 12, 78, 171, 28, 'operand: all of h[t]', svg.CARRY, size=11)
    d.arrow((x + 60, 116), (x + 60, 168), '')
    d.text(x + 52, 146, 'publish', 11, 'end')
    d.arrow((x + 130, 168), (x + 130, 116), '')
    d.text(x + 138, 146, 'poll', 11, 'start')
  d.box(
      15,
      170,
      831,
      78,
      'exchange: 8 slots in device memory, which stay in' ' the L2 cache',
      svg.GROUP,
      top=True,
  )
  slots = (
      'h[t-1]: retired',
      'h[t]: being read',
      'h[t+1]: being written',
      'sentinel',
      'sentinel',
      '...',
  )
  for k, name in enumerate(slots):
    fill = svg.CARRY if name.startswith('h') else svg.PLAIN
    d.box(25 + 137 * k, 198, 130, 34, name, fill, size=11)
  d.text(
      430,
      274,
      'A slot is full of the sentinel, a NaN that no computation'
      ' produces. A reader polls the data itself: an element that is',
  )
  d.text(
      430,
      292,
      'no sentinel has been written. So a hand-off is one trip'
      ' through the L2 cache, without a flag or a fence.',
  )
  d.text(
      430,
      310,
      'Once all have read h[t], which they show by publishing the'
      ' next step, its writer puts the sentinel back.',
  )
  return d


def streaming() -> svg.Drawing:
  """Returns blocks of steps on their way through a streaming kernel."""
  d = svg.Drawing(860, 330)
  d.text(430, 22, 'one tile: 128 features of one sequence, time to the right')
  for k in range(8):
    group = k % 4
    fill = (svg.CARRY, svg.PRODUCT, svg.MEMORY, svg.PLAIN)[group]
    d.box(30 + 102 * k, 34, 80, 32, f'block {k}', fill)
    d.text(70 + 102 * k, 82, f'warpgroup {group}', 11)
    if k < 7:
      d.arrow((110 + 102 * k, 50), (131 + 102 * k, 50))
  d.text(230, 102, 'wave 0', 11)
  d.text(630, 102, 'wave 1', 11)
  d.text(430, 120, 'arrows: h, handed from each block to the next', 11)
  d.box(20, 140, 820, 116, 'one warpgroup, at its block', svg.GROUP, top=True)
  steps = (
      (['device', 'memory'], svg.MEMORY),
      (['ring buffer in', 'shared memory'], svg.MEMORY),
      (['gates: a, b', 'a thread a feature'], svg.PLAIN),
      (['wait for h', 'of the block before'], svg.CARRY),
      (['h = a h + b,', 'step by step'], svg.PRODUCT),
      (['staging, then', 'device memory'], svg.MEMORY),
  )
  for k, (lines, fill) in enumerate(steps):
    d.box(34 + 134 * k, 176, 120, 54, lines, fill, size=11)
    if k:
      d.arrow((20 + 134 * k, 203), (33 + 134 * k, 203))
  d.text(101 + 134 * 0.55, 246, 'TMA', 11)
  d.text(94 + 134 * 5, 246, 'TMA', 11)
  d.text(
      430,
      280,
      'Loading, gates and storing of blocks overlap; only the scan'
      ' is passed on in order.',
  )
  d.text(
      430,
      298,
      'Few long sequences: several CTAs share one (segments). Each'
      ' tells the next the map h -> A h + B of its',
  )
  d.text(430, 316, 'blocks, while the next blocks arrive.')
  return d


DRAWINGS = {
    'cta': cta,
    'cluster': cluster,
    'device': device,
    'streaming': streaming,
}


def main() -> None:
  """Writes all drawings."""
  FIGURES.mkdir(exist_ok=True)
  for name, draw in DRAWINGS.items():
    path = FIGURES / f'kernel_{name}.svg'
    path.write_text(draw().render(), encoding='utf-8')


if __name__ == '__main__':
  main()
