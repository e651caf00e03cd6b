"""Training keeps only known files of a tokenizer, and neither reads nor writes through a link in a run folder."""

import json
import shutil
from pathlib import Path

import pytest
from harmful_tokenizers import bring_code
from messages import without_paths
from run_folders import checkpoints, errors, resume
from small_run import command_line, write_inputs

from dsgpt.training.command import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data with its tokenizer, and a recipe."""
    return write_inputs(tmp_path)


def kept(folder: Path) -> set[str]:
    """What a run of one step keeps of the tokenizer."""
    assert train(command_line(folder, max_train_steps=1)) == 0
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


@pytest.mark.parametrize("linked", ["tokenizer", "tokenizer/tokenizer.json", "tokenizer/vocab.json"])
def test_a_linked_tokenizer_is_refused_at_the_start(folder, capsys, linked):
    path = folder / linked
    if path.exists():
        path.rename(folder / "moved")
    path.symlink_to(folder / "moved" if (folder / "moved").exists() else "vocab.json")
    assert train(command_line(folder, max_train_steps=1)) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: {folder}/tokenizer: ")
    assert "is a link" in line
    assert "cp -rL" in line


def test_a_tokenizer_that_brings_code_is_refused_at_the_start(folder, capsys):
    bring_code(folder / "tokenizer", marker=folder / "ran")
    assert train(command_line(folder, max_train_steps=1)) == 2
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


def test_overwriting_replaces_links(finished_run, copied_run, tmp_path):
    outside = tmp_path / "outside"
    (copied_run / "train.log").rename(outside)
    before = outside.read_bytes()
    (copied_run / "train.log").symlink_to(outside)
    assert resume(copied_run, finished_run, resume=None, overwrite=True, max_train_steps=1) == 0
    assert outside.read_bytes() == before
    assert not (copied_run / "train.log").is_symlink()


@pytest.mark.parametrize("flags", [{}, {"dry_run": True}])
def test_the_lock_is_not_made_through_a_link(finished_run, tmp_path, capsys, snapshot, flags):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".lock").symlink_to(tmp_path / "outside")
    assert train(command_line(finished_run, checkpoint_path=run_dir, max_train_steps=1, **flags)) == 2
    (line,) = errors(capsys)
    assert without_paths(line, run_dir) == snapshot
    assert not (tmp_path / "outside").exists()


def test_a_run_folder_may_itself_be_named_through_a_link(finished_run, stopped, tmp_path):
    (tmp_path / "named").symlink_to(stopped)
    assert resume(tmp_path / "named", finished_run) == 0
