"""A request against its recipe, data and machine: how it is understood, and every way in which it is refused.

Refusals go through ``dsgpt.main.train``, which is all that ``src/gpt2.py`` calls: exit code 2, one line each, before
any model is built and before anything is written.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import (
    RECIPE,
    REPOSITORY,
    SEQUENCE,
    TOKENS,
    command_line,
    random_ids,
    write_data,
    write_recipe,
    write_tokens,
)

from dsgpt.common.errors import UserError
from dsgpt.config.compatibility import nvme_paths
from dsgpt.config.request import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.main import train
from dsgpt.runtime.topology import read_topology


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with data and a recipe."""
    write_recipe(write_data(tmp_path) / "recipe.json")
    return tmp_path


Refused = Callable[..., list[str]]


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Train with changed flags, which must fail as a user's mistake; the error lines come back, ``here`` cut off."""

    def run(**changes: Any) -> list[str]:
        before = sorted(here.rglob("*"))
        assert train(command_line(here, **changes)) == 2
        assert sorted(here.rglob("*")) == before, "a refused request wrote something"
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        lines = printed.err.splitlines()
        assert all(line.startswith("error: ") for line in lines), lines
        return [line.removeprefix("error: ").replace(f"{here}/", "") for line in lines]

    return run


def resolved(folder: Path, environment: dict[str, str] | None = None, **changes: Any) -> RunConfig:
    options, problems = parse_arguments(command_line(folder, **changes))
    return resolve(options, topology=read_topology(environment or {}), problems=problems)


# The data


def test_missing_token_file(here, refused):
    (here / "train.bin").unlink()
    assert refused() == [
        "train.bin: cannot be read (No such file or directory); make it with `python data_prep/preprocess.py`"
    ]


def test_empty_token_file(here, refused):
    (here / "val.bin").write_bytes(b"")
    assert refused() == ["val.bin: is empty; make it again with `python data_prep/preprocess.py --overwrite`"]


def test_odd_byte_count(here, refused):
    (here / "train.bin").write_bytes(b"\0" * 1001)
    assert refused() == [
        "train.bin: 1,001 bytes is no whole number of 2-byte uint16 ids; the file is cut off or is no token file"
    ]


def test_contradicting_sidecar(here, refused):
    write_tokens(here / "train.bin", random_ids(TOKENS), tokens=TOKENS - 1)
    (line,) = refused()
    assert line.startswith("train.bin: holds 641 uint16 ids but train.json says 640; one of them is from another prep")


@pytest.mark.parametrize("name", ["train", "val"])
def test_fewer_tokens_than_one_window(here, refused, name):
    write_tokens(here / f"{name}.bin", random_ids(SEQUENCE))
    assert refused() == [
        f"{name}.bin: its 16 tokens are less than one window of 16 and its target: lower --seq_length or take more text"
    ]


def test_fewer_windows_than_one_global_batch(here, refused):
    write_tokens(here / "train.bin", random_ids(7 * SEQUENCE + 1))
    assert refused() == [
        "train.bin: holds 7 windows of 16 tokens, less than one global batch of 8: lower --global_batch_size or "
        "--seq_length, or take more text"
    ]


@pytest.mark.parametrize("name", ["train", "val"])
def test_ids_beyond_the_vocabulary_name_the_largest(here, refused, name):
    ids = random_ids(TOKENS, below=100)
    ids[77] = 199
    write_tokens(here / f"{name}.bin", ids)
    other = {"train": "val", "val": "train"}[name]
    write_tokens(here / f"{other}.bin", random_ids(TOKENS, below=100))
    assert refused(vocab_size=150) == [
        f"{name}.bin: its largest id is 199, but the vocabulary ends at 149: give --vocab_size 257 or more"
    ]


def test_ids_beyond_gpt2s_vocabulary_without_a_sidecar(here, refused):
    ids = random_ids(TOKENS)
    ids[5] = 60_000
    write_tokens(here / "train.bin", ids).with_suffix(".json").unlink()
    assert refused() == [
        "train.bin: its largest id is 60000, but the vocabulary ends at 50256: give --vocab_size 60001 or more"
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_that_the_sidecar_denies_are_found_while_reading(here, capsys, workers):
    ids = random_ids(TOKENS)
    ids[-2] = 300
    write_tokens(here / "train.bin", ids)
    assert train(command_line(here, max_train_steps=5, num_workers=workers)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {here}/train.bin: holds id 300, but the model's vocabulary ends at 256"]
    assert json.loads((here / "run" / "training_metrics.json").read_text())["status"] == "failed"
    assert not (here / "run" / "RUN_COMPLETE.txt").exists()


def test_verify_data_finds_a_flipped_byte(here, refused):
    data = bytearray((here / "train.bin").read_bytes())
    data[100] ^= 1
    (here / "train.bin").write_bytes(data)
    (line,) = refused(verify_data=True)
    assert line.startswith("train.bin: its sha256 is ")
    assert "the file changed; bring the original back, or make it again with " in line


def test_verify_data_finds_ids_that_the_sidecar_denies(here, refused):
    ids = random_ids(TOKENS)
    ids[-1] = 300
    write_tokens(here / "val.bin", ids)
    assert refused(verify_data=True) == ["val.bin: its largest id is 300, but its sidecar says a vocabulary of 257"]


def test_mixed_tokenizers(here, refused):
    write_tokens(here / "train.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "1" * 64})
    write_tokens(here / "val.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "2" * 64})
    assert refused() == ["train.bin and val.bin were made with different tokenizers: prepare them together"]


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


# The run folder


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


# All together


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
        "--steps is no known flag",
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
        "error: --batch is no known flag; see --help",
        "error: --num_heads 5 does not divide --embedding_size 16: take 4 or 8 heads",
        "error: --device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu, or check nvidia-smi",
    ]


# How a request is understood


def test_a_flag_beats_the_json_and_the_json_the_default(here):
    plain = resolved(here)
    assert (plain.batch.global_batch_size, plain.steps_per_print, plain.precision) == (8, 10, "fp32")
    write_recipe(here / "recipe.json", RECIPE, steps_per_print=7, bf16={"enabled": True})
    written = resolved(here)
    assert (written.steps_per_print, written.precision) == (7, "bf16")
    asked = resolved(here, steps_per_print=3, precision="fp32", global_batch_size=4)
    assert (asked.steps_per_print, asked.precision, asked.batch.global_batch_size) == (3, "fp32", 4)


@pytest.mark.parametrize(
    ("flags", "epochs", "steps"),
    [
        ({"max_train_steps": None}, 1, 5),
        ({"max_train_steps": None, "epochs": 3}, 3, 15),
        ({"max_train_steps": 12}, 3, 12),
        ({"max_train_steps": 12, "epochs": 2}, 2, 10),
        ({"max_train_steps": 4, "epochs": 2}, 1, 4),
        ({"max_train_steps": None, "global_batch_size": 16}, 1, 2),
        ({"max_train_steps": None, "seq_length": 8}, 1, 10),
    ],
)
def test_length_of_a_run(here, flags, epochs, steps):
    config = resolved(here, **flags)
    assert (config.epochs, config.total_steps) == (epochs, steps)


def test_dropped_windows_are_said(here):
    (notice,) = (line for line in resolved(here, global_batch_size=16).notices if "drops" in line)
    assert notice == "each epoch drops the last 8 of its 40 shuffled windows: they fill no global batch"
    assert not any("drops" in line for line in resolved(here).notices)


def test_validation_length(here):
    assert resolved(here).val_windows == 10
    assert resolved(here, max_val_steps=1).val_windows == 8
    assert resolved(here, max_val_steps=9).val_windows == 10


def test_vocabulary_comes_from_the_data(here):
    assert resolved(here).model.vocab_size == 257
    assert resolved(here, vocab_size=300).model.vocab_size == 300
    (here / "train.json").unlink()
    config = resolved(here)
    assert config.model.vocab_size == 50_257
    assert f"{here}/train.bin: has no train.json beside it; read as uint16 ids" in config.notices


def test_a_smaller_vocabulary_is_taken_where_the_ids_fit(here):
    write_tokens(here / "train.bin", random_ids(TOKENS, below=100))
    write_tokens(here / "val.bin", np.minimum(random_ids(TOKENS), 99))
    assert resolved(here, vocab_size=100).model.vocab_size == 100


def test_the_baseline_says_what_it_ignores(here):
    assert (
        f"baseline: of {here}/recipe.json, zero_optimization means nothing here and is ignored"
        in resolved(here).notices
    )
    assert not any("ignored" in notice for notice in resolved(here, run_type="optimized").notices)


def test_a_run_inside_the_warm_up_is_told(here):
    def told(steps: int) -> bool:
        notices = resolved(here, max_train_steps=steps).notices
        return any(f"ends at step {steps}, inside the" in notice for notice in notices)

    warm_up = resolved(here).recipe.scheduler.warmup_num_steps
    assert told(warm_up)
    assert not told(warm_up + 1)


def test_names_of_strategies(here):
    assert resolved(here).strategy_name == "baseline"
    assert resolved(here, run_type="optimized").strategy_name == "zero1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1, 1, "python")),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, (1, 1, 2, 2, "torchrun")),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1"},
            (3, 1, 4, 2, "deepspeed"),
        ),
    ],
)
def test_topology_from_the_launchers_variables(environment, expected):
    found = read_topology(environment)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.launcher) == expected


def test_local_rank_by_flag_or_variable():
    assert read_topology({}, local_rank_flag=3).local_rank == 3
    assert read_topology({"LOCAL_RANK": "1"}, local_rank_flag=3).local_rank == 1
    assert read_topology({}, local_rank_flag=-1).local_rank == 0


def test_ranks_keep_the_global_batch(here):
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    config = resolved(here, environment, run_type="optimized")
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (8, 2)
    assert (config.total_steps, config.order) == (resolved(here).total_steps, resolved(here).order)


def test_dry_run_shows_the_plan_and_writes_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    assert train(command_line(here, dry_run=True, model_size="tiny", num_layers=None)) == 0
    said = capsys.readouterr().out
    for part in (
        "strategy    baseline",
        "batch       8 sequences = 8 micro x 1 accumulation x 1 rank",
        "vocabulary 257 (320 with padding)",
        "641 tokens in 40 windows of 16",
        "2 optimizer steps of 128 tokens",
        "dry run",
    ):
        assert part in said
    assert sorted(here.rglob("*")) == before


def test_the_plan_says_what_a_rank_holds_and_sends(here, capsys):
    """In fp32 with AdamW: 4 bytes each of weights, gradients and two moments; one rank sends nothing."""
    shape = resolved(here, model_size="tiny", num_layers=None).model
    elements = shape.parameter_count() + (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd
    train(command_line(here, dry_run=True, model_size="tiny", num_layers=None))
    said = capsys.readouterr().out
    assert f"state       {16 * elements / 1e6:,.1f} MB of weights, gradients and optimizer per rank" in said
    assert "each step a rank sends 0.0 MB" in said


def test_any_seed_works(here):
    """Dropout draws from a stream seeded by it, and torch takes no more than 64 bits."""
    assert train(command_line(here, seed=20_260_101_123_456_789, dropout=0.1, max_train_steps=1)) == 0
    with pytest.raises(UserError):
        resolved(here, seed=-1)
