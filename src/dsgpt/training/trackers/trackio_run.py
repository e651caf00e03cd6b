"""Trackio, in a SQLite file of the run folder unless its own variables name another place."""

import contextlib
import io
import os
from collections.abc import Iterator

from dsgpt.training.trackers.base import PROJECT, Row, TrackedRun
from dsgpt.training.trackers.folder import keep_id, read_id

_ONLINE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker:
    """One run of Trackio, which finds it again by its name."""

    def __init__(self, run: TrackedRun) -> None:
        local = not any(os.environ.get(name) for name in _ONLINE)
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio  # noqa: PLC0415 - only where it is asked for; reads the variable

        self._library = trackio
        self._last_step = run.done
        name = read_id(run.folder, "trackio") or f"{run.name}-{run.run_id[:8]}"
        keep_id(run.folder, "trackio", name)
        with _silence(), _offline() if local else contextlib.nullcontext():
            self._run = trackio.init(
                project=PROJECT,
                name=name,
                config=run.settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, rows: list[Row]) -> None:
        """Send the rows; the library's thread stores them within a second."""
        for row in rows:
            self._run.log(row.metrics, step=row.step)
        self._last_step = rows[-1].step

    def flush(self) -> None:
        """Do nothing: the thread stores what it received."""

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Store status and summary as ``summary/...`` of the last step."""
        values = {"status": status, **summary}
        self._run.log({f"summary/{name}": value for name, value in values.items()}, step=self._last_step)

    def close(self) -> None:
        """Store the rest, and end the thread."""
        with _silence():
            self._library.finish()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, what the library prints for people is lost."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside, the hub is not asked for the user's name, which Trackio would do if there is a token."""
    from huggingface_hub import constants  # noqa: PLC0415 - only where it is asked for

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
