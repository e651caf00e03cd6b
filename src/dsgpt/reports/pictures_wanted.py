"""Which charts are drawn, and how they look. Loads no matplotlib, so that mistakes are reported fast."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dsgpt.common.problems import Problems, did_you_mean
from dsgpt.reports.themes import LIGHT, THEMES, Theme

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
