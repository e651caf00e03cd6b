"""Requests that cannot be trained are refused before anything is written; most are in tests/goldens/refusals.txt."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_files import resolved
from small_run import RECIPE, TOKENS, command_line, random_ids, write_recipe, write_tokens

from dsgpt.config import compatibility
from dsgpt.config import options as trackers
from dsgpt.config.compatibility import nvme_paths
from dsgpt.training.command import train

# Requests that cannot be trained are refused, with one line per mistake.


Refused = Callable[..., list[str]]


# The recipe


def test_nvme_offload_swaps_into_the_run_folder_unless_the_recipe_names_another(here):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "x"}}
    write_recipe(here / "recipe.json", RECIPE, zero_optimization=zero)
    config = resolved(here, run_type="optimized")
    assert config.strategy_name == "zero3-nvme"
    assert nvme_paths(config.recipe, config.run_dir) == {
        "offload_optimizer": config.run_dir,
        "offload_param": Path("x"),
    }


def test_offload_needs_a_compiler_unless_torch_steps(here, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(here / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    recipe = copy.deepcopy(RECIPE) | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    write_recipe(here / "recipe.json", recipe)
    (line,) = refused(run_type="optimized")
    assert "finds no C++ compiler: install one" in line
    recipe["optimizer"]["params"]["torch_adam"] = True
    write_recipe(here / "recipe.json", recipe)
    assert resolved(here, run_type="optimized").recipe.optimizer.torch_adam


def test_compile_needs_a_compiler(here, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(here / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    (line,) = refused(compile=True)
    assert line.startswith("--compile needs a C++ compiler, and none was found")


# The flags


def test_run_folder_that_cannot_be_written(refused):
    """Not even root can create a folder in /proc."""
    (line,) = refused(checkpoint_path="/proc/runs/a")
    assert line.startswith("--checkpoint_path /proc/runs/a: ")
    assert line.endswith(": name another folder")


def test_an_existing_run_is_kept_without_overwrite(here, refused, snapshot):
    assert train(command_line(here, save_every=0)) == 0
    assert refused() == snapshot
    assert train(command_line(here, overwrite=True, max_train_steps=1)) == 0
    assert [path.name for path in (here / "run").glob("step-*")] == ["step-00000001"]


def test_files_of_others_in_the_folder_are_never_deleted(here):
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    assert train(command_line(here, overwrite=True, max_train_steps=1)) == 0
    assert (here / "run" / "notes.txt").read_text() == "mine"


def test_all_mistakes_in_flags_json_and_data_are_reported_together(here, refused):
    write_tokens(here / "train.bin", random_ids(9))
    (here / "val.bin").unlink()
    write_recipe(here / "recipe.json", {"train_batch_size": 7, "optimizer": {"type": "AdamW", "params": {}}, "amp": {}})
    found = refused(
        num_heads=3,
        epochs=0,
        precision="fp16",
        seq_length=17,
        resume=True,
        overwrite=True,
        steps=5,
        checkpoint_path=None,
        embedding_size=16,
    )
    parts = (
        "--epochs must be",
        "--steps is not a known flag",
        "--resume continues",
        "recipe.json: amp is not supported",
        "recipe.json: optimizer: params: lr is missing",
        "val.bin: cannot be read",
        "--num_heads 3 does not divide",
        "--precision fp16 needs a GPU",
        "train.bin: its 9 tokens are fewer",
    )
    for part in parts:
        assert sum(line.startswith(part) for line in found) == 1, (part, found)
    assert len(found) == len(parts), found


NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}}


@pytest.mark.parametrize(
    ("ranks", "changes", "flags"),
    [
        (1, {"train_batch_size": "8"}, {}),
        (16, {"tensor_parallel": {"autotp_size": "2"}}, {"num_heads": 4}),
        (16, {"tensor_parallel": {"autotp_siz": 2}}, {"num_heads": 4}),
        (2, {"pipeline": {"stages": 2}, "zero_optimization": {"stage": "1"}}, {"precision": "bf16"}),
        (1, {"zero_optimization": NVME, "aio": {"block_size": 4096}}, {}),
    ],
)
def test_what_follows_from_a_mistake_in_the_recipe_is_not_reported(here, refused, monkeypatch, ranks, changes, flags):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)
    probes = {"compiler": ("g++",), "libaio_problem": "", "direct_io_problem": "has no O_DIRECT", "may_lock": True}
    for name, value in probes.items():
        monkeypatch.setattr(compatibility, name, lambda *given, value=value: value)
    write_recipe(here / "recipe.json", RECIPE, **changes)
    (line,) = refused(run_type="optimized", **flags)
    assert line.startswith(f"recipe.json: {next(iter(changes)) if ranks != 2 else 'zero_optimization'}")


def test_a_misspelt_batch_size_is_one_mistake(here, refused):
    recipe = {("train_batch_siez" if key == "train_batch_size" else key): value for key, value in RECIPE.items()}
    write_recipe(here / "recipe.json", recipe)
    (line,) = refused()
    assert "did you mean train_batch_size?" in line


# Trackers


def test_trackers_that_are_not_installed_are_reported_with_everything_else(here, refused, monkeypatch, snapshot):
    for package in ("wandb", "sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert refused(track="wandb,csv,mlflow", micro_batch_size_per_gpu=3) == snapshot


def test_a_folder_of_the_name_of_a_package_is_no_package(here, refused, monkeypatch):
    """Such as the folder ``wandb`` that Weights & Biases makes where a program runs."""
    (here / "leftovers").mkdir()
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(trackers.PACKAGES, "csv", ("leftovers",))
    assert "needs leftovers, not installed here" in refused(track="csv")[0]


# Unusable token files are refused before a model is built and before anything is written.


def test_ids_beyond_gpt2s_vocabulary_without_a_sidecar(here, refused, snapshot):
    ids = random_ids(TOKENS)
    ids[5] = 60_000
    write_tokens(here / "train.bin", ids).with_suffix(".json").unlink()
    assert refused() == snapshot


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_that_contradict_the_sidecar_are_found_while_reading(here, capsys, workers):
    ids = random_ids(TOKENS)
    ids[-2] = 300
    write_tokens(here / "train.bin", ids)
    assert train(command_line(here, max_train_steps=5, num_workers=workers)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {here}/train.bin: holds id 300, but the model's vocabulary ends at 256"]
    assert json.loads((here / "run" / "training_metrics.json").read_text())["status"] == "failed"
    assert not (here / "run" / "RUN_COMPLETE.txt").exists()


def test_verify_data_finds_ids_that_contradict_the_sidecar(here, refused, snapshot):
    ids = random_ids(TOKENS)
    ids[-1] = 300
    write_tokens(here / "val.bin", ids)
    assert refused(verify_data=True) == snapshot


def test_mixed_tokenizers(here, refused, snapshot):
    write_tokens(here / "train.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "1" * 64})
    write_tokens(here / "val.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "2" * 64})
    assert refused() == snapshot
