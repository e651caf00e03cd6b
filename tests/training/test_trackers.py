"""What experiment trackers hold after a run and after a resumed one, and what happens when one fails."""

import contextlib
import csv
import json
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from small_run import command_line
from training_runs import LONG, read_lines, read_record, resolved, resume, stop_after_9

from dsgpt.training.command import train as train_here
from dsgpt.training.trackers import CsvTracker, Row, TrackedRun, open_trackers, row_of

# What each tracker stored, read with its own reader where it has one.

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
    texts = (events.Tensors(f"{name}/text_summary")[-1] for name in ("config", "summary"))
    stored.settings, stored.ended = (json.loads(text.tensor_proto.string_val[0]) for text in texts)
    return stored


def mlflow(folder: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("dsgpt").experiment_id])
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

# What trackers hold after a run and after a resumed one, and what happens when one fails.

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
"""MLflow uses it."""
ALL = ",".join(READERS)
APPENDS = ("wandb", "mlflow", "trackio")
"""Trackers that cannot remove the steps that a resumed run repeats."""
VARIABLES = ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "WANDB_ERROR_REPORTING", "TRACKIO_DIR", "HF_TOKEN")
VARIABLES += ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


def points(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, Any]]]:
    """What a tracker must hold of the lines."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for line in lines:
        for name, value in row_of(line).metrics.items():
            found.setdefault(name, []).append((line["step"], pytest.approx(value, rel=1e-6)))
    return found


class _Network:
    """Notes the addresses that this process looks up or connects to."""

    def __init__(self) -> None:
        self.listens, self.used = False, []

    def __call__(self, event: str, about: tuple[Any, ...]) -> None:
        if self.listens and event in {"socket.connect", "socket.getaddrinfo", "socket.bind"}:
            address = about[1] if event != "socket.getaddrinfo" else about[:2]
            is_probe = event == "socket.bind" and address[:2] == ("::1", 0)  # urllib3 asks whether there is IPv6
            if isinstance(address, tuple) and not is_probe:
                self.used.append((event, address))


class Tracked(NamedTuple):
    run_dir: Path
    lines: list[dict[str, Any]]
    """Of ``metrics.jsonl``, after the first process."""
    first: dict[str, Stored]
    """After the first process."""
    resumed: dict[str, Stored]
    """After a second one, which repeated steps 10 to 12."""
    network: list[Any]


@pytest.fixture(scope="module")
def tracked(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    """A run with every tracker, whose last checkpoint was lost, and that was resumed."""
    run_dir = tmp_path_factory.mktemp("tracked") / "run"
    network = _Network()
    sys.addaudithook(network)
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, "")  # so that what a tracker sets is removed afterwards
            patch.delenv(name)
        patch.setenv("WANDB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))  # the log of its service
        patch.setenv("HF_TOKEN", "hf_none")  # with a token, Trackio would ask the hub for the user's name
        network.listens = True
        assert train_here(command_line(finished_run, **LONG, checkpoint_path=run_dir, track=ALL)) == 0
        lines, first = read_lines(run_dir, "step"), {name: read(run_dir / "trackers") for name, read in READERS.items()}
        stop_after_9(run_dir)
        assert resume(run_dir, finished_run, track=ALL) == 0
        network.listens = False
        assert os.environ["WANDB_ERROR_REPORTING"] == "false"  # else its service, no Python, uses the network
        resumed = {name: read(run_dir / "trackers") for name, read in READERS.items()}
        yield Tracked(run_dir, lines, first, resumed, network.used)


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_holds_the_run_and_continues_it_after_a_resume(tracked, tracker):
    first, resumed = tracked.first[tracker], tracked.resumed[tracker]
    expected = points(tracked.lines)
    if tracker == "wandb":  # one row for each step: its times, not those of its validation
        expected = {name: list(dict(reversed(values)).items())[::-1] for name, values in expected.items()}
    assert first.metrics == expected
    assert resumed.runs == first.runs * (2 if tracker == "wandb" else 1)  # wandb: a folder for each process
    assert len(set(resumed.runs)) <= 1
    appends = tracker in APPENDS
    steps, validated = (sorted(step for step, _ in resumed.metrics[name]) for name in ("loss", "val_loss"))
    assert steps == sorted([*range(1, 13), *([10, 11, 12] * appends)])
    assert validated == sorted([4, 5, 8, 10, 12, *([10, 12] * appends)])
    now = points(read_lines(tracked.run_dir, "step"))
    for name in ("loss", "val_loss", "step_time_sec"):
        assert resumed.metrics[name][-1] == now[name][-1]
    if tracker == "csv":
        return
    settings, written = resumed.settings, read_record(tracked.run_dir)
    assert settings["run_id"] == written["run_id"]
    rate = "training_config.optimizer_params.lr"
    lr = settings[rate] if tracker == "mlflow" else settings["training_config"]["optimizer_params"]["lr"]
    assert float(lr) == 0.001
    assert resumed.ended["status"] == "completed"
    assert resumed.ended["best_val_loss"] == written["summary"]["best_val_loss"]
    assert resumed.ended.get("exit_code", 0) == 0


def test_trackers_use_no_network_and_do_not_change_the_training(tracked, finished_run):
    assert tracked.network == []
    untracked = read_lines(finished_run / "run", "step")
    losses = [(line["step"], line.get("loss"), line.get("val_loss")) for line in tracked.lines]
    assert losses == [(line["step"], line.get("loss"), line.get("val_loss")) for line in untracked]


def test_a_tracker_that_fails_is_reported_once_and_not_called_again(finished_run, tmp_path, monkeypatch):
    calls = []

    def refuse(tracker: CsvTracker, rows: list[Row]) -> None:
        calls.append(rows)
        raise RuntimeError("the server\nis gone")

    monkeypatch.setattr(CsvTracker, "log", refuse)
    flags = {"max_train_steps": 3, "steps_per_print": 1, "track": "csv,csv", "checkpoint_path": tmp_path / "run"}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert len(calls) == 1
    assert [line for line in (tmp_path / "run" / "train.log").read_text().splitlines() if "--track" in line] == [
        "--track csv: failed (RuntimeError: the server is gone); it receives nothing more, and the run continues"
    ]


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_run(stopped, finished_run, capsys):
    (stopped / "trackers" / "metrics.csv").mkdir(parents=True)
    (stopped / "trackers" / "run_ids.json").write_text("{}")
    assert resume(stopped, finished_run, track="csv") == 0
    assert capsys.readouterr().out.count("--track csv: failed (IsADirectoryError: ") == 1


def test_a_table_begun_at_a_resume_has_the_earlier_steps(stopped, finished_run):
    assert resume(stopped, finished_run, track="csv") == 0
    assert [step for step, _ in READERS["csv"](stopped / "trackers").metrics["loss"]] == list(range(1, 13))


def test_a_kill_while_the_table_is_written_anew_leaves_the_old_one(tmp_path, monkeypatch):
    run = TrackedRun(run_dir=tmp_path, folder=tmp_path, run_id="0", settings={}, done=0)
    with contextlib.closing(CsvTracker(run)) as table:
        table.log([Row(1, {"loss": 2.5}), Row(2, {"loss": 2.25})])
    before = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    monkeypatch.setattr("dsgpt.training.trackers.row_of", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        CsvTracker(run)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_only_the_main_rank_tracks(finished_run, tmp_path):
    config = resolved(command_line(finished_run, checkpoint_path=tmp_path, track="csv"))
    other = replace(config, topology=replace(config.topology, rank=1, world_size=2))
    assert not open_trackers(other, description={"run_id": "0"}, done=0)
    assert not list(tmp_path.iterdir())
    assert len(open_trackers(config, description={"run_id": "0"}, done=0)) == 1
