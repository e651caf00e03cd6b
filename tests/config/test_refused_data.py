"""Unusable token files are refused before a model is built and before anything is written."""

import json
from collections.abc import Callable

import pytest
from small_run import SEQUENCE, TOKENS, command_line, random_ids, write_tokens

from dsgpt.training.command import train

Refused = Callable[..., list[str]]


def test_missing_token_file(here, refused, snapshot):
    (here / "train.bin").unlink()
    assert refused() == snapshot


def test_empty_token_file(here, refused, snapshot):
    (here / "val.bin").write_bytes(b"")
    assert refused() == snapshot


def test_odd_byte_count(here, refused, snapshot):
    (here / "train.bin").write_bytes(b"\0" * 1001)
    assert refused() == snapshot


def test_contradicting_sidecar(here, refused):
    write_tokens(here / "train.bin", random_ids(TOKENS), tokens=TOKENS - 1)
    (line,) = refused()
    assert line.startswith("train.bin: holds 641 uint16 ids but train.json says 640; one of them is from another prep")


@pytest.mark.parametrize("name", ["train", "val"])
def test_fewer_tokens_than_one_window(here, refused, name, snapshot):
    write_tokens(here / f"{name}.bin", random_ids(SEQUENCE))
    assert refused() == snapshot


def test_fewer_windows_than_one_global_batch(here, refused, snapshot):
    write_tokens(here / "train.bin", random_ids(7 * SEQUENCE + 1))
    assert refused() == snapshot


@pytest.mark.parametrize("name", ["train", "val"])
def test_ids_beyond_the_vocabulary_name_the_largest(here, refused, name, snapshot):
    ids = random_ids(TOKENS, below=100)
    ids[77] = 199
    write_tokens(here / f"{name}.bin", ids)
    other = {"train": "val", "val": "train"}[name]
    write_tokens(here / f"{other}.bin", random_ids(TOKENS, below=100))
    assert refused(vocab_size=150) == snapshot


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


def test_verify_data_finds_a_flipped_byte(here, refused):
    data = bytearray((here / "train.bin").read_bytes())
    data[100] ^= 1
    (here / "train.bin").write_bytes(data)
    (line,) = refused(verify_data=True)
    assert line.startswith("train.bin: its sha256 is ")
    assert "the file changed; bring the original back, or make it again with " in line


def test_verify_data_finds_ids_that_contradict_the_sidecar(here, refused, snapshot):
    ids = random_ids(TOKENS)
    ids[-1] = 300
    write_tokens(here / "val.bin", ids)
    assert refused(verify_data=True) == snapshot


def test_mixed_tokenizers(here, refused, snapshot):
    write_tokens(here / "train.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "1" * 64})
    write_tokens(here / "val.bin", random_ids(TOKENS), tokenizer={"name": "a", "sha256": "2" * 64})
    assert refused() == snapshot
