"""Mistakes on the command line and in the input: all together, one line each, exit 2, and quickly."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from prep_helpers import SCRIPTS, errors

from dsgpt.prepare.options import DATASETS


def test_all_mistakes_are_reported_together(run, tmp_path: Path):
    done = run(
        "preprocess.py", "stray", "--inpt", "x", "--dataset", "tinystoris", "--vocab_size", "12", "--seed", "x",
        "--val_fraction", "2", "--text_key", "t", "--tokenizer", "train", cwd=tmp_path, code=2,
    )  # fmt: skip
    lines = errors(done)
    assert sorted(lines) == sorted(
        f"error: {line}"
        for line in (
            "--inpt is not a known flag (did you mean --input?)",
            "'stray' is neither a flag nor the value of one",
            f"--dataset must be one of {', '.join(DATASETS)}, not tinystoris (did you mean tinystories?)",
            "--vocab_size must be a whole number of at least 257, not 12",
            "--seed must be a whole number of at least 0, not x",
            "--val_fraction must be a number above 0 and below 1, such as 0.05, not 2",
            "--text_key: only the files of --input have keys to choose from; leave it out",
        )
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
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
def test_one_mistake_is_one_line(run, tmp_path: Path, flags: list[str], said: str):
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text\n" * 9)
    (line,) = errors(run("preprocess.py", *flags, cwd=tmp_path, code=2))
    assert said in line


@pytest.mark.parametrize(
    ("name", "data", "said"),
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
def test_bad_input_names_the_place(run, tmp_path: Path, name: str, data: bytes, said: str):
    (tmp_path / name).write_bytes(data)
    (line,) = errors(run("preprocess.py", "--input", name, "--tokenizer", "train", cwd=tmp_path, code=2))
    assert said in line
    assert not list((tmp_path / "data" / Path(name).stem).glob("*.bin"))


def test_without_network_the_tokenizer_says_what_to_do(run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    started = time.monotonic()
    (line,) = errors(run("preprocess.py", "--input", "a.txt", cwd=tmp_path, code=2))
    assert time.monotonic() - started < 30
    assert "no network" in line
    assert "--tokenizer train" in line


def test_folder_that_is_no_tokenizer(run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    (tmp_path / "folder").mkdir()
    (line,) = errors(run("preprocess.py", "--input", "a.txt", "--tokenizer", "folder", cwd=tmp_path, code=2))
    assert "--tokenizer folder: is not a readable tokenizer folder" in line


@pytest.mark.parametrize("script", ["preprocess.py", "preprocess_small.py", "download_data.py"])
def test_help_teaches(run, tmp_path: Path, script: str):
    text = run(script, "--help", cwd=tmp_path).stdout
    assert f"python data_prep/{script}" in text
    assert "python-stdlib" in text


def test_start_up_imports_nothing_heavy():
    program = (
        "import sys, preprocess, preprocess_small, download_data\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
