"""The run folder: what it holds, what is never wiped, and links that are not followed."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save
from small_run import command_line, without_paths, write_inputs
from training_runs import LONG, Killed, checkpoints, damage, errors, read_record, resume, rewrite

from dsgpt.training import run, saving, trainer
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal

# What a run does with files that it finds in its folder, and the lock that keeps others out.


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


FOREIGN = ("config.json", "latest", "train.log", "RUN_COMPLETE.txt", "training_metrics.json", "train-12.log")


@pytest.mark.parametrize("name", [*FOREIGN, "metrics.jsonl", "trackers"])
def test_foreign_files_are_refused_and_kept(finished_run, tmp_path, capsys, name):
    """Another program's log of its steps proves nothing, either."""
    folder = tmp_path / "theirs"
    file = folder / name / "notes.txt" if name == "trackers" else folder / name
    file.parent.mkdir(parents=True)
    file.write_text('{"step": 1, "loss": 2.5, "architectures": ["Llama"]}\n')
    for flag in ("resume", "overwrite"):
        assert train_here(command_line(finished_run, checkpoint_path=folder, **{flag: True})) == 2
        (line,) = errors(capsys)
        assert f"holds a {name} that this program did not write: name another folder" in line
    assert [path for path in folder.rglob("*") if path.is_file()] == [file]


def test_files_and_folders_of_similar_names_are_kept(finished_run, tmp_path):
    folder = tmp_path / "run"
    names = ("step-7", "step-0000000012", "step-00000007.bak", ".partial-step-3")
    theirs = [folder / name / "theirs" for name in names]
    for file in theirs:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    (folder / "notes.txt").write_text("mine")
    flags = {"checkpoint_path": folder, "max_train_steps": 1}
    assert train_here(command_line(finished_run, **flags, track="csv")) == 0
    assert train_here(command_line(finished_run, **flags | {"max_train_steps": 2}, overwrite=True)) == 0
    assert not (folder / "trackers").exists()
    assert [file.read_text() for file in (*theirs, folder / "notes.txt")] == ["mine"] * 5
    assert [path.name for path in folder.glob("step-????????")] == ["step-00000002"]


def test_links_are_removed_and_never_followed(finished_run, copied_run, tmp_path):
    copy, outside = copied_run, tmp_path / "outside"
    outside.mkdir()
    for name in ("step-00000003", "train.log"):
        (copy / name).rename(outside / name)
        (copy / name).symlink_to(outside / name)
    (copy / "step-00000099").symlink_to(tmp_path / "nowhere")
    before = contents(outside)
    assert resume(copy, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert [path.name for path in copy.glob("step-*")] == ["step-00000001"]
    assert not (copy / "train.log").is_symlink()
    assert contents(outside) == before


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_second_process_is_refused(finished_run, copied_run, monkeypatch, capsys, snapshot, flag):
    copy = copied_run
    monkeypatch.setattr(run, "PATIENCE_SEC", 0.1)
    before = contents(copy)
    with (copy / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert resume(copy, finished_run, **{"resume": None, flag: True}) == 2
    (line,) = errors(capsys)
    assert without_paths(line, copy) == snapshot
    assert contents(copy) == before


def test_the_lock_is_held_while_training(finished_run, tmp_path, monkeypatch):
    def probe(*args: Any, **kwargs: Any) -> None:
        with (tmp_path / "run" / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()  # which alone is not a run
    monkeypatch.setattr(trainer.Trainer, "fit", probe)
    monkeypatch.setattr(trainer, "mark_complete", lambda *args, **kwargs: None)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0


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
        train_here(command_line(finished_run, checkpoint_path=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# `--resume` removes nothing of a run whose checkpoints are missing, and loads only what the manifest verifies.


def move_all(run_dir: Path, *, losing: tuple[str, ...] = ()) -> None:
    """As a disk that is not mounted: ``latest`` stays, unless it is among the files that are lost, too."""
    for checkpoint in run_dir.glob("step-*"):
        shutil.move(checkpoint, run_dir.parent / f"moved-{checkpoint.name}")
    for name in losing:
        (run_dir / name).unlink(missing_ok=True)


NAMES, RECORD, LINES = ("latest", "best"), "training_metrics.json", "metrics.jsonl"
LOSSES = {
    "move_all": (),
    "move_all_and_lose_latest": NAMES,
    "leave_only_lines": (*NAMES, RECORD),
    "leave_a_damaged_record": NAMES,
    "leave_only_latest": (RECORD, LINES),
    "leave_what_retention_was_removing": NAMES,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_without_its_checkpoints_is_refused_and_kept(stopped, finished_run, capsys, snapshot, loss):
    move_all(stopped, losing=LOSSES[loss])
    if loss == "leave_a_damaged_record":
        (stopped / RECORD).write_text('{"schema_version": "2.1", "training_config": {}, "saves": 3}')
    if loss == "leave_what_retention_was_removing":
        (stopped / ".partial-step-00000003.old").mkdir()
    before = contents(stopped)
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert contents(stopped) == before
    assert resume(stopped, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert checkpoints(stopped) == [1]


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
        train_here(command_line(finished_run, **flags))
    monkeypatch.undo()
    found = read_record(tmp_path / "run")
    assert (found["status"], found["summary"]["optimizer_steps"]) == ("running", 3)
    assert [save["step"] for save in found["saves"]] == [3]
    move_all(tmp_path / "run", losing=NAMES)
    assert train_here(command_line(finished_run, **flags, resume=True)) == 2
    assert "says that step-00000003 was saved" in errors(capsys)[0]


def test_a_run_that_was_being_overwritten_is_not_resumed(stopped, finished_run, capsys):
    """Whatever checkpoints the kill left."""
    for step in (9, 6):
        (stopped / f"step-{step:08d}").rename(stopped / f".partial-step-{step:08d}.overwritten")
    assert resume(stopped, finished_run) == 0
    assert f"--resume: an --overwrite of {stopped} did not finish; starting fresh" in capsys.readouterr().out
    assert read_record(stopped)["resumed_from"] is None


@pytest.mark.parametrize(
    "name",
    [b"\xff" * 190, b"x" * 300, b"step-00000009\0", b"../elsewhere", b"", b"step-00000012\n"],
    ids=["undecodable", "long", "null byte", "outside", "empty", "missing checkpoint"],
)
def test_a_latest_that_names_no_checkpoint_is_reported_and_ignored(stopped, finished_run, capsys, snapshot, name):
    """The run repeats the steps since the newest checkpoint that exists."""
    (stopped / "latest").write_bytes(name)
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "latest names" in line]
    assert without_paths(line, stopped) == snapshot
    assert read_record(stopped)["resumed_from"] == "step-00000009"


def test_a_run_killed_before_its_first_checkpoint_starts_fresh(finished_run, tmp_path, monkeypatch, capsys):
    """A launcher that restarts the run needs this. Only steps that were never saved are lost."""
    monkeypatch.setattr(saving.Saver, "_open", Killed.now)
    flags = LONG | {"checkpoint_path": tmp_path / "run"}
    with pytest.raises(Killed):
        train_here(command_line(finished_run, **flags))
    monkeypatch.undo()
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert train_here(command_line(finished_run, **flags, resume=True)) == 0
    assert "holds no checkpoint yet; starting fresh" in capsys.readouterr().out
    assert read_record(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize("alone", [False, True])
def test_a_checkpoint_that_was_being_replaced_is_renamed_back(stopped, finished_run, alone):
    """A copied run folder may lack the lock file: a defect once deleted the checkpoint that was being replaced."""
    (stopped / "step-00000009").rename(stopped / ".partial-step-00000009.replaced")
    shutil.copytree(stopped / "step-00000006", stopped / ".partial-step-00000009")
    if alone:
        (stopped / ".lock").unlink()
        for step in (3, 6):
            shutil.rmtree(stopped / f"step-{step:08d}")
    assert resume(stopped, finished_run) == 0
    assert read_record(stopped)["resumed_from"] == "step-00000009"


def test_a_lost_line_is_noticed_beside_a_repeated_one(stopped, finished_run):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    steps = {json.loads(line)["step"]: line for line in log if "loss" in json.loads(line)}
    log[log.index(steps[7])] = steps[8]
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert resume(stopped, finished_run) == 0
    assert read_record(stopped)["summary"]["train_time_sec"] is None
    assert read_record(stopped)["summary"]["optimizer_steps"] == 12


def test_a_file_system_without_locks_is_reported(finished_run, tmp_path, monkeypatch, capsys, snapshot):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has no locks" in line]
    assert without_paths(line, tmp_path) == snapshot


def edited(name: str, **changes: Any) -> Callable[[Path], object]:
    """Changes keys of a JSON file of a checkpoint, whose hash in the manifest is right; ``...`` removes one."""

    def edit(checkpoint: Path) -> None:
        values = json.loads((checkpoint / name).read_text())
        for key, value in changes.items():
            changed = value(values[key]) if callable(value) else value
            values = {at: was for at, was in (values | {key: changed}).items() if was is not ...}
        data = json.dumps(values).encode()
        if name == "manifest.json":
            (checkpoint / name).write_bytes(data)
        else:
            rewrite(checkpoint, checkpoint / name, data)

    return edit


def with_tensors(name: str, **tensors: torch.Tensor) -> Callable[[Path], object]:
    return lambda checkpoint: rewrite(checkpoint, checkpoint / name, save(tensors))


def shorten_moments(checkpoint: Path) -> None:
    moments = load_file(checkpoint / "optimizer.safetensors")
    with_tensors("optimizer.safetensors", **{name: value[:1] for name, value in moments.items()})(checkpoint)


def without(word: str) -> Callable[[dict], dict]:
    return lambda values: {name: at for name, at in values.items() if word not in name}


HARM: dict[str, Callable[[Path], object]] = {
    "flip_a_bit": lambda checkpoint: damage(checkpoint / "optimizer.safetensors"),
    "nest_deeply": lambda checkpoint: (checkpoint / "manifest.json").write_text("[" * 200_000),
    "garble_the_state": lambda checkpoint: rewrite(checkpoint, checkpoint / "run_state.json", b'{"step": 9}'),
    "empty_the_random_state": with_tensors("random-00000.safetensors"),
    "shorten_the_random_state": with_tensors("random-00000.safetensors", cpu=torch.zeros(9, dtype=torch.uint8)),
    "shorten_the_moments": shorten_moments,
    "lose_the_settings": edited("manifest.json", fixed=...),
    "forget_the_moments": edited("manifest.json", files=without("optimizer")),  # it would be read, but not verified
    "forget_the_random_state": edited("manifest.json", files=without("random")),
    "list_the_ranks": edited("manifest.json", topology=[]),
    "forget_an_epochs_steps": edited("run_state.json", epochs=lambda epochs: [without("micro_steps")(epochs[0])]),
    "take_another_step": edited("run_state.json", step=8),
}


@pytest.mark.parametrize("harm", HARM)
def test_the_checkpoint_before_a_damaged_one_is_resumed(stopped, finished_run, capsys, snapshot, harm):
    """What the manifest cannot verify is not loaded either."""
    HARM[harm](stopped / "step-00000009")
    assert resume(stopped, finished_run) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "is refused" in line]
    assert without_paths(line, stopped) == snapshot
    assert f"resuming from {stopped / 'step-00000006'}" in lines
    assert read_record(stopped)["resumed_from"] == "step-00000006"
    assert (stopped / "step-00000009.damaged").is_dir()
    assert checkpoints(stopped) == [3, 6, 9, 12]


def test_a_damaged_record_is_reported_and_loses_the_earlier_saves(stopped, finished_run, capsys, snapshot):
    (stopped / "training_metrics.json").write_text('{"schema_version": "2.1", "training_config": {}, "summary": []}')
    assert resume(stopped, finished_run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert without_paths(line, stopped) == snapshot
    assert [save["step"] for save in read_record(stopped)["saves"]] == [12]


# Training keeps only known files of a tokenizer, and neither reads nor writes through a link in a run folder.


def test_only_known_files_of_a_tokenizer_are_kept(tmp_path):
    folder = write_inputs(tmp_path)
    (folder / "secret").write_text("secret")
    (folder / "tokenizer" / "itself").symlink_to("itself")
    (folder / "tokenizer" / "notes.txt").symlink_to(folder / "secret")
    (folder / "tokenizer" / "helper.py").write_text("")
    (folder / "tokenizer" / "deep").mkdir()
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ text }}")
    assert train_here(command_line(folder, max_train_steps=1)) == 0
    checkpoint = folder / "run" / "step-00000001"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    kept = {f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
    assert kept == {path.relative_to(checkpoint).as_posix() for path in checkpoint.glob("tokenizer/**/*")}
    assert kept == {name for name in manifest["files"] if name.startswith("tokenizer/")}
    copy, given = checkpoint / "tokenizer" / "tokenizer.json", folder / "tokenizer" / "tokenizer.json"
    assert copy.read_bytes() == given.read_bytes()


LINKED = ("metrics.jsonl", "training_metrics.json", "latest", "step-00000009", "trackers", "trackers/mlflow.db")


@pytest.mark.parametrize("name", LINKED)
def test_a_run_with_a_link_is_not_resumed(finished_run, stopped, tmp_path, capsys, name):
    """With a linked checkpoint it would resume from an older one, or start fresh if there is none."""
    place, outside = stopped / name, tmp_path / "outside"
    if "mlflow" in name:
        place.parent.mkdir()
        (place.parent / "run_ids.json").write_text("{}")
    place.rename(outside) if place.exists() else outside.mkdir()
    place.symlink_to(outside)
    before = contents(tmp_path)
    assert resume(stopped, finished_run, track="csv") == 2
    (line,) = errors(capsys)
    assert f"{name} is a link, and links inside a run folder are not followed" in line
    assert (contents(tmp_path), place.is_symlink()) == (before, True)


def test_a_run_folder_may_itself_be_named_through_a_link(finished_run, stopped, tmp_path):
    (tmp_path / "named").symlink_to(stopped)
    assert resume(tmp_path / "named", finished_run) == 0
