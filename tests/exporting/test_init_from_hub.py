"""``--init_from`` a name on the hub: fetched once, used from the cache after that, and refused in one line."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_script
from published import publish
from small_run import REPOSITORY, VOCABULARY, command_line, write_inputs, write_tokenizer
from stand_in_hub import hub

from dsgpt.machine.topology import free_port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data with its tokenizer, a recipe, and what a hub holds of ``gpt2`` and ``somebody/parts``."""
    write_inputs(tmp_path)
    model = publish(tmp_path / "hub" / "gpt2", vocab_size=VOCABULARY)
    write_tokenizer(tmp_path / "hub" / "tokenizer")
    (tmp_path / "hub" / "tokenizer" / "tokenizer.json").rename(tmp_path / "hub" / "gpt2" / "tokenizer.json")
    model.save_pretrained(tmp_path / "hub" / "parts", max_shard_size="20kB")
    return tmp_path


def train(folder: Path, endpoint: str, name: str, **more: Any) -> subprocess.CompletedProcess[str]:
    shape = ("num_layers", "num_heads", "embedding_size", "max_position_embeddings")
    flags = dict.fromkeys(shape) | {"init_from": name, "seq_length": 16, "max_train_steps": 1, "overwrite": True}
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
    words = command_line(folder, **flags | more)
    return run_script(REPOSITORY / "src" / "gpt2.py", words, environment=environment, cwd=folder)


def test_a_name_is_fetched_once(folder):
    with hub({"gpt2": folder / "hub" / "gpt2", "somebody/parts": folder / "hub" / "parts"}) as (endpoint, asked):
        done = train(folder, endpoint, "gpt2")
        assert done.returncode == 0, done.stderr
        fetched = [line.rpartition("/")[2] for line in asked if line.startswith("GET") and "/resolve/" in line]
        assert sorted(fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
        done = train(folder, endpoint, "somebody/parts", dry_run=True)
        assert done.returncode == 0, done.stderr
        done = train(folder, endpoint, "nobody/nothing", dry_run=True)
        assert (done.returncode, done.stderr) == (
            2,
            "error: --init_from nobody/nothing: is neither a folder here nor a readable model on the hub\n",
        )
    done = train(folder, endpoint, "gpt2")  # the hub is gone, the cache is not
    assert done.returncode == 0, done.stderr
    assert "start       from the weights of gpt2" in done.stdout


def test_no_network_is_one_line(folder):
    endpoint = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    done = train(folder, endpoint, "gpt2")
    assert time.monotonic() - started < 60, "a library retried"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --init_from gpt2: no network, {endpoint} does not answer (")
    assert done.stderr.count("\n") == 1
