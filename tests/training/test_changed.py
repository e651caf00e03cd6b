"""A resume with changed settings, data, or validation set."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import RECIPE, command_line, random_ids, without_paths, write_data, write_recipe, write_tokens
from training_runs import Killed, checkpoints, errors, read_lines, read_record, resume

from dsgpt.checkpoints.manifest import Change, parse_manifest, read_run_state
from dsgpt.checkpoints.store import find_checkpoint
from dsgpt.common.errors import UserError
from dsgpt.data import token_file
from dsgpt.record.equal_work import judge
from dsgpt.record.runs import read_run
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal
from dsgpt.training.run_description import CHANGES_KEY
from dsgpt.training.run_folder import CHANGEABLE, ResumePoint, clear_run_folder

# What a resume may change, and what only with `--allow_changed`.


@pytest.fixture
def faster(tmp_path):
    """The recipe with three times the learning rate and other betas."""
    params = RECIPE["optimizer"]["params"] | {"lr": 0.003, "betas": [0.8, 0.9]}
    return write_recipe(tmp_path / "faster.json", optimizer={"type": "AdamW", "params": params})


def losses(run_dir):
    return {line["step"]: line["loss"] for line in read_lines(run_dir)}


def compared(finished_run, run_dir):
    """How the charts judge the finished run and one that was resumed."""
    return judge([read_run(finished_run / "run", name="whole"), read_run(run_dir, name="resumed")])


def test_the_split_of_the_batch_and_adams_implementation_may_change(stopped, finished_run, tmp_path):
    """A machine without a compiler uses PyTorch's Adam instead of DeepSpeed's CPU Adam."""
    params = RECIPE["optimizer"]["params"] | {"torch_adam": True}
    recipe = write_recipe(tmp_path / "torch.json", optimizer={"type": "AdamW", "params": params})
    assert resume(stopped, finished_run, deepspeed_config=recipe, micro_batch_size_per_gpu=2) == 0
    expected, found = losses(finished_run / "run"), losses(stopped)
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) <= 2e-4 for step in expected)
    assert read_record(stopped)[CHANGES_KEY] == []
    assert compared(finished_run, stopped).line() == "same work: yes"


def test_an_allowed_change_of_the_recipe_takes_effect_and_is_recorded(stopped, finished_run, faster, capsys):
    assert resume(stopped, finished_run, deepspeed_config=faster, allow_changed="data,recipe") == 0
    assert "--allow_changed: optimizer was {'lr': 0.001, " in capsys.readouterr().out
    (change,) = read_record(stopped)[CHANGES_KEY]
    assert (change["step"], change["name"]) == (9, "optimizer")
    assert (change["before"]["lr"], change["after"]["lr"]) == (0.001, 0.003)
    assert change["after"]["betas"] == [0.8, 0.9]
    rates = {line["step"]: line["lr"] for line in read_lines(stopped)}
    expected = {line["step"]: line["lr"] for line in read_lines(finished_run / "run")}
    assert rates == pytest.approx({step: rate * (3 if step > 9 else 1) for step, rate in expected.items()})
    state = read_run_state(stopped / "step-00000012")
    assert state.changes == [Change(**change)]
    facts = {difference.fact for difference in compared(finished_run, stopped).differences}
    assert "changed at resume optimizer after step 9" in facts
    (stopped / "RUN_COMPLETE.txt").unlink()
    assert resume(stopped, finished_run, deepspeed_config=faster) == 0
    assert read_record(stopped)[CHANGES_KEY] == [change], "it stays after another resume"
    # The record has the recipe of a run that was never changed, but the weights were trained with both.
    assert resume(stopped, finished_run, max_train_steps=13, allow_changed="recipe") == 0
    facts = {difference.fact for difference in compared(finished_run, stopped).differences}
    assert facts >= {f"changed at resume optimizer after step {step}" for step in (9, 12)}


def test_other_data_needs_allow_changed_data(stopped, finished_run, tmp_path, capsys):
    """Epochs of 5 steps before, of 7 afterwards: every step belongs to one record of an epoch."""
    other = write_tokens(tmp_path / "other.bin", random_ids(7 * 8 * 16 + 1, seed=9))
    assert resume(stopped, finished_run, train_data_path=other, allow_changed="recipe") == 2
    assert "add --allow_changed data" in errors(capsys)[0]
    assert resume(stopped, finished_run, train_data_path=other, allow_changed="data") == 0
    found = read_record(stopped)
    assert [change["name"] for change in found[CHANGES_KEY]] == ["train data"]
    assert sum(epoch["steps"] for epoch in found["epochs"]) == found["summary"]["optimizer_steps"] == 12


def test_a_finished_run_may_be_made_longer(copied_run, finished_run):
    start = ResumePoint(checkpoint=copied_run / "step-00000012")
    clear_run_folder(copied_run, start)
    assert not (copied_run / "RUN_COMPLETE.txt").exists(), "it is not complete while it becomes longer"
    assert resume(copied_run, finished_run, max_train_steps=15, allow_changed="recipe") == 0
    assert read_record(copied_run)["summary"]["optimizer_steps"] == 15
    assert sorted(losses(copied_run)) == list(range(1, 16))
    assert read_record(copied_run)["status"] == "completed"


def test_some_things_never_change(stopped, finished_run, capsys):
    changes = {"seed": 7, "seq_length": 8, "global_batch_size": 4, "dropout": 0.1, "precision": "bf16"}
    assert resume(stopped, finished_run, allow_changed="data,recipe", max_train_steps=7, **changes) == 2
    lines = [line.removeprefix("error: --resume: ") for line in errors(capsys)]
    assert f"{stopped / 'step-00000009'} is at step 9, but this run ends after step 7: " in lines.pop()
    names = {line.partition(" is ")[0] for line in lines}
    assert names == {"seed", "sequence length", "global batch", "model", "precision"}
    assert names.isdisjoint(name for group in CHANGEABLE.values() for name in group)


# Data that changed on disk, was copied, or came without its tokenizer: noticed at the start, before any work.


CHANGED = "train.bin changed on disk since it was prepared (or was copied)"


@pytest.fixture
def here(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's data and recipe, with the times of the files, as ``cp -a`` makes it."""
    return shutil.copytree(finished_run, tmp_path / "here", ignore=shutil.ignore_patterns("run"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed during the test."""
    names, hash_file = [], token_file.sha256_of

    def note(path: Path, *args: Any) -> str:
        names.append(path.name)
        return hash_file(path, *args)

    monkeypatch.setattr(token_file, "sha256_of", note)
    return names


def shuffle(path: Path) -> None:
    """Shuffle a file in place."""
    ids = np.random.default_rng(7).permutation(np.fromfile(path, dtype="<u2"))
    with path.open("r+b") as file:
        file.write(ids.tobytes())


def sidecar(folder: Path, **changes: Any) -> dict[str, Any]:
    """The contents of ``train.json``, after ``changes`` to it; ``...`` removes a key."""
    path = folder / "train.json"
    values = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not ...}
    if changes:
        path.write_text(json.dumps(values))
    return values


def test_shuffled_in_place_is_refused_also_at_a_resume(stopped, here, capsys):
    shuffle(here / "val.bin")
    assert resume(stopped, here) == 2
    assert errors(capsys)[0].startswith(f"error: {here / 'val.bin'}: its sha256 is ")


def test_a_copy_is_hashed_once(here, hashed, capsys):
    os.utime(here / "train.bin")
    sidecar(here, mixture={"a": 0.5})
    (here / "train.json").chmod(0o660)
    assert train_here(command_line(here, dry_run=True)) == 0
    assert f"{CHANGED}: hashed again; the sha256 is that of its sidecar" in capsys.readouterr().out
    stat = (here / "train.bin").stat()
    assert (sidecar(here)["size"], sidecar(here)["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    assert sidecar(here)["mixture"] == {"a": 0.5}, "keys of other tools stay"
    assert (here / "train.json").stat().st_mode & 0o777 == 0o660, "its permissions stay"
    assert train_here(command_line(here, dry_run=True)) == 0
    assert hashed == ["train.bin"]
    assert "hashed again" not in capsys.readouterr().out
    sidecar(here, size=..., mtime_ns=...)  # as earlier versions and other tools write it
    for _ in range(2):
        assert train_here(command_line(here, dry_run=True)) == 0
    assert "train.json does not say when train.bin was written: hashed again; the sha256 is" in capsys.readouterr().out
    assert hashed == ["train.bin"] * 2


def test_a_sidecar_that_is_a_link_stays_and_does_not_stop_the_run(here, hashed, capsys):
    os.utime(here / "train.bin")
    (here / "train.json").rename(here / "elsewhere.json")
    (here / "train.json").symlink_to("elsewhere.json")
    before = (here / "train.json").read_text()
    assert train_here(command_line(here, dry_run=True)) == 0
    assert (hashed, capsys.readouterr().err) == (["train.bin"], "")
    assert ((here / "train.json").read_text(), (here / "train.json").is_symlink()) == (before, True)


def test_only_verify_data_finds_a_change_with_the_old_file_time(here, hashed, capsys):
    before = (here / "train.bin").stat()
    shuffle(here / "train.bin")
    os.utime(here / "train.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert train_here(command_line(here, dry_run=True)) == 0
    assert hashed == []
    assert train_here(command_line(here, dry_run=True, verify_data=True)) == 2
    assert "its sha256 is " in errors(capsys)[0]


def test_a_file_that_changes_while_it_is_hashed_is_refused(here, monkeypatch, capsys, snapshot):
    """Its hash belongs to no version of the file, and must not be written into the sidecar."""
    os.utime(here / "train.bin")
    before, hash_file = sidecar(here), token_file.sha256_of

    def changing(path: Path, *args: Any) -> str:
        computed = hash_file(path, *args)
        if path.name == "train.bin":
            os.utime(path, ns=(0, 0))
        return computed

    monkeypatch.setattr(token_file, "sha256_of", changing)
    assert train_here(command_line(here)) == 2
    assert [without_paths(line, here) for line in errors(capsys)] == snapshot
    assert sidecar(here) == before


# After `--allow_changed data` the best starts anew: losses on different validation sets cannot be compared.


FLAGS = {"max_train_steps": 12, "save_every": 2, "keep_checkpoints": 9, "eval_every": 2}
"""Over epochs of 5 steps. Every checkpoint has a validation loss of its own."""


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run stopped after step 6, and ``hard.bin``, on which its model has a higher loss."""
    folder = write_data(tmp_path_factory.mktemp("easy"))
    for name, word in (("val", 17), ("hard", 1)):
        write_tokens(folder / f"{name}.bin", np.full(161, word))
    write_recipe(folder / "recipe.json")
    assert train_here(command_line(folder, **FLAGS)) == 0
    (folder / "run" / "RUN_COMPLETE.txt").unlink()
    for step in (8, 10, 12):
        shutil.rmtree(folder / "run" / f"step-{step:08d}")
    return folder


@pytest.fixture
def run_dir(easy: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(easy / "run", tmp_path / "run")


def harder(easy: Path, run_dir: Path, **changes: Any) -> list[str]:
    """The command that resumes the run and validates on ``hard.bin``."""
    resumes = {"resume": True, "val_data_path": easy / "hard.bin", "checkpoint_path": run_dir}
    return command_line(easy, **FLAGS | resumes | {"allow_changed": "data"} | changes)


def test_the_best_is_chosen_on_the_new_set(easy, run_dir, capsys):
    old = [line["val_loss"] for line in read_lines(run_dir, "val_loss") if line["step"] <= 6]
    assert train_here(harder(easy, run_dir, keep_checkpoints=2)) == 0
    losses = {line["step"]: line["val_loss"] for line in read_lines(run_dir, "val_loss")[len(old) :]}
    assert list(losses) == [6, 8, 10, 12], "the loss of step 6 was one of the old set"
    assert min(losses.values()) > max(old)
    summary = read_record(run_dir)["summary"]
    assert summary["best_val_loss"] == min(losses.values())
    assert summary["final_val_loss"] == losses[12]
    assert read_record(run_dir)["epochs"][1]["val_loss_avg_global"] == losses[10]
    best = min((8, 10, 12), key=losses.__getitem__)
    assert find_checkpoint(run_dir, which="best", flag="--from").name == f"step-{best:08d}"
    assert checkpoints(run_dir) == sorted({best, 10, 12}), "a loss of the old set keeps no checkpoint"
    assert read_run_state(run_dir / "step-00000012").best_val_loss == min(losses.values())
    assert "the best validation loss starts anew" in capsys.readouterr().out


def test_before_the_first_validation_nothing_is_the_best(easy, run_dir, monkeypatch):
    """The last loss on the old set is not the run's last one either, even after another resume."""
    monkeypatch.setattr(Journal, "validated", Killed.now)
    for changes in ({"allow_changed": "data"}, {"allow_changed": None}):
        with pytest.raises(Killed):
            train_here(harder(easy, run_dir, eval_every=9, **changes))
        state = read_run_state(run_dir / "step-00000008")
        assert (state.best_val_loss, state.last_val_loss, state.val_loss) == (None, None, None)
        summary = read_record(run_dir)["summary"]
        assert (summary["best_val_loss"], summary["final_val_loss"]) == (None, None)
        assert not (run_dir / "best").exists()
        with pytest.raises(UserError, match=r"--which best: .* none was saved after a validation"):
            find_checkpoint(run_dir, which="best", flag="--from")
    (run_dir / "best").write_text("step-00000006\n")  # as an earlier version named it across the sets
    with pytest.raises(UserError, match=r"step-00000006, which was validated on other data than the newest"):
        find_checkpoint(run_dir, which="best", flag="--from")


def test_the_best_starts_anew_again_back_on_the_first_set(easy, run_dir, monkeypatch):
    """Checkpoints and the record agree: earlier losses on the first set count in neither."""
    before = read_lines(run_dir, "val_loss")[:3]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "validated", Killed.now)
        train_here(harder(easy, run_dir, eval_every=9))
    lowest = run_dir / "step-00000002" / "manifest.json"
    lowest.write_text(json.dumps(json.loads(lowest.read_text()) | {"val_loss": 1e-3}))
    assert train_here(harder(easy, run_dir, val_data_path=easy / "val.bin")) == 0
    best = find_checkpoint(run_dir, which="best", flag="--from")
    assert best.name > "step-00000008"
    losses = [line["val_loss"] for line in read_lines(run_dir, "val_loss")[len(before) :]]
    assert read_record(run_dir)["summary"]["best_val_loss"] == min(losses) <= parse_manifest(best).val_loss
