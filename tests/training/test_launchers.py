"""One script under python, deepspeed and torchrun; a user's mistake is one line from one rank."""

import os
import re
import subprocess

import pytest
from forked_ranks import run_script
from training_runs import SCRIPT, assert_same_training, data_flags, finished, read_record, train, write_recipe

from dsgpt.machine.launcher import launcher_command

STEPS = ("--max_train_steps", "4", "--max_val_steps", "2")


def test_torchrun_trains_what_the_baseline_trains(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    finished(train(tmp_path / "baseline", corpus, recipe, *STEPS))
    finished(train(tmp_path / "torchrun", corpus, recipe, *STEPS, ranks=2, by="torchrun"))
    assert_same_training(tmp_path / "baseline", tmp_path / "torchrun", loss=2e-4, norm=1e-4)
    record = read_record(tmp_path / "torchrun")
    assert (record["hardware"]["world_size"], record["hardware"]["launcher"]) == (2, "torchrun")
    assert "train_micro_batch_size_per_gpu" not in record["deepspeed_config"]["given"]
    assert record["deepspeed_config"]["resolved"]["train_micro_batch_size_per_gpu"] == 4
    assert record["deepspeed_config"]["resolved"]["gradient_accumulation_steps"] == 1
    assert read_record(tmp_path / "baseline")["deepspeed_config"]["resolved"] is None


def test_data_workers_do_not_change_the_training(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    finished(train(tmp_path / "none", corpus, recipe, *STEPS))
    finished(train(tmp_path / "two", corpus, recipe, *STEPS, "--num_workers", "2"))
    assert_same_training(tmp_path / "none", tmp_path / "two", loss=0, norm=0)


@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_a_mistake_is_printed_once(corpus, tmp_path, name):
    command = [*launcher_command(name, 2), SCRIPT, "--run_type", "optimized", *data_flags(corpus), "--epochs", "0"]
    command += ["--deepspeed_config", str(tmp_path / "missing.json"), "--checkpoint_path", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == (2 if name == "deepspeed" else 1)
    assert (
        len(re.findall("^error: --epochs must be a whole number of at least 1, not 0", done.stderr, re.MULTILINE)) == 1
    )
    assert done.stderr.count("missing.json: cannot be read") <= 2
    assert "gpt2.py" not in done.stderr.split("error: --epochs")[0].rpartition("Traceback")[2]
    assert not (tmp_path / "run").exists()


def test_baseline_under_a_launcher_is_refused(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    words = ["--run_type", "baseline", *data_flags(corpus), "--deepspeed_config", str(recipe)]
    done = run_script(SCRIPT, [*words, "--checkpoint_path", str(tmp_path / "run")], ranks=2)
    assert done.returncode == 2
    assert done.stderr.count("--run_type baseline is one process, but the launcher started 2") == 1


def test_dry_run_starts_nothing(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    done = train(tmp_path / "run", corpus, recipe, *STEPS, "--dry_run", ranks=2)
    finished(done)
    for word in (
        "topology    2 x cpu",
        "batch       8 sequences = 4 micro x 1 accumulation x 2 ranks",
        "4 optimizer steps",
    ):
        assert done.stdout.count(word) == 1
    assert not (tmp_path / "run").exists()


def test_nothing_needs_a_compiler_or_an_activated_environment(corpus, tmp_path):
    """The deepspeed command by its path, with no compiler and nothing of the environment on PATH."""
    recipe = write_recipe(tmp_path / "recipe.json")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "env", "uname", "grep", "awk", "cat"):
        for folder in ("/bin", "/usr/bin"):
            if os.path.exists(f"{folder}/{name}") and not (tools / name).exists():  # noqa: PTH110
                (tools / name).symlink_to(f"{folder}/{name}")
    command = [*launcher_command("deepspeed", 2), SCRIPT]
    command += ["--run_type", "optimized", *data_flags(corpus), *STEPS, "--num_layers", "1", "--num_heads", "2"]
    command += ["--embedding_size", "16", "--max_position_embeddings", "32", "--deepspeed_config", str(recipe)]
    command += ["--checkpoint_path", str(tmp_path / "run")]
    kept = {key: value for key, value in os.environ.items() if key in {"HOME", "TMPDIR", "LANG"}}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**kept, "PATH": str(tools)}, check=False, timeout=300
    )
    finished(done)


def test_offload_without_a_compiler_is_refused(corpus, tmp_path):
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    recipe = write_recipe(tmp_path / "recipe.json", zero_optimization=offload)
    command = [*launcher_command("python", 1), SCRIPT, "--run_type", "optimized", *data_flags(corpus)]
    command += ["--deepspeed_config", str(recipe), "--checkpoint_path", str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "finds no C++ compiler: install one" in done.stderr
    assert done.stderr.count("\n") == 1
