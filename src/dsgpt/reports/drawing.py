"""From charts to files: every theme and format of each, and why others are not drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dsgpt.reports.style import FORMATS, Frame, quiet_style
from dsgpt.reports.themes import LIGHT, Theme

Chart = Callable[[], Frame | str]
"""Draws a chart in the current theme, or says what the records lack for it."""


@dataclass(frozen=True)
class Drawn:
    """The files of some charts."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By file name."""
    absent: dict[str, str] = field(default_factory=dict)
    """By chart, why it was not drawn."""


def draw(
    charts: Mapping[str, Chart], *, themes: Sequence[Theme] = (LIGHT,), formats: Sequence[str] = ("png",)
) -> Drawn:
    """Draw all ``charts``; equal records give equal bytes on one machine.

    Args:
        charts: by name.
        themes: of the pictures.
        formats: keys of ``style.FORMATS``.
    """
    drawn = Drawn()
    for theme in themes:
        with quiet_style(theme):
            for name, chart in charts.items():
                picture = chart()
                if isinstance(picture, str):
                    drawn.absent[name] = picture
                    continue
                for form in formats:
                    drawn.files[file_name(name, theme, form)] = FORMATS[form](picture.figure)
    return drawn


def file_name(chart: str, theme: Theme, form: str) -> str:
    """``overview.png``; of the dark theme ``overview-dark.png``."""
    return f"{chart}{'' if theme is LIGHT else f'-{theme.name}'}.{form}"
