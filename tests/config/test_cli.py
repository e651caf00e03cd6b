"""The command line: every flag is read and every mistake is reported; no mistake stops the reading."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.config.options import Options, parse_arguments

SCRIPT = REPOSITORY / "src" / "gpt2.py"


def mistakes(*words: str) -> list[str]:
    _, problems = parse_arguments(words)
    try:
        problems.raise_if_any()
    except UserError as error:
        return list(error.problems)
    return []


def options(*words: str) -> Options:
    found, problems = parse_arguments(words)
    problems.raise_if_any()
    return found


def test_without_flags_all_options_have_their_defaults():
    assert options() == Options()


EVERY_FLAG = {
    "run_type": "baseline",
    "train_data_path": "a.bin",
    "val_data_path": "b.bin",
    "checkpoint_path": "run",
    "deepspeed_config": "c.json",
    "model_size": "tiny",
    "init_from": "gpt2",
    "num_layers": "1",
    "num_heads": "2",
    "embedding_size": "4",
    "max_position_embeddings": "8",
    "vocab_size": "16",
    "dropout": "0.5",
    "seq_length": "7",
    "epochs": "3",
    "max_train_steps": "9",
    "max_val_steps": "5",
    "global_batch_size": "32",
    "micro_batch_size_per_gpu": "6",
    "grad_accum_steps": "11",
    "enforce_global_batch_size": None,
    "precision": "bf16",
    "device": "cpu",
    "threads_per_device": "12",
    "num_workers": "13",
    "compile": None,
    "activation_checkpointing": None,
    "steps_per_print": "14",
    "monitor_every": "2.5",
    "profile_comm": "4",
    "profile": "21",
    "eval_every": "15",
    "save_every": "17",
    "keep_checkpoints": "18",
    "save_mode": "async",
    "on_save_failure": "continue",
    "max_hours": "22.5",
    "max_cost": "23.5",
    "price_per_gpu_hour": "24.5",
    "plan": "d.json",
    "on_event": "true",
    "track": "csv,wandb",
    "seed": "19",
    "resume": None,
    "allow_changed": "data,recipe",
    "overwrite": None,
    "verify_data": None,
    "no_inference": None,
    "dry_run": None,
    "local_rank": "20",
}


def test_every_option_has_a_flag_that_is_read():
    assert set(EVERY_FLAG) == {field.name for field in fields(Options)}
    words = [word for name, value in EVERY_FLAG.items() for word in (f"--{name}", value) if word is not None]
    found = options(*words)
    for name, value in EVERY_FLAG.items():
        read = getattr(found, name)
        text = ",".join(read) if isinstance(read, tuple) else str(read)
        assert read is True if value is None else text == value, name
        assert read != getattr(Options(), name), name


def test_a_value_may_follow_an_equals_sign():
    assert options("--epochs=3", "--run_type=optimized") == Options(epochs=3, run_type="optimized")
    assert options("--max_train_steps", "1,000", "--seed", "1_000") == Options(max_train_steps=1000, seed=1000)


WRONG = [
    "--max_train_steps -5",
    "--epochs 0",
    "--epochs 1.5",
    "--epochs many",
    "--epochs=",
    "--monitor_every -1",
    "--monitor_every 0.01",
    "--monitor_every nan",
    "--eval_every -1",
    "--save_every -1",
    "--keep_checkpoints 0",
    "--num_workers -1",
    "--threads_per_device 0",
    "--seed -1",
    "--num_heads 0",
    "--dropout 1",
    "--dropout -0.1",
    "--dropout nan",
    "--dropout some",
    "--run_type base",
    "--device gpu",
    "--on_save_failure stopp",
    "--track wand",
    "--track csv,",
    "--allow_changed dat",
    "--allow_changed data,",
    "--precision fp8",
    "--model_size smal",
    "--max_steps 5",
    "--epoch 5",
    "--epoch=5",
    "--batch_size 5",
    "--lr 5",
    "--xyzzy",
    "train.bin",
    "--epochs",
    "--train_data_path --resume",
]


def test_each_mistake_is_one_line(snapshot):
    found = {line: mistakes(*line.split()) for line in WRONG}
    assert {len(lines) for lines in found.values()} == {1}
    assert {line: lines[0] for line, lines in found.items()} == snapshot


def test_all_mistakes_are_reported_together_and_the_rest_is_read():
    words = ["--epochs", "--seq_length", "x", "stray", "--dropout", "2", "--device", "cpu", "--resum", "--seed", "5"]
    found, problems = parse_arguments(words)
    assert (found.device, found.seed, found.epochs) == ("cpu", 5, None)
    with pytest.raises(UserError) as caught:
        problems.raise_if_any()
    assert [line.split()[0] for line in caught.value.problems] == [
        "--epochs",
        "--seq_length",
        "--dropout",
        "'stray'",
        "--resum",
    ]


def test_a_value_for_a_flag_that_takes_none():
    with pytest.raises(UserError, match="--resume: ignored explicit argument 'yes'"):
        parse_arguments(["--resume=yes"])


def test_flags_are_not_abbreviated():
    """--grad_accum in a script would change its meaning with the next flag of that prefix."""
    assert mistakes("--grad_accum", "2") == ["--grad_accum is not a known flag (did you mean --grad_accum_steps?)"]


def test_help_explains_every_flag(tmp_path: Path):
    done = subprocess.run([sys.executable, SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in EVERY_FLAG:
        assert f"--{name} " in done.stdout or f"--{name}\n" in done.stdout, name
    defaults = Options()
    for name in ("seed", "save_every", "keep_checkpoints"):
        text = done.stdout.rsplit(f"--{name} N", 1)[1].split("--")[0]
        assert f"(default: {getattr(defaults, name)})" in " ".join(text.split())
