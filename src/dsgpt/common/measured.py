"""What tables and pages say about measured figures: whether two differ, on which machine, and whether it was busy."""

from collections.abc import Mapping
from typing import Any

NO_DIFFERENCE = "no difference"
BUSY_FROM = 0.1
"""Share of the CPUs that others use, from which the figures are said to be disturbed."""


def no_difference(smallest: float, largest: float, *, than: tuple[float, float] = (1.0, 1.0)) -> bool:
    """Whether the ranges of two figures overlap, so that tables say ``NO_DIFFERENCE`` in place of better or worse.

    A figure that was measured once has no range and is not judged: the caller does not ask.

    Args:
        smallest: of the repetitions, or the lower end of an interval.
        largest: the other end.
        than: the range that it is compared with; for ratios of pairs, 1.
    """
    return smallest <= than[1] and than[0] <= largest


BUSY = "**A busy machine: "
"""How the paragraph of a page begins that says so."""


def busy_words(figures: Mapping[str, Any]) -> str:
    """That others used the CPUs during a measurement; empty if they did not, or if it was not recorded.

    Args:
        figures: with the keys of ``runtime.load.LoadOfOthers.figures``.
    """
    share = figures.get("cpu_share_of_others")
    if not isinstance(share, float) or share < BUSY_FROM:
        return ""
    return f"other processes used {share:.0%} of the CPUs during this measurement"


def machine_words(hardware: Mapping[str, Any]) -> str:
    """The machine of a record's ``hardware`` block, with the instruction sets of its CPU."""
    gpu, cpu, cores = (hardware.get(key) for key in ("gpu_name", "cpu_name", "cpu_count"))
    parts = [gpu, f"{cpu or 'CPU'}{f', {cores} cores' if cores else ''}" if cpu or cores else None]
    machine = "; ".join(str(part) for part in parts if part) or "not recorded"
    return f"{machine} ({instruction_words(hardware.get('instruction_sets'))})"


def instruction_words(sets: object) -> str:
    """``AVX2, AVX512``; older records have none."""
    return f"instruction sets: {sets or 'not recorded'}"
