"""Token files that cannot be trained on are refused before a model is built and before anything is written."""

import json
from collections.abc import Callable

import pytest
from small_run import SEQUENCE, TOKENS, command_line, random_ids, write_tokens

from dsgpt.main import train

Refused = Callable[..., list[str]]


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
        "train.bin: 1,001 bytes is not a whole number of 2-byte uint16 ids; the file is cut off or is not a token file"
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
