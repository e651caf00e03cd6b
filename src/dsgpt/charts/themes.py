"""The colours of pictures: for light and for dark pages, and for the colour-blind. Loads no matplotlib."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a picture, as ``#rrggbb``."""

    name: str
    background: str
    ink: str
    """Colour of text."""
    quiet: str
    """Colour of captions and remarks."""
    grid: str
    edge: str
    """Colour of axes."""
    warning: str
    """Colour behind warnings."""
    palette: tuple[str, ...]
    """Colours of runs, in an order that alternates dark and light. All differ in brightness or from blue to orange,
    which the common kinds of colour blindness keep apart."""


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#222222",
    quiet="#666666",
    grid="#e6e6e6",
    edge="#bbbbbb",
    warning="#fff1d6",
    palette=("#0173b2", "#de8f05", "#029e73", "#cc78bc", "#d55e00", "#6b6b6b", "#56b4e9", "#a5683a"),
)
DARK = Theme(
    name="dark",
    background="#0d1117",
    ink="#e6edf3",
    quiet="#9da7b3",
    grid="#272e38",
    edge="#59636e",
    warning="#4b3713",
    palette=("#3f9bdc", "#eba225", "#1fb58a", "#d992cb", "#f0743a", "#a7aeb8", "#8fd0f7", "#c48a5c"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
"""Themes by name; the background of the dark one is that of GitHub's dark pages."""


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio")."""
    luminances = []  # relative (WCAG 2.2)
    for colour in (one, other):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        luminances.append(sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)
