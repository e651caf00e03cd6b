"""The first answer of the dashboard: which of the runs that did the same work was fastest. Imports no Streamlit."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsgpt.reports.comparison import speed_up
from dsgpt.reports.equal_work import judge
from dsgpt.reports.runs import Run


@dataclass(frozen=True)
class Answer:
    """Finished runs that did the same work."""

    fastest: Run
    baseline: Run
    """The run on the fewest devices; of several, the slowest."""
    runs: tuple[Run, ...]
    """All of them, the fastest first."""

    @property
    def speed_up(self) -> float | None:
        """Of the fastest, over the baseline."""
        return speed_up(self.baseline, self.fastest)

    @property
    def cheapest(self) -> Run | None:
        """The run with the least device time; None if it is unknown for all."""
        known = [run for run in self.runs if device_seconds(run) is not None]
        return min(known, key=lambda run: device_seconds(run) or 0.0, default=None)


def answers(runs: Sequence[Run]) -> list[Answer]:
    """An answer for each work that at least two finished runs did, in the order of the first run of each."""
    groups: list[list[Run]] = []
    for run in runs:
        if not run.train_time or run.status not in {None, "completed"}:
            continue
        own = next((group for group in groups if judge([group[0], run]).answer == "yes"), None)
        if own is None:
            groups.append([run])
        else:
            own.append(run)
    return [_answer(group) for group in groups if len(group) > 1]


def newest(found: Sequence[Answer]) -> Answer:
    """The answer with the run that began last."""
    return max(found, key=lambda each: max(run.date or "" for run in each.runs))


def _answer(group: Sequence[Run]) -> Answer:
    ordered = sorted(group, key=lambda run: run.train_time or 0.0)
    baseline = min(ordered, key=lambda run: (run.device_count or float("inf"), -(run.train_time or 0.0)))
    return Answer(ordered[0], baseline, tuple(ordered))


def device_seconds(run: Run) -> float | None:
    """The training time of all devices, in seconds."""
    return None if run.train_time is None or run.device_count is None else run.train_time * run.device_count


def cost(run: Run, price: float | None) -> float | None:
    """Of the training time of all devices, at ``price`` for a device hour."""
    seconds = device_seconds(run)
    return None if seconds is None or price is None else seconds / 3600 * price
