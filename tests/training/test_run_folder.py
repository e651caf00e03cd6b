"""The run folder: what it holds, what is never wiped, and links that are not followed."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harmful_tokenizers import bring_code
from messages import without_paths
from small_run import command_line, write_inputs
from training_runs import LONG, Killed, checkpoints, damage, errors, read_record, resume, rewrite

from dsgpt.training import run, saving, trainer
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal

# What a run does with files that it finds in its folder, and the lock that keeps others out.


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


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
    assert train_here(command_line(finished_run, checkpoint_path=folder, **flags)) == 2
    (line,) = errors(capsys)
    assert f"holds a {name} that this program did not write: name another folder" in line
    assert [path.name for path in folder.iterdir()] == [name]


def test_foreign_files_of_other_steps_are_kept(finished_run, tmp_path, capsys):
    """Another program's log of its steps proves nothing, and nothing next to it is ours either."""
    (folder := tmp_path / "theirs").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (folder / "config.json").write_text("{}")
    assert train_here(command_line(finished_run, checkpoint_path=folder, overwrite=True)) == 2
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
    assert train_here(command_line(finished_run, **flags)) == 0
    assert train_here(command_line(finished_run, **flags, overwrite=True)) == 0
    assert (folder / name / "theirs").read_text() == "mine"


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


def test_a_lock_file_alone_is_not_a_run(finished_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0


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

    monkeypatch.setattr(trainer.Trainer, "fit", probe)
    monkeypatch.setattr(trainer, "mark_complete", lambda *args: None)
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
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_without_its_checkpoints_is_refused_and_kept(stopped, finished_run, capsys, snapshot, loss):
    move_all(stopped, losing=LOSSES[loss])
    if loss == "leave_a_damaged_record":
        (stopped / RECORD).write_text('{"schema_version": "2.1", "training_config": {}, "saves": 3}')
    before = contents(stopped)
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert contents(stopped) == before
    assert resume(stopped, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert checkpoints(stopped) == [1]


def test_a_finished_run_without_its_checkpoints_is_refused_too(copied_run, finished_run, capsys):
    """Without them its settings are unknown: a run with another seed could pass for the finished one."""
    move_all(copied_run)
    before = contents(copied_run)
    assert resume(copied_run, finished_run, seed=99) == 2
    assert "latest names step-00000012, which does not exist" in errors(capsys)[0]
    assert contents(copied_run) == before


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
    assert [save["step"] for save in read_record(tmp_path / "run")["saves"]] == [3]
    move_all(tmp_path / "run", losing=NAMES)
    assert train_here(command_line(finished_run, **flags, resume=True)) == 2
    assert "says that step-00000003 was saved" in errors(capsys)[0]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_run_that_was_being_overwritten_is_not_resumed(stopped, finished_run, capsys, left):
    """However many checkpoints the kill left."""
    for step in (9, 6, 3)[: 3 - left]:
        (stopped / f"step-{step:08d}").rename(stopped / f".partial-step-{step:08d}.overwritten")
    assert resume(stopped, finished_run) == 0
    assert f"--resume: an --overwrite of {stopped} did not finish; starting fresh" in capsys.readouterr().out
    assert read_record(stopped)["resumed_from"] is None


def test_a_checkpoint_that_retention_was_removing_allows_no_fresh_start(stopped, finished_run):
    move_all(stopped, losing=NAMES)
    (stopped / ".partial-step-00000003.old").mkdir()
    before = contents(stopped)
    assert resume(stopped, finished_run) == 2
    assert contents(stopped) == before


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


def test_checkpoints_that_are_moved_back_are_resumed(stopped, finished_run):
    move_all(stopped)
    assert resume(stopped, finished_run) == 2
    for checkpoint in stopped.parent.glob("moved-step-*"):
        shutil.move(checkpoint, stopped / checkpoint.name.removeprefix("moved-"))
    assert resume(stopped, finished_run) == 0
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


def test_a_run_killed_before_its_first_step_starts_fresh(finished_run, tmp_path, capsys):
    """It left its configuration, and no lines yet."""
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"options": {}, "training_config": {}}))
    (run_dir / "metrics.jsonl").touch()
    assert resume(run_dir, finished_run) == 0
    assert "no checkpoint yet; starting fresh" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["", "older checkpoints", "older checkpoints, lock"])
def test_a_checkpoint_that_was_being_replaced_is_renamed_back(stopped, finished_run, lost):
    """A copied run folder may lack the lock file: a defect once deleted the checkpoint that was being replaced."""
    (stopped / "step-00000009").rename(stopped / ".partial-step-00000009.replaced")
    shutil.copytree(stopped / "step-00000006", stopped / ".partial-step-00000009")
    for step in (3, 6) if lost else ():
        shutil.rmtree(stopped / f"step-{step:08d}")
    if "lock" in lost:
        (stopped / ".lock").unlink()
    assert resume(stopped, finished_run) == 0
    assert read_record(stopped)["resumed_from"] == "step-00000009"


@pytest.mark.parametrize("lost", [2, 7])
def test_a_lost_line_is_noticed_beside_a_repeated_one(stopped, finished_run, lost):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    steps = {json.loads(line)["step"]: line for line in log if "loss" in json.loads(line)}
    log[log.index(steps[lost])] = steps[lost + 1]
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert resume(stopped, finished_run) == 0
    assert read_record(stopped)["summary"]["train_time_sec"] is None
    assert read_record(stopped)["summary"]["optimizer_steps"] == 12


def test_a_file_system_without_locks_is_reported(finished_run, tmp_path, monkeypatch, capsys, snapshot):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has no locks" in line]
    assert without_paths(line, tmp_path) == snapshot


def forgetting(word: str) -> Callable[[dict], dict]:
    return lambda manifest: {"files": {name: at for name, at in manifest["files"].items() if word not in name}}


def known(values: dict) -> dict:
    """``values`` without the keys whose value is ``...``."""
    return {key: at for key, at in values.items() if at is not ...}


def epoch_with(**values: Any) -> Callable[[dict], dict]:
    """``...`` removes a key."""
    return lambda state: {"epochs": [known(state["epochs"][0] | values)]}


MANIFEST: dict[str, Callable[[dict], dict]] = {
    "lose_the_settings": lambda _: {"fixed": ...},
    "forget_all": lambda _: {"files": {}},
    "forget_the_moments": forgetting("optimizer"),  # the file exists and would be read, but could not be verified
    "forget_the_random_state": forgetting("random"),
    "list_the_ranks": lambda _: {"topology": []},
    "name_a_file_too_long": lambda manifest: {
        "files": manifest["files"] | {"x" * 300: {"size": 1, "sha256": "0" * 64}}
    },
}
STATE: dict[str, Callable[[dict], dict]] = {
    "mistype_the_state": lambda _: {"epochs": 3},
    "forget_an_epochs_steps": epoch_with(steps=...),
    "mistype_an_epochs_steps": epoch_with(steps=5.0),
    "forget_an_epochs_time": epoch_with(train_time_sec=...),
    "mistype_an_epochs_loss": epoch_with(val_loss_avg_global="low"),
    "forget_when_it_changed": lambda _: {"changes": [{"name": "schedule", "before": None, "after": None}]},
    "take_another_step": lambda _: {"step": 8},
}
"""Changes of ``run_state.json``, whose hash in the manifest is right."""
FILES: dict[str, Callable[[Path], object]] = {
    "lose_a_file": lambda checkpoint: (checkpoint / "optimizer.safetensors").unlink(),
    "cut_a_file": lambda checkpoint: (checkpoint / "model.safetensors").write_bytes(b"..."),
    "flip_a_bit": lambda checkpoint: damage(checkpoint / "optimizer.safetensors"),
    "lose_the_manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "nest_deeply": lambda checkpoint: (checkpoint / "manifest.json").write_text("[" * 200_000),
    "garble_the_state": lambda checkpoint: rewrite(checkpoint, checkpoint / "run_state.json", b'{"step": 9}'),
    "empty_the_random_state": lambda checkpoint: rewrite(
        checkpoint, checkpoint / "random-00000.safetensors", b"\x02\0\0\0\0\0\0\0{}"
    ),
}


def do_harm(checkpoint: Path, harm: str) -> None:
    if harm in FILES:
        FILES[harm](checkpoint)
        return
    file = checkpoint / ("manifest.json" if harm in MANIFEST else "run_state.json")
    values = json.loads(file.read_text())
    data = json.dumps(known(values | (MANIFEST | STATE)[harm](values)))
    file.write_text(data) if harm in MANIFEST else rewrite(checkpoint, file, data.encode())


@pytest.mark.parametrize("harm", [*FILES, *MANIFEST, *STATE])
def test_the_checkpoint_before_a_damaged_one_is_resumed(stopped, finished_run, capsys, snapshot, harm):
    """What the manifest cannot verify is not loaded either."""
    do_harm(stopped / "step-00000009", harm)
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data with its tokenizer, and a recipe."""
    return write_inputs(tmp_path)


def kept(folder: Path) -> set[str]:
    """What a run of one step keeps of the tokenizer."""
    assert train_here(command_line(folder, max_train_steps=1)) == 0
    checkpoint = folder / "run" / "step-00000001"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    names = {path.name for path in (checkpoint / "tokenizer").glob("**/*")}
    assert {f"tokenizer/{name}" for name in names} == {n for n in manifest["files"] if n.startswith("tokenizer/")}
    return names


def test_only_known_files_of_a_tokenizer_are_kept(folder):
    secret = folder / "secret"
    secret.write_text("secret")
    (folder / "tokenizer" / "itself").symlink_to("itself")
    (folder / "tokenizer" / "notes.txt").symlink_to(secret)
    (folder / "tokenizer" / "helper.py").write_text("")
    (folder / "tokenizer" / "deep").mkdir()
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ text }}")
    assert kept(folder) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    copy = folder / "run" / "step-00000001" / "tokenizer" / "tokenizer.json"
    assert copy.read_bytes() == (folder / "tokenizer" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("linked", ["tokenizer", "tokenizer/tokenizer.json", "tokenizer/vocab.json"])
def test_a_linked_tokenizer_is_refused_at_the_start(folder, capsys, linked):
    path = folder / linked
    if path.exists():
        path.rename(folder / "moved")
    path.symlink_to(folder / "moved" if (folder / "moved").exists() else "vocab.json")
    assert train_here(command_line(folder, max_train_steps=1)) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: {folder}/tokenizer: ")
    assert "is a link" in line
    assert "cp -rL" in line


def test_a_tokenizer_that_brings_code_is_refused_at_the_start(folder, capsys):
    bring_code(folder / "tokenizer", marker=folder / "ran")
    assert train_here(command_line(folder, max_train_steps=1)) == 2
    (line,) = errors(capsys)
    assert "tokenizer_config.json asks for its own code (auto_map)" in line
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "training_metrics.json", "config.json", "latest"])
def test_a_run_with_a_linked_file_is_not_resumed(finished_run, stopped, tmp_path, capsys, snapshot, name):
    outside = tmp_path / "outside"
    (stopped / name).rename(outside)
    before = outside.read_bytes()
    (stopped / name).symlink_to(outside)
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert outside.read_bytes() == before
    assert (stopped / name).is_symlink()


def test_a_run_with_a_linked_checkpoint_is_not_resumed(finished_run, stopped, tmp_path, capsys):
    """Otherwise it would resume from an older one, or start fresh if there is none."""
    moved = Path(shutil.move(stopped / "step-00000009", tmp_path / "moved"))
    (stopped / "step-00000009").symlink_to(moved)
    before = checkpoints(stopped)
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert "step-00000009 is a link" in line
    assert checkpoints(stopped) == before


@pytest.mark.parametrize("flags", [{}, {"dry_run": True}])
def test_the_lock_is_not_made_through_a_link(finished_run, tmp_path, capsys, snapshot, flags):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".lock").symlink_to(tmp_path / "outside")
    assert train_here(command_line(finished_run, checkpoint_path=run_dir, max_train_steps=1, **flags)) == 2
    (line,) = errors(capsys)
    assert without_paths(line, run_dir) == snapshot
    assert not (tmp_path / "outside").exists()


def test_a_run_folder_may_itself_be_named_through_a_link(finished_run, stopped, tmp_path):
    (tmp_path / "named").symlink_to(stopped)
    assert resume(tmp_path / "named", finished_run) == 0
