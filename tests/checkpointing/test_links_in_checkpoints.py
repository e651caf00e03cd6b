"""No link inside a run folder or a checkpoint is followed; a path that the user names may be a link."""

import json
import os
import shutil
from pathlib import Path

import pytest

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import RunState, parse_manifest, read_manifest
from dsgpt.checkpoints.selection import find_checkpoint
from dsgpt.common.errors import UserError


def begun(run_dir: Path, step: int) -> Path:
    folder = store.begin(run_dir, step)
    (folder / "deep").mkdir()
    (folder / "deep" / "weights.bin").write_bytes(b"weights")
    return folder


def published(run_dir: Path, folder: Path, step: int) -> Path:
    state = RunState(step=step, samples_seen=8 * step, best_val_loss=1.5, epochs=[])
    return store.publish(run_dir, folder, state=state, about={"strategy": "test", "fixed": {}})


def saved(run_dir: Path, step: int) -> Path:
    return published(run_dir, begun(run_dir, step), step)


def test_a_manifest_names_no_links_and_only_known_files_of_a_tokenizer(tmp_path):
    folder = begun(tmp_path, 5)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (folder / "link").symlink_to(outside / "secret")
    (folder / "itself").symlink_to("itself")
    (folder / "elsewhere").symlink_to(outside)
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "planted.py"):
        (folder / "tokenizer" / name).write_text("{}")
    (folder / "tokenizer" / "vocab.json").symlink_to(outside / "secret")
    manifest = parse_manifest(published(tmp_path, folder, 5))
    assert set(manifest.files) == {"deep/weights.bin", "run_state.json", "tokenizer/tokenizer.json"}


@pytest.mark.parametrize("name", ["deep/weights.bin", "deep"])
def test_a_link_instead_of_a_file_is_damage(tmp_path, name):
    checkpoint = saved(tmp_path, 5)
    (checkpoint / name).rename(tmp_path / "moved")
    (checkpoint / name).symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match=rf"{name}: is damaged: it is a link.*cp -rL"):
        read_manifest(checkpoint)


def test_a_linked_manifest_is_refused(tmp_path):
    checkpoint = saved(tmp_path, 5)
    (checkpoint / "manifest.json").rename(tmp_path / "moved")
    (checkpoint / "manifest.json").symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match=r"manifest\.json: is a link"):
        parse_manifest(checkpoint)
    assert store.checkpoints(tmp_path) == []


def test_a_linked_checkpoint_is_followed_only_if_it_is_named(tmp_path):
    run_dir = tmp_path / "run"
    saved(run_dir, 4)
    moved = Path(shutil.move(saved(run_dir, 5), tmp_path / "moved"))
    link = run_dir / "step-00000005"
    link.symlink_to(moved)
    assert [path.name for path in store.candidates(run_dir)] == ["step-00000004"]
    with pytest.raises(UserError, match=r"step-00000005 is a link.*name the link itself"):
        find_checkpoint(run_dir, flag="--checkpoint")
    assert find_checkpoint(link, flag="--checkpoint") == link
    read_manifest(link)
    named = tmp_path / "named"
    (run_dir / "step-00000005").unlink()
    named.symlink_to(run_dir)
    assert find_checkpoint(named, flag="--checkpoint").name == "step-00000004"


def test_best_is_not_read_through_a_link(tmp_path):
    checkpoint = saved(tmp_path, 5)
    (tmp_path / "moved").write_text(f"{checkpoint.name}\n")
    (tmp_path / "best").symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match="does not say which of its checkpoints is the best"):
        find_checkpoint(tmp_path, which="best", flag="--checkpoint")


def test_a_link_is_not_renamed_back(tmp_path):
    (tmp_path / ".partial-step-00000005.replaced").symlink_to(tmp_path)
    store.put_back(tmp_path)
    assert not os.path.lexists(tmp_path / "step-00000005")


def test_a_linked_latest_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "latest").symlink_to(tmp_path / "precious")
    saved(tmp_path, 5)
    store.name_newest_and_best(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["step"] == 5
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
