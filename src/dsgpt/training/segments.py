"""The segments of a run, one for each process that trained a part of it, and the description that all of them share."""

from dataclasses import asdict, fields
from typing import Any

from dsgpt.checkpointing.run_state import RunState
from dsgpt.checkpointing.segment import Segment, covers, highest_peaks
from dsgpt.runtime.load import LoadOfOthers
from dsgpt.telemetry.meter import StepMeter, throughput

NEVER_CHANGES = frozenset({"precision"})
"""Fields of a segment that no resume may change (``settings_to_match``): unrecorded segments had the same values."""


class Segments:
    """The earlier segments, up to the checkpoint that this process resumed from, and the segment of this process.

    Args:
        description: of the run; empty on all ranks but the main one, because the others keep no segments.
        done: optimizer steps of earlier processes.
    """

    def __init__(self, description: dict[str, Any], *, done: int) -> None:
        self._description = description
        self._done = done
        several = description and description["hardware"]["local_world_size"] > 1
        self._load = LoadOfOthers(ranks=bool(several)) if description else None
        self._earlier: list[Segment] = []
        self.all: list[Segment] = []
        """As of the last ``note``."""

    def resume(self, state: RunState) -> None:
        """Continue the segments of a checkpoint. Old checkpoints have none: segments of their steps stay unknown."""
        if state.segments and state.segments[-1].last_step == state.step:
            self._earlier = list(state.segments)

    def note(self, meter: StepMeter, peaks: dict[str, int | None]) -> None:
        """Update the segment of this process."""
        if self._load is None:
            return
        measured = {
            "first_step": self._done + 1,
            "last_step": max(meter.run.steps, self._done),
            "train_time_sec": meter.process.train_sec,
            "wall_time_sec": meter.process_wall_seconds(),
            "mean_tokens_per_sec_global": throughput(meter.process),
            **peaks,
            **self._load.figures(),
        }
        known = {**self._description["training_config"], **self._description, **measured}
        this = Segment(**{field.name: known[field.name] for field in fields(Segment)})
        self.all = [*self._earlier, this]

    def peaks(self, *, since_step: int = 1) -> dict[str, Any]:
        """The memory keys of the summary, or of an epoch that began with ``since_step``."""
        last = self.all[-1].last_step if self.all else 0
        return highest_peaks(self.all, first_step=since_step, last_step=last)

    def common_description(self) -> dict[str, Any]:
        """The description of the run, with None where the segments differ or not all of them are known."""
        if not self.all:
            return self._description
        segments = [asdict(segment) for segment in self.all]
        if not covers(self.all, first_step=1, last_step=self.all[-1].last_step):
            segments.append({})
        top = {key: _common(self._description[key], segments, key) for key in ("git_commit", "host")}
        blocks = {
            block: {key: _common(value, segments, block, key) for key, value in self._description[block].items()}
            for block in ("env", "hardware")
        }
        config = {
            key: _common(value, segments, key) if key in segments[0].keys() - NEVER_CHANGES else value
            for key, value in self._description["training_config"].items()
        }
        return {**self._description, **top, **blocks, "training_config": config}


def _common(value: Any, segments: list[dict[str, Any]], *place: str) -> Any:
    """``value``, that of the last segment, if all segments have it at ``place``, else None."""
    *blocks, key = place
    for segment in segments:
        for block in blocks:
            segment = segment.get(block, {})  # noqa: PLW2901 - the place is inside it
        if segment.get(key) != value:
            return None
    return value
