"""A resumed run continues the same run; damage is refused, or reported and survived."""

import json
import shutil
from pathlib import Path

import pytest
from messages import without_paths
from run_folders import LONG, checkpoints, damage, errors, record, resume, rewrite
from small_run import command_line, write_recipe

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import read_manifest, read_run_state
from dsgpt.training.command import train


def test_a_resumed_run_keeps_its_identity(stopped, finished_run):
    old, config = record(stopped), (stopped / "config.json").read_bytes()
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["run_id"] == old["run_id"]
    assert record(stopped)["resumed_from"] == "step-00000009"
    assert (stopped / "config.json").read_bytes() == config


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_resumes_bit_for_bit(finished_run, tmp_path, momentum):
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": momentum}}
    flags = LONG | {"deepspeed_config": write_recipe(tmp_path / "sgd.json", optimizer=sgd)}
    flags |= {"checkpoint_path": tmp_path / "run"}
    assert train(command_line(finished_run, **flags)) == 0
    last = tmp_path / "run" / "step-00000012"
    weights = (last / "model.safetensors").read_bytes()
    assert (last / "optimizer.safetensors").exists() == (momentum > 0)
    (tmp_path / "run" / "RUN_COMPLETE.txt").unlink()
    shutil.rmtree(last)
    assert train(command_line(finished_run, **flags, resume=True)) == 0
    assert (last / "model.safetensors").read_bytes() == weights


def test_wall_time_of_an_epoch_that_was_interrupted(stopped, finished_run):
    state = read_run_state(stopped / "step-00000009")
    file = stopped / "step-00000009" / "run_state.json"
    values = json.loads(file.read_text()) | {"wall_time_sec": state.wall_time_sec + 100}
    rewrite(stopped / "step-00000009", file, json.dumps(values).encode())
    assert resume(stopped, finished_run) == 0
    found = record(stopped)
    walls = [epoch["epoch_wall_time_sec"] for epoch in found["epochs"]]
    assert walls[1] > 100
    assert sum(walls) <= found["summary"]["total_wall_time_sec"] < sum(walls) + 30


@pytest.mark.parametrize("checkpoint", ["step-00000009", "step-00000012"])
def test_a_lost_log_makes_sums_unknown(finished_run, copied_run, checkpoint):
    copy = copied_run
    (copy / "RUN_COMPLETE.txt").unlink()
    (copy / "metrics.jsonl").unlink()
    if checkpoint == "step-00000009":
        shutil.rmtree(copy / "step-00000012")
    losses = record(copy)["summary"]["final_train_loss"], record(copy)["summary"]["final_val_loss"]
    assert resume(copy, finished_run) == 0
    summary = record(copy)["summary"]
    assert (summary["final_train_loss"], summary["final_val_loss"]) == losses
    assert (summary["optimizer_steps"], summary["train_time_sec"]) == (12, None)


def test_damaged_lines_are_dropped_and_reported(stopped, finished_run, capsys, snapshot):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    log[2] = b"\0" * 40 + b"\n"
    log[4] = b"{oops\xff}\n"
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "damaged lines" in line]
    assert without_paths(line, stopped) == snapshot
    assert record(stopped)["status"] == "completed"


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "optimizer.safetensors").unlink()


def cut_a_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"...")


def flip_a_bit(checkpoint: Path) -> None:
    damage(checkpoint / "optimizer.safetensors")


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def lose_the_settings(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "fixed"}))


def garble_the_state(checkpoint: Path) -> None:
    rewrite(checkpoint, checkpoint / "run_state.json", b'{"step": 9}')


HARMS = [lose_a_file, cut_a_file, flip_a_bit, lose_the_manifest, lose_the_settings, garble_the_state]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_the_checkpoint_before_a_damaged_one_is_resumed(stopped, finished_run, capsys, snapshot, harm):
    harm(stopped / "step-00000009")
    assert resume(stopped, finished_run) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "is refused" in line]
    assert "step-00000009" in line
    assert without_paths(line, stopped) == snapshot
    assert f"resuming from {stopped / 'step-00000006'}" in lines
    assert record(stopped)["resumed_from"] == "step-00000006"
    assert (stopped / "step-00000009.damaged").is_dir()
    assert checkpoints(stopped) == [3, 6, 9, 12]


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(stopped, finished_run):
    damage(stopped / "step-00000009" / "model.safetensors")
    assert resume(stopped, finished_run, keep_checkpoints=2, max_train_steps=12) == 0
    assert checkpoints(stopped) == [9, 12]
    for step in (9, 12):
        read_manifest(stopped / f"step-{step:08d}")


def test_an_error_lists_the_checkpoints_if_all_are_damaged(stopped, finished_run, capsys, snapshot):
    for step in (3, 6, 9):
        flip_a_bit(stopped / f"step-{step:08d}")
    assert resume(stopped, finished_run) == 2
    first, *reasons = errors(capsys)
    assert without_paths(first, stopped) == snapshot
    assert [line.split()[2] for line in reasons] == ["step-00000009", "step-00000006", "step-00000003"]
    assert checkpoints(stopped) == [3, 6, 9]


def test_refused_checkpoints_are_not_forgotten(stopped, finished_run, capsys, snapshot):
    """One was marked as damaged, and the others were lost later: a fresh start would remove what is left."""
    damage(stopped / "step-00000009" / "model.safetensors")
    store.mark_damaged(stopped / "step-00000009")
    for step in (3, 6):
        store.discard(stopped / f"step-{step:08d}")
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert (stopped / "step-00000009.damaged").is_dir()


def test_a_checkpoint_that_was_being_replaced_is_resumed(stopped, finished_run):
    newest = stopped / "step-00000009"
    newest.rename(stopped / ".partial-step-00000009.replaced")
    shutil.copytree(stopped / "step-00000006", stopped / ".partial-step-00000009")
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"


def test_a_finished_run_stays_finished_whatever_its_newest_checkpoint_says(copied_run, finished_run, capsys):
    (copied_run / "step-00000012" / "manifest.json").write_text("{")
    assert resume(copied_run, finished_run) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_lost_latest_and_stale_folders_do_not_matter(stopped, finished_run):
    (stopped / "latest").unlink()
    for name in (".partial-step-00000010", ".partial-step-00000003.old"):
        (stopped / name).mkdir()
        (stopped / name / "half").write_bytes(b"...")
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"
    assert (stopped / "latest").read_text() == "step-00000012\n"
    assert not list(stopped.glob(".partial-*"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 7}, "seed"),
        ({"max_train_steps": 10}, "total steps"),
        ({"max_val_steps": 1}, "validation windows"),
    ],
)
def test_a_finished_run_with_other_settings_is_refused(finished_run, capsys, changes, name):
    assert resume(finished_run / "run", finished_run) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert resume(finished_run / "run", finished_run, **changes) == 2
    assert any(line.startswith(f"error: --resume: {name} is ") for line in errors(capsys))
