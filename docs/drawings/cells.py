"""Draws one step of every cell: docs/figures/cell_<name>.svg.

  python docs/drawings/cells.py

A cell is described by its nodes, one a line: name, row, label, and the nodes
that go in. A node stands to the right of all that go in. Its kind is read off
its label: the memory has no input, and a label with an R, a U or an A is a
product with a recurrent matrix, but for the forget gate in the sLSTM's l.
"""

import pathlib
import re

import svg

FIGURES = pathlib.Path(__file__).resolve().parent.parent / 'figures'

CELLS = {
    'Elman': """
        h  0  h
        s  0  tanh(x + R h)      h
        h' 0  h'                 s
    """,
    'LSTM': """
        c  0  c
        h  3  h
        f  1  f = σ(x + R h)     h
        i  2  i = σ(x + R h)     h
        g  3  g = tanh(x + R h)  h
        o  4  o = σ(x + R h)     h
        fc 0  ×                  c f
        ig 2  ×                  i g
        s  0  +                  fc ig
        t  2  tanh               s
        ho 4  ×                  t o
        c' 0  c'                 s
        h' 4  h'                 ho
    """,
    'GRU': """
        r  0  r = σ(x + R h)     h
        p  1  R h + b            h
        z  2  z = σ(x + R h)     h
        h  3  h
        rp 0  ×                  r p
        n  0  n = tanh(x + ·)    rp
        m  3  (1 - z) n + z h    n z h
        h' 3  h'                 m
    """,
    'SLSTM': """
        n  0  n
        c  1  c
        m  2  m
        h  4  h
        l  2  l = log σ(f) + m   m h
        m1 2  max(i, l)          l i
        i  3  i = x + R h        h
        z  4  tanh(x + R h)      h
        o  5  o = σ(x + R h)     h
        k  3  exp(l - m'), exp(i - m')  l m1 i
        n1 0  max(f' n + i', 1)  n k
        c1 1  f' c + i' z        c k z
        q  4  c' / n'            n1 c1
        ho 5  ×                  q o
        n' 0  n'                 n1
        c' 1  c'                 c1
        m' 2  m'                 m1
        h' 5  h'                 ho
    """,
    'AGRU': """
        r  0  r = σ(x + U h)     h
        h  2  h
        z  3  z = σ(x + U h)     h
        rh 1  ×                  r h
        d  1  d = tanh(x + A ·)  rh
        e  3  ε z d              d z
        s  2  +                  h e
        h' 2  h'                 s
    """,
    'AntisymmetricRNN': """
        h  0  h
        t  1  tanh(x + A h)      h
        e  1  × ε                t
        s  0  +                  h e
        h' 0  h'                 s
    """,
    'IndRNN': """
        h  0  h
        u  0  × u                h
        s  0  relu(x + ·)        u
        h' 0  h'                 s
    """,
    'IRevRNN': """
        c  0  c
        h  1  h
        w  1  × w                h
        a  0  + a tanh(·)        c w
        b  1  + b tanh(·)        w a
        s  1  relu(x + ·)        b
        c' 0  c'                 a
        h' 1  h'                 s
    """,
    'MinGRU': """
        h  0  h
        x  1  x
        z  1  z = σ(x)           x
        g  2  g(x)               x
        m  0  (1 - z) h + z g    h z g
        h' 0  h'                 m
    """,
    'MinLSTM': """
        h  0  h
        x  2  x
        f  1  σ(x)               x
        i  2  σ(x)               x
        g  3  g(x)               x
        n  1  f', i' = f, i / (f + i)  f i
        m  0  f' h + i' g        h n g
        h' 0  h'                 m
    """,
    'LRU': """
        h  0  h
        x  1  x
        b  1  exp(γ) B x         x
        m  0  λ h + ·            h b
        y  1  Re(C h') + D x     m x
        h' 0  h'                 m
    """,
    'S5': """
        h  0  h
        x  1  x
        b  1  (exp(λ Δ) - 1) / λ B x  x
        m  0  exp(λ Δ) h + ·     h b
        y  1  2 Re(C h') + D x   m x
        h' 0  h'                 m
    """,
    'LinOSS': """
        z  0  z
        y  1  y
        x  2  x
        b  2  Δ B x              x
        m  0  z - Δ A y' + ·     z n b
        n  1  y + Δ z'           y z b
        z' 0  z'                 m
        y' 1  y'                 n
    """,
    'RGLRU': """
        h  0  h
        x  2  x
        r  1  r = σ(x)           x
        i  2  i = σ(x)           x
        a  1  a = exp(-8 s r)    r
        m  0  a h + √(1 - a²) i x  h a i
        h' 0  h'                 m
    """,
    'HGRN': """
        h  0  h
        x  2  x
        f  1  λ = γ + (1 - γ) σ(x)  x
        i  2  silu(x)            x
        g  3  g = silu(x)        x
        m  0  λ h + (1 - λ) ·    h f i
        y  2  W (norm(h') × g)   m g
        h' 0  h'                 m
    """,
    'QRNN': """
        h  0  h
        x  2  x
        z  1  z = tanh(x)        x
        f  2  f = σ(x)           x
        o  3  o = σ(x)           x
        m  0  f h + (1 - f) z    h z f
        y  2  o × h'             m o
        h' 0  h'                 m
    """,
    'CfC': """
        h  1  h
        f  0  f = tanh(x + R h)  h
        a  1  a = x + R h        h
        b  2  b = x + R h        h
        g  3  g = tanh(x + R h)  h
        t  2  t = σ(a ts + b)    a b
        m  1  (1 - t) f + t g    f t g
        h' 1  h'                 m
    """,
}

# In each inner step of the iRevRNN; in the sLSTM the forget gate, too.
NOTES = {
    'IRevRNN': 'a and b: once for each of the inner steps',
    'SLSTM': "f = x + R h in l; i', f' are the two exponentials",
    'AGRU': 'A = W - Wᵀ - γ I',
    'AntisymmetricRNN': 'A = W - Wᵀ - γ I',
    'IndRNN': 'u: one number for each unit',
    'LRU': 'h and B x are complex',
    'S5': 'h, λ and B x are complex',
    'LinOSS': 'both equations are solved for z and y after the step',
    'RGLRU': 's = softplus(Λ); in a step that starts, 1 for the root',
    'CfC': 'ts: time since the last step',
}
_ROW, _GAP, _MARGIN = 46, 34, 14


def nodes(description: str) -> dict[str, tuple[int, str, list[str]]]:
  """Returns row, label and inputs of each node, by name."""
  found = {}
  for line in description.strip().split('\n'):
    name, row, label, inputs = re.fullmatch(
        r'\s*(\S+)\s+(\d+)\s+(.*?)(?:\s{2,}(.*))?', line
    ).groups()
    found[name] = int(row), label, (inputs or '').split()
  return found


def column(name: str, graph) -> int:
  """Returns how many nodes lie before one."""
  return max((1 + column(k, graph) for k in graph[name][2]), default=0)


def fill(name: str, label: str, inputs) -> str:
  """Returns a node's colour."""
  if name == 'x':
    return svg.MEMORY
  if not inputs or name == label:
    return svg.CARRY
  if 'σ(f)' in label:
    return svg.PRODUCT
  return svg.PRODUCT if re.search(r'\b[RUA] [h·]', label) else svg.PLAIN


def draw(cell: str) -> str:
  """Returns the drawing of a cell."""
  graph = nodes(CELLS[cell])
  places = {name: column(name, graph) for name in graph}
  last = max(places.values())
  places |= {
      name: last for name in graph if graph[name][1] == name and graph[name][2]
  }
  width_of = lambda label: max(30, 7.3 * len(label) + 14)
  widths = [
      max(width_of(graph[name][1]) for name in graph if places[name] == k)
      for k in range(last + 1)
  ]
  left = [_MARGIN + sum(widths[:k]) + _GAP * k for k in range(last + 1)]
  rows = 1 + max(row for row, _, _ in graph.values())
  note = NOTES.get(cell, '')
  drawing = svg.Drawing(
      round(left[-1] + widths[-1] + _MARGIN),
      round(2 * _MARGIN + _ROW * rows + (16 if note else 0)),
  )
  middle = lambda name: _MARGIN + _ROW * (graph[name][0] + 0.5)
  for name, (_, _, inputs) in graph.items():
    for source in inputs:
      k = places[source]
      own = width_of(graph[source][1])
      start = left[k] + widths[k] / 2 + own / 2, middle(source)
      k = places[name]
      own = width_of(graph[name][1])
      drawing.arrow(
          start, (left[k] + widths[k] / 2 - own / 2, middle(name)), curved=True
      )
  for name, (_, label, inputs) in graph.items():
    k = places[name]
    own = width_of(label)
    x = left[k] + widths[k] / 2 - own / 2
    colour = fill(name, label, inputs)
    radius = 12 if colour == svg.CARRY else 4
    drawing.box(x, middle(name) - 14, own, 28, label, colour, radius)
  drawing.text(_MARGIN, drawing.size[1] - 8, note, 11, 'start')
  return drawing.render()


def main() -> None:
  """Writes all drawings."""
  FIGURES.mkdir(exist_ok=True)
  for cell in CELLS:
    path = FIGURES / f'cell_{cell}.svg'
    path.write_text(draw(cell), encoding='utf-8')


if __name__ == '__main__':
  main()
