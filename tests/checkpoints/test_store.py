"""Checkpoints: the store, the state of a training, and links that are not followed."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsgpt.checkpoints import store, training_state
from dsgpt.checkpoints.manifest import Change, Epoch, RunState, parse_manifest, read_manifest, read_run_state
from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.store import find_checkpoint
from dsgpt.common.errors import UserError

# A checkpoint is complete or absent.


UNKNOWN = dict.fromkeys(each.name for each in fields(Epoch))
EPOCH = Epoch(
    **UNKNOWN
    | {"epoch_idx": 0, "steps": 5, "micro_steps": 5, "optimizer_steps": 5}
    | {"tokens_processed_global": 640, "epoch_wall_time_sec": 1.5}
)
CHANGE = Change(step=100, name="schedule", before=None, after={"type": "WarmupLR"})


def begun(run_dir: Path, step: int, *, data: bytes = b"weights") -> Path:
    folder = store.begin(run_dir, step)
    (folder / "deep").mkdir()
    (folder / "deep" / "weights.bin").write_bytes(data)
    return folder


def published(run_dir: Path, folder: Path, step: int, **values: Any) -> Path:
    state = {"samples_seen": 8 * step, "best_val_loss": 1.5, "epochs": [EPOCH], "changes": [CHANGE], "segments": []}
    about = {"strategy": "test", "fixed": values.pop("fixed", {})}
    return store.publish(run_dir, folder, state=RunState(step=step, **state | values), about=about, written={})


def saved(run_dir: Path, step: int, *, keep: int = 2, data: bytes = b"weights", **values: Any) -> Path:
    checkpoint = published(run_dir, begun(run_dir, step, data=data), step, **values)
    store.keep_newest(run_dir, count=keep)
    return checkpoint


def test_round_trip(tmp_path):
    checkpoint = saved(tmp_path, 200)
    assert checkpoint == tmp_path / "step-00000200"
    assert (tmp_path / "latest").read_text() == "step-00000200\n"
    manifest = read_manifest(checkpoint)
    assert (manifest.strategy, manifest.step) == ("test", 200)
    assert set(manifest.files) == {"deep/weights.bin", "run_state.json"}
    assert json.loads((checkpoint / "manifest.json").read_text())["files"]["deep/weights.bin"]["size"] == 7
    state = read_run_state(checkpoint)
    assert (state.step, state.samples_seen, state.best_val_loss) == (200, 1600, 1.5)
    assert (state.epochs, state.changes) == ([EPOCH], [CHANGE])


def test_the_newest_are_kept(tmp_path):
    for step in (5, 10, 100, 1000):
        saved(tmp_path, step)
    assert [path.name for path in store.checkpoints(tmp_path)] == ["step-00001000", "step-00000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000100", "step-00001000"]


def test_saving_a_step_again_replaces_it(tmp_path):
    saved(tmp_path, 5)
    checkpoint = saved(tmp_path, 5, data=b"others")
    assert (checkpoint / "deep" / "weights.bin").read_bytes() == b"others"
    read_manifest(checkpoint)


def test_an_unfinished_save_is_not_a_checkpoint_and_does_not_stop_the_next(tmp_path):
    saved(tmp_path, 5)
    (store.begin(tmp_path, 6) / "half").write_bytes(b"...")
    (tmp_path / "step-00000007").mkdir()  # no manifest
    assert [path.name for path in store.checkpoints(tmp_path)] == ["step-00000005"]
    assert not (saved(tmp_path, 6) / "half").exists()


@pytest.mark.parametrize("harm", [lambda file: file.write_bytes(b"Weights"), Path.unlink], ids=["flip", "lose"])
def test_damage_is_named(tmp_path, harm):
    checkpoint = saved(tmp_path, 5)
    harm(checkpoint / "deep" / "weights.bin")
    with pytest.raises(UserError, match=r"deep/weights\.bin: is damaged"):
        read_manifest(checkpoint)


def test_subfolders_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(store, "sync_directory", synced.append)
    saved(tmp_path, 5)
    assert store.partial_folder(tmp_path, 5) / "deep" in synced


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "deep/../../outside"])
def test_a_manifest_that_names_files_outside_is_refused(tmp_path, name):
    checkpoint = saved(tmp_path, 5)
    (tmp_path / "outside").write_bytes(b"")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"size": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"is outside of the checkpoint"):
        read_manifest(checkpoint)


def test_retention_follows_no_link(tmp_path):
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    shutil.move(saved(run_dir, 5), outside)
    (run_dir / "step-00000005").symlink_to(outside)
    saved(run_dir, 6, keep=1)
    assert [path.name for path in run_dir.glob("step-*")] == ["step-00000006"]
    read_manifest(outside)


def test_a_kill_while_removing_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path, 5)

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000006"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_second_save_of_a_step_that_is_killed_or_fails_keeps_the_first(tmp_path, monkeypatch, error):
    saved(tmp_path, 5)
    rename, ends = Path.rename, [error]

    def ended(path: Path, target: Path) -> Path:
        if target.name == "step-00000005" and ends:
            raise ends.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", ended)
    with pytest.raises(error):
        saved(tmp_path, 5, data=b"others")
    if error is KeyboardInterrupt:
        assert store.checkpoints(tmp_path) == []
        store.put_back(tmp_path)
    assert (tmp_path / "step-00000005" / "deep" / "weights.bin").read_bytes() == b"weights"
    read_manifest(tmp_path / "step-00000005")


def test_a_removed_checkpoint_is_not_renamed_back(tmp_path):
    """``--overwrite`` renames a run's checkpoints before it removes them; a kill in between must not leave them."""
    store.set_aside(saved(tmp_path, 5))
    (tmp_path / ".partial-step-00000006.replaced").symlink_to(tmp_path)  # nor a link
    store.put_back(tmp_path)
    assert list(tmp_path.glob("step-*")) == []


def test_steps_of_any_number_are_in_order(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        saved(tmp_path, step, keep=9)
    assert [int(path.name[5:]) for path in store.candidates(tmp_path)] == [100_000_000, 99_999_999, 5]


def test_old_checkpoints_are_removed_even_if_latest_cannot_be_written(tmp_path, monkeypatch):
    """On a full disk they take the space that is needed."""
    saved(tmp_path, 5)

    monkeypatch.setattr(store, "write_atomic", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, 6, keep=1)
    assert [path.name for path in store.checkpoints(tmp_path)] == ["step-00000006"]


def test_losses_on_other_validation_data_are_not_compared(tmp_path):
    """Without a loss on the newest validation set there is no best."""
    for step, loss, data, best in (
        (1, 0.5, "old", 1),
        (2, 3.0, "new", 2),
        (3, 4.0, "new", 2),
        (4, None, "newest", None),
    ):
        fixed = {"validation data": data, "validation windows": 3, "sequence length": 16}
        saved(tmp_path, step, keep=9, best_val_loss=loss, last_val_loss=loss, last_val_step=step, fixed=fixed)
        assert [path.read_text() for path in tmp_path.glob("best")] == ([f"step-{best:08}\n"] if best else [])


# The state of training in files: whole tensors in any order; unexpected ones are refused.


SHAPES = {"wte.weight": (4, 3), "wpe.weight": (2, 3), "ln_f.bias": (3,)}
SCALE = {"factor": 8.0, "step": 9, "last_overflow": -1, "patience": 2}
COUNTERS = training_state.Counters(optimizer_steps=7, loss_scale=training_state.LossScaleState(**SCALE))


def states(*, moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, training_state.ParamState]:
    torch.manual_seed(1)
    return {
        name: training_state.ParamState(torch.randn(shape), **{key: torch.randn(shape) for key in moments})
        for name, shape in SHAPES.items()
    }


def whole(values: dict[str, training_state.ParamState]) -> training_state.Shards:
    return training_state.Shards({name: [Box.whole(SHAPES[name])] for name in SHAPES}, iter(values.items()))


def written(folder: Path, values: dict[str, training_state.ParamState]) -> Path:
    folder.mkdir()
    part = training_state.write_shards(folder, whole(values), rank=0, ranks=1)
    assert part.non_finite == []
    training_state.complete_state(folder, [part], COUNTERS, shapes=SHAPES)
    return folder


@pytest.mark.parametrize("moments", [("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()], ids=len)
def test_what_was_written_is_read(tmp_path, moments):
    values = states(moments=moments)
    folder = written(tmp_path / "step", dict(reversed(values.items())))  # each strategy has its own order
    reader = training_state.StateReader(folder)
    reader.require_shapes(SHAPES)
    assert reader.counters == COUNTERS
    assert reader.has_moments == bool(moments)
    for name, state in values.items():
        for ours, theirs in zip(reader.state(name), state, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours.equal(theirs)
    assert load_file(folder / "model.safetensors").keys() == SHAPES.keys()  # safetensors' own reader accepts it too
    assert (folder / "optimizer.safetensors").exists() == bool(moments)
    assert json.loads((folder / "training_state.json").read_text()) == {"optimizer_steps": 7, "loss_scale": SCALE}


def test_a_copy_is_of_its_moment_and_its_memory_is_used_again():
    """A run may save before its first optimizer step, when there are no moments."""
    kept, values = training_state.KeptState(), states()
    kept.keep(whole(states(moments=())))
    kept.keep(whole(values))
    first = dict(kept.shards().states)
    before = values["wte.weight"].weight.clone()
    values["wte.weight"].weight.zero_()
    assert first["wte.weight"].weight.equal(before)
    for name, state in first.items():
        assert all(state.moments[key].equal(value) for key, value in values[name].moments.items())
    kept.keep(whole(values))
    again = dict(kept.shards().states)
    assert again["wte.weight"].weight.data_ptr() == first["wte.weight"].weight.data_ptr()
    assert not again["wte.weight"].weight.any()


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    values = states()
    values["wpe.weight"].weight[1, 2] = float("nan")
    assert training_state.write_shards(tmp_path, whole(values), rank=0, ranks=1).non_finite == ["wpe.weight"]


def test_another_models_tensors_are_refused(tmp_path):
    reader = training_state.StateReader(written(tmp_path / "step", states()))
    with pytest.raises(UserError, match="not those of this model"):
        reader.require_shapes(SHAPES | {"wpe.weight": (3, 3)})
    with pytest.raises(UserError, match="not those of this model"):
        reader.require_shapes({name: shape for name, shape in SHAPES.items() if name != "wpe.weight"})


def test_moments_of_other_weights_are_refused(tmp_path):
    folder = written(tmp_path / "step", states())
    moments = load_file(folder / "optimizer.safetensors")
    del moments["wpe.weight.exp_avg"]
    save_file(moments, folder / "optimizer.safetensors")
    with pytest.raises(UserError, match="not those of the weights"):
        training_state.StateReader(folder)


# No link inside a run folder or a checkpoint is followed; a path that the user names may be a link.


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


def test_a_linked_latest_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "latest").symlink_to(tmp_path / "precious")
    saved(tmp_path, 5)
    store.name_newest_and_best(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["step"] == 5
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
