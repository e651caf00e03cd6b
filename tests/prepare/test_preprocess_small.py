"""preprocess_small.py: the first documents, in the full set's folder and with its tokenizer."""

import shutil
from pathlib import Path

from prep_helpers import documents_of, errors, hashes

from dsgpt.data.token_file import open_token_file


def test_small_files_are_the_beginnings_of_the_full_ones(run, prepared: Path, corpus: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(prepared, out)
    before = hashes(out)
    flags = ["--input", corpus, "--tokenizer", "train", "--output_dir", out]
    run("preprocess_small.py", *flags, "--vocab_size", 400, "--num_documents", 8, cwd=tmp_path)
    for split, count in (("train", 7), ("val", 1)):
        assert documents_of(out, split, "_small") == documents_of(out, split)[:count]
        small, full = (open_token_file(out / f"{split}{suffix}.bin").sidecar for suffix in ("_small", ""))
        assert small.tokenizer == full.tokenizer
    assert hashes(out) == before

    (line,) = errors(
        run(
            "preprocess_small.py",
            *flags,
            "--vocab_size",
            300,
            "--num_documents",
            8,
            "--overwrite",
            cwd=tmp_path,
            code=2,
        )
    )
    assert "belongs to train.bin" in line
    assert "--output_dir" in line
    assert hashes(out) == before


def test_full_files_are_the_same_after_small_ones(run, prepared: Path, corpus: Path, tmp_path: Path):
    flags = ["--input", corpus, "--tokenizer", "train", "--vocab_size", 400, "--output_dir", "out"]
    run("preprocess_small.py", *flags, "--num_documents", 5, cwd=tmp_path)
    assert not (tmp_path / "out" / "train.bin").exists()
    run("preprocess.py", *flags, cwd=tmp_path)
    assert hashes(tmp_path / "out") == hashes(prepared)
    done = run("preprocess_small.py", *flags, "--num_documents", 5, cwd=tmp_path)
    assert "already prepared" in done.stdout


def test_number_of_documents_is_checked(run, tmp_path: Path):
    for flags, message in (
        ([], "--num_documents: is missing"),
        (["--num_documents", "1"], "--num_documents must be a whole number of at least 2, not 1"),
    ):
        (line,) = errors(run("preprocess_small.py", *flags, cwd=tmp_path, code=2))
        assert message in line
