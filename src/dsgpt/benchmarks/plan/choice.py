"""Which setup the planner would choose among cells of the same work, beside the one that was the fastest."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsgpt.benchmarks.harness.pages import table

Result = Mapping[str, Any]
LEAST = 3
"""Cells that make a choice."""
MOST_SLOWER = 0.05
"""Goal: the chosen setup is at most this much slower than the fastest."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cells of one work."""

    work: str
    cells: int
    chosen: Result
    """With the shortest predicted step."""
    fastest: Result
    """With the shortest measured step."""

    @property
    def slower(self) -> float:
        """The share by which the chosen setup took longer than the fastest."""
        share: float = _seconds(self.chosen, "measured") / _seconds(self.fastest, "measured") - 1
        return share


def choices(measured: Sequence[Result]) -> Iterator[Choice]:
    """A choice for all cells that train the same model with the same global batch."""
    by_work = defaultdict(list)
    for result in measured:
        times = result["step_seconds"]
        if times["measured"] is not None and times["predicted"] is not None:
            by_work[_work(result)].append(result)
    for work, results in by_work.items():
        if len(results) >= LEAST:
            yield Choice(
                work=work,
                cells=len(results),
                chosen=min(results, key=lambda result: _seconds(result, "predicted")),
                fastest=min(results, key=lambda result: _seconds(result, "measured")),
            )


def choice_table(measured: Sequence[Result]) -> str:
    """The choices as a table; empty if there is none."""
    rows = [
        [
            choice.work,
            str(choice.cells),
            f"{_short(choice.chosen)}: {_seconds(choice.chosen, 'measured'):.3f} s",
            f"{_short(choice.fastest)}: {_seconds(choice.fastest, 'measured'):.3f} s",
            f"{choice.slower:.1%}" if choice.slower <= MOST_SLOWER else f"**{choice.slower:.1%}**",
        ]
        for choice in choices(measured)
    ]
    if not rows:
        return ""
    head = (
        "Cells that do the same work: the one with the shortest predicted step, and the one with the shortest measured "
        f"step. Both times are measured. Goal: at most {MOST_SLOWER:.0%} slower.\n\n"
    )
    return head + table(["work", "setups", "predicted to be the fastest", "the fastest", "slower by"], rows)


def _work(result: Result) -> str:
    work = result["work"]
    words = [work["model"]["name"], work["precision"], f"{work['global_batch_size']} sequences of {work['seq_length']}"]
    return ", ".join(words + ["checkpointing"] * work["activation_checkpointing"])


def _short(result: Result) -> str:
    name: str = result["title"].partition(",")[0]
    return name


def _seconds(result: Result, name: str) -> float:
    seconds: float = result["step_seconds"][name]
    return seconds
