"""The processes that made a run, this one last: what the record says of each, and of all where they agree."""

from dataclasses import asdict, fields
from typing import Any

from dsgpt.checkpointing.run_state import RunState
from dsgpt.checkpointing.segment import Segment, covers, highest_peaks
from dsgpt.telemetry.meter import StepMeter, throughput

NEVER_CHANGES = frozenset({"precision"})
"""Of what a segment says, what no resume lets change (``fixed_facts``): known of segments that were not kept too."""


class Segments:
    """Collects what this process does, behind the segments that led to the checkpoint that it goes on from.

    Args:
        facts: of the record; empty on other ranks than the main one, which keep no segments.
        done: optimizer steps before this process.
    """

    def __init__(self, facts: dict[str, Any], *, done: int) -> None:
        self._facts = facts
        self._done = done
        self._earlier: list[Segment] = []
        self.all: list[Segment] = []
        """As of the last ``note``."""

    def take_up(self, state: RunState) -> None:
        """Go on behind the segments of a checkpoint; what one of before they were kept does not tell stays unknown."""
        if state.segments and state.segments[-1].last_step == state.step:
            self._earlier = list(state.segments)

    def note(self, meter: StepMeter, peaks: dict[str, int | None]) -> None:
        """Take what this process did so far."""
        if not self._facts:
            return
        measured = {
            "first_step": self._done + 1,
            "last_step": max(meter.run.steps, self._done),
            "train_time_sec": meter.process.train_sec,
            "wall_time_sec": meter.process_wall_seconds(),
            "mean_tokens_per_sec_global": throughput(meter.process),
            **peaks,
        }
        known = {**self._facts["training_config"], **self._facts, **measured}
        this = Segment(**{field.name: known[field.name] for field in fields(Segment)})
        self.all = [*self._earlier, this]

    def peaks(self, *, since_step: int = 1) -> dict[str, Any]:
        """The memory keys of the summary, or of an epoch that began with ``since_step``."""
        last = self.all[-1].last_step if self.all else 0
        return highest_peaks(self.all, first_step=since_step, last_step=last)

    def common_facts(self) -> dict[str, Any]:
        """The facts of the record, null where the segments do not agree in them or not all of them are known."""
        if not self.all:
            return self._facts
        segments = [asdict(segment) for segment in self.all]
        if not covers(self.all, first_step=1, last_step=self.all[-1].last_step):
            segments.append({})
        top = {key: _common(self._facts[key], segments, key) for key in ("git_commit", "host")}
        blocks = {
            block: {key: _common(value, segments, block, key) for key, value in self._facts[block].items()}
            for block in ("env", "hardware")
        }
        config = {
            key: _common(value, segments, key) if key in segments[0].keys() - NEVER_CHANGES else value
            for key, value in self._facts["training_config"].items()
        }
        return {**self._facts, **top, **blocks, "training_config": config}


def _common(value: Any, segments: list[dict[str, Any]], *place: str) -> Any:
    """``value``, of the last segment, if all of them have it at ``place``, else None."""
    *blocks, key = place
    for segment in segments:
        for block in blocks:
            segment = segment.get(block, {})  # noqa: PLW2901 - steps into it
        if segment.get(key) != value:
            return None
    return value
