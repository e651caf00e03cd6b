"""What a run may find in its folder, what it leaves there when it ends early, and what it does with damage."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import command_line, random_ids, write_data, write_recipe, write_tokenizer, write_tokens

from dsgpt.checkpointing.run_state import read_run_state
from dsgpt.main import train
from dsgpt.training import checkpoint as checkpoint_module
from dsgpt.training import finish, journal, run
from dsgpt.training.journal import Journal

# 12 steps over epochs of 5, saved inside the epochs
LONG = {"max_train_steps": 12, "save_every": 3, "keep_checkpoints": 9, "eval_every": 4, "steps_per_print": 5}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a recipe, and a finished run in ``run``; tests copy it."""
    folder = write_data(tmp_path_factory.mktemp("finished"))
    write_recipe(folder / "recipe.json")
    assert train(command_line(folder, **LONG)) == 0
    return folder


@pytest.fixture
def stopped(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run as a kill after step 9 would have left it."""
    copy = copied(finished_run, tmp_path)
    (copy / "RUN_COMPLETE.txt").unlink()
    shutil.rmtree(copy / "step-00000012")
    return copy


def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "run", tmp_path / "copy")


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "training_metrics.json").read_text())


def go_on(run_dir: Path, folder: Path, **changes: Any) -> int:
    return train(command_line(folder, **LONG | {"checkpoint_path": run_dir, "resume": True} | changes))


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Foreign files


@pytest.mark.parametrize("flag", ["resume", "overwrite", None])
@pytest.mark.parametrize("name", ["config.json", "latest", "train.log", "RUN_COMPLETE.txt", "training_metrics.json"])
def test_foreign_files_are_refused_and_kept(finished_run, tmp_path, capsys, name, flag):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / name).write_text('{"architectures": ["Llama"]}')
    flags = {flag: True} if flag else {}
    assert train(command_line(finished_run, checkpoint_path=folder, **flags)) == 2
    (line,) = errors(capsys)
    assert f"holds a {name} that no run here wrote: name another folder" in line
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize("name", ["step-7", "step-0000000012", "step-00000007.bak", ".partial-step-3"])
def test_folders_of_similar_names_are_kept(finished_run, tmp_path, name):
    folder = tmp_path / "run"
    (folder / name).mkdir(parents=True)
    (folder / name / "theirs").write_text("mine")
    flags = {"checkpoint_path": folder, "max_train_steps": 1}
    assert train(command_line(finished_run, **flags)) == 0
    assert train(command_line(finished_run, **flags, overwrite=True)) == 0
    assert (folder / name / "theirs").read_text() == "mine"


def test_links_are_removed_and_never_followed(finished_run, tmp_path):
    copy, outside = copied(finished_run, tmp_path), tmp_path / "outside"
    shutil.move(copy / "step-00000003", outside)
    (copy / "step-00000003").symlink_to(outside)
    (copy / "step-00000099").symlink_to(tmp_path / "nowhere")
    before = tree(outside)
    assert go_on(copy, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert [path.name for path in copy.glob("step-*")] == ["step-00000001"]
    assert tree(outside) == before


def test_a_lock_file_alone_is_no_run(finished_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run", max_train_steps=1)) == 0


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_one_writer(finished_run, tmp_path, capsys, flag):
    copy = copied(finished_run, tmp_path)
    before = tree(copy)
    with (copy / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert go_on(copy, finished_run, **{"resume": None, flag: True}) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: --checkpoint_path {copy}: another process is training in this folder")
    assert tree(copy) == before


def test_the_lock_is_held_while_training(finished_run, tmp_path, monkeypatch):
    def probe(*args: Any, **kwargs: Any) -> None:
        with (tmp_path / "run" / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(run, "fit", probe)
    monkeypatch.setattr(run, "mark_complete", lambda *args: None)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0


def test_a_kill_while_overwriting_is_no_run_to_go_on_with(finished_run, tmp_path, monkeypatch, capsys):
    copy = copied(finished_run, tmp_path)
    monkeypatch.setattr(shutil, "rmtree", Killed.now)
    with pytest.raises(Killed):
        go_on(copy, finished_run, resume=None, overwrite=True)
    monkeypatch.undo()
    assert not (copy / "RUN_COMPLETE.txt").exists()
    assert not list(copy.glob("step-*"))
    capsys.readouterr()
    assert go_on(copy, finished_run) == 0
    assert "no checkpoint yet; starting fresh" in capsys.readouterr().out


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""

    @classmethod
    def now(cls, *args: Any, **kwargs: Any) -> None:
        raise cls


def test_nothing_is_written_before_the_strategy_accepts(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build_strategy", Killed.now)
    with pytest.raises(Killed):
        train(command_line(finished_run, checkpoint_path=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# The record while the run goes on


@pytest.mark.parametrize("where", ["train_step", "save_checkpoint"])
def test_a_killed_run_leaves_its_record(finished_run, tmp_path, monkeypatch, where):
    if where == "train_step":
        monkeypatch.setattr(run, "fit", Killed.now)
    else:
        monkeypatch.setattr(run, "save_checkpoint", Killed.now)
    monkeypatch.setattr(Journal, "end_early", lambda self, status: None)  # a kill gives no time for it
    with pytest.raises(Killed):
        train(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run"))
    found = record(tmp_path / "run")
    assert found["status"] == "running"
    assert found["summary"]["optimizer_steps"] == (0 if where == "train_step" else 3)


def test_a_validation_is_in_the_record_at_once(finished_run, tmp_path, monkeypatch):
    seen = []
    original = Journal.validated

    def validated(self: Journal, **values: Any) -> None:
        original(self, **values)
        seen.append((values["step"], record(tmp_path / "run")["summary"]["final_val_loss"] == values["val_loss"]))

    monkeypatch.setattr(Journal, "validated", validated)
    assert train(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
    assert seen == [(4, True), (5, True), (8, True), (10, True), (12, True)]


def test_an_interrupt_keeps_the_steps(finished_run, tmp_path, monkeypatch):
    original = Journal.step_done

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        original(self, *args, step=step, **values)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "step_done", step_done)
    flags = LONG | {"save_every": 0, "eval_every": 0}
    assert train(command_line(finished_run, **flags, checkpoint_path=tmp_path / "run")) == 130
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["summary"]["optimizer_steps"]) == (
        "interrupted",
        3,
    )


def test_peak_memory_is_of_training(finished_run, tmp_path, monkeypatch):
    """The counter stands in for a save and a generation that take more than training."""
    peak = [1000]
    monkeypatch.setattr("dsgpt.telemetry.memory.peak_rss_bytes", lambda: peak[0])
    monkeypatch.setattr(run, "save_checkpoint", lambda *args, **values: peak.__setitem__(0, 9000))
    flags = {"checkpoint_path": tmp_path / "run", "max_train_steps": 2}
    assert train(command_line(finished_run, **flags)) == 0
    assert record(tmp_path / "run")["summary"]["peak_rss_bytes_rank0"] == 1000


def test_no_memory_for_inference_is_no_failure(finished_run, tmp_path, monkeypatch, capsys):
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(finish, "measure_latency", full)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert "inference   not measured" in capsys.readouterr().out
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["inference"]) == ("completed", None)


# Going on


def test_a_run_that_goes_on_is_the_same_run(stopped, finished_run):
    old, config = record(stopped), (stopped / "config.json").read_bytes()
    assert go_on(stopped, finished_run) == 0
    assert record(stopped)["run_id"] == old["run_id"]
    assert record(stopped)["resumed_from"] == "step-00000009"
    assert (stopped / "config.json").read_bytes() == config


def test_wall_time_of_an_epoch_that_was_interrupted(stopped, finished_run):
    state = read_run_state(stopped / "step-00000009")
    file = stopped / "step-00000009" / "run_state.json"
    values = json.loads(file.read_text()) | {"wall_time_sec": state.wall_time_sec + 100}
    rewrite(stopped / "step-00000009", file, json.dumps(values).encode())
    assert go_on(stopped, finished_run) == 0
    found = record(stopped)
    walls = [epoch["epoch_wall_time_sec"] for epoch in found["epochs"]]
    assert walls[1] > 100
    assert sum(walls) <= found["summary"]["total_wall_time_sec"] < sum(walls) + 30


def rewrite(checkpoint: Path, file: Path, data: bytes) -> None:
    """Change a file of a checkpoint as if it had been saved so."""
    file.write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"][file.relative_to(checkpoint).as_posix()] = facts
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("checkpoint", ["step-00000009", "step-00000012"])
def test_a_lost_log_makes_sums_unknown(finished_run, tmp_path, checkpoint):
    copy = copied(finished_run, tmp_path)
    (copy / "RUN_COMPLETE.txt").unlink()
    (copy / "metrics.jsonl").unlink()
    if checkpoint == "step-00000009":
        shutil.rmtree(copy / "step-00000012")
    losses = record(copy)["summary"]["final_train_loss"], record(copy)["summary"]["final_val_loss"]
    assert go_on(copy, finished_run) == 0
    summary = record(copy)["summary"]
    assert (summary["final_train_loss"], summary["final_val_loss"]) == losses
    assert (summary["optimizer_steps"], summary["train_time_sec"]) == (12, None)


def test_damaged_lines_are_dropped_and_told(stopped, finished_run, capsys):
    log = (stopped / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    log[2] = b"\0" * 40 + b"\n"
    log[4] = b"{oops\xff}\n"
    (stopped / "metrics.jsonl").write_bytes(b"".join(log))
    assert go_on(stopped, finished_run) == 0
    assert capsys.readouterr().out.count("2 damaged lines were dropped, the first of them line 3") == 1
    assert record(stopped)["status"] == "completed"


def test_the_way_round_a_damaged_checkpoint_is_told(stopped, finished_run, capsys):
    (stopped / "step-00000009" / "model.safetensors").write_bytes(b"")
    assert go_on(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert line.endswith(f"; delete the folder {stopped / 'step-00000009'} to go on from step-00000006")


def test_a_manifest_without_facts_is_told(stopped, finished_run, capsys):
    file = stopped / "step-00000009" / "manifest.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "fixed"}))
    assert go_on(stopped, finished_run) == 2
    assert "manifest.json: is no readable manifest" in errors(capsys)[0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 7}, "seed"),
        ({"max_train_steps": 10}, "total steps"),
        ({"max_val_steps": 1}, "validation windows"),
        ({"grad_accum_steps": 2}, "accumulation"),
    ],
)
def test_a_finished_run_is_not_another(finished_run, capsys, changes, name):
    assert go_on(finished_run / "run", finished_run) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert go_on(finished_run / "run", finished_run, **changes) == 2
    assert any(line.startswith(f"error: --resume: {name} is ") for line in errors(capsys))


def test_the_log_is_durable_before_the_checkpoint_is_published(finished_run, tmp_path, monkeypatch):
    order: list[str] = []
    noted(monkeypatch, journal.StepLog, "sync", order)
    noted(monkeypatch, checkpoint_module.store, "publish", order)
    assert train(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert order == ["sync", "publish"]


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, order: list[str]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **values: Any) -> Any:
        order.append(name)
        return original(*args, **values)

    monkeypatch.setattr(owner, name, call)


# The tokenizer


@pytest.mark.parametrize("other", [False, True])
def test_only_the_tokenizer_that_made_the_data_is_kept(tmp_path, capsys, other):
    folder = write_data(tmp_path)
    write_recipe(folder / "recipe.json")
    about = write_tokenizer(folder / "tokenizer")
    write_tokens(folder / "train.bin", random_ids(641), tokenizer=about | ({"sha256": "0" * 64} if other else {}))
    assert train(command_line(folder)) == 0
    assert ("is not the tokenizer that made train.bin" in capsys.readouterr().out) == other
    assert (folder / "run" / "step-00000002" / "tokenizer").exists() != other
