"""What a run does with files that it finds in its folder, and the lock that keeps others out."""

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest
from messages import without_paths
from run_folders import Killed, errors, resume
from small_run import command_line, write_inputs

from dsgpt.training import run, trainer
from dsgpt.training.command import train


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flag", ["resume", "overwrite", None])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "latest", "train.log", "RUN_COMPLETE.txt", "training_metrics.json", "metrics.jsonl"),
        *("hardware.jsonl", "hardware-12.jsonl"),
    ],
)
def test_foreign_files_are_refused_and_kept(finished_run, tmp_path, capsys, name, flag):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / name).write_text('{"architectures": ["Llama"]}')
    flags = {flag: True} if flag else {}
    assert train(command_line(finished_run, checkpoint_path=folder, **flags)) == 2
    (line,) = errors(capsys)
    assert f"holds a {name} that this program did not write: name another folder" in line
    assert [path.name for path in folder.iterdir()] == [name]


def test_foreign_files_of_other_steps_are_kept(finished_run, tmp_path, capsys):
    """Another program's log of its steps proves nothing, and nothing next to it is ours either."""
    (folder := tmp_path / "theirs").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (folder / "config.json").write_text("{}")
    assert train(command_line(finished_run, checkpoint_path=folder, overwrite=True)) == 2
    assert "that this program did not write" in errors(capsys)[0]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl"]


def test_a_run_of_which_only_the_steps_are_left_is_ours(copied_run, finished_run):
    for path in copied_run.iterdir():
        if path.name != "metrics.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert resume(copied_run, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0


@pytest.mark.parametrize("name", ["step-7", "step-0000000012", "step-00000007.bak", ".partial-step-3"])
def test_folders_of_similar_names_are_kept(finished_run, tmp_path, name):
    folder = tmp_path / "run"
    (folder / name).mkdir(parents=True)
    (folder / name / "theirs").write_text("mine")
    flags = {"checkpoint_path": folder, "max_train_steps": 1}
    assert train(command_line(finished_run, **flags)) == 0
    assert train(command_line(finished_run, **flags, overwrite=True)) == 0
    assert (folder / name / "theirs").read_text() == "mine"


def test_links_are_removed_and_never_followed(finished_run, copied_run, tmp_path):
    copy, outside = copied_run, tmp_path / "outside"
    shutil.move(copy / "step-00000003", outside)
    (copy / "step-00000003").symlink_to(outside)
    (copy / "step-00000099").symlink_to(tmp_path / "nowhere")
    before = tree(outside)
    assert resume(copy, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert [path.name for path in copy.glob("step-*")] == ["step-00000001"]
    assert tree(outside) == before


def test_a_lock_file_alone_is_not_a_run(finished_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_second_process_is_refused(finished_run, copied_run, monkeypatch, capsys, snapshot, flag):
    copy = copied_run
    monkeypatch.setattr(run, "PATIENCE_SEC", 0.1)
    before = tree(copy)
    with (copy / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert resume(copy, finished_run, **{"resume": None, flag: True}) == 2
    (line,) = errors(capsys)
    assert without_paths(line, copy) == snapshot
    assert tree(copy) == before


def test_the_lock_is_held_while_training(finished_run, tmp_path, monkeypatch):
    def probe(*args: Any, **kwargs: Any) -> None:
        with (tmp_path / "run" / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(trainer.Trainer, "fit", probe)
    monkeypatch.setattr(trainer, "mark_complete", lambda *args: None)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0


def test_a_run_that_was_killed_while_overwriting_is_not_resumed(finished_run, copied_run, monkeypatch, capsys):
    copy = copied_run
    shutil.copytree(copy / "step-00000009", copy / "step-00000008.damaged")
    monkeypatch.setattr(shutil, "rmtree", Killed.now)
    with pytest.raises(Killed):
        resume(copy, finished_run, resume=None, overwrite=True)
    monkeypatch.undo()
    assert not (copy / "RUN_COMPLETE.txt").exists()
    assert not list(copy.glob("step-*"))
    capsys.readouterr()
    assert resume(copy, finished_run) == 0
    assert "did not finish; starting fresh" in capsys.readouterr().out


def test_nothing_is_written_before_the_strategy_accepts(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_strategy", Killed.now)
    with pytest.raises(Killed):
        train(command_line(finished_run, checkpoint_path=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_tokenizer_that_made_the_data_is_kept(tmp_path):
    folder = write_inputs(tmp_path)
    assert train(command_line(folder)) == 0
    kept = folder / "run" / "step-00000002" / "tokenizer"
    assert (kept / "tokenizer.json").read_bytes() == (folder / "tokenizer" / "tokenizer.json").read_bytes()
