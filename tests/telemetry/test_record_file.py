"""``training_metrics.json`` and ``metrics.jsonl`` as files."""

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from dsgpt.record.schema import RunRecord, StepLog, drop_steps_after, finite, mean, percentile, read_steps
from dsgpt.training.sinks import RecordSink

LINES = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": 3.0},
    {"step": 2, "val_loss": 3.5},
    {"step": 3, "loss": float("nan")},
]


@pytest.fixture
def steps_file(tmp_path: Path) -> Path:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.write(LINES[:2])
    log.write(LINES[2:])
    log.close()
    return tmp_path / "metrics.jsonl"


def test_every_line_is_json_for_any_reader(steps_file):
    def refuse(word: str) -> None:
        raise AssertionError(word)

    read = [json.loads(line, parse_constant=refuse) for line in steps_file.read_text().splitlines()]
    assert read == [*LINES[:3], {"step": 3, "loss": None}]
    assert list(read_steps(steps_file)) == read


def test_a_torn_last_line_is_left_out(steps_file):
    whole = steps_file.read_bytes()
    for cut in range(len(whole) - 25, len(whole)):
        steps_file.write_bytes(whole[:cut])
        assert [line["step"] for line in read_steps(steps_file)][:3] == [1, 2, 2]
        assert len(list(read_steps(steps_file))) == 3


def test_lines_after_a_step_are_dropped_and_writing_continues(steps_file):
    steps_file.write_bytes(steps_file.read_bytes() + b'{"step": 4, "lo')
    drop_steps_after(steps_file, 2)
    log = StepLog(steps_file)
    log.write([{"step": 3, "loss": 2.0}])
    log.close()
    assert list(read_steps(steps_file)) == [*LINES[:3], {"step": 3, "loss": 2.0}]
    assert list(steps_file.parent.iterdir()) == [steps_file]


def test_damaged_lines_are_left_out_and_counted(steps_file):
    lines = steps_file.read_bytes().splitlines(keepends=True)
    damaged_lines = [lines[0], b"\0\0\0\n", b'{"step": \n', b"\xff\n", b"[1]\n", b'{"loss": 1}\n', *lines[1:]]
    steps_file.write_bytes(b"".join(damaged_lines))
    damaged: list[int] = []
    assert [line["step"] for line in read_steps(steps_file, damaged=damaged)] == [1, 2, 2, 3]
    assert damaged == [2, 3, 4, 5, 6]
    assert drop_steps_after(steps_file, 3) == damaged
    assert steps_file.read_bytes() == b"".join(lines)


def test_dropping_from_a_missing_file_makes_an_empty_one(tmp_path):
    drop_steps_after(tmp_path / "metrics.jsonl", 5)
    assert list(read_steps(tmp_path / "metrics.jsonl")) == []


def test_a_value_that_is_not_finite_is_unknown():
    value = {"a": [float("nan"), 1.0, (float("-inf"),)], "b": {"c": float("inf")}, "d": "nan", "e": 0, "f": None}
    assert finite(value) == {"a": [None, 1.0, [None]], "b": {"c": None}, "d": "nan", "e": 0, "f": None}


@pytest.mark.parametrize(
    ("fraction", "value"), [(0.0, 1.0), (0.2, 1.0), (0.21, 2.0), (0.5, 3.0), (0.95, 5.0), (1.0, 5.0)]
)
def test_percentile_by_nearest_rank(fraction, value):
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], fraction) == value


def test_an_empty_list_has_no_mean():
    assert mean([]) is None
    assert percentile([], 0.5) is None
    assert mean([1.0, 2.0]) == 1.5


def written(tmp_path: Path, *, inference: dict[str, Any] | None) -> dict[str, Any]:
    epoch = {"train_time_sec": 9.0, "train_loss_avg_global": 2.0, "val_loss_avg_global": None}
    summary = {"mean_tokens_per_sec_global": float("nan")}
    record = RunRecord(
        description={"run_id": "x"}, status="completed", epochs=[epoch], summary=summary, inference=inference
    )
    RecordSink(tmp_path / "r.json").record(record)
    return json.loads((tmp_path / "r.json").read_text())


def test_both_generations_of_keys(tmp_path):
    found = written(tmp_path, inference={"new_tokens": 100, "latency_sec": 0.5})
    assert (found["schema_version"], found["run_id"], found["status"]) == ("2.1", "x", "completed")
    assert (found["train_time_per_epoch"], found["train_loss_per_epoch"]) == ([9.0], [2.0])
    assert found["val_loss_per_epoch"] == [None]
    assert found["train_throughput"] is None
    assert (found["inference_latency"], found["inference_throughput"]) == (0.5, 200.0)


@pytest.mark.parametrize("inference", [None, {"new_tokens": 99, "latency_sec": 0.5}])
def test_latency_of_another_length_is_unknown_to_older_tools(tmp_path, inference):
    found = written(tmp_path, inference=inference)
    assert (found["inference_latency"], found["inference_throughput"]) == (None, None)


def test_lines_that_a_full_disk_refused_are_written_later_and_whole(tmp_path):
    """A limit on the size of files stands for a full disk."""
    log, path = StepLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    log.write(LINES[:1])
    before = path.read_bytes()
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, old[1]))
    try:
        for call in (lambda: log.write(LINES[1:2]), log.sync):
            with pytest.raises(OSError, match="File too large"):
                call()
            assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    log.write(LINES[2:3])
    log.close()
    assert list(read_steps(path)) == LINES[:3]
