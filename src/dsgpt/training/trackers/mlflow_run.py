"""MLflow, in a SQLite file of the run folder unless ``MLFLOW_TRACKING_URI`` names another store."""

import json
import logging
import os
import time
from typing import Any

from dsgpt.training.trackers.base import PROJECT, Row, TrackedRun
from dsgpt.training.trackers.folder import keep_id, read_id

_STATUS = {"completed": "FINISHED", "interrupted": "KILLED"}
_PARAMETERS_AT_ONCE = 100
"""MLflow's limits on one call, and on the length of a parameter."""
_METRICS_AT_ONCE = 1000
_LONGEST_PARAMETER = 6000


class MlflowTracker:
    """One run of MLflow; its experiment is ``MLFLOW_EXPERIMENT_NAME``, by default ``dsgpt``."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # the library would report its own use
        from mlflow import MlflowClient, entities  # noqa: PLC0415 - only where it is asked for
        from mlflow.utils.file_utils import path_to_local_sqlite_uri  # noqa: PLC0415

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports every step of making its tables
        self._entities = entities
        self._last_step = run.done
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or path_to_local_sqlite_uri(str(run.folder / "mlflow.db")))
        earlier = read_id(run.folder, "mlflow")
        self._run_id = earlier or self._create(run, artifacts=None if uri else run.folder / "mlflow-artifacts")
        self._client.update_run(self._run_id, status="RUNNING")

    def _create(self, run: TrackedRun, *, artifacts: Any) -> str:
        """A new run with the settings as parameters, which MLflow never changes; returns its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = artifacts.as_uri() if artifacts else None
            experiment_id = self._client.create_experiment(name, artifact_location=place)
        else:
            experiment_id = experiment.experiment_id
        created = self._client.create_run(experiment_id, run_name=run.name, tags={"dsgpt.run_id": run.run_id})
        run_id: str = created.info.run_id
        keep_id(run.folder, "mlflow", run_id)
        settings = flattened(run.settings).items()
        parameters = [self._entities.Param(name, value[:_LONGEST_PARAMETER]) for name, value in settings]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(run_id, params=parameters[start : start + _PARAMETERS_AT_ONCE])
        return run_id

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
        self._last_step = rows[-1].step

    def flush(self) -> None:
        """Do nothing: every call stores what it sends."""

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Store the summary as metrics ``summary/...`` of the last step, and the status."""
        self.log([Row(self._last_step, {f"summary/{name}": value for name, value in summary.items()})])
        self._client.set_terminated(self._run_id, status=_STATUS.get(status, "FAILED"))

    def close(self) -> None:
        """Do nothing: the run was ended."""


def flattened(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``{"training_config.seed": "1337"}``; values that are no text are written as JSON."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
