"""``--resume`` removes nothing of a run whose checkpoints are missing, and loads only what the manifest verifies."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from messages import without_paths
from run_folders import LONG, Killed, checkpoints, errors, record, resume, rewrite
from small_run import command_line

from dsgpt.training import saving
from dsgpt.training.command import train
from dsgpt.training.journal import Journal


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def move_all(run_dir: Path) -> None:
    """As a disk that is not mounted: ``latest`` stays."""
    for checkpoint in run_dir.glob("step-*"):
        shutil.move(checkpoint, run_dir.parent / f"moved-{checkpoint.name}")


def move_all_and_lose_latest(run_dir: Path) -> None:
    move_all(run_dir)
    for name in ("latest", "best"):
        (run_dir / name).unlink(missing_ok=True)


def leave_only_lines(run_dir: Path) -> None:
    move_all_and_lose_latest(run_dir)
    (run_dir / "training_metrics.json").unlink()


def leave_a_damaged_record(run_dir: Path) -> None:
    move_all_and_lose_latest(run_dir)
    (run_dir / "training_metrics.json").write_text('{"schema_version": "2.1", "training_config": {}, "saves": 3}')


def leave_only_latest(run_dir: Path) -> None:
    move_all(run_dir)
    for name in ("training_metrics.json", "metrics.jsonl"):
        (run_dir / name).unlink()


LOSSES = [move_all, move_all_and_lose_latest, leave_only_lines, leave_a_damaged_record, leave_only_latest]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_run_without_its_checkpoints_is_refused_and_kept(stopped, finished_run, capsys, snapshot, loss):
    loss(stopped)
    before = tree(stopped)
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert tree(stopped) == before
    assert resume(stopped, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert checkpoints(stopped) == [1]


def test_a_missing_newest_checkpoint_is_reported(stopped, finished_run, capsys, snapshot):
    """The run repeats the steps since the newest one that exists."""
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "latest names" in line]
    assert without_paths(line, stopped) == snapshot


def test_a_finished_run_without_its_checkpoints_is_refused_too(copied_run, finished_run, capsys):
    """Without them its settings are unknown: a run with another seed could pass for the finished one."""
    move_all(copied_run)
    before = tree(copied_run)
    assert resume(copied_run, finished_run, seed=99) == 2
    assert "latest names step-00000012, which does not exist" in errors(capsys)[0]
    assert tree(copied_run) == before


def test_the_record_of_a_killed_run_lists_its_saves(finished_run, tmp_path, monkeypatch, capsys):
    """Otherwise a run that lost its checkpoints would look like a run that never saved one."""
    flags = LONG | {"checkpoint_path": tmp_path / "run", "eval_every": 0, "steps_per_print": 1}
    done = Journal.step_done

    def killed_at_5(self: Journal, *args: object, step: int, **more: object) -> None:
        if step == 5:
            raise Killed
        done(self, *args, step=step, **more)

    monkeypatch.setattr(Journal, "step_done", killed_at_5)
    monkeypatch.setattr(Journal, "end_early", lambda *_: None)
    with pytest.raises(Killed):
        train(command_line(finished_run, **flags))
    monkeypatch.undo()
    assert [save["step"] for save in record(tmp_path / "run")["saves"]] == [3]
    move_all_and_lose_latest(tmp_path / "run")
    assert train(command_line(finished_run, **flags, resume=True)) == 2
    assert "says that step-00000003 was saved" in errors(capsys)[0]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_run_that_was_being_overwritten_is_not_resumed(stopped, finished_run, capsys, left):
    """However many checkpoints the kill left."""
    for step in (9, 6, 3)[: 3 - left]:
        (stopped / f"step-{step:08d}").rename(stopped / f".partial-step-{step:08d}.overwritten")
    assert resume(stopped, finished_run) == 0
    assert f"--resume: an --overwrite of {stopped} did not finish; starting fresh" in capsys.readouterr().out
    assert record(stopped)["resumed_from"] is None


def test_a_checkpoint_that_retention_was_removing_allows_no_fresh_start(stopped, finished_run):
    move_all_and_lose_latest(stopped)
    (stopped / ".partial-step-00000003.old").mkdir()
    before = tree(stopped)
    assert resume(stopped, finished_run) == 2
    assert tree(stopped) == before


@pytest.mark.parametrize(
    "name",
    [b"\xff" * 190, b"x" * 300, b"step-00000009\0", b"../elsewhere", b""],
    ids=["undecodable", "long", "null byte", "outside", "empty"],
)
def test_a_damaged_latest_is_reported_and_ignored(stopped, finished_run, capsys, snapshot, name):
    (stopped / "latest").write_bytes(name)
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "latest names" in line]
    assert without_paths(line, stopped) == snapshot
    assert record(stopped)["resumed_from"] == "step-00000009"


def test_checkpoints_that_are_moved_back_are_resumed(stopped, finished_run):
    move_all(stopped)
    assert resume(stopped, finished_run) == 2
    for checkpoint in stopped.parent.glob("moved-step-*"):
        shutil.move(checkpoint, stopped / checkpoint.name.removeprefix("moved-"))
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"


def test_a_run_killed_before_its_first_checkpoint_starts_fresh(finished_run, tmp_path, monkeypatch, capsys):
    """A launcher that restarts the run needs this. Only steps that were never saved are lost."""
    monkeypatch.setattr(saving, "open_checkpoint", Killed.now)
    flags = LONG | {"checkpoint_path": tmp_path / "run"}
    with pytest.raises(Killed):
        train(command_line(finished_run, **flags))
    monkeypatch.undo()
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert train(command_line(finished_run, **flags, resume=True)) == 0
    assert "holds no checkpoint yet; starting fresh" in capsys.readouterr().out
    assert record(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize("lock", [True, False])
def test_the_only_checkpoint_is_renamed_back_even_without_a_lock_file(stopped, finished_run, lock):
    """A copied run folder may lack the lock file: a defect once deleted the checkpoint that was being replaced."""
    for step in (3, 6):
        shutil.rmtree(stopped / f"step-{step:08d}")
    (stopped / "step-00000009").rename(stopped / ".partial-step-00000009.replaced")
    if not lock:
        (stopped / ".lock").unlink()
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"


@pytest.mark.parametrize("lost", [2, 7])
def test_a_lost_line_is_noticed_beside_a_repeated_one(stopped, finished_run, lost):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    steps = {json.loads(line)["step"]: line for line in log if "loss" in json.loads(line)}
    log[log.index(steps[lost])] = steps[lost + 1]
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert resume(stopped, finished_run) == 0
    assert record(stopped)["summary"]["train_time_sec"] is None
    assert record(stopped)["summary"]["optimizer_steps"] == 12


def test_a_file_system_without_locks_is_reported(finished_run, tmp_path, monkeypatch, capsys, snapshot):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has no locks" in line]
    assert without_paths(line, tmp_path) == snapshot


def forget_all(checkpoint: Path) -> None:
    change_manifest(checkpoint, files={})


def forget_the_moments(checkpoint: Path) -> None:
    """The file exists and would be read, but could not be verified."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    change_manifest(checkpoint, files={name: facts for name, facts in files.items() if name != "optimizer.safetensors"})


def forget_the_random_state(checkpoint: Path) -> None:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    change_manifest(checkpoint, files={name: facts for name, facts in files.items() if "random" not in name})


def change_manifest(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def list_the_ranks(checkpoint: Path) -> None:
    change_manifest(checkpoint, topology=[])


def nest_deeply(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("[" * 200_000)


def empty_the_random_state(checkpoint: Path) -> None:
    rewrite(checkpoint, checkpoint / "random-00000.safetensors", b"\x02\0\0\0\0\0\0\0{}")


def name_a_file_too_long(checkpoint: Path) -> None:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    change_manifest(checkpoint, files=files | {"x" * 300: {"size": 1, "sha256": "0" * 64}})


def mistype_the_state(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "run_state.json").read_text())
    rewrite(checkpoint, checkpoint / "run_state.json", json.dumps(state | {"epochs": 3}).encode())


def forget_an_epochs_steps(checkpoint: Path) -> None:
    change_an_epoch(checkpoint, {"steps": ...})


def mistype_an_epochs_steps(checkpoint: Path) -> None:
    change_an_epoch(checkpoint, {"steps": 5.0})


def forget_an_epochs_time(checkpoint: Path) -> None:
    change_an_epoch(checkpoint, {"train_time_sec": ...})


def mistype_an_epochs_loss(checkpoint: Path) -> None:
    change_an_epoch(checkpoint, {"val_loss_avg_global": "low"})


def change_an_epoch(checkpoint: Path, values: dict[str, object]) -> None:
    """``...`` removes a key."""
    state = json.loads((checkpoint / "run_state.json").read_text())
    epoch = state["epochs"][0] | values
    state["epochs"][0] = {key: value for key, value in epoch.items() if value is not ...}
    rewrite(checkpoint, checkpoint / "run_state.json", json.dumps(state).encode())


def forget_when_it_changed(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "run_state.json").read_text())
    change = {"name": "schedule", "before": None, "after": None}
    rewrite(checkpoint, checkpoint / "run_state.json", json.dumps(state | {"changes": [change]}).encode())


def take_another_step(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "run_state.json").read_text())
    rewrite(checkpoint, checkpoint / "run_state.json", json.dumps(state | {"step": 8}).encode())


FORGERIES = [
    forget_all,
    forget_the_moments,
    forget_the_random_state,
    list_the_ranks,
    nest_deeply,
    empty_the_random_state,
    name_a_file_too_long,
    mistype_the_state,
    forget_an_epochs_steps,
    mistype_an_epochs_steps,
    forget_an_epochs_time,
    mistype_an_epochs_loss,
    forget_when_it_changed,
    take_another_step,
]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_what_the_manifest_cannot_verify_is_not_loaded(stopped, finished_run, capsys, snapshot, forgery):
    forgery(stopped / "step-00000009")
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is refused" in line]
    assert without_paths(line, stopped) == snapshot
    assert record(stopped)["resumed_from"] == "step-00000006"


def test_a_damaged_record_is_reported_and_loses_the_earlier_saves(stopped, finished_run, capsys, snapshot):
    (stopped / "training_metrics.json").write_text('{"schema_version": "2.1", "training_config": {}, "summary": []}')
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert without_paths(line, stopped) == snapshot
    assert [save["step"] for save in record(stopped)["saves"]] == [12]
