"""What the dashboard reads while runs write: steps, the folder, and what became of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock, holder_of
from dsgpt.dashboard.compare import bars
from dsgpt.dashboard.reading import (
    StepReader,
    _parsed,
    contents,
    inside,
    last_entries,
    model_name,
    own_file,
    version_of,
)
from dsgpt.dashboard.ui import lines, plain, smoothed, thinned
from dsgpt.model.config import PRESETS
from dsgpt.record.runs import read_step_curves
from dsgpt.record.schema import Fields
from dsgpt.training.status import SILENT_SEC, Signs, Status, signs_of_life, status_of

COMMITTED = Path(__file__).parents[2] / "checkpoint" / "reference" / "cpu-2-cores"
HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def line(step: int, loss: float | None = 5.0, **others: object) -> str:
    return json.dumps({"step": step, "loss": loss, "tokens": 8 * step, **others}) + "\n"


def test_steps_are_those_that_the_charts_read():
    path = COMMITTED / "demo-zero1" / "metrics.jsonl"
    steps = StepReader(path).read()
    train, validation, _ = read_step_curves(path, [])
    assert steps.train["step"].tolist() == [point.step for point in train.points]
    assert steps.train["loss"].tolist() == [point.loss for point in train.points]
    assert steps.validation["val_loss"].tolist() == [point.loss for point in validation.points]
    assert steps.validation["tokens"].tolist() == [point.tokens for point in validation.points]
    assert (steps.last_step, steps.damaged) == (800, 0)
    step, validated = last_entries(path, version_of(path))
    assert (step["step"], validated["step"], validated["val_loss"]) == (800, 800, validation.points[-1].loss)


def test_what_is_appended_is_added_and_a_torn_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:9])
    reader = StepReader(path)
    first = reader.read()
    assert first.train["step"].tolist() == [1] and first.damaged == 0
    with path.open("a") as file:
        file.write(line(2)[9:] + "no JSON\n" + line(3, None) + json.dumps({"step": 3, "val_loss": 4.0}) + "\n")
    now = reader.read()
    assert now.train["step"].tolist() == [1, 2, 3] and now.damaged == 1
    assert np.isnan(now.train["loss"][2])
    assert now.validation["tokens"].tolist() == [24]
    assert first.train["step"].tolist() == [1], "what a page holds does not change"


@pytest.mark.parametrize(
    "broken",
    [
        *(b'"loss": NaN', b'"loss": null', b'"lr": 1e308', b'"lr": 1e-308', b'"lr": "x"', b'"tokens": null'),
        *(b'"warm_up": null', b'"lr": 1e999', b'"a": [[1]]', b'"a": "\\ud800"', b'"a": "\xff"', b'"a": 1, "a": 2'),
        *(b'"a": {"loss": 1}', b'"a": 1}{"b": 2', b'"a": {\n"b": 1}', b'"a": 1,}\n{', b'"step": 1.5', b'"a" : 1', b""),
        *(b'"interval": {"mfu": "x"}', b'"interval": null', b'"val_loss": 2', b'"a": "' + b"x" * 70_000 + b'"'),
    ],
)
def test_lines_parsed_together_are_those_parsed_one_by_one(tmp_path, monkeypatch, broken):
    """Whatever one of them holds, beside the lines of a real run, and where two reads meet in a line."""
    whole = (COMMITTED / "demo-zero1" / "metrics.jsonl").read_bytes()
    first, _, rest = whole.partition(b"\n")
    path, found = tmp_path / "metrics.jsonl", []
    for least in (0, len(whole) * 2):
        monkeypatch.setattr("dsgpt.dashboard.reading._LEAST_BYTES", least)
        path.write_bytes(whole + first.replace(b'"epoch": 0', broken or b'"epoch": 0')[:-9])
        reader = StepReader(path)
        assert reader.read().last_step == 800
        with path.open("ab") as file:
            file.write(first[-9:] + b"\n" + rest)
        found.append(reader.read())
    one, other = found
    assert one.damaged == other.damaged
    for part in ("train", "validation", "intervals"):
        columns = [*getattr(one, part).items()]
        assert all(np.array_equal(values, getattr(other, part)[name], equal_nan=True) for name, values in columns)


def test_lines_of_a_real_run_are_parsed_together():
    assert _parsed((COMMITTED / "demo-zero1" / "metrics.jsonl").read_bytes()).num_rows == 804


@pytest.mark.parametrize("steps", [2, 9], ids=["shorter", "longer"])
def test_a_file_that_another_run_writes_anew_is_read_anew(tmp_path, steps):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, 5.0) for step in range(1, 6)))
    reader = StepReader(path)
    assert reader.read().last_step == 5
    path.write_text("".join(line(step, 7.0) for step in range(1, steps + 1)))  # the inode stays the same
    assert reader.read().train["loss"].tolist() == [7.0] * steps


def test_a_step_that_was_written_twice_counts_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 1.0) + line(2, 2.0) + line(3, 3.0) + line(2, 9.0))
    steps = StepReader(path).read()
    assert steps.train["step"].tolist() == [1, 2, 3] and steps.train["loss"].tolist() == [1.0, 9.0, 3.0]


def test_downsampling_keeps_every_peak_and_both_ends():
    values = np.zeros(10_000)
    values[[777, 5001]] = 9.0, -9.0
    values[:3] = np.nan
    places = thinned(values, points=100)
    assert len(places) <= 100 and {0, 777, 5001, 9999} <= {*places.tolist()}
    assert thinned(values[:50], points=100).tolist() == list(range(50))


def test_smoothing_is_the_trailing_mean_of_what_is_known():
    assert smoothed(np.array([1.0, np.nan, 3.0, 5.0]), window=2).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_pictures_join_points_in_their_order_and_colour_strategies():
    curve = lines(["one", "static"], x="tokens/s", y="latency (s)", ordered=True)
    assert curve["encoding"]["order"]["field"] == "order"
    cells = ["ddp on 1 device", "ddp on 2 devices", "zero1 on 2 devices"]
    drawn = bars(cells, x="speed-up", values=[1.0, 2.0, 1.9], groups=["ddp", "ddp", "zero1"])["layer"][0]
    assert drawn["encoding"]["color"]["field"] == "group"
    assert drawn["encoding"]["color"]["scale"]["domain"] == ["ddp", "zero1"]
    for axis in (curve["encoding"]["x"]["axis"], drawn["encoding"]["x"]["axis"]):
        assert "format" not in axis  # which would write 0.002 as 2m


def test_names_lead_nowhere_else(tmp_path):
    runs = tmp_path / "runs"
    (runs / "a").mkdir(parents=True)
    (runs / "a" / "training_metrics.json").write_text("{}")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "training_metrics.json").write_text("{}")
    (runs / "link").symlink_to(secret)
    (runs / "a" / "metrics.jsonl").symlink_to(secret / "training_metrics.json")
    assert contents(runs).runs == ("a",)
    assert inside(runs, "a") == runs / "a"
    for name in ("../secret", "/etc", "a/../../secret", "link", "", "a\0b", "nothing"):
        with pytest.raises(UserError):
            inside(runs, name)
    with pytest.raises(UserError, match="is a link"):
        own_file(runs / "a", "metrics.jsonl")
    assert own_file(runs / "a", "hardware.jsonl") is None


def test_the_committed_records_are_found():
    found = contents(COMMITTED.parent)
    assert found.runs == ("cpu-2-cores/demo-baseline", "cpu-2-cores/demo-zero1")
    assert found.sweeps == tuple(f"cpu-2-cores/sweep-{name}.json" for name in ("scaling", "strategies"))


def test_a_lock_is_seen_without_touching_it(tmp_path):
    """Also of another process, until it is killed."""
    path = tmp_path / ".lock"
    with Lock.of_file(path) as lock:
        assert holder_of(path) is None
        lock.take()
        assert holder_of(path) == os.getpid()
    assert holder_of(path) is None
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert signs_of_life(tmp_path).process == other.pid
        other.kill()
        other.wait()
    assert signs_of_life(tmp_path).process is None
    with pytest.raises(FileNotFoundError):
        holder_of(tmp_path / "none")


def signs(process: int | None = None, *, locks_known: bool = True, silent_sec: float | None = 1.0) -> Signs:
    return Signs(process, locks_known, silent_sec)


def test_a_record_that_says_running_is_believed_only_while_something_lives(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    cases = {
        ("completed", "here", signs()): Status.FINISHED,
        ("interrupted", "here", signs()): Status.INTERRUPTED,
        ("failed", "there", signs()): Status.FAILED,
        (None, None, signs()): Status.UNKNOWN,
        ("running", "here", signs(7)): Status.RUNNING,
        ("running", "here", signs()): Status.ABANDONED,
        ("running", None, signs()): Status.ABANDONED,
        ("running", "there", signs()): Status.RUNNING,
        ("running", "there", signs(silent_sec=SILENT_SEC)): Status.ABANDONED,
        ("running", "here", signs(locks_known=False)): Status.RUNNING,
        ("running", "here", signs(locks_known=False, silent_sec=None)): Status.ABANDONED,
    }
    for (recorded, host, seen), expected in cases.items():
        assert status_of(recorded, host=host, signs=seen)[0] == expected, (recorded, host, seen)


SMALL = PRESETS["small"].as_dict()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_size": "small", "model": SMALL | {"vocab_size": 9, "dropout": 0.1}, "parameters": 9e7}, "small (90M)"),
        ({"model_size": "small", "model": SMALL | {"n_layer": 1}, "parameters": 4.5e5}, "1 x 768 (0.45M)"),
        ({"model_size": "small", "model": SMALL | {"block_size": 512}}, "12 x 768"),
        ({"model_size": "small", "model": SMALL | {"n_head": 6}}, "12 x 768"),
        ({"model_size": "distilgpt2", "model": SMALL | {"n_layer": 6}, "parameters": 82e6}, "distilgpt2 (82M)"),
        ({"model": {"n_layer": 2, "n_embd": 64}, "parameters": 1.5e9}, "2 x 64 (1.5B)"),
        ({"model_size": "xl"}, "xl"),
        ({"parameters": 2e6}, "2M"),
        ({}, None),
    ],
)  # fmt: skip
def test_a_model_is_called_by_its_size_only_if_it_has_its_shape(config, name):
    assert model_name(Fields(config, notes=[])) == name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://a.b/c now", "see `https://a.b/c` now"),
        ("www.a.b or me@a.b", "`www.a.b` or `me@a.b`"),
        (":a::smile:x :+1:www.a.b", "`:a::smile:`x `:+1:www.a.b`"),
        ("2026-11-23T05:32:05+00:00", r"2026\-11\-23T05\:32\:05\+00\:00"),
        ("`www.a`b", r"\``www.a`\`b"),
    ],
)
def test_what_streamlit_replaces_behind_a_backslash_is_code(text, shown):
    assert plain(text) == shown
