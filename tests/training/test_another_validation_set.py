"""After ``--allow_changed data`` the best starts anew: losses on different validation sets cannot be compared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import Killed, checkpoints, record
from small_run import command_line, write_data, write_recipe, write_tokens

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import parse_manifest, read_run_state
from dsgpt.checkpoints.selection import find_checkpoint
from dsgpt.common.errors import UserError
from dsgpt.training.command import train
from dsgpt.training.journal import Journal

FLAGS = {"max_train_steps": 12, "save_every": 2, "keep_checkpoints": 9, "eval_every": 2}
"""Over epochs of 5 steps. Every checkpoint has a validation loss of its own."""


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run stopped after step 6, and ``hard.bin``, on which its model has a higher loss."""
    folder = write_data(tmp_path_factory.mktemp("easy"))
    for name, word in (("val", 17), ("hard", 1)):
        write_tokens(folder / f"{name}.bin", np.full(161, word))
    write_recipe(folder / "recipe.json")
    assert train(command_line(folder, **FLAGS)) == 0
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


def validations(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]


def test_the_best_is_chosen_on_the_new_set(easy, run_dir, capsys):
    old = [loss for step, loss in validations(run_dir) if step <= 6]
    assert train(harder(easy, run_dir, keep_checkpoints=2)) == 0
    new = validations(run_dir)[len(old) :]
    assert [step for step, _ in new] == [6, 8, 10, 12], "the loss of step 6 was one of the old set"
    losses = dict(new)
    assert min(losses.values()) > max(old)
    summary = record(run_dir)["summary"]
    assert summary["best_val_loss"] == min(losses.values())
    assert summary["final_val_loss"] == losses[12]
    assert record(run_dir)["epochs"][1]["val_loss_avg_global"] == losses[10]
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
            train(harder(easy, run_dir, eval_every=9, **changes))
        state = read_run_state(run_dir / "step-00000008")
        assert (state.best_val_loss, state.last_val_loss, state.val_loss) == (None, None, None)
        summary = record(run_dir)["summary"]
        assert (summary["best_val_loss"], summary["final_val_loss"]) == (None, None)
        assert not (run_dir / "best").exists()
        with pytest.raises(UserError, match=r"--which best: .* none was saved after a validation"):
            find_checkpoint(run_dir, which="best", flag="--from")


def test_a_best_that_an_earlier_version_named_across_sets_is_refused(easy, run_dir, monkeypatch):
    monkeypatch.setattr(Journal, "validated", Killed.now)
    with pytest.raises(Killed):
        train(harder(easy, run_dir, eval_every=9))
    (run_dir / "best").write_text("step-00000006\n")
    with pytest.raises(UserError, match=r"step-00000006, which was validated on other data than the newest"):
        find_checkpoint(run_dir, which="best", flag="--from")


def test_the_best_starts_anew_again_back_on_the_first_set(easy, run_dir, monkeypatch):
    """Checkpoints and the record agree: earlier losses on the first set count in neither."""
    validated = Journal.validated

    def killed_after_step_8(journal: Journal, **values: Any) -> None:
        (Killed.now if values["step"] > 8 else validated)(journal, **values)

    monkeypatch.setattr(Journal, "validated", killed_after_step_8)
    with pytest.raises(Killed):
        train(harder(easy, run_dir))
    monkeypatch.undo()
    lowest = run_dir / "step-00000002" / "manifest.json"
    lowest.write_text(json.dumps(json.loads(lowest.read_text()) | {"val_loss": 1e-3}))
    assert train(harder(easy, run_dir, val_data_path=easy / "val.bin")) == 0
    best = find_checkpoint(run_dir, which="best", flag="--from")
    assert best.name in {"step-00000010", "step-00000012"}
    assert parse_manifest(best).val_loss == min(dict(validations(run_dir)[-2:]).values())
    assert record(run_dir)["summary"]["best_val_loss"] <= parse_manifest(best).val_loss


def test_the_same_set_keeps_its_best(easy, run_dir):
    before = dict(validations(run_dir))
    assert set(store.VALIDATED_ON) <= parse_manifest(run_dir / "step-00000006").fixed.keys()
    assert train(harder(easy, run_dir, val_data_path=easy / "val.bin", allow_changed="recipe")) == 0
    assert dict(validations(run_dir)) == before
    assert record(run_dir)["summary"]["best_val_loss"] == min(before.values())
