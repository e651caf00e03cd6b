"""preprocess.py: what is written, byte for byte, and what happens the second time, or when it is killed."""

import hashlib
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from prep_helpers import CORPUS, OUTPUTS, documents_of, errors, hashes
from pyarrow import parquet
from small_run import REPOSITORY, write_tokenizer
from transformers import AutoTokenizer

from dsgpt.common.errors import UserError
from dsgpt.data.preparation import locked_folder
from dsgpt.data.token_file import open_token_file


def test_every_document_comes_back_byte_for_byte(prepared: Path):
    train, val = (documents_of(prepared, split) for split in ("train", "val"))
    assert train
    assert val
    assert sorted(text.encode() for text in train + val) == sorted(text.encode() for text in CORPUS.values())


@pytest.mark.parametrize("split", ["train", "val"])
def test_sidecar_describes_the_file(prepared: Path, split: str):
    file = open_token_file(prepared / f"{split}.bin")
    sidecar = file.sidecar
    ids = np.memmap(file.path, dtype=np.uint16, mode="r")
    assert not file.inferred
    assert sidecar.dtype == "uint16"
    assert sidecar.vocab_size <= 400
    assert sidecar.tokens == len(ids)
    assert ids.max() < sidecar.vocab_size
    assert sidecar.documents == np.count_nonzero(ids == sidecar.eot_id)
    assert sidecar.sha256 == hashlib.sha256(file.path.read_bytes()).hexdigest()
    assert sidecar.source == "corpus"
    tokenizer = (prepared / "tokenizer" / "tokenizer.json").read_bytes()
    assert asdict(sidecar.tokenizer) == {"name": "tokenizer", "sha256": hashlib.sha256(tokenizer).hexdigest()}


def test_tokenizer_is_a_hugging_face_folder(prepared: Path):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == open_token_file(prepared / "train.bin").sidecar.eot_id
    assert tokenizer.model_max_length == 1024
    assert len(tokenizer) == open_token_file(prepared / "train.bin").sidecar.vocab_size


def test_nothing_unfinished_or_private_is_left(prepared: Path, corpus: Path):
    names = {path.name for path in prepared.iterdir()}
    sidecars = {"train.json", "val.json", "preparation.json"}
    assert names == {"train.bin", "val.bin", "tokenizer", *sidecars}
    for path in [*prepared.glob("*.json"), *prepared.glob("tokenizer/*.json")]:
        assert str(corpus.parent) not in path.read_text(encoding="utf-8")


def test_second_run_keeps_and_other_options_are_refused(run, corpus: Path, tmp_path: Path):
    flags = ["--input", corpus, "--tokenizer", "train", "--vocab_size", 300, "--output_dir", "out"]
    run("preprocess.py", *flags, cwd=tmp_path)
    first = hashes(tmp_path / "out")
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in OUTPUTS}

    done = run("preprocess.py", *flags, cwd=tmp_path)
    assert "already prepared" in done.stdout
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in OUTPUTS} == times

    done = run("preprocess.py", *flags, "--seed", 1, "--val_fraction", 0.5, cwd=tmp_path, code=2)
    (line,) = errors(done)
    assert "--seed was 1337, is 1" in line
    assert "--val_fraction was None, is 0.5" in line
    assert "--overwrite" in line
    assert hashes(tmp_path / "out") == first

    run("preprocess.py", *flags, "--overwrite", cwd=tmp_path)
    assert hashes(tmp_path / "out") == first, "two runs of the same command must write the same bytes"


def test_changed_input_is_refused(run, prepare_here, bytes_tokenizer: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("one line\nanother line\n" * 20)
    flags = ["--input", "text.txt", "--tokenizer", bytes_tokenizer]
    prepare_here(*flags, cwd=tmp_path)
    (tmp_path / "text.txt").write_text("one more\n" * 20)
    (line,) = errors(run("preprocess.py", *flags, cwd=tmp_path, code=2))
    assert "the input has changed" in line


def test_foreign_token_file_is_not_overwritten(run, corpus: Path, bytes_tokenizer: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.bin").write_bytes(b"\1\0")
    flags = ["--input", corpus, "--tokenizer", bytes_tokenizer, "--output_dir", out]
    (line,) = errors(run("preprocess.py", *flags, cwd=tmp_path, code=2))
    assert "train.bin" in line
    assert "--overwrite" in line
    assert (out / "train.bin").read_bytes() == b"\1\0"


def kill_while_encoding(arguments: list[str], environment: dict, cwd: Path, partial: Path) -> None:
    process = subprocess.Popen(arguments, cwd=cwd, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not partial.exists():
        assert process.poll() is None, "the process ended before it could be killed: prepare more text"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()


def test_a_kill_leaves_the_old_output_or_none(run, prepare_here, script_command, bytes_tokenizer: Path, tmp_path: Path):
    text = "".join(f"line {number} of a long text\n" for number in range(60_000))
    (tmp_path / "long.txt").write_text(text)
    flags = ["--input", "long.txt", "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    out = tmp_path / "out"
    partial = out / ".train.bin.partial"
    kill_while_encoding(*script_command("preprocess.py", *flags), tmp_path, partial)
    assert not [path for path in out.iterdir() if not path.name.startswith(".")]

    prepare_here(*flags, cwd=tmp_path)
    before = hashes(out)
    assert not partial.exists()
    kill_while_encoding(*script_command("preprocess.py", *flags, "--seed", 5, "--overwrite"), tmp_path, partial)
    assert hashes(out) == before
    assert "already prepared" in run("preprocess.py", *flags, cwd=tmp_path).stdout


def test_two_at_once_do_not_mix(tmp_path: Path):
    out = tmp_path / "out"
    with locked_folder(out), pytest.raises(UserError, match="another preparation"), locked_folder(out):
        pass
    with locked_folder(out):
        pass


def test_gpt2_vocabulary(prepare_here, corpus: Path, tmp_path: Path, capfd):
    """With the real GPT-2 tokenizer if it lies beside the checkout, otherwise with one that has the same last id."""
    shared = REPOSITORY.parent / "shared" / "data" / "gpt2-tokenizer"
    real = (shared / "vocab.json").exists()
    folder = shared if real else tmp_path / "gpt2-like"
    if not real:
        write_tokenizer(folder, size=50257)
    (tmp_path / "long.txt").write_text("Hello world" + " and more" * 3000)
    prepare_here("--input", corpus, "long.txt", "--tokenizer", folder, "--output_dir", "out", cwd=tmp_path)
    assert "longer than" not in capfd.readouterr().err
    sidecar = open_token_file(tmp_path / "out" / "train.bin").sidecar
    assert (sidecar.vocab_size, sidecar.eot_id, sidecar.dtype) == (50257, 50256, "uint16")
    texts = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
    assert len(texts) == len(CORPUS) + 1
    assert set(CORPUS.values()) <= set(texts)
    if real:
        ids = [np.fromfile(tmp_path / "out" / f"{split}.bin", "<u2").tobytes() for split in ("train", "val")]
        hello_world = np.array([50256, 15496, 995, 290, 517], "<u2").tobytes()  # as OpenAI's own encoder gives it
        assert any(hello_world in data for data in ids)


def test_large_vocabulary_takes_four_bytes(prepare_here, corpus: Path, tmp_path: Path):
    write_tokenizer(tmp_path / "large", size=70_000)
    prepare_here("--input", corpus, "--tokenizer", "large", "--output_dir", "out", cwd=tmp_path)
    sidecar = open_token_file(tmp_path / "out" / "val.bin").sidecar
    assert (sidecar.dtype, sidecar.vocab_size, sidecar.eot_id) == ("uint32", 70_000, 69_999)
    assert set(documents_of(tmp_path / "out", "val")) <= set(CORPUS.values())


def test_rows_of_json_lines_and_parquet(prepare_here, bytes_tokenizer: Path, tmp_path: Path):
    rows = [f"row {number} “quoted” \r\n" for number in range(30)]
    lines = [json.dumps({"body": text}) for text in [*rows[:15], "", "  "]] + ['{"body": null}', ""]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    parquet.write_table(pa.table({"body": [*rows[15:], None, ""], "id": range(17)}), tmp_path / "more.parquet")
    flags = ["--input", "some.jsonl", "more.parquet", "--text_key", "body", "--tokenizer", bytes_tokenizer]
    prepare_here(*flags, "--val_fraction", 0.3, "--output_dir", "out", cwd=tmp_path)
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(rows)
    assert train == [text for text in rows if text in set(train)], "documents keep their order"
    assert 2 <= len(val) <= 18


def test_lone_text_file_is_divided_at_a_line(prepare_here, bytes_tokenizer: Path, tmp_path: Path):
    text = "".join(f"line {number}\n" for number in range(1000))
    (tmp_path / "play.txt").write_text(text)
    prepare_here("--input", "play.txt", "--tokenizer", bytes_tokenizer, "--val_fraction", 0.1, cwd=tmp_path)
    (train,), (val,) = (documents_of(tmp_path / "data" / "play", split) for split in ("train", "val"))
    assert train + val == text
    assert train.endswith("\n")
    assert len(val) / len(text) == pytest.approx(0.1, abs=0.002)
