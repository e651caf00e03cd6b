"""Mistakes on the command line and in the input are reported together, one line each, with exit code 2."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from prep_helpers import SCRIPTS, errors


def test_all_mistakes_are_reported_together(run, tmp_path: Path, snapshot):
    done = run(
        "preprocess.py", "stray", "--inpt", "x", "--dataset", "tinystoris", "--vocab_size", "12", "--seed", "x",
        "--val_fraction", "2", "--text_key", "t", "--tokenizer", "train", cwd=tmp_path, code=2,
    )  # fmt: skip
    assert sorted(errors(done)) == snapshot
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "missing.txt"], "--input missing.txt: there is no such file or folder"),
        (["--input", "a.txt", "--dataset", "python-stdlib"], "drop one"),
        (["--input", "a.txt", "b.txt"], "--output_dir: is missing"),
        (["--input", "folder", "--output_dir", "folder"], "is the input itself"),
        (["--output_dir", "a.txt/x"], "a.txt is a file, not a folder"),
        (["--tokenizer", "./nowhere"], "--tokenizer ./nowhere: there is no such folder"),
        (["--tokenizer", "folder", "--vocab_size", "300"], "--vocab_size: the tokenizer folder has its own"),
        (["--dataset", "tinystories", "--tokenizer", "train"], "download_data.py tinystories"),
        (["--seed"], "--seed needs a value"),
        (["--input"], "--input needs a value"),
    ],
)
def test_one_mistake_is_one_line(run, tmp_path: Path, flags: list[str], message: str):
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text\n" * 9)
    (line,) = errors(run("preprocess.py", *flags, cwd=tmp_path, code=2))
    assert message in line


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.jsonl", b'{"text": "fine"}\n{"text": "torn', "bad.jsonl:2: is not valid JSON"),
        ("keys.jsonl", b'{"content": "x"}\n', "keys.jsonl:1: has no key 'text', it has 'content'"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1: is a JSON list"),
        ("number.jsonl", b'{"text": 5}\n', "number.jsonl:1: the text is a int"),
        ("half.jsonl", b'{"text": "\\ud83d"}\n', "half.jsonl:1: the text is not valid Unicode"),
        ("bad.parquet", b"no parquet", "bad.parquet: is not a readable Parquet file"),
        ("latin.txt", b"caf\xe9 au lait", "latin.txt: is not UTF-8 text (byte 3 is 0xe9)"),
        ("blank.txt", b"  \n\n", "every document is empty"),
        ("tiny.txt", b"x", "too short to be divided"),
    ],
)
def test_bad_input_names_the_place(run, tmp_path: Path, name: str, data: bytes, message: str):
    (tmp_path / name).write_bytes(data)
    (line,) = errors(run("preprocess.py", "--input", name, "--tokenizer", "train", cwd=tmp_path, code=2))
    assert message in line
    assert not list((tmp_path / "data" / Path(name).stem).glob("*.bin"))


def test_without_network_the_tokenizer_says_what_to_do(run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    started = time.monotonic()
    (line,) = errors(run("preprocess.py", "--input", "a.txt", cwd=tmp_path, code=2))
    assert time.monotonic() - started < 30
    assert "no network" in line
    assert "--tokenizer train" in line


def test_a_folder_without_a_tokenizer(run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    (tmp_path / "folder").mkdir()
    (line,) = errors(run("preprocess.py", "--input", "a.txt", "--tokenizer", "folder", cwd=tmp_path, code=2))
    assert "--tokenizer folder: is not a readable tokenizer folder" in line


@pytest.mark.parametrize("script", ["preprocess.py", "preprocess_small.py", "download_data.py"])
def test_help_has_examples(run, tmp_path: Path, script: str):
    text = run(script, "--help", cwd=tmp_path).stdout
    assert f".venv/bin/python data_prep/{script}" in text
    assert "python-stdlib" in text


def test_start_up_imports_nothing_heavy():
    program = (
        "import sys, preprocess, preprocess_small, download_data\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
