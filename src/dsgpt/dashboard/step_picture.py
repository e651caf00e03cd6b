"""The picture of an optimizer step: time goes right, a group of lanes for each line of ``step_line``."""

from collections.abc import Iterator, Sequence

from dsgpt.dashboard.holding_picture import colour_of
from dsgpt.dashboard.step_line import Bar, Line
from dsgpt.dashboard.svg import fits, ink_on, picture, rectangle, text
from dsgpt.reports.themes import Theme

_LEFT, _TOP, _LANE, _THIN, _WIDE, _NAME = 118, 8, 30, 22, 812, 20
_LEAST_UNIT = 26
_NAMES = {
    "computes": "computes",
    "weights": "sends weights",
    "gradients": "sends gradients",
    "activations": "sends activations",
    "host": "device and host",
    "files": "host and files",
}


def step_svg(lines: Sequence[Line], theme: Theme) -> str:
    """The time line of every rank or stage."""
    end = max(bar.end for line in lines for bar in line.bars)
    unit = max(_LEAST_UNIT, (_WIDE - _LEFT - 10) / end)
    width, top = _LEFT + end * unit + 10, float(_TOP)
    body: list[str] = []
    for line in lines:
        body.append(text(4, top + 13, line.name, size=14))
        top += _NAME
        for lane in line.lanes:
            tall = _LANE if lane == "computes" else _THIN
            body.append(text(4, top + tall / 2 + 4, _NAMES[lane], fill=theme.quiet, size=12))
            body.append(_track(top + tall, width, theme))
            for bar in line.bars:
                if bar.lane == lane:
                    body += _bar(bar, top, tall - 3, unit=unit, theme=theme)
            top += tall
        top += 12
    label = "One optimizer step, in order from left to right; the table has the same operations"
    return picture(body, width=width, height=top, label=label, theme=theme)


def _track(y: float, width: float, theme: Theme) -> str:
    return f'<line x1="{_LEFT}" x2="{width - 10:.1f}" y1="{y - 1:.1f}" y2="{y - 1:.1f}" stroke="{theme.grid}"/>'


def _bar(bar: Bar, top: float, tall: float, *, unit: float, theme: Theme) -> Iterator[str]:
    left, width = _LEFT + bar.start * unit, (bar.end - bar.start) * unit - 2
    fill = _fill(bar, theme)
    yield rectangle(left, top, width, tall, fill=fill, title=bar.title)
    words = next((words for words in _shorter(bar.label) if fits(words, width - 4, size=11.5)), "")
    ink = ink_on(fill, theme)
    yield text(left + width / 2, top + tall / 2 + 4, words, anchor="middle", fill=ink, size=11.5)


def _fill(bar: Bar, theme: Theme) -> str:
    if bar.lane in {"host", "files"}:
        return theme.palette[7]
    if bar.lane != "computes":
        return colour_of(bar.lane, theme)
    if bar.label.startswith("forward"):
        return theme.palette[6]
    return theme.palette[5] if bar.label.startswith("backward") else theme.edge


def _shorter(label: str) -> Iterator[str]:
    """The label, and what is left of it where there is less room: operation and bytes, bytes, a number."""
    yield label
    words = label.split()
    if words[0] in {"forward", "backward"}:
        yield f"{words[0][0].upper()}{words[1]}"
        yield words[1]
    elif len(words) > 3:
        yield f"{words[0]} {words[-2]} {words[-1]}"
        yield f"{words[-2]} {words[-1]}"
