"""``--resume`` removes nothing of a run whose checkpoints are gone, and loads nothing that no manifest vouches for."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from run_folders import LONG, Killed, checkpoints, errors, go_on, record
from small_run import command_line
from test_going_on import rewrite

from dsgpt.main import train
from dsgpt.training import saving
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


def leave_lines_alone(run_dir: Path) -> None:
    move_all_and_lose_latest(run_dir)
    (run_dir / "training_metrics.json").unlink()


def leave_a_damaged_record(run_dir: Path) -> None:
    move_all_and_lose_latest(run_dir)
    (run_dir / "training_metrics.json").write_text('{"schema_version": "2.1", "training_config": {}, "saves": 3}')


def leave_latest_alone(run_dir: Path) -> None:
    move_all(run_dir)
    for name in ("training_metrics.json", "metrics.jsonl"):
        (run_dir / name).unlink()


LOSSES = {
    move_all: "latest names step-00000012, which is not there",
    move_all_and_lose_latest: "its training_metrics.json says that step-00000006, step-00000009, step-00000012 were "
    "saved",
    leave_lines_alone: "it has metrics.jsonl, and no training_metrics.json says whether any was saved",
    leave_a_damaged_record: "its training_metrics.json is damaged (saves: Input should be a valid array, not 3)",
    leave_latest_alone: "latest names step-00000012, which is not there",
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_run_without_its_checkpoints_is_refused_and_kept(stopped, finished_run, capsys, loss):
    loss(stopped)
    before = tree(stopped)
    assert go_on(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert f"{stopped} holds a run but none of its checkpoints: {LOSSES[loss]}" in line
    assert line.endswith("or start anew with --overwrite")
    assert tree(stopped) == before
    assert go_on(stopped, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert checkpoints(stopped) == [1]


def test_a_newest_checkpoint_that_is_gone_is_told_of(stopped, finished_run, capsys):
    """The steps after the next older one are taken again."""
    assert go_on(stopped, finished_run) == 0
    assert f"--resume: {stopped}/latest names step-00000012, which is not there" in capsys.readouterr().out


def test_a_finished_run_without_its_checkpoints_is_refused_too(copied_run, finished_run, capsys):
    """Nothing says what it was made with: another seed, or more steps, passed for the finished run."""
    move_all(copied_run)
    before = tree(copied_run)
    assert go_on(copied_run, finished_run, seed=99) == 2
    assert "latest names step-00000012, which is not there" in errors(capsys)[0]
    assert tree(copied_run) == before


def test_a_killed_run_knows_what_it_saved(finished_run, tmp_path, monkeypatch, capsys):
    """The record of a run that is killed after a save names it: else its loss would pass for a run without any."""
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
def test_a_run_that_was_being_overwritten_is_not_gone_on_with(stopped, finished_run, capsys, left):
    """However many checkpoints a kill left; what retention was removing says nothing."""
    for step in (9, 6, 3)[: 3 - left]:
        (stopped / f"step-{step:08d}").rename(stopped / f".partial-step-{step:08d}.overwritten")
    assert go_on(stopped, finished_run) == 0
    assert f"--resume: an --overwrite of {stopped} was cut off; starting fresh" in capsys.readouterr().out
    assert record(stopped)["resumed_from"] is None


def test_what_retention_was_removing_excuses_nothing(stopped, finished_run):
    move_all_and_lose_latest(stopped)
    (stopped / ".partial-step-00000003.old").mkdir()
    before = tree(stopped)
    assert go_on(stopped, finished_run) == 2
    assert tree(stopped) == before


@pytest.mark.parametrize("name", [b"\xff" * 190, b"x" * 300, b"step-00000009\0", b"../elsewhere", b""])
def test_a_damaged_latest_is_told_and_does_no_harm(stopped, finished_run, capsys, name):
    (stopped / "latest").write_bytes(name)
    assert go_on(stopped, finished_run) == 0
    assert f"{stopped}/latest names " in capsys.readouterr().out
    assert record(stopped)["resumed_from"] == "step-00000009"


def test_checkpoints_that_come_back_are_gone_on_from(stopped, finished_run):
    move_all(stopped)
    assert go_on(stopped, finished_run) == 2
    for checkpoint in stopped.parent.glob("moved-step-*"):
        shutil.move(checkpoint, stopped / checkpoint.name.removeprefix("moved-"))
    assert go_on(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"


def test_a_run_killed_before_its_first_checkpoint_starts_afresh(finished_run, tmp_path, monkeypatch, capsys):
    """As a launcher that restarts it needs: it has lost nothing but steps that nobody saved."""
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
def test_the_only_checkpoint_is_put_back_also_without_a_lock_file(stopped, finished_run, lock):
    """A copied run folder may lack the lock file; the checkpoint that was being replaced was then deleted."""
    for step in (3, 6):
        shutil.rmtree(stopped / f"step-{step:08d}")
    (stopped / "step-00000009").rename(stopped / ".partial-step-00000009.replaced")
    if not lock:
        (stopped / ".lock").unlink()
    assert go_on(stopped, finished_run) == 0
    assert record(stopped)["resumed_from"] == "step-00000009"


@pytest.mark.parametrize("lost", [2, 7])
def test_a_lost_and_a_doubled_line_do_not_make_up_for_each_other(stopped, finished_run, lost):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    steps = {json.loads(line)["step"]: line for line in log if "loss" in json.loads(line)}
    log[log.index(steps[lost])] = steps[lost + 1]
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert go_on(stopped, finished_run) == 0
    assert record(stopped)["summary"]["train_time_sec"] is None
    assert record(stopped)["summary"]["optimizer_steps"] == 12


def test_a_file_system_without_locks_is_told_of(finished_run, tmp_path, monkeypatch, capsys):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0
    said = capsys.readouterr().out
    assert f"warning: the file system of {tmp_path}/run has no locks (No locks available)" in said


def forget_all(checkpoint: Path) -> None:
    change_manifest(checkpoint, files={})


def forget_the_moments(checkpoint: Path) -> None:
    """They are there, and would be read, but nothing says what they must be."""
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


def spoil_the_random_state(checkpoint: Path) -> None:
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


FORGERIES = {
    forget_all: "files: Dictionary should have at least 1 item",
    forget_the_moments: "names no optimizer.safetensors: the checkpoint is incomplete",
    forget_the_random_state: "its manifest names no random-00000.safetensors",
    list_the_ranks: "topology: Input should be an object, not []",
    nest_deeply: "its objects and arrays are nested more than",
    spoil_the_random_state: "holds no random state (cpu) of this version of PyTorch",
    name_a_file_too_long: "is longer than any file system allows",
    mistype_the_state: "run_state.json: is no run state of this version (epochs: Input should be a valid array, not 3",
    forget_an_epochs_steps: "epochs.0.steps: Field required",
    mistype_an_epochs_steps: "epochs.0.steps: Input should be a valid integer, not 5.0",
    forget_an_epochs_time: "epochs.0.train_time_sec: Field required",
    mistype_an_epochs_loss: "epochs.0.val_loss_avg_global: Input should be a valid number, not 'low'",
    forget_when_it_changed: "changes.0.step: Field required",
    take_another_step: "is of step 8, and its manifest says 9",
}


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_what_no_manifest_vouches_for_is_not_loaded(stopped, finished_run, capsys, forgery):
    forgery(stopped / "step-00000009")
    assert go_on(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is refused" in line]
    assert FORGERIES[forgery] in line
    assert record(stopped)["resumed_from"] == "step-00000006"


def test_a_damaged_record_costs_the_saves_and_is_told(stopped, finished_run, capsys):
    (stopped / "training_metrics.json").write_text('{"schema_version": "2.1", "training_config": {}, "summary": []}')
    assert go_on(stopped, finished_run) == 0
    assert "training_metrics.json is damaged (summary: Input should be an object, not [])" in capsys.readouterr().out
    assert [save["step"] for save in record(stopped)["saves"]] == [12]
