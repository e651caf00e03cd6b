"""Experiment trackers as sinks of a run's journal, each through its own library."""

import contextlib
import csv
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dsgpt.common.errors import is_number
from dsgpt.common.files import append_to, write_atomic, write_json_atomic
from dsgpt.common.json_files import clipped_text, read_object
from dsgpt.config.run_config import RunConfig
from dsgpt.record.schema import STEPS_FILE, RunRecord, read_steps
from dsgpt.telemetry.meter import Figures, interval_figures
from dsgpt.training.journal import Line, Sink
from dsgpt.training.run_folder import IDS_FILE, TRACKERS_FOLDER

logger = logging.getLogger(__name__)

# What an experiment tracker is told about a run, and the sink that keeps its errors away from the run.

PROJECT = "dsgpt"
"""The project or experiment that holds the runs, in trackers that have such a level."""


class Row(NamedTuple):
    """The metrics of a step or of a validation."""

    step: int
    """Optimizer steps completed; the first is 1."""
    metrics: dict[str, float]
    """Values by the keys of ``metrics.jsonl``, without those that are unknown; true is 1 and false is 0."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Facts about the run that a tracker gets when it is opened."""

    run_dir: Path
    folder: Path
    """Folder for files that the tracker stores on this machine; absolute, because libraries keep it in variables."""
    run_id: str
    """Id of the run in the record."""
    settings: dict[str, Any]
    """The settings of the record, nested."""
    done: int
    """Step of the checkpoint that the run was resumed from; 0 for a fresh start."""

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.run_dir.resolve().name

    def id_in(self, tracker: str, new: Callable[[], str]) -> tuple[str, bool]:
        """The run's id in ``tracker``: that of an earlier process, or ``new`` and True; kept for a resumed run.

        Raises:
            JsonError: the file of ids is damaged.
            OSError: the file system refuses.
        """
        ids = read_object(self.folder / IDS_FILE)
        earlier = ids.get(tracker)
        if isinstance(earlier, str):
            return earlier, False
        write_json_atomic(self.folder / IDS_FILE, {**ids, tracker: (run_id := new())})
        return run_id, True


class Tracker:
    """One tracker with one run open. A subclass overrides what it needs; each method may raise anything."""

    def log(self, rows: list[Row]) -> None:
        """Store metrics, oldest first."""

    def flush(self) -> None:
        """Write what is buffered: a checkpoint follows, and a run resumed from it does not send these steps again."""

    def end(self, status: str, summary: dict[str, float], step: int) -> None:
        """Store how the run ended after ``step``: the ``status`` of the record, and the numbers of its summary."""

    def close(self) -> None:
        """Called after the last event."""


class TrackerSink(Sink):
    """Tells a tracker what happens.

    The first error of the tracker is reported in one line; it is not called again, and the run continues.

    Args:
        name: of the tracker, as in ``--track``.
        opens: opens the tracker; may raise anything.
        done: step of the checkpoint that the run was resumed from; 0 for a fresh start.
    """

    def __init__(self, name: str, opens: Callable[[], Tracker], *, done: int) -> None:
        self._name, self._step = name, done
        self._tracker: Tracker | None = None
        try:
            self._tracker = opens()
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop the training
            self._give_up(error)

    def _tell(self, event: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            event(self._tracker)
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop the training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        reason = clipped_text(f"{type(error).__name__}: {error}", width=200)
        logger.warning(f"--track {self._name}: failed ({reason}); it receives nothing more, and the run continues")

    def steps(self, lines: list[Line], *, due: bool) -> None:  # noqa: ARG002 - every step is tracked
        """Send the metrics of every step."""
        if lines:
            self._step = lines[-1]["step"]
            self._tell(lambda tracker: tracker.log([row_of(line) for line in lines]))

    def validation(self, line: Line, *, seconds: float) -> None:  # noqa: ARG002 - not a metric of ``metrics.jsonl``
        """Send the loss."""
        self._tell(lambda tracker: tracker.log([row_of(line)]))

    def record(self, record: RunRecord) -> None:
        """Send status and summary when the run ends."""
        if record.status != "running":
            summary = {name: value for name, value in record.summary.items() if is_number(value)}
            self._tell(lambda tracker: tracker.end(record.status, summary, self._step))

    def sync(self) -> None:
        """Flush the tracker."""
        self._tell(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Close the tracker."""
        self._tell(lambda tracker: tracker.close())
        self._tracker = None


def row_of(line: Line) -> Row:
    """The metrics of a line of ``metrics.jsonl``; those of its interval are named ``interval/...``, and so on."""
    every = {name: value for name, value in line.items() if name != "step" and not isinstance(value, dict)}
    for group, values in line.items():
        every |= {f"{group}/{name}": value for name, value in values.items()} if isinstance(values, dict) else {}
    values = {name: value for name, value in every.items() if value is not None}
    return Row(line["step"], {name: int(value) if isinstance(value, bool) else value for name, value in values.items()})


# ``metrics.csv``: the lines of ``metrics.jsonl`` as a table.

CSV_FILE = "metrics.csv"
COLUMNS = (
    *("step", "epoch", "loss", "val_loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_sec", "step_time_sec"),
    *("dataload_time_sec", "warm_up", "val_tokens", "train_time_sec", "wall_time_sec"),
    *(f"interval/{name}" for name in (*interval_figures(Figures(), ranks=()), "mfu")),
)
"""Every metric of a line of ``metrics.jsonl``."""


class CsvTracker(Tracker):
    """Appends rows; a resumed run first writes those of ``metrics.jsonl``, already cut back to its checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        path, steps = run.folder / CSV_FILE, run.run_dir / STEPS_FILE
        earlier = [row_of(line) for line in read_steps(steps)] if steps.exists() else []
        write_atomic(path, (",".join(COLUMNS) + "\n").encode() + self._text(earlier))
        self._file = append_to(path)  # unbuffered: a row that a full disk refused must not be written later

    def log(self, rows: list[Row]) -> None:
        """Append the rows, and hand them to the operating system."""
        waiting = self._text(rows)
        while waiting:
            waiting = waiting[self._file.write(waiting) :]

    def _text(self, rows: list[Row]) -> bytes:
        """The rows, with an empty cell for what a row lacks.

        Raises:
            ValueError: a row has a metric without a column.
        """
        buffer = io.StringIO()
        table = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        table.writerows({"step": row.step, **row.metrics} for row in rows)
        return buffer.getvalue().encode()

    def flush(self) -> None:
        """Make the rows durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# MLflow, in a SQLite file of the run folder unless ``MLFLOW_TRACKING_URI`` names another store.

_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}
_PARAMETERS_AT_ONCE = 100
"""MLflow's limits on one call, and on the length of a parameter."""
_METRICS_AT_ONCE = 1000
_LONGEST_PARAMETER = 6000


class MlflowTracker(Tracker):
    """One run of MLflow; its experiment is ``MLFLOW_EXPERIMENT_NAME``, by default ``dsgpt``.

    Every call stores what it sends.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # the library would report its own use
        from mlflow import MlflowClient, entities  # noqa: PLC0415 - only where it is asked for
        from mlflow.utils.file_utils import path_to_local_sqlite_uri  # noqa: PLC0415

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports every step of making its tables
        self._entities = entities
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or path_to_local_sqlite_uri(str(run.folder / "mlflow.db")))

        def create() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(name)
            place = None if uri else (run.folder / "mlflow-artifacts").as_uri()
            existing = experiment.experiment_id if experiment else None
            experiment_id = existing or self._client.create_experiment(name, artifact_location=place)
            created = self._client.create_run(experiment_id, run_name=run.name, tags={"dsgpt.run_id": run.run_id})
            return str(created.info.run_id)

        self._run_id, is_new = run.id_in("mlflow", create)
        # The settings are parameters, which MLflow never changes.
        settings = flattened(run.settings).items() if is_new else ()
        parameters = [entities.Param(name, value[:_LONGEST_PARAMETER]) for name, value in settings]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_AT_ONCE])
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, rows: list[Row]) -> None:
        """Store the metrics of all rows, as few calls as MLflow allows."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(name, float(value), now, row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def end(self, status: str, summary: dict[str, float], step: int) -> None:
        """Store the summary as metrics ``summary/...`` of the last step, and the status."""
        self.log([Row(step, {f"summary/{name}": value for name, value in summary.items()})])
        self._client.set_terminated(self._run_id, status=_STATUS.get(status, "FAILED"))


def flattened(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``{"training_config.seed": "1337"}``; values that are no text are written as JSON."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


# TensorBoard event files.


class TensorboardTracker(Tracker):
    """Writes event files to ``tensorboard``; each process of a run adds one.

    A resumed run tells TensorBoard to hide what earlier files hold after its checkpoint (``purge_step``).
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only where it is asked for

        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.done + 1 if run.done else None)
        self._add_text("config", run.settings, run.done)
        self.flush()

    def log(self, rows: list[Row]) -> None:
        """Add a scalar for each metric."""
        for row in rows:
            for name, value in row.metrics.items():
                self._writer.add_scalar(name, value, row.step)

    def flush(self) -> None:
        """Write the events."""
        self._writer.flush()

    def end(self, status: str, summary: dict[str, float], step: int) -> None:
        """Add status and summary as a text."""
        self._add_text("summary", {"status": status, **summary}, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add_text(self, tag: str, values: dict[str, Any], step: int) -> None:
        """Add ``values`` as JSON, indented by four spaces, which Markdown shows as it is."""
        self._writer.add_text(tag, "".join(f"    {line}\n" for line in json.dumps(values, indent=2).splitlines()), step)


# Trackio, in a SQLite file of the run folder unless its own variables name another place.

_ONLINE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker(Tracker):
    """One run of Trackio, which finds it again by its name. A thread of the library stores what it receives."""

    def __init__(self, run: TrackedRun) -> None:
        local = not any(os.environ.get(name) for name in _ONLINE)
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        import trackio  # noqa: PLC0415 - only where it is asked for; reads the variable

        self._library = trackio
        name, _ = run.id_in("trackio", lambda: f"{run.name}-{run.run_id[:8]}")
        off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        with contextlib.redirect_stdout(io.StringIO()), _offline() if local else contextlib.nullcontext():
            self._run = trackio.init(project=PROJECT, name=name, config=run.settings, resume="allow", **off)

    def log(self, rows: list[Row]) -> None:
        """Send the rows; the library's thread stores them within a second."""
        for row in rows:
            self._run.log(row.metrics, step=row.step)

    def end(self, status: str, summary: dict[str, float], step: int) -> None:
        """Store status and summary as ``summary/...`` of the last step."""
        self._run.log({f"summary/{name}": value for name, value in {"status": status, **summary}.items()}, step=step)

    def close(self) -> None:
        """Store the rest, and end the thread."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._library.finish()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep Trackio from asking the hub for the user's name, inside the context; it would do so if there is a token."""
    from huggingface_hub import constants  # noqa: PLC0415 - only where it is asked for

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# Weights & Biases, offline unless ``WANDB_MODE`` says otherwise.


class WandbTracker(Tracker):
    """One run of Weights & Biases; each offline process of it writes a folder ``wandb/offline-run-...``.

    A process of the library, which survives this one, writes what it received.

    ``WANDB_PROJECT``, ``WANDB_NAME``, ``WANDB_ENTITY`` and the variables of its login have their usual effect. Hardware
    statistics, code and git state are not collected: the settings of the record are sent.
    """

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":  # the library would report its own use and errors over the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415 - only where it is asked for

        self._library = wandb
        self._exit_code, self._last = 1, Row(0, {})
        run_id, _ = run.id_in("wandb", lambda: run.run_id)
        on = ("silent", "allow_val_change", "disable_git", "x_disable_stats", "x_disable_meta")
        off = ("symlink", "save_code", "x_save_requirements")
        self._run = wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run_id,
            resume="allow",
            dir=run.folder,
            config=run.settings,
            settings=wandb.Settings(console="off", **dict.fromkeys(on, True), **dict.fromkeys(off, False)),
        )

    def log(self, rows: list[Row]) -> None:
        """Send the rows; the library itself writes them within seconds.

        It has one row for each step, so a validation only adds what the step lacks; the times stay those of the step.
        """
        for row in rows:
            sent = self._last.metrics if row.step == self._last.step else {}
            self._run.log({name: value for name, value in row.metrics.items() if name not in sent}, step=row.step)
            self._last = row

    def end(self, status: str, summary: dict[str, float], step: int) -> None:  # noqa: ARG002 - of the whole run
        """Set the summary; a run that did not complete is marked as failed."""
        self._exit_code = 0 if status == "completed" else 1
        self._run.summary.update({"status": status, **summary})

    def close(self) -> None:
        """Finish the run and stop the library's process: an exit by ``os._exit`` runs no handlers."""
        self._run.finish(exit_code=self._exit_code)
        self._library.teardown(exit_code=self._exit_code)


# Opens the trackers that ``--track`` names.

TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "csv": CsvTracker,
}


def open_trackers(config: RunConfig, *, description: dict[str, Any], done: int) -> list[TrackerSink]:
    """A sink for each tracker of the run, on the main rank; none on the others.

    Args:
        config: the run; its ``metrics.jsonl`` is already cut back to ``done``.
        description: the settings of the record.
        done: step of the checkpoint that the run was resumed from; 0 for a fresh start.
    """
    if not config.topology.is_main:
        return []

    def open_tracker(name: str) -> Tracker:
        folder = config.run_dir / TRACKERS_FOLDER
        folder.mkdir(exist_ok=True)
        if not (folder / IDS_FILE).exists():
            write_json_atomic(folder / IDS_FILE, {})
        run_id, folder = description["run_id"], folder.resolve()
        run = TrackedRun(run_dir=config.run_dir, folder=folder, run_id=run_id, settings=description, done=done)
        return TRACKERS[name](run)

    # a name given twice is one tracker
    return [TrackerSink(name, partial(open_tracker, name), done=done) for name in dict.fromkeys(config.options.track)]
