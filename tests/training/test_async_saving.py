"""Checkpoints that are written while training continues."""

import threading
from pathlib import Path
from typing import Any

import pytest
from messages import without_paths
from run_folders import LONG, checkpoints, errors, record
from safetensors.torch import load_file
from small_run import command_line

from dsgpt.checkpoints import training_state
from dsgpt.training import saving as checkpoint
from dsgpt.training.command import train
from dsgpt.training.journal import Journal


def trained(finished_run: Path, run_dir: Path, **flags: Any) -> int:
    """The run of ``finished_run`` once more, with checkpoints in the background."""
    return train(command_line(finished_run, **LONG | {"checkpoint_path": run_dir, "save_mode": "async"} | flags))


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(finished_run, tmp_path, monkeypatch, capsys):
    """The one of step 3 is not written before step 5 was taken; the next save waits for it."""
    taken = threading.Event()
    original_step, original_write = Journal.step_done, checkpoint.write_training_state

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        original_step(self, *args, step=step, **values)
        if step == 5:
            taken.set()

    def write(*args: Any, **values: Any) -> list[str]:
        assert taken.wait(60)
        return original_write(*args, **values)

    monkeypatch.setattr(Journal, "step_done", step_done)
    monkeypatch.setattr(checkpoint, "write_training_state", write)
    assert trained(finished_run, tmp_path / "run") == 0
    assert checkpoints(tmp_path / "run") == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (
                load_file(run / f"step-{step:08d}" / name) for run in (tmp_path / "run", finished_run / "run")
            )
            assert ours.keys() == theirs.keys()
            assert all(ours[key].equal(theirs[key]) for key in theirs), (step, name)
    saves = record(tmp_path / "run")["saves"]
    assert [(save["step"], save["mode"]) for save in saves] == [(3, "async"), (6, "async"), (9, "async"), (12, "sync")]
    assert all(0 < save["save_stall_sec"] <= save["save_total_sec"] for save in saves)
    assert saves[0]["save_stall_sec"] < saves[0]["save_total_sec"]
    assert saves[0]["bytes"] > 1000
    assert "s; training waited 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failure_in_the_background_is_reported(finished_run, tmp_path, monkeypatch, capsys, snapshot, policy):
    original = checkpoint.store.publish

    def publish(run_dir: Path, folder: Path, **values: Any) -> Path:
        if folder.name.endswith("6"):
            raise OSError(28, "No space left on device", str(folder))
        return original(run_dir, folder, **values)

    monkeypatch.setattr(checkpoint.store, "publish", publish)
    code = trained(finished_run, tmp_path / "run", on_save_failure=policy)
    assert not list((tmp_path / "run").glob(".partial-*"))
    if policy == "stop":
        assert code == 4
        (line,) = errors(capsys)
        assert checkpoints(tmp_path / "run") == [3]
        assert record(tmp_path / "run")["status"] == "failed"
    else:
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "not saved" in line]
        assert code == 0
        assert checkpoints(tmp_path / "run") == [3, 9, 12]
        assert record(tmp_path / "run")["summary"]["failed_saves"] == 1
    assert without_paths(line, tmp_path) == snapshot


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("no memory")], ids=repr)
def test_a_failure_in_the_background_does_not_keep_the_last_step_from_being_saved(
    finished_run, tmp_path, monkeypatch, capsys, error
):
    original, last = checkpoint.store.publish, threading.Event()
    original_step = Journal.step_done

    def publish(run_dir: Path, folder: Path, **values: Any) -> Path:
        if folder.name.endswith("9"):
            assert last.wait(60)
            raise error
        return original(run_dir, folder, **values)

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        original_step(self, *args, step=step, **values)
        if step == 12:
            last.set()
            for thread in threading.enumerate():
                if thread.name == "background":
                    thread.join()  # its failure may be noticed before the last save, and must not end the run there

    monkeypatch.setattr(checkpoint.store, "publish", publish)
    monkeypatch.setattr(Journal, "step_done", step_done)
    assert trained(finished_run, tmp_path / "run") == 0
    assert "step      9/12  not saved: " in (said := capsys.readouterr().out)
    assert "earlier checkpoints are untouched; the current step is saved now" in said
    assert checkpoints(tmp_path / "run") == [3, 6, 12]


def test_memory_that_cannot_be_allocated_is_a_failed_save(finished_run, tmp_path, monkeypatch, capsys):
    def keep(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(training_state, "_copied", keep)
    assert trained(finished_run, tmp_path / "run", on_save_failure="continue") == 0
    assert capsys.readouterr().out.count("not saved: rank 0: RuntimeError: can't allocate memory") == 3
    assert checkpoints(tmp_path / "run") == [12]
    assert not list((tmp_path / "run").glob(".partial-*"))


def test_a_run_that_fails_completes_its_last_checkpoint(finished_run, tmp_path, monkeypatch):
    """A run that an error ends does not lose a checkpoint that is nearly written."""
    original, failing = checkpoint.write_training_state, threading.Event()

    def write(*args: Any, **values: Any) -> list[str]:
        assert failing.wait(60)
        return original(*args, **values)

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        if step == 4:
            failing.set()
            raise RuntimeError("a fault")

    monkeypatch.setattr(checkpoint, "write_training_state", write)
    monkeypatch.setattr(Journal, "step_done", step_done)
    with pytest.raises(RuntimeError, match="a fault"):
        trained(finished_run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [3]
    assert [save["step"] for save in record(tmp_path / "run")["saves"]] == [3]


def test_a_run_that_fails_reports_an_earlier_failed_save(finished_run, tmp_path, monkeypatch, capsys):
    def write(*args: Any, **values: Any) -> list[str]:
        raise OSError(28, "No space left on device")

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        if step == 4:
            raise RuntimeError("a fault")

    monkeypatch.setattr(checkpoint, "write_training_state", write)
    monkeypatch.setattr(Journal, "step_done", step_done)
    with pytest.raises(RuntimeError, match="a fault"):
        trained(finished_run, tmp_path / "run")
    assert (
        "step      3/12  not saved: No space left on device; earlier checkpoints are untouched"
        in capsys.readouterr().out
    )
    assert record(tmp_path / "run")["summary"]["failed_saves"] == 1
