"""Requests that cannot be trained are refused, with one line per mistake.

The tests call ``dsgpt.training.command.train``, as ``src/gpt2.py`` does. It exits with code 2 before a
model is built and before anything is written.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from requests_here import resolved
from small_run import RECIPE, REPOSITORY, command_line, random_ids, write_recipe, write_tokens

from dsgpt.config import compatibility
from dsgpt.config import options as trackers
from dsgpt.config.compatibility import nvme_paths
from dsgpt.training.command import train

Refused = Callable[..., list[str]]


# The recipe


def test_unknown_json_key(here, refused):
    write_recipe(here / "recipe.json", RECIPE, train_batch=8)
    (line,) = refused()
    assert line == "recipe.json: train_batch is not a known key (did you mean train_batch_size?)"


def test_json_that_does_not_parse(here, refused, snapshot):
    write_recipe(here / "recipe.json", '{"train_batch_size": 8')
    assert refused() == snapshot


@pytest.mark.parametrize("text", ["[]", "5", '"zero1"', "null", "[[1, 2], {}]"])
def test_json_of_another_kind(here, refused, text):
    write_recipe(here / "recipe.json", text)
    (line,) = refused()
    assert line.startswith("--deepspeed_config recipe.json: must be an object in braces, not ")


def test_batch_that_is_not_divisible(here, refused, snapshot):
    assert refused(micro_batch_size_per_gpu=3) == snapshot


def test_nvme_offload_swaps_into_the_run_folder_unless_the_recipe_names_another(here):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "x"}}
    write_recipe(here / "recipe.json", RECIPE, zero_optimization=zero)
    config = resolved(here, run_type="optimized")
    assert config.strategy_name == "zero3-nvme"
    assert nvme_paths(config.recipe, config.run_dir) == {
        "offload_optimizer": config.run_dir,
        "offload_param": Path("x"),
    }


def test_nvme_offload_below_stage_3(here, refused, snapshot):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    write_recipe(here / "recipe.json", RECIPE, zero_optimization=zero)
    assert refused(run_type="optimized") == snapshot


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


def test_heads_that_do_not_divide_the_width(refused, snapshot):
    assert refused(num_heads=3) == snapshot


def test_negative_steps(refused, snapshot):
    assert refused(max_train_steps=-5) == snapshot


def test_sequences_longer_than_the_positions(refused, snapshot):
    assert refused(seq_length=17) == snapshot


def test_resume_with_overwrite(refused, snapshot):
    assert refused(resume=True, overwrite=True) == snapshot


def test_fp16_needs_a_gpu(here, refused, snapshot):
    assert refused(precision="fp16") == snapshot
    write_recipe(here / "recipe.json", RECIPE, fp16={"enabled": True})
    assert refused() == snapshot
    assert resolved(here, precision="fp32").precision == "fp32"


def test_baseline_under_a_launcher(refused, monkeypatch, snapshot):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refused() == snapshot


def test_ranks_that_do_not_divide_the_batch(refused, monkeypatch, snapshot):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert refused(run_type="optimized") == snapshot


def test_required_flags(capsys):
    assert train([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is missing: give ")[0] for line in lines] == [
        "error: --run_type",
        "error: --train_data_path",
        "error: --val_data_path",
        "error: --deepspeed_config",
    ]


def test_run_folder_below_a_file(here, refused, snapshot):
    (here / "file").write_text("")
    assert refused(checkpoint_path=here / "file" / "run") == snapshot


def test_run_folder_that_is_a_file(here, refused):
    (line,) = refused(checkpoint_path=here / "train.bin")
    assert line == "--checkpoint_path train.bin: train.bin is a file, not a folder: name another folder"


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


def test_a_mistake_in_the_recipe_hides_no_mistake_elsewhere(here, refused, monkeypatch, snapshot):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    write_recipe(here / "recipe.json", RECIPE, gradient_cliping=1, scheduler={}, zero_optimization={"stage": 3})
    found = refused(run_type="optimized", compile=True)
    assert len(found) == 4
    assert found == snapshot


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


def test_the_command_itself(here):
    """As a user runs it. GPUs are hidden."""
    words = command_line(here, device="cuda", num_heads=5, batch=3)
    done = subprocess.run(
        [sys.executable, REPOSITORY / "src" / "gpt2.py", *words],
        cwd=here,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: --batch is not a known flag; see --help",
        "error: --num_heads 5 does not divide --embedding_size 16: take 4 or 8 heads",
        "error: --device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu, or check nvidia-smi",
    ]


def test_a_size_that_fits_no_head_hides_no_mistake_in_the_batch(here, refused, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    write_recipe(here / "recipe.json", sequence_parallel_size=4)
    found = refused(run_type="optimized", micro_batch_size_per_gpu=3)
    assert any("sequence_parallel_size 4 does not divide" in line for line in found), found
    assert any(line.startswith("micro batch 3 ") for line in found), found


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
