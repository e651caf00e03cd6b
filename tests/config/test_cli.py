"""The command line: every flag is read, every mistake is noted, and none stops the reading of the rest."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.config.flags import parse_arguments
from dsgpt.config.options import Options

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


def test_without_flags_every_default_is_the_options_own():
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
    "eval_every": "15",
    "save_every": "17",
    "keep_checkpoints": "18",
    "save_mode": "async",
    "on_save_failure": "continue",
    "seed": "19",
    "resume": None,
    "allow_changed": "data,recipe",
    "overwrite": None,
    "verify_data": None,
    "dry_run": None,
    "local_rank": "20",
}


def test_every_option_has_a_flag_that_is_read():
    assert set(EVERY_FLAG) == {field.name for field in fields(Options)}
    words = [word for name, value in EVERY_FLAG.items() for word in (f"--{name}", value) if word is not None]
    found = options(*words)
    for name, value in EVERY_FLAG.items():
        read = getattr(found, name)
        said = ",".join(read) if isinstance(read, tuple) else str(read)
        assert read is True if value is None else said == value, name
        assert read != getattr(Options(), name), name


def test_a_value_may_stand_behind_an_equals_sign():
    assert options("--epochs=3", "--run_type=optimized") == Options(epochs=3, run_type="optimized")
    assert options("--max_train_steps", "1,000", "--seed", "1_000") == Options(max_train_steps=1000, seed=1000)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--max_train_steps", "-5"], "--max_train_steps must be a whole number of at least 1, not -5"),
        (["--epochs", "0"], "--epochs must be a whole number of at least 1, not 0"),
        (["--epochs", "1.5"], "--epochs must be a whole number of at least 1, not 1.5"),
        (["--epochs", "many"], "--epochs must be a whole number of at least 1, not many"),
        (["--epochs="], "--epochs must be a whole number of at least 1, not "),
        (["--eval_every", "-1"], "--eval_every must be a whole number of at least 0, not -1"),
        (["--save_every", "-1"], "--save_every must be a whole number of at least 0, not -1"),
        (["--keep_checkpoints", "0"], "--keep_checkpoints must be a whole number of at least 1, not 0"),
        (["--num_workers", "-1"], "--num_workers must be a whole number of at least 0, not -1"),
        (["--threads_per_device", "0"], "--threads_per_device must be a whole number of at least 1, not 0"),
        (["--seed", "-1"], "--seed must be a whole number of at least 0, not -1"),
        (["--num_heads", "0"], "--num_heads must be a whole number of at least 1, not 0"),
        (["--dropout", "1"], "--dropout must be a number of at least 0 and below 1, not 1"),
        (["--dropout", "-0.1"], "--dropout must be a number of at least 0 and below 1, not -0.1"),
        (["--dropout", "nan"], "--dropout must be a number of at least 0 and below 1, not nan"),
        (["--dropout", "some"], "--dropout must be a number of at least 0 and below 1, not some"),
        (
            ["--run_type", "base"],
            "--run_type must be one of baseline, ddp, fsdp, optimized, not base (did you mean baseline?)",
        ),
        (["--device", "gpu"], "--device must be one of auto, cpu, cuda, not gpu"),
        (
            ["--on_save_failure", "stopp"],
            "--on_save_failure must be one of stop, continue, not stopp (did you mean stop?)",
        ),
        (
            ["--allow_changed", "dat"],
            "--allow_changed must be data or recipe, or several with commas between them, not dat",
        ),
        (
            ["--allow_changed", "data,"],
            "--allow_changed must be data or recipe, or several with commas between them, not ",
        ),
        (["--precision", "fp8"], "--precision must be one of auto, fp32, bf16, fp16, not fp8"),
        (
            ["--model_size", "smal"],
            "--model_size must be one of demo, tiny, small, medium, large, xl, not smal (did you",
        ),
        (["--max_steps", "5"], "--max_steps is not a known flag (did you mean --max_val_steps?)"),
        (["--epoch", "5"], "--epoch is not a known flag (did you mean --epochs?)"),
        (["--epoch=5"], "--epoch is not a known flag (did you mean --epochs?)"),
        (["--xyzzy"], "--xyzzy is not a known flag"),
        (["train.bin"], "'train.bin' is neither a flag nor the value of one"),
        (["--epochs"], "--epochs needs a value"),
        (["--train_data_path", "--resume"], "--train_data_path needs a value"),
    ],
)
def test_each_mistake_is_one_line(words, line):
    (found,) = mistakes(*words)
    assert found.startswith(line)


def test_mistakes_are_noted_together_and_the_rest_is_read():
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
    """A script that says --grad_accum would change its meaning with the next flag that starts so."""
    assert mistakes("--grad_accum", "2") == ["--grad_accum is not a known flag (did you mean --grad_accum_steps?)"]


def test_help_teaches_every_flag(tmp_path: Path):
    done = subprocess.run([sys.executable, SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in EVERY_FLAG:
        assert f"--{name} " in done.stdout or f"--{name}\n" in done.stdout, name
    defaults = Options()
    for name in ("seed", "save_every", "keep_checkpoints"):
        told = done.stdout.rsplit(f"--{name} N", 1)[1].split("--")[0]
        assert f"(default: {getattr(defaults, name)})" in " ".join(told.split())
