"""Boxes, arrows and words as SVG text, the same bytes each time."""

from collections.abc import Sequence
import html

# Fills by meaning; legible on the light and the dark theme, since every drawing
# has a ground of its own.
PLAIN, CARRY, PRODUCT, MEMORY, GROUP = (
    '#ffffff',
    '#dbe9f9',
    '#fde2c4',
    '#e3f1dc',
    '#f4f4f4',
)
_FONT = 'font-family="DejaVu Sans, Arial, sans-serif"'


class Drawing:
  """A drawing in which things are put one after the other.

  Args:
    width: in pixels.
    height: likewise.
  """

  def __init__(self, width: int, height: int):
    self.size = width, height
    self.parts: list[str] = []

  def box(
      self,
      x: float,
      y: float,
      width: float,
      height: float,
      text: str | Sequence[str] = '',
      fill: str = PLAIN,
      radius: float = 4,
      size: int = 12,
      top: bool = False,
  ) -> None:
    """Draws a box with lines of text in its middle, or at its top."""
    self.parts.append(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        f' rx="{radius:g}" fill="{fill}" stroke="#444" stroke-width="1"/>'
    )
    lines = [text] if isinstance(text, str) else list(text)
    step = 1.3 * size
    first = y + height / 2 - (len(lines) - 1) * step / 2 + 0.35 * size
    if top:
      first = y + 1.3 * size
    for k, line in enumerate(lines):
      self.text(x + width / 2, first + k * step, line, size)

  def text(
      self, x: float, y: float, text: str, size: int = 12, anchor='middle'
  ) -> None:
    """Writes one line; y is that of its base."""
    if text:
      self.parts.append(
          f'<text x="{x:g}" y="{y:g}" font-size="{size}" {_FONT} fill="#111"'
          f' text-anchor="{anchor}">{html.escape(text)}</text>'
      )

  def arrow(
      self,
      start: tuple[float, float],
      end: tuple[float, float],
      text: str = '',
      curved: bool = False,
      dashed: bool = False,
      both: bool = False,
  ) -> None:
    """Draws an arrow, with a word above its middle."""
    (x0, y0), (x1, y1) = start, end
    path = f'M{x0:g} {y0:g} L{x1:g} {y1:g}'
    if curved:
      bend = 0.5 * (x1 - x0)
      path = (
          f'M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g}'
          f' {x1:g} {y1:g}'
      )
    style = ' stroke-dasharray="5 3"' if dashed else ''
    style += ' marker-start="url(#back)"' if both else ''
    self.parts.append(
        f'<path d="{path}" fill="none" stroke="#444" stroke-width="1.2"'
        f' marker-end="url(#head)"{style}/>'
    )
    self.text((x0 + x1) / 2, (y0 + y1) / 2 - 5, text, 11)

  def render(self) -> str:
    """Returns the file's text."""
    width, height = self.size
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0'
        f' {width} {height}" width="{width}" height="{height}">'
    )
    marker = (
        '<marker id="{}" viewBox="0 0 8 8" refX="{}" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="{}" fill="#444"/></marker>'
    )
    return '\n'.join(
        [
            head,
            '<defs>'
            + marker.format('head', 7, 'M0 0 L8 4 L0 8 z')
            + marker.format('back', 1, 'M8 0 L0 4 L8 8 z')
            + '</defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *self.parts,
            '</svg>\n',
        ]
    )
