"""Requests that cannot be trained are refused, every mistake in one line.

Refusals go through ``dsgpt.main.train``, which is all that ``src/gpt2.py`` calls: exit code 2, one line each, before
any model is built and before anything is written.
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

from dsgpt.config.compatibility import nvme_paths
from dsgpt.main import train

Refused = Callable[..., list[str]]


# The recipe


def test_unknown_json_key(here, refused):
    write_recipe(here / "recipe.json", RECIPE, train_batch=8)
    (line,) = refused()
    assert line.startswith("recipe.json: train_batch is no known key (did you mean train_batch_size?")


def test_json_that_does_not_parse(here, refused):
    write_recipe(here / "recipe.json", '{"train_batch_size": 8')
    assert refused() == [
        "--deepspeed_config recipe.json: is not valid JSON: Expecting ',' delimiter: line 1 column 23 (char 22)"
    ]


@pytest.mark.parametrize("text", ["[]", "5", '"zero1"', "null", "[[1, 2], {}]"])
def test_json_of_another_kind(here, refused, text):
    write_recipe(here / "recipe.json", text)
    (line,) = refused()
    assert line.startswith("--deepspeed_config recipe.json: must be an object in braces, not ")


def test_batch_that_is_not_divisible(here, refused):
    assert refused(micro_batch_size_per_gpu=3) == [
        "micro batch 3 on 1 rank does not give the global batch of 8: take micro batch 2 with accumulation 4 or micro "
        "batch 4 with accumulation 2, or add --enforce_global_batch_size to have it chosen"
    ]


def test_nvme_offload_swaps_into_the_run_folder_unless_the_recipe_names_another(here):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "x"}}
    write_recipe(here / "recipe.json", RECIPE, zero_optimization=zero)
    config = resolved(here, run_type="optimized")
    assert config.strategy_name == "zero3-nvme"
    assert nvme_paths(config.recipe, config.run_dir) == {
        "offload_optimizer": config.run_dir,
        "offload_param": Path("x"),
    }


def test_nvme_offload_below_stage_3(here, refused):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    write_recipe(here / "recipe.json", RECIPE, zero_optimization=zero)
    assert refused(run_type="optimized") == [
        "recipe.json: zero_optimization: offload_optimizer to nvme needs ZeRO stage 3; at stages 1 and 2 take device "
        "cpu"
    ]


def test_offload_needs_a_compiler_unless_torch_does_the_work(here, refused, monkeypatch):
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


def test_heads_that_do_not_divide_the_width(refused):
    assert refused(num_heads=3) == ["--num_heads 3 does not divide --embedding_size 16: take 2 or 4 heads"]


def test_negative_steps(refused):
    assert refused(max_train_steps=-5) == ["--max_train_steps must be a whole number of at least 1, not -5"]


def test_sequences_longer_than_the_positions(refused):
    assert refused(seq_length=17) == [
        "--seq_length 17 is longer than the model's 16 positions: lower it, or add --max_position_embeddings 17"
    ]


def test_resume_with_overwrite(refused):
    assert refused(resume=True, overwrite=True) == [
        "--resume goes on with the run in the folder, --overwrite deletes it: give one of them"
    ]


def test_fp16_needs_a_gpu(here, refused):
    assert refused(precision="fp16") == ["--precision fp16 needs a GPU: on CPU take --precision bf16 or fp32"]
    write_recipe(here / "recipe.json", RECIPE, fp16={"enabled": True})
    assert refused() == ["recipe.json: fp16 needs a GPU: on CPU take --precision bf16 or fp32"]
    assert resolved(here, precision="fp32").precision == "fp32"


def test_baseline_under_a_launcher(refused, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refused() == [
        "--run_type baseline is one process, but the launcher started 2: run it with `python src/gpt2.py ...`, or take "
        "--run_type ddp, fsdp or optimized"
    ]


def test_ranks_that_do_not_divide_the_batch(refused, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert refused(run_type="optimized") == [
        "global batch 8 is not divisible by 3 ranks: take --global_batch_size 6 or 9, or 2 or 4 ranks"
    ]


def test_required_flags(capsys):
    assert train([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is missing: give ")[0] for line in lines] == [
        "error: --run_type",
        "error: --train_data_path",
        "error: --val_data_path",
        "error: --deepspeed_config",
    ]


def test_run_folder_below_a_file(here, refused):
    (here / "file").write_text("")
    assert refused(checkpoint_path=here / "file" / "run") == [
        "--checkpoint_path file/run: file is a file, not a folder: name another folder"
    ]


def test_run_folder_that_is_a_file(here, refused):
    (line,) = refused(checkpoint_path=here / "train.bin")
    assert line == "--checkpoint_path train.bin: train.bin is a file, not a folder: name another folder"


def test_run_folder_where_nobody_may_write(refused):
    """In /proc not even root may make a folder."""
    (line,) = refused(checkpoint_path="/proc/runs/a")
    assert line.startswith("--checkpoint_path /proc/runs/a: ")
    assert line.endswith(": name another folder")


def test_an_existing_run_is_not_touched_unasked(here, refused):
    assert train(command_line(here, save_every=0)) == 0
    assert refused() == [
        "--checkpoint_path run: holds a run already (training_metrics.json): add --resume to go on with it, "
        "--overwrite to delete it, or name another folder"
    ]
    assert train(command_line(here, overwrite=True, max_train_steps=1)) == 0
    assert [path.name for path in (here / "run").glob("step-*")] == ["step-00000001"]


def test_what_is_not_a_runs_is_never_deleted(here):
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    assert train(command_line(here, overwrite=True, max_train_steps=1)) == 0
    assert (here / "run" / "notes.txt").read_text() == "mine"


def test_every_mistake_of_flags_json_and_data_is_told_together(here, refused):
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
        "--resume goes on",
        "recipe.json: amp is not supported",
        "recipe.json: optimizer: params: lr is missing",
        "val.bin: cannot be read",
        "--num_heads 3 does not divide",
        "--precision fp16 needs a GPU",
        "train.bin: its 9 tokens are less",
    )
    for part in parts:
        assert sum(line.startswith(part) for line in found) == 1, (part, found)
    assert len(found) == len(parts), found


def test_the_command_itself(here):
    """As a user runs it, on a machine whose GPUs, if any, are hidden."""
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
