"""TensorBoard event files."""

import json
from typing import Any

from dsgpt.training.trackers.base import Row, TrackedRun


class TensorboardTracker:
    """Writes event files to ``tensorboard``; each process of a run adds one.

    A resumed run tells TensorBoard to hide what earlier files hold after its checkpoint (``purge_step``).
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only where it is asked for

        self._last_step = run.done
        purged = run.done + 1 if run.done else None
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=purged)
        self._add_text("config", run.settings)
        self.flush()

    def log(self, rows: list[Row]) -> None:
        """Add a scalar for each metric."""
        for row in rows:
            self._last_step = row.step
            for name, value in row.metrics.items():
                self._writer.add_scalar(name, value, row.step)

    def flush(self) -> None:
        """Write the events."""
        self._writer.flush()

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Add status and summary as a text."""
        self._add_text("summary", {"status": status, **summary})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add_text(self, tag: str, values: dict[str, Any]) -> None:
        """Add ``values`` as JSON, indented by four spaces, which Markdown shows as it is."""
        text = "".join(f"    {line}\n" for line in json.dumps(values, indent=2).splitlines())
        self._writer.add_text(tag, text, self._last_step)
