"""Data that changed on disk, was copied, or came without its tokenizer: noticed at the start, before any work."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import without_paths
from run_folders import errors, resume
from small_run import command_line, random_ids, write_tokenizer, write_tokens

from dsgpt.data import token_file as sidecars
from dsgpt.data.token_file import TokenFile
from dsgpt.training.command import train

CHANGED = "train.bin changed on disk since it was prepared (or was copied)"


@pytest.fixture
def here(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's data and recipe, with the times of the files, as ``cp -a`` makes it."""
    return shutil.copytree(finished_run, tmp_path / "here", ignore=shutil.ignore_patterns("run"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed during the test."""
    names, hash_file = [], TokenFile.computed_sha256

    def note(self: TokenFile, *args: Any) -> str:
        names.append(self.path.name)
        return hash_file(self, *args)

    monkeypatch.setattr(TokenFile, "computed_sha256", note)
    return names


def shuffle(path: Path, *, quietly: bool = False) -> None:
    """Shuffle a file in place; with ``quietly``, set its modification time back."""
    before = path.stat()
    ids = np.random.default_rng(7).permutation(np.fromfile(path, dtype="<u2"))
    with path.open("r+b") as file:
        file.write(ids.tobytes())
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def sidecar(folder: Path, **changes: Any) -> dict[str, Any]:
    """The contents of ``train.json``, after ``changes`` to it; ``...`` removes a key."""
    path = folder / "train.json"
    values = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not ...}
    if changes:
        path.write_text(json.dumps(values))
    return values


def test_data_as_it_was_prepared_is_not_hashed_again(here, hashed, capsys):
    assert train(command_line(here)) == 0
    assert hashed == []
    assert "hashed again" not in capsys.readouterr().out


def test_shuffled_in_place_is_refused(here, capsys):
    shuffle(here / "train.bin")
    assert train(command_line(here)) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: {here / 'train.bin'}: its sha256 is ")
    assert line.endswith("or make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`")
    assert not (here / "run").exists()


def test_shuffled_in_place_is_refused_at_a_resume(stopped, here, capsys):
    shuffle(here / "val.bin")
    assert resume(stopped, here) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: {here / 'val.bin'}: its sha256 is ")
    assert line.endswith("or make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`")


def test_a_copy_is_hashed_once(here, hashed, capsys):
    os.utime(here / "train.bin")
    sidecar(here, mixture={"a": 0.5})
    (here / "train.json").chmod(0o660)
    assert train(command_line(here, dry_run=True)) == 0
    assert f"{CHANGED}: hashed again; the sha256 is that of its sidecar" in capsys.readouterr().out
    stat = (here / "train.bin").stat()
    assert (sidecar(here)["size"], sidecar(here)["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    assert sidecar(here)["mixture"] == {"a": 0.5}, "keys of other tools stay"
    assert (here / "train.json").stat().st_mode & 0o777 == 0o660, "its permissions stay"
    assert train(command_line(here)) == 0
    assert hashed == ["train.bin"]
    assert "hashed again" not in capsys.readouterr().out


def test_a_sidecar_that_does_not_know_the_file_is_completed(here, hashed, capsys):
    """As earlier versions and other tools write it."""
    sidecar(here, size=..., mtime_ns=...)
    assert train(command_line(here, dry_run=True)) == 0
    assert "train.json does not say when train.bin was written: hashed again; the sha256 is" in capsys.readouterr().out
    assert train(command_line(here, dry_run=True)) == 0
    assert hashed == ["train.bin"]


@pytest.mark.parametrize("keeps", ["full", "link", "read-only"])
def test_a_sidecar_that_cannot_be_written_does_not_stop_the_run(here, hashed, monkeypatch, capsys, keeps):
    os.utime(here / "train.bin")
    if keeps == "link":
        (here / "train.json").rename(here / "elsewhere.json")
        (here / "train.json").symlink_to("elsewhere.json")
    else:

        def refused(path: Path, _: Any) -> None:
            raise PermissionError(13, "Permission denied", str(path)) if keeps == "read-only" else OSError(28, "full")

        monkeypatch.setattr(sidecars, "write_json_atomic", refused)
    before = (here / "train.json").read_text()
    assert train(command_line(here, dry_run=True)) == 0
    assert train(command_line(here, dry_run=True)) == 0
    assert hashed == ["train.bin", "train.bin"]
    assert capsys.readouterr().err == ""
    assert (here / "train.json").read_text() == before
    assert (here / "train.json").is_symlink() == (keeps == "link")


def test_only_verify_data_finds_a_change_with_the_old_file_time(here, hashed, capsys):
    shuffle(here / "train.bin", quietly=True)
    assert train(command_line(here, dry_run=True)) == 0
    assert hashed == []
    assert train(command_line(here, dry_run=True, verify_data=True)) == 2
    (line,) = errors(capsys)
    assert line.endswith("or make it again with `.venv/bin/python data_prep/preprocess.py --overwrite`")


def test_a_file_that_changes_while_it_is_hashed_is_refused(here, monkeypatch, capsys, snapshot):
    """Its hash belongs to no version of the file, and must not be written into the sidecar."""
    os.utime(here / "train.bin")
    before, hash_file = sidecar(here), TokenFile.computed_sha256

    def changing(self: TokenFile, *args: Any) -> str:
        computed = hash_file(self, *args)
        if self.path.name == "train.bin":
            os.utime(self.path, ns=(0, 0))
        return computed

    monkeypatch.setattr(TokenFile, "computed_sha256", changing)
    assert train(command_line(here)) == 2
    assert [without_paths(line, here) for line in errors(capsys)] == snapshot
    assert sidecar(here) == before


@pytest.mark.parametrize("lack", ["folder", "vocabulary", "all", "other"])
def test_a_missing_or_different_tokenizer_is_refused(here, hashed, capsys, snapshot, lack):
    """Otherwise a run of days would end with a model that cannot read or write text."""
    about = write_tokenizer(here / "tokenizer")
    write_tokens(here / "train.bin", random_ids(641), tokenizer=about)
    os.utime(here / "train.bin")
    if lack == "folder":
        shutil.rmtree(here / "tokenizer")
    elif lack == "other":
        (here / "tokenizer" / "tokenizer.json").write_text("{}")
    else:
        (here / "tokenizer" / "tokenizer.json").unlink()
        if lack == "all":
            (here / "tokenizer" / "tokenizer_config.json").unlink()
            sidecar(here, tokenizer=about | {"sha256": None})
    assert train(command_line(here)) == 2
    (line,) = errors(capsys)
    assert without_paths(line, here) == snapshot
    assert hashed == [], "refused before any work"
    assert not (here / "run").exists()
    sidecar(here, tokenizer=None)
    assert train(command_line(here, dry_run=True)) == 0
