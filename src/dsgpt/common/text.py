"""Words that consoles, tables and pages share: figures with units, the machine, tables, the next command."""

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# What tables and pages say about measured figures: whether two differ, on which machine, and whether it was busy.

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
"""Beginning of the paragraph of a page that reports a busy machine."""


def busy_words(figures: Mapping[str, Any]) -> str:
    """Words that report other processes on the CPUs during a measurement; empty if there were none, or none recorded.

    Args:
        figures: with the keys of ``telemetry.monitor.LoadOfOthers.figures``.
    """
    share = figures.get("cpu_share_of_others")
    if not isinstance(share, float) or share < BUSY_FROM:
        return ""
    return f"other processes used {share:.0%} of the CPUs during this measurement"


def machine_words(hardware: Mapping[str, Any]) -> str:
    """The machine of a record's ``hardware`` block, with the instruction sets of its CPU."""
    machine = hardware_words(*(hardware.get(key) for key in ("gpu_name", "cpu_name", "cpu_count"))) or "not recorded"
    return f"{machine} ({instruction_words(hardware.get('instruction_sets'))})"


def hardware_words(gpu: object, cpu: object, cores: object) -> str:
    """``A100; EPYC 7763, 64 cores``, without what is unknown; the record of a sweep may hold anything there."""
    processor = f"{cpu or 'CPU'}{f', {cores} cores' if cores else ''}" if cpu or cores else None
    return "; ".join(map(str, filter(None, [gpu, processor])))


def instruction_words(sets: object) -> str:
    """``AVX2, AVX512``; older records have none."""
    return f"instruction sets: {sets or 'not recorded'}"


# Words of command lines, and the last line of a long command: the command to run next, as it can be pasted into the
# shell that ran this one.

DEVICES = ("auto", "cpu", "cuda")
"""Values of ``--device``."""
_PACKAGE = Path(__file__).resolve().parents[1]
IN_CHECKOUT = (_PACKAGE.parents[1] / "ds_configs").is_dir()
REPOSITORY = _PACKAGE.parents[1] if IN_CHECKOUT else _PACKAGE / "checkout"
"""The checkout; of an installed package the folder that has its scripts and recipes in the same places."""


def script_words(script: str, *words: object) -> list[str]:
    """The words that run ``script``, a path in the repository, with this interpreter from the current folder."""
    return [sys.executable, str(REPOSITORY / script), *map(str, words)]


def next_line(words: Sequence[object]) -> str:
    """``next: .venv/bin/python src/generate.py --checkpoint checkpoint/run``, quoted for a shell.

    Absolute paths below the current folder are written from there. None is resolved: the interpreter of an environment
    is a link.
    """
    here = Path.cwd()
    paths = [Path(str(word)) for word in words]
    inside = [path.is_absolute() and path.is_relative_to(here) for path in paths]
    short = [path.relative_to(here) if below else word for path, below, word in zip(paths, inside, words, strict=True)]
    return f"next: {shlex.join(map(str, short))}"


# Counts, durations, sizes, money, and tables in Markdown.

UNKNOWN = "unknown"


def duration(seconds: float | None, *, exact: bool = False) -> str:
    """A measured duration: ``3 min 05 s``, ``2 h 07 min`` or ``3 d 04 h``; shorter ones are ``0.4 s`` and ``42 s``.

    With ``exact``, those below 100 s have three digits: ``85 ms``, ``1.24 s``, ``75.7 s``.
    """
    if seconds is None:
        return UNKNOWN
    if exact and seconds < 99.95:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, unit, part in (("d", "h", 86_400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= unit:
            return f"{whole // unit} {large} {whole % unit // part:02d} {small}"
    return f"{whole} s"


def estimate(seconds: float) -> str:
    """A predicted duration: ``1.3 ms``, ``2.4 s``, ``5.0 min``, ``7.1 h``, ``3.2 days``."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds / 86_400:,.1f} days"


def byte_size(count: float | None, *, form: str = ".3g") -> str:
    """Bytes as ``3.4 GB``, in a ``form`` of numbers: decimal units, as on the datasheets of GPUs."""
    if count is None:
        return UNKNOWN
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= unit:
            return f"{count / unit:{form}} {name}" if count < 999.5 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


def dollars(amount: float | None) -> str:
    """``$17.69``; ``$1,235`` without cents from 100 on; ``$0.0123`` with three digits below ten cents."""
    if amount is None:
        return UNKNOWN
    if amount and amount < 0.1:
        return f"${amount:.3g}"
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def counted(number: float, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,.0f} {noun}{'s' * (number != 1)}"


def megabytes(size: float) -> str:
    """Bytes in MB (10^6 bytes), for a column: ``1,234.5``."""
    return f"{size / 1e6:,.1f}"


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"* {line}" for line in lines)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """``header`` and ``rows`` in Markdown; None is an empty field."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join('' if value is None else str(value) for value in line)} |" for line in lines)


# Divisors and multiples next to a number, for messages that name the nearest valid values.


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key; keys and values in their order."""
    groups: dict[K, list[V]] = {}
    for key, each in pairs:
        groups.setdefault(key, []).append(each)
    return groups


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, at least 1, in ascending order; takes milliseconds up to 2**31."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is not above ``at_most``, which is at least 1."""
    return max(d for d in divisors(number) if d <= at_most)


def divisors_around(number: int, wanted: int) -> str:
    """The nearest divisors of ``number`` below and above ``wanted``, in words: ``2 or 4``."""
    all_of_them = divisors(number)
    return in_words([d for d in all_of_them if d < wanted][-1:] + [d for d in all_of_them if d > wanted][:1])


def multiples_around(number: int, unit: int) -> str:
    """The nearest multiples of ``unit`` below (unless it is 0) and above ``number``, in words: ``6 or 9``."""
    below = number // unit * unit
    return in_words([below, below + unit] if below else [unit])


def in_words(numbers: Iterable[object]) -> str:
    """The numbers, or words, joined by "or": ``2 or 4``."""
    return " or ".join(map(str, numbers))
