"""A tiny model with a byte-level tokenizer, and a server of it that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import BATCH, PLACES, POSITIONS, Server, ready, running
from small_run import command_line, random_ids, write_inputs, write_tokenizer, write_tokens

from dsgpt.training.command import train


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("serving"))
    tokenizer = write_tokenizer(folder / "own" / "tokenizer")
    write_tokens(folder / "own" / "train.bin", random_ids(8 * POSITIONS + 1), tokenizer=tokenizer)
    write_tokens(folder / "own" / "val.bin", random_ids(8 * POSITIONS + 1, seed=1))
    flags = {"max_position_embeddings": POSITIONS, "max_train_steps": 1, "no_inference": True}
    paths = {"train_data_path": folder / "own" / "train.bin", "val_data_path": folder / "own" / "val.bin"}
    assert train(command_line(folder, **flags, **paths)) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def server(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with small limits."""
    log = tmp_path_factory.mktemp("server") / "stderr.txt"
    words = ["--max_batch", BATCH, "--max_queue", PLACES - BATCH, "--stall_timeout", 10, "--max_body_bytes", 20_000]
    with running(run_dir, *words, log=log) as started:
        yield ready(started)
