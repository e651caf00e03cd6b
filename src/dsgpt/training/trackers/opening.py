"""Opens the trackers that ``--track`` names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from dsgpt.config.run_config import RunConfig
from dsgpt.training.trackers.base import TrackedRun, Tracker, TrackerSink
from dsgpt.training.trackers.csv_table import CsvTracker
from dsgpt.training.trackers.folder import make_folder
from dsgpt.training.trackers.mlflow_run import MlflowTracker
from dsgpt.training.trackers.tensorboard_events import TensorboardTracker
from dsgpt.training.trackers.trackio_run import TrackioTracker
from dsgpt.training.trackers.wandb_run import WandbTracker

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
    names = dict.fromkeys(config.options.track)  # a name given twice is one tracker
    return [TrackerSink(name, partial(_open, name, config, description, done)) for name in names]


def _open(name: str, config: RunConfig, description: dict[str, Any], done: int) -> Tracker:
    run = TrackedRun(
        run_dir=config.run_dir,
        folder=make_folder(config.run_dir).resolve(),
        run_id=description["run_id"],
        settings=description,
        done=done,
    )
    return TRACKERS[name](run)
