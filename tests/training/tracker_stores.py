"""Read what experiment trackers stored, with their own readers where they have one."""

import csv
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Point = tuple[int, float]


@dataclass(kw_only=True)
class Stored:
    """One run, as one tracker holds it."""

    metrics: dict[str, list[Point]] = field(default_factory=dict)
    """Step and value, in the order in which they are stored."""
    settings: Any = None
    ended: Any = None
    """What the tracker holds of status and summary."""
    runs: list[str] = field(default_factory=list)
    """The ids of all runs in the store."""

    def add(self, name: str, step: int, value: Any) -> None:
        self.metrics.setdefault(name, []).append((step, value))


def tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    stored = Stored()
    for name in events.Tags()["scalars"]:
        stored.metrics[name] = [(event.step, event.value) for event in events.Scalars(name)]
    texts = {name: _text(events.Tensors(f"{name}/text_summary")[-1]) for name in ("config", "summary")}
    stored.settings, stored.ended = texts["config"], texts["summary"]
    return stored


def _text(event: Any) -> Any:
    return json.loads(event.tensor_proto.string_val[0])


def mlflow(folder: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dsgpt")
    runs = client.search_runs([experiment.experiment_id])
    stored = Stored(settings=runs[0].data.params, runs=[run.info.run_id for run in runs])
    stored.ended = {"status": {"FINISHED": "completed"}[runs[0].info.status]}
    for name, value in runs[0].data.metrics.items():
        if name.startswith("summary/"):
            stored.ended[name.removeprefix("summary/")] = value
            continue
        for metric in client.get_metric_history(runs[0].info.run_id, name):
            stored.add(name, metric.step, metric.value)
    return stored


def trackio(folder: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    assert (folder / "trackio" / "dsgpt.db").exists()
    runs = SQLiteStorage.get_runs("dsgpt")
    stored = Stored(settings=SQLiteStorage.get_run_config("dsgpt", runs[0]), runs=runs, ended={})
    for entry in SQLiteStorage.get_logs("dsgpt", runs[0]):
        for name, value in entry.items():
            if name.startswith("summary/"):
                stored.ended[name.removeprefix("summary/")] = value
            elif name not in {"step", "timestamp"}:
                stored.add(name, entry["step"], value)
    return stored


def csv_table(folder: Path) -> Stored:
    stored = Stored()
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    stored.add(name, step, float(value))
    return stored


def wandb(folder: Path) -> Stored:
    """All offline folders of one run, the oldest first, as ``wandb sync`` would read them."""
    from wandb.proto.wandb_internal_pb2 import Record

    stored = Stored(settings={}, ended={})
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                stored.runs.append(record.run.run_id)
                stored.settings |= _values(record.run.config.update)
            elif kind == "summary":
                stored.ended |= _values(record.summary.update)
            elif kind == "exit":
                stored.ended["exit_code"] = record.exit.exit_code
            elif kind == "history":
                values = _values(record.history.item)
                for name, value in values.items():
                    if not name.startswith("_"):
                        stored.add(name, values["_step"], value)
    return stored


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format, after a header of 7 bytes."""
    block, header = 1 << 15, struct.Struct("<IHB")
    at, parts = header.size, b""
    while at + header.size <= len(data):
        if block - at % block < header.size:  # too little room for another part in this block
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        parts += data[at + header.size : at + header.size + length]
        at += header.size + length
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio, "csv": csv_table}
