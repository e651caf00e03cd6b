"""Which charts are drawn, and in which colours. Loads no matplotlib."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from dsgpt.common.errors import Problems, did_you_mean

# The colours of the pictures: for light and for dark pages, and for the colour-blind.

RGB = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a picture, as ``#rrggbb``."""

    name: str
    background: str
    ink: str
    """Of text."""
    quiet: str
    """Of captions and remarks."""
    grid: str
    edge: str
    """Of axes."""
    warning: str
    """Behind warnings."""
    light_hatch: str
    """Of the hatches on dark bars; on light bars they are ``dark_hatch``."""
    dark_hatch: str
    palette: tuple[str, ...]
    """Of runs, in an order that alternates dark and light. All differ in brightness or from blue to orange, which the
    common kinds of colour blindness keep apart."""


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#222222",
    quiet="#666666",
    grid="#e6e6e6",
    edge="#bbbbbb",
    warning="#fff1d6",
    light_hatch="#ffffff",
    dark_hatch="#222222",
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
    light_hatch="#0d1117",
    dark_hatch="#0d1117",
    palette=("#3f9bdc", "#eba225", "#1fb58a", "#d992cb", "#f0743a", "#a7aeb8", "#8fd0f7", "#c48a5c"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
"""By name; the background of the dark one is that of GitHub's dark pages."""
_CURRENT: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


def current() -> Theme:
    """The theme of the picture that is being drawn."""
    return _CURRENT.get()


@contextmanager
def drawn_in(theme: Theme) -> Iterator[None]:
    """A context in which ``current()`` is ``theme``."""
    token = _CURRENT.set(theme)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def rgb(colour: str) -> RGB:
    """Red, green and blue of ``#rrggbb``, each from 0 to 1."""
    return int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2, "contrast ratio")."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb(colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# Which charts are drawn, and how they look. Loads no matplotlib, so that mistakes are reported fast.

RUN_CHARTS = (
    "training_time",
    "throughput",
    "inference_latency",
    "inference_throughput",
    "peak_memory",
    "loss_vs_step",
    "loss_vs_time",
    "loss_vs_tokens",
    "loss_vs_money",
    "memory",
    "communication",
    "step_times",
    "latency_vs_throughput",
    "utilisation",
    "overview",
)
SWEEP_CHARTS = ("throughput", "scaling", "efficiency", "memory", "communication", "step_times", "money")
"""Their files begin with the name of the sweep and ``_``."""
PLAN_CHART = "plan_memory"
"""Of the record of ``benchmark.py plan``."""
INFERENCE_CHART = "latency_by_concurrency"
"""Of the record of ``benchmark.py inference``."""
FORMATS = ("png", "svg")
BOTH = "both"
T = TypeVar("T")


@dataclass(frozen=True)
class Style:
    """The pictures that were asked for."""

    formats: tuple[str, ...] = FORMATS
    themes: tuple[Theme, ...] = (LIGHT,)
    only: tuple[str, ...] | None = None
    """Names of charts; None for all."""

    def chosen(self, charts: Mapping[str, T]) -> dict[str, T]:
        """The charts that were asked for, of those that there are."""
        return {name: chart for name, chart in charts.items() if self.only is None or name in self.only}

    def missing(self, charts: Mapping[str, T]) -> dict[str, str]:
        """The charts that were asked for and cannot be there, and why."""
        whys = dict.fromkeys(RUN_CHARTS, "no run was given")
        whys |= {PLAN_CHART: "no --plan was given", INFERENCE_CHART: "no --inference was given"}
        gone = [name for name in self.only or () if name not in charts]
        return {name: whys.get(name, "no sweep of this name was given") for name in gone}


def themes_of(name: str) -> tuple[Theme, ...]:
    """The theme of that name, or all for ``BOTH``."""
    return tuple(theme for each, theme in THEMES.items() if name in {each, BOTH})


def read_only(text: str | None, problems: Problems) -> tuple[str, ...] | None:
    """The names of charts in ``text``, separated by commas; None for all. Names of no chart go to ``problems``."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    problems.add(*_unknown(names))
    if not names:
        problems.add("--only names no chart")
    return names


def _unknown(names: tuple[str, ...]) -> Iterator[str]:
    alone = (*RUN_CHARTS, PLAN_CHART, INFERENCE_CHART)
    for name in names:
        if name not in alone and not any(name.endswith(f"_{chart}") for chart in SWEEP_CHARTS):
            known = f"{', '.join(alone)}, and of a sweep NAME_{', NAME_'.join(SWEEP_CHARTS)}"
            yield f"--only {name}: is not a chart{did_you_mean(name, RUN_CHARTS)}; known are {known}"
