"""Pieces of SVG text. Every text is escaped; every shape has a title that browsers show and screen readers read."""

from collections.abc import Iterable
from html import escape

from dsgpt.reports.themes import Theme, contrast

FONT = "'Source Sans', 'Source Sans Pro', system-ui, sans-serif"
_LETTER = 0.52
"""Width of a letter, in units of its size."""


def picture(body: Iterable[str], *, width: float, height: float, label: str, theme: Theme) -> str:
    """An SVG picture on the theme's background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="background:{theme.background};display:block" '
        f'font-family="{FONT}" font-size="13" fill="{theme.ink}"><title>{escape(label)}</title>'
        f"{''.join(body)}</svg>"
    )


def rectangle(
    x: float, y: float, width: float, height: float, *, fill: str, title: str, edge: str = "none", dashed: bool = False
) -> str:
    """A box; with ``dashed``, its edge is."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" rx="2" '
        f'fill="{fill}" stroke="{edge}"{dashes}><title>{escape(title)}</title></rect>'
    )


def text(x: float, y: float, words: str, *, fill: str = "", anchor: str = "start", size: float = 13) -> str:
    """Words whose baseline is at ``y``."""
    colour = f' fill="{fill}"' if fill else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" font-size="{size:g}"{colour} '
        f'pointer-events="none">{escape(words)}</text>'
    )


def fits(words: str, width: float, *, size: float = 13) -> bool:
    """Whether ``words`` are narrower than ``width``."""
    return len(words) * _LETTER * size <= width


def ink_on(fill: str, theme: Theme) -> str:
    """The colour of text that is easiest to read on ``fill``."""
    return max((theme.ink, theme.background), key=lambda colour: contrast(colour, fill))
